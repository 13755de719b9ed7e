"""Applies units outside the codec call, for kernels without units: the same bytes, by XLA.

Each function computes what its `primitive` computes with units, by a call without units and
multiplications before and after it. Leaves with units become float32. Operands may have a leading
batch dimension, as those of the primitives.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.typing import DTypeLike

from cgx_jax._types import Shaped, Unit
from cgx_jax.kernels.reference import own_values
from cgx_jax.kernels.units import Units, each
from cgx_jax.kernels.wire import Layout

IN, OUT = 0, 1
LeavesUnits: TypeAlias = Units | Sequence[Unit] | None  # None: no leaf has any
Residuals: TypeAlias = list[jax.Array] | None  # one per leaf; None if not asked for
Shapes: TypeAlias = Sequence[tuple[tuple[int, ...], np.dtype]]  # of leaves, with their dtypes


def multiply(x: jax.Array, unit: Unit, way: int, *, batch: int = 1) -> jax.Array:
    """Multiplies `x` by its units for the `way` IN or OUT, in float32; no-op without units."""
    if unit is None:
        return x
    rows, columns = (u.reshape(batch, 2, u.size // (2 * batch))[:, way] for u in unit)
    factors = rows[:, :, None] * columns[:, None, :]
    return (x.astype(jnp.float32).reshape(factors.shape) * factors).reshape(x.shape)


def taken_in(leaves: Sequence[jax.Array], units: LeavesUnits, *, batch: int = 1) -> list[jax.Array]:
    """Returns leaves in their units; one without units stays as it is."""
    parts = zip(leaves, each(units, len(leaves)), strict=True)
    return [multiply(x, unit, IN, batch=batch) for x, unit in parts]


def all_decoded(
    values: Sequence[jax.Array], units: LeavesUnits, like: Sequence[Shaped]
) -> list[jax.Array]:
    """Returns `decoded` of each leaf, in the dtypes of `like`."""
    parts = zip(values, each(units, len(like)), like, strict=True)
    return [decoded(y, unit, x.dtype) for y, unit, x in parts]


def decoded(x: jax.Array, unit: Unit, dtype: DTypeLike, *, batch: int = 1) -> jax.Array:
    """Returns decoded values converted out of their units, in `dtype`.

    Finite values stay finite: they are clipped, since rounding may take a value past the largest
    number of its dtype. Non-finite values stay non-finite.
    """
    if unit is None:
        return x.astype(dtype)
    return narrowed(multiply(x, unit, OUT, batch=batch), dtype, jnp.isinf(x))


def narrowed(x: jax.Array, dtype: DTypeLike, infinite: jax.Array | None = None) -> jax.Array:
    """Returns `x` in `dtype`. Finite values stay finite; `infinite` says where `x` is not."""
    most = np.float32(jnp.finfo(dtype).max)
    infinite = jnp.isinf(x) if infinite is None else infinite
    return jnp.where(infinite, x, jnp.clip(x, -most, most)).astype(dtype)


def taken_out(
    lost: Residuals, units: LeavesUnits, leaves: Sequence[jax.Array], *, batch: int = 1
) -> Residuals:
    """Returns residuals converted out of the units, in the leaves' dtypes."""
    if lost is None:
        return None
    parts = zip(lost, each(units, len(leaves)), leaves, strict=True)
    return [multiply(e, unit, OUT, batch=batch).astype(x.dtype) for e, unit, x in parts]


def encode(
    primitive: Primitive, *operands: Any, layout: Layout, residual: bool, batch: int
) -> list[jax.Array]:
    """Does `encode_p` with units: multiplies leaves before the call and residuals after it."""
    key, rank, *leaves, _ = operands
    units = _units(operands, layout)
    inner = taken_in(leaves, units, batch=batch)
    plain = layout.without_units()
    payload, *lost = primitive.bind(key, rank, *inner, layout=plain, residual=residual, batch=batch)
    out = taken_out(lost, units, leaves, batch=batch) if residual else None
    return [payload, *(out or ())]


def reduce(
    primitive: Primitive, *operands: Any, layout: Layout, divisor: float, batch: int
) -> list[jax.Array]:
    """Does `reduce_p` with units: multiplies own values before, and the chunk's loss after."""
    key, rank, payload, *arrays, _ = operands
    leaves, residuals = arrays[: len(layout.slots)], arrays[len(layout.slots) :]
    units = _units(operands, layout)
    inner = taken_in(leaves, units, batch=batch)
    given = [e if units[i] is None else jnp.zeros_like(inner[i]) for i, e in enumerate(residuals)]
    plain = layout.without_units()
    chunk, *filled = primitive.bind(
        key, rank, payload, *inner, *given, layout=plain, divisor=divisor, batch=batch
    )
    out = [chunk]
    for i, (new, e) in enumerate(zip(filled, residuals, strict=True)):
        if units[i] is not None:
            own = _own(layout, i, rank, batch).reshape(e.shape)
            new = jnp.where(own, multiply(new, units[i], OUT, batch=batch).astype(e.dtype), e)
        out.append(new)
    return out


def decode(
    primitive: Primitive, payload: Any, factors: Any, *, layout: Layout, shapes: Shapes, batch: int
) -> list[jax.Array]:
    """Does `decode_p` with units: multiplies decoded values, then rounds them to their dtypes."""
    units = _units([factors], layout)
    wide = tuple(
        (shape, dtype if u is None else jnp.dtype(jnp.float32))
        for (shape, dtype), u in zip(shapes, units.places, strict=True)
    )
    out = primitive.bind(payload, layout=layout.without_units(), shapes=wide, batch=batch)
    return [
        decoded(x, u, dtype, batch=batch)
        for x, u, (_, dtype) in zip(out, units, shapes, strict=True)
    ]


def _units(operands: Sequence[jax.Array], layout: Layout) -> Units:
    """Returns the units of a call that has the operand with all of them."""
    return Units(operands[-1], tuple(f.units for f in layout.slots))


def _own(layout: Layout, slot: int, rank: jax.Array, batch: int) -> jax.Array:
    """Marks the values of a slot that lie in the chunk of `rank`, bool[batch, size]."""
    ranges = jnp.asarray(own_values(layout)[slot].astype(np.uint32))
    begin, end = ranges[rank.reshape(batch)].T
    index = jnp.arange(layout.slots[slot].size, dtype=jnp.uint32)
    return (begin[:, None] <= index) & (index < end[:, None])
