"""What a rank gets of each leaf's mean, and how its gradients, units and residuals lie for that."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from cgx_jax import _compat
from cgx_jax._types import Pytree, Unit
from cgx_jax.axes import Axes, after, axes_by_dimension, split
from cgx_jax.kernels.nonfinite import all_finite
from cgx_jax.kernels.units import Units
from cgx_jax.plan import Plan
from cgx_jax.reductions.reduce_scatter import encoded
from cgx_jax.route.route import Route
from cgx_jax.route.rows import rows_of, whole_of
from cgx_jax.transforms.precondition import Moments, SecondMoment, Squares, squares_of

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


@dataclasses.dataclass(frozen=True)
class Whole:
    """The whole mean. `plan` has the leaves that the user knows, `taken` says how they travel.

    `cuts` say how these leaves are shards over other axes of the mesh, of leaves with `shapes`.
    """

    plan: Plan
    taken: Route
    shapes: Sequence[Shape]
    cuts: Sequence[Cut]

    alike: ClassVar[bool] = True  # all ranks hold the same means

    @property
    def axes(self) -> Axes:
        return self.taken.options.axes

    def sent(self, i: int, x: Any) -> Any:
        """Returns leaf `i` as the reduction takes it."""
        return x

    def units(self, units: Units) -> Units:
        """Returns the units of what is sent."""
        cut = [i for i, cut in enumerate(self.cuts) if cut.names]
        return units.replaced({i: self.cuts[i].units(units[i], self.shapes[i]) for i in cut})

    def residual(self, i: int, lost: jax.Array) -> jax.Array:
        """Inverts `sent`."""
        return lost

    def rounding(self, i: int, lost: jax.Array) -> jax.Array:
        """Returns this rank's residual for what rounding its means of leaf `i` has `lost`."""
        return lost

    def reached(self, i: int, mean: jax.Array) -> jax.Array:
        """Marks the values of leaf `i` that can have arrived, whatever its code took along."""
        return mean != 0

    def squares(self, means: Sequence[jax.Array]) -> list[Squares]:
        """Returns the squares of rows and columns of the whole means that travel compressed."""
        numbers = self.taken.compressed
        cut = [i for i in numbers if self.cuts[i].names]
        whole = squares_of({i: means[i] for i in numbers if not self.cuts[i].names})
        return whole + (squares_of_shards(means, cut, self.cuts) if cut else [])


@dataclasses.dataclass(frozen=True)
class Shards(Whole):
    """This rank's shard; `places` are the dimensions along which the leaves are cut."""

    places: Sequence[int]

    alike: ClassVar[bool] = False

    def sent(self, i: int, x: Any) -> Any:
        return rows_of(jnp.asarray(x), self.places[i], self.axes.world)

    def units(self, units: Units) -> Units:
        # Rows of a leaf that is cut along its first dimension keep their order. Otherwise each
        # value has a unit of its own, as one row of one column.
        def by_value(i: int, unit: Unit) -> Unit:
            if unit is None:
                return None
            rows, columns = unit
            factors = rows[:, :, None] * columns[:, None, :]
            shape, d, world = self.shapes[i], self.places[i], self.axes.world
            ways = [rows_of(way.reshape(shape), d, world).reshape(-1) for way in factors]
            return jnp.stack(ways), jnp.ones((2, 1), jnp.float32)

        return units.replaced({i: by_value(i, units[i]) for i, d in enumerate(self.places) if d})

    def residual(self, i: int, lost: jax.Array) -> jax.Array:
        return whole_of(lost, self.places[i])

    def rounding(self, i: int, lost: jax.Array) -> jax.Array:
        # Residuals are averaged over the ranks, and no other rank has this shard.
        return placed(lost * self.axes.world, self.axes.names, self.places[i])

    def reached(self, i: int, mean: jax.Array) -> jax.Array:
        # A rank's own values arrive in every step and are never late.
        shape, d = self.shapes[i], self.places[i]
        rows = encoded(self.axes, self.plan.compressors[i], 1)
        each = jnp.repeat(rows, shape[d] // self.axes.world)
        return each.reshape(*[1] * d, -1, *[1] * (len(shape) - 1 - d))

    def squares(self, means: Sequence[jax.Array]) -> list[Squares]:
        cuts = [
            Cut(tuple(self.axes.names if at == d else () for at in range(len(shape))))
            for shape, d in zip(self.shapes, self.places, strict=True)
        ]
        return squares_of_shards(means, self.taken.compressed, cuts)


class Scales(NamedTuple):
    """The units of the leaves, and how large their values usually are in them, f32[leaves]."""

    units: Units
    sizes: jax.Array


def scales_of(precondition: SecondMoment | None, moments: Pytree, share: Whole) -> Scales | None:
    """Returns the scales of the leaves that are compressed, None if there are none."""
    compressed = share.taken.compressed
    if precondition is None or not compressed:
        return None
    return Scales(precondition.units(moments, share.shapes, compressed), moments.sizes)


def moved(
    precondition: SecondMoment,
    old: Moments,
    share: Whole,
    means: Sequence[jax.Array],
    step: jax.Array,
    finite: Any,
) -> tuple[Moments, Any]:
    """Returns the moments after a step, changed if it is due and finite; and the new `finite`.

    If all ranks hold the means, a step that is due counts as finite only if all are.
    """
    compressed, axes = share.taken.compressed, share.axes
    exact = [x for i, x in enumerate(means) if i not in compressed and share.alike]
    if not share.alike or any(cut.names for cut in share.cuts):
        step = after(step, [finite])  # the squares are summed in a branch

    before = old._replace(lines=())
    # Exact leaves may be sharded over another axis of an explicit mesh, and moments may be those of
    # one of several workers.
    typed = [*exact, *jax.tree.leaves(before)]
    varying = frozenset[str]().union(*map(_compat.varying_axes, typed))
    fine = _compat.vary_over(jnp.ones((), bool), varying)

    def update() -> tuple[Moments, jax.Array]:
        new = precondition.update(before, share.shapes, share.squares(means), step)
        return new, all_finite([new.shares, new.spreads, *exact]) & fine

    new, usable = lax.cond(precondition.due(step), update, lambda: (before, fine))
    finite = axes.on_every_rank(jnp.asarray(finite) & usable, alike=True)
    new = jax.tree.map(functools.partial(jnp.where, finite), new, before)
    return new._replace(lines=old.lines), finite
