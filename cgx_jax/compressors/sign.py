"""One bit per value: only the sign, or the sign with one scale per bucket."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

from cgx_jax._types import Key, Pytree
from cgx_jax.compressors import buckets
from cgx_jax.compressors.base import PayloadCompressor
from cgx_jax.compressors.packing import (
    from_bytes,
    pack,
    pack_signs,
    pack_trits,
    packed_bytes,
    size_of,
    to_bytes,
    unpack_signs,
    unpack_trits,
)


class _Vote(PayloadCompressor):
    """Decoded values are 1 or -1: every rank has one vote, and magnitudes are lost."""

    reductions: ClassVar[tuple[str, ...]] = ("scatter_gather",)
    owner_exact: ClassVar[bool] = False
    feedback_scale: ClassVar[float | None] = None  # a sign may exceed its value

    def error_bound(self, x: ArrayLike) -> jax.Array:
        return buckets.rounded(jnp.abs(jnp.asarray(x).astype(jnp.float32)) + 1, x)


@dataclasses.dataclass(frozen=True)
class SignSGD(_Vote):
    """The sign of every value; the sum is the sign that most ranks have.

    A value takes one bit. Sums are 1 where more ranks are positive, -1 where more are negative, and
    0 in a tie, so a mean is the same as a sum. A zero counts as positive, and NaN, which a bit
    cannot carry, as negative. Ties need a third value, so over an even number of ranks the sums
    take 1.6 bits per value. Exact sums are no votes and have the scale of the gradients: those of
    small leaves, of small buffers under "auto", and on one rank. Error feedback raises ValueError,
    since a sign may be larger than its value: see `ScaledSign`. Source: signSGD with
    majority vote (Bernstein et al., 2018 and 2019).
    """

    def wire_bits(self, shape: int | Sequence[int], dtype: DTypeLike = jnp.float32) -> int:
        return size_of(shape)

    def of_sums(self, world: int) -> PayloadCompressor:
        return self if world % 2 else _Verdict()

    def encode(self, x: ArrayLike, *, key: Key = None) -> jax.Array:
        return pack_signs(jnp.ravel(x).astype(jnp.float32))

    def decode(self, payload: jax.Array, shape: Sequence[int], dtype: DTypeLike) -> jax.Array:
        return unpack_signs(payload, size_of(shape)).reshape(shape).astype(dtype)


@dataclasses.dataclass(frozen=True)
class Signum(SignSGD):
    """`SignSGD` of a running mean of the gradients: momentum * mean + (1 - momentum) * gradient.

    The mean is the compressor's state, fp32 in the leaf's shape, one for each rank. Raises
    ValueError for a momentum outside of [0, 1). Source: Signum (Bernstein et al., ICML 2018).
    """

    momentum: float = 0.9

    def __post_init__(self) -> None:
        if not 0 <= self.momentum < 1:
            raise ValueError(
                f"Signum: momentum={self.momentum} must be in [0, 1); SignSGD() has no momentum."
            )

    def init(self, shape: Sequence[int], dtype: DTypeLike) -> Pytree:
        return jnp.zeros(tuple(shape), jnp.float32)

    def prepare(self, x: jax.Array, state: Pytree) -> tuple[jax.Array, Pytree]:
        mean = self.momentum * state + (1 - self.momentum) * x
        return mean, mean


@dataclasses.dataclass(frozen=True)
class _Verdict(_Vote):
    """The sign of a sum of votes: 1, -1, or 0 for a tie."""

    def wire_bits(self, shape: int | Sequence[int], dtype: DTypeLike = jnp.float32) -> int:
        return 8 * -(-size_of(shape) // 5)

    def encode(self, x: ArrayLike, *, key: Key = None) -> jax.Array:
        return pack_trits((jnp.sign(jnp.ravel(x)) + 1).astype(jnp.uint8))

    def decode(self, payload: jax.Array, shape: Sequence[int], dtype: DTypeLike) -> jax.Array:
        trits = unpack_trits(payload, size_of(shape)).astype(jnp.float32) - 1
        return trits.reshape(shape).astype(dtype)


@dataclasses.dataclass(frozen=True)
class ScaledSign(buckets.Bucketed):
    """The sign of every value times the mean magnitude of its bucket.

    A value takes one bit, and a bucket 4 more bytes. The code loses a share of at most 1 - |x|_1² /
    (n |x|_2²) of a bucket's squares, so error feedback makes up for it. A bucket with NaN or
    infinity comes back as NaN or infinity. Raises ValueError for a bucket_size below 1. Source:
    EF-SignSGD (Karimireddy et al., ICML 2019), whose bucket is the whole leaf.
    """

    def wire_bits(self, shape: int | Sequence[int], dtype: DTypeLike = jnp.float32) -> int:
        n = size_of(shape)
        return 8 * (packed_bytes(n, 1) + 4 * buckets.count(n, self.bucket_size))

    def filler(self, chunk: jax.Array) -> jax.Array:
        return self._scale(chunk)[-1, 0]

    def _scale(self, x: ArrayLike) -> jax.Array:
        here = buckets.filled(jnp.size(x), self.bucket_size).sum(axis=1, keepdims=True)
        rows = jnp.abs(buckets.split(x, self.bucket_size))
        # Divides first: the sum of a bucket of large values may overflow.
        return (rows / here.astype("float32")).sum(axis=1, keepdims=True)

    def error_bound(self, x: ArrayLike) -> jax.Array:
        flat = jnp.ravel(x)
        rows = jnp.abs(buckets.split(flat, self.bucket_size))
        lost = jnp.maximum(rows, self._scale(flat)) * (1 + 2.0**-18)
        return buckets.rounded(buckets.of_values(lost, self.bucket_size, x), x)

    def encode(self, x: ArrayLike, *, key: Key = None) -> jax.Array:
        x = jnp.asarray(x)
        signs = pack_signs(jnp.ravel(x).astype(jnp.float32))
        return jnp.concatenate([signs, to_bytes(self._scale(x))])

    def decode(self, payload: jax.Array, shape: Sequence[int], dtype: DTypeLike) -> jax.Array:
        like = jax.ShapeDtypeStruct(tuple(shape), dtype)
        signs, scales = jnp.split(payload, [packed_bytes(like.size, 1)])
        rows = buckets.split(unpack_signs(signs, like.size), self.bucket_size)
        return buckets.join(rows * from_bytes(scales, (len(rows), 1), jnp.float32), like)


@dataclasses.dataclass(frozen=True)
class OneBit(buckets.Bucketed):
    """One bit per value: the mean of its bucket's negative values, or of the others.

    A bucket takes 8 more bytes for the two means. The code is a projection, so error feedback makes
    up for what it loses. If a bucket holds NaN or infinity, so does what comes back, at least for
    the values on the same side of zero. Raises ValueError for a bucket_size below 1. Source: 1-bit
    SGD (Seide et al., Interspeech 2014), whose bucket is a column of the matrix.
    """

    def wire_bits(self, shape: int | Sequence[int], dtype: DTypeLike = jnp.float32) -> int:
        n = size_of(shape)
        return 8 * (packed_bytes(n, 1) + 8 * buckets.count(n, self.bucket_size))

    def filler(self, chunk: jax.Array) -> jax.Array:
        low, high = self._means(chunk)[-1]
        return jnp.where(chunk[-1] < 0, low, high)  # the mean of the last value's side

    def _means(self, x: ArrayLike) -> jax.Array:
        """Returns each bucket's means of negative values and of the others, f32[buckets, 2]."""
        rows = buckets.split(x, self.bucket_size)
        here = buckets.filled(jnp.size(x), self.bucket_size)
        parts = [_mean(rows, here & (rows < 0)), _mean(rows, here & ~(rows < 0))]
        return jnp.concatenate(parts, axis=1)

    def error_bound(self, x: ArrayLike) -> jax.Array:
        rows = jnp.abs(buckets.split(x, self.bucket_size))
        largest = buckets.maximum(rows, axis=1, keepdims=True)
        lost = buckets.of_values(largest * (1 + 2.0**-18), self.bucket_size, x)
        return buckets.rounded(lost, x)

    def encode(self, x: ArrayLike, *, key: Key = None) -> jax.Array:
        x = jnp.asarray(x)
        bits = pack((~(jnp.ravel(x) < 0)).astype(jnp.uint32), 1)
        return jnp.concatenate([bits, to_bytes(self._means(x))])

    def decode(self, payload: jax.Array, shape: Sequence[int], dtype: DTypeLike) -> jax.Array:
        like = jax.ShapeDtypeStruct(tuple(shape), dtype)
        bits, means = jnp.split(payload, [packed_bytes(like.size, 1)])
        positive = buckets.split(unpack_signs(bits, like.size), self.bucket_size) > 0
        low, high = jnp.split(from_bytes(means, (len(positive), 2), jnp.float32), 2, axis=1)
        return buckets.join(jnp.where(positive, high, low), like)


def _mean(rows: jax.Array, where: Any) -> jax.Array:
    """Returns the mean of each row's marked values, f32[rows, 1]; 0 if none is marked."""
    number = jnp.maximum(where.sum(axis=1, keepdims=True), 1).astype(jnp.float32)
    return jnp.where(where, rows / number, 0).sum(axis=1, keepdims=True)
