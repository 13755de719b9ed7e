"""A tree: recursive doubling, in which partners exchange the codes of their partial sums."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from cgx_jax.compressors.base import CodedLeaf
from cgx_jax.compressors.buffers import whole_code
from cgx_jax.kernels.primitives import Sent
from cgx_jax.kernels.scaling import Residuals
from cgx_jax.reductions.base import Job, Operands, Rows, largest_error
from cgx_jax.reductions.partial_sums import PartialSums, alike, noise


@dataclasses.dataclass(frozen=True)
class Tree(PartialSums):
    """log2(world) levels, in which ranks r and r ^ 2^level exchange whole payloads.

    Both decode both payloads and add them in rank order, so that they hold the same partial sum.
    They encode it with the same noise at the next level, so a value is encoded log2(world) times.
    If the world is not a power of two, the ranks beyond the largest power of two first send their
    payloads to the first ranks, and receive the result afterwards. Raises ValueError while tracing
    for a compressor that does not allow it. Source: recursive doubling (Thakur et al., IJHPCA
    2005).
    """

    shorthand: ClassVar[str] = "tree"
    shares_seeds: ClassVar[bool] = True  # groups of ranks encode the same sums to the same bytes

    def bytes_sent(self, leaves: tuple[CodedLeaf, ...], world: int) -> int:
        """Bytes that the first rank sends, which is the most of any rank."""
        levels, extra = _levels(world)
        return (levels + (2 if extra else 0)) * self.row_bytes(leaves, world)

    def rows_bytes(self, leaves: tuple[CodedLeaf, ...], world: int) -> int:
        return 2 * self.row_bytes(leaves, world)

    def error_bound(self, compressor: Any, x: jax.Array, divisor: float = 1) -> jax.Array:
        levels, extra = _levels(x.shape[0])
        values, beyond = list(x[: 1 << levels]), list(x[1 << levels :])
        bounds = [jnp.zeros(x.shape[1:], jnp.float32)] * len(values)
        for i, more in enumerate(beyond):
            values[i], bounds[i] = values[i] + more, compressor.error_bound(more)
        for level in range(levels):
            for i, (value, bound) in enumerate(zip(values, bounds, strict=True)):
                if level == 0 and i >= extra:  # only its own values
                    again = compressor.error_bound(value)
                else:
                    again = largest_error(compressor.error_bound, jnp.abs(value) + bound)
                bounds[i] = bound + again
            values = [a + b for a, b in zip(values[::2], values[1::2], strict=True)]
            bounds = [a + b for a, b in zip(bounds[::2], bounds[1::2], strict=True)]
        return bounds[0] / divisor

    def rows(self, job: Job, given: Operands) -> Rows:
        world, rank = job.axes.world, job.axes.rank()
        levels, extra = _levels(world)
        inner = 1 << levels
        code = whole_code(job.leaves)

        def encode(level: int, values: Sequence[jax.Array]) -> tuple[jax.Array, Residuals]:
            group = rank >> level
            words = noise(job, noise(job, given.seeds[0], level), group)
            return code.encode(Sent(words, values, given.units, group), residual=job.residual)

        def permute(row: jax.Array, pairs: Sequence[tuple[int, int]]) -> jax.Array:
            return job.exchange.permute(job.name, row, job.axes, pairs)

        values = list(given.leaves)
        if extra:
            payload, _ = encode(0, values)
            received = permute(payload, [(inner + r, r) for r in range(extra)])
            more = code.sum(received[None], values, given.units, 1)
            values = [jnp.where(rank < extra, x + y, x) for x, y in zip(values, more, strict=True)]
        # The ranks beyond keep their values, so this encoding loses what their first one lost.
        payload, residuals = encode(0, values)
        for level in range(levels):
            received = permute(payload, [(r, r ^ (1 << level)) for r in range(inner)])
            upper = (rank >> level) % 2 == 1
            both = [jnp.stack(pair) for pair in ((payload, received), (received, payload))]
            rows = jnp.where(upper, both[1], both[0])
            if level + 1 < levels:
                values = code.sum(rows, values, given.units, 1)
                payload, lost = encode(level + 1, values)
                if residuals is not None and lost is not None:
                    # The ranks of a group lose the same, so each takes an equal part of it.
                    part = jnp.where(rank < inner, 0.5 ** (level + 1), 0)
                    residuals = [e + part * f for e, f in zip(residuals, lost, strict=True)]
        if extra:
            last = permute(rows.reshape(-1), [(r, inner + r) for r in range(extra)])
            rows = jnp.where(rank < inner, rows, last.reshape(rows.shape))
        return Rows(alike(job, rows), residuals)

    def sums(self, job: Job, rows: jax.Array, given: Operands) -> list[jax.Array]:
        return whole_code(job.leaves).sum(rows, given.leaves, given.units, job.divisor)


def _levels(world: int) -> tuple[int, int]:
    """Returns log2 of the largest power of two up to `world`, and how many ranks are beyond it."""
    levels = world.bit_length() - 1
    return levels, world - (1 << levels)
