"""`sync_gradients`: the reduction of gradients as an Optax transformation with its own state."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from cgx_jax import _compat
from cgx_jax.axes import Axes
from cgx_jax.collectives import pmean_with_residual
from cgx_jax.compressors import Compressor, Quantize
from cgx_jax.plan import Plan, Slot, leaves_of
from cgx_jax.policies.adaptive import Adaptive
from cgx_jax.policies.rules import Policy
from cgx_jax.transforms.memory import Memory
from cgx_jax.transforms.precondition import Moments, Rounding, SecondMoment, Units
from cgx_jax.transforms.wrappers import check_options, check_wrappers, within_restore_step_size

if TYPE_CHECKING:
    import optax

_NAME = "sync_gradients"
_OTHER_OPTIONS = (
    "it belongs to other options. Take the state from this transformation's init, or restore one "
    "that does."
)


class SyncState(NamedTuple):
    """State of `sync_gradients`: the same on every rank, but for `memory`.

    `step` is i32[], the number of updates; `memory` () or a tuple of residual trees, in which a
    leaf of shape s is [world, *s], one row a rank ([1, *s] inside shard_map and pmap);
    `statistics` () or what an adaptive policy measures; `moments` () or the `Moments` by which
    gradients are preconditioned, each field a tree like the parameters.
    """

    step: jax.Array
    memory: Any
    statistics: Any
    moments: Any = ()


def sync_gradients(
    axis_name: Any,
    policy: Compressor | Policy | Plan | None = None,
    *,
    memory: Memory | None = None,
    precondition: SecondMoment | None = None,
    seed: int = 0,
    exchange: str = "auto",
    mesh: Mesh | None = None,
) -> optax.GradientTransformationExtraArgs:
    """An Optax transformation that takes a rank's gradients to their mean, compressed.

    It goes first in `optax.chain`, inside shard_map or pmap over `axis_name`; everything after it
    sees the same mean on every rank. `policy` and `exchange` as in `pmean_compressed`; `seed`
    feeds stochastic rounding. An `Adaptive` policy measures here, and the step is compiled by its
    `jit`. With `memory` (`ErrorFeedback()`, `MomentumCorrection()`) what compression loses is sent
    with the next step. With `precondition` (`SecondMoment()`, the choice for Adam and its kin)
    values are compressed in units of their own size, and an adaptive policy measures errors in
    these. A step whose mean holds a NaN or infinity leaves memory and moments as they were. Memory
    belongs to a rank: `init` runs inside shard_map or pmap, or is given the `mesh`, and
    `state_specs` and `state_shardings` say how the state is split.

    Clip, and skip steps (`optax.apply_if_finite`), after it in the chain, where all ranks see the
    same mean. A clip before it uses each rank's own norm: it scales ranks differently, and the mean
    of what is left is not the clipped mean. To accumulate gradients, add them up in the training
    step, or put `optax.MultiSteps` after it. Extra arguments of `update` are for the rest of the
    chain and change nothing here. Options are static, but for `seed`: `optax.inject_hyperparams`
    belongs around the optimizer after it.
    Raises ValueError while tracing for what `pmean_compressed` refuses, a memory around a
    compressor that would let it grow, a memory whose ranks cannot be known, `apply_if_finite`
    around it or, under check_vma, `MultiSteps`. Raises TypeError for an option of a wrong type.
    """
    import optax

    check_options(axis_name, mesh)

    def init(params: Any) -> SyncState:
        check_wrappers(checked=False)
        leaves, treedef = jax.tree.flatten(params)
        step = jnp.zeros((), jnp.int32)
        statistics: Any = ()
        moments: Any = ()
        if isinstance(policy, Adaptive):
            statistics = policy.empty_statistics(leaves_of(params))
        if precondition is not None:
            moments = moments_by_tree([precondition.init(x) for x in leaves], treedef)
        if mesh is not None:
            replicated = NamedSharding(mesh, PartitionSpec())
            step, statistics = lax.with_sharding_constraint((step, statistics), replicated)
            if precondition is not None:
                values = moments.values
                moments = lax.with_sharding_constraint(moments, replicated)
                if not precondition.factored:  # which lie as their leaves do
                    moments = moments._replace(values=values)
        return SyncState(step, _init_memory(memory, params, axis_name, mesh), statistics, moments)

    def update(
        updates: Any, state: SyncState, params: Any = None, **extra_args: Any
    ) -> tuple[Any, SyncState]:
        plan = policy if isinstance(policy, Plan) else Plan.build(updates, policy)
        plan.require_stateless(_NAME)
        axes = Axes.resolve(_NAME, axis_name, None)
        check_wrappers(axes.checked())
        leaves, treedef = jax.tree.flatten(updates)
        _check_state(state, memory, precondition, leaves)
        learns = within_restore_step_size()
        if learns is not None and precondition is not None:
            _require_known_errors(plan, policy, memory)
            learns.append(precondition)
        scales: list[_Scale] = [None] * len(leaves)
        roundings: list[Rounding | None] = [None] * len(leaves)
        if precondition is not None:
            old = moments_by_leaf(state.moments)
            for i in plan.compressed(_NAME, exchange, axes):
                scales[i] = precondition.units(old[i])
                if learns is not None:
                    roundings[i] = _rounding(plan.slots[i], axes.world)
        key = jax.random.fold_in(jax.random.key(seed), state.step)
        reduction = _Reduction(plan, axis_name, exchange, key, treedef, scales)
        if memory is None:
            sent, remembered = leaves, ()
            means, _ = reduction(leaves)
        else:
            sent, means, remembered = _Feedback(memory, axes, reduction)(leaves, state.memory)
        moments = state.moments
        if precondition is not None:
            moments = _moved(precondition, moments, means, state.step, roundings)
        measured = state.statistics
        if isinstance(policy, Adaptive):
            measured = policy.observe(measured, sent, scales, state.step, axes, plan)
        after = SyncState(state.step + 1, remembered, measured, moments)
        return jax.tree.unflatten(treedef, means), after

    return optax.GradientTransformationExtraArgs(init, update)


def state_specs(state: Any, axis_name: Any) -> Any:
    """PartitionSpecs of an optimizer state that holds a `SyncState`: in_specs of a training step.

    `state` is what `init` returned, or `jax.eval_shape` of it; memories are split over
    `axis_name`, everything else is replicated.
    """

    def specs(x: Any) -> Any:
        if not isinstance(x, SyncState):
            return PartitionSpec()
        replicated: Any = PartitionSpec()
        split = jax.tree.map(lambda _: PartitionSpec(axis_name), x.memory)
        rest = jax.tree.map(lambda _: replicated, (x.statistics, x.moments))
        return SyncState(replicated, split, *rest)

    return jax.tree.map(specs, state, is_leaf=lambda x: isinstance(x, SyncState))


def state_shardings(state: Any, axis_name: Any, mesh: Mesh) -> Any:
    """NamedShardings of `state_specs` on `mesh`: for device_put, out_shardings and restoring.

    `state` as in `state_specs`; it may hold more than the optimizer's state, such as parameters,
    which are replicated. Raises ValueError for an axis that is not in the mesh, and for memories
    of another number of ranks than it has there.
    """
    names = axis_name if isinstance(axis_name, tuple) else (axis_name,)
    _require_axes("state_shardings", names, mesh)
    world = math.prod(mesh.shape[n] for n in names)

    def check(path: Any, spec: PartitionSpec, x: Any) -> NamedSharding:
        if len(spec) and x.shape[0] != world:
            where = jax.tree_util.keystr(path, simple=True, separator="/")
            raise ValueError(
                f"state_shardings: {where} remembers for {x.shape[0]} ranks, and axis "
                f"{axis_name!r} of this mesh has {world}; a memory belongs to a rank. Pass a mesh "
                f"of {x.shape[0]}, or the state of an init on this one."
            )
        return NamedSharding(mesh, spec)

    return jax.tree_util.tree_map_with_path(check, state_specs(state, axis_name), state)


def _require_axes(caller: str, names: tuple[Any, ...], mesh: Mesh) -> None:
    missing = [n for n in names if n not in mesh.axis_names]
    if missing:
        raise ValueError(
            f"{caller}: axis {missing[0]!r} is not in the mesh; it has {mesh.axis_names}."
        )


def _check_state(
    state: SyncState, memory: Memory | None, precondition: SecondMoment | None, leaves: list[Any]
) -> None:
    """Raises ValueError for the state of a transformation with another memory or precondition."""
    if not leaves:
        return
    kept = len(jax.eval_shape(memory.init, leaves[0])) if memory is not None else 0
    if len(state.memory) != kept:
        raise ValueError(
            f"{_NAME}: the state holds {len(state.memory)} arrays per leaf where {memory} keeps "
            f"{kept}; {_OTHER_OPTIONS}"
        )
    rows = {x.shape[0] for x in jax.tree.leaves(state.memory)} - {1}
    if rows:
        raise ValueError(
            f"{_NAME}: the memory has {rows.pop()} rows here, and a rank has one. Inside "
            "shard_map, split the state: in_specs=cgx_jax.state_specs(state, axis_name). Under "
            "pmap, let each rank make its own: state = jax.pmap(tx.init, axis_name=...)(params), "
            "with parameters that are replicated already."
        )
    if precondition is None and state.moments != ():
        raise ValueError(
            f"{_NAME}: the state holds moments, and precondition is None; {_OTHER_OPTIONS}"
        )
    if precondition is None:
        return
    if not isinstance(state.moments, Moments):
        raise ValueError(
            f"{_NAME}: the state holds no moments for {precondition}; {_OTHER_OPTIONS}"
        )
    expected = jax.eval_shape(precondition.init, leaves[0]).values.shape
    found = jax.tree.leaves(state.moments.values)[0].shape
    if found != expected:
        raise ValueError(
            f"{_NAME}: the state's moments have values of shape {list(found)} where {precondition} "
            f"keeps {list(expected)}; {_OTHER_OPTIONS}"
        )


def _init_memory(memory: Memory | None, params: Any, axis_name: Any, mesh: Mesh | None) -> Any:
    if memory is None:
        return ()
    names = axis_name if isinstance(axis_name, tuple) else (axis_name,)
    bound = _bound(names)
    checked = bound and Axes.resolve(_NAME, names, None).checked()
    if not bound and mesh is None:
        raise ValueError(
            f"{_NAME}: init cannot know how many ranks axis {axis_name!r} has, and each has a "
            "memory of its own; pass mesh= to sync_gradients, or call init inside shard_map "
            "(out_specs=cgx_jax.state_specs(state, axis_name)) or pmap."
        )
    leaves, treedef = jax.tree.flatten(params)
    like = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves]

    def row() -> Any:
        states = [tuple(s[None] for s in memory.init(x)) for x in like]
        if checked:
            vary = functools.partial(_compat.vary_over, axes=frozenset(names))
            states = [tuple(map(vary, leaf)) for leaf in states]
        return _by_tree(states, treedef)

    if bound:
        return row()
    assert mesh is not None
    _require_axes(_NAME, names, mesh)
    # The types of explicit axes hold here too, which a sharding constraint would not take.
    specs = PartitionSpec(axis_name)
    return jax.jit(jax.shard_map(row, mesh=mesh, in_specs=(), out_specs=specs, check_vma=False))()


def _bound(names: tuple[Any, ...]) -> bool:
    try:
        for n in names:
            lax.axis_size(n)
    except (NameError, KeyError):
        return False
    return True


# A leaf's units and their size, as `SecondMoment.units` gives them; None for an exact leaf.
_Scale = tuple[Units, jax.Array] | None


@dataclasses.dataclass(frozen=True)
class _Reduction:
    """One step's mean over the ranks of lists of leaves, each compressed in its units."""

    plan: Plan
    axis_name: Any
    exchange: str
    key: Any
    treedef: Any
    scales: list[_Scale]

    def __call__(
        self, leaves: list[Any], *, residual: bool = False
    ) -> tuple[list[jax.Array], list[Any]]:
        """The means; and where asked what of `leaves` is lost in them, None for an exact leaf."""
        mean, lost = pmean_with_residual(
            _NAME,
            jax.tree.unflatten(self.treedef, leaves),
            self.axis_name,
            self.plan,
            units=tuple(None if scale is None else scale[0] for scale in self.scales),
            key=self.key,
            exchange=self.exchange,
            residual=residual,
        )
        return jax.tree.leaves(mean), lost


@dataclasses.dataclass(frozen=True)
class _Feedback:
    """One update with a memory."""

    memory: Memory
    axes: Axes
    reduction: _Reduction

    def __call__(self, leaves: list[Any], state: Any) -> tuple[list[Any], list[Any], Any]:
        """What is sent, its means, and the memory after it."""
        slots = self.reduction.plan.slots
        factors = [self._factor(s.compressor, s.path) for s in slots]
        old = [tuple(x[0] for x in rows) for rows in _by_leaf(state, len(leaves))]
        both = [self.memory.compensate(x, s) for x, s in zip(leaves, old, strict=True)]
        sent = [x for x, _ in both]
        means, lost = self.reduction(sent, residual=True)
        residuals = [jnp.zeros_like(x) if e is None else e for x, e in zip(sent, lost, strict=True)]
        for i, number in enumerate(factors):
            if lost[i] is not None and number != 1:
                factor = jnp.asarray(number, sent[i].dtype)
                means[i] *= factor
                residuals[i] = sent[i] - factor * (sent[i] - lost[i])
        # A skipped step never happened: what it would have sent is neither lost nor remembered.
        finite = _finite(means)
        rows = []
        for before, e, (_, partial) in zip(old, residuals, both, strict=True):
            after = zip(self.memory.remember(e, partial), before, strict=True)
            rows.append(tuple(self._row(_keep(finite, new, x)) for new, x in after))
        return sent, means, _by_tree(rows, self.reduction.treedef) or state

    @staticmethod
    def _factor(compressor: Compressor, path: str) -> float:
        if compressor.feedback_scale is None:
            raise ValueError(
                f"{_NAME}: {compressor} of leaf {path!r} may lose more than it is given, so a "
                "memory around it grows without end; use 2 bits or more, or stochastic rounding."
            )
        return compressor.feedback_scale

    def _row(self, x: jax.Array) -> jax.Array:
        names = frozenset(self.axes.names)
        return _compat.vary_over(x[None], names) if self.axes.checked() else x[None]


def _by_leaf(trees: Any, count: int) -> list[tuple[Any, ...]]:
    """What a tuple of trees holds for each of `count` leaves."""
    parts = [jax.tree.leaves(tree) for tree in trees]
    return [tuple(part[i] for part in parts) for i in range(count)]


def _by_tree(leaves: list[tuple[Any, ...]], treedef: Any) -> tuple[Any, ...]:
    """The tuple of trees back from what it holds for each leaf."""
    return tuple(jax.tree.unflatten(treedef, part) for part in zip(*leaves, strict=True))


def moments_by_leaf(moments: Moments) -> list[Moments]:
    """The moments of each leaf, from those whose fields are trees."""
    return [Moments(*leaf) for leaf in zip(*map(jax.tree.leaves, moments), strict=True)]


def moments_by_tree(moments: list[Moments], treedef: Any) -> Moments:
    """Moments whose fields are trees, from those of each leaf."""
    if not moments:
        return Moments(*[jax.tree.unflatten(treedef, [])] * len(Moments._fields))
    return Moments(*(jax.tree.unflatten(treedef, field) for field in zip(*moments, strict=True)))


def _rounding(slot: Slot, world: int) -> Rounding | None:
    """How much of the mean square of a leaf's mean is noise, for ranks that are independent.

    An encoding of squared error D multiplies the signal by 1 - D, and so its square by (1 - D)**2.
    Noise makes up the rest of a mean square of 1 - D. A chunk's owner adds its own values as they
    are, so the first of the two encodings counts (world - 1) / world.
    """
    compressor = slot.compressor
    error = _known_error(compressor, slot.size)
    if not isinstance(compressor, Quantize) or error is None:
        return None
    share = 1 - (1 - error) * (1 - error * (world - 1) / world)
    return Rounding(share, compressor.bucket_size)


def _known_error(compressor: Compressor, size: int) -> float | None:
    return compressor.known_error(size) if isinstance(compressor, Quantize) else None


def _require_known_errors(plan: Plan, policy: Any, memory: Memory | None) -> None:
    """Raises ValueError where no step size can be restored, for the wrapper around the caller."""
    if memory is not None:
        raise ValueError(
            f"restore_step_size: {memory} sends with later steps what compression loses, so steps "
            "are not shorter by what rounding takes; leave out one of the two."
        )
    choices = [(s.compressor, s.size) for s in plan.slots]
    if isinstance(policy, Adaptive):
        choices += [(c, c.block_size or 0) for c in policy.sampler.candidates]
    if not any(_known_error(*choice) for choice in choices):
        found = sorted({str(s.compressor) for s in plan.slots})
        raise ValueError(
            f"restore_step_size: the plan has {', '.join(found)}, and by how much a step is "
            "shorter is known only for rotated codes that round to nearest, in buckets of a power "
            "of two of values up to 512; use cgx_jax.Quantize(bits=4, rotation=True), or the "
            "optimizer as it is."
        )


def _moved(
    precondition: SecondMoment,
    moments: Moments,
    means: list[Any],
    step: jax.Array,
    roundings: list[Rounding | None],
) -> Moments:
    """The moments after a step: changed in one that is due and finite."""
    due = precondition.due(step)
    new, old = [], moments_by_leaf(moments)
    for before, mean, rounding in zip(old, means, roundings, strict=True):
        # Each leaf by itself: one branch of all would keep all means until the last has come.
        update = functools.partial(precondition.update, before, mean, step, rounding)
        new.append(lax.cond(due, update, lambda before=before: before))
    finite = _finite([leaf.weights for leaf in new])
    tree = moments_by_tree(new, jax.tree.structure(moments.weights))
    return jax.tree.map(functools.partial(jnp.where, finite), tree, moments)


def _finite(means: list[Any]) -> Any:
    return jnp.all(jnp.stack([jnp.isfinite(m).all() for m in means])) if means else True


def _keep(finite: Any, new: jax.Array, old: jax.Array) -> jax.Array:
    # An owner's share of a float16 leaf's error may overflow where the mean did not.
    return jnp.where(finite & jnp.isfinite(new), new, jnp.where(finite, 0, old).astype(old.dtype))
