"""An all-gather: every leaf goes to all ranks."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax

from cgx_jax import _compat
from cgx_jax.collective import Collective
from cgx_jax.compressors.buffers import whole_code
from cgx_jax.kernels.primitives import Sent
from cgx_jax.reductions.base import Job, OfRows, Operands, Reduced


@dataclasses.dataclass(frozen=True)
class AllGather(OfRows):
    """One phase; every rank decodes all payloads, its own among them.

    A result has a leading dimension with a row from each rank. Source: QSDP (Markov et al., ICML
    2023) for the scheme.
    """

    shorthand: ClassVar[str] = "all_gather"
    collective: ClassVar[Collective | None] = Collective.ALL_GATHER
    needs: ClassVar[frozenset[str]] = frozenset({"gather"})

    def error_bound(self, compressor: Any, x: jax.Array, divisor: float = 1) -> jax.Array:
        return jax.vmap(compressor.error_bound)(x)

    def run(self, job: Job, given: Operands) -> Reduced:
        rank, seed, leaves = job.axes.rank(), given.seeds[0], given.leaves
        if self.in_one_call(job.exchange, job.leaves, job.axes.world):
            rows: list[jax.Array] = []
            for leaf, x in zip(job.leaves, leaves, strict=True):
                code = whole_code((leaf,))
                call = job.call(Collective.ALL_GATHER, code.layout)
                rows += job.exchange.fused(call, Sent(code.words(seed, rank), [x])).sums
            return Reduced(rows, None, list(given.states))
        code = whole_code(job.leaves)
        ready = job.prepared(given)[1] if job.prepares else given
        sent = Sent(seed, ready.leaves, ready.units, rank)
        payload, _ = code.encode(sent, residual=False)
        payload = _compat.vary_over(payload, job.axes.varying())
        every = job.exchange.gather(job.name, payload, job.axes)
        # Typed like the result of lax.all_gather, as varying, though all ranks hold the same.
        every = _compat.vary_over(every, job.axes.varying())
        return Reduced(code.decode(every, leaves), None, list(given.states))
