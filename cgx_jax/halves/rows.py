"""Cuts leaves into rows, one per rank, around a reduce-scatter and an all-gather.

The path of every collective knows only operands and results with a leading dimension of ranks. A
policy sees whole leaves, so that it compresses a leaf in both calls or in neither.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from cgx_jax import nonfinite
from cgx_jax._types import Key, Pytree
from cgx_jax.axes import Axes
from cgx_jax.collective import Collective
from cgx_jax.compressors import Compressor
from cgx_jax.exchanges import Exchange, auto
from cgx_jax.leaves import Leaf, leaves_of, where_of
from cgx_jax.plan import Plan, resolve
from cgx_jax.policies.rules import Policy
from cgx_jax.route import Options, Route, route
from cgx_jax.run import run

Shape = tuple[int, ...]


def reduce_scatter(
    name: str,
    tree: Pytree,
    axes: Axes,
    policy: Compressor | Policy | Plan | None,
    dimension: int,
    tiled: bool,
    key: Key,
    exchange: Exchange | str,
) -> Pytree:
    """Returns this rank's slice of the sum of every leaf, cut along `dimension`."""
    leaves, treedef = jax.tree.flatten(tree)
    plan = resolve(name, tree, policy)
    pairs = list(zip([leaf.path for leaf in plan.leaves], leaves, strict=True))
    axes.check_plain(name, pairs, reduced=False)
    taken, places = scatter_route(name, axes, plan, dimension, tiled, exchange)
    operands = [rows_of(x, d, axes.world) for x, d in zip(leaves, places, strict=True)]
    sums = run(taken, operands, key).values
    out = [y if tiled else y.squeeze(d) for y, d in zip(sums, places, strict=True)]
    return jax.tree.unflatten(treedef, watched(taken, leaves, out))


def all_gather(
    name: str,
    tree: Pytree,
    axes: Axes,
    policy: Compressor | Policy | Plan | None,
    dimension: int,
    tiled: bool,
    key: Key,
    exchange: Exchange | str,
) -> Pytree:
    """Returns every rank's leaves, stacked or with `tiled` concatenated along `dimension`."""
    nonfinite.refuse_skip(name)
    leaves, treedef = jax.tree.flatten(tree)
    known = leaves_of(tree)
    axes.check_plain(name, list(zip([leaf.path for leaf in known], leaves, strict=True)))
    places = [_place_of_whole(name, leaf, axes.world, dimension, tiled) for leaf in known]
    shapes = [
        jax.ShapeDtypeStruct(shape, leaf.dtype)
        for (_, shape), leaf in zip(places, known, strict=True)
    ]
    plan = resolve(name, jax.tree.unflatten(treedef, shapes), policy)
    taken = _route(name, axes, plan, [x.shape for x in known], Collective.ALL_GATHER, exchange)
    rows = run(taken, leaves, key).values
    out = []
    for y, (d, shape) in zip(rows, places, strict=True):
        stacked = jnp.moveaxis(y, 0, d)
        out.append(stacked.reshape(shape) if tiled else stacked)
    return jax.tree.unflatten(treedef, watched(taken, leaves, out))


def scatter_route(
    name: str,
    axes: Axes,
    plan: Plan,
    dimension: int,
    tiled: bool,
    exchange: Exchange | str,
    *,
    mean: bool = False,
    in_units: bool = False,
) -> tuple[Route, list[int]]:
    """Returns the route of a reduce-scatter of whole leaves, and where each of them is cut."""
    nonfinite.refuse_skip(name)
    places = [_place_of_slice(name, leaf, axes.world, dimension, tiled) for leaf in plan.leaves]
    rows = [
        (*x.shape[:d], x.shape[d] // axes.world, *x.shape[d + 1 :])
        for x, d in zip(plan.leaves, places, strict=True)
    ]
    scatter = Collective.REDUCE_SCATTER
    taken = _route(name, axes, plan, rows, scatter, exchange, mean=mean, in_units=in_units)
    return taken, places


def _route(
    name: str,
    axes: Axes,
    plan: Plan,
    rows: Sequence[Shape],
    collective: Collective,
    exchange: Exchange | str,
    *,
    mean: bool = False,
    in_units: bool = False,
) -> Route:
    plan.require_stateless(name)
    parts = zip(plan.leaves, rows, strict=True)
    cut = dataclasses.replace(
        plan, leaves=tuple(dataclasses.replace(leaf, shape=shape) for leaf, shape in parts)
    )
    sends = auto.exchange_named(name, exchange)
    if axes.world > 1:
        sends.require(name, axes.names)
    options = Options(name, axes, sends, mean=mean, collective=collective)
    return route(options, cut, range(len(rows)) if in_units else ())


def rows_of(x: jax.Array, dimension: int, world: int) -> jax.Array:
    """Cuts a leaf into rows, [world, ...], along `dimension`."""
    d, shape = dimension, x.shape
    split = x.reshape(*shape[:d], world, shape[d] // world, *shape[d + 1 :])
    return jnp.moveaxis(split, d, 0)


def whole_of(rows: jax.Array, dimension: int) -> jax.Array:
    """Inverts `rows_of`."""
    d, shape = dimension, rows.shape[1:]
    back = jnp.moveaxis(rows, 0, d)
    return back.reshape(*shape[:d], rows.shape[0] * shape[d], *shape[d + 1 :])


def watched(
    taken: Route, before: Sequence[Any], after: Sequence[Any], step: jax.Array | None = None
) -> list[Any]:
    """Returns the results `after`; in debug mode, reports values that are not finite."""
    plan, lossy = taken.plan, taken.compressed
    carried = [i for i, c in enumerate(plan.compressors) if i not in lossy or c.carries_nonfinite]
    return nonfinite.watch(
        taken.options.name,
        taken.options.axes,
        [leaf.path for leaf in plan.leaves],
        before,
        after,
        carried=carried,
        step=step,
    )[0]


def _place_of_slice(name: str, leaf: Leaf, world: int, dimension: int, tiled: bool) -> int:
    """Returns the dimension that is cut as an index of 0 or more."""
    where, shape, rank = where_of(name, leaf.path), leaf.shape, len(leaf.shape)
    if not -rank <= dimension < rank:
        raise ValueError(
            f"{where}: scatter_dimension={dimension} is out of range; the operand is "
            f"{list(shape)}, with {rank} dimensions."
        )
    dimension %= rank
    length = shape[dimension]
    if length % world if tiled else length != world:
        need = f"a multiple of the world size {world}" if tiled else f"{world}, the world"
        raise ValueError(
            f"{where}: dimension {dimension} of {list(shape)} has length {length}, which must "
            f"be {need}" + ("; pad it." if tiled else " size; or pass tiled=True.")
        )
    return dimension


def _place_of_whole(
    name: str, leaf: Leaf, world: int, dimension: int, tiled: bool
) -> tuple[int, Shape]:
    """Returns the result's dimension of ranks as an index of 0 or more, and its shape."""
    shape = leaf.shape
    rank = len(shape) if tiled else len(shape) + 1
    if not -rank <= dimension < rank:
        raise ValueError(
            f"{where_of(name, leaf.path)}: axis={dimension} is out of range; the operand is "
            f"{list(shape)}, and the result has {rank} dimensions."
        )
    d = dimension % rank
    if tiled:
        return d, (*shape[:d], world * shape[d], *shape[d + 1 :])
    return d, (*shape[:d], world, *shape[d:])
