"""Exact values, and values in a narrower float type."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from cgx_jax._types import Key
from cgx_jax.compressors import buckets
from cgx_jax.compressors.base import PayloadCompressor
from cgx_jax.compressors.packing import from_bytes, size_of, to_bytes
from cgx_jax.kernels.reference import random_bits


@dataclasses.dataclass(frozen=True)
class Identity(PayloadCompressor):
    """No compression: the reduction is `lax.psum`, for every dtype that it takes.

    Numbers of 32 bits and more have the bits of `lax.psum`. Narrower ones are added up in 32 bits
    and rounded once. A leaf has any shape and dtype, and its code is its bytes.
    """

    lossless = True
    carries_nonfinite = True

    block_size = 1
    unbiased = True

    def supports(self, dtype: DTypeLike) -> bool:
        return True

    def wire_bits(self, shape: int | Sequence[int], dtype: DTypeLike = jnp.float32) -> int:
        return 8 * np.dtype(dtype).itemsize * size_of(shape)

    def error_bound(self, x: ArrayLike) -> jax.Array:
        return jnp.zeros(jnp.shape(x), jnp.float32)

    def encode(self, x: ArrayLike, *, key: Key = None) -> jax.Array:
        x = jnp.asarray(x)
        return to_bytes(x.astype(jnp.uint8) if x.dtype == bool else x)

    def decode(self, payload: jax.Array, shape: Sequence[int], dtype: DTypeLike) -> jax.Array:
        if np.dtype(dtype) == np.dtype(bool):
            return from_bytes(payload, shape, jnp.uint8).astype(bool)
        return from_bytes(payload, shape, dtype)


_CAST_TYPES = tuple(
    np.dtype(t) for t in (jnp.bfloat16, jnp.float16, jnp.float8_e4m3fn, jnp.float8_e5m2)
)


@dataclasses.dataclass(frozen=True)
class Cast(PayloadCompressor):
    """Values rounded to `dtype`: bfloat16, float16, float8_e4m3fn or float8_e5m2.

    A value of f32, bf16 or f16 takes 16 or 8 bits on the wire on every platform: payloads travel as
    bytes, so XLA cannot widen them. Sums run in fp32. Out-of-range values follow the type:
    infinite, or NaN for float8_e4m3fn, which has no infinity.

    `rounding` is "nearest", or for bfloat16 "stochastic": to one of the two nearest numbers, such
    that the expectation is the value. Needs a key. Numbers of bfloat16 stay as they are.

    Raises ValueError for another dtype, for another rounding or one that the dtype does not have,
    and for a missing key.
    """

    carries_nonfinite = True

    dtype: DTypeLike
    rounding: Literal["nearest", "stochastic"] = "nearest"

    def __post_init__(self) -> None:
        dtype = np.dtype(self.dtype)
        if dtype not in _CAST_TYPES:
            raise ValueError(
                f"Cast: dtype={dtype} is not one of {', '.join(map(str, _CAST_TYPES))}; "
                "use Identity() to send values unchanged."
            )
        object.__setattr__(self, "dtype", dtype)
        if self.rounding not in ("nearest", "stochastic"):
            raise ValueError(
                f'Cast: rounding={self.rounding!r} is unknown; use "nearest" or "stochastic".'
            )
        if self.rounding == "stochastic" and dtype != jnp.bfloat16:
            raise ValueError(
                f'Cast: rounding="stochastic" to {dtype} is not supported, only to bfloat16; use '
                'rounding="nearest", or Quantize(8, rounding="stochastic") for fewer bits.'
            )

    @property
    def unbiased(self) -> bool:
        return self.rounding == "stochastic"

    @property
    def needs_key(self) -> bool:
        return self.rounding == "stochastic"

    block_size = 1

    def wire_bits(self, shape: int | Sequence[int], dtype: DTypeLike = jnp.float32) -> int:
        return 8 * np.dtype(self.dtype).itemsize * size_of(shape)

    def error_bound(self, x: ArrayLike) -> jax.Array:
        """An ulp of the target type and of x's own; infinite past the target's range."""
        info, own = jnp.finfo(self.dtype), jnp.finfo(jnp.result_type(x))
        magnitude = jnp.abs(jnp.asarray(x).astype(jnp.float32))
        # Subnormal fp32 numbers may be flushed to zero.
        least = max(float(info.smallest_subnormal), float(jnp.finfo(jnp.float32).tiny))
        bound = magnitude * float(info.eps + own.eps) + least
        return jnp.where(magnitude <= float(info.max), bound, jnp.inf)

    def encode(self, x: ArrayLike, *, key: Key = None) -> jax.Array:
        nearest = jnp.asarray(x).astype(self.dtype)
        if self.rounding == "nearest":
            return to_bytes(nearest)
        buckets.require_key(self, key)
        rows = buckets.split(x, buckets.BUCKET)
        bits = lax.bitcast_convert_type(rows, jnp.uint32)
        # A number of bfloat16 is the upper half of one of fp32, and the lower half is the
        # probability of the next number: adding noise carries into the upper half.
        noise = random_bits(buckets.words(key), 0, 0, *rows.shape) >> 16
        upper = ((bits + noise) >> 16).astype(jnp.uint16)
        rounded = buckets.join(lax.bitcast_convert_type(upper, jnp.bfloat16), nearest)
        return to_bytes(jnp.where(jnp.isfinite(x), rounded, nearest))

    def decode(self, payload: jax.Array, shape: Sequence[int], dtype: DTypeLike) -> jax.Array:
        return from_bytes(payload, shape, self.dtype).astype(dtype)
