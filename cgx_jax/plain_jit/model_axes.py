"""Parameters that are sharded: over other axes of the mesh, and over that of the reduction."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from cgx_jax import _compat
from cgx_jax._types import Pytree
from cgx_jax.leaves import is_function, path_of, with_paths
from cgx_jax.plain_jit.arguments import (
    CALLER,
    Argument,
    Given,
    Place,
    axes_of,
    is_nnx,
    known_spec,
    line,
    nnx,
    without,
)
from cgx_jax.plain_jit.split import Ranks
from cgx_jax.transforms.inner_axes import check_spec

_REPLICATED: Any = PartitionSpec()


@dataclasses.dataclass(frozen=True)
class Shards:
    """The other axes of the mesh, and one spec over them per differentiated array.

    `dimensions` has the one along which each of these arrays is cut over the axis of the
    reduction, or None.
    """

    axes: frozenset[str]
    specs: tuple[PartitionSpec, ...]
    dimensions: tuple[int | None, ...]

    @classmethod
    def of(cls, given: Given, ranks: Ranks, specs: Pytree) -> Shards:
        """Takes each spec from the option `specs`, from NNX metadata or from the array.

        If argnums is a sequence, `specs` has an entry for each of it, or is a function.
        """
        others = frozenset(ranks.mesh.axis_names) - set(ranks.names)
        wanted = [number for number, argument in enumerate(given.arguments) if argument.wanted]
        entries: dict[int, Any] = {}
        if is_function(specs):
            for path, i in with_paths(given.parameters(given.trained)):
                entries[i] = specs(path_of(path))
                if entries[i] is None:
                    raise TypeError(
                        f"{CALLER}: specs({path_of(path)!r}) returned None; return a "
                        "PartitionSpec, P() for a parameter that every device has whole."
                    )
        else:
            each = [specs] * len(wanted) if given.single or specs is None else specs
            if not isinstance(each, (tuple, list)) or len(each) != len(wanted):
                raise ValueError(
                    f"{CALLER}: specs={specs!r} must be a tuple with one entry for each of the "
                    f"{len(wanted)} arguments that argnums names, or a function of a leaf's path."
                )
            for number, entry in zip(wanted, each, strict=True):
                own = _entries(given.arguments[number], entry)
                entries.update(zip(given.numbers(number), own, strict=False))
        found = [_spec(given, i, entries.get(i), ranks) for i in given.trained]
        cut = tuple(ranks.dimension(spec) if ranks.world > 1 else None for spec in found)
        found = [without(spec, ranks.names) for spec in found]
        return cls(others, tuple(found) if others else (_REPLICATED,) * len(found), cut)

    def require_whole(self) -> None:
        """Raises ValueError if a parameter is cut over the axis of the reduction."""
        if any(d is not None for d in self.dimensions):
            raise ValueError(
                f"{CALLER}: parameters that are sharded over the data axis have no state: call the "
                "function itself in place of `apply`, without memory, precondition, an Adaptive "
                "policy or stochastic rounding. scatter_gradients keeps such a state, inside "
                "shard_map (docs/quickstart/fsdp.md)."
            )


def as_now(specs: Pytree) -> Pytree:
    """Returns `specs` with an array's sharding in the place of the array, which may be donated."""

    def placed(x: Any) -> Any:
        hidden = isinstance(x, jax.core.Tracer) or not isinstance(x, jax.Array)
        return x if hidden else x.sharding

    return jax.tree.map(placed, nnx().state(specs, nnx().Param) if is_nnx(specs) else specs)


def _entries(argument: Argument, given: Pytree) -> list[Any]:
    """Returns one spec or None per array of a differentiated argument; none if none is known."""
    if given is not None:
        wrong = f"specs is no tree like argument {argument.name!r}, nor a prefix of it"
        return argument.broadcast(given, wrong)
    if argument.graph is None:
        return []
    tree = jax.tree.unflatten(argument.treedef, [is_leaf for is_leaf, _ in argument.leaves])
    known = argument.broadcast(nnx().get_partition_spec(tree[0]), "its metadata")
    return [_REPLICATED if spec is None else spec for spec in known]


def _check_cut(spec: PartitionSpec, cut: int, place: Place, ranks: Ranks) -> None:
    """Raises ValueError for a parameter that is cut over the axis in a way that is not gathered."""
    what = f"{CALLER}: {place.path} is sharded over the data axis {ranks.axis!r} ({line(spec)})"
    if axes_of(PartitionSpec(spec[cut])) != ranks.names:
        raise ValueError(
            f"{what}; a dimension of it can be cut over {ranks.names}, in this order, and over no "
            "other axis. Cut other dimensions over the other axes, or name the slow axis alone as "
            "axis_name: XLA shards over the rest."
        )
    types = dict(zip(ranks.mesh.axis_names, ranks.mesh.axis_types, strict=True))
    if jax.sharding.AxisType.Explicit in {types[n] for n in ranks.names}:
        raise ValueError(
            f"{what}, which is explicit; use cgx_jax.reshard there, with backward= for the "
            "gradients (docs/quickstart/explicit.md)."
        )


def _spec(given: Given, i: int, entry: Any, ranks: Ranks) -> PartitionSpec:
    """Returns how a parameter is sharded: as its entry of specs says, or as is known."""
    mesh, x, place = ranks.mesh, given.arrays[i], given.places[i]
    if isinstance(entry, NamedSharding):
        sizes = {n: entry.mesh.shape[n] for n in axes_of(entry.spec)}
        if any(mesh.shape.get(n) != size for n, size in sizes.items()):
            raise ValueError(
                f"{CALLER}: specs has {line(entry.spec)} for {place.path}, of a mesh with {sizes}, "
                f"but the mesh of the call has {dict(mesh.shape)}. Pass arrays of this mesh, or "
                "PartitionSpecs."
            )
        entry = entry.spec
    elif not isinstance(entry, PartitionSpec | None):
        raise TypeError(
            f"{CALLER}: specs has {entry!r} for {place.path}, which does not say how it is "
            "sharded. Pass PartitionSpecs, such as P(None, 'model') or P(), a function of the "
            "parameter's path that returns one, NamedShardings, or arrays from outside jit that "
            "have NamedShardings."
        )
    spec = entry if entry is not None and len(entry) else known_spec(x, mesh)
    explicit = set() if spec is None else _compat.explicit_axes(mesh)
    unseen = {n for n, size in mesh.shape.items() if size > 1} - {*ranks.names} - explicit
    if entry is None and unseen and isinstance(x, jax.core.Tracer):
        raise ValueError(
            f"{CALLER}: the mesh has axes besides {ranks.axis!r}, and jit hides how {place.path} "
            "is sharded over them; pass specs=, a tree of PartitionSpecs like params, or the "
            "sharded params themselves from outside jit."
        )
    spec = spec or _REPLICATED
    check_spec(CALLER, given.shown(i), spec, x.shape, mesh)
    cut = ranks.dimension(spec)
    if cut is not None and ranks.world > 1:
        _check_cut(spec, cut, place, ranks)
    return spec
