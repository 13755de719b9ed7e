"""gather_sum against scatter_gather, 4 KB to 4 MB, by the number of ranks, over shaped links.

    python benchmarks/one_shot.py --json benchmarks/results/one_shot.jsonl
    python benchmarks/one_shot.py --exchange mpi           # each reduction in one fused call
    python benchmarks/one_shot.py --rate none --worlds 2,4      # simulated devices: error and bytes

With "mpi" the ranks are started by mpiexec. Every repeat times `lax.psum` and both reductions one
after the other, each behind a barrier; a time is the slowest rank's. `ratio` is scatter_gather's
time divided by gather_sum's time in the same repeat: the median (and quartiles) over the repeats.
`sent` is the number of bytes that a rank sends, as the reductions compute it. `relative_error` is
the sum's relative error in the Euclidean norm.
"""

import argparse
import math
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np

import cgx_jax
import measure
from all_reduce import Ranks, rank_of_process
from cgx_jax.commands import rig
from cgx_jax.compressors.base import CodedLeaf
from cgx_jax.reductions import GatherSum, Reduction, ScatterGather
from cgx_jax.tuning.link_timer import gradient, size_text

REDUCTIONS: dict[str, Reduction] = {
    "scatter_gather": ScatterGather(),
    "gather_sum": GatherSum(),
}


def parse_arguments() -> argparse.Namespace:
    sizes = "4k,32k,256k,1M,4M"
    parser = measure.parser(__doc__, sizes=sizes, worlds="2,3,4,8", rate="1gbit", bits=4, reps=31)
    parser.add_argument(
        "--exchange", default="xla", choices=("xla", "mpi"), help="(default %(default)s)"
    )
    return parser.parse_args()


def main() -> int:
    arguments = parse_arguments()
    if rank_of_process() is None and (arguments.rate != "none" or "," in arguments.worlds):
        for world in arguments.worlds.split(","):
            command = measure.command(arguments, worlds=world)
            mpi = arguments.exchange == "mpi"
            if code := rig.run(int(world), arguments.rate, command, timeout=1800, mpi=mpi):
                return code
        return 0
    ranks = Ranks(int(arguments.worlds))
    rows = []
    for size in map(measure.size_in_bytes, arguments.sizes.split(",")):
        rows += compare(ranks, size // 4, arguments, exchange=arguments.exchange)
    if ranks.first:
        measure.write_json(arguments.json, rows)
    return 0


def compare(
    ranks: Ranks,
    values: int,
    arguments: argparse.Namespace,
    reductions: Mapping[str, Reduction] = REDUCTIONS,
    seconds_each: float = math.inf,
    exchange: str = "xla",
) -> list[dict[str, Any]]:
    """Times psum and the reductions on f32[values] per rank; returns one row per reduction.

    `ratio` compares to the first reduction. The number of repeats is what `seconds_each` seconds
    allow, at least 5 and at most `arguments.reps`.
    """
    compressor = cgx_jax.Quantize(arguments.bits)
    functions = [ranks.psum]
    for name in reductions:
        functions.append(
            ranks.collective(
                lambda x, how=name: cgx_jax.psum_compressed(
                    x, "ranks", compressor, exchange=exchange, reduction=how
                )
            )
        )
    x = ranks.place(gradient, values)
    results = [np.asarray(f(x).addressable_data(0)) for f in functions]
    # Every process sees the times of the slowest ranks, so all choose the same number of repeats.
    once = float(ranks.seconds(functions, x, 1).sum())
    seconds = ranks.seconds(functions, x, int(np.clip(seconds_each / once, 5, arguments.reps)))
    leaf = (CodedLeaf(compressor, (values,), np.dtype(np.float32), 0),)
    rows = []
    for i, (name, reduction) in enumerate(reductions.items(), 1):
        error = np.linalg.norm(results[i] - results[0]) / np.linalg.norm(results[0])
        row = {
            "bytes": 4 * values,
            "world": ranks.world,
            "links": arguments.rate,
            "bits": arguments.bits,
            "exchange": exchange,
            "reduction": name,
            "seconds": measure.quartiles(seconds[:, i]),
            "over_psum": measure.quartiles(seconds[:, 0] / seconds[:, i]),
            "ratio": measure.quartiles(seconds[:, 1] / seconds[:, i]),
            "sent": reduction.bytes_sent(leaf, ranks.world),
            "relative_error": float(error),
        }
        rows.append(row)
        if ranks.first:
            low, middle, high = row["ratio"]
            print(
                f"{ranks.world} ranks {exchange} {size_text(4 * values):>8} {name:<15}"
                f" {row['seconds'][1] * 1e3:8.2f} ms  {middle:.2f} ({low:.2f}-{high:.2f}) of"
                f" {next(iter(reductions))}'s speed, {row['over_psum'][1]:.2f} of psum's;"
                f" {row['sent']:>10,} bytes, relative error {error:.4f}",
                flush=True,
            )
    return rows


if __name__ == "__main__":
    sys.exit(main())
