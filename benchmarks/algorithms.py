"""scatter_gather, gather_sum, ring and tree, by size and number of ranks.

    python benchmarks/algorithms.py --json benchmarks/results/algorithms.jsonl
    python benchmarks/algorithms.py --reductions scatter_gather,gather_sum --exchange mpi
    python benchmarks/algorithms.py --rate none --worlds 2,4,8,64 --sizes 4k,256k,4M \\
        --json benchmarks/results/algorithms_error.jsonl

Over the shaped links, `lax.psum` and all reductions are timed as all_reduce.py times its methods.
`ratio` compares with the first reduction. A size has as many repeats as --seconds allows, between 5
and --reps. With --exchange mpi, mpiexec starts the ranks, and scatter_gather and gather_sum are one
fused call each. With --rate none, `vmap` simulates the ranks in one program. The output then has
the bytes that a rank sends and the relative error of the sum in the Euclidean norm, but no times.
"""

import argparse
import functools
import sys
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

import cgx_jax
import measure
from all_reduce import Ranks, run
from alpha_beta import REDUCTIONS, sent
from cgx_jax.tuning.link_timer import gradient, size_text


def main() -> int:
    arguments = measure.parser(
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
    worlds = [int(world) for world in arguments.worlds.split(",")]
    if arguments.rate == "none":
        sizes = [measure.size_in_bytes(size) for size in arguments.sizes.split(",")]
        rows = [r for w in worlds for size in sizes for r in errors(w, size // 4, arguments.bits)]
        measure.write_json(arguments.json, rows)
        return 0
    cells = ((w, arguments.rate, {"worlds": w}) for w in worlds)
    text = functools.partial(line, arguments.reductions.split(",")[0])
    return run(arguments, cells, compare, text, mpi=arguments.exchange == "mpi")


def compare(ranks: Ranks, arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Times psum and the reductions; yields one row per size and reduction."""
    exchange, reductions = arguments.exchange, arguments.reductions.split(",")
    compressor = cgx_jax.Quantize(arguments.bits)
    how = [ranks.all_reduce(compressor, exchange, reduction=name) for name in reductions]
    functions = [ranks.psum, *how]
    for size in map(measure.size_in_bytes, arguments.sizes.split(",")):
        values = size // 4
        x = ranks.place(gradient, values)
        results = [np.asarray(f(x).addressable_data(0)) for f in functions]
        # Every process sees the times of the slowest ranks, so all choose the same repeats.
        once = float(ranks.seconds(functions, x, 1).sum())
        reps = int(np.clip(arguments.seconds / once, 5, arguments.reps))
        seconds = ranks.seconds(functions, x, reps)
        for i, name in enumerate(reductions, 1):
            error = np.linalg.norm(results[i] - results[0]) / np.linalg.norm(results[0])
            yield {
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


def line(first: str, row: dict[str, Any]) -> str:
    return (
        f"{row['world']} ranks {row['exchange']} {size_text(row['bytes']):>8}"
        f" {row['reduction']:<15} {row['seconds'][1] * 1e3:8.2f} ms "
        f" {measure.spread(row['ratio'])} of {first}'s speed, {row['over_psum'][1]:.2f} of"
        f" psum's; {row['sent']:>10,} bytes, relative error {row['relative_error']:.4f}"
    )


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
