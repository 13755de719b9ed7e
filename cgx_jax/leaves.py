"""The leaves of a tree, with the paths that users know them by."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import numpy as np


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

    def __str__(self) -> str:
        return f"{self.path!r} {self.dtype}{list(self.shape)}"


def leaves_of(tree: Any) -> list[Leaf]:
    """Returns every leaf of `tree` (arrays, tracers or ShapeDtypeStructs)."""
    out = []
    for path, x in jax.tree_util.tree_flatten_with_path(tree)[0]:
        aval = jax.typeof(x) if not hasattr(x, "dtype") else x
        out.append(Leaf(_path(path), tuple(aval.shape), aval.dtype))
    return out


def is_bare(tree: Any) -> bool:
    """Whether `tree` is one array."""
    return bool(jax.tree_util.all_leaves([tree]))


def _path(path: Any) -> str:
    # Flax NNX wraps each array in an object with a `value`. Drop that name, so that the leaf is
    # "kernel" as in Linen.
    if path and getattr(path[-1], "name", None) == "value":
        path = path[:-1]
    return jax.tree_util.keystr(path, simple=True, separator="/")
