"""What low-bit codes share: buckets with one scale each, error bounds, noise, argument checks."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from cgx_jax._types import Key, Shaped
from cgx_jax.arguments import store_whole
from cgx_jax.compressors.base import PayloadCompressor
from cgx_jax.kernels import reference

BUCKET = 512
TINY = np.float32(np.finfo(np.float32).tiny)


@dataclasses.dataclass(frozen=True)
class Bucketed(PayloadCompressor):
    """A code of buckets of `bucket_size` values, each with a scale of its own."""

    bucket_size: int = BUCKET

    def __post_init__(self) -> None:
        store_whole(self, "bucket_size", 1)

    @property
    def block_size(self) -> int | None:
        return self.bucket_size


def split(x: ArrayLike, size: int, *, edge: bool = False) -> jax.Array:
    """Cuts any array into fp32[buckets, size].

    Zeros fill up the last bucket, or with `edge` copies of the last value, which widen no bucket.
    """
    flat = jnp.ravel(x).astype(jnp.float32)
    mode = "edge" if edge and flat.size else "constant"
    return jnp.pad(flat, (0, -flat.size % size), mode=mode).reshape(-1, size)


def join(rows: jax.Array, like: Shaped) -> jax.Array:
    """The inverse of `split`, in the shape and dtype of `like`."""
    shape = jnp.shape(like)
    return rows.reshape(-1)[: int(np.prod(shape))].reshape(shape).astype(jnp.result_type(like))


def of_values(each: jax.Array, size: int, x: ArrayLike) -> jax.Array:
    """Returns fp32[buckets, 1] or fp32[buckets, size] for each value of `x`, in its shape."""
    like = jax.ShapeDtypeStruct(jnp.shape(x), jnp.float32)
    return join(jnp.broadcast_to(each, (len(each), size)), like)


def count(size: int, bucket: int) -> int:
    """How many buckets hold `size` values."""
    return -(-size // bucket)


def filled(size: int, bucket: int) -> np.ndarray:
    """Returns bool[buckets, bucket]: True for values, False for the padding of the last bucket."""
    return (np.arange(count(size, bucket) * bucket) < size).reshape(-1, bucket)


def share(rows: jax.Array, scale: jax.Array, top: float = 1) -> jax.Array:
    """Divides each row by its positive scale, times `top`; 0 where the scale is 0 or NaN.

    It multiplies by the inverse, as XLA divides, but with the same result on every processor. The
    inverse of a large scale is not a normal number, the inverse of a small scale may overflow, and
    some processors flush subnormal numbers to 0. Powers of two therefore bring scales and values
    into range first.
    """
    small = jnp.where(scale < np.float32(2.0**-90), np.float32(2.0**64), np.float32(1))
    down = jnp.where(scale > np.float32(2.0**64), np.float32(2.0**-64), small)
    here = scale >= TINY
    factor = jnp.where(here, np.float32(top) / (scale * down), 0)
    return jnp.where(here, normal(rows) * down * factor, 0)


def normal(x: jax.Array) -> jax.Array:
    """Returns `x` with 0 in place of fp32's subnormal numbers."""
    return jnp.where(jnp.abs(x) < TINY, 0, x)


def maximum(x: jax.Array, *, axis: int | None = None, keepdims: bool = False) -> jax.Array:
    """Returns `x.max`: 0 if there is no value, and NaN if any value is NaN.

    On CPUs, XLA leaves maxima of 4,096 values or more to a library that drops NaN.
    """
    if not x.size:
        return jnp.max(x, axis=axis, keepdims=keepdims, initial=0)
    most = jnp.max(x, axis=axis, keepdims=keepdims)
    return jnp.where(jnp.isnan(x).any(axis=axis, keepdims=keepdims), np.float32(np.nan), most)


def largest(rows: jax.Array) -> jax.Array:
    """Returns each row's largest magnitude, fp32[rows, 1].

    It is NaN if a value is not finite, and 0 if it is subnormal. The function compares bit
    patterns, which takes one pass where `maximum` takes two.
    """
    bits = lax.bitcast_convert_type(rows, jnp.int32) & np.int32(0x7FFFFFFF)
    most = bits.max(axis=1, keepdims=True)
    value = jnp.where(most < TINY.view(np.int32), 0, lax.bitcast_convert_type(most, jnp.float32))
    return jnp.where(most >= np.int32(0x7F800000), np.float32(np.nan), value)


def row_sums(rows: jax.Array) -> jax.Array:
    """Returns the row sums, fp32[k, 1], of fp32[k, n] >= 0, in the kernels' order of additions.

    Rows are padded to a power of two. Then their second half is added to the first until one value
    is left.
    """
    half = 1 << (rows.shape[1] - 1).bit_length()
    rows = jnp.pad(rows, ((0, 0), (0, half - rows.shape[1])))
    while half > 1:
        half //= 2
        # The maximum changes no value. It keeps XLA from fusing a product and the sum into one
        # rounding.
        rows = jnp.maximum(rows, 0)
        rows = rows[:, :half] + rows[:, half:]
    return rows


def words(key: Key) -> jax.Array:
    """Returns the words that noise is drawn from, uint32[2], by a JAX key (typed or raw)."""
    assert key is not None  # `require_key` has seen it
    return jax.random.bits(key, (2,), jnp.uint32)


def uniform(words: jax.Array, rows: int, columns: int) -> jax.Array:
    """Draws numbers in [0, 1) of 24 bits, fp32[rows, columns], as the native kernels do."""
    return reference.uniform(words, 0, 0, rows, columns)


def rounded(bound: jax.Array, x: ArrayLike) -> jax.Array:
    """Returns `bound`, an error of fp32 values, plus the error of rounding to the dtype of `x`.

    It is infinite where `x` is not finite, and where the result may exceed the largest value of the
    dtype. It allows for subnormal fp32 numbers that come back as zero.
    """
    info = jnp.finfo(jnp.result_type(x))
    size = jnp.abs(jnp.asarray(x).astype(jnp.float32)) + bound
    least = float(info.smallest_subnormal) + float(jnp.finfo(jnp.float32).tiny)
    whole = bound + size * float(info.eps) + least
    return jnp.where(size <= float(info.max), whole, jnp.inf)


def require_key(compressor: Any, key: Key) -> None:
    """Raises ValueError if there is no key to draw noise from."""
    if key is None:
        raise ValueError(f"{compressor}: rounding at random needs key=jax.random.key(n).")
