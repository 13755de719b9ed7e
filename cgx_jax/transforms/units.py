"""How a step takes the units of its leaves from the moments, and what becomes of these."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from cgx_jax._types import Pytree
from cgx_jax.axes import Axes
from cgx_jax.debug.nonfinite import all_finite
from cgx_jax.transforms.precondition import Moments, Scale, SecondMoment, Squares, stacked

Shapes = Sequence[tuple[int, ...]]


def scales_of(
    precondition: SecondMoment | None, moments: Pytree, shapes: Shapes, compressed: Sequence[int]
) -> tuple[Pytree, list[Scale | None]]:
    """Returns the moments as `moved` takes them, and each leaf's units; None for an exact leaf."""
    scales: list[Scale | None] = [None] * len(shapes)
    if precondition is None:
        return moments, scales
    moments = stacked(moments)
    for i, scale in precondition.units(moments, shapes, compressed).items():
        scales[i] = scale
    return moments, scales


def moved(
    precondition: SecondMoment,
    old: Moments,
    shapes: Shapes,
    squares: Callable[[], Mapping[int, Squares]],
    exact: Sequence[jax.Array],
    step: jax.Array,
    finite: Any,
    axes: Axes,
) -> tuple[Moments, Any]:
    """Returns the moments after a step, changed if it is due and finite; and the new `finite`.

    `squares` computes those of the leaves that travelled compressed. A step that is due counts as
    finite only if the `exact` means are finite too.
    """

    def update() -> tuple[Moments, jax.Array]:
        new = precondition.update(old, shapes, squares(), step)
        return new, all_finite([*new.tables, *exact])

    stays = (old, jnp.ones((), bool))
    new, usable = lax.cond(precondition.due(step), update, lambda: stays)
    finite = axes.on_every_rank(jnp.asarray(finite) & usable, alike=True)
    return jax.tree.map(functools.partial(jnp.where, finite), new, old), finite
