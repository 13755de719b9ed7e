"""Sends every rank's whole payload to all ranks, which decode and add them in rank order."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax

from cgx_jax._types import Words
from cgx_jax.collective import Collective
from cgx_jax.compressors.base import CodedLeaf
from cgx_jax.compressors.buffers import whole_code
from cgx_jax.kernels.primitives import Sent
from cgx_jax.reductions.base import Job, OfWholes, Operands, PayloadReduction, Rows, sum_of_bounds


@dataclasses.dataclass(frozen=True)
class GatherSum(OfWholes, PayloadReduction):
    """One phase, in which a value is encoded once, with one latency; for codes of whole leaves.

    A rank sends its payload to world - 1 others. It decodes the payloads of all ranks, including
    its own, so that all ranks add up the same numbers. It suits sparse codes, codes with state, and
    small buffers. Raises ValueError while tracing for a compressor that does not allow it. Source:
    GRACE (Xu et al., ICDCS 2021).
    """

    shorthand: ClassVar[str] = "gather_sum"
    needs: ClassVar[frozenset[str]] = frozenset({"gather"})
    collective: ClassVar[Collective | None] = Collective.GATHER_SUM

    def rows_bytes(self, leaves: tuple[CodedLeaf, ...], world: int) -> int:
        return world * whole_code(leaves).row_bytes

    def error_bound(self, compressor: Any, x: jax.Array, divisor: float = 1) -> jax.Array:
        return sum_of_bounds(compressor, x) / divisor

    def words(self, job: Job, given: Operands) -> Words:
        return whole_code(job.leaves).words(given.seeds[0], job.axes.rank())

    def rows(self, job: Job, given: Operands) -> Rows:
        own = Sent(given.seeds[0], given.leaves, given.units, job.axes.rank())
        payload, residuals = whole_code(job.leaves).encode(own, residual=job.residual)
        return Rows(job.exchange.gather(job.name, payload, job.axes), residuals)

    def sums(self, job: Job, rows: jax.Array, given: Operands) -> list[jax.Array]:
        return whole_code(job.leaves).sum(rows, given.leaves, given.units, job.divisor)
