"""Names of types that the whole package uses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

import jax
import numpy as np
from jax.typing import ArrayLike

Pytree: TypeAlias = Any  # a tree of arrays, or of what stands for them
Key: TypeAlias = ArrayLike | None  # of jax.random, typed or raw; None where nothing is drawn
Array: TypeAlias = jax.Array | np.ndarray
Words: TypeAlias = Array  # what noise is drawn from, uint32[2]
Unit: TypeAlias = tuple[jax.Array, jax.Array] | None  # of a leaf's rows and of its columns
Json: TypeAlias = dict[str, Any]  # a JSON object
AxisName: TypeAlias = str | Sequence[str]  # one or more mesh axes
# A dimension of every leaf: an int, a tree (or a prefix of one) of ints, or a function of its path.
Dimensions: TypeAlias = int | Pytree | Callable[[str], int]


class Shaped(Protocol):
    """An array, or what only has its shape, size and dtype."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def size(self) -> int: ...

    @property
    def dtype(self) -> np.dtype: ...
