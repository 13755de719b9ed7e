"""PowerSGD against lax.psum and 4 bits over shaped links.

    python benchmarks/power_sgd.py --json benchmarks/results/power_sgd.jsonl
    python benchmarks/power_sgd.py --leaves 2 --side 256 --reps 2     # a quick look

Every rank holds `--leaves` fp32 matrices of `--side` squared. A method takes the ranks' means, as
`sync_gradients` does in a step. Times, `ratio` and `sent` are those of all_reduce.py. The share "of
plan" is that script's `/plan`.
"""

import argparse
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

import cgx_jax
import measure
from all_reduce import Ranks, run
from cgx_jax.tuning.link_timer import gradient


def main() -> int:
    parser = measure.parser(__doc__, leaves=6, world=4, rate="1gbit", reps=11)
    parser.add_argument("--rank", type=int, default=2, help="PowerSGD's (default %(default)s)")
    parser.add_argument("--side", type=int, default=2048, help="of a matrix (default %(default)s)")
    arguments = parser.parse_args()
    return run(arguments, [(arguments.world, arguments.rate, {})], compare, line)


class Step:
    """Means of the ranks' leaves by `sync_gradients`; keeps its state between calls."""

    def __init__(self, ranks: Ranks, leaves: list[jax.Array], compressor: Any, memory: Any):
        tx = cgx_jax.sync_gradients(
            "ranks", compressor, memory=memory, mesh=ranks.mesh, exchange="xla"
        )
        self.state = tx.init([x[0] for x in leaves])
        mapped = measure.updating(tx, self.state, ranks.mesh, "ranks")
        self.step = jax.jit(mapped, donate_argnums=1)

    def __call__(self, leaves: list[jax.Array]) -> jax.Array:
        means, self.state = self.step(leaves, self.state)
        return means[-1]


def compare(ranks: Ranks, arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Times all methods; yields one row per method."""
    side, world = arguments.side, ranks.world
    leaves = [matrix(ranks, i, side) for i in range(arguments.leaves)]
    like = [jax.ShapeDtypeStruct((side, side), np.float32)] * len(leaves)
    low_rank = cgx_jax.compressors.PowerSGD(arguments.rank)
    compressors = {
        "4 bits": (cgx_jax.Quantize(4), None),
        f"PowerSGD, rank {arguments.rank}": (low_rank, None),
        "... ErrorFeedback()": (low_rank, cgx_jax.ErrorFeedback()),
    }
    functions = [mean(ranks), *(Step(ranks, leaves, *how) for how in compressors.values())]
    planned = [2 * (world - 1) * 4 * side * side * len(leaves) / world]
    planned += [cgx_jax.Plan.build(like, c).wire_bytes(world) for c, _ in compressors.values()]
    seconds, sent = ranks.in_order(functions, leaves, arguments.reps)
    for i, name in enumerate(["psum", *compressors]):
        yield {
            "bytes": 4 * side * side * len(leaves),
            "leaves": [list(x.shape) for x in like],
            "world": world,
            "links": arguments.rate,
            "method": name,
            "reps": arguments.reps,
            "seconds": measure.quartiles(seconds[:, i]),
            "ratio": measure.quartiles(seconds[:, 0] / seconds[:, i]),
            "sent_bytes": float(np.median(sent[:, i])),
            "arithmetic_bytes": planned[i],
        }


def line(row: dict[str, Any]) -> str:
    return (
        f"{row['links']:>8} {row['bytes']:>12,} bytes {row['method']:<20}"
        f" {row['seconds'][1] * 1e3:9.2f} ms  ratio {measure.spread(row['ratio'])}"
        f"  sent {row['sent_bytes'] / 1e6:.3f} MB,"
        f" {row['sent_bytes'] / row['arithmetic_bytes']:.3f} of plan"
    )


def mean(ranks: Ranks) -> Callable[[list[jax.Array]], jax.Array]:
    """Returns a call of lax.pmean on the ranks' leaves."""
    run = jax.jit(
        jax.shard_map(
            lambda xs: lax.pmean([x[0] for x in xs], "ranks"),
            mesh=ranks.mesh,
            in_specs=P("ranks"),
            out_specs=P(),
        )
    )
    return lambda xs: run(xs)[-1]


def matrix(ranks: Ranks, number: int, side: int) -> jax.Array:
    """f32[world, side, side], a row per rank."""
    flat = ranks.place(lambda rank, n: gradient(1000 * number + rank, n), side * side)
    return flat.reshape(ranks.world, side, side)


if __name__ == "__main__":
    sys.exit(main())
