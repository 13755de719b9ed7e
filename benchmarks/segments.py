"""The fused all-reduce over MPI with other segment sizes, windows and kernel threads.

    python benchmarks/segments.py --world 4 --rate 1gbit --sizes 25M

Every repeat times all settings one after the other, each by the best of three calls. `ratio` is the
defaults' time divided by the setting's time in the same repeat (median and quartiles).
"""

import argparse
import dataclasses
import itertools
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np

import cgx_jax
import measure
from all_reduce import Ranks, run
from cgx_jax.exchanges import Mpi, mpi
from cgx_jax.tuning.link_timer import gradient


def main() -> int:
    parser = measure.parser(
        __doc__,
        world=4,
        rate="1gbit",
        sizes="25M",
        bits=4,
        segments="32k,128k,512k",
        windows="2,4,8",
        reps=7,
    )
    parser.add_argument("--threads", default="1", help="of the kernels, list (default 1)")
    arguments = parser.parse_args()
    cell = arguments.world, arguments.rate, {}
    return run(arguments, [cell], compare, line, mpi=True)


def compare(ranks: Ranks, arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Times every combination on every size; the defaults come first."""
    lists = (arguments.segments, arguments.windows, arguments.threads)
    settings: list[dict[str, int]] = [{}]
    for values in itertools.product(*(v.split(",") for v in lists)):
        settings.append(dict(zip(Mpi.tuned, map(measure.size_in_bytes, values), strict=True)))
    compressor = cgx_jax.Quantize(bits=arguments.bits)
    for size in map(measure.size_in_bytes, arguments.sizes.split(",")):
        x = ranks.place(gradient, size // 4)
        seconds = np.empty((arguments.reps, len(settings)))
        for rep in range(arguments.reps):
            for i, setting in enumerate(settings):
                exchange = dataclasses.replace(mpi.defaults(), **setting)
                reduce = ranks.all_reduce(compressor, exchange)
                ranks.seconds([reduce], x, 1)  # compiles, and warms the buffers up
                seconds[rep, i] = ranks.seconds([reduce], x, 3).min()
        for i, setting in enumerate(settings):
            row = {"bytes": size, "world": ranks.world, "links": arguments.rate, **setting}
            row["seconds"] = float(np.median(seconds[:, i]))
            yield row | {"ratio": measure.quartiles(seconds[:, 0] / seconds[:, i])}


def line(row: dict[str, Any]) -> str:
    setting = " ".join(f"{name}={row[name]}" for name in Mpi.tuned if name in row) or "defaults"
    return (
        f"{row['bytes']:>11,} {setting:<45} {row['seconds'] * 1e3:8.2f} ms"
        f"  {measure.spread(row['ratio'])}"
    )


if __name__ == "__main__":
    sys.exit(main())
