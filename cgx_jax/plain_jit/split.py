"""Which arrays of a call are split over the ranks, and which are whole on every rank."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as Spec

from cgx_jax.axes import axes_by_dimension, require_axes
from cgx_jax.plain_jit.arguments import (
    CALLER,
    Given,
    axes_of,
    is_key,
    known_spec,
    line,
    shown,
    without,
)


@dataclasses.dataclass(frozen=True)
class Ranks:
    """The mesh, the axes over which gradients are reduced, and their number of ranks."""

    mesh: Mesh | AbstractMesh
    names: tuple[str, ...]
    world: int

    @classmethod
    def of(cls, names: tuple[str, ...], mesh: Mesh | AbstractMesh) -> Ranks:
        """Raises ValueError if the mesh lacks an axis."""
        require_axes(CALLER, names, mesh)
        return cls(mesh, names, math.prod(mesh.shape[n] for n in names))

    @property
    def axis(self) -> str | tuple[str, ...]:
        """The axes in the form that collectives take."""
        return self.names[0] if len(self.names) == 1 else self.names

    def dimension(self, spec: Spec) -> int | None:
        """Returns the dimension that `spec` splits over one of the axes, or None."""
        axes = enumerate(axes_by_dimension(spec))
        return next((d for d, names in axes if set(names) & set(self.names)), None)

    def spec(self, dimension: int | None) -> Spec:
        """Returns the spec that splits only this dimension, over the axes; None splits nothing."""
        return Spec() if dimension is None else Spec(*(None,) * dimension, self.axis)

    def placed(self, x: jax.Array, dimension: int | None) -> jax.Array:
        """Reshards `x` over the axes if its type on an explicit mesh is split elsewhere."""
        types = dict(zip(self.mesh.axis_names, self.mesh.axis_types, strict=True))
        if jax.sharding.AxisType.Explicit not in {types[n] for n in self.names}:
            return x
        known, d = jax.typeof(x).sharding.spec, dimension
        entry = known[d] if d is not None and d < len(known) else None
        first = axes_of(Spec(entry))[: len(self.names)]
        elsewhere = self.dimension(Spec(*(None if i == d else e for i, e in enumerate(known))))
        if elsewhere is None and first == (() if d is None else self.names):
            return x
        entries = [*without(known, self.names), *(None,) * x.ndim][: x.ndim]
        if d is not None:
            entries[d] = (*self.names, *axes_of(Spec(entries[d])))
        return jax.reshard(x, NamedSharding(self.mesh, Spec(*entries)))


@dataclasses.dataclass(frozen=True)
class Split:
    """What happens to one array: split along `dimension`, or whole on every rank (None).

    With `fold`, the array is a key that is not split. The rank is folded into it, so that ranks
    draw different numbers. A rank has only a shard along the dimension `shard`, if that is not
    None, of a parameter that the loss sees whole.
    """

    dimension: int | None = None
    fold: bool = False
    shard: int | None = None

    @property
    def cut(self) -> int | None:
        """The dimension of which a rank has a part."""
        return self.dimension if self.shard is None else self.shard


def choose(
    ranks: Ranks,
    given: Given,
    in_specs: Mapping[Any, Any],
    shards: Mapping[int, int],
    is_raw_key: Callable[[int], bool],
    traces: Callable[[Sequence[Split]], bool],
) -> tuple[Split, ...]:
    """Returns one `Split` per array.

    `shards` has the dimensions of parameters that are cut over the axis. `is_raw_key` says whether
    the loss uses array i as a raw key, and `traces` whether it can be traced. Raises ValueError,
    with the line to write, for arrays of which nothing says whether they hold the batch.
    """
    arrays, places, named = given.arrays, given.places, _named(ranks, given, in_specs)
    found: list[Split | None] = []
    for i, (x, place) in enumerate(zip(arrays, places, strict=True)):
        spec = known_spec(x, ranks.mesh)
        dimension = None if spec is None else ranks.dimension(spec)
        whole = given.arguments[place.argument].whole
        if whole and ranks.world > 1 and dimension not in (None, shards.get(i)):
            raise ValueError(
                f"{CALLER}: {given.shown(i)} is sharded over the data axis {ranks.axis!r} "
                f"({spec}). Only parameters may be, those that are differentiated, as specs= says "
                "if it names them; anything else must be replicated: "
                "jax.device_put(state, NamedSharding(mesh, P()))."
            )
        if i in shards:
            found.append(Split(shard=shards[i]))
        elif (spec := named.get(i)) is not None:
            found.append(Split(ranks.dimension(spec)))
        elif dimension is not None:
            found.append(Split(dimension))
        elif not place.trained and (is_key(x, stacked=whole or i in named) or is_raw_key(i)):
            found.append(Split(fold=True))
        elif whole or x.ndim == 0:
            found.append(Split())
        else:
            found.append(None)
    sizes = {x.shape[0] for x, s in zip(arrays, found, strict=True) if s is None}
    for x, s in zip(arrays, found, strict=True):
        if s is not None and s.dimension is not None:
            sizes |= set(x.shape[s.dimension : s.dimension + 1])
    if None in found and len(sizes) > 1:
        _refuse(ranks, given, found, traces)
    splits = tuple(split or Split(0) for split in found)
    for i, split in enumerate(splits):
        _check_divides(ranks, given, i, split.dimension)
    return splits


def _named(ranks: Ranks, given: Given, in_specs: Mapping[Any, Any]) -> dict[int, Spec | None]:
    """Returns the entries of in_specs by the numbers of the arrays that it names."""
    specs: dict[int, Any] = {}
    rest = set(in_specs)
    for number, argument in enumerate(given.arguments):
        keys = [key for key in (argument.name, argument.position) if key in rest]
        if len(keys) > 1:
            raise ValueError(
                f"{CALLER}: in_specs has both {keys[0]!r} and {keys[1]}, which are the name and "
                "the position of one argument; leave out one of them."
            )
        if keys and not argument.wanted:
            rest -= {*keys}
            wrong = f"in_specs[{argument.name!r}] is not a prefix of that argument"
            entries = argument.broadcast(in_specs[keys[0]], wrong)
            specs.update(zip(given.numbers(number), entries, strict=True))
    if rest:
        names = [a.name for a in given.arguments if not a.wanted]
        raise ValueError(
            f"{CALLER}: in_specs has {sorted(map(str, rest))}, which is not an argument of the "
            f"loss to split; use the name or position of one of {names}. Pass shardings of "
            "parameters over other axes as specs=."
        )
    odd = next((s for s in specs.values() if not isinstance(s, Spec | None)), None)
    if odd is not None:
        raise ValueError(
            f"{CALLER}: in_specs has {odd!r}; use P({ranks.axis!r}) for an array with one row "
            "per example, and P() for one that every rank has whole."
        )
    return specs


def _refuse(
    ranks: Ranks,
    given: Given,
    found: Sequence[Split | None],
    traces: Callable[[Sequence[Split]], bool],
) -> None:
    """Raises ValueError with an in_specs that splits the arrays of the likeliest length.

    That is one of which the ranks can have equal parts, and which most arguments have. Of several,
    it is that of the last argument: the batch comes after frozen parameters. If the loss cannot be
    traced so, arguments that also have other lengths may be frozen parameters.
    """
    arrays, places = given.arrays, given.places
    # What is known to be split elsewhere than along its rows may be so by mistake.
    open_ = [i for i, split in enumerate(found) if split is None or split.dimension]

    known = [None if split is None else split.dimension for split in found]
    unknown = [i for i in open_ if found[i] is None]
    unknown = [i for i in unknown if not is_key(arrays[i], stacked=True)] or unknown
    lengths = dict.fromkeys((places[i].argument, arrays[i].shape[0]) for i in unknown)
    arguments_of = Counter(n for _, n in lengths)
    last = {n: number for number, n in lengths}
    size = max(last, key=lambda n: (n > 0 and n % ranks.world == 0, arguments_of[n], last[n]))
    owned = {n: given.numbers(n) for n in dict.fromkeys(places[i].argument for i in open_)}
    specs = {
        i: ranks.spec(0 if arrays[i].shape[:1] == (size,) else known[i])
        for own in owned.values()
        for i in own
    }

    def fits(specs: Mapping[int, Spec]) -> bool:
        splits = [split or Split() for split in found]
        for i, spec in specs.items():
            splits[i] = Split(ranks.dimension(spec))
        return traces(splits)

    several = [x for x in owned.values() if {specs[i] for i in x} == {ranks.spec(0), Spec()}]
    if several:
        wholes = [], *([own] for own in several), several
        tried = (specs | {i: Spec() for own in whole for i in own} for whole in wholes)
        specs = next((x for x in tried if ranks.spec(0) in x.values() and fits(x)), specs)
    written = {}
    for number, own in owned.items():
        each = [line(specs[i]) for i in own]
        keys = [i for i in own if found[i] == Split(fold=True)]
        keys += [i for i in own if specs[i] == Spec() and is_key(arrays[i], stacked=True)]
        one = each[0] if len({specs[i] for i in own}) == 1 and not keys else None
        tree = [None if i in keys else text for i, text in zip(own, each, strict=True)]
        argument = given.arguments[number]
        written[argument.name] = one or argument.parameters(tree)
    listed = ", ".join(
        given.shown(i) + ("" if found[i] is None else f" split in dimension {known[i]}")
        for i in open_
    )
    raise ValueError(
        f"{CALLER}: which arrays hold the batch is not known, since these dimensions differ: "
        f"{listed}. Say which are split over {ranks.axis!r} and which every rank has whole, for "
        f"example in_specs={written}."
    )


def _check_divides(ranks: Ranks, given: Given, i: int, d: int | None) -> None:
    x, place, world = given.arrays[i], given.places[i], ranks.world
    if d is None:
        return
    name = place.path.partition("[")[0].partition(".")[0]
    if d < x.ndim and not isinstance(x.shape[d], int):
        raise ValueError(
            f"{CALLER}: {given.shown(i)} has a symbolic batch size; export the step with a "
            "number in its place, once for each batch size."
        )
    if d >= x.ndim or x.shape[d] % world:
        raise ValueError(
            f"{CALLER}: {place.path} has shape {shown(x)}; its dimension {d} is the batch and must "
            f"be a multiple of the {world} ranks of axis {ranks.axis!r}. Use a batch size that is "
            f"a multiple of {world}. If this array is not part of the batch: "
            f"in_specs={{{name!r}: P()}}."
        )
