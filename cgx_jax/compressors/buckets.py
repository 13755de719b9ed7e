"""What codes of a few bits share: buckets with a scale each, bounds, noise, checks of arguments."""

from __future__ import annotations

import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cgx_jax.kernels.reference import random_bits

BUCKET = 512


def split(x: Any, size: int) -> jax.Array:
    """fp32[buckets, size] of any array, the last one filled up with zeros."""
    flat = jnp.ravel(x).astype(jnp.float32)
    return jnp.pad(flat, (0, -flat.size % size)).reshape(-1, size)


def join(rows: jax.Array, like: Any) -> jax.Array:
    """The inverse of `split`, in the shape and dtype of `like`."""
    shape = jnp.shape(like)
    return rows.reshape(-1)[: int(np.prod(shape))].reshape(shape).astype(jnp.result_type(like))


def count(size: int, bucket: int) -> int:
    """How many buckets hold `size` values."""
    return -(-size // bucket)


def filled(size: int, bucket: int) -> np.ndarray:
    """bool[buckets, bucket]: where there are values and not what the last bucket is filled with."""
    return (np.arange(count(size, bucket) * bucket) < size).reshape(-1, bucket)


def share(rows: jax.Array, scale: jax.Array) -> jax.Array:
    """`rows` over a positive scale each; 0 where it is 0 or NaN.

    XLA multiplies by the inverse, and that of a large scale is no normal number.
    """
    down = jnp.where(scale > np.float32(2.0**64), np.float32(2.0**-64), np.float32(1))
    return jnp.where(scale > 0, (rows * down) / (scale * down), 0)


def noise(key: Any, rows: int, columns: int) -> jax.Array:
    """Uniform numbers in [0, 1) of 24 bits, fp32[rows, columns]."""
    return (noise_bits(key, rows, columns) >> 8).astype(jnp.float32) * np.float32(2**-24)


def noise_bits(key: Any, rows: int, columns: int) -> jax.Array:
    """uint32[rows, columns], by the generator of the native kernels."""
    words = jax.random.bits(key, (2,), jnp.uint32)
    return random_bits(words, 0, 0, rows, columns)


def rounded(bound: jax.Array, x: Any) -> jax.Array:
    """`bound` on fp32 values like `x`'s, and the rounding of the result to the dtype of `x`.

    Infinite where `x` is not finite, and where the result may be past the largest of the dtype.
    What is below fp32's normal numbers may come back as zero.
    """
    info = jnp.finfo(jnp.result_type(x))
    size = jnp.abs(jnp.asarray(x).astype(jnp.float32)) + bound
    least = float(info.smallest_subnormal) + float(jnp.finfo(jnp.float32).tiny)
    whole = bound + size * float(info.eps) + least
    return jnp.where(size <= float(info.max), whole, jnp.inf)


def whole_number(where: str, name: str, value: Any, low: int, high: int | None = None) -> int:
    """`value` as an int; raises TypeError for what is none, ValueError outside of low..high."""
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(
            f"{where}: {name}={value!r} is not an integer; pass a Python int."
        ) from None
    if number < low or (high is not None and number > high):
        limit = f"at least {low}" if high is None else f"in {low}..{high}"
        raise ValueError(f"{where}: {name}={number} must be {limit}.")
    return number


def require_key(compressor: Any, key: Any) -> None:
    """Raises ValueError where there is no key to draw noise from."""
    if key is None:
        raise ValueError(f"{compressor}: rounding at random needs key=jax.random.key(n).")
