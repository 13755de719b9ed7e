"""Gathers weights and scatters gradients of sharded training, on shaped links.

    python benchmarks/fsdp_speed.py --json benchmarks/results/fsdp_speed.jsonl
    python benchmarks/fsdp_speed.py --rates 1gbit --worlds 2            # a quick look

Times only what sharded training sends in a step: 12 weights of [1024, 512] are gathered, and
gradients of that shape are scattered. "exact" is `lax.all_gather` and `lax.psum_scatter` in fp32,
"bf16" the same calls on bf16 values. The others are `all_gather_compressed` on an 8-bit shifted
lattice and `psum_scatter_compressed` at 4 bits, over an exchange. Times and `sent` are those of
all_reduce.py; `ratio` compares with the exact step.
"""

import argparse
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import cgx_jax
import measure
from all_reduce import Ranks, run
from cgx_jax.compressors import ShiftedLattice
from cgx_jax.tuning.link_timer import gradient

LEAVES, SHAPE = 12, (1024, 512)
AXIS = "ranks"


def exact(shards: Sequence[jax.Array], dtype: Any = jnp.float32) -> list[jax.Array]:
    whole = [lax.all_gather(x.astype(dtype), AXIS, tiled=True) for x in shards]
    sums = [lax.psum_scatter(g, AXIS, tiled=True) for g in gradients(whole)]
    return [x.astype(jnp.float32) for x in sums]


def compressed(shards: Sequence[jax.Array], exchange: str) -> list[jax.Array]:
    whole = cgx_jax.all_gather_compressed(
        list(shards), AXIS, ShiftedLattice(8), key=jax.random.key(0), tiled=True, exchange=exchange
    )
    return cgx_jax.psum_scatter_compressed(
        gradients(whole), AXIS, cgx_jax.Quantize(4), tiled=True, exchange=exchange
    )


def gradients(whole: Sequence[jax.Array]) -> list[jax.Array]:
    """Returns values of the weights' shape that depend on all weights and differ between ranks."""
    return [x * (1 + lax.axis_index(AXIS)).astype(x.dtype) for x in whole]


METHODS: dict[str, Callable[[Sequence[jax.Array]], list[jax.Array]]] = {
    "exact": exact,
    "bf16": lambda shards: exact(shards, jnp.bfloat16),
    "8 and 4 bits, xla": lambda shards: compressed(shards, "xla"),
    "8 and 4 bits, mpi": lambda shards: compressed(shards, "mpi"),
}


def main() -> int:
    parser = measure.parser(__doc__, rates="100mbit,1gbit,10gbit", worlds="2,4", reps=9)
    arguments = parser.parse_args()
    pairs = itertools.product(arguments.worlds.split(","), arguments.rates.split(","))
    cells = ((w, rate, {"worlds": w, "rates": rate}) for w, rate in pairs)
    return run(arguments, cells, compare, line, mpi=True)


def compare(ranks: Ranks, arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Times all methods; yields one row per method."""
    own = (SHAPE[0] // ranks.world, SHAPE[1])
    x = ranks.place(gradient, LEAVES * int(np.prod(own)))

    def of_flat(method: Callable[..., list[jax.Array]]) -> Callable[[jax.Array], jax.Array]:
        def call(flat: jax.Array) -> jax.Array:
            return jnp.stack(method(list(flat.reshape(LEAVES, *own))))

        return ranks.local(call)

    functions = [of_flat(method) for method in METHODS.values()]
    seconds, sent = ranks.in_order(functions, x, arguments.reps)
    for i, name in enumerate(METHODS):
        yield {
            "method": name,
            "links": arguments.rates,
            "world": ranks.world,
            "bytes": 4 * LEAVES * int(np.prod(SHAPE)),
            "seconds": measure.quartiles(seconds[:, i]),
            "ratio": measure.quartiles(seconds[:, 0] / seconds[:, i]),
            "sent": float(np.median(sent[:, i])),
        }


def line(row: dict[str, Any]) -> str:
    return (
        f"{row['links']:>8} {row['world']} ranks {row['method']:<20}"
        f" {row['seconds'][1] * 1e3:9.2f} ms  {measure.spread(row['ratio'])} of exact's speed;"
        f" {row['sent']:>12,.0f} bytes sent"
    )


if __name__ == "__main__":
    sys.exit(main())
