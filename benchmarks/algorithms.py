"""scatter_gather, gather_sum, ring and tree, by size and number of ranks.

    python benchmarks/algorithms.py --json benchmarks/results/algorithms.jsonl
    python benchmarks/algorithms.py --reductions scatter_gather,gather_sum --exchange mpi
    python benchmarks/algorithms.py --rate none --worlds 2,4,8,64 --sizes 4k,256k,4M \\
        --json benchmarks/results/algorithms_error.jsonl

Over the shaped links every repeat times `lax.psum` and all reductions one after the other, each
behind a barrier; a time is the slowest rank's. `ratio` is the first reduction's time divided by the
reduction's time in the same repeat: the median (and quartiles) over the repeats. A size has as many
repeats as --seconds allows, between 5 and --reps. With --exchange mpi, mpiexec starts the ranks,
and scatter_gather and gather_sum are one fused call each. With --rate none, `vmap` simulates the
ranks in one program. The output then has the bytes that a rank sends and the relative error of the
sum in the Euclidean norm, but no times.
"""

import argparse
import sys
from typing import Any

import jax
import numpy as np

import cgx_jax
import measure
from all_reduce import Ranks, rank_of_process
from alpha_beta import REDUCTIONS, sent
from cgx_jax.tuning.link_timer import gradient, size_text


def parse_arguments() -> argparse.Namespace:
    return measure.parser(
        __doc__,
        sizes="4k,32k,256k,1M,4M,25M,100M,256M",
        worlds="2,4,8",
        rate="1gbit",
        bits=4,
        reps=31,
        seconds=60.0,
        exchange="xla",
        reductions=",".join(REDUCTIONS),
    ).parse_args()


def main() -> int:
    arguments = parse_arguments()
    worlds = [int(world) for world in arguments.worlds.split(",")]
    sizes = [measure.size_in_bytes(size) for size in arguments.sizes.split(",")]
    if arguments.rate == "none":
        rows = [r for w in worlds for size in sizes for r in errors(w, size // 4, arguments.bits)]
        measure.write_json(arguments.json, rows)
        return 0
    if rank_of_process() is None:
        cells = ((w, arguments.rate, {"worlds": w}) for w in worlds)
        return measure.launch(arguments, cells, mpi=arguments.exchange == "mpi")
    ranks = Ranks(worlds[0])
    rows = []
    for size in sizes:
        rows += compare(ranks, size // 4, arguments)
        if ranks.first:  # after every size, so that a run that is stopped leaves what it has
            measure.write_json(arguments.json, rows)
    return 0


def compare(ranks: Ranks, values: int, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Times psum and the reductions on f32[values] per rank; returns one row per reduction."""
    exchange, reductions = arguments.exchange, arguments.reductions.split(",")
    compressor = cgx_jax.Quantize(arguments.bits)
    how = [ranks.all_reduce(compressor, exchange, reduction=name) for name in reductions]
    functions = [ranks.psum, *how]
    x = ranks.place(gradient, values)
    results = [np.asarray(f(x).addressable_data(0)) for f in functions]
    # Every process sees the times of the slowest ranks, so all choose the same number of repeats.
    once = float(ranks.seconds(functions, x, 1).sum())
    seconds = ranks.seconds(functions, x, int(np.clip(arguments.seconds / once, 5, arguments.reps)))
    rows = []
    for i, name in enumerate(reductions, 1):
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
            "sent": sent(name, values, ranks.world, arguments.bits),
            "relative_error": float(error),
        }
        rows.append(row)
        if ranks.first:
            low, middle, high = row["ratio"]
            print(
                f"{ranks.world} ranks {exchange} {size_text(4 * values):>8} {name:<15}"
                f" {row['seconds'][1] * 1e3:8.2f} ms  {middle:.2f} ({low:.2f}-{high:.2f}) of"
                f" {reductions[0]}'s speed, {row['over_psum'][1]:.2f} of psum's;"
                f" {row['sent']:>10,} bytes, relative error {error:.4f}",
                flush=True,
            )
    return rows


def errors(world: int, values: int, bits: int) -> list[dict[str, Any]]:
    """Returns bytes and error of every reduction of f32[values] per rank."""
    x = np.stack([gradient(rank, values) for rank in range(world)])
    exact = x.sum(0, dtype=np.float64)
    rows = []
    for name in REDUCTIONS:

        def call(own: jax.Array, how: str = name) -> jax.Array:
            return cgx_jax.psum_compressed(
                own, "ranks", cgx_jax.Quantize(bits), exchange="xla", reduction=how
            )

        got = np.asarray(jax.jit(jax.vmap(call, axis_name="ranks"))(x))
        assert all(row.tobytes() == got[0].tobytes() for row in got), (name, world)
        row = {
            "bytes": 4 * values,
            "world": world,
            "bits": bits,
            "reduction": name,
            "sent": sent(name, values, world, bits),
            "relative_error": float(np.linalg.norm(got[0] - exact) / np.linalg.norm(exact)),
        }
        rows.append(row)
        print(
            f"{world:>3} ranks {size_text(4 * values):>8} {name:<15} {row['sent']:>12,} bytes,"
            f" relative error {row['relative_error']:.4f}",
            flush=True,
        )
    return rows


if __name__ == "__main__":
    sys.exit(main())
