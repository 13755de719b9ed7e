"""States for another number of ranks, after workers have left or joined."""

from __future__ import annotations

import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cgx_jax.transforms.state import CodeState, LocalState, SyncState

_NAME = "resize_state"


def resize_state(state: Any, world: int) -> Any:
    """An optimizer state with that of `sync_gradients` or `local_steps` for `world` ranks.

    Each rank gets the mean over the old ranks of what belonged to a rank: residuals, velocities,
    states of compressors, and what `local_steps` keeps. The mean over the ranks is then what it
    was, and with it what later steps still add to the optimizer's sums. The sum over the ranks
    changes with their number, as that of gradients does. What is the same on all ranks stays;
    counts of what found no room begin at 0.

    `state` holds whole arrays, with a row for each old rank, outside of jit: as `init` returned it,
    or as restored. Place the result by `state_shardings` on the new mesh. Raises TypeError or
    ValueError for a world that is no integer from 1 on, a state that holds none of the two, rows
    for different numbers of ranks, and rows of integers that differ, which have no mean.
    """
    if operator.index(world) < 1:
        raise ValueError(f"{_NAME}: world={world} must be 1 or more.")

    def is_ours(x: Any) -> bool:
        return isinstance(x, SyncState | LocalState)

    ours = [x for x in jax.tree.leaves(state, is_leaf=is_ours) if is_ours(x)]
    if not ours:
        raise ValueError(
            f"{_NAME}: the state holds none of sync_gradients or local_steps; pass what the init "
            "of a chain with one of them returned."
        )
    rows = {x.shape[0] for x in jax.tree.leaves([_of_ranks(x) for x in ours])}
    if len(rows) > 1:
        raise ValueError(
            f"{_NAME}: the state has rows for {sorted(rows)} ranks; pass the whole state of one "
            "mesh, outside of shard_map."
        )

    def resized(x: Any) -> Any:
        if isinstance(x, LocalState):
            moved, optimizer = _means((x.moved, x.optimizer), world)
            return x._replace(moved=moved, optimizer=optimizer, sync=resized(x.sync))
        if not isinstance(x, SyncState):
            return x
        codes = x.codes
        if isinstance(codes, CodeState):
            codes = codes._replace(own=_means(codes.own, world))
        overflow = jax.tree.map(lambda _: jnp.zeros(world, jnp.int32), x.overflow)
        return x._replace(memory=_means(x.memory, world), codes=codes, overflow=overflow)

    return jax.tree.map(resized, state, is_leaf=is_ours)


def _of_ranks(state: Any) -> Any:
    """What has a row for each rank."""
    if isinstance(state, LocalState):
        return state.moved, state.optimizer, _of_ranks(state.sync)
    own = state.codes.own if isinstance(state.codes, CodeState) else ()
    return state.memory, own, state.overflow


def _means(tree: Any, world: int) -> Any:
    """Every array's mean over its rows, `world` times."""

    def mean(x: Any) -> jax.Array:
        if jnp.issubdtype(x.dtype, jnp.inexact):
            wide = jnp.float32 if x.dtype.itemsize < 4 else x.dtype
            one = jnp.mean(x, 0, dtype=wide).astype(x.dtype)
        else:
            every = np.asarray(x)
            if (every != every[0]).any():
                raise ValueError(
                    f"{_NAME}: rows of {x.dtype}{list(x.shape[1:])} differ between ranks, and "
                    "integers have no mean; begin with the state of a new init."
                )
            one = jnp.asarray(every[0])
        return jnp.broadcast_to(one, (world, *one.shape))

    return jax.tree.map(mean, tree)
