"""A ring: partial sums of chunks go around it and are re-encoded at every rank."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from cgx_jax.compressors.base import CodedLeaf
from cgx_jax.compressors.buffers import whole_code
from cgx_jax.kernels.primitives import Sent
from cgx_jax.kernels.scaling import Residuals
from cgx_jax.reductions import shares
from cgx_jax.reductions.base import Job, Operands, Rows, largest_error
from cgx_jax.reductions.partial_sums import PartialSums, alike, noise

# Up to so many ranks there is no loop. XLA for CPUs orders the collectives of a program, but not
# those of a loop with others, and many devices of one process may wait for each other forever.
UNROLLED = 8


@dataclasses.dataclass(frozen=True)
class Ring(PartialSums):
    """2 (world - 1) hops of one chunk to the next rank; for codes that can be cut into chunks.

    In the first half every rank decodes the partial sum that it receives, adds its own values and
    encodes the result, so a value is encoded `world` times. In the second half the encoded sums go
    around unchanged. A rank sends 2 (world - 1) / world of a payload, all of it to one neighbor.
    Raises ValueError while tracing for a compressor that does not allow it. Source: the ring
    reduction of CGX (Markov et al., Middleware 2022).
    """

    shorthand: ClassVar[str] = "ring"

    def coded(self, leaves: tuple[CodedLeaf, ...], world: int) -> tuple[CodedLeaf, ...]:
        return shares.of(leaves, world)

    def bytes_sent(self, leaves: tuple[CodedLeaf, ...], world: int) -> int:
        return 2 * (world - 1) * self.row_bytes(leaves, world)

    def rows_bytes(self, leaves: tuple[CodedLeaf, ...], world: int) -> int:
        return world * self.row_bytes(leaves, world)

    def error_bound(self, compressor: Any, x: jax.Array, divisor: float = 1) -> jax.Array:
        world = x.shape[0]
        runs = jnp.stack([shares.cut(row, world) for row in x])  # [rank, chunk, *share]
        # Chunk c starts at rank c.
        chunks = np.arange(world)
        total = runs[chunks, chunks]
        bound = jax.vmap(compressor.error_bound)(total)

        def again(total: jax.Array, bound: jax.Array) -> jax.Array:
            return bound + largest_error(compressor.error_bound, jnp.abs(total) + bound)

        for hop in range(1, world):
            total = total + runs[(chunks + hop) % world, chunks]
            bound = jax.vmap(again)(total, bound)
        return shares.joined(bound, x[0]) / divisor

    def rows(self, job: Job, given: Operands) -> Rows:
        world, rank = job.axes.world, job.axes.rank()
        code = whole_code(self.coded(job.leaves, world))
        runs = [shares.cut(x, world) for x in given.leaves]
        to_next = [(r, (r + 1) % world) for r in range(world)]

        def encode(hop: int | jax.Array, values: list[jax.Array]) -> tuple[jax.Array, Residuals]:
            words = noise(job, given.seeds[0], hop)
            return code.encode(Sent(words, values, rank=rank), residual=job.residual)

        def own(hop: int | jax.Array) -> list[jax.Array]:
            """This rank's values of the chunk that it encodes after `hop` hops."""
            at = (rank - hop) % world
            return [lax.dynamic_index_in_dim(x, at, keepdims=False) for x in runs]

        def add(payload: jax.Array, hop: int | jax.Array) -> tuple[jax.Array, Residuals]:
            received = job.exchange.permute(job.name, payload, job.axes, to_next)
            mine = own(hop)
            before = code.sum(received[None], mine, None, 1)
            return encode(hop, [x + y for x, y in zip(before, mine, strict=True)])

        def forward(payload: jax.Array, _: object) -> tuple[jax.Array, jax.Array]:
            received = job.exchange.permute(job.name, payload, job.axes, to_next)
            return received, received

        unroll = world <= UNROLLED
        first, lost = encode(0, own(0))
        hops = jnp.arange(1, world, dtype=jnp.int32)
        last, later = lax.scan(add, first, hops, unroll=unroll)
        _, others = lax.scan(forward, last, length=world - 1, unroll=unroll)
        # After the first half this rank has the sum of the next rank's chunk. The sum of its own
        # chunk arrives next.
        place = (rank + 1 - jnp.arange(world, dtype=jnp.int32)) % world
        rows = jnp.take(jnp.concatenate([last[None], others]), place, axis=0)
        if lost is None or later is None:
            return Rows(alike(job, rows), None)
        residuals = [
            shares.joined(jnp.take(jnp.concatenate([e[None], es]), (place - 1) % world, axis=0), x)
            for e, es, x in zip(lost, later, given.leaves, strict=True)
        ]
        return Rows(alike(job, rows), residuals)

    def sums(self, job: Job, rows: jax.Array, given: Operands) -> list[jax.Array]:
        leaves = self.coded(job.leaves, job.axes.world)
        code = whole_code(leaves)
        share = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves]

        def decode(row: jax.Array) -> list[jax.Array]:
            return code.sum(row[None], share, given.units, job.divisor)

        return [
            shares.joined(y, x) for y, x in zip(jax.vmap(decode)(rows), given.leaves, strict=True)
        ]
