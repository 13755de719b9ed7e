"""Leaves cut into an equal share of their values for each rank."""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from cgx_jax._types import Shaped
from cgx_jax.compressors.base import CodedLeaf

PADDING = 16  # whole rows may add one value for each 16 of the leaf


def shape_of(shape: Sequence[int], world: int) -> tuple[int, ...]:
    """Returns the shape of one share: whole rows of the last dimension, or flat.

    A code that sees whole rows can mark those that are zero. Shares are flat where whole rows would
    need too much padding.
    """
    rows = math.prod(shape[:-1])
    each = -(-rows // world)
    if (each * world - rows) * PADDING <= rows:
        return each, (1, *shape)[-1]
    return (-(-math.prod(shape) // world),)


def of(leaves: tuple[CodedLeaf, ...], world: int) -> tuple[CodedLeaf, ...]:
    """Returns one share of each leaf, fp32."""
    f32 = np.dtype(np.float32)
    return tuple(x._replace(shape=shape_of(x.shape, world), dtype=f32) for x in leaves)


def cut(x: jax.Array, world: int) -> jax.Array:
    """Cuts a leaf into fp32[world, *share].

    The padding repeats the last value, so it does not widen the range of a bucket.
    """
    flat, share = jnp.ravel(x).astype(jnp.float32), shape_of(x.shape, world)
    padding = world * math.prod(share) - flat.size
    return jnp.pad(flat, (0, padding), mode="edge").reshape(world, *share)


def joined(shares: jax.Array, like: Shaped) -> jax.Array:
    """Inverts `cut`: returns the leaf in the shape of `like`."""
    return shares.reshape(-1)[: like.size].reshape(like.shape)
