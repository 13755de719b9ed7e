"""The state of `sync_gradients`: what it holds, how it begins, and how it is split over ranks."""

from __future__ import annotations

import enum
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any, NamedTuple, get_origin, get_type_hints

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from cgx_jax import _compat
from cgx_jax._types import AxisName, Pytree
from cgx_jax.axes import Axes, axes_by_dimension, names_of, require_axes
from cgx_jax.compressors import Compressor
from cgx_jax.leaves import Leaf, leaves_of, map_with_paths, path_of
from cgx_jax.plan import Plan
from cgx_jax.transforms.memory import Memory
from cgx_jax.transforms.own_rows import as_rows, axes_of, own_row
from cgx_jax.transforms.precondition import Moments, SecondMoment

CALLER = "sync_gradients"

# The compressors that each leaf may take: one under a plan, several under an adaptive policy.
Choices = Sequence[tuple[Compressor, ...]]

Rows = Callable[..., Pytree]  # `rows_of` of some ranks


class PerRank(enum.Enum):
    """Marks a field of a state whose arrays have a row for each rank, [world, ...].

    The value says what the rows of another number of ranks are. Other fields are the same on all
    ranks.
    """

    MEAN = "the mean of the old rows"
    RESTART = "zeros"


class EachOf(NamedTuple):
    """Marks a field that is a tuple of states."""

    kind: Any


class CodeState(NamedTuple):
    """States of compressors: trees like the parameters, with a state, or (), at each leaf.

    Under an adaptive policy or `Stages`, several compressors may code a leaf, so there are several
    trees: the n-th has the state of each leaf's n-th compressor. The state of a compressor that is
    not in use stays unchanged, so that no plan changes the shapes. `own` differs between ranks: an
    array of shape s is [world, *s], one row per rank ([1, *s] inside shard_map and pmap). `shared`
    holds the states of compressors with `shares_state` and is the same on all ranks.
    """

    own: Annotated[tuple[Pytree, ...], PerRank.MEAN]
    shared: tuple[Pytree, ...]


class InRates(NamedTuple):
    """The residual trees of a memory that keeps residuals times learning rates."""

    trees: tuple[Pytree, ...]


class SyncState(NamedTuple):
    """State of `sync_gradients`; only `memory`, `codes.own` and `overflow` differ between ranks.

    * `step`, i32[]: the number of updates.
    * `memory`: () or a tuple of residual trees, in which a leaf of shape s is `[world, *s]`, one
      row per rank (`[1, *s]` inside shard_map and pmap). With a schedule of learning rates it is
      `InRates`, since these residuals are other numbers.
    * `statistics`: () or what an adaptive policy measures.
    * `moments`: () or the `Moments` by which gradients are preconditioned.
    * `codes`: () or the `CodeState` of compressors that have state.
    * `overflow`: () or a tree like the parameters of i32[world]: how many values found no room in
      the last step.
    * `skipped`, i32[]: the number of updates that left all of this unchanged, because a mean was
      not finite.

    `metrics` reads `overflow` and `skipped`. `init` fixes the structure, shapes and dtypes of the
    state; no step changes them. The trees and their shapes say which leaves the state was made for.
    `update` raises ValueError for a state of other leaves, of other options, or without its types,
    as a checkpoint that was restored without a target.
    """

    step: jax.Array
    memory: Annotated[Pytree, PerRank.MEAN]
    statistics: Pytree
    moments: Pytree = ()
    codes: Annotated[Pytree, CodeState] = ()
    overflow: Annotated[Pytree, PerRank.RESTART] = ()
    skipped: Any = ()


class Fragment(NamedTuple):
    """A fragment of the parameters of `diloco`; its trees have None for other leaves.

    `sync` is the `SyncState` of its reductions, and `outer` the state of the outer optimizer. With
    a delay, `waiting` is what a rank has sent and nobody has applied yet, and `ticket`,
    u32[world, 2], that of the reduction on its way (`Exchange.start`); both differ between ranks.
    `left`, i32[], counts the steps until that is applied; 0: nothing waits. Without a delay all
    three are ().
    """

    sync: Annotated[SyncState, SyncState]
    outer: Pytree
    waiting: Annotated[Pytree, PerRank.MEAN] = ()
    ticket: Annotated[Pytree, PerRank.RESTART] = ()
    left: Any = ()


class LocalState(NamedTuple):
    """State of `diloco` and `local_steps`; `moved` and `optimizer` differ between ranks.

    `step`, i32[], is the number of updates. `moved`, a tree like the parameters, is how far a
    rank's own parameters are from the shared ones. `optimizer` is the inner optimizer's state, in
    the dtypes that Optax gives it. In both, an array of shape s is [world, *s], one row per rank
    ([1, *s] inside shard_map and pmap). `fragments` has a `Fragment` for each part of the
    parameters that is sent at a time of its own.
    """

    step: jax.Array
    moved: Annotated[Pytree, PerRank.MEAN]
    optimizer: Annotated[Pytree, PerRank.MEAN]
    fragments: Annotated[tuple[Fragment, ...], EachOf(Fragment)]


_STATES: tuple[Any, ...] = (SyncState, CodeState, Fragment, LocalState)


@functools.cache
def _marks(kind: Any) -> dict[str, Any]:
    """Returns the marks of fields: `PerRank`, `EachOf`, or the kind of state that a field is."""
    hints = get_type_hints(kind, include_extras=True)
    marked = {name: hint for name, hint in hints.items() if get_origin(hint) is Annotated}
    return {name: hint.__metadata__[0] for name, hint in marked.items()}


def state_specs(state: Pytree, axis_name: AxisName) -> Pytree:
    """Returns PartitionSpecs of a state that holds a `SyncState`: in_specs of a training step.

    `state` is what `init` returned, or `jax.eval_shape` of it. What belongs to a rank is split over
    `axis_name` along its first dimension, and everything else is replicated. The result is a tree
    like `state`. If a chain reduces over several axes, call it for each `SyncState` with the axis
    of that state. Raises ValueError for a state that was restored without a target.
    """
    caller = "state_specs"
    axis_name = axes_of(caller, axis_name)
    replicated: Any = PartitionSpec()
    split: Any = PartitionSpec(axis_name)
    return map_parts(caller, state, lambda _, x: split, lambda x: replicated)


def state_shardings(state: Pytree, axis_name: AxisName, mesh: Mesh) -> Pytree:
    """Returns NamedShardings of `state_specs` on `mesh`: for device_put, out_shardings, restoring.

    `state` is as in `state_specs`. It may hold more than the optimizer's state, such as parameters.
    An array on a mesh like `mesh` keeps its sharding, and so does a shape that `jax.eval_shape`
    gives on explicit axes; everything else is replicated, and rows are always split. Raises
    ValueError for an axis that is not in the mesh, for memories of a different number of ranks than
    the axis has on the mesh, and for a state that was restored without a target.
    """
    caller = "state_shardings"
    axis_name = axes_of(caller, axis_name)
    names = names_of(axis_name)
    require_axes(caller, names, mesh)
    world = math.prod(mesh.shape[n] for n in names)
    rows = ranks_in(caller, state)

    def check(path: Any, spec: PartitionSpec, x: Any) -> NamedSharding:
        if len(spec) and x.shape[0] != world:
            where, found = path_of(path), x.shape[0]
            remedy = f"Pass a mesh of {found} ranks, or cgx_jax.resize_state(state, {world})."
            if len(rows) > 1 or set(mesh.axis_names) > set(names):
                remedy = (
                    f"If its sync_gradients reduces over another axis than {axis_name!r}, call "
                    "state_shardings for each SyncState in the state, with the axis of each. If "
                    f"{found} ranks saved it, resize that SyncState: "
                    f"cgx_jax.resize_state(sync_state, {world})."
                )
            raise ValueError(
                f"{caller}: {where} is the memory of {found} ranks, but axis {axis_name!r} of "
                f"this mesh has {world}; each rank has its own. {remedy}"
            )
        known = getattr(x, "sharding", None)
        if isinstance(known, NamedSharding) and known.mesh.shape == mesh.shape:
            # Rows that lie on every rank, as in a state that was restored so, are split.
            rest = PartitionSpec(*known.spec.partitions[1:])
            mine = any({*names} & {*entry} for entry in axes_by_dimension(rest))
            spec = PartitionSpec(axis_name, *(() if mine else rest)) if len(spec) else known.spec
        return NamedSharding(mesh, spec)

    specs = state_specs(state, axis_name)
    return map_with_paths(lambda path, x, spec: check(path, spec, x), state, specs)


def map_parts(
    caller: str,
    state: Pytree,
    of_ranks: Callable[[PerRank, Any], Any],
    shared: Callable[[Any], Any],
) -> Pytree:
    """Maps the arrays that have a row for each rank by `of_ranks`, all others by `shared`.

    `of_ranks` also receives the mark of the array's field. Raises ValueError for a state that was
    restored without a target.
    """

    def part(kind: Any, x: Any) -> Pytree:
        fields = dict(zip(kind._fields, x, strict=True)) if isinstance(x, tuple) else dict(x)
        for name, value in fields.items():
            mark = _marks(kind).get(name)
            inner = None if isinstance(mark, PerRank | EachOf) else _kind(caller, value, mark)
            if isinstance(mark, PerRank):
                fields[name] = jax.tree.map(functools.partial(of_ranks, mark), value)
            elif isinstance(mark, EachOf) and isinstance(value, tuple | list):
                fields[name] = type(value)(entry(mark.kind, x) for x in value)
            elif isinstance(mark, EachOf) and isinstance(value, Mapping):  # of nnx.state
                fields[name] = {k: entry(mark.kind, x) for k, x in value.items()}
            elif inner is not None:
                fields[name] = part(inner, value)
            else:
                fields[name] = jax.tree.map(each, value, is_leaf=is_state)
        return kind(**fields) if isinstance(x, tuple) else fields

    def entry(kind: Any, x: Any) -> Pytree:
        if (found := _kind(caller, x, kind)) is None:
            raise restored(caller, x, kind)
        return part(found, x)

    def each(x: Any) -> Pytree:
        kind = _kind(caller, x)
        return shared(x) if kind is None else part(kind, x)

    def is_state(x: Any) -> bool:
        return _kind(caller, x) is not None

    return jax.tree.map(each, state, is_leaf=is_state)


def ranks_in(caller: str, state: Pytree) -> set[int]:
    """Returns of how many ranks the arrays in a whole state are that have a row for each."""
    rows: set[int] = set()
    map_parts(caller, state, lambda _, x: rows.add(x.shape[0]), lambda x: x)
    return rows


def sync_states(caller: str, state: Pytree) -> list[SyncState]:
    """Returns every `SyncState` in `state`; raises ValueError for one restored without a target."""

    def is_sync(x: object) -> bool:
        return _kind(caller, x) is SyncState

    found = filter(is_sync, jax.tree.leaves(state, is_leaf=is_sync))
    empty = dict.fromkeys(SyncState._fields, ())
    return [x if isinstance(x, SyncState) else SyncState(**(empty | x)) for x in found]


def is_of_pmap(caller: str, state: Pytree) -> bool:
    """Whether everything in `state` has a row for each rank, and not only what differs."""

    def is_state(x: object) -> bool:
        return _kind(caller, x) is not None

    outermost = filter(is_state, jax.tree.leaves(state, is_leaf=is_state))
    steps = [x.get("step") if isinstance(x, Mapping) else getattr(x, "step", ()) for x in outermost]
    return any(jnp.ndim(step) for x in steps for step in jax.tree.leaves(x))


def require_concrete(caller: str, state: Pytree) -> None:
    """Raises ValueError for a state whose arrays have no values yet."""
    if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(state)):
        raise ValueError(
            f"{caller}: the state is traced, as in jit or shard_map, and has no values yet; make "
            "this call outside, on the state that the step returns."
        )


def _kind(caller: str, x: Any, expected: type | None = None) -> type | None:
    """Returns which of the states `x` is; None if it is none of them.

    `nnx.state` makes a dict of each named tuple and drops the fields without arrays. Raises
    ValueError for any other dict with the fields of a state.
    """
    if isinstance(x, _STATES):
        return type(x)
    if not isinstance(x, Mapping) or not x:
        return None
    marks: dict[Any, set[str]] = {
        SyncState: {"step", "skipped"},
        LocalState: {"step", "moved", "fragments"},
    }
    found = (k for k, some in marks.items() if some <= set(x) <= set(k._fields))
    kind = next(found, expected)
    if kind is None or _is_of_nnx(x):
        return kind
    if len(x) == 2 and kind is SyncState:  # a user's own step and skipped
        return None
    raise restored(caller, x, kind)


def _is_of_nnx(x: Mapping[Any, Any]) -> bool:
    nodes = jax.tree.leaves(dict(x), is_leaf=lambda v: not isinstance(v, Mapping | tuple | list))
    return all(type(v).__module__.startswith("flax.nnx") for v in nodes)


def restored(caller: str, x: Any, kind: type) -> ValueError:
    """The error for a value in the place of a `kind`, as after a restore without a target."""
    return ValueError(
        f"{caller}: the state has a {type(x).__name__} in the place of {kind.__name__}, as after a "
        "restore without a target. Restore with a target that has the types of the state: "
        "jax.eval_shape(tx.init, params). If nothing was restored, pass what init returned."
    )


def by_leaf(trees: Pytree, count: int) -> list[tuple[Any, ...]]:
    """Splits a tuple of trees of rows into a tuple of this rank's, for each of `count` leaves."""
    parts = [jax.tree.leaves(own_row(tree)) for tree in trees]
    return [tuple(part[i] for part in parts) for i in range(count)]


def by_tree(
    leaves: list[tuple[Any, ...]], treedef: jax.tree_util.PyTreeDef, count: int
) -> tuple[Any, ...]:
    """Inverts `by_leaf`: returns the tuple of `count` trees."""
    return _trees(treedef, zip(*leaves, strict=True) if leaves else [()] * count)


def _trees(
    treedef: jax.tree_util.PyTreeDef, parts: Iterable[Sequence[Pytree]]
) -> tuple[Pytree, ...]:
    """Returns a tree of each of `parts`."""
    return tuple(jax.tree.unflatten(treedef, part) for part in parts)


def trees_of(memory: Any) -> tuple[Pytree, ...]:
    """Returns the trees of the memory in a state."""
    return memory.trees if isinstance(memory, InRates) else memory


def as_memory(trees: Any, in_rates: bool) -> Pytree:
    """Returns the memory in a state that has these trees."""
    return InRates(trees) if in_rates else trees


def rows_after(memory: Pytree, rows: list[tuple[jax.Array, ...]], axes: Axes) -> Pytree:
    """Returns the memory after a step, whose leaves have these rows; () if there is none."""
    if not (trees := trees_of(memory)):
        return ()
    new = as_rows(axes, by_tree(rows, jax.tree.structure(trees[0]), len(trees)))
    return as_memory(new, isinstance(memory, InRates))


def overflow_after(overflow: Pytree, counts: list[jax.Array], axes: Axes) -> Pytree:
    """Returns the counts after a step; () if codes always have room."""
    if overflow == ():
        return ()
    vary = axes.varying()
    own = [_compat.vary_over(x, vary) for x in counts]
    return jax.tree.unflatten(jax.tree.structure(overflow), own)


def is_any_tree(params: Pytree) -> bool:
    """Whether `optax.tree_utils.tree_map_params` calls `init`, with its stand-in for any tree."""
    return type(params).__name__ == "_ParamsPlaceholder"


def state_of_any_tree(
    params: Pytree, memory: Memory | None, precondition: SecondMoment | None, *, adapts: bool
) -> SyncState:
    """The state of the stand-in for any tree, as a prefix of the states of all trees.

    One leaf stands for each part whose structure depends on the leaves of the parameters.
    """
    leaf = jnp.zeros((), jnp.int32)
    return SyncState(
        step=leaf,
        memory=() if memory is None else as_memory((params,) * kept_by(memory), memory.in_rates),
        statistics=leaf if adapts else (),
        moments=() if precondition is None else Moments(params, *[leaf] * 5),
        codes=leaf,
        overflow=() if memory is None else leaf,
        skipped=leaf,
    )


def kept_by(memory: Memory | None) -> int:
    """Returns how many arrays a memory keeps of each leaf."""
    if memory is None:
        return 0
    return len(jax.eval_shape(memory.init, jax.ShapeDtypeStruct((), jnp.float32)))


def init_rows(
    memory: Memory | None,
    params: Pytree,
    leaves: Sequence[Leaf],
    choices: Choices,
    names: tuple[str, ...],
    rows: Rows,
) -> tuple[Pytree, Pytree, Pytree]:
    """Returns (codes, overflow, memory) before the first step, the parts with rows of ranks.

    Each is () if there is nothing to keep. A memory is sharded like its parameter, but whole over
    `names`, the axes of the reduction.
    """
    given, treedef = jax.tree.flatten(params)
    coded = any(has_state(c, x) for x, some in zip(leaves, choices, strict=True) for c in some)
    counts = memory is not None and any(c.has_rooms for some in choices for c in some)
    at = [_explicit_beside(names, x) for x in given]
    like = [
        jax.ShapeDtypeStruct(x.shape if s is None else s.shard_shape(x.shape), x.dtype)
        for x, s in zip(leaves_of(params), at, strict=True)
    ]
    kept = kept_by(memory)

    def states(shared: bool) -> tuple[Pytree, ...]:
        made = [
            [
                c.init(x.shape, x.dtype) if has_state(c, x) and c.shares_state == shared else ()
                for c in some
            ]
            for some, x in zip(choices, leaves, strict=True)
        ]
        return _trees(treedef, itertools.zip_longest(*made, fillvalue=()))

    def make() -> Pytree:
        own = states(shared=False) if coded else ()
        none = [jnp.zeros((), jnp.int32)] * len(given)
        overflow = jax.tree.unflatten(treedef, none) if counts else ()
        trees = () if memory is None else by_tree([memory.init(x) for x in like], treedef, kept)
        return own, overflow, trees

    everywhere = PartitionSpec()
    specs = [(everywhere if s is None else s.spec,) * kept for s in at]
    own, overflow, trees = rows(make, specs=(everywhere, everywhere, by_tree(specs, treedef, kept)))
    codes = CodeState(own, states(shared=True)) if coded else ()
    return codes, overflow, () if memory is None else as_memory(trees, memory.in_rates)


def _explicit_beside(names: tuple[str, ...], x: Any) -> NamedSharding | None:
    """Returns how `x` is sharded over explicit axes, without `names`; None without such axes."""
    if (sharding := _compat.explicit_sharding(x)) is None:
        return None
    entries = axes_by_dimension(sharding.spec, x.ndim)
    kept = [tuple(n for n in entry if n not in names) or None for entry in entries]
    return NamedSharding(sharding.mesh, PartitionSpec(*kept))


def has_state(compressor: Compressor, leaf: Leaf) -> bool:
    """Whether the compressor keeps a state of the leaf."""
    return not compressor.lossless and compressor.has_state(leaf.shape, leaf.dtype)


def codes_by_leaf(
    codes: Pytree, plan: Plan, choices: Choices, treedef: jax.tree_util.PyTreeDef
) -> list[Any]:
    """Returns the state of each leaf's compressor on this rank; () if it has none."""
    if not isinstance(codes, CodeState):
        return [()] * len(plan.leaves)
    out = []
    own, shared = (list(map(treedef.flatten_up_to, trees)) for trees in codes)
    for i, (c, some) in enumerate(zip(plan.compressors, choices, strict=True)):
        place = some.index(c)
        out.append(shared[place][i] if c.shares_state else own_row(own[place][i]))
    return out


def codes_after(
    caller: str,
    old: Pytree,
    states: list[Pytree],
    plan: Plan,
    choices: Choices,
    treedef: jax.tree_util.PyTreeDef,
    axes: Axes,
    finite: Any,
) -> Pytree:
    """Returns the state after a step: `states`, or the old ones if not `finite`."""
    if not isinstance(old, CodeState):
        return old
    before = codes_by_leaf(old, plan, choices, treedef)
    keep = functools.partial(
        jax.tree.map, lambda new, was: jnp.where(finite, new.astype(was.dtype), was)
    )
    own, shared = (list(map(treedef.flatten_up_to, trees)) for trees in old)
    for i, (compressor, leaf) in enumerate(zip(plan.compressors, plan.leaves, strict=True)):
        state = keep(states[i], before[i])
        if compressor.shares_state:
            _check_shared(caller, compressor, leaf.path, state, axes)
        else:
            state = as_rows(axes, state)
        kept = shared if compressor.shares_state else own
        kept[choices[i].index(compressor)][i] = state
    return CodeState(_trees(treedef, own), _trees(treedef, shared))


def _check_shared(
    caller: str, compressor: Compressor, path: str, state: Pytree, axes: Axes
) -> None:
    for x in jax.tree.leaves(state):
        varying = _compat.varying_axes(x) & frozenset(axes.names)
        if varying:
            raise ValueError(
                f"{caller}: {compressor} of leaf {path!r} says that ranks share its state "
                f"(shares_state), but its state differs over axis {min(varying)!r}; compute it "
                "only from sums over the ranks, or set shares_state to False."
            )
