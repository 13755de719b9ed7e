"""Gradients whose arrays are global, over some axes of the mesh or over all of them.

They are sharded over axes besides that of the reduction, which XLA handles, or typed as unreduced
on explicit axes. In both cases a step runs in a shard_map of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from cgx_jax import _compat
from cgx_jax._types import AxisName, Pytree
from cgx_jax.axes import axes_by_dimension, names_of, require_axes
from cgx_jax.leaves import is_function, leaves_of, map_with_paths, operand_of, path_of
from cgx_jax.plan import lossy_leaves
from cgx_jax.transforms.checks import require_whole
from cgx_jax.transforms.feedback import as_gradient
from cgx_jax.transforms.own_rows import is_bound
from cgx_jax.transforms.shares import Cut
from cgx_jax.transforms.state import (
    InRates,
    SyncState,
    as_memory,
    is_any_tree,
    map_parts,
    state_specs,
    trees_of,
)

Step = Callable[[Pytree, Any, tuple[Cut, ...]], tuple[Pytree, Any]]

_REPLICATED: Any = PartitionSpec()


def specs_of(
    caller: str, specs: Pytree, tree: Pytree, names: Sequence[str], mesh: Mesh | AbstractMesh | None
) -> list[PartitionSpec]:
    """Returns the spec of each leaf, from its path or a tree of specs, NamedShardings or arrays.

    Without a mesh it is that of `jax.set_mesh` or of shard_map. Raises ValueError for another tree,
    and for specs that do not fit the leaves, the mesh, or the axes `names` of the reduction.
    """
    if mesh is None:
        mesh = jax.sharding.get_abstract_mesh()
    leaves = leaves_of(tree)
    treedef: jax.tree_util.PyTreeDef = jax.tree.structure(tree)
    if is_function(specs):
        given: list[Any] = [specs(leaf.path) for leaf in leaves]
    else:
        try:
            given = treedef.flatten_up_to(specs)
        except ValueError as error:
            raise ValueError(
                f"{caller}: specs is no tree like the parameters: {str(error).rstrip('.')}. Pass "
                "one PartitionSpec for each, P() for those that every device has whole, or a "
                "function of a leaf's path."
            ) from None
    found = []
    for leaf, entry in zip(leaves, given, strict=True):
        hidden = isinstance(entry, jax.core.Tracer)
        placed = entry.sharding if isinstance(entry, jax.Array) and not hidden else entry
        spec = placed.spec if isinstance(placed, NamedSharding) else placed
        if not isinstance(spec, PartitionSpec):
            shown = type(entry).__name__ if isinstance(entry, jax.Array) else repr(entry)
            raise ValueError(
                f"{caller}: specs has {shown} for {leaf}; pass a PartitionSpec, P() for a leaf "
                "that every device has whole, or an array from outside jit with a NamedSharding."
            )
        check_spec(caller, str(leaf), spec, leaf.shape, mesh)
        if own := set(Cut.of(spec, len(leaf.shape)).names) & set(names):
            raise ValueError(
                f"{caller}: specs has {written(spec)} for {leaf}, but {min(own)!r} is the axis of "
                "the reduction; name the other axes of the mesh only."
            )
        found.append(spec)
    return found


def specs_in_types(tree: Pytree) -> Pytree:
    """Returns how leaves are sharded over explicit axes, as a tree of specs; None if none is."""
    specs = [
        jax.typeof(x).sharding.spec if isinstance(x, jax.Array) else _REPLICATED
        for x in jax.tree.leaves(tree)
    ]
    return jax.tree.unflatten(jax.tree.structure(tree), specs) if any(map(any, specs)) else None


def written(spec: PartitionSpec) -> str:
    """Returns a spec as the user would write it."""
    return f"P({', '.join(map(repr, spec))})"


def check_spec(
    caller: str, what: str, spec: PartitionSpec, shape: Sequence[int], mesh: Mesh | AbstractMesh
) -> None:
    """Raises ValueError if a spec names an unknown axis or does not divide a leaf of this shape."""
    entries = axes_by_dimension(spec, max(len(spec.partitions), len(shape)))
    for d, names in enumerate(entries):
        if unknown := [n for n in names if n not in mesh.axis_names]:
            raise ValueError(
                f"{caller}: specs has {written(spec)} for {what}, but {unknown[0]!r} is no axis of "
                f"the mesh; it has {mesh.axis_names}. Translate logical names first, as "
                "flax.linen.logical_to_mesh does."
            )
        parts = math.prod(mesh.shape[n] for n in names)
        if d >= len(shape) or shape[d] % parts:
            raise ValueError(
                f"{caller}: {what} has the spec {written(spec)}, which cuts dimension {d} into "
                f"{parts}; name dimensions that it has, and whose size is a multiple of their "
                "axes' sizes."
            )


def shards_of(
    tree: Pytree, specs: Sequence[PartitionSpec], mesh: Mesh | AbstractMesh | None
) -> Pytree:
    """Returns the shapes and dtypes of each device's shards of the leaves of `tree`."""
    mesh = jax.sharding.get_abstract_mesh() if mesh is None else mesh
    leaves, treedef = jax.tree.flatten(tree)
    pairs = zip([NamedSharding(mesh, spec) for spec in specs], leaves, strict=True)
    shards = [jax.ShapeDtypeStruct(s.shard_shape(x.shape), x.dtype) for s, x in pairs]
    return jax.tree.unflatten(treedef, shards)


def init_on_shards(
    caller: str,
    init: Callable[[Pytree], Pytree],
    params: Pytree,
    specs: Pytree,
    axis_name: AxisName,
    mesh: Mesh | AbstractMesh | None,
) -> Pytree:
    """Returns init(params), in which what belongs to a parameter is sharded as `specs` say.

    That is an array of the parameter's shape, after the row of a rank, at a path that ends in the
    parameter's. Inside shard_map, and without a mesh, XLA places the state. Python numbers among
    the parameters become arrays.
    """
    numbers = bool | int | float | complex
    params = jax.tree.map(lambda x: jnp.asarray(x) if isinstance(x, numbers) else x, params)
    names = names_of(axis_name)
    mesh = jax.sharding.get_abstract_mesh() if mesh is None else mesh
    if specs is None or mesh.empty or is_any_tree(params) or is_bound(names):
        return init(params)
    return jax.jit(lambda p: _placed(caller, init(p), p, specs, names, mesh))(params)


def _placed(
    caller: str,
    state: Pytree,
    params: Pytree,
    specs: Pytree,
    names: tuple[str, ...],
    mesh: Mesh | AbstractMesh,
) -> Pytree:
    require_axes(caller, names, mesh)
    pairs = zip(leaves_of(params), specs_of(caller, specs, params, names, mesh), strict=True)
    ends = [(f"/{leaf.path}".rstrip("/"), leaf.shape, spec) for leaf, spec in pairs]
    known = sorted(ends, key=lambda end: -len(end[0]))

    def place(path: Any, x: jax.Array, row: PartitionSpec) -> jax.Array:
        name, shape = f"/{path_of(path)}", x.shape[len(row) :]
        own = (s for end, like, s in known if like == shape and name.endswith(end))
        return _at(x, PartitionSpec(*row, *next(own, _REPLICATED)), mesh)

    axis: Any = names if len(names) > 1 else names[0]
    return map_with_paths(place, state, state_specs(state, axis))


def _at(x: jax.Array, spec: PartitionSpec, mesh: Mesh | AbstractMesh) -> jax.Array:
    """Returns `x` sharded over the axes of `mesh` that are not manual as `spec` says."""
    kinds: list[tuple[AxisType, Callable[..., jax.Array]]] = [
        (AxisType.Explicit, jax.reshard),
        (AxisType.Auto, lax.with_sharding_constraint),
    ]
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    for kind, place in kinds:
        if kind in types.values():
            kept = [tuple(n for n in e if types[n] == kind) for e in axes_by_dimension(spec)]
            x = place(x, NamedSharding(mesh, PartitionSpec(*kept)))
    return x


def at_specs(tree: Pytree, specs: Pytree) -> Pytree:
    """Returns arrays sharded as `specs` say, over the axes that are not manual; None: as they are.

    XLA shards what is computed from its operands, but constants as it likes.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if specs is None or mesh.empty:
        return tree
    return jax.tree.map(lambda x, spec: _at(x, spec, mesh), tree, specs)


def on_shards(
    caller: str, step: Step, specs: Sequence[PartitionSpec], updates: Pytree, state: Any
) -> tuple[Pytree, Any]:
    """Returns step(updates, state, cuts), computed on each shard where it lies.

    XLA would gather an operand of a kernel call that is sharded over an axis. The step therefore
    runs in a shard_map in which all axes of the mesh are manual.
    """
    mesh = jax.sharding.get_abstract_mesh()
    axes = set(mesh.axis_names) - set(mesh.manual_axes)
    if not axes:
        raise ValueError(
            f"{caller}: specs are for axes of the mesh that are left to XLA, but all of "
            f"{mesh.axis_names} are manual here, and each device has its shards already. Without a "
            "state between steps, leave out specs. With one, make only the axis of the reduction "
            "manual: jax.shard_map(..., axis_names=...)."
        )
    leaves, treedef = jax.tree.flatten(updates)
    cuts = tuple(Cut.of(spec, x.ndim) for spec, x in zip(specs, leaves, strict=True))
    like = jax.tree.unflatten(treedef, specs)
    kept = jax.tree.map(lambda _: _REPLICATED, state)
    if isinstance(state, SyncState) and any(map(len, specs)):
        require_whole(caller, state)
        rows = [PartitionSpec(None, *spec) for spec in specs]
        memory = tuple(jax.tree.unflatten(treedef, rows) for _ in trees_of(state.memory))
        kept = kept._replace(memory=as_memory(memory, isinstance(state.memory, InRates)))
    if axes & set(mesh.explicit_axes):  # there, what enters must be typed as in_specs say
        updates, state = at_specs((updates, state), (like, kept))
    means, after = jax.shard_map(
        lambda updates, state: step(updates, state, cuts),
        in_specs=(like, kept),
        out_specs=(like, kept),
        axis_names=axes,
        check_vma=False,
    )(updates, state)
    # Without check_vma, results have lost how they vary over the axes of the reduction.
    typed = jax.tree.map(lambda x, s: _compat.vary_over(x, _compat.varying_axes(s)), after, state)
    return means, typed


def step_on_ranks(
    caller: str,
    names: tuple[str, ...],
    step: Step,
    updates: Pytree,
    state: SyncState,
    places: Sequence[int] | None,
) -> tuple[Pytree, SyncState]:
    """Returns step(updates, state, cuts), traced inside a shard_map over all axes of the mesh.

    `step` takes the mean over `names`. A gradient that is unreduced over them is the sum of the
    ranks' parts, which is the mean of `world` times each part. Another gradient must be replicated
    over `names`, as JAX has reduced it. `places` are the dimensions in which `step` cuts the leaves
    into shards, if it does. Raises ValueError for other types of gradients, and for a
    state that does not have its row on each rank.
    """
    leaves, treedef = jax.tree.flatten(updates)
    leaves = [_compat.outside_vmap(caller, x, retypes=False) for x in leaves]
    mesh = jax.sharding.get_abstract_mesh()
    world = math.prod(mesh.shape[n] for n in names)
    before: list[PartitionSpec] = []
    after: list[PartitionSpec] = []
    parts: list[bool] = []
    cuts: list[Cut] = []
    for leaf, x in zip(leaves_of(updates), leaves, strict=True):
        spec = _compat.explicit_spec(operand_of(caller, leaf.path), x)
        cut = Cut.of(spec, x.ndim)
        own = spec.unreduced == frozenset(names) and _compat.is_sum(spec)
        if over := set(names) & set(cut.names):
            raise ValueError(
                f"{operand_of(caller, leaf.path)} is {spec}, cut over {min(over)!r}, which the "
                "gradients are reduced over, so it is a shard of their sum already. Gather its "
                "parameter in the loss by cgx_jax.reshard(..., backward=policy), which compresses "
                "that sum, and leave it out here (optax.masked). Or differentiate at what is "
                "gathered, and use cgx_jax.scatter_gradients."
            )
        if spec.unreduced and not own:
            raise ValueError(
                f"{operand_of(caller, leaf.path)} is {spec}; the gradient must be unreduced over "
                f"{names}, as cgx_jax.reduced(params, axis_name, policy) makes it, or replicated."
            )
        before.append(spec)
        entries = [*cut.axes]
        if places is not None and -x.ndim <= (d := places[len(parts)]) < x.ndim:
            entries[d] = (*entries[d], *names)
        after.append(PartitionSpec(*entries, reduced=spec.reduced))
        parts.append(own)
        cuts.append(cut)

    def row(_: Any, x: Any) -> PartitionSpec:
        spec = _compat.explicit_spec(f"{caller}: the memory", x)
        first = spec.partitions[:1]
        if first not in ((names,), names[:1] if len(names) == 1 else ()):
            raise ValueError(
                f"{caller}: an array of the state with a row for each rank is {spec}, so every "
                "rank would keep all rows. Take the state from init under jax.set_mesh, or place "
                "it by cgx_jax.state_shardings(jax.eval_shape(tx.init, params), axis_name, mesh)."
            )
        return spec

    everywhere = frozenset(names)
    kept = map_parts(caller, state, row, lambda x: jax.typeof(x).sharding.spec)

    def times_world(x: jax.Array) -> jax.Array:
        # Parts may be as large as their sum, so float16 might not hold `world` times as much.
        wide = jnp.float32 if x.dtype == jnp.float16 else x.dtype
        return _compat.own(x, names).astype(wide) * world

    def local(updates: Pytree, state: SyncState) -> tuple[Pytree, SyncState]:
        pairs = zip(jax.tree.leaves(updates), parts, strict=True)
        # What is reduced already counts as a gradient that all ranks share.
        own = [times_world(x) if part else _compat.vary_over(x, everywhere) for x, part in pairs]
        means, after = step(jax.tree.unflatten(treedef, own), state, tuple(cuts))
        return jax.tree.map(lambda y, x: as_gradient(y, x.dtype), means, updates), after

    return jax.shard_map(
        local,
        in_specs=(jax.tree.unflatten(treedef, before), kept),
        out_specs=(jax.tree.unflatten(treedef, after), kept),
    )(jax.tree.unflatten(treedef, leaves), state)


def require_parts(caller: str, names: tuple[str, ...], updates: Pytree, policy: Any) -> None:
    """Raises ValueError if JAX has summed a gradient that the policy would compress."""
    mesh = jax.sharding.get_abstract_mesh()
    if math.prod(mesh.shape[n] for n in names) == 1:
        return
    known, leaves = leaves_of(updates), jax.tree.leaves(updates)
    for i in sorted(lossy_leaves(caller, updates, policy)):
        where = operand_of(caller, known[i].path)
        spec = _compat.explicit_spec(where, leaves[i])
        cut = Cut.of(spec, leaves[i].ndim)
        reduced = not spec.unreduced and not {*cut.names} & {*names}
        if reduced and not _compat.is_filled(leaves[i], names):
            raise ValueError(
                f"{where} is reduced already: JAX sums the gradients of parameters that are "
                f"replicated over {names}. Differentiate at cgx_jax.reduced(params, axis_name, "
                "policy), with the policy of this call."
            )


def is_outside(names: tuple[str, ...]) -> bool:
    """Whether the mesh of `jax.set_mesh` has all of these axes, and none of them is bound here."""
    mesh = jax.sharding.get_abstract_mesh()
    return all(n in mesh.axis_names and n not in mesh.manual_axes for n in names)
