"""The state of `sync_gradients`: what it holds, how it begins, and how it is split over ranks."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from cgx_jax import _compat
from cgx_jax.axes import Axes
from cgx_jax.compressors import Compressor
from cgx_jax.leaves import Leaf
from cgx_jax.plan import Plan
from cgx_jax.transforms.memory import Memory
from cgx_jax.transforms.own_rows import require_axes, rows_of
from cgx_jax.transforms.precondition import Moments, SecondMoment

CALLER = "sync_gradients"
_OTHER_OPTIONS = (
    "it was made with other options. Use the state from this transformation's init, or restore "
    "one that was made with the same options."
)


# The compressors that each leaf may take: one under a plan, several under an adaptive policy.
Choices = Sequence[tuple[Compressor, ...]]


class CodeState(NamedTuple):
    """States of compressors: trees like the parameters, with a state, or (), at each leaf.

    Under an adaptive policy, several compressors may code a leaf. It then has a tuple with the
    state of each, in which the state of a compressor that is not in use stays unchanged, so that no
    plan changes the shapes. `own` differs between ranks: an array of shape s is [world, *s], one
    row per rank ([1, *s] inside shard_map and pmap). `shared` holds the states of compressors with
    `shares_state` and is the same on all ranks.
    """

    own: Any
    shared: Any


class SyncState(NamedTuple):
    """State of `sync_gradients`; only `memory`, `codes.own` and `overflow` differ between ranks.

    * `step`, i32[]: the number of updates.
    * `memory`: () or a tuple of residual trees, in which a leaf of shape s is `[world, *s]`, one
      row per rank (`[1, *s]` inside shard_map and pmap).
    * `statistics`: () or what an adaptive policy measures.
    * `moments`: () or the `Moments` by which gradients are preconditioned; each field is a tree
      like the parameters.
    * `codes`: () or the `CodeState` of compressors that have state.
    * `overflow`: () or a tree like the parameters of i32[world]: how many values found no room in
      the last step.
    * `skipped`, i32[]: the number of updates that left all of this unchanged, because a mean was
      not finite.

    `metrics` reads `overflow` and `skipped`. A state that belongs to other options raises
    ValueError in `update`.
    """

    step: jax.Array
    memory: Any
    statistics: Any
    moments: Any = ()
    codes: Any = ()
    overflow: Any = ()
    skipped: Any = ()


class LocalState(NamedTuple):
    """State of `local_steps`, of which `moved` and `optimizer` differ between ranks.

    `step`, i32[], is the number of updates. `moved`, a tree like the parameters, is how far a
    rank's own parameters are from the shared ones. `optimizer` is the inner optimizer's state. In
    both, an array of shape s is [world, *s], one row per rank ([1, *s] inside shard_map and pmap).
    `sync` is the `SyncState` of the reductions.
    """

    step: jax.Array
    moved: Any
    optimizer: Any
    sync: SyncState


def state_specs(state: Any, axis_name: Any) -> Any:
    """Returns PartitionSpecs of a state that holds a `SyncState`: in_specs of a training step.

    `state` is what `init` returned, or `jax.eval_shape` of it. What belongs to a rank is split over
    `axis_name` along its first dimension, and everything else is replicated. The result is a tree
    like `state`.
    """

    def split(tree: Any) -> Any:
        return jax.tree.map(lambda _: PartitionSpec(axis_name), tree)

    def specs(x: Any) -> Any:
        replicated: Any = PartitionSpec()
        if isinstance(x, LocalState):
            return LocalState(replicated, split(x.moved), split(x.optimizer), specs(x.sync))
        if not isinstance(x, SyncState):
            return replicated
        made = SyncState(*jax.tree.map(lambda _: replicated, tuple(x)))
        codes = made.codes
        if isinstance(x.codes, CodeState):
            codes = CodeState(split(x.codes.own), made.codes.shared)
        overflow = split(x.overflow)
        return made._replace(memory=split(x.memory), codes=codes, overflow=overflow)

    return jax.tree.map(specs, state, is_leaf=lambda x: isinstance(x, SyncState | LocalState))


def state_shardings(state: Any, axis_name: Any, mesh: Mesh) -> Any:
    """Returns NamedShardings of `state_specs` on `mesh`: for device_put, out_shardings, restoring.

    `state` is as in `state_specs`. It may hold more than the optimizer's state, such as parameters,
    which are replicated. Raises ValueError for an axis that is not in the mesh, and for memories of
    a different number of ranks than the axis has on the mesh.
    """
    names = axis_name if isinstance(axis_name, tuple) else (axis_name,)
    require_axes("state_shardings", names, mesh)
    world = math.prod(mesh.shape[n] for n in names)

    def check(path: Any, spec: PartitionSpec, x: Any) -> NamedSharding:
        if len(spec) and x.shape[0] != world:
            where = jax.tree_util.keystr(path, simple=True, separator="/")
            raise ValueError(
                f"state_shardings: {where} is the memory of {x.shape[0]} ranks, but axis "
                f"{axis_name!r} of this mesh has {world}; each rank has its own. Pass a mesh of "
                f"{x.shape[0]} ranks, or cgx_jax.resize_state(state, {world})."
            )
        return NamedSharding(mesh, spec)

    return jax.tree_util.tree_map_with_path(check, state_specs(state, axis_name), state)


def by_leaf(trees: Any, count: int) -> list[tuple[Any, ...]]:
    """Splits a tuple of trees into one tuple for each of `count` leaves."""
    parts = [jax.tree.leaves(tree) for tree in trees]
    return [tuple(part[i] for part in parts) for i in range(count)]


def by_tree(leaves: list[tuple[Any, ...]], treedef: Any) -> tuple[Any, ...]:
    """Inverts `by_leaf`: returns the tuple of trees."""
    return tuple(jax.tree.unflatten(treedef, part) for part in zip(*leaves, strict=True))


def moments_by_leaf(moments: Moments) -> list[Moments]:
    """Splits moments whose fields are trees into the moments of each leaf."""
    return [Moments(*leaf) for leaf in zip(*map(jax.tree.leaves, moments), strict=True)]


def moments_by_tree(moments: list[Moments], treedef: Any) -> Moments:
    """Inverts `moments_by_leaf`: returns moments whose fields are trees."""
    if not moments:
        return Moments(*[jax.tree.unflatten(treedef, [])] * len(Moments._fields))
    return Moments(*(jax.tree.unflatten(treedef, field) for field in zip(*moments, strict=True)))


def init_memory(
    memory: Memory | None, params: Any, axis_name: Any, mesh: Mesh | None, caller: str = CALLER
) -> Any:
    """Returns the memories before the first step: a row for each rank."""
    if memory is None:
        return ()
    leaves, treedef = jax.tree.flatten(params)
    like = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves]
    make = lambda: by_tree([memory.init(x) for x in like], treedef)  # noqa: E731
    return rows_of(make, axis_name, mesh, caller)


def init_overflow(
    memory: Memory | None, choices: Choices, treedef: Any, axis_name: Any, mesh: Mesh | None
) -> Any:
    """Returns the counts before the first step; () if codes always have room, or no memory."""
    if memory is None or not any(c.has_rooms for some in choices for c in some):
        return ()

    def none() -> Any:
        return jax.tree.unflatten(treedef, [jnp.zeros((), jnp.int32)] * treedef.num_leaves)

    return rows_of(none, axis_name, mesh, CALLER)


def init_codes(
    leaves: Sequence[Leaf], choices: Choices, treedef: Any, axis_name: Any, mesh: Mesh | None
) -> Any:
    """Returns the compressors' states before the first step; () if none has state."""
    if not any(_has_state(c, x) for x, some in zip(leaves, choices, strict=True) for c in some):
        return ()

    def states(shared: bool) -> Any:
        made = [
            _of_choices(
                [
                    c.init(x.shape, x.dtype)
                    if _has_state(c, x) and c.shares_state == shared
                    else ()
                    for c in some
                ]
            )
            for some, x in zip(choices, leaves, strict=True)
        ]
        return jax.tree.unflatten(treedef, made)

    return CodeState(rows_of(lambda: states(False), axis_name, mesh, CALLER), states(True))


def _of_choices(states: Sequence[Any]) -> Any:
    """Returns what a leaf keeps, from the state of each of its choices."""
    return states[0] if len(states) == 1 else tuple(states)


def _has_state(compressor: Compressor, leaf: Leaf) -> bool:
    return not compressor.lossless and compressor.has_state(leaf.shape, leaf.dtype)


def stateful(plan: Plan) -> list[bool]:
    """Returns which leaves have a compressor with state."""
    return [_has_state(c, x) for c, x in zip(plan.compressors, plan.leaves, strict=True)]


def codes_by_leaf(codes: Any, plan: Plan, choices: Choices, treedef: Any) -> list[Any]:
    """Returns the state of each leaf's compressor on this rank; () if it has none."""
    if codes == ():
        return [()] * len(plan.leaves)
    out = []
    own, shared = treedef.flatten_up_to(codes.own), treedef.flatten_up_to(codes.shared)
    for c, some, o, s in zip(plan.compressors, choices, own, shared, strict=True):
        kept = s if c.shares_state else jax.tree.map(lambda x: x[0], o)
        out.append(kept if len(some) == 1 else kept[some.index(c)])
    return out


def codes_after(
    old: Any,
    states: list[Any],
    plan: Plan,
    choices: Choices,
    treedef: Any,
    axes: Axes,
    finite: Any,
) -> Any:
    """Returns the state after a step: `states`, or the old ones if not `finite`."""
    if old == ():
        return ()
    before = codes_by_leaf(old, plan, choices, treedef)
    keep = functools.partial(jax.tree.map, lambda new, was: jnp.where(finite, new, was))
    own, shared = treedef.flatten_up_to(old.own), treedef.flatten_up_to(old.shared)
    for i, (compressor, leaf) in enumerate(zip(plan.compressors, plan.leaves, strict=True)):
        state = keep(states[i], before[i])
        if compressor.shares_state:
            _check_shared(compressor, leaf.path, state, axes)
        else:
            state = jax.tree.map(lambda x: _compat.vary_over(x[None], axes.varying()), state)
        kept = shared if compressor.shares_state else own
        place = choices[i].index(compressor)
        waiting = [kept[i]] if len(choices[i]) == 1 else list(kept[i])
        kept[i] = _of_choices([*waiting[:place], state, *waiting[place + 1 :]])
    return CodeState(jax.tree.unflatten(treedef, own), jax.tree.unflatten(treedef, shared))


def _check_shared(compressor: Compressor, path: str, state: Any, axes: Axes) -> None:
    for x in jax.tree.leaves(state):
        varying = _compat.varying_axes(x) & frozenset(axes.names)
        if varying:
            raise ValueError(
                f"{CALLER}: {compressor} of leaf {path!r} says that ranks share its state "
                f"(shares_state), but its state differs over axis {min(varying)!r}; compute it "
                "only from sums over the ranks, or set shares_state to False."
            )


def check_state(
    state: SyncState,
    memory: Memory | None,
    precondition: SecondMoment | None,
    plan: Plan,
    choices: Choices,
    treedef: Any,
    caller: str = CALLER,
) -> None:
    """Raises ValueError if `state` belongs to a transformation with other options."""
    if not plan.leaves:
        return
    like = jax.ShapeDtypeStruct(plan.leaves[0].shape, plan.leaves[0].dtype)
    kept = len(jax.eval_shape(memory.init, like)) if memory is not None else 0
    if len(state.memory) != kept:
        raise ValueError(
            f"{caller}: the state holds {len(state.memory)} arrays per leaf, but {memory} keeps "
            f"{kept}; {_OTHER_OPTIONS}"
        )
    _check_codes(state.codes, plan, choices, treedef, caller)
    own = state.codes.own if isinstance(state.codes, CodeState) else ()
    rows = {x.shape[0] for x in jax.tree.leaves((state.memory, own))} - {1}
    if rows:
        raise ValueError(
            f"{caller}: the memory has {rows.pop()} rows here, but a rank has one. Inside "
            "shard_map, split the state: in_specs=cgx_jax.state_specs(state, axis_name). Under "
            "pmap, let each rank make its own: state = jax.pmap(tx.init, axis_name=...)(params), "
            "with parameters that are replicated already."
        )
    if precondition is None and state.moments != ():
        raise ValueError(
            f"{caller}: the state holds moments, but precondition is None; {_OTHER_OPTIONS}"
        )
    if precondition is None:
        return
    if not isinstance(state.moments, Moments):
        raise ValueError(
            f"{caller}: the state holds no moments for {precondition}; {_OTHER_OPTIONS}"
        )
    expected = jax.eval_shape(precondition.init, like).values.shape
    found = jax.tree.leaves(state.moments.values)[0].shape
    if found != expected:
        raise ValueError(
            f"{caller}: the state's moments have values of shape {list(found)}, but "
            f"{precondition} keeps {list(expected)}; {_OTHER_OPTIONS}"
        )


def _check_codes(codes: Any, plan: Plan, choices: Choices, treedef: Any, caller: str) -> None:
    needy = [
        (c, leaf)
        for leaf, some in zip(plan.leaves, choices, strict=True)
        for c in some
        if _has_state(c, leaf)
    ]
    if not needy and codes == ():
        return
    if not isinstance(codes, CodeState):
        compressor, leaf = needy[0]
        raise ValueError(
            f"{caller}: the state holds nothing for {compressor} of leaf {leaf.path!r}; "
            f"{_OTHER_OPTIONS}"
        )
    own, shared = treedef.flatten_up_to(codes.own), treedef.flatten_up_to(codes.shared)
    for leaf, some, o, s in zip(plan.leaves, choices, own, shared, strict=True):
        for place, compressor in enumerate(some):
            make = functools.partial(compressor.init, leaf.shape, leaf.dtype)
            wanted: Any = jax.eval_shape(make) if _has_state(compressor, leaf) else ()
            shapes = [(x.shape, x.dtype) for x in jax.tree.leaves(wanted)]
            kept = [s] if compressor.shares_state else [o]
            if len(some) > 1:
                kept = [x[place] for x in kept if isinstance(x, tuple) and len(x) == len(some)]
            skip = 0 if compressor.shares_state else 1  # the row of this rank
            found = [(x.shape[skip:], x.dtype) for x in jax.tree.leaves(kept)]
            if shapes != found:
                raise ValueError(
                    f"{caller}: the state of {compressor} of leaf {leaf.path!r} is {found} here, "
                    f"but its init makes {shapes}; {_OTHER_OPTIONS}"
                )
