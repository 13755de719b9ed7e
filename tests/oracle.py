"""Wire format 2 in NumPy, written only from docs/wire_format.md: what every kernel must equal.

A fusion buffer is a list of `Leaf`; values are fp32, bf16 or f16, payloads uint8. NumPy rounds
every operation to fp32 separately, as the format demands. Tests compare bytes, without tolerances.
"""

from __future__ import annotations

import dataclasses
import itertools

import ml_dtypes
import numpy as np

QUIET_NAN = np.uint32(0x7FC00000).view(np.float32)
TINY = np.float32(2.0**-126)
MOST = np.finfo(np.float32).max


@dataclasses.dataclass(frozen=True)
class Leaf:
    """How one leaf is encoded."""

    size: int
    bits: int = 4
    bucket_size: int = 512
    rounding: int = 0  # nearest, stochastic, correlated
    number: int = 0
    rotation: bool = False
    segment: int = 0  # 0: a 16th of a bucket

    @property
    def segment_size(self):
        return self.segment or self.bucket_size // 16

    def parts(self):
        """(first bucket, buckets, values in each): the full buckets, then the short one."""
        full, tail = divmod(self.size, self.bucket_size)
        return [p for p in ((0, full, self.bucket_size), (full, 1, tail)) if p[1] * p[2]]


def record_bytes(n, bits):
    return 8 + bits * 4 * -(-n // 32)


def record_starts(leaf):
    """Returns the offset of every record in the leaf's bytes, and the number of these bytes."""
    lengths = [record_bytes(n, leaf.bits) for _, count, n in leaf.parts() for _ in range(count)]
    return np.cumsum([0, *lengths], dtype=np.int64)


def leaf_starts(leaves):
    return np.cumsum([0] + [record_starts(leaf)[-1] for leaf in leaves], dtype=np.int64)


def layout(leaves, world):
    """Returns ([begin of each chunk, then the end], chunk_bytes)."""
    at = leaf_starts(leaves)
    total = int(at[-1])
    starts = [
        int(s + r) for leaf, s in zip(leaves, at, strict=False) for r in record_starts(leaf)[:-1]
    ]
    chunk = [s * world // total for s in starts]
    begin = [
        next((s for s, c in zip(starts, chunk, strict=True) if c >= w), total) for w in range(world)
    ]
    begin.append(total)
    return begin, max(b - a for a, b in itertools.pairwise(begin))


def mix(x):
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x7FEB352D)
    x = (x ^ (x >> np.uint32(15))) * np.uint32(0x846CA68B)
    return x ^ (x >> np.uint32(16))


def random_bits(key, number, bucket, n):
    """Returns uint32, one row per bucket number and one column for each of n places."""
    u = np.uint32
    key, number = np.array(key, u)[:, None], np.array([[number]], u)
    bucket = np.asarray(bucket, np.uint64)[:, None]
    low, high = bucket.astype(u), (bucket >> np.uint64(32)).astype(u)
    a = mix(key[:1] ^ mix(number + u(0x9E3779B9)))
    d = mix(key[1:] + a)
    s0 = mix(mix(a ^ low) + high)
    s1 = mix((d + s0 * u(0x85EBCA6B)) ^ low)
    x = np.arange(n, dtype=u)[None] + s0
    x = (x ^ (x >> u(16))) * u(0x7FEB352D) + s1
    x = (x ^ (x >> u(15))) * u(0x846CA68B)
    return x ^ (x >> u(16))


def noise(key, leaf, bucket, n, offset):
    """Returns fp32 in [0, 1), one row per bucket number and one column per value."""
    bits = random_bits(key, leaf.number, bucket, n)
    u = (bits >> np.uint32(8)).astype(np.float32) * np.float32(2.0**-24)
    u += np.float32(offset if leaf.rounding == 2 else 0)
    return np.where(u >= 1, u - np.float32(1), u)


def columns(n):
    return 4 * -(-n // 32)


def turn(x, leaf, first, *, back=False):
    """Rotates buckets x[k, 8 m] of a leaf, numbered from `first` on; with `back`, inversely."""
    if not leaf.rotation:
        return x
    m = x.shape[1] // 8
    block = max(c for c in (4, 8, 16, 32, 64) if m % c == 0)
    stages = int(np.log2(8 * block))
    scale = np.float32(2.0 ** -(stages - stages // 2 if back else stages // 2))
    words = random_bits((0x726F7461, 0x74696F6E), leaf.number, first + np.arange(len(x)), m)
    signs = words[:, None] << np.arange(8, dtype=np.uint32)[:, None] & np.uint32(1 << 31)
    x = x.astype(np.float32).reshape(-1, 8, m)
    with np.errstate(all="ignore"):
        if not back:
            x = (x.view(np.uint32) ^ signs).view(np.float32)
        x = x * scale
        for axis, h in [(1, 4), (1, 2), (1, 1)][::-1] + [(2, 2**i) for i in range(stages - 3)]:
            n = x.shape[axis] // (2 * h)
            pairs = x.reshape(*x.shape[:axis], n, 2, h, *x.shape[axis + 1 :])
            a, b = np.take(pairs, 0, axis + 1), np.take(pairs, 1, axis + 1)
            x = np.stack([a + b, a - b], axis + 1).reshape(x.shape)
        if back:
            x = (x.view(np.uint32) ^ signs).view(np.float32)
    return x.reshape(len(x), -1)


NORMAL_RANGE = (0.7979, 1.4935, 2.0511, 2.5140, 2.9162, 3.2780, 3.6111, 3.9222)


def clip(x, lo, hi, bits):
    """Clips the extremes of rotated buckets x[k, 8 m] to the best range for normal values."""
    largest = np.maximum(hi, -lo)
    exponent = np.clip(largest.view(np.uint32) >> np.uint32(23), 1, 253).astype(np.uint32)
    down = ((np.uint32(254) - exponent) << np.uint32(23)).view(np.float32)
    up = (exponent << np.uint32(23)).view(np.float32)
    q = np.square((x * down).reshape(len(x), 8, -1))
    for _ in range(3):
        q = q[:, ::2] + q[:, 1::2]
    q = q[:, 0]
    while q.shape[1] > 1:
        q = q[:, : q.shape[1] // 2] + q[:, q.shape[1] // 2 :]
    limit = np.float32(NORMAL_RANGE[bits - 1]) * np.sqrt(q / np.float32(x.shape[1])) * up
    low, high = np.where(lo < -limit, -limit, lo), np.where(hi > limit, limit, hi)
    return np.where(low < high, low, lo), np.where(low < high, high, hi)


def rounded_up(x):
    """Returns the smallest bf16 that is at least x >= 0, as fp32."""
    return ((x.view(np.uint32) + np.uint32(0xFFFF)) & np.uint32(0xFFFF0000)).view(np.float32)


def encode_records(x, leaf, first, key, offset, masks):
    """Returns records u8[k, bytes] of the buckets x[k, n], which the leaf numbers from `first` on.

    Buckets of a rotated leaf are already rotated, and have all 8 m values. `masks` are u32[k].
    """
    x = x.astype(np.float32)
    (k, n), top = x.shape, np.float32(2**leaf.bits - 1)
    with np.errstate(all="ignore"):
        lo, hi = x.min(1, keepdims=True), x.max(1, keepdims=True)
        if leaf.rotation and leaf.rounding == 0 and n in (32, 64, 128, 256, 512):
            lo, hi = clip(x, lo, hi, leaf.bits)
        lo = lo + np.float32(0)
        size = hi - lo
        good = np.isfinite(x).all(1, keepdims=True) & np.isfinite(size)
        unit = size / top
        for _ in range(2):  # the topmost level is finite
            unit = np.where(lo + unit * top <= MOST, unit, np.nextafter(unit, np.float32(0)))
        unit = np.where(good & (unit >= TINY), unit, np.float32(0))
        masked = (masks[:, None] != 0) & good & (lo + rounded_up(unit) * top <= MOST)
        unit = np.where(masked, rounded_up(unit), unit)
        lo = np.where(good, lo, QUIET_NAN)
        r = np.float32(0.5)
        if leaf.rounding:
            r = noise(key, leaf, first + np.arange(k), n, offset)
        level = np.clip(np.trunc((x - lo) * (np.float32(1) / unit) + r), 0, top)
    m = columns(n)
    codes = np.zeros((k, 8 * m), np.uint64)
    codes[:, :n] = np.where(unit > 0, level, 0)
    number = np.zeros((k, m), np.uint64)  # each column's 8 codes as one number of 8 * bits bits
    for row in range(8):
        number |= codes[:, row * m : (row + 1) * m] << np.uint64(row * leaf.bits)
    planes = [(number >> np.uint64(8 * j)).astype(np.uint8) for j in range(leaf.bits)]
    word = unit.view(np.uint32) | np.where(masked, masks[:, None] | np.uint32(1 << 31), 0)
    meta = (lo.astype(np.float32), word.astype(np.uint32))
    return np.concatenate([*(v.view(np.uint8) for v in meta), *planes], 1)


def words_of(records):
    """Returns (lo fp32[k, 1], unit fp32[k, 1], mask u32[k]) of records u8[k, bytes]."""
    lo, word = records[:, :4].copy().view(np.float32), records[:, 4:8].copy().view(np.uint32)
    masked = word >> np.uint32(31) == 1
    unit = np.where(masked, word & np.uint32(0x7FFF0000), word).view(np.float32)
    return lo, unit, np.where(masked, word & np.uint32(0xFFFF), np.uint32(0))[:, 0]


def decode_records(records, n, bits):
    """Returns the values fp32[k, n] of records u8[k, bytes]."""
    records = np.ascontiguousarray(records)
    lo, unit, _ = words_of(records)
    planes = records[:, 8:].reshape(len(records), bits, -1).astype(np.uint64)
    number = sum(planes[:, j] << np.uint64(8 * j) for j in range(bits))
    rows = [(number >> np.uint64(r * bits)) & np.uint64(2**bits - 1) for r in range(8)]
    with np.errstate(all="ignore"):
        return lo + unit * np.concatenate(rows, 1)[:, :n].astype(np.float32)


def segment_of(row, bucket_size):
    """Returns the values of a segment, for a leaf with this last dimension."""

    def fits(segment):
        most = bucket_size / segment
        if bucket_size % segment:
            most = (bucket_size - 2) // segment + 2
        return most <= 16

    divisors = (d for d in range(1, row + 1) if row % d == 0)
    return next((d for d in divisors if fits(d)), bucket_size // 16)


def segments(leaf):
    """Returns each value's bucket, and the number of its segment in the bucket."""
    place = np.arange(leaf.size)
    bucket = place // leaf.bucket_size
    size = leaf.segment_size
    return bucket, place // size - bucket * leaf.bucket_size // size


def zero_masks(x, leaf):
    """Returns the masks of a leaf's zero segments, u32[buckets]."""
    bucket, number = segments(leaf)
    present, other = np.zeros((2, -(-leaf.size // leaf.bucket_size), 16), bool)
    present[bucket, number] = True
    nonzero = np.asarray(x).astype(np.float32) != 0
    other[bucket[nonzero], number[nonzero]] = True
    bits = (present & ~other).astype(np.uint64) << np.arange(16, dtype=np.uint64)
    return bits.sum(1).astype(np.uint32)


def all_zero_masks(values, leaves):
    return [zero_masks(x, leaf) for x, leaf in zip(values, leaves, strict=True)]


def without_masked(x, mask, leaf):
    """Returns the leaf's values, 0 where the mask of their segment is 1."""
    bucket, number = segments(leaf)
    masked = mask[bucket] >> number.astype(np.uint32) & np.uint32(1)
    return np.where(masked, np.float32(0), x)


def padded(leaf):
    """Returns how many values a leaf's codes represent, including padding for rotation."""
    return sum(count * (8 * columns(n) if leaf.rotation else n) for _, count, n in leaf.parts())


def each_part(x, leaf, f):
    """Applies f(buckets [k, n], first) to each part of a leaf's coded values; joins the results."""
    out, at = [], 0
    for first, count, n in leaf.parts():
        n = 8 * columns(n) if leaf.rotation else n
        out.append(f(x[at : at + count * n].reshape(count, n), first).reshape(-1))
        at += count * n
    return np.concatenate(out) if out else np.zeros(0, x.dtype)


def rotate(x, leaf):
    """Returns a leaf's values as they are coded: fp32, rotated if the leaf has rotation."""
    x = x.astype(np.float32)
    if not leaf.rotation:
        return x
    x = np.concatenate([x, np.zeros(padded(leaf) - leaf.size, np.float32)])
    return each_part(x, leaf, lambda b, first: turn(b, leaf, first))


def rotate_back(x, leaf):
    if not leaf.rotation:
        return x
    x = each_part(x, leaf, lambda b, first: turn(b, leaf, first, back=True))
    return clean(x[: leaf.size])


def encode_leaf(x, leaf, key, offset, masks):
    def records(buckets, first):
        return encode_records(
            buckets, leaf, first, key, offset, masks[first : first + len(buckets)]
        )

    return each_part(x, leaf, records).astype(np.uint8)


def each_record(data, leaf):
    """Yields (records u8[k, bytes], coded values in each) of each part of a leaf's bytes."""
    for first, count, n in leaf.parts():
        at, size = first * record_bytes(leaf.bucket_size, leaf.bits), record_bytes(n, leaf.bits)
        records = data[at : at + count * size].reshape(count, size)
        yield records, 8 * columns(n) if leaf.rotation else n


def decode_leaf(data, leaf):
    """Returns the coded values, which are still rotated in a leaf with rotation."""
    parts = [
        decode_records(records, n, leaf.bits).reshape(-1) for records, n in each_record(data, leaf)
    ]
    return np.concatenate([np.zeros(0, np.float32), *parts])


def masks_of(data, leaf):
    """Returns the masks in a leaf's bytes, u32[buckets]."""
    parts = [words_of(records)[2] for records, _ in each_record(data, leaf)]
    return np.concatenate([np.zeros(0, np.uint32), *parts])


def each_leaf(data, leaves):
    """Returns the bytes of every leaf."""
    return [data[a:b] for a, b in itertools.pairwise(leaf_starts(leaves))]


def decode_buffer(data, leaves):
    return [decode_leaf(d, leaf) for d, leaf in zip(each_leaf(data, leaves), leaves, strict=True)]


def buffer_masks(data, leaves):
    return [masks_of(d, leaf) for d, leaf in zip(each_leaf(data, leaves), leaves, strict=True)]


def encode_buffer(values, leaves, key, offset, masks):
    """Encodes coded values; `masks` has one entry per leaf, u32[buckets]."""
    parts = [
        encode_leaf(v, leaf, key, offset, mask)
        for v, leaf, mask in zip(values, leaves, masks, strict=True)
    ]
    return np.concatenate([np.zeros(0, np.uint8), *parts])


def rotate_all(values, leaves):
    return [rotate(v, leaf) for v, leaf in zip(values, leaves, strict=True)]


def narrow(x, dtype):
    with np.errstate(all="ignore"):
        return np.asarray(x, np.float32).astype(dtype)


def clean(x):
    """Replaces every NaN by the one without sign and payload."""
    return np.where(np.isnan(x), QUIET_NAN, x)


def in_chunk(leaves, begin, end):
    """Returns, per leaf, which of its values lie in records that start in [begin, end)."""
    out = []
    for leaf, at in zip(leaves, leaf_starts(leaves), strict=False):
        starts = at + record_starts(leaf)[:-1]
        own = (starts >= begin) & (starts < end)
        out.append(np.repeat(own, leaf.bucket_size)[: leaf.size])
    return out


def multiply(values, units, way):
    """Multiplies values by their units on the way in (0) or out (1); a leaf's unit may be None."""
    out = []
    for x, unit in zip(values, units or [None] * len(values), strict=True):
        if unit is not None:
            rows, columns = unit[0][way], unit[1][way]
            with np.errstate(all="ignore"):
                x = clean(x.astype(np.float32) * (rows[:, None] * columns).reshape(-1))
        out.append(x)
    return out


def encode(values, leaves, world, rank=-1, key=(0, 0), units=()):
    """Returns (payload u8[world, chunk_bytes], residuals); chunk `rank` is the caller's own."""
    begin, row = layout(leaves, world)
    coded = rotate_all(multiply(values, units, 0), leaves)
    offset = np.float32(max(rank, 0)) / np.float32(world)
    data = encode_buffer(coded, leaves, key, offset, all_zero_masks(values, leaves))
    payload = np.zeros((world, row), np.uint8)
    for w in range(world):
        if w != rank:
            payload[w, : begin[w + 1] - begin[w]] = data[begin[w] : begin[w + 1]]
    own = in_chunk(leaves, begin[rank], begin[rank + 1]) if rank >= 0 else [False] * len(leaves)
    residuals = []
    for c, y, leaf in zip(coded, decode_buffer(data, leaves), leaves, strict=True):
        with np.errstate(all="ignore"):
            residuals.append(rotate_back(clean(c - y), leaf))
    residuals = all_without_masked(multiply(residuals, units, 1), data, leaves)
    residuals = [
        narrow(np.where(mine, np.float32(0), rest), x.dtype)
        for x, rest, mine in zip(values, residuals, own, strict=True)
    ]
    return payload, residuals


def all_without_masked(values, data, leaves):
    """Returns the values of all leaves, 0 where the masks in a buffer's bytes are 1."""
    parts = zip(values, buffer_masks(data, leaves), leaves, strict=True)
    return [without_masked(x, mask, leaf) for x, mask, leaf in parts]


def addend(data, leaf):
    """Returns a peer's coded values as they are added up: zero segments are exactly zero."""
    coded, mask = decode_leaf(data, leaf), masks_of(data, leaf)
    masked = rotate(without_masked(rotate_back(coded, leaf), mask, leaf), leaf)
    return np.where(np.repeat(mask != 0, leaf.bucket_size)[: padded(leaf)], masked, coded)


def add_peers(totals, buffers, leaves):
    with np.errstate(all="ignore"):
        for data in buffers:
            decoded = [addend(d, f) for d, f in zip(each_leaf(data, leaves), leaves, strict=True)]
            totals = [t + d for t, d in zip(totals, decoded, strict=True)]
        return totals


def common_masks(masks, buffers, leaves):
    """Returns each leaf's mask and the peers' masks: 1 where all are 1."""
    for data in buffers:
        pairs = zip(masks, buffer_masks(data, leaves), strict=True)
        masks = [mask & peer for mask, peer in pairs]
    return masks


def divide(totals, divisor):
    with np.errstate(all="ignore"):
        return [t / np.float32(divisor) for t in totals]


def reduce(values, payload, leaves, rank, divisor=1.0, key=(0, 0), residuals=(), units=()):
    """Encodes (exact own values + the peers' values in rank order) / divisor.

    Returns (chunk u8[chunk_bytes], residuals). In `residuals` the chunk's values become what is
    lost, times `divisor`.
    """
    begin, row = layout(leaves, len(payload))
    own, used = slice(begin[rank], begin[rank + 1]), begin[rank + 1] - begin[rank]
    buffers = []
    for peer in range(len(payload)):
        data = np.zeros(begin[-1], np.uint8)
        data[own] = payload[peer, :used]
        if peer != rank:
            buffers.append(data)
    coded = rotate_all(multiply(values, units, 0), leaves)
    totals = divide(add_peers(coded, buffers, leaves), divisor)
    out = np.zeros(row, np.uint8)
    masks = common_masks(all_zero_masks(values, leaves), buffers, leaves)
    data = encode_buffer(totals, leaves, key, 0, masks)
    out[:used] = data[own]
    mine = in_chunk(leaves, begin[rank], begin[rank + 1])
    lost = []
    for t, y, leaf in zip(totals, decode_buffer(data, leaves), leaves, strict=True):
        with np.errstate(all="ignore"):
            lost.append(clean(rotate_back(clean(t - y), leaf) * np.float32(divisor)))
    lost = all_without_masked(multiply(lost, units, 1), data, leaves)
    filled = [
        np.where(here, narrow(x, e.dtype), e)
        for e, x, here in zip(residuals, lost, mine, strict=False)
    ]
    return out, filled


def checked(data, leaves):
    """Replaces lo and unit of every record in which one is not finite by quiet NaN and 0."""
    data = data.copy()
    for part, leaf in zip(each_leaf(data, leaves), leaves, strict=True):
        for records, _ in each_record(part, leaf):
            lo, unit, mask = words_of(records)
            strange = ~np.isfinite(lo + 0 * unit)[:, 0]
            word = np.where(mask != 0, mask | np.uint32(1 << 31), 0).astype(np.uint32)
            records[strange, :4] = np.frombuffer(QUIET_NAN.tobytes(), np.uint8)
            records[strange, 4:8] = word[strange, None].view(np.uint8)
    return data


def decode(payload, leaves, dtypes, units=()):
    begin, _ = layout(leaves, len(payload))
    data = np.concatenate(
        [row[: b - a] for row, a, b in zip(payload, begin, begin[1:], strict=False)]
    )
    data = checked(data, leaves)
    coded = decode_buffer(data, leaves)
    values = [rotate_back(y, leaf) for y, leaf in zip(coded, leaves, strict=True)]
    each = list(units) or [None] * len(leaves)
    staged = [leaf.rotation or u is not None for leaf, u in zip(leaves, each, strict=True)]
    values = [np.clip(x, -MOST, MOST) if s else x for x, s in zip(values, staged, strict=True)]
    values = multiply(values, units, 1)
    most = [MOST if u is None else largest(t) for u, t in zip(each, dtypes, strict=True)]
    values = [np.clip(x, -m, m) if s else x for x, m, s in zip(values, most, staged, strict=True)]
    values = all_without_masked(values, data, leaves)
    return [narrow(x, t) for x, t in zip(values, dtypes, strict=True)]


def largest(dtype):
    return np.float32(ml_dtypes.finfo(dtype).max)


def accumulate(values, payload, leaves, rank=-1, divisor=1.0):
    """Returns (leaf + decoded payloads of all peers except `rank`) / divisor, in the leaf's dtype.

    For a rotated leaf, the peers' values are added up and rotated back before the leaf is added.
    They are 0 where all peers' masks are 1.
    """
    buffers = [row for peer, row in enumerate(payload) if peer != rank]
    own = [v.astype(np.float32) for v in values]
    start = [
        np.zeros(padded(leaf), np.float32) if leaf.rotation else x
        for x, leaf in zip(own, leaves, strict=True)
    ]
    totals = add_peers(start, buffers, leaves)
    masks = common_masks(all_zero_masks([np.zeros_like(x) for x in own], leaves), buffers, leaves)
    with np.errstate(all="ignore"):
        totals = [
            x + without_masked(rotate_back(t, leaf), mask, leaf) if leaf.rotation else t
            for x, t, mask, leaf in zip(own, totals, masks, leaves, strict=True)
        ]
    totals = divide(totals, divisor)
    return [narrow(clean(t), v.dtype) for t, v in zip(totals, values, strict=True)]
