"""Wire format 1 in NumPy, written from docs/wire_format.md alone: what every kernel must equal.

A fusion buffer is a list of `Leaf`; values are fp32, bf16 or f16, payloads uint8. NumPy rounds
every step to fp32 on its own, as the format asks. Bytes, not tolerances, are compared.
"""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np

QUIET_NAN = np.uint32(0x7FC00000).view(np.float32)
TINY = np.float32(2.0**-126)


@dataclasses.dataclass(frozen=True)
class Leaf:
    """How one leaf is encoded."""

    size: int
    bits: int = 4
    bucket_size: int = 512
    stochastic: bool = False
    stream: int = 0

    def parts(self):
        """(first bucket, buckets, values in each): the full buckets, then the short one."""
        full, tail = divmod(self.size, self.bucket_size)
        return [p for p in ((0, full, self.bucket_size), (full, 1, tail)) if p[1] * p[2]]


def record_bytes(n, bits):
    return 8 + bits * 4 * -(-n // 32)


def record_starts(leaf):
    """Byte of every record from the leaf's first, and the leaf's bytes."""
    lengths = [record_bytes(n, leaf.bits) for _, count, n in leaf.parts() for _ in range(count)]
    return np.cumsum([0, *lengths], dtype=np.int64)


def leaf_starts(leaves):
    return np.cumsum([0] + [record_starts(leaf)[-1] for leaf in leaves], dtype=np.int64)


def layout(leaves, world):
    """(begin of each chunk and the end, chunk_bytes)."""
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


def noise(key, stream, bucket, n):
    """fp32 in [0, 1): one row for each bucket number, one column for each value."""
    u = np.uint32
    key, stream = np.array(key, u)[:, None], np.array([[stream]], u)
    bucket = np.asarray(bucket, np.uint64)[:, None]
    low, high = bucket.astype(u), (bucket >> np.uint64(32)).astype(u)
    a = mix(key[:1] ^ mix(stream + u(0x9E3779B9)))
    d = mix(key[1:] + a)
    s0 = mix(mix(a ^ low) + high)
    s1 = mix((d + s0 * u(0x85EBCA6B)) ^ low)
    x = np.arange(n, dtype=u)[None] + s0
    x = (x ^ (x >> u(16))) * u(0x7FEB352D) + s1
    x = (x ^ (x >> u(15))) * u(0x846CA68B)
    return ((x ^ (x >> u(16))) >> u(8)).astype(np.float32) * np.float32(2.0**-24)


def encode_records(x, leaf, first, key):
    """Records u8[k, bytes] of the buckets x[k, n], which are the leaf's `first` and following."""
    x = x.astype(np.float32)
    (k, n), top = x.shape, np.float32(2**leaf.bits - 1)
    with np.errstate(all="ignore"):
        lo = x.min(1, keepdims=True) + np.float32(0)
        size = x.max(1, keepdims=True) - lo
        good = np.isfinite(x).all(1, keepdims=True) & np.isfinite(size)
        unit = np.where(good & (size / top >= TINY), size / top, np.float32(0))
        lo = np.where(good, lo, QUIET_NAN)
        r = np.float32(0.5)
        if leaf.stochastic:
            r = noise(key, leaf.stream, first + np.arange(k), n)
        level = np.minimum(np.trunc((x - lo) * (np.float32(1) / unit) + r), top)
    m = 4 * -(-n // 32)
    codes = np.zeros((k, 8 * m), np.uint64)
    codes[:, :n] = np.where(unit > 0, level, 0)
    number = np.zeros((k, m), np.uint64)  # each column's 8 codes as one number of 8 * bits bits
    for row in range(8):
        number |= codes[:, row * m : (row + 1) * m] << np.uint64(row * leaf.bits)
    planes = [(number >> np.uint64(8 * j)).astype(np.uint8) for j in range(leaf.bits)]
    return np.concatenate([lo.view(np.uint8), unit.view(np.uint8), *planes], 1)


def decode_records(records, n, bits):
    """Values fp32[k, n] of records u8[k, bytes]."""
    records = np.ascontiguousarray(records)
    lo, unit = records[:, :4].copy().view(np.float32), records[:, 4:8].copy().view(np.float32)
    planes = records[:, 8:].reshape(len(records), bits, -1).astype(np.uint64)
    number = sum(planes[:, j] << np.uint64(8 * j) for j in range(bits))
    rows = [(number >> np.uint64(r * bits)) & np.uint64(2**bits - 1) for r in range(8)]
    with np.errstate(all="ignore"):
        return lo + unit * np.concatenate(rows, 1)[:, :n].astype(np.float32)


def encode_leaf(x, leaf, key):
    out = [np.zeros(0, np.uint8)]
    for first, count, n in leaf.parts():
        buckets = x[first * leaf.bucket_size :][: count * n].reshape(count, n)
        out.append(encode_records(buckets, leaf, first, key).reshape(-1))
    return np.concatenate(out)


def decode_leaf(data, leaf):
    out = [np.zeros(0, np.float32)]
    for first, count, n in leaf.parts():
        at, size = first * record_bytes(leaf.bucket_size, leaf.bits), record_bytes(n, leaf.bits)
        records = data[at : at + count * size].reshape(count, size)
        out.append(decode_records(records, n, leaf.bits).reshape(-1))
    return np.concatenate(out)


def decode_buffer(data, leaves):
    at = leaf_starts(leaves)
    return [decode_leaf(data[a:b], leaf) for leaf, a, b in zip(leaves, at, at[1:], strict=False)]


def encode_buffer(values, leaves, key):
    parts = [encode_leaf(v, leaf, key) for v, leaf in zip(values, leaves, strict=True)]
    return np.concatenate([np.zeros(0, np.uint8), *parts])


def narrow(x, dtype):
    with np.errstate(all="ignore"):
        return np.asarray(x, np.float32).astype(dtype)


def clean(x):
    """NaN without sign or payload."""
    return np.where(np.isnan(x), QUIET_NAN, x)


def in_chunk(leaves, begin, end):
    """For each leaf, which of its values lie in the records that start in [begin, end)."""
    out = []
    for leaf, at in zip(leaves, leaf_starts(leaves), strict=False):
        starts = at + record_starts(leaf)[:-1]
        own = (starts >= begin) & (starts < end)
        out.append(np.repeat(own, leaf.bucket_size)[: leaf.size])
    return out


def encode(values, leaves, world, rank=-1, key=(0, 0)):
    """(payload u8[world, chunk_bytes], residuals): chunk `rank` is the caller's own."""
    begin, row = layout(leaves, world)
    data = encode_buffer(values, leaves, key)
    payload = np.zeros((world, row), np.uint8)
    for w in range(world):
        if w != rank:
            payload[w, : begin[w + 1] - begin[w]] = data[begin[w] : begin[w + 1]]
    own = in_chunk(leaves, begin[rank], begin[rank + 1]) if rank >= 0 else [False] * len(leaves)
    residuals = []
    for x, y, mine in zip(values, decode_buffer(data, leaves), own, strict=True):
        with np.errstate(all="ignore"):
            rest = clean(x.astype(np.float32) - y)
        residuals.append(narrow(np.where(mine, np.float32(0), rest), x.dtype))
    return payload, residuals


def add_peers(values, buffers, leaves, divisor):
    totals = [v.astype(np.float32) for v in values]
    with np.errstate(all="ignore"):
        for data in buffers:
            decoded = decode_buffer(data, leaves)
            totals = [t + d for t, d in zip(totals, decoded, strict=True)]
        return [t / np.float32(divisor) for t in totals]


def reduce(values, payload, leaves, rank, divisor=1.0, key=(0, 0), residuals=()):
    """(chunk, residuals): (exact own values + the peers', in rank order) / divisor, encoded.

    The chunk is u8[chunk_bytes]; in `residuals` its values become divisor times what is lost.
    """
    begin, row = layout(leaves, len(payload))
    own, used = slice(begin[rank], begin[rank + 1]), begin[rank + 1] - begin[rank]
    buffers = []
    for peer in range(len(payload)):
        data = np.zeros(begin[-1], np.uint8)
        data[own] = payload[peer, :used]
        if peer != rank:
            buffers.append(data)
    totals = add_peers(values, buffers, leaves, divisor)
    out = np.zeros(row, np.uint8)
    data = encode_buffer(totals, leaves, key)
    out[:used] = data[own]
    filled = []
    mine = in_chunk(leaves, begin[rank], begin[rank + 1])
    for e, t, y, here in zip(residuals, totals, decode_buffer(data, leaves), mine, strict=False):
        with np.errstate(all="ignore"):
            lost = clean(clean(t - y) * np.float32(divisor))
        filled.append(np.where(here, narrow(lost, e.dtype), e))
    return out, filled


def decode(payload, leaves, dtypes):
    begin, _ = layout(leaves, len(payload))
    data = np.concatenate(
        [row[: b - a] for row, a, b in zip(payload, begin, begin[1:], strict=False)]
    )
    return [narrow(y, t) for y, t in zip(decode_buffer(data, leaves), dtypes, strict=True)]


def accumulate(values, payload, leaves, rank=-1, divisor=1.0):
    """(leaf + decoded payload of every peer but `rank`) / divisor, in the leaf's dtype."""
    buffers = [row for peer, row in enumerate(payload) if peer != rank]
    totals = add_peers(values, buffers, leaves, divisor)
    return [narrow(clean(t), v.dtype) for t, v in zip(totals, values, strict=True)]
