"""What a rank gets of each leaf's mean, and how its gradients, units and residuals lie for that."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from cgx_jax._types import Unit
from cgx_jax.axes import Axes
from cgx_jax.kernels.units import Units
from cgx_jax.plan import Plan
from cgx_jax.reductions.reduce_scatter import encoded
from cgx_jax.route.route import Route
from cgx_jax.route.rows import rows_of, whole_of
from cgx_jax.transforms.cuts import Cut, Shape, placed, squares_of_shards
from cgx_jax.transforms.precondition import Squares, squares_of


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
