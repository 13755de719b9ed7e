"""Exact sums of many small leaves over shaped links: leaf by leaf, and by this package.

    python benchmarks/small_leaves.py --json benchmarks/results/small_leaves.jsonl

Every rank holds --leaves vectors of fp32, of 3 to 512 values: the biases and norms of a network.
Every repeat sums them by `lax.psum` of the tree and by `psum_compressed` with `Identity`, one after
the other, each behind a barrier; a time is the slowest rank's. `ratio` is lax.psum's time divided
by the other time in the same repeat: the median (and quartiles) over the repeats.
"""

import argparse
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import cgx_jax
import measure
from all_reduce import Ranks, rank_of_process, timed
from cgx_jax.commands import rig
from cgx_jax.host import agreement

SIZES = (3, 10, 32, 64, 128, 512)


def parse_arguments() -> argparse.Namespace:
    rates = "100mbit,1gbit,10gbit"
    return measure.parser(__doc__, worlds="2,4", rates=rates, leaves=60, reps=51).parse_args()


def main() -> int:
    arguments = parse_arguments()
    worlds, rates = arguments.worlds.split(","), arguments.rates.split(",")
    if rank_of_process() is None:
        return measure.launch(arguments, ((w, rates[0], {"worlds": w}) for w in worlds))
    ranks = Ranks(int(worlds[0]))
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
    rows = []
    for rate in rates:
        ranks.barrier()
        if ranks.first:
            rig.shape(rate)
        samples = np.empty((arguments.reps, len(functions)))
        for rep in range(-2, arguments.reps):  # two rounds of warm-up
            for i, function in enumerate(functions.values()):
                samples[rep, i] = timed(ranks, function, x)[0]
        seconds = agreement.maximum(samples)
        row = {"leaves": len(sizes), "world": ranks.world, "links": rate, "reps": arguments.reps}
        row["seconds"] = {
            how: measure.quartiles(s) for how, s in zip(functions, seconds.T, strict=True)
        }
        row["ratio"] = measure.quartiles(seconds[:, 0] / seconds[:, 1])
        rows.append(row)
        if ranks.first:
            times = ", ".join(f"{how} {1e3 * s[1]:.2f} ms" for how, s in row["seconds"].items())
            low, ratio, high = row["ratio"]
            print(f"{ranks.world} ranks, {rate}: {times}, ratio {ratio:.1f} ({low:.1f}-{high:.1f})")
    if ranks.first:
        measure.write_json(arguments.json, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
