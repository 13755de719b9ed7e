"""Packing of codes of a few bits into whole bytes, and of numbers into bytes."""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from cgx_jax.kernels import codes, reference

_POWERS = np.array([[1, 3, 9, 27, 81]], np.uint8)


def size_of(shape: int | Sequence[int]) -> int:
    """Returns the number of values of `shape`, which may also be that number itself."""
    return shape if isinstance(shape, int) else math.prod(shape)


def to_bytes(x: jax.Array) -> jax.Array:
    """The bytes of an array of any dtype but bool, u8[n]."""
    return lax.bitcast_convert_type(jnp.ravel(x), jnp.uint8).reshape(-1)


def from_bytes(payload: jax.Array, shape: Sequence[int], dtype: DTypeLike) -> jax.Array:
    """Inverts `to_bytes`; raises ValueError if the shape needs another number of bytes."""
    width = np.dtype(dtype).itemsize
    expected = math.prod(shape) * width
    if payload.size != expected:
        raise ValueError(
            f"decode: the payload has {payload.size} bytes, but {tuple(shape)} of "
            f"{np.dtype(dtype)} needs {expected}; decode with the shape and compressor that "
            "encoded it."
        )
    grouped = payload.reshape((-1, width) if width > 1 else (-1,))
    return lax.bitcast_convert_type(grouped, dtype).reshape(shape)


def packed_bytes(count: int, bits: int) -> int:
    """Bytes of `count` codes of `bits` bits."""
    return -(-count * bits // 8)


def _group(bits: int) -> tuple[int, int]:
    """Returns the least number of codes that fill whole bytes, and how many bytes."""
    common = math.gcd(bits, 8)
    return 8 // common, bits // common


def pack(codes: jax.Array, bits: int) -> jax.Array:
    """Packs uint32[n] below 2**bits into u8[packed_bytes], code 0 in the lowest bits of byte 0."""
    count, (several, _) = codes.size, _group(bits)
    groups = jnp.pad(codes, (0, -count % several)).reshape(-1, several)
    if bits > 8:
        return _pack_long(groups, bits).reshape(-1)[: packed_bytes(count, bits)]
    columns = reference.packed([groups[:, i] for i in range(several)], bits)
    return jnp.stack(columns, axis=1).reshape(-1)[: packed_bytes(count, bits)]


def _pack_long(groups: jax.Array, bits: int) -> jax.Array:
    """Packs groups of codes of more than 8 bits, of which at most two share a byte."""
    starts = 8 * np.arange(groups.shape[1] * bits // 8)
    first = starts // bits
    low = groups[:, first] >> (starts - first * bits).astype(np.uint32)
    rest = (first + 1) * bits - starts
    high = groups[:, (first + 1) % groups.shape[1]] << np.minimum(rest, 8).astype(np.uint32)
    return ((low | high) & 0xFF).astype(jnp.uint8)


def unpack(payload: jax.Array, bits: int, count: int) -> jax.Array:
    """The inverse of `pack`: uint32[count]."""
    several, whole = _group(bits)
    missing = -(-count // several) * whole - payload.size
    groups = jnp.pad(payload, (0, missing)).reshape(-1, whole).astype(jnp.uint32)
    columns = reference.unpacked([groups[:, byte] for byte in range(whole)], bits)
    return jnp.stack(columns, axis=1).reshape(-1)[:count]


def pack_signs(x: jax.Array) -> jax.Array:
    """Packs fp32[n] into u8[ceil(n / 8)]: a bit per value for x >= 0, the first one lowest."""
    return codes.call("cgx_pack_signs", pack_signs_jnp, x)[0]


def pack_signs_jnp(x: jax.Array) -> list[jax.Array]:
    """The kernel cgx_pack_signs, in plain jnp."""
    # Compares bit patterns, since on some processors a comparison takes numbers below 2^-126 for 0.
    bits = lax.bitcast_convert_type(x, jnp.int32)
    least, infinity = np.int32(-(2**31)), np.int32(0x7F800000)
    return [pack((((bits >= 0) & (bits <= infinity)) | (bits == least)).astype(jnp.uint32), 1)]


def unpack_signs(payload: jax.Array, count: int) -> jax.Array:
    """The inverse of `pack_signs`: fp32[count] of 1 and -1."""
    return codes.call("cgx_unpack_signs", unpack_signs_jnp, payload, count=count)[0]


def unpack_signs_jnp(payload: jax.Array, *, count: int) -> list[jax.Array]:
    """The kernel cgx_unpack_signs, in plain jnp."""
    return [2 * unpack(payload, 1, count).astype(jnp.float32) - 1]


def pack_trits(codes: jax.Array) -> jax.Array:
    """Packs uint8[n] of 0, 1 and 2 into u8[ceil(n / 5)]: five base-3 digits per byte."""
    groups = jnp.pad(codes, (0, -codes.size % 5)).reshape(-1, 5)
    return (groups * _POWERS).sum(axis=1, dtype=jnp.uint8)


def unpack_trits(payload: jax.Array, count: int) -> jax.Array:
    """Inverts `pack_trits`: returns uint8[count]. Bytes that are no codes give digits too."""
    digits = payload[:, None] // _POWERS % np.uint8(3)
    return digits.reshape(-1)[:count]
