"""The units of a call's leaves: one array, and where those of each leaf lie in it.

A kernel takes the array as a single operand, however many leaves have units.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence

import jax
import jax.numpy as jnp

from cgx_jax._types import Unit
from cgx_jax.kernels.wire import UnitPlace

ALIGNED = 16  # factors: a kernel's vector, and a line of a cache


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=("factors",), meta_fields=("places",)
)
@dataclasses.dataclass(frozen=True, eq=False)
class Units:
    """What the values of leaves are multiplied by; some leaf has units.

    `factors` is f32[2, N], with a leading dimension in a batch. `places` has an entry per leaf,
    None for a leaf without units. A leaf of R * C values, row by row, has units (rows, columns) of
    f32[2, R] and f32[2, C]. Value (r, c) is multiplied by rows[0, r] * columns[0, c] before it is
    encoded. A decoded value is multiplied by rows[1, r] * columns[1, c].
    """

    factors: jax.Array
    places: tuple[UnitPlace | None, ...]

    @classmethod
    def of(cls, units: Iterable[Unit]) -> Units | None:
        """Returns the units (rows, columns) of leaves, None for a leaf without; None for none."""
        parts: list[jax.Array] = []
        places: list[UnitPlace | None] = []
        end = 0
        for unit in units:
            if unit is None:
                places.append(None)
                continue
            starts = []
            for x in unit:
                starts.append(end)
                parts.append(aligned(jnp.asarray(x)))
                end += parts[-1].shape[1]
            places.append(UnitPlace(unit[0].shape[1], unit[1].shape[1], *starts))
        return cls(jnp.concatenate(parts, axis=1), tuple(places)) if parts else None

    def __getitem__(self, leaf: int) -> Unit:
        place = self.places[leaf]
        if place is None:
            return None
        rows = self.factors[..., place.rows : place.rows + place.num_rows]
        return rows, self.factors[..., place.columns : place.columns + place.num_columns]

    def __iter__(self) -> Iterator[Unit]:
        return map(self.__getitem__, range(len(self.places)))

    def replaced(self, changed: Mapping[int, Unit]) -> Units:
        """Returns these units with other ones for some leaves, by number."""
        more = Units.of(changed.values())
        if more is None:
            return self
        places, start = dict(enumerate(self.places)), self.factors.shape[1]
        for leaf, place in zip(changed, more.places, strict=True):
            places[leaf] = None if place is None else place.moved(start)
        factors = jnp.concatenate([self.factors, more.factors], axis=1)
        return Units(factors, tuple(places.values()))


def aligned(x: jax.Array) -> jax.Array:
    """Pads the last axis to a multiple of `ALIGNED`."""
    rest = -x.shape[-1] % ALIGNED
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, rest)]) if rest else x


def chosen(units: Units | None, leaves: Sequence[int]) -> Units | None:
    """Returns the units of some leaves; None if none of them has any."""
    places = () if units is None else tuple(units.places[i] for i in leaves)
    if units is None or not any(places):
        return None
    return Units(units.factors, places)


def each(units: Units | Sequence[Unit] | None, count: int) -> Iterator[Unit]:
    """Yields each leaf's units; None means that no leaf has any."""
    return iter([None] * count if units is None else units)
