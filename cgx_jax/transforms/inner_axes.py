"""Gradients that are sharded over axes of the mesh besides that of the reduction."""

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
from cgx_jax.leaves import leaves_of, map_with_paths, path_of
from cgx_jax.transforms.checks import require_whole
from cgx_jax.transforms.own_rows import is_bound
from cgx_jax.transforms.shares import Cut
from cgx_jax.transforms.state import (
    InRates,
    SyncState,
    as_memory,
    is_any_tree,
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


def is_function(specs: Pytree) -> bool:
    """Whether `specs` is a function of paths, and no module of Equinox, which can be called too."""
    return callable(specs) and bool(jax.tree_util.all_leaves([specs]))


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
    sizes = (jax.sharding.get_abstract_mesh() if mesh is None else mesh).shape
    leaves, treedef = jax.tree.flatten(tree)
    shards = []
    for spec, x in zip(specs, leaves, strict=True):
        entries = zip(x.shape, axes_by_dimension(spec, x.ndim), strict=True)
        shape = [n // math.prod(sizes[name] for name in names) for n, names in entries]
        shards.append(jax.ShapeDtypeStruct(shape, x.dtype))
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
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))

    def of_type(kind: AxisType, spec: PartitionSpec, ndim: int) -> NamedSharding:
        entries = axes_by_dimension(spec, ndim)
        kept = [tuple(n for n in names if types[n] == kind) for names in entries]
        return NamedSharding(mesh, PartitionSpec(*kept))

    def place(path: Any, x: jax.Array, row: PartitionSpec) -> jax.Array:
        name, shape = f"/{path_of(path)}", x.shape[len(row) :]
        own = (s for end, like, s in known if like == shape and name.endswith(end))
        spec = PartitionSpec(*row, *next(own, _REPLICATED))
        if AxisType.Explicit in types.values():
            x = jax.reshard(x, of_type(AxisType.Explicit, spec, x.ndim))
        if AxisType.Auto in types.values():
            x = lax.with_sharding_constraint(x, of_type(AxisType.Auto, spec, x.ndim))
        return x

    axis: Any = names if len(names) > 1 else names[0]
    return map_with_paths(place, state, state_specs(state, axis))


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
        updates, state = jax.tree.map(jax.reshard, (updates, state), (like, kept))
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
