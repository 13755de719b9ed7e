"""The codec in plain jnp: the fallback for any platform, and the readable reference.

The format is that of `docs/wire_format.md`. The bytes equal those of the native kernels, also when
compiled. XLA would replace a division by a constant with a multiplication by its inverse, and fuse
a product and a sum into one rounding. Where that would change a result, the code prevents it.

There are two exceptions. XLA adds in its own order, so rotated values and ranges can differ in
their last bits, and a level that falls on a tie can differ by one. XLA also treats numbers below
2^-126 as 0 on devices that do so.

`reduce` is in `chunk.py`. Functions take one fusion buffer without a batch dimension; leaves are
one-dimensional.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from cgx_jax import _compat
from cgx_jax.wire import GROUP, Layout, Slot, record_bytes, spans

_MIN_NORMAL = np.float32(np.finfo(np.float32).tiny)
_MOST = np.finfo(np.float32).max
_U32 = jnp.uint32
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
    finite: jax.Array = sum((p.astype(jnp.float32) for p in parts), jnp.float32(0)) == 0
    return finite


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
    out: jax.Array = x ^ (x >> 16)
    return out


def _noise(
    key: jax.Array, f: Slot, first_bucket: int | jax.Array, buckets: int, width: int
) -> jax.Array:
    """Returns uniform numbers in [0, 1), of shape [buckets, width]."""
    bits = random_bits(key, f.number, first_bucket, buckets, width)
    return (bits >> 8).astype(jnp.float32) * np.float32(2**-24)


def _hadamard(n: int) -> np.ndarray:
    i = np.arange(n)
    out: np.ndarray = (1.0 - 2 * (np.bitwise_count(i[:, None] & i) % 2)).astype(np.float32)
    return out


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


def _pack(codes: jax.Array, bits: int) -> jax.Array:
    """Packs u8[k, 8 * m] into u8[k, bits * m]: eight codes of a column become `bits` bytes."""
    k, width = codes.shape
    rows = codes.reshape(k, 8, width // 8).astype(jnp.uint32)
    planes = []
    for j in range(bits):
        byte = jnp.zeros((k, width // 8), jnp.uint32)
        for r in range(8):
            shift = r * bits - 8 * j
            if -bits < shift < 8:
                byte |= rows[:, r] << shift if shift >= 0 else rows[:, r] >> -shift
        planes.append((byte & 255).astype(jnp.uint8))
    return jnp.concatenate(planes, axis=1)


def _unpack(planes: jax.Array, bits: int) -> jax.Array:
    """Unpacks u8[k, bits * m] into u8[k, 8 * m]: the inverse of `_pack`."""
    k, width = planes.shape
    plane = planes.reshape(k, bits, width // bits).astype(jnp.uint32)
    rows = []
    for r in range(8):
        code = jnp.zeros((k, width // bits), jnp.uint32)
        for j in range(bits):
            shift = r * bits - 8 * j
            if -bits < shift < 8:
                code |= plane[:, j] >> shift if shift >= 0 else plane[:, j] << -shift
        rows.append((code & (2**bits - 1)).astype(jnp.uint8))
    return jnp.concatenate(rows, axis=1)


def encode_buckets(
    x: jax.Array, f: Slot, first_bucket: int | jax.Array, key: jax.Array, offset: int | jax.Array
) -> jax.Array:
    """Encodes f32[k, n] as u8[k, record]: buckets of one length, already rotated if needed."""
    k, n = x.shape
    padded = (record_bytes(n, f.bits) - 8) // f.bits * 8
    levels = 2**f.bits - 1
    low, high = x.min(axis=1) + np.float32(0), x.max(axis=1)
    if f.rotation and f.rounding == "nearest" and one_block(n):
        limit = normal_limits(x, f.bits)
        clipped = jnp.maximum(low, -limit), jnp.minimum(high, limit)
        useful = clipped[0] < clipped[1]
        low, high = jnp.where(useful, clipped[0], low), jnp.where(useful, clipped[1], high)
    unit = divide(high - low, levels)
    for _ in range(2):  # the topmost level may round past the largest float
        unit = jnp.where(low + unit * levels <= _MOST, unit, jnp.nextafter(unit, np.float32(0)))
    finite = jnp.isfinite(x).all(axis=1) & jnp.isfinite(high - low)
    spread = finite & (unit >= _MIN_NORMAL)
    unit = jnp.where(spread, unit, 0)
    low = jnp.where(finite, low, np.float32(np.nan))
    inverse = jnp.where(spread, 1 / jnp.where(spread, unit, 1), 0)
    r: Any = np.float32(0.5)
    if f.rounding != "nearest":
        r = _noise(key, f, first_bucket, k, n)
    if f.rounding == "correlated":
        r = r + offset
        r = jnp.where(r >= 1, r - 1, r)
    # The maximum changes no value, but keeps XLA from rounding product and sum only once.
    level = jnp.maximum((x - low[:, None]) * inverse[:, None], 0)
    level = jnp.minimum(jnp.floor(level + r), np.float32(levels))
    codes = jnp.where(spread[:, None], level, 0).astype(jnp.uint8)
    codes = jnp.pad(codes, ((0, 0), (0, padded - n)))
    meta = lax.bitcast_convert_type(jnp.stack([low, unit], axis=1), jnp.uint8).reshape(k, 8)
    return jnp.concatenate([meta, _pack(codes, f.bits)], axis=1)


def decode_buckets(records: jax.Array, n: int, f: Slot) -> jax.Array:
    """Decodes u8[k, record] to f32[k, n], which are still rotated if they were."""
    meta = lax.bitcast_convert_type(records[:, :8].reshape(-1, 2, 4), jnp.float32)
    codes = _unpack(records[:, 8:], f.bits)[:, :n].astype(jnp.float32)
    low = jnp.where(jnp.isfinite(meta).all(axis=1, keepdims=True), meta[:, :1], np.float32(np.nan))
    return low + jnp.maximum(meta[:, 1:] * codes, 0)


def add_peers(
    rank: jax.Array, sent: jax.Array, x: jax.Array, decode: Callable[[jax.Array], jax.Array]
) -> jax.Array:
    """Adds decode(sent[r]) of every rank r but `rank` to fp32 `x`, in rank order."""

    def add(peer: jax.Array, total: jax.Array) -> jax.Array:
        return jnp.where(rank == peer, total, total + decode(sent[peer]))

    # Use a loop, so that programs do not grow with the number of ranks.
    out: jax.Array = lax.fori_loop(
        0, len(sent), add, _compat.vary_over(x, _compat.varying_axes(sent))
    )
    return out


def _each_length(
    x: jax.Array, f: Slot, first_bucket: int, of: Callable[[jax.Array, int], jax.Array]
) -> list[jax.Array]:
    """Returns flat of(buckets [k, n], first number) of full buckets and of the shorter last one."""
    full, tail = divmod(x.size, f.bucket_size)
    cut = full * f.bucket_size
    parts = []
    if full:
        parts.append(of(x[:cut].reshape(full, f.bucket_size), first_bucket).reshape(-1))
    if tail:
        parts.append(of(x[None, cut:], first_bucket + full).reshape(-1))
    return parts


def _code(x: jax.Array, f: Slot, first_bucket: int) -> jax.Array:
    """Pads and rotates f32[n] from `first_bucket` of leaf `f` on; no-op if `f` is not rotated."""
    if not f.rotation or not x.size:
        return x
    filled = jnp.pad(x, (0, -x.size % GROUP))
    return jnp.concatenate(
        _each_length(filled, f, first_bucket, lambda b, first: rotate(b, f.number, first))
    )


def _uncode(x: jax.Array, n: int, f: Slot, first_bucket: int) -> jax.Array:
    """Returns the inverse of `_code`, f32[n]."""
    if not f.rotation or not n:
        return x
    turn = functools.partial(rotate, back=True)
    return jnp.concatenate(
        _each_length(x, f, first_bucket, lambda b, first: turn(b, f.number, first))
    )[:n]


def _encode_span(
    x: jax.Array, f: Slot, first_bucket: int, key: jax.Array, offset: int | jax.Array = 0
) -> jax.Array:
    """Encodes what `_code` returned, from `first_bucket` of leaf `f` on, to records u8[bytes]."""
    parts = _each_length(
        x, f, first_bucket, lambda b, first: encode_buckets(b, f, first, key, offset)
    )
    return jnp.concatenate(parts) if parts else jnp.zeros((0,), jnp.uint8)


def _decode_span(payload: jax.Array, n: int, f: Slot) -> jax.Array:
    """Decodes records of n values, u8[bytes], to what `_code` returned: padded if rotated."""
    n += -n % GROUP if f.rotation else 0
    full, tail = divmod(n, f.bucket_size)
    cut = full * f.record
    parts = []
    if full:
        records = payload[:cut].reshape(full, f.record)
        parts.append(decode_buckets(records, f.bucket_size, f).reshape(-1))
    if tail:
        parts.append(decode_buckets(payload[None, cut:], tail, f).reshape(-1))
    return jnp.concatenate(parts) if parts else jnp.zeros((0,), jnp.float32)


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


def _decode_joined(joined: jax.Array, layout: Layout) -> list[jax.Array]:
    return [
        _decode_span(joined[a : a + f.bytes], f.size, f)
        for f, a in zip(layout.slots, layout.starts[:-1], strict=True)
    ]


def _uncode_all(coded: Sequence[jax.Array], layout: Layout) -> list[jax.Array]:
    return [_uncode(x, f.size, f, 0) for x, f in zip(coded, layout.slots, strict=True)]


def _own_values(layout: Layout) -> np.ndarray:
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
    values = [_code(x.astype(jnp.float32), f, 0) for x, f in zip(leaves, layout.slots, strict=True)]
    offset = divide(jnp.maximum(rank, 0).astype(jnp.float32), layout.world)
    parts = [_encode_span(x, f, 0, key, offset) for x, f in zip(values, layout.slots, strict=True)]
    rows = _rows(_concatenate(parts, layout.total_bytes), layout)
    mine = jnp.arange(layout.world, dtype=jnp.int32) == rank
    out = [jnp.where(mine[:, None], jnp.uint8(0), rows)]
    if residual:
        ranges = _own_values(layout)
        decoded = _decode_joined(_joined(rows, layout), layout)
        lost = [x - y for x, y in zip(values, decoded, strict=True)]
        for i, (x, leaf) in enumerate(zip(_uncode_all(lost, layout), leaves, strict=True)):
            begin, end = jnp.asarray(ranges[i])[jnp.maximum(rank, 0)]
            place = jnp.arange(x.size, dtype=jnp.int32)
            own = (place >= begin) & (place < end) & (rank >= 0)
            out.append(jnp.where(own, 0, x).astype(leaf.dtype))
    return out


def decode(payload: jax.Array, *, layout: Layout, dtypes: Sequence[np.dtype]) -> list[jax.Array]:
    """Decodes u8[world, chunk_bytes] to leaves, computed in f32 and rounded to their dtypes."""
    decoded = _uncode_all(_decode_joined(_joined(payload, layout), layout), layout)
    # Rounding may take a rotated value past the largest float.
    within = [
        jnp.clip(x, -_MOST, _MOST) if f.rotation else x
        for x, f in zip(decoded, layout.slots, strict=True)
    ]
    return [x.astype(t) for x, t in zip(within, dtypes, strict=True)]


def accumulate(
    rank: jax.Array, payload: jax.Array, *leaves: jax.Array, layout: Layout, divisor: float
) -> list[jax.Array]:
    """Adds the other ranks' payloads, u8[peers, total_bytes], to the leaves, and divides."""
    out = []
    for leaf, f, start in zip(leaves, layout.slots, layout.starts[:-1], strict=True):
        x, sent = leaf.astype(jnp.float32), payload[:, start : start + f.bytes]
        # A rotated leaf's rows are added up while rotated, and the sum is rotated back once.
        own = jnp.zeros((f.size + -f.size % GROUP,), jnp.float32) if f.rotation else x
        total = add_peers(rank, sent, own, functools.partial(_decode_span, n=f.size, f=f))
        total = x + _uncode(total, f.size, f, 0) if f.rotation else total
        out.append(divide(total, divisor).astype(leaf.dtype) if f.size else leaf)
    return out
