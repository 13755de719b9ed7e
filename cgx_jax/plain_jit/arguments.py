"""A loss's arguments as flat lists of arrays, with everything else kept as static values."""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

CALLER = "value_and_grad"


@dataclasses.dataclass(frozen=True)
class Place:
    """One array of the call: its path for messages, and its role.

    `argument` is the number of its argument. `trained` arrays are differentiated. `state` arrays
    belong to a differentiated argument or an NNX object, and are replicated. A `key` is a single
    PRNG key.
    """

    path: str
    argument: int
    trained: bool = False
    state: bool = False
    key: bool = False

    @property
    def variable(self) -> str:
        """The name of the argument, or of the variable that the loss closes over."""
        return re.split(r"[\[.]", self.path, maxsplit=1)[0]

    @classmethod
    def of_variable(cls, path: str, number: int, x: Any) -> Place:
        """Returns the place of an array that the loss closes over."""
        return cls(path, number, key=_is_key(x, alone=True))


@dataclasses.dataclass(frozen=True)
class Argument:
    """One argument's structure: static, and hashable if its static values are.

    `wanted` says that the argument is differentiated. `leaves` has one entry per leaf of `treedef`:
    (True, None) for an array, and (False, value) for a static value. `graph` is the graph
    definition of an NNX object. The tree of a differentiated NNX object is (parameters, rest).
    """

    name: str
    position: int | None  # None for a keyword argument
    wanted: bool
    graph: Any
    treedef: Any
    leaves: tuple[tuple[bool, Any], ...]

    def build(self, arrays: Sequence[Any]) -> Any:
        """Builds the argument from its arrays; an NNX object comes back as a copy."""
        given = iter(arrays)
        values = [next(given) if is_array else value for is_array, value in self.leaves]
        tree = jax.tree.unflatten(self.treedef, values)
        return tree if self.graph is None else nnx().merge(self.graph, *tree, copy=True)

    def broadcast(self, specs: Any) -> list[Any]:
        """Expands a prefix tree of specs to one spec per array."""
        whole = jax.tree.unflatten(self.treedef, [is_leaf for is_leaf, _ in self.leaves])
        entries: list[Any] = []

        def extend(spec: Any, part: Any) -> None:
            entries.extend([spec] * sum(jax.tree.leaves(part)))

        is_spec = lambda s: s is None or isinstance(s, PartitionSpec)  # noqa: E731
        try:
            jax.tree.map(extend, specs, whole[0] if self.graph else whole, is_leaf=is_spec)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"{CALLER}: in_specs[{self.name!r}] is not a prefix of that argument: {error}"
            ) from None
        return entries

    def parameters(self, leaves: Sequence[Any]) -> Any:
        """Returns the tree of the differentiated part, from one entry per leaf."""
        tree = jax.tree.unflatten(self.treedef, leaves)
        return tree if self.graph is None else tree[0]

    def path(self, inner: Any) -> str:
        """Returns the path that a `Place` has, from a path in the tree that `rest` returns."""
        return self.name + _shown(inner)

    def rest(self, value: Any) -> Any:
        """Returns the undifferentiated part of the NNX object `value`, after the loss ran on it."""
        return nnx().split(value, *_filters(self.wanted))[-1]

    @classmethod
    def of(
        cls, value: Any, number: int, name: str, position: int | None, wanted: bool
    ) -> tuple[Argument, list[Any], list[Place]]:
        """Returns the structure of `value`, its arrays, and their places."""
        graph, tree = None, value
        if is_nnx(value):
            graph, *tree = nnx().split(value, *_filters(wanted))
        flat, treedef = jax.tree_util.tree_flatten_with_path(tree)
        leaves, arrays, places = [], [], []
        for path, x in flat:
            if wanted and isinstance(x, (float, complex)):
                x = jnp.asarray(x)
            if not is_array(x):
                leaves.append((False, x))
                continue
            leaves.append((True, None))
            inner = path[1:] if graph is not None else path
            trained = wanted and jnp.issubdtype(x.dtype, jnp.inexact)
            if graph is not None:
                trained = trained and path[0].idx == 0
            where = name + _shown(inner)
            state = wanted or graph is not None
            places.append(Place(where, number, trained, state, _is_key(x, alone=len(flat) == 1)))
            arrays.append(x)
        return cls(name, position, wanted, graph, treedef, tuple(leaves)), arrays, places


def _shown(path: Any) -> str:
    # NNX wraps each array in a variable.
    return jax.tree_util.keystr(path).removesuffix(".value")


def _filters(wanted: bool) -> tuple[Any, ...]:
    return (nnx().Param, ...) if wanted else (...,)


def nnx() -> Any:
    """Returns flax.nnx, which must already be imported if an NNX object exists."""
    return sys.modules["flax.nnx"]


def is_nnx(value: Any) -> bool:
    """Returns whether `value` is an NNX object (a module, Rngs), without importing Flax."""
    module = sys.modules.get("flax.nnx")
    return module is not None and isinstance(value, module.Pytree)


def is_array(x: Any) -> bool:
    """Returns whether `x` is an array or a tracer. Python numbers are not, and stay static."""
    return isinstance(x, (jax.Array, np.ndarray, np.generic))


def shown(x: Any) -> str:
    """Formats dtype and shape for messages."""
    return f"{x.dtype}[{','.join(map(str, x.shape))}]"


def _is_key(x: Any, *, alone: bool) -> bool:
    """Returns whether `x` is a typed key, or a raw one: uint32[2], `alone` in its tree."""
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return x.ndim == 0
    return alone and x.dtype == np.uint32 and x.shape == (2,)


def names_of(function: Callable[..., Any], count: int) -> list[str]:
    """Returns the names of the first `count` positional arguments."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    many = next((p.name for p in parameters if p.kind is p.VAR_POSITIONAL), "argument ")
    return [names[i] if i < len(names) else f"{many}{i - len(names)}" for i in range(count)]


def known_spec(x: Any, mesh: Any) -> PartitionSpec | None:
    """Returns how `x` is split if a concrete NamedSharding or an explicit type says so."""
    if isinstance(x, jax.core.Tracer):
        sharding = jax.typeof(x).sharding
        explicit = jax.sharding.AxisType.Explicit in sharding.mesh.axis_types
        return sharding.spec if explicit else None
    sharding = getattr(x, "sharding", None)
    if not isinstance(sharding, jax.sharding.NamedSharding):
        return None
    return sharding.spec if sharding.mesh.axis_names == mesh.axis_names else None
