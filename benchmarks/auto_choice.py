"""What `exchange="auto"` takes after `tune`, beside every fixed choice, on shaped links.

    python benchmarks/auto_choice.py --json benchmarks/results/auto_choice.jsonl
    python benchmarks/auto_choice.py --rates 1gbit --worlds 2 --sizes 4k,25M    # a quick look

On each link `tune` measures for `--tune` seconds. Then `lax.psum`, and each exchange with each
reduction that `tune` measures, take turns on one leaf at 4 bits, as in tuner.py. "auto" takes one
of these choices, and compiles to the same program. The first half of the turns decides which choice
is the best. `share` is the best choice's time divided by the time of auto's choice: the median (and
quartiles) over the second half. A cell passes with 0.95. `speeds` are psum's time divided by each
choice's time.
"""

import argparse
import itertools
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np

import cgx_jax
import measure
from all_reduce import Ranks, run
from auto import way_of
from cgx_jax.choice import auto
from cgx_jax.tuning.link_timer import gradient, size_text
from tuner import turns

CODE = cgx_jax.Quantize(4)
BAR = 0.95


def main() -> int:
    arguments = measure.parser(
        __doc__,
        rates="100mbit,1gbit,10gbit,unlimited",
        worlds="2,4",
        sizes="4k,32k,256k,1M,4M,25M",
        tune=20.0,
        seconds=5.0,
        reps=101,
    ).parse_args()
    first = arguments.rates.split(",")[0]
    cells = ((w, first, {"worlds": w}) for w in arguments.worlds.split(","))
    return run(arguments, cells, compare, line, ("links", "world", "bytes"), mpi=True)


def line(row: dict[str, Any]) -> str:
    verdict = "ok" if row["share"][1] >= BAR else "MISSED"
    return (
        f"{row['links']:>9} {row['world']} ranks {size_text(row['bytes']):>7}: auto took"
        f" {row['auto']}, the best was {row['best']}; share"
        f" {measure.spread(row['share'], '.3f')}: {verdict}"
    )


def compare(ranks: Ranks, arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Times all choices; yields one row per link and size."""
    fixed = [e.shorthand for e in auto.available()]
    choices = ["psum", *(f"{e}{r}" for e, r in itertools.product(fixed, ("", "/gather_sum")))]
    for rate in arguments.rates.split(","):
        ranks.relink(rate)
        cgx_jax.tune(ranks.mesh, "ranks", bits=(4,), budget_seconds=arguments.tune)
        for size in map(measure.size_in_bytes, arguments.sizes.split(",")):
            x = ranks.place(gradient, size // 4)
            functions = [ranks.psum]
            for exchange, _, how in (choice.partition("/") for choice in choices[1:]):
                functions.append(ranks.all_reduce(CODE, exchange, reduction=how or None))
            calls = [lambda f=f, x=x: f(x).block_until_ready() for f in functions]
            seconds = turns(ranks, calls, arguments.reps, arguments.seconds)
            half = len(seconds) // 2
            best = int(np.median(seconds[:half], axis=0).argmin())
            auto_took = taken(ranks, size // 4)
            own = choices.index(auto_took)
            yield {
                "links": rate,
                "world": ranks.world,
                "bytes": size,
                "turns": len(seconds),
                "auto": auto_took,
                "best": choices[best],
                "share": measure.quartiles(seconds[half:, best] / seconds[half:, own]),
                "speeds": {
                    name: measure.quartiles(seconds[:, 0] / column)
                    for name, column in zip(choices, seconds.T, strict=True)
                },
            }


def taken(ranks: Ranks, values: int) -> str:
    """Returns what "auto" takes for one leaf of `values` values."""
    way = way_of(ranks.world, values, CODE, "auto")
    if way is None:
        return "psum"
    once = way.reduction.shorthand == "gather_sum"
    return way.exchange.shorthand + "/gather_sum" * once


if __name__ == "__main__":
    sys.exit(main())
