"""A reduce-scatter: row r of every leaf goes to rank r, which adds up the rows that it receives."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from cgx_jax import _compat
from cgx_jax._types import Unit, Words
from cgx_jax.axes import Axes
from cgx_jax.collective import Collective
from cgx_jax.compressors.base import CodedLeaf
from cgx_jax.compressors.buffers import whole_code
from cgx_jax.compressors.codes import folded
from cgx_jax.kernels import scaling
from cgx_jax.kernels.primitives import NO_RANK, Sent
from cgx_jax.kernels.scaling import Residuals
from cgx_jax.kernels.units import each
from cgx_jax.reductions.base import Job, OfRows, Operands, Reduced, sum_of_bounds


@dataclasses.dataclass(frozen=True)
class ReduceScatter(OfRows):
    """One phase; each row is encoded like a leaf of its own.

    The leaves of a job are rows, and operands have a leading dimension with a row for each rank. A
    result is the fp32 sum of this rank's exact row and the other ranks' decoded ones. It is not
    encoded again, except for votes. Source: QSDP (Markov et al., ICML 2023) for the scheme.
    """

    shorthand: ClassVar[str] = "reduce_scatter"
    collective: ClassVar[Collective | None] = Collective.REDUCE_SCATTER
    needs: ClassVar[frozenset[str]] = frozenset({"scatter"})
    shares_seeds: ClassVar[bool | None] = False  # equal errors of all ranks would add up

    def error_bound(self, compressor: Any, x: jax.Array, divisor: float = 1) -> jax.Array:
        return sum_of_bounds(compressor, x) / divisor

    def run(self, job: Job, given: Operands) -> Reduced:
        code, axes, units = whole_code(job.leaves), job.axes, given.units
        words, rank = _words(job.leaves, given.seeds[0], axes.world), axes.rank()
        values, ready = given.leaves, given
        if job.residual or job.prepares or job.divisor != 1 or units is not None:
            values, ready = job.prepared(given)
        if not job.residual and self.in_one_call(job.exchange, job.leaves, axes.world):
            totals, lost = _fused(job, words, ready.leaves), None
        else:

            def encode(words: Words, rows: list[jax.Array]) -> tuple[jax.Array, Residuals]:
                return code.encode(Sent(words, rows, ready.units, rank), residual=job.residual)

            with jax.named_scope("encode"):  # a name under vmap is not that of the phase
                sent, lost = jax.vmap(encode)(jnp.asarray(words), list(ready.leaves))
            sent = _compat.vary_over(sent, axes.varying())
            rows = job.exchange.scatter(job.name, sent, axes)
            own = [lax.dynamic_index_in_dim(x, rank, keepdims=False) for x in ready.leaves]
            totals = code.accumulate(rank, rows, own, job.divisor)
        own_units = [_own_units(u, axes) for u in each(units, len(totals))]
        sums = scaling.all_decoded(totals, own_units, given.leaves)
        if lost is None:
            return Reduced(sums, None, list(ready.states))
        residuals = [
            x - y + jnp.where(encoded(axes, leaf.compressor, x.ndim), e, 0)
            for leaf, x, y, e in zip(job.leaves, values, ready.leaves, lost, strict=True)
        ]
        return Reduced(sums, scaling.taken_out(residuals, units, given.leaves), list(ready.states))


def encoded(axes: Axes, compressor: Any, ndim: int) -> jax.Array:
    """Marks the rows of an operand that are encoded, bool[world, 1, ...] with `ndim` dimensions.

    They are all rows but this rank's own, if it adds that one exactly.
    """
    own = axes.rank() if compressor.owner_exact else NO_RANK
    here = jnp.arange(axes.world, dtype=jnp.int32) != own
    return here.reshape(-1, *[1] * (ndim - 1))


def _words(leaves: Sequence[CodedLeaf], seed: Words, world: int) -> Words:
    """Returns the words that the rows draw their noise from, uint32[world, 2]."""
    if not any(leaf.compressor.needs_key for leaf in leaves):
        return np.zeros((world, 2), np.uint32)
    return jax.vmap(lambda row: folded(seed, row))(jnp.arange(world, dtype=jnp.uint32))


def _fused(job: Job, words: Words, leaves: Sequence[jax.Array]) -> list[jax.Array]:
    """Returns the sums by the exchange's own call for each leaf."""
    rank, out = job.axes.rank(), []
    for leaf, x in zip(job.leaves, leaves, strict=True):
        code = whole_code((leaf,))
        own = jax.vmap(lambda seed, code=code: code.words(seed, rank))(jnp.asarray(words))
        call = job.call(Collective.REDUCE_SCATTER, code.layout)
        (total,) = job.exchange.fused(call, Sent(own, [x])).sums
        out.append(total)
    return out


def _own_units(unit: Unit, axes: Axes) -> Unit:
    """Returns the units of this rank's row: an equal share of the rows, and all columns."""
    if unit is None:
        return None
    rows, columns = unit
    count = rows.shape[1] // axes.world
    return lax.dynamic_slice_in_dim(rows, axes.rank() * count, count, axis=1), columns
