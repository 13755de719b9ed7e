"""Wire format 1 in NumPy, written from docs/wire_format.md alone: what every kernel must equal.

A fusion buffer is a list of `Leaf`. Arrays are fp32, bf16 or f16; payloads are uint8. Scalar
NumPy steps round to fp32 one by one, as the format asks. Bytes, not tolerances, are compared.
"""

from __future__ import annotations

import dataclasses

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

    def buckets(self):
        """(first value, end value) of every bucket."""
        return [
            (i, min(i + self.bucket_size, self.size)) for i in range(0, self.size, self.bucket_size)
        ]


def columns(n):
    return -(-n // 32) * 4


def record_bytes(n, bits):
    return 8 + bits * columns(n)


def record_starts(leaves):
    """Start of every record, as {(leaf, bucket): byte}, and the total."""
    starts, at = {}, 0
    for k, leaf in enumerate(leaves):
        for b, (i, j) in enumerate(leaf.buckets()):
            starts[k, b] = at
            at += record_bytes(j - i, leaf.bits)
    return starts, at


def layout(leaves, world):
    """(begin of each chunk and the end, chunk_bytes)."""
    starts, total = record_starts(leaves)
    begin = [total] * world + [total]
    for s in reversed(starts.values()):
        for w in range(s * world // total + 1):
            if s * world >= w * total:
                begin[w] = s
    return begin, max((b - a for a, b in zip(begin, begin[1:], strict=False)), default=0)


def mix(x):
    x = np.asarray(x, np.uint32)
    with np.errstate(over="ignore"):
        x = x ^ (x >> np.uint32(16))
        x = x * np.uint32(0x7FEB352D)
        x = x ^ (x >> np.uint32(15))
        x = x * np.uint32(0x846CA68B)
        return x ^ (x >> np.uint32(16))


def noise(key, stream, bucket, n):
    """fp32 in [0, 1), one for each of a bucket's n values."""
    u = np.uint32
    with np.errstate(over="ignore"):
        low, high = u(bucket & 0xFFFFFFFF), u(bucket >> 32)
        a = mix(u(key[0]) ^ mix(u(stream) + u(0x9E3779B9)))
        d = mix(u(key[1]) + a)
        s0 = mix(mix(a ^ low) + high)
        s1 = mix((d + s0 * u(0x85EBCA6B)) ^ low)
        x = np.arange(n, dtype=u) + s0
        x = (x ^ (x >> u(16))) * u(0x7FEB352D) + s1
        x = (x ^ (x >> u(15))) * u(0x846CA68B)
        return ((x ^ (x >> u(16))) >> u(8)).astype(np.float32) * np.float32(2.0**-24)


def encode_bucket(x, leaf, bucket, key):
    """One record (uint8) from a bucket's values."""
    x = np.asarray(x).astype(np.float32)
    top, m = np.float32(2**leaf.bits - 1), columns(x.size)
    codes = np.zeros(8 * m, np.uint64)
    with np.errstate(all="ignore"):
        lo = x.min() + np.float32(0)
        size = x.max() - lo
        if not (np.isfinite(x).all() and np.isfinite(size)):
            lo, unit = QUIET_NAN, np.float32(0)
        elif (unit := size / top) < TINY:
            unit = np.float32(0)
        else:
            r = noise(key, leaf.stream, bucket, x.size) if leaf.stochastic else np.float32(0.5)
            scaled = (x - lo) * (np.float32(1) / unit) + r
            codes[: x.size] = np.minimum(scaled.astype(np.uint64), np.uint64(top))
    rows = codes.reshape(8, m)
    number = np.zeros(m, np.uint64)  # each column's codes, as one number of 8 * bits bits
    for r in range(8):
        number |= rows[r] << np.uint64(r * leaf.bits)
    planes = [(number >> np.uint64(8 * j)).astype(np.uint8) for j in range(leaf.bits)]
    return np.concatenate([np.array([lo, unit], "<f4").view(np.uint8), *planes])


def decode_bucket(record, n, bits):
    """A bucket's n values, fp32, from its record."""
    lo, unit = record[:8].view("<f4")
    number = np.zeros(columns(n), np.uint64)
    for j, plane in enumerate(record[8:].reshape(bits, -1)):
        number |= plane.astype(np.uint64) << np.uint64(8 * j)
    rows = [(number >> np.uint64(r * bits)) & np.uint64(2**bits - 1) for r in range(8)]
    codes = np.concatenate(rows)[:n].astype(np.float32)
    with np.errstate(all="ignore"):
        return lo + unit * codes


def narrow(x, dtype):
    with np.errstate(all="ignore"):
        return np.asarray(x, np.float32).astype(dtype)


def clean(x):
    """NaN without sign or payload."""
    return np.where(np.isnan(x), QUIET_NAN, x)


def records(leaves, world):
    """(leaf, bucket, first value, end value, chunk, offset in the chunk's row, bytes) in order."""
    begin, _ = layout(leaves, world)
    starts, total = record_starts(leaves)
    for (k, b), s in starts.items():
        i, j = leaves[k].buckets()[b]
        w = s * world // total
        yield k, b, i, j, w, s - begin[w], record_bytes(j - i, leaves[k].bits)


def encode(values, leaves, world, rank=-1, key=(0, 0)):
    """(payload u8[world, chunk_bytes], residuals): chunk `rank` is the caller's own."""
    payload = np.zeros((world, layout(leaves, world)[1]), np.uint8)
    residuals = [np.zeros_like(v) for v in values]
    for k, b, i, j, w, at, n in records(leaves, world):
        if w == rank:
            continue
        x = values[k][i:j]
        record = encode_bucket(x, leaves[k], b, key)
        payload[w, at : at + n] = record
        with np.errstate(all="ignore"):
            rest = x.astype(np.float32) - decode_bucket(record, j - i, leaves[k].bits)
        residuals[k][i:j] = narrow(clean(rest), x.dtype)
    return payload, residuals


def reduce(values, payload, leaves, rank, divisor=1.0, key=(0, 0)):
    """The own chunk, u8[chunk_bytes]: exact own values + the peers', in rank order, / divisor."""
    out = np.zeros(payload.shape[1], np.uint8)
    for k, b, i, j, w, at, n in records(leaves, len(payload)):
        if w != rank:
            continue
        total = values[k][i:j].astype(np.float32)
        with np.errstate(all="ignore"):
            for peer, row in enumerate(payload):
                if peer != rank:
                    total = total + decode_bucket(row[at : at + n], j - i, leaves[k].bits)
            total = total / np.float32(divisor)
        out[at : at + n] = encode_bucket(total, leaves[k], b, key)
    return out


def decode(payload, leaves, dtypes):
    out = [np.zeros(leaf.size, t) for leaf, t in zip(leaves, dtypes, strict=True)]
    for k, _, i, j, w, at, n in records(leaves, len(payload)):
        row = payload[w, at : at + n]
        out[k][i:j] = narrow(decode_bucket(row, j - i, leaves[k].bits), dtypes[k])
    return out


def accumulate(values, payload, leaves, rank=-1, divisor=1.0):
    """(leaf + decoded payload of every peer but `rank`) / divisor, in the leaf's dtype."""
    out = [np.zeros_like(v) for v in values]
    for k, _, i, j, _, at, n in records(leaves, 1):
        total = values[k][i:j].astype(np.float32)
        with np.errstate(all="ignore"):
            for peer, row in enumerate(payload):
                if peer != rank:
                    total = total + decode_bucket(row[at : at + n], j - i, leaves[k].bits)
            total = total / np.float32(divisor)
        out[k][i:j] = narrow(clean(total), values[k].dtype)
    return out
