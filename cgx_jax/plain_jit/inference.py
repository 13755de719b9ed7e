"""Decides which arrays of a call are split over the axis, and which are whole on every rank."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from cgx_jax.plain_jit.arguments import CALLER, Argument, Place, known_spec, shown

Spec = PartitionSpec


@dataclasses.dataclass(frozen=True)
class Ranks:
    """The mesh, the axes over which gradients are reduced, and their number of ranks."""

    mesh: Any
    names: tuple[str, ...]
    world: int

    @property
    def axis(self) -> Any:
        """The axes in the form that collectives take."""
        return self.names[0] if len(self.names) == 1 else self.names

    def dimension(self, spec: Spec) -> int | None:
        """Returns the dimension that `spec` splits over one of the axes, or None."""
        for d, entry in enumerate(spec):
            if set(entry if isinstance(entry, tuple) else (entry,)) & set(self.names):
                return d
        return None

    def split(self, dimension: int | None) -> Spec:
        """Returns the spec that splits only this dimension, over the axes; None splits nothing."""
        return Spec() if dimension is None else Spec(*(None,) * dimension, self.axis)

    def placed(self, x: Any, spec: Spec) -> Any:
        """Reshards `x` over the axes if its type on an explicit mesh differs from `spec` there."""
        types = dict(zip(self.mesh.axis_names, self.mesh.axis_types, strict=True))
        if jax.sharding.AxisType.Explicit not in {types[n] for n in self.names}:
            return x
        known = jax.typeof(x).sharding.spec
        if self.dimension(known) == self.dimension(spec):
            return x
        d = self.dimension(spec)
        entries = [*known, *(None,) * (x.ndim - len(known))]
        wanted = Spec(*(self.axis if i == d else e for i, e in enumerate(entries)))
        return jax.reshard(x, NamedSharding(self.mesh, wanted))


@dataclasses.dataclass(frozen=True)
class Split:
    """What happens to one array: split along `dimension`, or whole on every rank (None).

    With `fold`, the array is a key that is not split. The rank is folded into it, so that ranks
    draw different numbers.
    """

    dimension: int | None = None
    fold: bool = False


@dataclasses.dataclass(frozen=True)
class _Inference:
    ranks: Ranks
    arguments: Sequence[Argument]
    arrays: Sequence[Any]
    places: Sequence[Place]

    def run(self, in_specs: Mapping[Any, Any]) -> list[Split]:
        everything = range(len(self.arrays))
        given = self._given(in_specs)
        known = [self._known(i, given[i]) for i in everything]
        unknown = [i for i in everything if known[i] is None]
        size = self._batch_size(known, unknown) if unknown else 0
        splits = [split or self._inferred(i, size) for i, split in enumerate(known)]
        for i in everything:
            self._check_divides(i, splits[i])
        return splits

    def _given(self, in_specs: Mapping[Any, Any]) -> list[Spec | None]:
        specs: list[Spec | None] = []
        rest = set(in_specs)
        for number, argument in enumerate(self.arguments):
            count = sum(p.argument == number for p in self.places)
            keys = {argument.name, argument.position} & rest
            if not keys or argument.wanted:
                specs += [None] * count
                continue
            rest -= keys
            specs += argument.broadcast(in_specs[keys.pop()])
        for place in self.places[len(specs) :]:
            rest.discard(place.variable)
            specs.append(in_specs.get(place.variable))
        if rest:
            names = [a.name for a in self.arguments if not a.wanted]
            raise ValueError(
                f"{CALLER}: in_specs has {sorted(map(str, rest))}, which is not an argument of "
                f"the loss to split; use the name or position of one of {names}. Pass shardings of "
                "parameters over other axes as specs=."
            )
        return specs

    def _known(self, i: int, given: Spec | None) -> Split | None:
        """Returns the split where it is certain (given, state, a key, a scalar, known sharding)."""
        x, place, ranks = self.arrays[i], self.places[i], self.ranks
        if given is not None:
            return Split(ranks.dimension(given))
        spec = known_spec(x, ranks.mesh)
        dimension = None if spec is None else ranks.dimension(spec)
        if place.state:
            if dimension is not None and ranks.world > 1:
                raise ValueError(
                    f"{CALLER}: {place.path} {shown(x)} is sharded over the data axis "
                    f"{ranks.axis!r} ({spec}); parameters and state must be replicated over it: "
                    "jax.device_put(params, NamedSharding(mesh, P())). For fully sharded training "
                    "use psum_scatter_compressed and all_gather_compressed."
                )
            return Split(fold=place.key and not place.trained)
        if dimension is not None:
            return Split(dimension)
        if place.key:
            self._check_raw_key(i)
            return Split(fold=True)
        return Split() if x.ndim == 0 else None

    def _check_raw_key(self, i: int) -> None:
        """Raises ValueError if a raw key may be a batch of two: another array has two rows."""
        x = self.arrays[i]
        others = (y for y, p in zip(self.arrays, self.places, strict=True) if not p.state)
        if x.ndim and any(y is not x and y.ndim and y.shape[0] == 2 for y in others):
            raise ValueError(
                f"{CALLER}: {self.places[i].path} {shown(x)} is either a raw key or a batch of "
                f"two; pass a typed key, jax.random.key(n), or {self._remedy(i)}."
            )

    def _batch_size(self, known: Sequence[Split | None], unknown: Sequence[int]) -> int:
        """Returns the batch size of a known split, or of the first argument after trained ones."""
        for x, split in zip(self.arrays, known, strict=True):
            if split is not None and split.dimension is not None:
                return int(x.shape[split.dimension])
        candidates = [i for i in unknown if not self._like_parameters(i)] or unknown
        first = self.places[candidates[0]].argument
        members = [i for i in candidates if self.places[i].argument == first]
        sizes = {self.arrays[i].shape[0] for i in members}
        if len(sizes) != 1:
            listed = ", ".join(f"{self.places[i].path} {shown(self.arrays[i])}" for i in members)
            raise ValueError(
                f"{CALLER}: which arrays hold the batch is ambiguous, since their first dimensions "
                f"differ: {listed}. Say which are split over {self.ranks.axis!r} and which every "
                f"rank has whole: {self._remedy(members[0])}."
            )
        return int(sizes.pop())

    def _inferred(self, i: int, size: int) -> Split:
        x, place = self.arrays[i], self.places[i]
        if self._like_parameters(i):
            return Split()
        replicated = known_spec(x, self.ranks.mesh) is not None
        if x.shape[0] == size:
            if replicated and not isinstance(x, jax.core.Tracer):
                raise ValueError(
                    f"{CALLER}: {place.path} {shown(x)} has the batch's first dimension, but is "
                    f"replicated over {self.ranks.axis!r}, so it may or may not be part of the "
                    f"batch. Shard it with jax.device_put, or say which: {self._remedy(i)}."
                )
            return Split(0)
        if replicated or place.argument == len(self.arguments):
            return Split()
        raise ValueError(
            f"{CALLER}: {place.path} {shown(x)} is neither a scalar nor a key, and its first "
            f"dimension is not the batch's {size}. Say whether it is split over "
            f"{self.ranks.axis!r} or whole on every rank: {self._remedy(i)}."
        )

    def _like_parameters(self, i: int) -> bool:
        """Returns whether an array is in a tree like that of a differentiated argument.

        Such a tree has the same shapes, like a teacher's parameters, or the same modules, like the
        statistics of Linen's BatchNorm.
        """
        place = self.places[i]
        if place.argument < len(self.arguments):
            own = self.arguments[place.argument]
            modules = self._modules(place.argument)
            wanted = (n for n, a in enumerate(self.arguments) if a.wanted)
            if "" not in modules and any(modules <= self._modules(n) for n in wanted):
                return True
            structures = [a.treedef for a in self.arguments if a.wanted]
            if own.treedef not in structures or len(own.leaves) < 2:
                return False
        mine = self._shapes(place.argument, place.variable)
        trained = (n for n, a in enumerate(self.arguments) if a.wanted)
        return len(mine) > 1 and any(mine == self._shapes(n) for n in trained)

    def _shapes(self, number: int, variable: str | None = None) -> list[tuple[int, ...]]:
        return [
            x.shape
            for x, p in zip(self.arrays, self.places, strict=True)
            if p.argument == number and variable in (None, p.variable)
        ]

    def _modules(self, number: int) -> set[str]:
        """Returns the paths of the nodes that hold an argument's arrays, "" for its root."""
        name = self.arguments[number].name
        paths = (p.path.removeprefix(name) for p in self.places if p.argument == number)
        return {path.rpartition("[")[0] for path in paths}

    def _remedy(self, i: int) -> str:
        name = self.places[i].variable
        return f"in_specs={{{name!r}: P({self.ranks.axis!r})}}, or P() for one that is whole"

    def _check_divides(self, i: int, split: Split) -> None:
        x, d, world = self.arrays[i], split.dimension, self.ranks.world
        if d is not None and (d >= x.ndim or x.shape[d] % world):
            raise ValueError(
                f"{CALLER}: {self.places[i].path} has shape {shown(x)}; its dimension {d} is the "
                f"batch and must be a multiple of the {world} ranks of axis {self.ranks.axis!r}. "
                f"Use a batch size that is a multiple of {world}. If this array is not part of the "
                f"batch: {self._remedy(i)}."
            )


def infer(
    ranks: Ranks,
    arguments: Sequence[Argument],
    arrays: Sequence[Any],
    places: Sequence[Place],
    in_specs: Mapping[Any, Any],
) -> list[Split]:
    """Returns one `Split` per array; raises ValueError, with the remedy, if one is ambiguous."""
    return _Inference(ranks, arguments, arrays, places).run(in_specs)
