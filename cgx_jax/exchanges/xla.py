"""Payloads over XLA's own collectives: u8 all_to_all, then u8 all_gather.

Runs on every platform that has them. A group is a list of rank lists as `axis_index_groups`
takes; None is everybody.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
from jax import lax

from cgx_jax import _compat

Groups = Sequence[Sequence[int]] | None


def scatter(payload: jax.Array, axes: tuple[str, ...], groups: Groups) -> jax.Array:
    """u8[world, n], row r for rank r -> u8[world, n], row r from rank r."""
    if _vmapped(axes):
        return _gather_each(payload, axes)[:, lax.axis_index(axes)]
    return lax.all_to_all(payload, axes, 0, 0, axis_index_groups=groups, tiled=True)


def gather(payload: jax.Array, axes: tuple[str, ...], groups: Groups) -> jax.Array:
    """u8[n] of every rank -> u8[world, n], the same on all, and typed so under check_vma."""
    if _vmapped(axes):
        return _gather_each(payload, axes)
    checked = set(axes) <= _compat.varying_axes(payload)
    if checked and groups is None:
        return lax.all_gather(payload, axes, to="invarying")
    return lax.all_gather(payload, axes, axis_index_groups=groups)


def _vmapped(axes: tuple[str, ...]) -> bool:
    """Several axes of vmap: no wire, and lax has no all_to_all or all_gather over a tuple."""
    return len(axes) > 1 and not _compat.bound_by_mesh(axes)


def _gather_each(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """`lax.all_gather` over one axis after the other: [world, ...], first axis outermost."""
    shape = x.shape
    for axis in reversed(axes):
        x = lax.all_gather(x, axis)
    return x.reshape(-1, *shape)
