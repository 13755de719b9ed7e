"""`exchange="auto"` without a profile against lax.psum, on shaped links.

    python benchmarks/auto.py --json benchmarks/results/auto_default.jsonl     # every cell
    python benchmarks/auto.py --rates 1gbit --worlds 4 --sizes 4k,1M          # a few of them

Runs every link rate with every world size, once with ranks that MPI started and once without. With
MPI `auto` may take the fused exchange. `lax.psum` in fp32 and `auto` with every compressor are
timed as all_reduce.py times its methods. `method` is the way that `auto` took. "psum" means that
`auto` lowers to exactly the program of `lax.psum`, which the run asserts; its ratio is then noise.
Any other cell passes if its median is 0.95 or more.

`--exchange xla` or `mpi` measures that exchange at every size instead. The rule of `auto` is made
from these measurements.
"""

import argparse
import itertools
import sys
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

import cgx_jax
import measure
from all_reduce import Ranks, rank_of_process
from cgx_jax.axes import Axes
from cgx_jax.choice import auto
from cgx_jax.route.route import Options, Way, route
from cgx_jax.tuning.link_timer import gradient, size_text

BAR = 0.95
COMPRESSORS = {
    "4 bits": cgx_jax.Quantize(bits=4),
    "4 bits, rotated": cgx_jax.Quantize(bits=4, rotation=True),
    "4 bits, stochastic": cgx_jax.Quantize(bits=4, rounding="stochastic"),
    "8 bits": cgx_jax.Quantize(bits=8),
}
REPS = range(11, 202)  # repeats per size: more if a repeat is short


def main() -> int:
    parser = measure.parser(
        __doc__,
        sizes="4k,100k,1M,4M,25M",
        rates="1gbit,10gbit,unlimited",
        worlds="2,4",
        seconds=4.0,
    )
    parser.add_argument(
        "--compressors",
        default="4 bits;4 bits, rotated",
        help=f"of {list(COMPRESSORS)}, with ; between them (default %(default)s)",
    )
    parser.add_argument("--launchers", default="mpi,plain", help="(default %(default)s)")
    parser.add_argument("--exchange", default="auto", help="(default %(default)s)")
    arguments = parser.parse_args()
    lists = (arguments.rates, arguments.worlds, arguments.launchers)
    if rank_of_process() is None:
        for rate, world, launcher in itertools.product(*(x.split(",") for x in lists)):
            cell = world, rate, {"rates": rate, "worlds": world, "launchers": launcher}
            if code := measure.launch(arguments, [cell], timeout=600, mpi=launcher == "mpi"):
                return code
        return 0
    ranks = Ranks()
    how = "by mpiexec" if arguments.launchers == "mpi" else "plainly"
    if ranks.first:
        print(f"{arguments.rates}, {ranks.world} ranks, started {how}")
    rows = []
    for size in map(measure.size_in_bytes, arguments.sizes.split(",")):
        for row in compare(ranks, size // 4, arguments):
            rows.append(row)
            if ranks.first:
                print_row(row)
    if ranks.first:
        under = sum(not passes(row) for row in rows)
        print(f"{under} of {len(rows)} cells are under {BAR}")
        measure.write_json(arguments.json, rows)
    return 0


def compare(ranks: Ranks, values: int, arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Times psum and `auto` on f32[values] per rank; yields one row per compressor."""
    names = [name.strip() for name in arguments.compressors.split(";")]
    functions = [ranks.psum]
    for code in map(COMPRESSORS.__getitem__, names):
        key = jax.random.key(0) if code.needs_key else None
        functions.append(ranks.all_reduce(code, arguments.exchange, key=key))
    x = ranks.place(gradient, values)
    ranks.seconds(functions, x, 1)  # compiles
    one = float(ranks.seconds(functions, x, 2).min(axis=0).sum())
    # Every process sees the times of the slowest ranks, so all choose the same number of repeats.
    reps = int(np.clip(arguments.seconds / one, REPS[0], REPS[-1]))
    seconds = ranks.seconds(functions, x, reps)
    psum, *programs = (function.lower(x).as_text() for function in functions)
    for i, name in enumerate(names, 1):
        way = way_of(ranks.world, values, COMPRESSORS[name], arguments.exchange)
        method = "psum" if way is None else way.exchange.shorthand
        assert (programs[i - 1] == psum) == (method == "psum"), (name, method)
        yield {
            "bytes": 4 * values,
            "compressor": name,
            "exchange": arguments.exchange,
            "method": method,
            "reps": reps,
            "psum_seconds": measure.quartiles(seconds[:, 0]),
            "seconds": measure.quartiles(seconds[:, i]),
            "ratio": measure.quartiles(seconds[:, 0] / seconds[:, i]),
            "links": arguments.rates,
            "world": ranks.world,
            "launcher": arguments.launchers,
        }


def way_of(world: int, values: int, code: cgx_jax.Quantize, exchange: str) -> Way | None:
    """Returns how one leaf of `values` travels, None for `lax.psum`."""
    plan = cgx_jax.Plan.build(jax.ShapeDtypeStruct((values,), np.float32), code)
    options = Options("auto", Axes((), None, world), auto.exchange_named("auto", exchange))
    (way,) = route(options, plan).ways.values()
    return way


def passes(row: dict[str, Any]) -> bool:
    """Whether `auto` was psum itself, or at least `BAR` times as fast."""
    return row["method"] == "psum" or row["ratio"][1] >= BAR


def print_row(row: dict[str, Any]) -> None:
    verdict = "ok" if passes(row) else f"UNDER {BAR}"
    print(
        f"  {size_text(row['bytes']):>7}  {row['compressor']:<18} {row['method']:>5}"
        f" {row['reps']:>4} repeats {row['psum_seconds'][1] * 1e3:>8.2f} ->"
        f" {row['seconds'][1] * 1e3:>8.2f} ms   {measure.spread(row['ratio']):<18}"
        f" {verdict}",
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
