"""`scatter_gradients`: the reduce-scatter of sharded training as an Optax transformation."""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from cgx_jax import _compat
from cgx_jax._types import AxisName, Key, Pytree, Shaped
from cgx_jax.axes import Axes
from cgx_jax.compressors import Compressor
from cgx_jax.exchanges import Exchange
from cgx_jax.halves.half import PsumScatter
from cgx_jax.halves.messages import Halves, Message, prepared
from cgx_jax.kernels import outside
from cgx_jax.nonfinite import all_finite
from cgx_jax.plan import Plan, resolve
from cgx_jax.policies.rules import Policy
from cgx_jax.transforms.checks import check_state, require_type
from cgx_jax.transforms.feedback import (
    as_gradient,
    compensated,
    remembered,
    require_bounded,
    residual_of,
    taken_along,
)
from cgx_jax.transforms.memory import Memory
from cgx_jax.transforms.own_rows import axes_of, is_bound
from cgx_jax.transforms.precondition import (
    Moments,
    SecondMoment,
    Squares,
    Units,
    matrix_of,
    stacked,
    unstacked,
)
from cgx_jax.transforms.state import (
    SyncState,
    by_leaf,
    by_tree,
    init_memory,
    is_any_tree,
    state_of_any_tree,
)
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
        axes = Axes.resolve(_NAME, axis_name, None)
        check_wrappers(_NAME, checked=axes.checked(), shards=True)
        updates = jax.tree.map(jnp.asarray, updates)
        leaves, treedef = jax.tree.flatten(updates)
        plan = resolve(_NAME, updates, policy)
        plan.require_stateless(_NAME)
        choices = [(c,) for c in plan.compressors]
        check_state(state, memory, precondition, plan, choices, treedef, _NAME, _OTHER_LEAVES)
        halves = Halves.of(PsumScatter, _NAME, updates, axes, plan, 0, True, exchange)
        if memory is not None:
            chosen = [(half.path, half.compressor) for half in halves.halves]
            require_bounded(_NAME, chosen)
        key = jax.random.fold_in(jax.random.key(seed), state.step)
        halves.check(leaves, key)
        sent_coded = (i for message in halves.messages for i in message.numbers)
        coded = [i for i in sent_coded if not halves.halves[i].compressor.lossless]
        shapes = [leaf.shape for leaf in plan.leaves]
        units: dict[int, Units] = {}
        if precondition is not None:
            moments = stacked(state.moments)
            scales = precondition.units(moments, shapes, coded)
            units = {i: scale[0] for i, scale in scales.items()}
        sent, kept = leaves, [None] * len(leaves)
        if memory is not None:
            before = by_leaf(state.memory, len(leaves))
            pairs = zip(leaves, before, strict=True)
            both = [compensated(memory, x, s, state.step) for x, s in pairs]
            sent, kept = [x for x, _ in both], [k for _, k in both]
        factors = [half.compressor.feedback_scale or 1.0 for half in halves.halves]
        means, lost = _scattered(halves, sent, units, key, factors if memory is not None else None)
        means = halves.watched(leaves, means, state.step)
        updates = jax.tree.unflatten(treedef, means)
        if not leaves or (memory is None and precondition is None):
            return updates, state._replace(step=state.step + 1)
        inexact = [x for x in means if jnp.issubdtype(x.dtype, jnp.inexact)]
        (strange,) = axes.sum([(~all_finite(inexact)).astype(jnp.int32)])
        finite = strange == 0
        state = state._replace(skipped=state.skipped + (1 - finite.astype(jnp.int32)))
        if memory is not None:
            rows = []
            for i, half in enumerate(halves.halves):
                residual, arrived = residual_of(sent[i], lost.get(i), factors[i]), None
                assert isinstance(half, PsumScatter)
                if half.compressor.selects and i in lost:
                    # A rank's own values arrive in every step and are never late.
                    arrived = taken_along(sent[i], residual) & half.encoded(sent[i].shape)
                row = remembered(memory, sent[i], residual, kept[i], arrived, finite, before[i])
                rows.append(tuple(_compat.vary_over(x, axes.varying()) for x in row))
            like, count = jax.tree.structure(state.memory[0]), len(state.memory)
            state = state._replace(memory=by_tree(rows, like, count))
        if precondition is not None:
            compressed = {i: means[i] for i in coded}
            after = _moved(precondition, moments, state.step, shapes, compressed, axes, finite)
            state = state._replace(moments=unstacked(after, state.moments))
        return updates, state._replace(step=state.step + 1)

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


def _scattered(
    halves: Halves,
    leaves: list[jax.Array],
    units: dict[int, Units],
    key: Key,
    factors: list[float] | None,
) -> tuple[list[jax.Array], dict[int, jax.Array]]:
    """Returns this rank's shards of the means, and by leaf what it lost of what it sent.

    `factors`, one per leaf, multiply the means. Without them, losses are not computed. Sums are
    fp32 until they are divided, since the sum of float16 leaves may overflow where the mean does
    not.
    """
    out: dict[int, jax.Array] = {}
    lost: dict[int, jax.Array] = {}
    for message in halves.messages:
        axes = message.halves[0].axes
        inner = [
            outside.multiply(leaves[i].astype(jnp.float32), units.get(i), outside.IN)
            for i in message.numbers
        ]
        keys = [half.key(key) for half in message.halves]
        ready = [prepared(half, x) for half, x in zip(message.halves, inner, strict=True)]
        if factors is None:
            sums = message.run(keys, ready)
        else:
            # The exchange's fused calls do not reveal what they send.
            message = dataclasses.replace(message, fused=False)
            payloads = message.payloads(keys, ready)
            sums = message.deliver(payloads, ready)
            lost |= _lost(message, payloads, inner, ready, units, leaves)
        for i, half, y in zip(message.numbers, message.halves, sums, strict=True):
            assert isinstance(half, PsumScatter)
            mean = half.settled(y / axes.world)
            mean = outside.multiply(mean, _own_units(units.get(i), axes), outside.OUT)
            factor = 1.0 if factors is None or i not in lost else factors[i]
            out[i] = (mean if factor == 1 else mean * factor).astype(leaves[i].dtype)
    for i, half in enumerate(halves.halves):
        if i not in out:
            out[i] = half.exactly(leaves[i], divisor=half.axes.world)
    return [as_gradient(out[i], leaves[i].dtype) for i in range(len(leaves))], lost


def _own_units(units: Units | None, axes: Axes) -> Units | None:
    """Returns the units of this rank's shard: an equal share of the rows, and all columns."""
    if units is None:
        return None
    count = units.rows.shape[1] // axes.world
    own = lax.dynamic_slice_in_dim(units.rows, axes.rank() * count, count, axis=1)
    return units._replace(rows=own)


def _lost(
    message: Message,
    payloads: list[jax.Array],
    inner: list[jax.Array],
    ready: list[jax.Array],
    units: dict[int, Units],
    leaves: list[Any],
) -> dict[int, jax.Array]:
    """Returns what encoding and preparing took away, out of units and in the leaves' dtypes."""
    out = {}
    parts = zip(message.numbers, message.halves, payloads, inner, ready, strict=True)
    for i, half, payload, x, y in parts:
        assert isinstance(half, PsumScatter)
        if not half.compressor.lossless:
            rest = half.lost(payload, y) + (x - y)
            out[i] = outside.multiply(rest, units.get(i), outside.OUT).astype(leaves[i].dtype)
    return out


def _moved(
    precondition: SecondMoment,
    old: Moments,
    step: jax.Array,
    shapes: list[tuple[int, ...]],
    means: dict[int, jax.Array],
    axes: Axes,
    finite: jax.Array,
) -> Moments:
    """Returns the moments after a step; they change only if it is due and finite.

    `means` are this rank's shards of the means of compressed leaves.
    """

    def update() -> Moments:
        parts = {i: _squares(x, matrix_of(shapes[i])[0], axes) for i, x in means.items()}
        flat = [x for pair in parts.values() for x in pair]
        (total,) = axes.sum([jnp.concatenate(flat)])
        split = jnp.split(total, np.cumsum([x.size for x in flat])[:-1].tolist())
        squares = dict(zip(parts, zip(split[::2], split[1::2], strict=True), strict=True))
        return precondition.update(old, shapes, squares, step)

    if not means:
        return old
    new = lax.cond(precondition.due(step), update, lambda: old)
    usable = finite & all_finite(new.tables)
    out: Moments = jax.tree.map(functools.partial(jnp.where, usable), new, old)
    return out


def _squares(mean: jax.Array, rows: int, axes: Axes) -> Squares:
    """Returns this rank's part of a leaf's mean squares of `rows` rows and of columns.

    The parts of all ranks add up to those of the whole leaf: each rank has rows of its own, and a
    share of every column.
    """
    squares = jnp.square(mean.astype(jnp.float32).reshape(matrix_of(mean.shape)))
    own = squares.mean(axis=1)
    here = jnp.zeros(rows, jnp.float32)
    here = _compat.vary_over(here, axes.varying())
    placed = lax.dynamic_update_slice(here, own, (axes.rank() * own.size,))
    return placed, squares.sum(axis=0) / np.float32(rows)
