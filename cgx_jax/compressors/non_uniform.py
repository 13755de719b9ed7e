"""Levels that lie closer together near zero: fixed tables, and levels fitted to the values."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from cgx_jax._types import Key
from cgx_jax.arguments import store_whole
from cgx_jax.compressors import buckets
from cgx_jax.compressors.base import PayloadCompressor
from cgx_jax.compressors.packing import from_bytes, pack, packed_bytes, size_of, to_bytes, unpack
from cgx_jax.compressors.qsgd import l2_norm

KINDS = ("exponential", "fitted")
CELLS = 256  # of the histogram that levels are fitted to
ROUNDS = 8


@dataclasses.dataclass(frozen=True)
class DynamicTree8(buckets.Bucketed):
    """8 bits per value: a sign, a power of ten and a fraction, relative to the bucket's largest.

    The fewer bits the power takes, the more are left for the fraction. The fraction has 64 steps
    for values from a tenth of the largest magnitude up, and one step at a millionth of it. The
    largest magnitude takes 4 bytes per bucket. A bucket with NaN or infinity comes back as NaN.
    Raises ValueError for a bucket_size below 1. Source: dynamic tree quantization (Dettmers, ICLR
    2016).
    """

    width = 8

    def wire_bits(self, shape: int | Sequence[int], dtype: DTypeLike = jnp.float32) -> int:
        n = size_of(shape)
        return 8 * (n + 4 * buckets.count(n, self.bucket_size))

    def error_bound(self, x: ArrayLike) -> jax.Array:
        magnitude = jnp.abs(jnp.asarray(x).astype(jnp.float32))
        largest = buckets.largest(buckets.split(x, self.bucket_size))
        share = np.float32(np.diff(tree()).max() / 2 + 2.0**-20)
        absolute = buckets.of_values(largest * share, self.bucket_size, x)
        # 0 is a level, so the nearest level is no farther than 0.
        bound = jnp.minimum(absolute, magnitude * np.float32(1 + 2.0**-18)) + 2 * buckets.TINY
        return buckets.rounded(jnp.where(jnp.isfinite(absolute), bound, jnp.inf), x)

    def encode(self, x: ArrayLike, *, key: Key = None) -> jax.Array:
        x = jnp.asarray(x)
        rows = buckets.split(x, self.bucket_size)
        largest = buckets.largest(rows)
        share = buckets.share(jnp.abs(rows), largest)
        table = tree()
        between = ((table[1:] + table[:-1]) / 2).astype(np.float32)
        code = jnp.searchsorted(between, share.reshape(-1), method="compare_all").astype(jnp.uint8)
        code = code | ((rows.reshape(-1) < 0).astype(jnp.uint8) << 7)
        return jnp.concatenate([code[: x.size], to_bytes(largest)])

    def decode(self, payload: jax.Array, shape: Sequence[int], dtype: DTypeLike) -> jax.Array:
        like = jax.ShapeDtypeStruct(tuple(shape), dtype)
        codes, scales = jnp.split(payload, [like.size])
        share = jnp.asarray(tree())[(codes & np.uint8(127)).astype(jnp.int32)]
        rows = buckets.split(jnp.where(codes >= 128, -share, share), self.bucket_size)
        return buckets.join(rows * from_bytes(scales, (len(rows), 1), jnp.float32), like)


@functools.lru_cache(maxsize=1)
def tree() -> np.ndarray:
    """The 128 magnitudes of `DynamicTree8`, ascending from 0 to 1: fp32."""
    found = [0.0]
    for zeros in range(7):
        edges = np.linspace(0.1, 1, 2 ** (6 - zeros) + 1)
        found += list((edges[1:] + edges[:-1]) / 2 * 10.0**-zeros)
    found[found.index(max(found))] = 1.0
    return np.sort(found).astype(np.float32)


@dataclasses.dataclass(frozen=True)
class NonUniform(PayloadCompressor):
    """Levels with uneven steps: `levels` "exponential" or "fitted", `bits` bits per value.

    *Exponential*: a sign, and 0 or one of the powers 1, 1/2, 1/4, ... of the bucket's L2 norm,
    rounded at random without bias. It needs a key. Source: NUQSGD (Ramezani-Kebrya et al., JMLR
    2021).

    *Fitted*: shares of the bucket's largest magnitude, rounded to the nearest of 2^bits levels.
    Every encoded run of values has its own levels and sends them, 4 bytes each. Lloyd's rule fits
    them to a histogram, as QSDP learns its levels. One level is 0, so no value's error is larger
    than the value. Source: QSDP (Markov et al., ICML 2023).

    Both send 4 more bytes per bucket. A bucket with NaN or infinity comes back as NaN. Raises
    ValueError for bits outside of 2..8, an unknown kind of levels and a missing key.
    """

    bits: int = 4
    levels: str = "exponential"
    bucket_size: int = buckets.BUCKET

    def __post_init__(self) -> None:
        store_whole(self, "bits", 2, 8)
        store_whole(self, "bucket_size", 1)
        if self.levels not in KINDS:
            raise ValueError(
                f"NonUniform: levels={self.levels!r} is unknown; use one of {list(KINDS)}."
            )

    @property
    def _fits(self) -> bool:
        return self.levels == "fitted"

    @property
    def unbiased(self) -> bool:
        return not self._fits

    @property
    def needs_key(self) -> bool:
        return not self._fits

    @property
    def block_size(self) -> int | None:
        return None if self._fits else self.bucket_size

    @property
    def width(self) -> int:
        return self.bits

    @property
    def feedback_scale(self) -> float:
        # Between powers of two the variance is at most x² / 8. Below the smallest power it is at
        # most a quarter of that power's square.
        least = 2.0 ** -(2 ** (self.bits - 1) - 2)
        return 1.0 if self._fits else 1 / (1 + 1 / 8 + self.bucket_size * least**2 / 4)

    def wire_bits(self, shape: int | Sequence[int], dtype: DTypeLike = jnp.float32) -> int:
        n = size_of(shape)
        table = 4 * 2**self.bits if self._fits else 0
        return 8 * (packed_bytes(n, self.bits) + 4 * buckets.count(n, self.bucket_size) + table)

    def error_bound(self, x: ArrayLike) -> jax.Array:
        rows = buckets.split(x, self.bucket_size)
        if self._fits:
            each = jnp.abs(rows) + buckets.largest(rows) * np.float32(2.0**-18)
        else:
            norm = _finite(l2_norm(rows))
            least = np.float32(self._powers()[1])
            each = jnp.maximum(jnp.abs(rows), norm * least) * np.float32(1 + 2.0**-18)
            each = each + norm * np.float32(2.0**-22)
        bound = buckets.of_values(each, self.bucket_size, x)
        return buckets.rounded(jnp.where(jnp.isnan(bound), jnp.inf, bound), x)

    def _powers(self) -> np.ndarray:
        count = 2 ** (self.bits - 1)
        return np.array([0, *(2.0 ** -np.arange(count - 2, -1, -1))], np.float32)

    def encode(self, x: ArrayLike, *, key: Key = None) -> jax.Array:
        x = jnp.asarray(x)
        rows = buckets.split(x, self.bucket_size)
        if self._fits:
            scale = buckets.largest(rows)
            share = buckets.share(rows, scale)
            table = _fitted(share, buckets.filled(x.size, self.bucket_size), 2**self.bits)
            between = (table[1:] + table[:-1]) / 2
            code = jnp.searchsorted(between, share.reshape(-1), method="compare_all")
            parts = [self._packed(code, x.size), to_bytes(scale), to_bytes(table)]
            return jnp.concatenate(parts)
        buckets.require_key(self, key)
        scale, powers = _finite(l2_norm(rows)), self._powers()
        share = buckets.share(jnp.abs(rows), scale)
        below = jnp.searchsorted(powers[1:], share.reshape(-1), side="right", method="compare_all")
        below = jnp.minimum(below, len(powers) - 2).reshape(rows.shape)
        low, high = jnp.asarray(powers)[below], jnp.asarray(powers)[below + 1]
        up = buckets.uniform(buckets.words(key), *rows.shape) * (high - low) < share - low
        code = below + up.astype(jnp.int32) + jnp.where(rows < 0, len(powers), 0)
        return jnp.concatenate([self._packed(code.reshape(-1), x.size), to_bytes(scale)])

    def _packed(self, code: jax.Array, size: int) -> jax.Array:
        return pack(code[:size].astype(jnp.uint32), self.bits)

    def decode(self, payload: jax.Array, shape: Sequence[int], dtype: DTypeLike) -> jax.Array:
        like = jax.ShapeDtypeStruct(tuple(shape), dtype)
        number = buckets.count(like.size, self.bucket_size)
        ends = np.cumsum([packed_bytes(like.size, self.bits), 4 * number]).tolist()
        packed, scales, last = jnp.split(payload, ends)
        code = unpack(packed, self.bits, like.size).astype(jnp.int32)
        if self._fits:
            values = from_bytes(last, (2**self.bits,), jnp.float32)[code]
        else:
            powers = self._powers()
            values = jnp.asarray(np.concatenate([powers, -powers]))[code]
        rows = buckets.split(values, self.bucket_size)
        return buckets.join(rows * from_bytes(scales, (number, 1), jnp.float32), like)


def _fitted(share: jax.Array, here: np.ndarray, count: int) -> jax.Array:
    """Fits `count` ascending levels in [-1, 1], one of them 0, to the values marked by `here`."""
    cell = jnp.clip(jnp.floor((share + 1) * (CELLS / 2)), 0, CELLS - 1).astype(jnp.int32)
    weights = jnp.where(here, jnp.isfinite(share), False).astype(jnp.float32)
    seen = jnp.zeros(CELLS, jnp.float32).at[cell.reshape(-1)].add(weights.reshape(-1))
    centers = ((np.arange(CELLS) + 0.5) * (2 / CELLS) - 1).astype(np.float32)
    # The first levels follow a normal density to the power of 1/3: they are closer together near 0.
    levels = jnp.asarray(np.linspace(-1, 1, count) ** 3 * 0.5 + np.linspace(-1, 1, count) * 0.5)
    levels = levels.astype(jnp.float32)
    for _ in range(ROUNDS):
        of = jnp.argmin(jnp.abs(centers[:, None] - levels[None]), axis=1)
        number = jnp.zeros(count, jnp.float32).at[of].add(seen)
        total = jnp.zeros(count, jnp.float32).at[of].add(seen * centers)
        levels = jnp.where(number > 0, total / jnp.maximum(number, 1), levels)
    return levels.at[jnp.argmin(jnp.abs(levels))].set(0)


def _finite(scale: jax.Array) -> jax.Array:
    return jnp.where(jnp.isfinite(scale), scale, np.float32(np.nan))
