"""A loss's arguments as flat lists of arrays, with everything else kept as static values."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import operator
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from cgx_jax._types import Pytree, Shaped
from cgx_jax.axes import axes_by_dimension
from cgx_jax.leaves import expanded, with_paths
from cgx_jax.transforms.inner_axes import written

CALLER = "value_and_grad"


class Wanted(NamedTuple):
    """A differentiated argument: its position, and the NNX filter of a part; None is nnx.Param."""

    position: int
    part: Any = None

    @classmethod
    def of(cls, entry: Any) -> Wanted:
        """Returns what an entry of `argnums` names; raises TypeError for other objects."""
        module = sys.modules.get("flax.nnx")
        if module is not None and isinstance(entry, module.DiffState):
            return cls(operator.index(entry.argnum), entry.filter)
        return cls(operator.index(entry))


@dataclasses.dataclass(frozen=True)
class Place:
    """One array of the call: its path for messages, its argument, and whether it is trained."""

    path: str
    argument: int
    trained: bool


@dataclasses.dataclass(frozen=True)
class Argument:
    """One argument's structure: static, and hashable if its static values are.

    `wanted` says that the argument is differentiated. `leaves` has one entry per leaf of `treedef`:
    (True, None) for an array, and (False, value) for a static value. `graph` is the graph
    definition of an NNX object. The tree of a differentiated NNX object is (parameters, rest);
    `part` is the filter of its parameters, None if it has none.
    """

    name: str
    position: int | None  # None for a keyword argument
    wanted: bool
    graph: Any
    treedef: jax.tree_util.PyTreeDef
    leaves: tuple[tuple[bool, Any], ...]
    part: Any = None

    @property
    def whole(self) -> bool:
        """Whether every rank has all of it: it is differentiated, or an NNX object."""
        return self.wanted or self.graph is not None

    def build(self, arrays: Sequence[jax.Array]) -> Pytree:
        """Builds the argument from its arrays; an NNX object comes back as a copy."""
        given = iter(arrays)
        values = [next(given) if is_array else value for is_array, value in self.leaves]
        tree = jax.tree.unflatten(self.treedef, values)
        return tree if self.graph is None else nnx().merge(self.graph, *tree, copy=True)

    def broadcast(self, specs: Pytree, wrong: str) -> list[Any]:
        """Expands a prefix tree of specs to one per array; an error says `wrong` of another."""
        marks = jax.tree.unflatten(self.treedef, [is_array for is_array, _ in self.leaves])
        own = marks if self.graph is None else marks[0]
        expanded = broadcast(specs, own, wrong)
        marked = zip(expanded, jax.tree.leaves(own), strict=True)
        return [spec for spec, is_array in marked if is_array]

    def parameters(self, leaves: Iterable[Any]) -> Pytree:
        """Returns the tree of the differentiated part, from one entry per array."""
        given = iter(leaves)
        values = [next(given) if is_array else None for is_array, _ in self.leaves]
        tree = jax.tree.unflatten(self.treedef, values)
        return tree if self.graph is None else tree[0]

    def rest(self, value: Any) -> Pytree:
        """Returns the undifferentiated part of the NNX object `value`, after the loss ran on it."""
        return nnx().split(value, *_filters(self.part))[-1]

    @classmethod
    def of(
        cls, value: Any, number: int, name: str, position: int | None, wanted: Wanted | None
    ) -> tuple[Argument, list[Any], list[Place]]:
        """Returns the structure of `value`, its arrays, and their places."""
        graph, tree, part = None, value, None if wanted is None else wanted.part
        if is_nnx(value):
            if wanted is not None and part is None:
                part = nnx().Param
            graph, *tree = nnx().split(value, *_filters(part))
        elif part is not None:
            raise TypeError(
                f"{CALLER}: argnums has a DiffState for {name}, which is not an NNX object; pass "
                "its position."
            )
        leaves, arrays, places = [], [], []
        for path, x in with_paths(tree):
            if wanted is not None and isinstance(x, (float, complex)):
                x = jnp.asarray(x)
            if not is_array(x):
                leaves.append((False, x))
                continue
            leaves.append((True, None))
            where = name + jax.tree_util.keystr(path[1:] if graph is not None else path)
            trained = wanted is not None and jnp.issubdtype(x.dtype, jnp.inexact)
            if graph is not None:
                trained = trained and path[0].idx == 0
            if trained and jnp.issubdtype(x.dtype, jnp.complexfloating):
                raise TypeError(
                    f"{CALLER}: {where} {shown(x)} is complex, which this call does not take; "
                    "pass its real and imaginary parts, and join them in the loss with "
                    "jax.lax.complex, or use cgx_jax.sync_gradients in shard_map."
                )
            places.append(Place(where, number, trained))
            arrays.append(x)
        treedef = jax.tree.structure(tree)
        made = cls(name, position, wanted is not None, graph, treedef, tuple(leaves), part)
        return made, arrays, places


class Given(NamedTuple):
    """A call's arguments, and all their arrays with their places.

    `single` says that argnums is one position, and no sequence.
    """

    arguments: tuple[Argument, ...]
    arrays: list[Any]
    places: list[Place]
    single: bool

    @classmethod
    def of(cls, entries: Iterable[tuple[Any, ...]], single: bool) -> Given:
        """Takes apart values, each with its name, its position and what is wanted of it."""
        made = [Argument.of(x, number, *rest) for number, (x, *rest) in enumerate(entries)]
        return cls(
            tuple(argument for argument, _, _ in made),
            [x for _, arrays, _ in made for x in arrays],
            [place for _, _, places in made for place in places],
            single,
        )

    @property
    def trained(self) -> list[int]:
        """The numbers of the arrays that are differentiated."""
        return [i for i, place in enumerate(self.places) if place.trained]

    def numbers(self, argument: int) -> list[int]:
        """Returns the numbers of an argument's arrays."""
        return [i for i, place in enumerate(self.places) if place.argument == argument]

    def shown(self, i: int) -> str:
        """Names an array in messages."""
        return f"{self.places[i].path} {shown(self.arrays[i])}"

    def parameters(self, values: Iterable[Any]) -> Pytree:
        """Returns the tree of what is differentiated, from one value per trained array."""
        by_number = dict(zip(self.trained, values, strict=True))
        found = [
            argument.parameters(map(by_number.get, self.numbers(n)))
            for n, argument in enumerate(self.arguments)
            if argument.wanted
        ]
        return found[0] if self.single else tuple(found)


def broadcast(prefix: Pytree, tree: Pytree, where: str) -> list[Any]:
    """Expands a prefix tree of specs to one entry per leaf of `tree`."""
    try:
        return expanded(prefix, tree, lambda s: s is None or isinstance(s, (str, PartitionSpec)))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{CALLER}: {where}: {error}") from None


class Line(str):
    """Text that is printed as it is, in any container."""

    __repr__ = str.__str__


def line(spec: Any) -> Line:
    """Returns a spec as the user would write it."""
    if not isinstance(spec, PartitionSpec):
        return Line(repr(spec).replace("'", '"'))
    return Line(written(spec))


def _filters(part: Any) -> tuple[Any, ...]:
    """Returns the filters that split an NNX object into (parameters, rest), or into the rest."""
    return (...,) if part is None else (part, ...)


def nnx() -> ModuleType:
    """Returns flax.nnx, which must already be imported if an NNX object exists."""
    return sys.modules["flax.nnx"]


def is_nnx(value: object) -> bool:
    """Returns whether `value` is an NNX object (a module, Rngs), without importing Flax."""
    module = sys.modules.get("flax.nnx")
    return module is not None and isinstance(value, module.Pytree)


def is_array(x: object) -> bool:
    """Returns whether `x` is an array or a tracer. Python numbers are not, and stay static."""
    return isinstance(x, (jax.Array, np.ndarray, np.generic))


def is_key(x: Any, *, stacked: bool = False) -> bool:
    """Returns whether `x` is one typed PRNG key, or an array of them if `stacked`."""
    return bool(jnp.issubdtype(x.dtype, jax.dtypes.prng_key)) and (stacked or x.ndim == 0)


def shown(x: Shaped) -> str:
    """Formats dtype and shape for messages."""
    return f"{x.dtype}[{','.join(map(str, x.shape))}]"


def argument_names(function: Callable[..., Pytree], count: int) -> list[str]:
    """Returns the names of the first `count` positional arguments."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    many = next((p.name for p in parameters if p.kind is p.VAR_POSITIONAL), "argument ")
    return [names[i] if i < len(names) else f"{many}{i - len(names)}" for i in range(count)]


def variable_of(function: Any, x: Any) -> str:
    """Returns the variable of an enclosing function that holds the array `x`, for messages."""
    cells = zip(
        getattr(getattr(function, "__code__", None), "co_freevars", ()),
        getattr(function, "__closure__", None) or (),
        strict=False,
    )
    for name, cell in cells:
        try:
            leaves = with_paths(cell.cell_contents)
        except ValueError:  # an empty cell
            continue
        for path, leaf in leaves:
            if leaf is x:
                return f"{name}{jax.tree_util.keystr(path)} "
    return ""


def known_spec(x: Any, mesh: Mesh | AbstractMesh) -> PartitionSpec | None:
    """Returns how `x` is split if a concrete NamedSharding or an explicit type says so."""
    if isinstance(x, jax.core.Tracer):
        return typed_spec(x)
    sharding = getattr(x, "sharding", None)
    if not isinstance(sharding, jax.sharding.NamedSharding):
        return None
    return sharding.spec if sharding.mesh.axis_names == mesh.axis_names else None


def typed_spec(x: Any) -> PartitionSpec | None:
    """Returns how `x` is split if its type on an explicit mesh says so."""
    sharding = jax.typeof(x).sharding
    explicit = jax.sharding.AxisType.Explicit in sharding.mesh.axis_types
    return sharding.spec if explicit else None


def without(spec: PartitionSpec, axes: Collection[str]) -> PartitionSpec:
    """Returns `spec` without these mesh axes."""
    kept = (tuple(n for n in names if n not in axes) for names in axes_by_dimension(spec))
    return spec.update(partitions=tuple(kept))


def axes_of(spec: PartitionSpec) -> tuple[Any, ...]:
    """Returns the mesh axes that `spec` names."""
    return tuple(itertools.chain.from_iterable(axes_by_dimension(spec)))
