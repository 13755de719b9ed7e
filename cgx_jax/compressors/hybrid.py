"""Codes that select and quantize: adaptive thresholds, quantile bins, classes of exponents."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from cgx_jax._types import Key
from cgx_jax.arguments import store_whole
from cgx_jax.compressors import buckets
from cgx_jax.compressors.base import PayloadCompressor
from cgx_jax.compressors.packing import from_bytes, pack, packed_bytes, size_of, to_bytes, unpack
from cgx_jax.compressors.sparse import Keep, kept, position_bits, store_keep


@dataclasses.dataclass(frozen=True)
class AdaptiveThreshold(PayloadCompressor):
    """The largest positive and the lowest negative values, each replaced by the mean of its sign.

    Half of the `keep` values have each sign, but at least one, so the thresholds adapt to the leaf.
    A position takes ceil(log2(n + 1)) bits, and the two means 8 bytes. NaN and infinity are kept,
    and they make the means that include them non-finite. The code is a projection, so error
    feedback makes up for what it loses. Raises as `TopK` does. Source: AdaQ (Dryden et al., MLHPC
    2016).
    """

    reductions: ClassVar[tuple[str, ...]] = ("gather_sum",)
    selects: ClassVar[bool] = True

    keep: Keep = 0.01

    def __post_init__(self) -> None:
        store_keep(self)

    def _counts(self, size: int) -> tuple[int, int]:
        k = kept(self, size)
        half = min(max(k // 2, 1), k)
        return max(k - half, half), half

    def wire_bits(self, shape: int | Sequence[int], dtype: DTypeLike = jnp.float32) -> int:
        n = size_of(shape)
        return 8 * (packed_bytes(sum(self._counts(n)), position_bits(n)) + 8)

    def error_bound(self, x: ArrayLike) -> jax.Array:
        magnitude = jnp.abs(jnp.asarray(x).astype(jnp.float32))
        most = buckets.maximum(magnitude) * np.float32(1 + 2.0**-18)
        return buckets.rounded(jnp.broadcast_to(most, magnitude.shape), x)

    def encode(self, x: ArrayLike, *, key: Key = None) -> jax.Array:
        flat = jnp.ravel(x).astype(jnp.float32)
        parts, means = [], []
        for count, values in zip(self._counts(flat.size), (flat, -flat), strict=True):
            largest, at = lax.top_k(values, count)
            here = ~(largest <= 0)
            number = jnp.maximum(here.sum(), 1).astype(jnp.float32)
            means.append(jnp.where(here, largest / number, 0).sum())
            parts.append(jnp.where(here, at, flat.size).astype(jnp.uint32))
        packed = pack(jnp.concatenate(parts), position_bits(flat.size))
        return jnp.concatenate([packed, to_bytes(jnp.stack(means))])

    def decode(self, payload: jax.Array, shape: Sequence[int], dtype: DTypeLike) -> jax.Array:
        n = size_of(shape)
        above, below = self._counts(n)
        packed, means = jnp.split(payload, [packed_bytes(above + below, position_bits(n))])
        at = unpack(packed, position_bits(n), above + below)
        high, low = from_bytes(means, (2,), jnp.float32)
        flat = jnp.zeros(n, jnp.float32)
        flat = flat.at[at[:above]].set(high, mode="drop").at[at[above:]].set(-low, mode="drop")
        return flat.reshape(shape).astype(dtype)


@dataclasses.dataclass(frozen=True)
class SketchML(PayloadCompressor):
    """The mean of a value's bin; the bins are the quantiles of the values themselves.

    A value takes ceil(log2(bins)) bits, and a bin 4 bytes. The quantiles come from at most 8,192
    values of the run that is encoded, and the means from all its values. A value that is several
    quantiles at once has a bin of its own. The code is a projection, so error feedback makes up for
    what it loses. NaN and infinity come back as NaN, with the rest of their bin. Raises ValueError
    for `bins` outside of 2..256, TypeError if it is not an integer. Source: SketchML (Jiang et al.,
    SIGMOD 2018), without its sketch of keys.
    """

    bins: int = 64

    SAMPLE: ClassVar[int] = 8192

    def __post_init__(self) -> None:
        store_whole(self, "bins", 2, 256)

    @property
    def width(self) -> int:
        return (self.bins - 1).bit_length()

    def wire_bits(self, shape: int | Sequence[int], dtype: DTypeLike = jnp.float32) -> int:
        return 8 * (packed_bytes(size_of(shape), self.width) + 4 * self.bins)

    def error_bound(self, x: ArrayLike) -> jax.Array:
        value = jnp.asarray(x).astype(jnp.float32)
        most = 2 * buckets.maximum(jnp.abs(value)) * np.float32(1 + 2.0**-18)
        return buckets.rounded(jnp.broadcast_to(most, value.shape), x)

    def filler(self, chunk: jax.Array) -> jax.Array:
        return chunk[-1]

    def encode(self, x: ArrayLike, *, key: Key = None) -> jax.Array:
        flat = jnp.ravel(x).astype(jnp.float32)
        if not flat.size:
            return jnp.zeros(4 * self.bins, jnp.uint8)
        # An odd stride, since what repeats in a leaf mostly repeats after an even number of values.
        seen = jnp.sort(flat[:: -(-flat.size // self.SAMPLE) | 1])
        at = np.arange(1, self.bins) * seen.size // self.bins
        edges, search = seen[at], functools.partial(jnp.searchsorted, method="compare_all")
        # All copies of a quantile take the bin of the one in their middle.
        middle = (search(seen, edges, side="left") + search(seen, edges, side="right") - 1) // 2
        tie = search(jnp.asarray(at, np.int32), middle.astype(np.int32), side="right")
        code = search(edges, flat, side="left")
        edge = jnp.minimum(code, self.bins - 2)
        code = jnp.where(flat == edges[edge], tie[edge], code)
        number = jnp.zeros(self.bins, jnp.int32).at[code].add(1).astype(jnp.float32)
        # A sum of millions of values would lose the bits of each.
        block = jnp.arange(flat.size) // self.SAMPLE
        sums = jnp.zeros((-(-flat.size // self.SAMPLE), self.bins), jnp.float32)
        means = sums.at[block, code].add(flat / number[code]).sum(axis=0)
        means = jnp.where(jnp.isfinite(means), means, np.float32(np.nan))
        return jnp.concatenate([pack(code.astype(jnp.uint32), self.width), to_bytes(means)])

    def decode(self, payload: jax.Array, shape: Sequence[int], dtype: DTypeLike) -> jax.Array:
        n = size_of(shape)
        packed, means = jnp.split(payload, [packed_bytes(n, self.width)])
        table = from_bytes(means, (self.bins,), jnp.float32)
        code = unpack(packed, self.width, n).astype(jnp.int32)
        return table[code].reshape(shape).astype(dtype)


# The smallest magnitudes that are sent in 16 and in 8 bits.
_HALF, _BYTE = np.float32(2.0**-5), np.float32(2.0**-10)


@dataclasses.dataclass(frozen=True)
class INCEPTIONN(PayloadCompressor):
    """32, 16, 8 or no bits per value, by its exponent, and a tag of 2 bits that says which.

    Magnitudes of 1 or more are sent exactly in 32 bits, those of 2^-5 or more in 16 (bfloat16), and
    those of 2^-10 or more in 8 (a sign, and 7 bits from 0 to 2^-5). Smaller ones are not sent. Each
    class has room for its share of the values in `capacities`. In the classes of 32 and 16 bits the
    largest values come first, so that none waits forever; in the class of 8 bits the first ones of
    the leaf do. Values of 1 or more that find no room in 32 bits take 16. Values that find no room
    at all, or are too small, stay in the residual, so the code needs error feedback. NaN counts as
    the largest. Raises ValueError unless capacities are three shares in [0, 1], of which the first
    or the second is above 0. Source: INCEPTIONN (Li et al., MICRO 2018), with room of a fixed size.
    """

    capacities: tuple[float, float, float] = (0.01, 0.05, 0.2)

    def __post_init__(self) -> None:
        shares = tuple(float(c) for c in self.capacities)
        if len(shares) != 3 or not all(0 <= c <= 1 for c in shares) or not any(shares[:2]):
            raise ValueError(
                f"INCEPTIONN: capacities={self.capacities} must be three shares in [0, 1]: of "
                "the values sent in 32, in 16 and in 8 bits. One of the first two must be above 0."
            )
        object.__setattr__(self, "capacities", shares)

    def _counts(self, size: int) -> list[int]:
        return [int(np.ceil(c * size)) for c in self.capacities]

    def wire_bits(self, shape: int | Sequence[int], dtype: DTypeLike = jnp.float32) -> int:
        n = size_of(shape)
        whole, half, byte = self._counts(n)
        return 8 * (packed_bytes(n, 2) + 4 * whole + 2 * half + byte)

    def error_bound(self, x: ArrayLike) -> jax.Array:
        return buckets.rounded(jnp.abs(jnp.asarray(x).astype(jnp.float32)), x)

    def encode(self, x: ArrayLike, *, key: Key = None) -> jax.Array:
        flat = jnp.ravel(x).astype(jnp.float32)
        tag = self._tags(jnp.abs(flat))
        parts = []
        for number, room in enumerate(self._counts(flat.size), 1):
            mine = tag == number
            into = jnp.where(mine, jnp.cumsum(mine) - 1, room)
            parts.append(jnp.zeros(room, jnp.float32).at[into].set(flat, mode="drop"))
        whole, half, byte = parts
        eighth = jnp.minimum(jnp.round(jnp.abs(byte) * np.float32(2.0**12)), 127).astype(jnp.uint8)
        eighth = eighth | ((byte < 0).astype(jnp.uint8) << 7)
        coded = [to_bytes(whole), to_bytes(half.astype(jnp.bfloat16)), eighth]
        return jnp.concatenate([pack(tag, 2), *coded])

    def wants(self, x: jax.Array, arrived: jax.Array) -> jax.Array:
        return jnp.abs(x).astype(jnp.float32) >= _BYTE

    def _tags(self, magnitude: jax.Array) -> jax.Array:
        """Returns the class of each value that finds room, uint32[n]; 0 for all other values."""
        whole, half, byte = self._counts(magnitude.size)
        most = min(magnitude.size, whole + half)
        largest, at = lax.top_k(magnitude, most)
        first = (np.arange(most) < whole) & ~(largest < 1)
        second = ~first & ~(largest < _HALF) & (np.arange(most) - first.sum() < half)
        tag = jnp.where(first, np.uint32(1), jnp.where(second, np.uint32(2), np.uint32(0)))
        small = (magnitude < _HALF) & ~(magnitude < _BYTE)
        fits = small & (jnp.cumsum(small) <= byte)
        # The largest values may include small ones. Those have tag 0 here and keep the class for
        # small ones.
        into = jnp.where(tag > 0, at, magnitude.size)
        return jnp.where(fits, np.uint32(3), np.uint32(0)).at[into].set(tag, mode="drop")

    def decode(self, payload: jax.Array, shape: Sequence[int], dtype: DTypeLike) -> jax.Array:
        n = size_of(shape)
        counts = self._counts(n)
        sizes = [packed_bytes(n, 2), 4 * counts[0], 2 * counts[1]]
        tags, whole, half, byte = jnp.split(payload, np.cumsum(sizes).tolist())
        size = (byte & np.uint8(127)).astype(jnp.float32) * np.float32(2.0**-12)
        tables = (
            from_bytes(whole, (counts[0],), jnp.float32),
            from_bytes(half, (counts[1],), jnp.bfloat16).astype(jnp.float32),
            jnp.where(byte >= 128, -size, size),
        )
        tag = unpack(tags, 2, n)
        flat = jnp.zeros(n, jnp.float32)
        for number, table in enumerate(tables, 1):
            if not table.size:
                continue
            mine = tag == number
            place = jnp.where(mine, jnp.cumsum(mine) - 1, len(table))
            flat = jnp.where(mine, table.at[place].get(mode="fill", fill_value=0), flat)
        return flat.reshape(shape).astype(dtype)
