"""CGX's scatter-reduce-allgather: every rank adds up one chunk.

Encode every rank's chunk, exchange the payloads, add up the chunk that this rank owns, encode the
sum, gather the payloads of all sums, decode. The owner decodes its own payload like everyone else,
so all ranks hold the same bits.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from cgx_jax._types import Words
from cgx_jax.collective import Collective
from cgx_jax.compressors.base import CodedLeaf
from cgx_jax.compressors.buffers import chunk_code
from cgx_jax.kernels.primitives import Sent
from cgx_jax.kernels.wire import Layout
from cgx_jax.reductions.base import Job, Operands, PayloadReduction, Rows, largest_error


@dataclasses.dataclass(frozen=True)
class ScatterGather(PayloadReduction):
    """Two phases, in which a value is encoded twice; for codes that can be cut into chunks.

    Every rank adds up one chunk and sends its encoded sum to all others. A rank sends 2 (world - 1)
    / world of a payload. Raises ValueError while tracing for a compressor that does not allow it.
    Source: CGX (Markov et al., Middleware 2022).
    """

    shorthand: ClassVar[str] = "scatter_gather"
    needs: ClassVar[frozenset[str]] = frozenset({"scatter", "gather"})
    seed_count: ClassVar[int] = 2
    collective: ClassVar[Collective | None] = Collective.ALL_REDUCE

    def bytes_sent(self, leaves: tuple[CodedLeaf, ...], world: int) -> int:
        code = chunk_code(leaves, world)
        return (world - 1) * (code.row_bytes + code.sum_bytes)

    def rows_bytes(self, leaves: tuple[CodedLeaf, ...], world: int) -> int:
        return world * chunk_code(leaves, world).sum_bytes

    def error_bound(self, compressor: Any, x: jax.Array, divisor: float = 1) -> jax.Array:
        world = x.shape[0]
        code = chunk_code((CodedLeaf(compressor, x.shape[1:], np.dtype(np.float32), 0),), world)
        each = (code.error_bounds(compressor.error_bound, row) for row in x)
        peers = sum(each, start=jnp.zeros(x.shape[1:], jnp.float32)) / divisor
        total = jnp.abs(x.sum(0)) / divisor + peers
        of_sums = compressor.of_sums(world)
        return peers + largest_error(lambda v: code.error_bounds(of_sums.error_bound, v), total)

    def layout(self, leaves: tuple[CodedLeaf, ...], world: int) -> Layout | None:
        return chunk_code(leaves, world).layout

    def words(self, job: Job, given: Operands) -> Words:
        return jnp.stack([jnp.asarray(seed) for seed in given.seeds])

    def rows(self, job: Job, given: Operands) -> Rows:
        code, seeds = chunk_code(job.leaves, job.axes.world), given.seeds
        own = Sent(seeds[0], given.leaves, given.units, job.axes.rank())
        sent, residuals = code.encode(own, residual=job.residual)
        rows = job.exchange.scatter(job.name, sent, job.axes)
        own = own._replace(words=seeds[1])
        chunk, residuals = code.reduce(own, rows, job.divisor, residuals)
        return Rows(job.exchange.gather(job.name, chunk, job.axes), residuals)

    def sums(self, job: Job, rows: jax.Array, given: Operands) -> list[jax.Array]:
        return chunk_code(job.leaves, job.axes.world).decode(rows, given.leaves, given.units)
