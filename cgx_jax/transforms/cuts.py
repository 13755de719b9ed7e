"""Leaves that are cut into shards: which part of their rows and columns a device has."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from cgx_jax import _compat
from cgx_jax._types import Unit
from cgx_jax.axes import axes_by_dimension, split
from cgx_jax.transforms.precondition import Squares

Shape = tuple[int, ...]


class Cut(NamedTuple):
    """How a leaf is cut: the mesh axes of each of its dimensions, () where it is whole."""

    axes: tuple[tuple[str, ...], ...]

    @classmethod
    def of(cls, spec: PartitionSpec, ndim: int) -> Cut:
        """Returns the cut that a spec says."""
        return cls(axes_by_dimension(spec, ndim))

    @property
    def names(self) -> tuple[str, ...]:
        """All axes that the leaf is cut over."""
        return tuple(name for axes in self.axes for name in axes)

    def whole(self, shape: Shape) -> Shape:
        """Returns the shape of the whole leaf, given that of a shard."""
        return tuple(n * _size(axes) for n, axes in zip(shape, self.axes, strict=True))

    def units(self, unit: Unit, whole: Shape) -> Unit:
        """Returns the units of this device's shard."""
        if unit is None:
            return None
        rows, columns = unit
        rows = rows.reshape(2, *(whole[:-1] if len(whole) > 1 else whole))
        for d, axes in enumerate(self.axes[: rows.ndim - 1]):
            rows = _part(rows, axes, d + 1)
        columns = _part(columns, self.axes[-1], 1) if len(whole) > 1 else columns
        return rows.reshape(2, -1), columns


def squares_of_shards(
    shards: Sequence[jax.Array], numbers: Sequence[int], cuts: Sequence[Cut]
) -> list[Squares]:
    """Returns whole leaves' sums of squares of rows and of columns, from the devices' shards.

    A device knows a part of the rows, a share of each column, or both. Leaves that are cut over the
    same axes share a sum over these.
    """
    flat: dict[tuple[str, ...], list[jax.Array]] = {}
    for i in numbers:
        cut, x = cuts[i], shards[i]
        squares = jnp.square(x.astype(jnp.float32))
        matrix = squares if x.ndim > 1 else squares.reshape(-1, 1)
        axes = cut.axes if x.ndim > 1 else (cut.axes[0] if x.ndim else (), ())
        last = matrix.ndim - 1
        own = matrix.sum(axis=last)
        for d in range(last):
            own = placed(own, axes[d], d)
        across = matrix.sum(axis=tuple(range(last)))
        flat.setdefault(cut.names, []).extend([own.reshape(-1), placed(across, axes[last], 0)])
    found: dict[tuple[str, ...], list[jax.Array]] = {}
    for names, parts in flat.items():
        joined = jnp.concatenate(parts)
        total = lax.psum(joined, names) if names else joined
        found[names] = split(total, [x.size for x in parts])
    vectors = [(n, found[cuts[i].names].pop(0)) for i in numbers for n in (2 * i, 2 * i + 1)]
    return [Squares(np.array([n]), x[None]) for n, x in vectors]


def _size(axes: tuple[str, ...]) -> int:
    return math.prod(lax.axis_size(name) for name in axes)


def _part(x: jax.Array, axes: tuple[str, ...], dimension: int) -> jax.Array:
    """Returns this device's part of `x` along a dimension."""
    if not axes:
        return x
    size = x.shape[dimension] // _size(axes)
    return lax.dynamic_slice_in_dim(x, lax.axis_index(axes) * size, size, dimension)


def placed(x: jax.Array, axes: tuple[str, ...], dimension: int) -> jax.Array:
    """Inverts `_part`, with zeros in the parts of other devices."""
    if not axes:
        return x
    size, start = x.shape[dimension], lax.axis_index(axes) * x.shape[dimension]
    shape = (*x.shape[:dimension], size * _size(axes), *x.shape[dimension + 1 :])
    varying = _compat.varying_axes(x) | _compat.varying_axes(start)
    here = _compat.vary_over(jnp.zeros(shape, x.dtype), varying)
    return lax.dynamic_update_slice_in_dim(here, x, start, dimension)
