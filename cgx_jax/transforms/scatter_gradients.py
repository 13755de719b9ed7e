"""`scatter_gradients`: the reduce-scatter of sharded training as an Optax transformation."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from cgx_jax._types import AxisName, Dimensions, Pytree, Shaped
from cgx_jax.axes import Axes, after
from cgx_jax.collective import Collective
from cgx_jax.compressors import Compressor
from cgx_jax.exchanges import Exchange
from cgx_jax.leaves import dimensions_of
from cgx_jax.plan import Plan, resolve
from cgx_jax.policies.rules import Policy
from cgx_jax.reductions.reduce_scatter import encoded
from cgx_jax.route.route import Options
from cgx_jax.route.rows import Scatter, rows_of, whole_of
from cgx_jax.route.run import run, watched
from cgx_jax.transforms.checks import check_state, require_type
from cgx_jax.transforms.cuts import Cut, squares_of_shards
from cgx_jax.transforms.explicit import is_outside, step_on_ranks
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
from cgx_jax.transforms.precondition import SecondMoment, Units
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
    dimensions: Dimensions = 0,
    seed: int = 0,
    exchange: Exchange | str = "auto",
    mesh: Mesh | AbstractMesh | None = None,
) -> optax.GradientTransformationExtraArgs:
    """An Optax transformation that reduces whole gradients to this rank's shard of their mean.

    It is for sharded data-parallel training (FSDP, ZeRO). It goes first in `optax.chain`, where
    `sync_gradients` does, and everything after it sees shards. `dimensions` says where a leaf is
    cut: an int, a tree (or a prefix of one) of ints, or a function from a leaf's path to an int.
    The length there must be a multiple of the world size. A leaf keeps its dtype. `policy` and
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
        whole = _whole(params, axis_name, dimensions)
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
        names = _names(axis_name)
        if is_outside(names) and not is_bound(names):
            places = dimensions_of(_NAME, "dimensions", dimensions, updates)
            return step_on_ranks(_NAME, names, on_shards, updates, state, places)
        return on_rank(updates, state)

    def on_shards(
        updates: Pytree, state: SyncState, cuts: tuple[Cut, ...]
    ) -> tuple[Pytree, SyncState]:
        if precondition is not None and any(cut.names for cut in cuts):
            raise ValueError(
                f"{_NAME}: SecondMoment needs whole gradients, but some are sharded over other "
                "axes of the mesh; use sync_gradients, or leave out precondition."
            )
        return on_rank(updates, state)

    def on_rank(updates: Pytree, state: SyncState) -> tuple[Pytree, SyncState]:
        options = Options.resolve(
            _NAME, axis_name, exchange=exchange, mean=True, collective=Collective.REDUCE_SCATTER
        )
        axes = options.axes
        check_wrappers(_NAME, checked=axes.checked(), shards=True)
        updates = jax.tree.map(jnp.asarray, updates)
        leaves, treedef = jax.tree.flatten(updates)
        plan = resolve(_NAME, updates, policy)
        choices = [(c,) for c in plan.compressors]
        given = dimensions_of(_NAME, "dimensions", dimensions, updates)
        scatter = Scatter.of(options, plan, given, True, in_units=precondition is not None)
        taken, places = scatter.taken, scatter.places
        check_state(state, memory, precondition, plan, choices, treedef, _NAME, _OTHER_LEAVES)
        if memory is not None:
            chosen = [(leaf.path, c) for leaf, (c,) in zip(plan.leaves, choices, strict=True)]
            require_bounded(_NAME, chosen)
        before = by_leaf(state.memory, len(leaves))
        shapes = [leaf.shape for leaf in plan.leaves]
        moments = state.moments
        scales = scales_of(precondition, moments, shapes, taken.compressed)
        sent, kept = compensated(memory, leaves, before, state.step)
        units = [
            None if scale is None else _cut(scale[0], shape, d, axes.world)
            for scale, shape, d in zip(scales, shapes, places, strict=True)
        ]
        sums = run(
            taken,
            [rows_of(x, d, axes.world) for x, d in zip(sent, places, strict=True)],
            jax.random.fold_in(jax.random.key(seed), state.step),
            residual=memory is not None,
            units=tuple(units),
        )
        sums = scaled(plan, sums)
        means, _ = watched(taken, leaves, sums.values, state.step)
        out = [as_gradient(x, leaf.dtype) for x, leaf in zip(means, leaves, strict=True)]
        new = state._replace(step=state.step + 1)
        if not leaves or (memory is None and precondition is None):
            return jax.tree.unflatten(treedef, out), new
        finite = finite_everywhere(axes, means, False, alike=False)
        parts = zip(sums.residuals, places, strict=True)
        lost = [None if e is None else whole_of(e, d) for e, d in parts]

        def reached(i: int) -> jax.Array:
            # A rank's own values arrive in every step and are never late.
            rows, d, shape = encoded(axes, plan.compressors[i], 1), places[i], shapes[i]
            each = jnp.repeat(rows, shape[d] // axes.world)
            return each.reshape(*[1] * d, -1, *[1] * (len(shape) - 1 - d))

        rows, _ = remembered(memory, plan, sent, kept, lost, before, finite, reached)
        if precondition is not None and taken.compressed:
            cuts = [
                Cut(tuple(axes.names if at == d else () for at in range(len(shape))))
                for shape, d in zip(shapes, places, strict=True)
            ]
            squares = functools.partial(squares_of_shards, means, taken.compressed, cuts)
            step = after(state.step, [finite])  # the squares are summed in a branch
            moments, finite = moved(precondition, moments, shapes, squares, (), step, finite, axes)
        new = new._replace(
            memory=rows_after(state.memory, rows, axes),
            moments=moments,
            skipped=state.skipped + (1 - jnp.asarray(finite, jnp.int32)),
        )
        return jax.tree.unflatten(treedef, out), new

    return optax.GradientTransformationExtraArgs(init, update)


def _names(axis_name: AxisName) -> tuple[str, ...]:
    return axis_name if isinstance(axis_name, tuple) else (axis_name,)


def _whole(params: Pytree, axis_name: AxisName, dimensions: Dimensions) -> Pytree:
    """Returns shapes of whole leaves; inside the axis, `params` are shards."""
    names = _names(axis_name)
    if not is_bound(names):
        return params
    leaves, treedef = jax.tree.flatten(params)
    places = dimensions_of(_NAME, "dimensions", dimensions, params)
    world = Axes.resolve(_NAME, names, None).world

    def grown(x: Shaped, dimension: int) -> jax.ShapeDtypeStruct:
        shape = list(x.shape)
        if -len(shape) <= dimension < len(shape):  # `update` refuses any other
            shape[dimension] *= world
        return jax.ShapeDtypeStruct(tuple(shape), x.dtype)

    return jax.tree.unflatten(treedef, map(grown, leaves, places))


def _cut(units: Units, shape: tuple[int, ...], dimension: int, world: int) -> Units:
    """Returns a leaf's units in the order of its `rows_of`.

    Rows of a leaf that is cut along its first dimension keep their order. Otherwise each value has
    a unit of its own, as one row of one column.
    """
    if dimension == 0:
        return units
    factors = units.rows[:, :, None] * units.columns[:, None, :]
    each = [rows_of(way.reshape(shape), dimension, world).reshape(-1) for way in factors]
    return Units(jnp.stack(each), jnp.ones((2, 1), jnp.float32))
