"""`scatter_gradients`: the reduce-scatter of sharded training as an Optax transformation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from cgx_jax import _compat
from cgx_jax._types import AxisName, Pytree, Shaped
from cgx_jax.axes import Axes, after, split
from cgx_jax.collective import Collective
from cgx_jax.compressors import Compressor
from cgx_jax.exchanges import Exchange
from cgx_jax.plan import Plan, resolve
from cgx_jax.policies.rules import Policy
from cgx_jax.reductions.reduce_scatter import encoded
from cgx_jax.route.route import Options
from cgx_jax.route.rows import Scatter, rows_of, whole_of
from cgx_jax.route.run import run, watched
from cgx_jax.transforms.checks import check_state, require_type
from cgx_jax.transforms.feedback import (
    as_gradient,
    compensated,
    finite_everywhere,
    remembered,
    require_bounded,
    scaled,
)
from cgx_jax.transforms.memory import Memory
from cgx_jax.transforms.own_rows import axes_of, is_bound
from cgx_jax.transforms.precondition import SecondMoment, Squares, matrix_of, unstacked
from cgx_jax.transforms.state import (
    SyncState,
    by_leaf,
    init_memory,
    is_any_tree,
    rows_after,
    state_of_any_tree,
)
from cgx_jax.transforms.units import moved, scales_of
from cgx_jax.transforms.wrappers import check_wrappers

if TYPE_CHECKING:
    import optax

_NAME = "scatter_gradients"
_OTHER_LEAVES = (
    "Give init whole parameters outside shard_map, and this rank's shards inside shard_map or "
    "pmap. Parameters that were renamed or reshaped since the checkpoint need a new state."
)


def scatter_gradients(
    axis_name: AxisName,
    policy: Compressor | Policy | Plan | None = None,
    *,
    memory: Memory | None = None,
    precondition: SecondMoment | None = None,
    seed: int = 0,
    exchange: Exchange | str = "auto",
    mesh: Mesh | AbstractMesh | None = None,
) -> optax.GradientTransformationExtraArgs:
    """An Optax transformation that reduces whole gradients to this rank's shard of their mean.

    It is for sharded data-parallel training (FSDP, ZeRO). It goes first in `optax.chain`, inside
    shard_map or pmap over `axis_name`, and everything after it sees shards. A leaf is cut along its
    first dimension, which must be a multiple of the world size; its dtype stays. `policy` and
    `exchange` are as in `psum_scatter_compressed`. `seed` feeds stochastic rounding.

    With `memory`, the next step sends what compression loses. Each rank remembers whole gradients,
    so a memory takes as much space as they do. The rank's own shard is not encoded, so it leaves no
    residual. With `precondition`, values are compressed in units of their size. Only the owner of a
    shard knows its mean. In a step that updates the units, the ranks therefore share the mean
    squares of rows and columns: rows + columns fp32 numbers per leaf, in one `lax.psum` for all
    leaves. A step whose mean holds a NaN or infinity on any rank leaves memory and moments as they
    were; one more number per step tells all ranks.

    The state is a `SyncState`. `state_specs` and `state_shardings` say how it is split, and a
    checkpoint of it restores on the same number of ranks. `init` takes whole parameters, with the
    `mesh` given, or shards inside shard_map or pmap. What follows in the chain sees only a shard:
    `optax.clip_by_global_norm` would use the norm of that shard, and `optax.apply_if_finite` would
    skip the step only on some ranks.

    Raises ValueError while tracing for what `psum_scatter_compressed` refuses, for a memory around
    a compressor that would let it grow, for the state of an `init` that mistook shards for whole
    parameters, and for `optax.apply_if_finite` around it. Source of the scheme: QSDP (Markov et
    al., ICML 2023).
    """
    import optax

    axis_name = axes_of(_NAME, axis_name)

    def init(params: Pytree) -> SyncState:
        check_wrappers(_NAME, checked=False, shards=True)
        if is_any_tree(params):
            return state_of_any_tree(params, memory, precondition, adapts=False)
        whole = _whole(params, axis_name)
        moments: Pytree = ()
        if precondition is not None:
            moments = precondition.init(whole)
        step, skipped = jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32)
        if mesh is not None and not is_bound(_names(axis_name)):
            replicated = NamedSharding(mesh, PartitionSpec())
            step, skipped, moments = lax.with_sharding_constraint(
                (step, skipped, moments), replicated
            )
        remembered = init_memory(memory, whole, axis_name, mesh, _NAME)
        return SyncState(step, remembered, (), moments, skipped=skipped)

    def update(
        updates: Pytree, state: SyncState, params: Pytree = None, **extra_args: object
    ) -> tuple[Pytree, SyncState]:
        require_type(_NAME, state, SyncState)
        options = Options.resolve(
            _NAME, axis_name, exchange=exchange, mean=True, collective=Collective.REDUCE_SCATTER
        )
        axes = options.axes
        check_wrappers(_NAME, checked=axes.checked(), shards=True)
        updates = jax.tree.map(jnp.asarray, updates)
        leaves, treedef = jax.tree.flatten(updates)
        plan = resolve(_NAME, updates, policy)
        choices = [(c,) for c in plan.compressors]
        cut = [0] * len(leaves)
        taken = Scatter.of(options, plan, cut, True, in_units=precondition is not None).taken
        check_state(state, memory, precondition, plan, choices, treedef, _NAME, _OTHER_LEAVES)
        if memory is not None:
            chosen = [(leaf.path, c) for leaf, (c,) in zip(plan.leaves, choices, strict=True)]
            require_bounded(_NAME, chosen)
        before = by_leaf(state.memory, len(leaves))
        shapes = [leaf.shape for leaf in plan.leaves]
        moments, scales = scales_of(precondition, state.moments, shapes, taken.compressed)
        sent, kept = compensated(memory, leaves, before, state.step)
        sums = run(
            taken,
            [rows_of(x, 0, axes.world) for x in sent],
            jax.random.fold_in(jax.random.key(seed), state.step),
            residual=memory is not None,
            units=tuple(None if scale is None else scale[0] for scale in scales),
        )
        sums = scaled(plan, sums)
        means, _ = watched(taken, leaves, sums.values, state.step)
        out = [as_gradient(x, leaf.dtype) for x, leaf in zip(means, leaves, strict=True)]
        new = state._replace(step=state.step + 1)
        if not leaves or (memory is None and precondition is None):
            return jax.tree.unflatten(treedef, out), new
        finite = finite_everywhere(axes, means, False, alike=False)
        lost = [None if e is None else whole_of(e, 0) for e in sums.residuals]

        def reached(i: int) -> jax.Array:
            # A rank's own values arrive in every step and are never late.
            rows = encoded(axes, plan.compressors[i], 1)
            length = shapes[i][0]
            return jnp.repeat(rows, length // axes.world).reshape(-1, *[1] * (len(shapes[i]) - 1))

        rows, _ = remembered(memory, plan, sent, kept, lost, before, finite, reached)
        if precondition is not None and taken.compressed:
            squares = lambda: _squares(means, taken.compressed, shapes, axes)  # noqa: E731
            step = after(state.step, [finite])  # the squares are summed in a branch
            moments, finite = moved(precondition, moments, shapes, squares, (), step, finite, axes)
        new = new._replace(
            memory=rows_after(state.memory, rows, axes),
            moments=moments if precondition is None else unstacked(moments, state.moments),
            skipped=state.skipped + (1 - jnp.asarray(finite, jnp.int32)),
        )
        return jax.tree.unflatten(treedef, out), new

    return optax.GradientTransformationExtraArgs(init, update)


def _names(axis_name: AxisName) -> tuple[str, ...]:
    return axis_name if isinstance(axis_name, tuple) else (axis_name,)


def _whole(params: Pytree, axis_name: AxisName) -> Pytree:
    """Returns shapes of whole leaves; inside the axis, `params` are shards."""
    names = _names(axis_name)
    world = Axes.resolve(_NAME, names, None).world if is_bound(names) else 1

    def grown(x: Shaped) -> jax.ShapeDtypeStruct:
        shape = (world * x.shape[0], *x.shape[1:]) if x.shape else x.shape
        return jax.ShapeDtypeStruct(shape, x.dtype)

    return jax.tree.map(grown, params)


def _squares(
    means: Sequence[jax.Array],
    numbers: Sequence[int],
    shapes: Sequence[tuple[int, ...]],
    axes: Axes,
) -> dict[int, Squares]:
    """Returns whole leaves' mean squares of rows and of columns, from this rank's shards.

    Each rank has rows of its own, and a share of every column.
    """
    flat: list[jax.Array] = []
    for i in numbers:
        squares = jnp.square(means[i].astype(jnp.float32).reshape(matrix_of(means[i].shape)))
        rows = matrix_of(shapes[i])[0]
        own = squares.mean(axis=1)
        here = _compat.vary_over(jnp.zeros(rows, jnp.float32), axes.varying())
        flat.append(lax.dynamic_update_slice(here, own, (axes.rank() * own.size,)))
        flat.append(squares.sum(axis=0) / np.float32(rows))
    (total,) = axes.sum([jnp.concatenate(flat)])
    parts = split(total, [x.size for x in flat])
    return dict(zip(numbers, zip(parts[::2], parts[1::2], strict=True), strict=True))
