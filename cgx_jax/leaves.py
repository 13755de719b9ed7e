"""The leaves of a tree, with the paths that users know them by."""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Callable
from typing import Any, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from cgx_jax._types import Dimensions, Pytree

SCALARS = (bool, int, float, complex, np.generic)


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One leaf of a tree: its path ("layer/kernel"), local shape and dtype."""

    path: str
    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize

    @property
    def sum_bytes(self) -> int:
        """The bytes that travel where the leaf is summed exactly."""
        return self.size * sum_dtype(self.dtype).itemsize

    def __str__(self) -> str:
        return f"{self.path!r} {self.dtype}{list(self.shape)}"


def sum_dtype(dtype: DTypeLike) -> np.dtype:
    """Returns the dtype in which exact sums run: narrower numbers are widened to 32 bits.

    Sums of float16 may overflow where the mean does not, and sums of bfloat16 round at every rank.
    """
    dtype = np.dtype(dtype)
    if dtype == np.bool_ or (jnp.issubdtype(dtype, jnp.integer) and dtype.itemsize < 4):
        return np.dtype(np.int32)
    if jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4:
        return np.dtype(np.float32)
    return dtype


def leaves_of(tree: Pytree, caller: str = "cgx_jax") -> list[Leaf]:
    """Returns every leaf of `tree` (arrays, tracers or ShapeDtypeStructs).

    Raises TypeError for anything else, and for the gradients that JAX gives integers.
    """
    out = []
    for path, x in with_paths(tree):
        if not hasattr(x, "dtype") and not isinstance(x, SCALARS):
            raise TypeError(
                f"{operand_of(caller, path_of(path))} is {x!r}, which is no array; take it out "
                "of the tree, as equinox.filter(tree, equinox.is_inexact_array) does."
            )
        aval = jax.typeof(x) if not hasattr(x, "dtype") else x
        if aval.dtype == jax.dtypes.float0:
            raise TypeError(
                f"{operand_of(caller, path_of(path))} is the gradient of an integer (float0); "
                "differentiate the leaves that are trained, without those of integers."
            )
        out.append(Leaf(path_of(path), tuple(aval.shape), aval.dtype))
    return out


def is_bare(tree: Pytree) -> bool:
    """Whether `tree` is one array; a Python or NumPy scalar is not, since all ranks know it."""
    return bool(jax.tree_util.all_leaves([tree])) and not isinstance(tree, SCALARS)


def is_function(x: object) -> TypeGuard[Callable[..., Any]]:
    """Whether `x` is a function of paths, and no module of Equinox, which can be called too."""
    return callable(x) and bool(jax.tree_util.all_leaves([x]))


def operand_of(caller: str, path: str) -> str:
    """Returns how a sentence about a leaf begins."""
    return f"{caller}: leaf {path!r}" if path else f"{caller}: the operand"


def where_of(caller: str, path: str) -> str:
    """Returns how error messages name a leaf of a call."""
    return f"{caller}: leaf {path!r}" if path else caller


def path_of(path: Any) -> str:
    """Returns the name of a key path of `with_paths`: "layer/kernel"."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def with_paths(tree: Pytree) -> list[tuple[tuple[Any, ...], Any]]:
    """Returns the leaves of `tree` with their key paths, without the names of NNX's wrappers.

    Flax NNX wraps each array in a variable, as its `value`. Without that name, the leaf is "kernel"
    as in Linen.
    """
    found: list[tuple[tuple[Any, ...], Any]] = []
    for path, x in jax.tree_util.tree_leaves_with_path(tree, is_leaf=_is_variable):
        inner = jax.tree_util.tree_leaves_with_path(x) if _is_variable(x) else [((), x)]
        array = len(inner) == 1 and len(inner[0][0]) == 1
        found += [(path if array else (*path, *more), leaf) for more, leaf in inner]
    return found


def map_with_paths(f: Callable[..., Any], tree: Pytree, *others: Pytree) -> Pytree:
    """Returns f(path, leaf, ...) of each leaf of trees alike, with the paths of `with_paths`."""
    treedef: jax.tree_util.PyTreeDef = jax.tree.structure(tree)
    paths, leaves = zip(*with_paths(tree), strict=True) if treedef.num_leaves else ((), ())
    rest = map(treedef.flatten_up_to, others)
    return treedef.unflatten(map(f, paths, leaves, *rest))


def same_structure(a: Pytree, b: Pytree) -> bool:
    """Whether two trees have the same structure."""
    structure: Any = jax.tree.structure(a)
    return bool(structure == jax.tree.structure(b))


def _is_variable(x: object) -> bool:
    """Whether `x` is a variable of Flax NNX, without importing Flax."""
    nnx = sys.modules.get("flax.nnx")
    return nnx is not None and isinstance(x, nnx.Variable)


def dimensions_of(caller: str, argument: str, given: Dimensions, tree: Pytree) -> list[int]:
    """Returns a dimension for each leaf of `tree`; `given` is the value of an `argument`."""
    paths = [leaf.path for leaf in leaves_of(tree)]
    if is_function(given):
        found = [given(path) for path in paths]
    else:
        try:
            found = expanded(given, tree)
        except ValueError as error:
            ours = [path_of(path) for path, _ in with_paths(given)]
            reason = _difference(ours, paths) or str(error)
            raise ValueError(
                f"{caller}: {argument} does not fit the tree: {reason}. Pass an int for each leaf "
                "in a tree of the same structure, or one int for all leaves."
            ) from None
    for path, dimension in zip(paths, found, strict=True):
        if not isinstance(dimension, int | np.integer) or isinstance(dimension, bool):
            raise TypeError(
                f"{where_of(caller, path)}: {argument}={dimension!r} is not an int; pass one int "
                "for all leaves, a tree of ints, or a function from a leaf's path to an int."
            )
    return [int(dimension) for dimension in found]


def expanded(
    prefix: Pytree, tree: Pytree, is_leaf: Callable[[Any], bool] | None = None
) -> list[Any]:
    """Returns the entry of a prefix tree for each leaf of `tree`; raises ValueError if it is none.

    `is_leaf` is that of `jax.tree.map`.
    """
    treedef: jax.tree_util.PyTreeDef = jax.tree.structure(tree)
    return treedef.flatten_up_to(jax.tree.broadcast(prefix, tree, is_leaf))


def _difference(ours: list[str], paths: list[str]) -> str | None:
    """Returns how a tree of ints with `ours` paths is no prefix of one with these `paths`."""
    if missing := [p for p in paths if not any(_covers(own, p) for own in ours)]:
        return f"it has no int for leaf {missing[0]!r}"
    if unknown := [own for own in ours if not any(_covers(own, p) for p in paths)]:
        return f"it has an int for {unknown[0]!r}, which is no leaf"
    return None


def _covers(own: str, path: str) -> bool:
    return not own or f"{path}/".startswith(f"{own}/")
