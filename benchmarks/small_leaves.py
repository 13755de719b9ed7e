"""Exact sums of many small leaves over shaped links: leaf by leaf, and by this package.

    python benchmarks/small_leaves.py --json benchmarks/results/small_leaves.jsonl

Every rank holds --leaves vectors of fp32, of 3 to 512 values: the biases and norms of a network.
Sums of them by `lax.psum` of the tree, and by `psum_compressed` with `Identity`, are timed as
all_reduce.py times its methods.
"""

import argparse
import sys
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import cgx_jax
import measure
from all_reduce import Ranks, run

SIZES = (3, 10, 32, 64, 128, 512)


def main() -> int:
    rates = "100mbit,1gbit,10gbit"
    parser = measure.parser(__doc__, worlds="2,4", rates=rates, leaves=60, reps=51)
    arguments = parser.parse_args()
    first = arguments.rates.split(",")[0]
    cells = ((w, first, {"worlds": w}) for w in arguments.worlds.split(","))
    return run(arguments, cells, compare, line)


def compare(ranks: Ranks, arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Times both sums; yields one row per link."""
    sizes = [SIZES[i % len(SIZES)] for i in range(arguments.leaves)]

    def leaves(row: jax.Array) -> list[jax.Array]:
        return [row[i : i + size] for i, size in enumerate(sizes)]

    def psum(row: jax.Array) -> jax.Array:
        return jnp.concatenate(lax.psum(leaves(row), ranks.axis))

    def compressed(row: jax.Array) -> jax.Array:
        exact = cgx_jax.Identity()
        return jnp.concatenate(cgx_jax.psum_compressed(leaves(row), ranks.axis, exact))

    x = ranks.place(lambda rank, n: np.full(n, rank, np.float32), len(sizes) + max(SIZES))
    functions = {
        "psum": ranks.collective(psum),
        "psum_compressed": ranks.collective(compressed),
    }
    for rate in arguments.rates.split(","):
        ranks.relink(rate)
        seconds, _ = ranks.in_order(list(functions.values()), x, arguments.reps + 1)
        seconds = seconds[1:]  # another round of warm-up
        columns = zip(functions, seconds.T, strict=True)
        yield {
            "leaves": len(sizes),
            "world": ranks.world,
            "links": rate,
            "reps": arguments.reps,
            "seconds": {how: measure.quartiles(column) for how, column in columns},
            "ratio": measure.quartiles(seconds[:, 0] / seconds[:, 1]),
        }


def line(row: dict[str, Any]) -> str:
    times = ", ".join(f"{how} {1e3 * s[1]:.2f} ms" for how, s in row["seconds"].items())
    ratio = measure.spread(row["ratio"], ".1f")
    return f"{row['world']} ranks, {row['links']}: {times}, ratio {ratio}"


if __name__ == "__main__":
    sys.exit(main())
