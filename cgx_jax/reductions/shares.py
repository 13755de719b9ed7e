"""Leaves cut into an equal share of their values for each rank."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from cgx_jax._types import Shaped
from cgx_jax.compressors.codes import CodedLeaf


def of(leaves: tuple[CodedLeaf, ...], world: int) -> tuple[CodedLeaf, ...]:
    """Returns one share of each leaf, fp32."""
    f32 = np.dtype(np.float32)
    return tuple(x._replace(shape=(-(-x.size // world),), dtype=f32) for x in leaves)


def cut(x: jax.Array, world: int) -> jax.Array:
    """Cuts a leaf into fp32[world, share].

    The padding repeats the last value, so it does not widen the range of a bucket.
    """
    flat = jnp.ravel(x).astype(jnp.float32)
    share = -(-flat.size // world)
    return jnp.pad(flat, (0, share * world - flat.size), mode="edge").reshape(world, share)


def joined(shares: jax.Array, like: Shaped) -> jax.Array:
    """Inverts `cut`: returns the leaf in the shape of `like`."""
    return shares.reshape(-1)[: like.size].reshape(like.shape)
