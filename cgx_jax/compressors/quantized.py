"""The codes of `Quantize`: its kernels handle a whole fusion buffer in one call."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from cgx_jax._types import Shaped, Words
from cgx_jax.compressors.codes import Arrays, ChunkCode, WholeCode, folded
from cgx_jax.kernels import primitives, scaling
from cgx_jax.kernels.primitives import NO_RANK, Sent
from cgx_jax.kernels.scaling import Residuals
from cgx_jax.kernels.units import Units, each
from cgx_jax.kernels.wire import Layout


@dataclasses.dataclass(frozen=True)
class QuantizedChunks(ChunkCode):
    """Chunks cut at bucket boundaries; one kernel call per phase."""

    layout: Layout

    @property
    def row_bytes(self) -> int:
        return self.layout.chunk_bytes

    def encode(self, sent: Sent, *, residual: bool) -> tuple[jax.Array, Residuals]:
        return primitives.encode(sent, self.layout, residual=residual)

    def reduce(
        self, sent: Sent, rows: jax.Array, divisor: float, residuals: Residuals
    ) -> tuple[jax.Array, Residuals]:
        return primitives.reduce(sent, rows, self.layout, divisor=divisor, residuals=residuals)

    def decode(
        self, rows: jax.Array, like: Sequence[Shaped], units: Units | None
    ) -> list[jax.Array]:
        return primitives.decode(rows, self.layout, like, units=units)


@dataclasses.dataclass(frozen=True)
class QuantizedWhole(WholeCode):
    """Whole leaves one after the other; one kernel call per direction."""

    layout: Layout

    @property
    def row_bytes(self) -> int:
        return self.layout.total_bytes

    def encode(self, sent: Sent, *, residual: bool) -> tuple[jax.Array, Residuals]:
        # Whole leaves have no own chunk.
        whole = sent._replace(words=self.words(sent.words, sent.rank), rank=NO_RANK)
        rows, lost = primitives.encode(whole, self.layout, residual=residual)
        return rows.reshape(-1), lost

    def sum(
        self, rows: jax.Array, like: Sequence[Shaped], units: Units | None, divisor: float
    ) -> list[jax.Array]:
        # All decoded payloads, including this rank's own, are added to zeros: all ranks add the
        # same numbers.
        zeros = [
            jnp.zeros(x.shape, x.dtype if unit is None else jnp.float32)
            for x, unit in zip(like, each(units, len(like)), strict=True)
        ]
        rank = jnp.int32(NO_RANK)
        sums = primitives.accumulate(rank, rows, zeros, self.layout, divisor=divisor)
        return scaling.all_decoded(sums, units, like)

    def accumulate(
        self, rank: jax.Array, rows: jax.Array, own: Arrays, divisor: float
    ) -> list[jax.Array]:
        return primitives.accumulate(rank, rows, own, self.layout, divisor=divisor)

    def decode(self, rows: jax.Array, like: Sequence[Shaped]) -> list[jax.Array]:
        return jax.vmap(lambda row: primitives.decode(row, self.layout, like))(rows)

    def words(self, seed: Words, rank: ArrayLike) -> Words:
        if any(slot.rounding == "correlated" for slot in self.layout.slots):
            # Kernels divide noise among the ranks only in a chunked buffer. In a whole buffer all
            # ranks would draw the same noise, and their errors would add up. Independent noise
            # averages out.
            return folded(seed, rank)
        return seed
