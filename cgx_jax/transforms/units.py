"""How a step takes the units of its leaves from the moments, and what becomes of these."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from cgx_jax import _compat
from cgx_jax._types import Pytree
from cgx_jax.axes import after
from cgx_jax.kernels.nonfinite import all_finite
from cgx_jax.kernels.units import Units
from cgx_jax.transforms.precondition import Moments, SecondMoment
from cgx_jax.transforms.shares import Whole


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
