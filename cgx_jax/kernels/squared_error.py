"""The quantizer's error for given values, from its arithmetic only: nothing is packed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cgx_jax.kernels import reference


def quantized_errors(
    codes: Sequence[tuple[int, int, bool, bool]], rows: jax.Array, filled: np.ndarray
) -> jax.Array:
    """Returns sums of squared errors of the first `filled` values of each row, fp32[rows, codes].

    A code is (bits, bucket size, whether rounding is random, whether buckets are rotated). `rows`
    are fp32[rows, length]. A row has whole buckets, or one short leaf followed by copies of its
    last value. For random rounding, the result is the expectation. The signs of a rotation differ
    from the signs with which the leaf is sent, which changes nothing on average. Units are not
    rounded to bf16, and segments of zeros are not exact. Codes that differ only in bits are
    computed together, since each operation takes time to compile.
    """
    runs, length = rows.shape
    here = np.arange(length) < np.asarray(filled)[:, None]
    columns: list[Any] = [None] * len(codes)
    kinds = [code[1:] for code in codes]
    for size, unbiased, rotation in dict.fromkeys(kinds):
        own = [i for i, kind in enumerate(kinds) if kind == (size, unbiased, rotation)]
        bits = np.array([codes[i][0] for i in own])
        levels = (2.0**bits - 1).astype(np.float32)[None]  # [1, own]
        values = jnp.where(here, rows, 0) if rotation else rows
        buckets = values.reshape(-1, size)
        if rotation:
            buckets = reference.rotate(buckets, 0, 0)
        low, high = buckets.min(axis=1)[:, None], buckets.max(axis=1)[:, None]  # [buckets, own]
        if rotation and not unbiased and reference.one_block(size):
            limits = jax.vmap(reference.normal_limits, (None, 0), 1)(buckets, bits)
            low, high = jnp.maximum(low, -limits), jnp.minimum(high, limits)
        unit = ((high - low) / levels)[:, None]  # [buckets, 1, own]
        level = (buckets[:, :, None] - low[:, None]) / jnp.where(unit > 0, unit, 1)
        nearest = jnp.clip(jnp.floor(level + 0.5), 0, levels[None])
        up = level - jnp.floor(level)
        moved = up * (1 - up) if unbiased else jnp.square(level - nearest)
        error = (moved * jnp.square(unit)).reshape(runs, length, len(own))
        if rotation:  # the error of all sent values; rotating back scales squares
            error = error * reference.squares_turned_back(size)
        else:
            error = jnp.where(here[..., None], error, 0)
        for i, sums in zip(own, error.sum(axis=1).T, strict=True):
            columns[i] = sums
    return jnp.stack(columns, axis=1)
