"""How a step takes the units of its leaves from the moments, and what becomes of these."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from cgx_jax._types import Pytree
from cgx_jax.axes import after
from cgx_jax.kernels.nonfinite import all_finite
from cgx_jax.transforms.precondition import Moments, Scale, SecondMoment
from cgx_jax.transforms.shares import Whole

Shapes = Sequence[tuple[int, ...]]


def scales_of(
    precondition: SecondMoment | None, moments: Pytree, shapes: Shapes, compressed: Sequence[int]
) -> list[Scale | None]:
    """Returns each leaf's units, None for an exact leaf."""
    scales: list[Scale | None] = [None] * len(shapes)
    if precondition is None:
        return scales
    for i, scale in precondition.units(moments, shapes, compressed).items():
        scales[i] = scale
    return scales


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

    def update() -> tuple[Pytree, jax.Array]:
        new = precondition.update(old, share.shapes, share.squares(means), step)
        return (new.weights, new.tables), all_finite([*new.tables, *exact])

    before = (old.weights, old.tables)
    new, usable = lax.cond(precondition.due(step), update, lambda: (before, jnp.ones((), bool)))
    finite = axes.on_every_rank(jnp.asarray(finite) & usable, alike=True)
    weights, tables = jax.tree.map(functools.partial(jnp.where, finite), new, before)
    return old._replace(weights=weights, tables=tables), finite
