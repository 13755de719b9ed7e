"""What `Ring` and `Tree` share: sums that grow from rank to rank and are re-encoded on the way."""

from __future__ import annotations

from typing import ClassVar

import jax

from cgx_jax import _compat
from cgx_jax._types import Words
from cgx_jax.compressors import Compressor
from cgx_jax.compressors.base import CodedLeaf
from cgx_jax.compressors.buffers import whole_code
from cgx_jax.compressors.codes import folded
from cgx_jax.reductions.base import Job, PayloadReduction


class PartialSums(PayloadReduction):
    """Rows travel between pairs of ranks, and whoever receives a partial sum adds to it.

    Each row is the payload of `coded(leaves, world)`, by default of whole leaves. Each time that a
    partial sum is encoded, what it loses belongs to the residual of the rank or the group of ranks
    that encode it. That is less than a code loses of values that were never encoded.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"permute"})
    adds_decoded: ClassVar[bool] = True

    def refusal(self, compressor: Compressor) -> str | None:
        if not compressor.owner_exact:
            return "it needs the same weight for every rank, which partial sums do not give"
        return super().refusal(compressor)

    def coded(self, leaves: tuple[CodedLeaf, ...], world: int) -> tuple[CodedLeaf, ...]:
        """The leaves of one row."""
        return leaves

    def row_bytes(self, leaves: tuple[CodedLeaf, ...], world: int) -> int:
        """Bytes of one row."""
        return whole_code(self.coded(leaves, world)).row_bytes


def noise(job: Job, seed: Words, number: int | jax.Array) -> Words:
    """Returns the seed of encoding `number`; just `seed` if no compressor rounds at random."""
    return folded(seed, number) if any(x.compressor.needs_key for x in job.leaves) else seed


def alike(job: Job, rows: jax.Array) -> jax.Array:
    """Returns `rows`, which all ranks of the job hold alike, typed as such under check_vma."""
    return rows if job.axes.groups is not None else _compat.same_over(rows, job.axes.names)
