"""`sync_gradients`: the reduction of gradients as an Optax transformation with its own state."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from cgx_jax import _compat
from cgx_jax.axes import Axes
from cgx_jax.collectives import pmean_compressed, pmean_with_residual
from cgx_jax.compressors import Compressor
from cgx_jax.memory import Memory
from cgx_jax.plan import Plan, leaves_of
from cgx_jax.policy.adaptive import Adaptive
from cgx_jax.policy.rules import Policy

_NAME = "sync_gradients"


class SyncState(NamedTuple):
    """State of `sync_gradients`: the same on every rank, but for `memory`.

    `step` is i32[], the number of updates; `memory` () or a tuple of residual trees, in which a
    leaf of shape s is [world, *s], one row a rank ([1, *s] inside shard_map and pmap);
    `statistics` () or what an adaptive policy measures.
    """

    step: jax.Array
    memory: Any
    statistics: Any


def sync_gradients(
    axis_name: Any,
    policy: Compressor | Policy | Plan | None = None,
    *,
    memory: Memory | None = None,
    seed: int = 0,
    exchange: str = "auto",
    mesh: Mesh | None = None,
) -> Any:
    """An `optax.GradientTransformation` that takes a rank's gradients to their mean, compressed.

    It goes first in `optax.chain`, inside shard_map or pmap over `axis_name`; everything after it
    sees the same mean on every rank. `policy` and `exchange` as in `pmean_compressed`; `seed`
    feeds stochastic rounding. An `Adaptive` policy measures here, and the step is compiled by its
    `jit`. With `memory` (`ErrorFeedback()`, `MomentumCorrection()`) what
    compression loses is sent with the next step; a step whose mean holds a NaN or infinity leaves
    the memory as it was. Memory belongs to a rank: `init` runs inside shard_map or pmap, or is
    given the `mesh`, and `state_specs` and `state_shardings` say how the state is split.

    Accumulate gradients before it (`optax.MultiSteps` around the chain, or a sum in the step);
    clip, and skip steps (`optax.apply_if_finite`), after it, where all ranks see the same values.
    Raises ValueError while tracing for what `pmean_compressed` refuses, a memory around a
    compressor that would let it grow, or a memory whose ranks cannot be known.
    """
    import optax

    def init(params: Any) -> SyncState:
        shared: Any = (jnp.zeros((), jnp.int32), ())
        if isinstance(policy, Adaptive):
            shared = (shared[0], policy.empty_statistics(leaves_of(params)))
        if mesh is not None:
            shared = lax.with_sharding_constraint(shared, NamedSharding(mesh, PartitionSpec()))
        return SyncState(shared[0], _init_memory(memory, params, axis_name, mesh), shared[1])

    def update(updates: Any, state: SyncState, params: Any = None) -> tuple[Any, SyncState]:
        plan = policy if isinstance(policy, Plan) else Plan.build(updates, policy)
        key = jax.random.fold_in(jax.random.key(seed), state.step)
        if memory is None:
            sent, remembered = updates, ()
            mean = pmean_compressed(updates, axis_name, plan, key=key, exchange=exchange)
        else:
            call = _Feedback(memory, plan, axis_name, exchange)
            sent, mean, remembered = call(updates, state.memory, key)
        measured = state.statistics
        if isinstance(policy, Adaptive):
            axes = Axes.resolve(_NAME, axis_name, None)
            measured = policy.observe(measured, jax.tree.leaves(sent), state.step, axes, plan)
        return mean, SyncState(state.step + 1, remembered, measured)

    return optax.GradientTransformation(init, update)


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
        return SyncState(replicated, split, jax.tree.map(lambda _: replicated, x.statistics))

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
        states = [[s[None] for s in memory.init(x)] for x in like]
        if checked:
            states = [[_compat.vary_over(s, frozenset(names)) for s in leaf] for leaf in states]
        return tuple(jax.tree.unflatten(treedef, part) for part in zip(*states, strict=True))

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


@dataclasses.dataclass(frozen=True)
class _Feedback:
    """One update with a memory."""

    memory: Memory
    plan: Plan
    axis_name: Any
    exchange: str

    def __call__(self, updates: Any, state: Any, key: Any) -> tuple[Any, Any, Any]:
        """What is sent, its mean, and the memory after it."""
        axes = Axes.resolve(_NAME, self.axis_name, None)
        scales = [self._scale(s.compressor, s.path) for s in self.plan.slots]
        leaves, treedef = jax.tree.flatten(updates)
        parts = [[x[0] for x in jax.tree.leaves(part)] for part in state]
        old = [tuple(part[i] for part in parts) for i in range(len(leaves))]
        both = [self.memory.compensate(x, s) for x, s in zip(leaves, old, strict=True)]
        sent = [x for x, _ in both]
        mean, lost = pmean_with_residual(
            jax.tree.unflatten(treedef, sent),
            self.axis_name,
            self.plan,
            key=key,
            exchange=self.exchange,
        )
        means = jax.tree.leaves(mean)
        residuals = [jnp.zeros_like(x) if e is None else e for x, e in zip(sent, lost, strict=True)]
        for i, scale in enumerate(scales):
            if lost[i] is not None and scale != 1:
                factor = jnp.asarray(scale, sent[i].dtype)
                means[i] *= factor
                residuals[i] = sent[i] - factor * (sent[i] - lost[i])
        # A skipped step never happened: what it would have sent is neither lost nor remembered.
        finite = jnp.all(jnp.stack([jnp.isfinite(m).all() for m in means])) if means else True
        rows = []
        for before, e, (_, partial) in zip(old, residuals, both, strict=True):
            after = self.memory.remember(e, partial)
            rows.append([_keep(finite, new, x) for new, x in zip(after, before, strict=True)])
        remembered = tuple(
            jax.tree.unflatten(treedef, [self._row(axes, x) for x in part])
            for part in zip(*rows, strict=True)
        )
        return sent, jax.tree.unflatten(treedef, means), remembered or state

    @staticmethod
    def _scale(compressor: Compressor, path: str) -> float:
        if compressor.feedback_scale is None:
            raise ValueError(
                f"{_NAME}: {compressor} of leaf {path!r} may lose more than it is given, so a "
                "memory around it grows without end; use 2 bits or more, or stochastic rounding."
            )
        return compressor.feedback_scale

    @staticmethod
    def _row(axes: Axes, x: jax.Array) -> jax.Array:
        return _compat.vary_over(x[None], frozenset(axes.names)) if axes.checked() else x[None]


def _keep(finite: Any, new: jax.Array, old: jax.Array) -> jax.Array:
    # An owner's share of a float16 leaf's error may overflow where the mean did not.
    return jnp.where(finite & jnp.isfinite(new), new, jnp.where(finite, 0, old).astype(old.dtype))
