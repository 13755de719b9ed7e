"""States for another number of ranks, after workers have left or joined."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cgx_jax._types import Pytree
from cgx_jax.arguments import whole_number
from cgx_jax.transforms.state import (
    PerRank,
    is_of_pmap,
    map_parts,
    ranks_in,
    require_concrete,
    sync_states,
)

_NAME = "resize_state"


def resize_state(state: Pytree, world: int) -> Pytree:
    """An optimizer state with that of `sync_gradients` or `diloco`, for `world` ranks.

    An update is a mean over the ranks, so n ranks with residuals e still owe the optimizer sum(e) /
    n. The new ranks must owe the same. Each new rank gets the mean over the old ranks, so the mean
    stays and the sum becomes `world` / n times what it was. This applies to everything that belongs
    to a rank: residuals, velocities, states of compressors, and what `diloco` keeps. What is the
    same on all ranks stays as it is. Counts of values that found no room restart at 0, and so do
    the tickets of delayed reductions, which then run when they are applied.

    `state` holds whole arrays, with a row for each old rank, as `init` returned it or as restored.
    In a state of `pmap` everything has a row for each rank, and so it has in the result.
    It may be an `nnx.Optimizer`, or `nnx.state` of one. If a chain reduces over several axes,
    resize each `SyncState` by itself. Call the function outside of jit. Place the result on the new
    mesh with `state_shardings`: of the result, or of `jax.eval_shape(tx.init, params)` for
    parameters that are sharded on explicit axes.
    Arrays may be `jax.ShapeDtypeStruct`, for restoring what another number of ranks has saved.

    Raises TypeError or ValueError for a world that is not an integer of 1 or more. Raises
    ValueError for a state of neither transformation or restored without a target, for rows of
    different numbers of ranks, for rows on several processes, for rows of integers that differ,
    since these have no mean, and inside jit.
    """
    world = whole_number(_NAME, "world", world, 1)
    require_concrete(_NAME, state)
    if not sync_states(_NAME, state):
        raise ValueError(
            f"{_NAME}: the state holds no state of sync_gradients or diloco; pass the state "
            "of a chain with one of them."
        )
    whole = is_of_pmap(_NAME, state)
    rows = ranks_in(_NAME, state)
    if len(rows) > 1:
        raise ValueError(
            f"{_NAME}: the state has rows for {sorted(rows)} ranks. If these are ranks of several "
            "axes, resize each SyncState by itself. Otherwise pass the whole state of one mesh, "
            "outside of shard_map."
        )

    def resized(mark: PerRank | None, x: np.ndarray | jax.Array | jax.ShapeDtypeStruct) -> Any:
        shape = (world, *x.shape[1:])
        if isinstance(x, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(shape, x.dtype)
        here = ("is_fully_addressable", "is_fully_replicated")
        if not isinstance(x, np.ndarray) and not any(getattr(x, name) for name in here):
            raise ValueError(
                f"{_NAME}: rows of {x.dtype}{list(x.shape)} lie on several processes. Gather them "
                "first, state = jax.jit(lambda s: s, out_shardings=NamedSharding(mesh, P()))(state)"
                ", or restore them from a checkpoint, replicated (docs/policy.md#checkpoints)."
            )
        if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            data = resized(mark, jax.random.key_data(x))
            return jax.random.wrap_key_data(jnp.asarray(data), impl=jax.random.key_impl(x))
        rows = np.asarray(x)
        if mark is None:
            row = rows[0]
        else:
            row = np.zeros_like(rows[0]) if mark is PerRank.RESTART else _mean(rows)
        return np.broadcast_to(row, shape)  # on the host, where copies of a row take no memory

    def same(x: Any) -> Any:  # under pmap it has a row for each rank, too
        return resized(None, x) if whole and jnp.ndim(x) else x

    return map_parts(_NAME, state, resized, same)


def _mean(rows: np.ndarray) -> np.ndarray:
    first: np.ndarray = rows[0]
    equal = rows == first
    if equal.all():
        return first
    if not jnp.issubdtype(rows.dtype, jnp.inexact):
        raise ValueError(
            f"{_NAME}: rows of {rows.dtype}{list(rows.shape[1:])} differ between ranks, and "
            "integers have no mean; begin with the state of a new init."
        )
    # fp64, in which sums of fp32 neither overflow nor round what is equal in all rows.
    wide = np.complex128 if np.iscomplexobj(rows) else np.float64
    return np.where(equal.all(0), first, rows.mean(0, dtype=wide)).astype(rows.dtype)
