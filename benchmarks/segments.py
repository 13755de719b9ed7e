"""The fused all-reduce over MPI with other segment sizes, windows and kernel threads.

    python benchmarks/segments.py --world 4 --rate 1gbit --sizes 25M

Every repeat times all settings one after the other, each by the best of three calls. `ratio` is the
defaults' time divided by the setting's time in the same repeat (median and quartiles).
"""

import argparse
import itertools
import sys
from typing import Any

import numpy as np

import cgx_jax
import measure
from all_reduce import Ranks, rank_of_process
from cgx_jax.commands import rig
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
    if rank_of_process() is None:
        command = [sys.executable, *sys.argv]
        return rig.run(arguments.world, arguments.rate, command, timeout=3600, mpi=True)
    ranks = Ranks(arguments.world)
    rows = []
    for size in map(measure.size_in_bytes, arguments.sizes.split(",")):
        rows += sweep(ranks, arguments, size)
    if ranks.first:
        measure.write_json(arguments.json, rows)
    return 0


def sweep(ranks: Ranks, arguments: argparse.Namespace, size: int) -> list[dict[str, Any]]:
    """Times every combination on one size; the defaults come first."""
    lists = (arguments.segments, arguments.windows, arguments.threads)
    names = ("segment_bytes", "window", "threads")
    settings: list[dict[str, int]] = [{}]
    for values in itertools.product(*(v.split(",") for v in lists)):
        settings.append(dict(zip(names, map(measure.size_in_bytes, values), strict=True)))
    x = ranks.place(gradient, size // 4)
    compressor = cgx_jax.Quantize(bits=arguments.bits)
    seconds = np.empty((arguments.reps, len(settings)))
    for rep in range(arguments.reps):
        for i, setting in enumerate(settings):
            exchange = Mpi(**{name: mpi.DEFAULTS[name] for name in names} | setting)
            reduce = ranks.all_reduce(compressor, exchange)
            ranks.seconds([reduce], x, 1)  # compiles, and warms the buffers up
            seconds[rep, i] = ranks.seconds([reduce], x, 3).min()
    rows = []
    for i, setting in enumerate(settings):
        ratio = measure.quartiles(seconds[:, 0] / seconds[:, i])
        row = {"bytes": size, "world": ranks.world, "links": arguments.rate, **setting}
        row |= {"seconds": float(np.median(seconds[:, i])), "ratio": ratio}
        rows.append(row)
        if ranks.first:
            low, middle, high = ratio
            text = " ".join(f"{k}={v}" for k, v in setting.items()) or "defaults"
            print(
                f"{size:>11,} {text:<45} {row['seconds'] * 1e3:8.2f} ms"
                f"  {middle:.2f} ({low:.2f}-{high:.2f})",
                flush=True,
            )
    return rows


if __name__ == "__main__":
    sys.exit(main())
