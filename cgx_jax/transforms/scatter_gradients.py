"""`scatter_gradients`: the reduce-scatter of sharded training as an Optax transformation."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from cgx_jax import _compat
from cgx_jax.axes import Axes
from cgx_jax.compressors import Compressor
from cgx_jax.exchanges import Exchange
from cgx_jax.halves.half import PsumScatter
from cgx_jax.halves.messages import Halves, Message, prepared
from cgx_jax.kernels import outside
from cgx_jax.leaves import leaves_of
from cgx_jax.plan import Plan, plan_of
from cgx_jax.policies.rules import Policy
from cgx_jax.transforms.feedback import (
    finite_all,
    keep,
    require_bounded,
    residual_of,
    taken_along,
)
from cgx_jax.transforms.memory import Memory
from cgx_jax.transforms.precondition import Moments, SecondMoment, Units, matrix_of
from cgx_jax.transforms.state import (
    SyncState,
    by_leaf,
    by_tree,
    check_state,
    init_memory,
    is_bound,
    moments_by_leaf,
    moments_by_tree,
)

if TYPE_CHECKING:
    import optax

_NAME = "scatter_gradients"


def scatter_gradients(
    axis_name: Any,
    policy: Compressor | Policy | Plan | None = None,
    *,
    memory: Memory | None = None,
    precondition: SecondMoment | None = None,
    seed: int = 0,
    exchange: Exchange | str = "auto",
    mesh: Mesh | None = None,
) -> optax.GradientTransformationExtraArgs:
    """An Optax transformation that takes whole gradients to this rank's shard of their mean.

    For sharded data-parallel training (FSDP, ZeRO): it goes first in `optax.chain`, inside
    shard_map or pmap over `axis_name`, and everything after it sees shards. A leaf is cut along its
    first dimension, a multiple of the world size. `policy` and `exchange` as in
    `psum_scatter_compressed`; `seed` feeds stochastic rounding.

    With `memory`, what compression loses is sent with the next step. Each rank remembers whole
    gradients, so a memory takes as much space as they do; only the rank's own shard, which is not
    encoded, leaves nothing. With `precondition`, values are compressed in units of their size. The
    owner of a shard knows its mean, so in a step that updates the units the ranks share the mean
    squares of rows and columns, rows + columns fp32 numbers per leaf, in one `lax.psum` for all
    leaves. A step whose mean holds a NaN or infinity on any rank leaves memory and moments as they
    were; one more number per step tells all ranks.

    The state is a `SyncState`: `state_specs` and `state_shardings` say how it is split, and a
    checkpoint of it restores on as many ranks. `init` is given whole parameters and the `mesh`, or
    shards inside shard_map or pmap. What follows in the chain sees only a shard:
    `optax.clip_by_global_norm` would take the norm of that.

    Raises ValueError while tracing for what `psum_scatter_compressed` refuses, for a memory around
    a compressor that would let it grow, and for a `SecondMoment(factored=False)`, whose units no
    sender has. Source: QSDP (Markov et al., ICML 2023) for the scheme.
    """
    import optax

    if precondition is not None and not precondition.factored:
        raise ValueError(
            f"{_NAME}: {precondition} has a unit for each value, which only the owner of a shard "
            "knows; use SecondMoment(), whose rows and columns the ranks can share."
        )

    def init(params: Any) -> SyncState:
        whole = _whole(params, axis_name)
        moments: Any = ()
        if precondition is not None:
            leaves, treedef = jax.tree.flatten(whole)
            moments = moments_by_tree([precondition.init(x) for x in leaves], treedef)
        step = jnp.zeros((), jnp.int32)
        if mesh is not None and not is_bound(_names(axis_name)):
            replicated = NamedSharding(mesh, PartitionSpec())
            step, moments = lax.with_sharding_constraint((step, moments), replicated)
        remembered = init_memory(memory, whole, axis_name, mesh, _NAME)
        return SyncState(step, remembered, (), moments)

    def update(
        updates: Any, state: SyncState, params: Any = None, **extra_args: Any
    ) -> tuple[Any, SyncState]:
        axes = Axes.resolve(_NAME, axis_name, None)
        leaves, treedef = jax.tree.flatten(updates)
        plan = plan_of(_NAME, leaves_of(updates), policy, bare=False)
        choices = [(c,) for c in plan.compressors]
        check_state(state, memory, precondition, plan, choices, treedef, _NAME)
        halves = Halves.of(PsumScatter, _NAME, updates, axes, plan, 0, True, exchange)
        if memory is not None:
            chosen = [(half.path, half.compressor) for half in halves.halves]
            require_bounded(_NAME, chosen)
        key = jax.random.fold_in(jax.random.key(seed), state.step)
        halves.check(leaves, key)
        old = moments_by_leaf(state.moments) if precondition is not None else []
        coded = [i for m in halves.messages for i in m.numbers if not _exact(halves, i)]
        units = {i: precondition.units(old[i])[0] for i in coded} if precondition else {}
        sent, kept = leaves, [None] * len(leaves)
        if memory is not None:
            before = [tuple(x[0] for x in rows) for rows in by_leaf(state.memory, len(leaves))]
            both = [
                memory.compensate(x, s, state.step) for x, s in zip(leaves, before, strict=True)
            ]
            sent, kept = [x for x, _ in both], [k for _, k in both]
        sums = _scattered(halves, sent, units, key, residual=memory is not None)
        means, factors = [], [half.compressor.feedback_scale or 1.0 for half in halves.halves]
        for i, x in enumerate(sums.values):
            mean = x / jnp.asarray(axes.world, x.dtype)
            scaled = i in sums.lost and factors[i] != 1
            means.append(mean * jnp.asarray(factors[i], x.dtype) if scaled else mean)
        if memory is None and precondition is None:
            new = state._replace(step=state.step + 1)
            return jax.tree.unflatten(treedef, means), new
        (strange,) = axes.sum([(~finite_all(means)).astype(jnp.int32)])
        finite = strange == 0
        rows = []
        for i in range(len(leaves) if memory is not None else 0):
            residual = residual_of(sent[i], sums.lost.get(i), factors[i])
            half, arrived = halves.halves[i], None
            assert isinstance(half, PsumScatter)
            if half.compressor.selects and i in sums.lost:
                # Own values arrive in every step, none of them late.
                arrived = taken_along(sent[i], residual) & half.encoded(sent[i].shape)
            after = memory.remember(residual, kept[i], arrived)  # type: ignore[union-attr]
            pairs = zip(after, before[i], strict=True)
            row = (keep(finite, new, was) for new, was in pairs)
            rows.append(tuple(_compat.vary_over(x[None], axes.varying()) for x in row))
        moments = state.moments
        if precondition is not None:
            moments = _moved(precondition, old, means, coded, state.step, axes, finite, treedef)
        remembered = by_tree(rows, treedef) if memory is not None else state.memory
        after = SyncState(state.step + 1, remembered, (), moments)
        return jax.tree.unflatten(treedef, means), after

    return optax.GradientTransformationExtraArgs(init, update)


def _names(axis_name: Any) -> tuple[Any, ...]:
    return axis_name if isinstance(axis_name, tuple) else (axis_name,)


def _whole(params: Any, axis_name: Any) -> Any:
    """Shapes of whole leaves: `params` outside of the axis, and of shards inside."""
    names = _names(axis_name)
    world = Axes.resolve(_NAME, names, None).world if is_bound(names) else 1
    grown = lambda x: (world * x.shape[0], *x.shape[1:]) if x.ndim else x.shape  # noqa: E731
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(grown(x), x.dtype), params)


def _exact(halves: Halves, i: int) -> bool:
    return halves.halves[i].compressor.lossless


@dataclasses.dataclass(frozen=True)
class _Sums:
    """This rank's shards of the sums, and by leaf what this rank lost of what it sent."""

    values: list[jax.Array]
    lost: dict[int, jax.Array]


def _scattered(
    halves: Halves, leaves: list[Any], units: dict[int, Units], key: Any, *, residual: bool
) -> _Sums:
    values: dict[int, jax.Array] = {}
    lost: dict[int, jax.Array] = {}
    for message in halves.messages:
        inner = [outside.multiply(leaves[i], units.get(i), outside.IN) for i in message.numbers]
        keys = [half.key(key) for half in message.halves]
        ready = [prepared(half, x) for half, x in zip(message.halves, inner, strict=True)]
        if residual:
            # The exchange's own calls keep what they send to themselves.
            message = dataclasses.replace(message, fused=False)
            payloads = message.payloads(keys, ready)
            sums = message.deliver(payloads, ready)
            lost |= _lost(message, payloads, inner, ready, units, leaves)
        else:
            sums = message.run(keys, ready)
        for i, half, y in zip(message.numbers, message.halves, sums, strict=True):
            assert isinstance(half, PsumScatter)
            if i in units:
                factors = outside.multiply(jnp.ones(leaves[i].shape), units[i], outside.OUT)
                y = y * half.own(factors).reshape(y.shape)
            values[i] = y.astype(leaves[i].dtype)
    every = [
        values[i] if i in values else half.exactly(leaves[i])
        for i, half in enumerate(halves.halves)
    ]
    return _Sums(every, lost)


def _lost(
    message: Message,
    payloads: list[jax.Array],
    inner: list[jax.Array],
    ready: list[jax.Array],
    units: dict[int, Units],
    leaves: list[Any],
) -> dict[int, jax.Array]:
    """What encoding and preparing took away, in the leaves' own units and dtypes."""
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
    old: list[Moments],
    means: list[jax.Array],
    coded: list[int],
    step: jax.Array,
    axes: Axes,
    finite: jax.Array,
    treedef: Any,
) -> Moments:
    """The moments after a step: changed in one that is due and finite."""

    def follow() -> list[Moments]:
        squares = [_squares(means[i], old[i], axes) for i in coded]
        flat = [x for pair in squares for x in pair]
        (total,) = axes.sum([jnp.concatenate(flat)])
        parts = jnp.split(total, np.cumsum([x.size for x in flat])[:-1].tolist())
        pairs = zip(parts[::2], parts[1::2], strict=True)
        return [
            precondition.follow(old[i], step, *pair) for i, pair in zip(coded, pairs, strict=True)
        ]

    before = [old[i] for i in coded]
    if not coded:
        return moments_by_tree(old, treedef)
    after = lax.cond(precondition.due(step), follow, lambda: before)
    usable = finite & finite_all([leaf.weights for leaf in after])
    new = dict(zip(coded, after, strict=True))
    moved = [
        jax.tree.map(lambda a, b: jnp.where(usable, a, b), new.get(i, was), was)
        for i, was in enumerate(old)
    ]
    return moments_by_tree(moved, treedef)


def _squares(mean: jax.Array, moments: Moments, axes: Axes) -> tuple[jax.Array, jax.Array]:
    """This rank's part of the mean squares of a whole leaf's rows and columns: f32[R] and f32[C].

    Over the ranks they add up: each has rows of its own, and a share of every column.
    """
    rows = moments.rows.shape[0]
    squares = jnp.square(mean.astype(jnp.float32).reshape(matrix_of(mean.shape)))
    own = squares.mean(axis=1)
    here = jnp.zeros(rows, jnp.float32)
    here = _compat.vary_over(here, axes.varying())
    placed = lax.dynamic_update_slice(here, own, (axes.rank() * own.size,))
    return placed, squares.sum(axis=0) / np.float32(rows)
