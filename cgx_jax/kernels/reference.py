"""The codec in plain jnp: the fallback for any platform, and the readable reference.

The format is that of `docs/wire_format.md`. The bytes equal those of the native kernels, also when
compiled. XLA would replace a division by a constant with a multiplication by its inverse, and fuse
a product and a sum into one rounding. Where that would change a result, the code prevents it.

There are two exceptions. XLA adds in its own order, so rotated values and ranges can differ in
their last bits. A level that falls on a tie can then differ by one, and a unit by one bf16. XLA
also treats numbers below 2^-126 as 0 on devices that do so.

`reduce` is in `chunk.py`. Functions take one fusion buffer without a batch dimension; leaves are
one-dimensional.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from cgx_jax import _compat
from cgx_jax.kernels.wire import GROUP, MASK_BITS, META_BYTES, Layout, Slot, record_bytes, spans

_MIN_NORMAL = np.float32(np.finfo(np.float32).tiny)
_MOST = np.finfo(np.float32).max
_U32 = jnp.uint32
_UPPER_HALF, _LOWER_HALF = np.uint32(0xFFFF0000), np.uint32(0xFFFF)
_MASKED = np.uint32(0x80000000)  # in a record's second word, if it has a mask
_ROTATION_KEY = (np.uint32(0x726F7461), np.uint32(0x74696F6E))
# By width: evenly spaced levels between plus and minus this multiple of the root mean square have
# the least mean square error for normal values.
NORMAL_RANGE = np.array(
    [0, 0.7979, 1.4935, 2.0511, 2.5140, 2.9162, 3.2780, 3.6111, 3.9222], np.float32
)


def all_finite(arrays: Sequence[jax.Array]) -> jax.Array:
    """Returns whether all values of all arrays are finite, bool[]."""
    # Each sum is 0 or NaN, and so is their sum. On CPUs, a sum is a faster loop than `all`, and
    # unlike a maximum it keeps NaN. One comparison compiles faster than one for each array.
    zeros = [(x - x).sum() for x in arrays]
    parts = [p for z in zeros for p in ((z.real, z.imag) if jnp.iscomplexobj(z) else (z,))]
    return sum((p.astype(jnp.float32) for p in parts), jnp.float32(0)) == 0


def count_nonfinite(x: jax.Array) -> jax.Array:
    """Counts the non-finite values of x[..., n] and finds the first: i32[..., 2]."""
    wrong = ~jnp.isfinite(x)
    if not x.shape[-1]:
        return jnp.zeros((*x.shape[:-1], 2), jnp.int32)
    first = jnp.argmax(wrong, axis=-1).astype(jnp.int32)
    return jnp.stack([wrong.sum(axis=-1, dtype=jnp.int32), first], axis=-1)


def divide(x: jax.Array, divisor: float) -> jax.Array:
    """Divides `x` by a constant, with one rounding.

    XLA would multiply by the constant's inverse instead, even with a barrier around the constant.
    The divisor here depends on `x`, so XLA cannot treat it as a constant.
    """
    return x if divisor == 1 else x / jnp.where(jnp.isnan(x), 1, np.float32(divisor))


def _mix(x: jax.Array) -> jax.Array:
    x = (x ^ (x >> 16)) * _U32(0x7FEB352D)
    x = (x ^ (x >> 15)) * _U32(0x846CA68B)
    return x ^ (x >> 16)


def random_bits(
    key: Sequence[Any] | jax.Array,
    number: int,
    first_bucket: int | jax.Array,
    buckets: int,
    width: int,
) -> jax.Array:
    """Returns random uint32[buckets, width], which depend only on the key and the place.

    `first_bucket` is a Python int, or i32[].
    """
    if isinstance(first_bucket, int):
        index = first_bucket + np.arange(buckets, dtype=np.int64)
        low = jnp.asarray((index & 0xFFFFFFFF).astype(np.uint32))
        high = jnp.asarray((index >> 32).astype(np.uint32))
    else:
        low = first_bucket.astype(jnp.uint32) + jnp.arange(buckets, dtype=jnp.uint32)
        high = jnp.zeros((buckets,), jnp.uint32)
    a = _mix(key[0] ^ _mix(_U32(number) + _U32(0x9E3779B9)))
    d = _mix(key[1] + a)
    s0 = _mix(_mix(a ^ low) + high)
    s1 = _mix((d + s0 * _U32(0x85EBCA6B)) ^ low)
    x = jnp.arange(width, dtype=jnp.uint32)[None] + s0[:, None]
    x = (x ^ (x >> 16)) * _U32(0x7FEB352D) + s1[:, None]
    x = (x ^ (x >> 15)) * _U32(0x846CA68B)
    return x ^ (x >> 16)


def uniform(*place: Any) -> jax.Array:
    """Returns uniform numbers in [0, 1) of 24 bits, from `random_bits` of the same arguments."""
    return (random_bits(*place) >> 8).astype(jnp.float32) * np.float32(2**-24)


def _hadamard(n: int) -> np.ndarray:
    i = np.arange(n)
    return (1.0 - 2 * (np.bitwise_count(i[:, None] & i) % 2)).astype(np.float32)


def _rotation_stages(n: int) -> int:
    """Returns the butterfly stages for buckets of n values: log2 of the values per block."""
    columns = next(c for c in (64, 32, 16, 8, 4) if n // 8 % c == 0)
    return 3 + columns.bit_length() - 1


def one_block(n: int) -> bool:
    """Returns whether a rotation mixes all n values of a bucket, which then share clip limits."""
    return 1 << _rotation_stages(n) == n


def squares_turned_back(n: int) -> float:
    """Returns the factor by which rotating back scales squares: both scales are powers of two."""
    return 0.5 ** (_rotation_stages(n) % 2)


def rotate(
    x: jax.Array, number: int, first_bucket: int | jax.Array, *, back: bool = False
) -> jax.Array:
    """Rotates buckets f32[k, n], n a multiple of 32, or rotates them `back`."""
    k, n = x.shape
    stages = _rotation_stages(n)
    words = random_bits(_ROTATION_KEY, number, first_bucket, k, n // 8)
    shift = jnp.arange(8, dtype=jnp.uint32)[None, :, None]
    sign = jnp.where((words[:, None] << shift) >> 31, np.float32(-1), np.float32(1))
    y = x.reshape(k, 8, n // 8)
    # In both directions the scale is applied first, so that intermediate values do not overflow if
    # the result fits.
    if back:
        y = y * np.float32(2.0 ** -(stages - stages // 2))
    else:
        y = y * (sign * np.float32(2.0 ** -(stages // 2)))
    # Two small matrix products compile in a fraction of the time that the butterflies take.
    columns = (1 << stages) // 8
    blocks = y.reshape(k, 8, -1, columns)
    exactly = lax.Precision.HIGHEST
    y = jnp.einsum("krbc,cd->krbd", blocks, _hadamard(columns), precision=exactly)
    y = jnp.einsum("krbd,rs->ksbd", y, _hadamard(8), precision=exactly).reshape(k, 8, n // 8)
    return (y * sign if back else y).reshape(k, n)


def normal_limits(x: jax.Array, bits: Any) -> jax.Array:
    """Returns the clip limits of rotated buckets x[k, n], [k], which are best for normal values.

    `bits` is one width, or one per bucket.
    """
    largest = jnp.abs(x).max(axis=1, keepdims=True)
    scale = jnp.where(jnp.isfinite(largest) & (largest > 0), largest, 1)
    rms = jnp.sqrt(jnp.square(x / scale).mean(axis=1)) * scale[:, 0]
    return jnp.asarray(NORMAL_RANGE)[bits] * rms


def packed(codes: Sequence[jax.Array], bits: int) -> list[jax.Array]:
    """Returns the bytes of codes that follow one another, u8 each; a code is an array, u32."""
    out = []
    for byte in range(len(codes) * bits // 8):
        total = jnp.zeros_like(codes[0])
        for i, code in enumerate(codes):
            shift = i * bits - 8 * byte
            if -bits < shift < 8:
                total |= code << shift if shift >= 0 else code >> -shift
        out.append((total & 255).astype(jnp.uint8))
    return out


def unpacked(data: Sequence[jax.Array], bits: int) -> list[jax.Array]:
    """Inverts `packed`, for bytes of type u32."""
    out = []
    for i in range(8 * len(data) // bits):
        code = jnp.zeros_like(data[0])
        for j, byte in enumerate(data):
            shift = i * bits - 8 * j
            if -bits < shift < 8:
                code |= byte >> shift if shift >= 0 else byte << -shift
        out.append(code & np.uint32(2**bits - 1))
    return out


def _pack(codes: jax.Array, bits: int) -> jax.Array:
    """Packs u8[k, 8 * m] into u8[k, bits * m]: eight codes of a column become `bits` bytes."""
    k, width = codes.shape
    rows = codes.reshape(k, 8, width // 8).astype(jnp.uint32)
    return jnp.concatenate(packed([rows[:, r] for r in range(8)], bits), axis=1)


def unpack(planes: jax.Array, bits: int) -> jax.Array:
    """Unpacks u8[k, bits * m] into u8[k, 8 * m]: the inverse of `_pack`."""
    k, width = planes.shape
    plane = planes.reshape(k, bits, width // bits).astype(jnp.uint32)
    codes = unpacked([plane[:, j] for j in range(bits)], bits)
    return jnp.concatenate([code.astype(jnp.uint8) for code in codes], axis=1)


def _product(unit: jax.Array, code: Any) -> jax.Array:
    """Returns unit * code. The maximum keeps XLA from rounding this and a sum only once."""
    return jnp.maximum(unit * code, 0)


def _rounded_up(x: jax.Array) -> jax.Array:
    """Returns the smallest bf16 that is at least x >= 0, as f32."""
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    return lax.bitcast_convert_type((bits + _LOWER_HALF) & _UPPER_HALF, jnp.float32)


@dataclasses.dataclass(frozen=True)
class Buckets:
    """Some consecutive buckets of `n` values in a leaf, from bucket number `first` on.

    The first value has the place `phase` in its segment. `first` and `phase` are Python ints, or
    scalars of types int32 and uint32.
    """

    slot: Slot
    n: int
    first: int | jax.Array
    phase: int | jax.Array

    @property
    def record(self) -> int:
        return record_bytes(self.n, self.slot.bits)

    @property
    def width(self) -> int:
        """How many codes a record has; for rotated buckets this includes padding."""
        return self.n + (-self.n % GROUP if self.slot.rotation else 0)

    def coded(self, x: jax.Array) -> jax.Array:
        """Returns values f32[k, n] as they are encoded: padded and rotated if the leaf is."""
        if not self.slot.rotation:
            return x
        padded = jnp.pad(x, ((0, 0), (0, self.width - self.n)))
        return rotate(padded, self.slot.number, self.first)

    def turned_back(self, coded: jax.Array, mask: jax.Array) -> jax.Array:
        """Returns the inverse of `coded`, with 0 where the mask is 1."""
        x = coded
        if self.slot.rotation:
            x = rotate(coded, self.slot.number, self.first, back=True)[:, : self.n]
        masked = mask[:, None] >> self._segments(len(x)) & 1
        return jnp.where(masked == 1, 0, x)

    def zeros(self, x: jax.Array) -> jax.Array:
        """Returns the masks of the zero segments of f32[k, n], u32[k]."""
        segments = self._segments(len(x))
        # Not a comparison of floats: those may treat subnormal numbers as 0.
        other = lax.bitcast_convert_type(x, jnp.uint32) << 1 != 0
        bits = jnp.where(other, _U32(1) << segments, _U32(0))
        found = lax.reduce(bits, np.uint32(0), lax.bitwise_or, (1,))
        return ~found & (_LOWER_HALF >> (MASK_BITS - 1 - segments[:, -1]))

    def _segments(self, k: int) -> jax.Array:
        """Returns the number of each value's segment in its bucket, u32[k, n]."""
        f = self.slot
        steps = np.arange(k, dtype=np.int64) * f.bucket_size % f.segment
        phases = (self.phase + jnp.asarray(steps.astype(np.uint32))) % _U32(f.segment)
        places = phases[:, None] + jnp.arange(self.n, dtype=jnp.uint32)[None]
        return places // _U32(f.segment)

    def encode(
        self, x: jax.Array, mask: jax.Array, key: jax.Array, offset: int | jax.Array
    ) -> jax.Array:
        """Encodes coded values f32[k, width], with masks u32[k], as records u8[k, length]."""
        f, (k, n) = self.slot, x.shape
        padded = (record_bytes(n, f.bits) - META_BYTES) // f.bits * 8
        levels = np.float32(2**f.bits - 1)
        low, high = x.min(axis=1), x.max(axis=1)
        low = jnp.where(low == 0, np.float32(0), low)  # XLA removes the sum that makes -0 a zero
        if f.rotation and f.rounding == "nearest" and one_block(n):
            limit = normal_limits(x, f.bits)
            clipped = jnp.maximum(low, -limit), jnp.minimum(high, limit)
            useful = clipped[0] < clipped[1]
            low, high = jnp.where(useful, clipped[0], low), jnp.where(useful, clipped[1], high)
        unit = divide(high - low, 2**f.bits - 1)
        for _ in range(2):  # the topmost level may round past the largest float
            unit = jnp.where(
                low + _product(unit, levels) <= _MOST, unit, jnp.nextafter(unit, np.float32(0))
            )
        finite = jnp.isfinite(x).all(axis=1) & jnp.isfinite(high - low)
        unit = jnp.where(finite & (unit >= _MIN_NORMAL), unit, 0)
        rounded = _rounded_up(unit)
        masked = (mask != 0) & finite & (low + _product(rounded, levels) <= _MOST)
        unit = jnp.where(masked, rounded, unit)
        spread = unit > 0
        low = jnp.where(finite, low, np.float32(np.nan))
        inverse = jnp.where(spread, 1 / jnp.where(spread, unit, 1), 0)
        r: Any = np.float32(0.5)
        if f.rounding != "nearest":
            r = uniform(key, f.number, self.first, k, n)
        if f.rounding == "correlated":
            r = r + offset
            r = jnp.where(r >= 1, r - 1, r)
        # The maximum changes no value, but keeps XLA from rounding product and sum only once.
        level = jnp.maximum((x - low[:, None]) * inverse[:, None], 0)
        level = jnp.minimum(jnp.floor(level + r), levels)
        codes = jnp.where(spread[:, None], level, 0).astype(jnp.uint8)
        codes = jnp.pad(codes, ((0, 0), (0, padded - n)))
        mark = jnp.where(masked, _MASKED | mask, _U32(0))
        word = lax.bitcast_convert_type(unit, jnp.uint32) | mark
        words = jnp.stack([lax.bitcast_convert_type(low, jnp.uint32), word], axis=1)
        header = lax.bitcast_convert_type(words, jnp.uint8).reshape(k, META_BYTES)
        return jnp.concatenate([header, _pack(codes, f.bits)], axis=1)

    def decode(self, records: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Decodes u8[k, record] to f32[k, width], still rotated if they were, and masks u32[k]."""
        words = lax.bitcast_convert_type(records[:, :META_BYTES].reshape(-1, 2, 4), jnp.uint32)
        masked = words[:, 1:] >= _MASKED
        unit_bits = jnp.where(masked, words[:, 1:] & _UPPER_HALF & ~_MASKED, words[:, 1:])
        low, unit = (lax.bitcast_convert_type(x, jnp.float32) for x in (words[:, :1], unit_bits))
        codes = unpack(records[:, META_BYTES:], self.slot.bits)[:, : self.width].astype(jnp.float32)
        low = jnp.where(jnp.isfinite(low) & jnp.isfinite(unit), low, np.float32(np.nan))
        return low + _product(unit, codes), jnp.where(masked, words[:, 1:] & _LOWER_HALF, 0)[:, 0]

    def addend(self, records: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Decodes a peer's records for a sum, in which its masked values are 0."""
        coded, mask = self.decode(records)
        masked = self.coded(self.turned_back(coded, mask))
        return jnp.where(mask[:, None] == 0, coded, masked), mask


Sums = list[tuple[jax.Array, jax.Array]]  # coded values f32[k, n] and masks u32[k]


def add_peers(
    rank: jax.Array, sent: jax.Array, sums: Sums, decode: Callable[[jax.Array], Sums]
) -> Sums:
    """Adds decode(sent[r]) of every rank r but `rank` to `sums`, in rank order.

    Bits of a mask stay 1 where they are 1 in the masks of all these ranks.
    """

    def add(peer: jax.Array, sums: Sums) -> Sums:
        added = [
            (total + x, mask & other)
            for (total, mask), (x, other) in zip(sums, decode(sent[peer]), strict=True)
        ]
        return jax.tree.map(lambda new, old: jnp.where(rank == peer, old, new), added, sums)

    # Use a loop, so that programs do not grow with the number of ranks.
    axes = _compat.varying_axes(sent)
    start = jax.tree.map(lambda x: _compat.vary_over(x, axes), sums)
    return lax.fori_loop(0, len(sent), add, start)


def _parts(f: Slot) -> list[tuple[Buckets, int, int]]:
    """Returns a leaf's full buckets and its shorter last one: (buckets, first value, end)."""
    cut = f.size - f.size % f.bucket_size
    parts = []
    for n, begin, end in ((f.bucket_size, 0, cut), (f.size - cut, cut, f.size)):
        if begin < end:
            parts.append((Buckets(f, n, begin // f.bucket_size, begin % f.segment), begin, end))
    return parts


def _cut(x: jax.Array, f: Slot) -> list[jax.Array]:
    """Returns a leaf's values as f32[k, n] for each of its parts."""
    return [x[begin:end].reshape(-1, b.n).astype(jnp.float32) for b, begin, end in _parts(f)]


def _records(data: jax.Array, f: Slot) -> list[jax.Array]:
    """Returns a leaf's bytes as records u8[k, record] for each of its parts."""
    out, at = [], 0
    for b, begin, end in _parts(f):
        size = (end - begin) // b.n * b.record
        out.append(data[at : at + size].reshape(-1, b.record))
        at += size
    return out


def _joined_parts(parts: Sequence[jax.Array], dtype: Any) -> jax.Array:
    return jnp.concatenate([p.reshape(-1) for p in parts]) if parts else jnp.zeros((0,), dtype)


def _concatenate(parts: Sequence[jax.Array], bytes_: int) -> jax.Array:
    """Joins byte arrays and pads them with zeros to `bytes_`."""
    have = sum(p.size for p in parts)
    return jnp.concatenate([*parts, jnp.zeros((bytes_ - have,), jnp.uint8)])


def _rows(joined: jax.Array, layout: Layout) -> jax.Array:
    """Cuts all records, u8[total], into one row per rank, u8[world, chunk_bytes]."""
    cut = [joined[a:b] for a, b in itertools.pairwise(layout.begins)]
    return jnp.stack([_concatenate([c], layout.chunk_bytes) for c in cut])


def _joined(rows: jax.Array, layout: Layout) -> jax.Array:
    """Returns the inverse of `_rows`."""
    lengths = [b - a for a, b in itertools.pairwise(layout.begins)]
    return jnp.concatenate([rows[w, :n] for w, n in enumerate(lengths)])


def own_values(layout: Layout) -> np.ndarray:
    """Returns the range of each slot's values in each chunk, i32[slots, world, 2]."""
    ranges = np.zeros((len(layout.slots), layout.world, 2), np.int64)
    for w in range(layout.world):
        for s in spans(layout, w):
            ranges[s.slot, w] = s.values
    return ranges.astype(np.int32)


def encode(
    key: jax.Array, rank: jax.Array, *leaves: jax.Array, layout: Layout, residual: bool
) -> list[jax.Array]:
    """Encodes leaves: returns [u8[world, chunk_bytes]] and, if asked, one residual per leaf.

    The row of the caller's own `rank` is zeros, and its residual is 0. Rank -1 owns no row.
    """
    offset = divide(jnp.maximum(rank, 0).astype(jnp.float32), layout.world)
    encoded = [
        _encoded(x, f, key, offset, residual) for x, f in zip(leaves, layout.slots, strict=True)
    ]
    rows = _rows(_concatenate([data for data, _ in encoded], layout.total_bytes), layout)
    mine = jnp.arange(layout.world, dtype=jnp.int32) == rank
    out = [jnp.where(mine[:, None], jnp.uint8(0), rows)]
    ranges = own_values(layout)
    for i, (leaf, (_, lost)) in enumerate(zip(leaves, encoded, strict=True)):
        if lost is not None:
            begin, end = jnp.asarray(ranges[i])[jnp.maximum(rank, 0)]
            place = jnp.arange(lost.size, dtype=jnp.int32)
            own = (place >= begin) & (place < end) & (rank >= 0)
            out.append(jnp.where(own, 0, lost).astype(leaf.dtype))
    return out


def _encoded(
    leaf: jax.Array, f: Slot, key: jax.Array, offset: jax.Array, residual: bool
) -> tuple[jax.Array, jax.Array | None]:
    """Returns a leaf's bytes, and what they lose if asked."""
    data, lost = [], []
    for (b, _, _), x in zip(_parts(f), _cut(leaf, f), strict=True):
        coded = b.coded(x)
        records = b.encode(coded, b.zeros(x), key, offset)
        data.append(records)
        if residual:
            decoded, mask = b.decode(records)
            # The maximum keeps XLA from rounding a product with units and the difference only once.
            lost.append(b.turned_back(jnp.maximum(coded, -_MOST) - decoded, mask))
    return _joined_parts(data, jnp.uint8), _joined_parts(lost, jnp.float32) if residual else None


def decode(payload: jax.Array, *, layout: Layout, dtypes: Sequence[np.dtype]) -> list[jax.Array]:
    """Decodes u8[world, chunk_bytes] to leaves, computed in f32 and rounded to their dtypes."""
    joined = _joined(payload, layout)
    out = []
    for f, start, dtype in zip(layout.slots, layout.starts[:-1], dtypes, strict=True):
        records = _records(joined[start : start + f.bytes], f)
        parts = [
            b.turned_back(*b.decode(r)) for (b, _, _), r in zip(_parts(f), records, strict=True)
        ]
        x = _joined_parts(parts, jnp.float32)
        # Rounding may take a rotated value past the largest float.
        out.append((jnp.clip(x, -_MOST, _MOST) if f.rotation else x).astype(dtype))
    return out


def accumulate(
    rank: jax.Array, payload: jax.Array, *leaves: jax.Array, layout: Layout, divisor: float
) -> list[jax.Array]:
    """Adds the other ranks' payloads, u8[peers, total_bytes], to the leaves, and divides."""
    out = []
    for leaf, f, start in zip(leaves, layout.slots, layout.starts[:-1], strict=True):
        total = _accumulated(rank, payload[:, start : start + f.bytes], leaf, f)
        out.append(divide(total, divisor).astype(leaf.dtype))
    return out


def _accumulated(rank: jax.Array, sent: jax.Array, leaf: jax.Array, f: Slot) -> jax.Array:
    """Returns the leaf plus the other ranks' values."""
    parts, own = [b for b, _, _ in _parts(f)], _cut(leaf, f)
    # A rotated leaf's rows are added up while rotated, and the sum is rotated back once.
    starts = [
        jnp.zeros((len(x), b.width), jnp.float32) if f.rotation else x
        for b, x in zip(parts, own, strict=True)
    ]
    sums = [(x, jnp.full((len(x),), _LOWER_HALF)) for x in starts]

    def decode(data: jax.Array) -> Sums:
        return [b.addend(r) for b, r in zip(parts, _records(data, f), strict=True)]

    sums = add_peers(rank, sent, sums, decode)
    totals = [total for total, _ in sums]
    if f.rotation:
        totals = [x + b.turned_back(*each) for b, x, each in zip(parts, own, sums, strict=True)]
    return _joined_parts(totals, jnp.float32)
