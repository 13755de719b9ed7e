"""States for another number of ranks, after workers have left or joined."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cgx_jax.transforms.state import CodeState, LocalState, SyncState

_NAME = "resize_state"


def resize_state(state: Any, world: int) -> Any:
    """An optimizer state with that of `sync_gradients` or `local_steps`, for `world` ranks.

    An update is a mean over the ranks, so n ranks with residuals e still owe the optimizer sum(e) /
    n. The new ranks must owe the same. Each new rank gets the mean over the old ranks, so the mean
    stays and the sum becomes `world` / n times what it was. This applies to everything that belongs
    to a rank: residuals, velocities, states of compressors, and what `local_steps` keeps. What is
    the same on all ranks stays as it is. Counts of values that found no room restart at 0.

    `state` holds whole arrays, with a row for each old rank, as `init` returned it or as restored.
    Call the function outside of jit. Place the result on the new mesh with `state_shardings`.
    Arrays may be `jax.ShapeDtypeStruct`, for restoring what another number of ranks has saved.

    Raises TypeError or ValueError for a world that is not an integer of 1 or more. Raises
    ValueError for a state of neither transformation, for rows of different numbers of ranks, and
    for rows of integers that differ, since these have no mean.
    """
    if operator.index(world) < 1:
        raise ValueError(f"{_NAME}: world={world} must be 1 or more.")

    def is_ours(x: Any) -> bool:
        return isinstance(x, SyncState | LocalState)

    ours = [x for x in jax.tree.leaves(state, is_leaf=is_ours) if is_ours(x)]
    if not ours:
        raise ValueError(
            f"{_NAME}: the state holds no state of sync_gradients or local_steps; pass the state "
            "of a chain with one of them."
        )
    rows = {x.shape[0] for x in jax.tree.leaves([_of_ranks(x) for x in ours])}
    if len(rows) > 1:
        raise ValueError(
            f"{_NAME}: the state has rows for {sorted(rows)} ranks; pass the whole state of one "
            "mesh, outside of shard_map."
        )

    def resized(x: Any) -> Any:
        if isinstance(x, LocalState):
            moved, optimizer = _rows(_mean, (x.moved, x.optimizer), world)
            return x._replace(moved=moved, optimizer=optimizer, sync=resized(x.sync))
        if not isinstance(x, SyncState):
            return x
        codes = x.codes
        if isinstance(codes, CodeState):
            codes = codes._replace(own=_rows(_mean, codes.own, world))
        memory, overflow = _rows(_mean, x.memory, world), _rows(_zero, x.overflow, world)
        return x._replace(memory=memory, codes=codes, overflow=overflow)

    return jax.tree.map(resized, state, is_leaf=is_ours)


def _of_ranks(state: Any) -> Any:
    """Returns the parts of a state that have a row for each rank."""
    if isinstance(state, LocalState):
        return state.moved, state.optimizer, _of_ranks(state.sync)
    own = state.codes.own if isinstance(state.codes, CodeState) else ()
    return state.memory, own, state.overflow


def _rows(row: Callable[[np.ndarray], np.ndarray], tree: Any, world: int) -> Any:
    """Repeats `row` of every array `world` times, on the host, where copies take no memory."""

    def rows(x: Any) -> Any:
        shape = (world, *x.shape[1:])
        if isinstance(x, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(shape, x.dtype)
        return np.broadcast_to(row(np.asarray(x)), shape)

    return jax.tree.map(rows, tree)


def _mean(rows: np.ndarray) -> np.ndarray:
    if jnp.issubdtype(rows.dtype, jnp.inexact):
        wide = np.float32 if rows.dtype.itemsize < 4 else rows.dtype
        return rows.mean(0, dtype=wide).astype(rows.dtype)
    if (rows != rows[0]).any():
        raise ValueError(
            f"{_NAME}: rows of {rows.dtype}{list(rows.shape[1:])} differ between ranks, and "
            "integers have no mean; begin with the state of a new init."
        )
    return rows[0]


def _zero(rows: np.ndarray) -> np.ndarray:
    return np.zeros_like(rows[0])
