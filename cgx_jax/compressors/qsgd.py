"""QSGD: signed levels of a bucket's norm, rounded at random."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cgx_jax.compressors import buckets
from cgx_jax.compressors.base import PayloadCompressor
from cgx_jax.compressors.packing import (
    from_bytes,
    pack,
    packed_bytes,
    size_of,
    to_bytes,
    unpack,
)

NORMS = ("l2", "max")


@dataclasses.dataclass(frozen=True)
class QSGD(PayloadCompressor):
    """Magnitudes as multiples of a bucket's norm / levels, rounded at random without bias.

    ceil(log2(2 * levels + 1)) bits a value and the norm, 4 bytes a bucket: 7 levels are 4 bits, 127
    are 8. `norm` is "l2", as in the paper, or "max", whose error is smaller. Its variance is at
    most ω |x|², with ω = min(B / levels², sqrt(B) / levels) for buckets of B values and the L2
    norm; error feedback scales by 1 / (1 + ω). A bucket with NaN or infinity comes back as NaN.
    Raises ValueError for levels outside of 1..32767 and an unknown norm. Source: QSGD (Alistarh et
    al., NeurIPS 2017).
    """

    levels: int = 7
    bucket_size: int = buckets.BUCKET
    norm: str = "l2"

    def __post_init__(self) -> None:
        buckets.whole_number("QSGD", "levels", self.levels, 1, 2**15 - 1)
        buckets.whole_number("QSGD", "bucket_size", self.bucket_size, 1)
        if self.norm not in NORMS:
            raise ValueError(f"QSGD: norm={self.norm!r} is unknown; it is one of {list(NORMS)}.")

    @property
    def unbiased(self) -> bool:
        return True

    @property
    def needs_key(self) -> bool:
        return True

    @property
    def block_size(self) -> int:
        return self.bucket_size

    @property
    def width(self) -> int:
        return (2 * self.levels).bit_length()

    @property
    def variance(self) -> float:
        """ω: the largest E|decode(encode(x)) - x|² over |x|²."""
        size, s = self.bucket_size, self.levels
        if self.norm == "l2":
            return min(size / s**2, math.sqrt(size) / s)
        return size / (4 * s**2)

    @property
    def feedback_scale(self) -> float:
        return 1 / (1 + self.variance)

    def wire_bits(self, shape: int | Sequence[int], dtype: Any = jnp.float32) -> int:
        n = size_of(shape)
        return 8 * (packed_bytes(n, self.width) + 4 * buckets.count(n, self.bucket_size))

    def _norm(self, rows: jax.Array) -> jax.Array:
        norm = jnp.abs(rows).max(axis=1, keepdims=True)
        if self.norm == "l2":
            norm = l2_norm(rows)
        return jnp.where(jnp.isfinite(norm), norm, np.float32(np.nan))

    def error_bound(self, x: Any) -> jax.Array:
        rows = buckets.split(x, self.bucket_size)
        each = self._norm(rows) * (1 / self.levels + 2.0**-18)
        like = jax.ShapeDtypeStruct(jnp.shape(x), jnp.float32)
        bound = buckets.join(jnp.broadcast_to(each, rows.shape), like)
        return buckets.rounded(jnp.where(jnp.isnan(bound), jnp.inf, bound), x)

    def encode(self, x: Any, *, key: Any = None) -> jax.Array:
        buckets.require_key(self, key)
        x = jnp.asarray(x)
        rows = buckets.split(x, self.bucket_size)
        norm = self._norm(rows)
        steps = buckets.share(jnp.abs(rows), norm) * np.float32(self.levels)
        level = jnp.floor(steps + buckets.noise(key, *rows.shape))
        level = jnp.minimum(level, np.float32(self.levels))
        codes = jnp.where(rows < 0, -level, level) + np.float32(self.levels)
        packed = pack(codes.reshape(-1)[: x.size].astype(jnp.uint32), self.width)
        return jnp.concatenate([packed, to_bytes(norm)])

    def decode(self, payload: Any, shape: Sequence[int], dtype: Any) -> jax.Array:
        like = jax.ShapeDtypeStruct(tuple(shape), dtype)
        packed, norms = jnp.split(payload, [packed_bytes(like.size, self.width)])
        codes = unpack(packed, self.width, like.size).astype(jnp.float32) - np.float32(self.levels)
        rows = buckets.split(codes, self.bucket_size)
        unit = from_bytes(norms, (len(rows), 1), jnp.float32) / np.float32(self.levels)
        return buckets.join(rows * unit, like)


def l2_norm(rows: jax.Array) -> jax.Array:
    """Each row's, f32[rows, 1], where squares overflow or vanish too; at most the largest float."""
    largest = jnp.abs(rows).max(axis=1, keepdims=True)
    scale = jnp.where(jnp.isfinite(largest) & (largest > 0), largest, 1)
    squares = jnp.square(buckets.share(rows, scale))
    norm = scale * jnp.sqrt(squares.sum(axis=1, keepdims=True))
    most = jnp.minimum(norm, np.float32(np.finfo(np.float32).max))
    return jnp.where(jnp.isfinite(largest), most, largest)
