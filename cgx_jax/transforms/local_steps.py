"""`local_steps`: ranks train on their own for some steps, then reduce how far they have moved."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, Mesh

from cgx_jax import _compat
from cgx_jax._types import AxisName, Pytree
from cgx_jax.axes import Axes
from cgx_jax.leaves import leaves_of
from cgx_jax.transforms.checks import (
    require_own_row,
    require_paths,
    require_shapes,
    require_type,
)
from cgx_jax.transforms.own_rows import axes_of, rows_of
from cgx_jax.transforms.state import LocalState, sync_states
from cgx_jax.transforms.sync_gradients import sync_gradients

if TYPE_CHECKING:
    import optax

_NAME = "local_steps"


def local_steps(
    optimizer: optax.GradientTransformation,
    axis_name: AxisName,
    policy: Any = None,
    *,
    every: int,
    mesh: Mesh | AbstractMesh | None = None,
    **options: Any,
) -> optax.GradientTransformationExtraArgs:
    """Local SGD: ranks take steps of `optimizer` by themselves and average every `every` steps.

    Each update moves this rank's own parameters, which are `local_params(params, state)`. Compute
    gradients at these. `params` are the same on all ranks. In a step that reduces, their update is
    the mean of how far the ranks have moved since the last one. In all other steps it is 0 and
    nothing is sent. With `memory=ErrorFeedback()`, what compression loses is sent in the next step
    that reduces. `policy` and `options` are those of `sync_gradients`, which does the reduction.
    Each rank has its own optimizer state, as it has its own memory, and `state_specs` says so.

    `optax.MultiSteps` is different: it adds up gradients at the same parameters.

    Raises TypeError or ValueError for an `every` that is not an integer of 1 or more. Source:
    Qsparse-local-SGD (Basu et al., NeurIPS 2019).
    """
    import optax

    if operator.index(every) < 1:
        raise ValueError(f"{_NAME}: every={every} must be 1 or more; 1 reduces in every step.")
    axis_name = axes_of(_NAME, axis_name)
    inner = optax.with_extra_args_support(optimizer)
    sync = sync_gradients(axis_name, policy, mesh=mesh, **options)

    def init(params: Pytree) -> LocalState:
        def moved() -> Pytree:
            return jax.tree.map(lambda x: jnp.zeros(jnp.shape(x), jnp.result_type(x)), params)

        return LocalState(
            jnp.zeros((), jnp.int32),
            rows_of(moved, axis_name, mesh, _NAME),
            rows_of(lambda: inner.init(params), axis_name, mesh, _NAME),
            sync.init(params),
        )

    def update(
        updates: Pytree, state: LocalState, params: Pytree = None, **extra_args: object
    ) -> tuple[Pytree, LocalState]:
        require_type(_NAME, state, LocalState)
        axes = Axes.resolve(_NAME, axis_name, None)
        _check_moved(_NAME, state, updates)
        before = _own(state.moved)
        here = None if params is None else jax.tree.map(jnp.add, params, before)
        updates, own = inner.update(updates, _own(state.optimizer), here, **extra_args)
        moved = jax.tree.map(lambda a, b: a + b.astype(a.dtype), before, updates)

        def zeros() -> Pytree:
            return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), moved)

        def row(tree: Pytree) -> Pytree:
            return jax.tree.map(lambda x: _compat.vary_over(x[None], axes.varying()), tree)

        def reduce() -> Pytree:
            mean, synced = sync.update(moved, state.sync)
            return mean, row(zeros()), synced

        def wait() -> Pytree:
            return zeros(), row(moved), state.sync

        due = (state.step + 1) % every == 0
        mean, rows, synced = reduce() if every == 1 else lax.cond(due, reduce, wait)
        return mean, LocalState(state.step + 1, rows, row(own), synced)

    return optax.GradientTransformationExtraArgs(init, update)


def local_params(params: Pytree, state: Pytree) -> Pytree:
    """This rank's parameters: `params` plus how far it has moved since the last reduction.

    Call it inside shard_map or pmap. `state` is the optimizer's state, which holds the state of one
    `local_steps`. The result has the shapes and dtypes of `params`. Raises ValueError if `state`
    holds no state of `local_steps`, or several, and for a state of other parameters.
    """

    def is_local(x: object) -> bool:
        return isinstance(x, LocalState)

    sync_states("local_params", state)  # refuses a state that lost its types
    found = [x for x in jax.tree.leaves(state, is_leaf=is_local) if is_local(x)]
    if len(found) != 1:
        raise ValueError(
            f"local_params: the state holds {len(found)} states of local_steps, but must hold one; "
            "pass the state of a chain with one local_steps."
        )
    _check_moved("local_params", found[0], params)
    return jax.tree.map(jnp.add, params, _own(found[0].moved))


def _check_moved(caller: str, state: LocalState, like: Pytree) -> None:
    """Raises ValueError if the state belongs to other leaves than those of `like`."""
    leaves = leaves_of(like)
    require_own_row(caller, (state.moved, state.optimizer))
    require_paths(caller, "moved", (state.moved,), leaves, jax.tree.structure(like))
    shapes = [(1, *leaf.shape) for leaf in leaves]
    require_shapes(caller, "moved", state.moved, leaves, shapes)


def _own(rows: Pytree) -> Pytree:
    return jax.tree.map(lambda x: x[0], rows)
