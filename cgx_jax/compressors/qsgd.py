"""QSGD: signed levels of a bucket's norm, rounded at random."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from cgx_jax._types import Key
from cgx_jax.arguments import store_whole
from cgx_jax.compressors import buckets
from cgx_jax.compressors.base import PayloadCompressor
from cgx_jax.compressors.packing import from_bytes, pack, packed_bytes, size_of, to_bytes, unpack
from cgx_jax.kernels import codes
from cgx_jax.kernels.constants import LONGEST_BUCKET

NORMS = ("l2", "max")


@dataclasses.dataclass(frozen=True)
class QSGD(PayloadCompressor):
    """Rounds magnitudes at random, without bias, to multiples of a bucket's norm / levels.

    A value takes ceil(log2(2 * levels + 1)) bits, 4 for 7 levels and 8 for 127. The norm takes 4
    bytes per bucket. `norm` is "l2", as in the paper, or "max", whose error is smaller. The
    variance is at most ω |x|², with ω = min(B / levels², sqrt(B) / levels) for buckets of B values
    and the L2 norm; error feedback scales by 1 / (1 + ω). A bucket with NaN or infinity comes back
    as NaN. Raises ValueError for levels outside of 1..32767, an unknown norm and a missing key.
    Source: QSGD (Alistarh et al., NeurIPS 2017).
    """

    levels: int = 7
    bucket_size: int = buckets.BUCKET
    norm: str = "l2"

    def __post_init__(self) -> None:
        store_whole(self, "levels", 1, 2**15 - 1)
        store_whole(self, "bucket_size", 1)
        if self.norm not in NORMS:
            raise ValueError(f"QSGD: norm={self.norm!r} is unknown; use one of {list(NORMS)}.")

    unbiased = True
    needs_key = True

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

    def wire_bits(self, shape: int | Sequence[int], dtype: DTypeLike = jnp.float32) -> int:
        n = size_of(shape)
        return 8 * (packed_bytes(n, self.width) + 4 * buckets.count(n, self.bucket_size))

    def error_bound(self, x: ArrayLike) -> jax.Array:
        rows = buckets.split(x, self.bucket_size)
        each = _norm(rows, self.norm == "l2") * (1 / self.levels + 2.0**-18)
        # Where a level is a subnormal number, all values come back as 0.
        each = each + self.levels * buckets.TINY
        bound = buckets.of_values(each, self.bucket_size, x)
        return buckets.rounded(jnp.where(jnp.isnan(bound), jnp.inf, bound), x)

    def encode(self, x: ArrayLike, *, key: Key = None) -> jax.Array:
        buckets.require_key(self, key)
        flat = jnp.ravel(x).astype(jnp.float32)
        static: dict[str, Any] = {"bucket_size": self.bucket_size, "levels": self.levels}
        static["l2"] = self.norm == "l2"
        if self.width > 8 or self.bucket_size > LONGEST_BUCKET:
            return encode_jnp(buckets.words(key), flat, **static)[0]
        return codes.call("cgx_qsgd", encode_jnp, buckets.words(key), flat, **static)[0]

    def decode(self, payload: jax.Array, shape: Sequence[int], dtype: DTypeLike) -> jax.Array:
        like = jax.ShapeDtypeStruct(tuple(shape), dtype)
        packed, norms = jnp.split(payload, [packed_bytes(like.size, self.width)])
        levels = unpack(packed, self.width, like.size).astype(jnp.float32) - np.float32(self.levels)
        rows = buckets.split(levels, self.bucket_size)
        unit = from_bytes(norms, (len(rows), 1), jnp.float32) / np.float32(self.levels)
        return buckets.join(rows * unit, like)


def encode_jnp(
    words: jax.Array, x: jax.Array, *, bucket_size: int, levels: int, l2: bool
) -> list[jax.Array]:
    """The kernel cgx_qsgd, in plain jnp."""
    rows = buckets.split(x, bucket_size)
    norm = _norm(rows, l2)
    # The maximum changes no value. It keeps XLA from fusing product and sum into one rounding.
    steps = jnp.maximum(buckets.share(jnp.abs(rows), norm, levels), 0)
    level = jnp.floor(steps + buckets.uniform(words, *rows.shape))
    level = jnp.minimum(level, np.float32(levels))
    codes = jnp.where(rows < 0, -level, level) + np.float32(levels)
    packed = pack(codes.reshape(-1)[: x.size].astype(jnp.uint32), (2 * levels).bit_length())
    return [jnp.concatenate([packed, to_bytes(norm)])]


def _norm(rows: jax.Array, l2: bool) -> jax.Array:
    return l2_norm(rows) if l2 else buckets.largest(rows)


def l2_norm(rows: jax.Array) -> jax.Array:
    """Returns each row's L2 norm, f32[rows, 1], even where squares overflow or vanish.

    It is at most the largest float, and NaN where a value is not finite.
    """
    scale = buckets.largest(rows)
    norm = scale * jnp.sqrt(buckets.row_sums(jnp.square(buckets.share(rows, scale))))
    most = np.float32(np.finfo(np.float32).max)
    return jnp.where(norm > most, most, norm)
