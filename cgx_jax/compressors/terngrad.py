"""Codes of three values: TernGrad and 3LC."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from cgx_jax._types import Key, Pytree
from cgx_jax.arguments import store_whole
from cgx_jax.compressors import buckets
from cgx_jax.compressors.base import Maxima, Rounds, Summed, SummedCompressor
from cgx_jax.compressors.packing import from_bytes, pack_trits, size_of, to_bytes, unpack_trits
from cgx_jax.kernels import codes


@dataclasses.dataclass(frozen=True)
class _Ternary(buckets.Bucketed):
    """-scale, 0 or scale: five values in a byte, and 4 bytes for each bucket's scale."""

    def wire_bits(self, shape: int | Sequence[int], dtype: DTypeLike = jnp.float32) -> int:
        n = size_of(shape)
        return 8 * (-(-n // 5) + 4 * buckets.count(n, self.bucket_size))

    width = 2

    def decode(self, payload: jax.Array, shape: Sequence[int], dtype: DTypeLike) -> jax.Array:
        like = jax.ShapeDtypeStruct(tuple(shape), dtype)
        trits, scales = jnp.split(payload, [-(-like.size // 5)])
        values = unpack_trits(trits, like.size).astype(jnp.float32) - 1
        rows = buckets.split(values, self.bucket_size)
        return buckets.join(rows * from_bytes(scales, (len(rows), 1), jnp.float32), like)

    def _bound(self, x: ArrayLike, each: jax.Array) -> jax.Array:
        return buckets.of_values(each * (1 + 2.0**-18), self.bucket_size, x)


@dataclasses.dataclass(frozen=True)
class TernGrad(_Ternary):
    """Sends a value's sign times its bucket's largest magnitude, or 0, at random without bias.

    A value takes 1.6 bits, and a bucket 4 more bytes. Values are first clipped at `clip` times the
    root mean square of the whole leaf, which adds bias; `clip=None` does not clip. The variance is
    up to (sqrt(B) - 1) / 2 times |x|² for buckets of B values, so small buckets are more exact. A
    bucket with NaN or infinity comes back as NaN. Raises ValueError for a clip that is not
    positive, a bucket_size below 1 and a missing key. Source: TernGrad (Wen et al., NeurIPS 2017),
    which clips at standard deviations.
    """

    clip: float | None = 2.5

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_clip("TernGrad", self.clip)

    @property
    def unbiased(self) -> bool:
        return self.clip is None

    needs_key = True

    @property
    def block_size(self) -> int | None:
        return self.bucket_size if self.clip is None else None

    @property
    def prepares(self) -> bool:
        return self.clip is not None

    @property
    def feedback_scale(self) -> float:
        # E|lost|² of a bucket is |x|_1 max|x| - |x|², and |x|_1 max|x| is at most (sqrt(B) + 1) / 2
        # times |x|².
        return float(2 / (self.bucket_size**0.5 + 1))

    def prepare(self, x: jax.Array, state: Pytree) -> tuple[jax.Array, Pytree]:
        return _clipped(x, self.clip), state

    def error_bound(self, x: ArrayLike) -> jax.Array:
        value = jnp.asarray(x).astype(jnp.float32)
        ready = self.prepare(value, ())[0] if self.prepares else value
        bound = self._bound(x, buckets.largest(buckets.split(ready, self.bucket_size)))
        return buckets.rounded(bound + jnp.abs(value - ready), x)

    def encode(self, x: ArrayLike, *, key: Key = None) -> jax.Array:
        buckets.require_key(self, key)
        flat = jnp.ravel(x).astype(jnp.float32)
        operands = buckets.words(key), flat
        return codes.call("cgx_ternary", encode_jnp, *operands, bucket_size=self.bucket_size)[0]


@dataclasses.dataclass(frozen=True)
class SharedTernGrad(SummedCompressor):
    """`TernGrad` with one scale per bucket for all ranks, so that sums need no decoding.

    A first round finds each bucket's largest magnitude over the ranks. In a second round,
    `lax.psum` adds up the codes -1, 0 and 1. Codes are packed in words of 32 bits. Each code takes
    as many bits as a sum over the ranks needs: 3 for 2 and 3 ranks, 4 for up to 7, 8 for 64 to 127.
    `wire_bits` counts 8 bits per value, and `summed_bytes` counts the bits for a given number of
    ranks; both add 4 bytes per bucket. `clip` is as in `TernGrad`. A rank's variance grows with the
    largest scale of any rank, so no factor bounds error feedback, and using it raises ValueError. A
    bucket in which any rank holds NaN or infinity comes back as NaN. Raises ValueError for a
    bucket_size below 1, a clip that is not positive and a missing key. Source: scaler sharing in
    TernGrad (Wen et al., NeurIPS 2017).
    """

    bucket_size: int = buckets.BUCKET
    clip: float | None = 2.5

    def __post_init__(self) -> None:
        store_whole(self, "bucket_size", 1)
        _check_clip("SharedTernGrad", self.clip)

    @property
    def unbiased(self) -> bool:
        return self.clip is None

    needs_key = True

    @property
    def block_size(self) -> int | None:
        return self.bucket_size if self.clip is None else None

    width = 2
    feedback_scale = None

    def wire_bits(self, shape: int | Sequence[int], dtype: DTypeLike = jnp.float32) -> int:
        n = size_of(shape)
        return 8 * n + 32 * buckets.count(n, self.bucket_size)

    def summed_bytes(self, shape: Sequence[int], dtype: DTypeLike, world: int) -> int:
        n = size_of(shape)
        words = -(-n // (32 // _field_bits(world)))
        return 4 * (words + buckets.count(n, self.bucket_size))

    def error_bound(self, x: ArrayLike) -> jax.Array:
        return buckets.rounded(self.error_bound_of_sum(jnp.asarray(x)[None]), x)

    def error_bound_of_sum(self, x: jax.Array) -> jax.Array:
        value = x.astype(jnp.float32)
        ready = jax.vmap(lambda v: _clipped(v, self.clip))(value)
        scale = jax.vmap(self._scales)(ready).max(0)
        bound = buckets.of_values(scale, self.bucket_size, value[0])
        bound = bound * np.float32(x.shape[0] * (1 + 2.0**-18))
        return bound + jnp.abs(value - ready).sum(0)

    def _scales(self, x: jax.Array) -> jax.Array:
        """Returns fp32[buckets, 1]: infinite for NaN too, since a maximum may drop a NaN."""
        scale = buckets.largest(buckets.split(x, self.bucket_size))
        return jnp.where(jnp.isnan(scale), np.float32(np.inf), scale)

    def rounds(self, x: jax.Array, state: Pytree, *, key: Key, world: int) -> Rounds:
        buckets.require_key(self, key)
        ready = _clipped(x, self.clip)
        rows = buckets.split(ready, self.bucket_size)
        (scale,) = yield Maxima([self._scales(ready)])
        share = buckets.share(jnp.abs(rows), scale)
        keeps = share + buckets.uniform(buckets.words(key), *rows.shape) >= 1
        codes = jnp.where(keeps, jnp.sign(rows).astype(jnp.int32), 0)
        (total,) = yield [_pack_fields(codes.reshape(-1)[: x.size] + 1, world)]
        sums = _unpack_fields(total, world, x.size) - world

        def leaf(values: jax.Array) -> jax.Array:
            return buckets.join(buckets.split(values, self.bucket_size) * scale, x)

        return Summed(leaf(sums), leaf(codes.reshape(-1)[: x.size]), state)


@dataclasses.dataclass(frozen=True)
class ThreeLC(_Ternary):
    """Rounds values to -scale, 0 or scale, with scale `sparsity` times the bucket's largest.

    A value takes 1.6 bits, and a bucket 4 more bytes. A `sparsity` above 1 makes more values zero.
    No value's error is larger than the value, so error feedback makes up for what is lost. A bucket
    with NaN or infinity comes back as NaN. The paper's last stage, which shortens runs of zeros, is
    left out, since its output has no fixed size. Raises ValueError for a sparsity outside of [1, 2)
    and a bucket_size below 1. Source: 3LC (Lim et al., MLSys 2019).
    """

    sparsity: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.sparsity < 2:
            raise ValueError(f"ThreeLC: sparsity={self.sparsity} must be in [1, 2).")

    def _scale(self, rows: jax.Array) -> jax.Array:
        most = np.float32(np.finfo(np.float32).max)
        return jnp.minimum(buckets.largest(rows), most / np.float32(2)) * np.float32(self.sparsity)

    def error_bound(self, x: ArrayLike) -> jax.Array:
        rows = buckets.split(x, self.bucket_size)
        return buckets.rounded(self._bound(x, buckets.largest(rows)), x)

    def encode(self, x: ArrayLike, *, key: Key = None) -> jax.Array:
        x = jnp.asarray(x)
        rows = buckets.split(x, self.bucket_size)
        scale = self._scale(rows)
        return _payload(rows, scale, jnp.abs(rows) > scale / 2, x.size)


def encode_jnp(words: jax.Array, x: jax.Array, *, bucket_size: int) -> list[jax.Array]:
    """The kernel cgx_ternary, in plain jnp."""
    rows = buckets.split(x, bucket_size)
    scale = buckets.largest(rows)
    # The maximum changes no value. It keeps XLA from fusing product and sum into one rounding.
    share = jnp.maximum(buckets.share(jnp.abs(rows), scale), 0)
    return [_payload(rows, scale, share + buckets.uniform(words, *rows.shape) >= 1, x.size)]


def _payload(rows: jax.Array, scale: jax.Array, keeps: jax.Array, size: int) -> jax.Array:
    trits = jnp.where(keeps, jnp.where(rows < 0, 0, 2), 1).astype(jnp.uint8)
    return jnp.concatenate([pack_trits(trits.reshape(-1)[:size]), to_bytes(scale)])


def _field_bits(world: int) -> int:
    """Bits that hold the sum of `world` codes of 0, 1 or 2."""
    return (2 * world).bit_length()


def _pack_fields(codes: jax.Array, world: int) -> jax.Array:
    """Packs codes 0..2 into uint32 words whose fields can hold sums over `world` ranks."""
    bits = _field_bits(world)
    fields = 32 // bits
    planes = jnp.pad(codes.astype(jnp.uint32), (0, -codes.size % fields)).reshape(fields, -1)
    return (planes << (np.arange(fields) * bits).astype(np.uint32)[:, None]).sum(
        axis=0, dtype=jnp.uint32
    )


def _unpack_fields(words: jax.Array, world: int, size: int) -> jax.Array:
    """Inverts `_pack_fields` for words that are sums: returns int32[size]."""
    bits = _field_bits(world)
    shifts = (np.arange(32 // bits) * bits).astype(np.uint32)[:, None]
    return ((words[None] >> shifts) & np.uint32(2**bits - 1)).reshape(-1)[:size].astype(jnp.int32)


def _check_clip(where: str, clip: float | None) -> None:
    if clip is not None and not clip > 0:
        raise ValueError(f"{where}: clip={clip} must be positive; pass None to clip nothing.")


def _clipped(x: jax.Array, clip: float | None) -> jax.Array:
    """`x` with no magnitude above `clip` times the root mean square."""
    if clip is None:
        return x
    # The deviation of gradients around 0, which is not 0 where all values are the same. It is found
    # even where squares overflow.
    scale = jnp.abs(x).max(initial=0)
    scale = jnp.where(jnp.isfinite(scale) & (scale > 0), scale, 1)
    root = scale * jnp.sqrt(jnp.square(buckets.share(x, scale)).mean()) if x.size else scale
    limit = np.float32(clip) * root
    # A leaf with NaN or infinity is not clipped: its mean is NaN.
    return jnp.where(jnp.abs(x) > limit, jnp.sign(x) * limit, x)
