"""Parameters that are sharded: over other axes of the mesh, and over that of the reduction."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from cgx_jax._types import Pytree
from cgx_jax.leaves import path_of, with_paths
from cgx_jax.plain_jit.arguments import (
    CALLER,
    Argument,
    Place,
    axes_of,
    is_nnx,
    known_spec,
    line,
    nnx,
    shown,
    without,
)
from cgx_jax.plain_jit.split import Ranks
from cgx_jax.transforms.inner_axes import check_spec, is_function, on_shards, shards_of

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
    def of(
        cls,
        arguments: Sequence[Argument],
        arrays: Sequence[jax.Array],
        places: Sequence[Place],
        ranks: Ranks,
        specs: Pytree,
        *,
        single: bool,
    ) -> Shards:
        """Takes each spec from the option `specs`, from NNX metadata or from the array.

        Unless `single`, `specs` has an entry per differentiated argument, if it is no function.
        """
        others = frozenset(ranks.mesh.axis_names) - set(ranks.names)
        found: list[PartitionSpec] = []
        wanted = [number for number, argument in enumerate(arguments) if argument.wanted]
        asks = is_function(specs)
        each = [specs] * len(wanted) if single or asks or specs is None else specs
        if not isinstance(each, (tuple, list)) or len(each) != len(wanted):
            raise ValueError(
                f"{CALLER}: specs={specs!r} must be a tuple with one entry for each of the "
                f"{len(wanted)} arguments that argnums names, or a function of a leaf's path."
            )
        for order, number in enumerate(wanted):
            own = [i for i, p in enumerate(places) if p.argument == number]
            if asks:
                lead = "" if single else f"{order}/"
                entries = _asked(specs, arguments[number], lead, [places[i] for i in own])
            else:
                entries = _entries(arguments[number], each[order], len(own))
            for i, entry in zip(own, entries, strict=True):
                if places[i].trained:
                    found.append(_spec(arrays[i], places[i], entry, ranks))
        cut = tuple(ranks.dimension(spec) if ranks.world > 1 else None for spec in found)
        found = [without(spec, ranks.names) for spec in found]
        return cls(others, tuple(found) if others else (), cut)

    def require_whole(self) -> None:
        """Raises ValueError if a parameter is cut over the axis of the reduction."""
        if any(d is not None for d in self.dimensions):
            raise ValueError(
                f"{CALLER}: parameters that are sharded over the data axis have no state: call the "
                "function itself in place of `apply`, without memory, precondition, an Adaptive "
                "policy or stochastic rounding. scatter_gradients keeps such a state, inside "
                "shard_map (docs/quickstart/fsdp.md)."
            )

    def reduce(
        self, function: Callable[..., tuple[Pytree, Pytree]], grads: Pytree, state: Pytree
    ) -> tuple[Pytree, Pytree]:
        """Returns `function(grads, state, cuts, dimensions)`, computed on each shard."""
        step = functools.partial(function, dimensions=self.dimensions)
        if not self.axes:
            return step(grads, state, None)
        return on_shards(CALLER, step, self.specs, grads, state)

    def local(self, ranks: Ranks, arrays: Sequence[jax.Array]) -> list[jax.ShapeDtypeStruct]:
        """Returns the shapes of the parameters' shards over the other axes."""
        specs = self.specs or [_REPLICATED] * len(arrays)
        return shards_of(list(arrays), specs, ranks.mesh)


def as_now(specs: Pytree) -> Pytree:
    """Returns `specs` with an array's sharding in the place of the array, which may be donated."""

    def placed(x: Any) -> Any:
        hidden = isinstance(x, jax.core.Tracer) or not isinstance(x, jax.Array)
        return x if hidden else x.sharding

    return jax.tree.map(placed, nnx().state(specs, nnx().Param) if is_nnx(specs) else specs)


def _asked(
    specs: Callable[[str], Any], argument: Argument, lead: str, places: Sequence[Place]
) -> list[Any]:
    """Returns what the function `specs` says of each array of a differentiated argument."""
    numbers = [n if place.trained else None for n, place in enumerate(places)]
    tree = with_paths(argument.parameters(numbers))
    paths = {n: f"{lead}{path_of(path)}".rstrip("/") for path, n in tree}
    entries = [specs(paths[n]) if n in paths else None for n in range(len(places))]
    for n, entry in enumerate(entries):
        if n in paths and entry is None:
            raise TypeError(
                f"{CALLER}: specs({paths[n]!r}) returned None; return a PartitionSpec, P() for a "
                "parameter that every device has whole."
            )
    return entries


def _entries(argument: Argument, given: Pytree, count: int) -> list[Any]:
    """Returns one spec or None per array of a differentiated argument."""
    if given is not None:
        entries = argument.broadcast(
            given, f"specs is no tree like argument {argument.name!r}, nor a prefix of it"
        )
    elif argument.graph is not None:
        tree = jax.tree.unflatten(argument.treedef, [is_leaf for is_leaf, _ in argument.leaves])
        known = argument.broadcast(nnx().get_partition_spec(tree[0]), "its metadata")
        entries = [_REPLICATED if spec is None else spec for spec in known]
    else:
        entries = []
    return [*entries, *[None] * (count - len(entries))]


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


def _spec(x: jax.Array, place: Place, given: Any, ranks: Ranks) -> PartitionSpec:
    """Returns how a parameter is sharded: as given, or as is known."""
    mesh = ranks.mesh
    if isinstance(given, NamedSharding):
        sizes = {n: given.mesh.shape[n] for n in axes_of(given.spec)}
        if any(mesh.shape.get(n) != size for n, size in sizes.items()):
            raise ValueError(
                f"{CALLER}: specs has {line(given.spec)} for {place.path}, of a mesh with {sizes}, "
                f"but the mesh of the call has {dict(mesh.shape)}. Pass arrays of this mesh, or "
                "PartitionSpecs."
            )
        given = given.spec
    elif not isinstance(given, PartitionSpec | None):
        raise TypeError(
            f"{CALLER}: specs has {given!r} for {place.path}, which does not say how it is "
            "sharded. Pass PartitionSpecs, such as P(None, 'model') or P(), a function of the "
            "parameter's path that returns one, NamedShardings, or arrays from outside jit that "
            "have NamedShardings."
        )
    spec = given if given is not None and len(given) else known_spec(x, mesh)
    hidden = given is None and spec is None and isinstance(x, jax.core.Tracer)
    if hidden and mesh.size > ranks.world:
        raise ValueError(
            f"{CALLER}: the mesh has axes besides {ranks.axis!r}, and jit hides how {place.path} "
            "is sharded over them; pass specs=, a tree of PartitionSpecs like params, or the "
            "sharded params themselves from outside jit."
        )
    spec = spec or _REPLICATED
    check_spec(CALLER, f"{place.path} {shown(x)}", spec, x.shape, mesh)
    cut = ranks.dimension(spec)
    if cut is not None and ranks.world > 1:
        _check_cut(spec, cut, place, ranks)
    return spec
