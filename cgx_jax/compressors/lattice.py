"""Rounding to the nearest point of a lattice that is shifted at random."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from cgx_jax._types import Key
from cgx_jax.compressors import buckets
from cgx_jax.compressors.base import PayloadCompressor
from cgx_jax.compressors.quantize import Quantize


@dataclasses.dataclass(frozen=True)
class ShiftedLattice(PayloadCompressor):
    """`Quantize`'s even levels, with all levels of a bucket shifted by a random part of a step.

    Values are rounded to the nearest level, and the shift is uniform in a step, so the code is
    unbiased. No value moves by more than half a step, and each has the variance step² / 12.
    Stochastic rounding moves values by up to a step, and its variance is twice as large on average.
    The payload, its size and its dtypes are those of `Quantize(bits, bucket_size)`, which decodes
    it. The shift is only in the lowest level of a bucket, which the payload contains.

    It is meant for weights that are gathered: all ranks draw the same shifts, as fractions of a
    step. In a sum over ranks with the same values, the errors therefore do not average out. For
    gradients, take `Quantize(rounding="stochastic")`. Raises as `Quantize` does, and ValueError for
    a missing key. Source: QSDP (Markov et al., ICML 2023), which shares one shift between all
    buckets.
    """

    bits: int = 8
    bucket_size: int = buckets.BUCKET

    def __post_init__(self) -> None:
        nearest = self._nearest  # raises for invalid options
        object.__setattr__(self, "bits", nearest.bits)
        object.__setattr__(self, "bucket_size", nearest.bucket_size)

    @property
    def _nearest(self) -> Quantize:
        return Quantize(self.bits, self.bucket_size)

    unbiased = True
    needs_key = True
    shares_noise = True

    @property
    def block_size(self) -> int:
        return self.bucket_size

    @property
    def width(self) -> int:
        return self.bits

    @property
    def feedback_scale(self) -> float:
        # The residual of a bucket has a range of at most 1 / levels of the bucket's own range. With
        # 1 bit that does not shrink it. But the squared range is at most 2 |x|², and the variance
        # is at most B / 12 times the squared range.
        return 1.0 if self.bits > 1 else 1 / (1 + self.bucket_size / 6)

    def wire_bits(self, shape: int | Sequence[int], dtype: DTypeLike = jnp.float32) -> int:
        return self._nearest.wire_bits(shape, dtype)

    def error_bound(self, x: ArrayLike) -> jax.Array:
        """Returns half a step plus twice the rounding of `Quantize`: values are rounded first."""
        value = jnp.asarray(x)
        rows = buckets.split(value, self.bucket_size, edge=True)
        each_row = functools.partial(buckets.maximum, axis=1, keepdims=True)
        beyond = each_row(jnp.abs(rows)) + (each_row(rows) + each_row(-rows))
        more = jnp.where(beyond < _MOST, beyond * np.float32(2.0**-20), np.float32(np.inf))
        each = buckets.of_values(more, self.bucket_size, value)
        return self._nearest.error_bound(value) + each

    def encode(self, x: ArrayLike, *, key: Key = None) -> jax.Array:
        buckets.require_key(self, key)
        x = jnp.asarray(x)
        rows = buckets.split(x, self.bucket_size, edge=True)
        levels = self._levels(rows, buckets.words(key))
        return self._nearest.encode(buckets.of_values(levels, self.bucket_size, x))

    def _levels(self, rows: jax.Array, words: jax.Array) -> jax.Array:
        """Rounds each value to its nearest level; the extremes go to the first and the last level.

        The range of the levels is then the one that `Quantize` finds, so `Quantize` encodes each
        level as itself.
        """
        top = np.float32(2**self.bits - 1)
        low, high = rows.min(axis=1, keepdims=True), rows.max(axis=1, keepdims=True)
        step = (high - low) / top
        shift = buckets.uniform(words, len(rows), 1)
        place = jnp.clip(jnp.floor((rows - low) / step + shift), 0, top)
        place = jnp.where(rows >= high, top, place)
        levels = low + step * (place + (np.float32(0.5) - shift))
        return jnp.where(step >= buckets.TINY, levels, rows)

    def decode(self, payload: jax.Array, shape: Sequence[int], dtype: DTypeLike) -> jax.Array:
        return self._nearest.decode(payload, shape, dtype)


_MOST = np.float32(np.finfo(np.float32).max) * np.float32(0.999)
