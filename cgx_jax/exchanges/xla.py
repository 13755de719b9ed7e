"""Payloads over XLA's own collectives of u8: all_to_all, all_gather and collective_permute.

Runs on every platform that has them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from cgx_jax import _compat
from cgx_jax.axes import Axes
from cgx_jax.exchanges.base import Exchange, Least
from cgx_jax.exchanges.links import Link
from cgx_jax.kernels import native

# Bytes, those of a rank's share if ranks share a link. A link that is not known may be NVLink.
_NVLINK = 14e6
_GPU = {
    None: _NVLINK,
    Link.NVLINK: _NVLINK,
    Link.PCIE: 4e5,
    Link.OWN: 4e5,
    Link.SHARED: 2e5,
    Link.SHARED_PCIE: 1e6,
}


class OverXla(Exchange):
    """An exchange whose rows of bytes go by XLA's own collectives."""

    def scatter(self, name: str, rows: jax.Array, axes: Axes) -> jax.Array:
        if _vmapped(axes.names):
            return _gather_each(rows, axes.names)[:, lax.axis_index(axes.names)]
        return lax.all_to_all(rows, axes.names, 0, 0, axis_index_groups=axes.groups, tiled=True)

    def gather(self, name: str, row: jax.Array, axes: Axes) -> jax.Array:
        if _vmapped(axes.names):
            return _gather_each(row, axes.names)
        if axes.groups is None and set(axes.names) <= _compat.varying_axes(row):
            return lax.all_gather(row, axes.names, to="invarying")
        return lax.all_gather(row, axes.names, axis_index_groups=axes.groups)

    def permute(
        self, name: str, row: jax.Array, axes: Axes, pairs: Sequence[tuple[int, int]]
    ) -> jax.Array:
        # Under vmap, lax.ppermute takes no rank without a source.
        if axes.groups is None and not _compat.bound_by_mesh(axes.names):
            sources = np.full(axes.world, -1)
            sources[[b for _, b in pairs]] = [a for a, _ in pairs]
            source = jnp.asarray(sources)[axes.index()]
            return jnp.where(source < 0, 0, _gather_each(row, axes.names)[source])
        groups = axes.groups or (tuple(range(axes.world)),)
        # lax.ppermute takes the axes in the mesh's order alone.
        mesh = jax.sharding.get_abstract_mesh().axis_names
        names = axes.names if len(axes.names) == 1 else sorted(axes.names, key=mesh.index)
        sizes = [lax.axis_size(n) for n in names]
        numbers = np.arange(math.prod(sizes)).reshape(sizes)
        numbers = numbers.transpose([names.index(n) for n in axes.names]).reshape(-1)
        sent = [(int(numbers[g[a]]), int(numbers[g[b]])) for g in groups for a, b in pairs]
        return lax.ppermute(row, tuple(names), sent)


@dataclasses.dataclass(frozen=True)
class Xla(OverXla):
    """XLA's own collectives: on every platform, and for every code.

    Payloads travel as u8 by all_to_all, all_gather and collective_permute.
    """

    shorthand: ClassVar[str] = "xla"
    can: ClassVar[frozenset[str]] = frozenset({"scatter", "gather", "permute", "sum"})

    def missing(self, axes: Sequence[str] = ()) -> str | None:
        return None

    def here(self) -> bool:
        return True

    def least(self, link: Link | None = None) -> Least | None:
        platform = _compat.platform()
        if platform == "cpu" and native.module() is not None:
            # Over gloo, an all-to-all uses only one direction of a link at a time, so half the
            # bytes gain nothing.
            return Least(3 << 19, 0.5)
        if platform == "gpu" and native.cuda_module() is not None:
            # By a model (benchmarks/predict.py), below these sizes the kernels and their launches
            # take longer than the link would save. Nobody has measured links between GPUs.
            return Least(_GPU[link], 1.0)
        return None  # encoding in plain jnp never pays


def _vmapped(axes: tuple[str, ...]) -> bool:
    """Whether these are several vmap axes, over which lax has no all_to_all or all_gather."""
    return len(axes) > 1 and not _compat.bound_by_mesh(axes)


def _gather_each(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Applies `lax.all_gather` to one axis after the other: [world, ...], first axis outermost."""
    shape = x.shape
    for axis in reversed(axes):
        x = lax.all_gather(x, axis)
    return x.reshape(-1, *shape)
