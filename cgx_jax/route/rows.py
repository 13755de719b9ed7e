"""Cuts leaves into rows, one per rank, around a reduce-scatter and an all-gather.

The path of every collective knows only operands and results with a leading dimension of ranks. A
policy sees whole leaves, so that it compresses a leaf in both calls or in neither.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from cgx_jax._types import Key, Pytree
from cgx_jax.axes import Axes
from cgx_jax.compressors import Compressor
from cgx_jax.debug import nonfinite
from cgx_jax.leaves import Leaf, leaves_of, where_of
from cgx_jax.plan import Plan, resolve
from cgx_jax.policies.rules import Policy
from cgx_jax.route.route import Options, Route, route
from cgx_jax.route.run import run, watched

Shape = tuple[int, ...]


def reduce_scatter(
    options: Options,
    tree: Pytree,
    policy: Compressor | Policy | Plan | None,
    dimension: int,
    tiled: bool,
    key: Key,
) -> Pytree:
    """Returns this rank's slice of the sum of every leaf, cut along `dimension`."""
    leaves, treedef = jax.tree.flatten(tree)
    plan = resolve(options.name, tree, policy)
    taken, places = scatter_route(options, plan, dimension, tiled)
    world = options.axes.world
    operands = [rows_of(x, d, world) for x, d in zip(leaves, places, strict=True)]
    sums = run(taken, operands, key).values
    out = [y if tiled else y.squeeze(d) for y, d in zip(sums, places, strict=True)]
    return jax.tree.unflatten(treedef, watched(taken, leaves, out)[0])


def all_gather(
    options: Options,
    tree: Pytree,
    policy: Compressor | Policy | Plan | None,
    dimension: int,
    tiled: bool,
    key: Key,
) -> Pytree:
    """Returns every rank's leaves, stacked or with `tiled` concatenated along `dimension`."""
    nonfinite.refuse_skip(options.name)
    leaves, treedef = jax.tree.flatten(tree)
    known = leaves_of(tree)
    pairs = zip([leaf.path for leaf in known], leaves, strict=True)
    options.axes.check_plain(options.name, list(pairs))
    places = [_place_of_whole(options, leaf, dimension, tiled) for leaf in known]
    shapes = [
        jax.ShapeDtypeStruct(shape, leaf.dtype)
        for (_, shape), leaf in zip(places, known, strict=True)
    ]
    plan = resolve(options.name, jax.tree.unflatten(treedef, shapes), policy)
    taken = _route(options, plan, [leaf.shape for leaf in known])
    rows = run(taken, leaves, key).values
    out = []
    for y, (d, shape) in zip(rows, places, strict=True):
        stacked = jnp.moveaxis(y, 0, d)
        out.append(stacked.reshape(shape) if tiled else stacked)
    return jax.tree.unflatten(treedef, watched(taken, leaves, out)[0])


def scatter_route(
    options: Options, plan: Plan, dimension: int, tiled: bool, *, in_units: bool = False
) -> tuple[Route, list[int]]:
    """Returns the route of a reduce-scatter of whole leaves, and where each of them is cut."""
    nonfinite.refuse_skip(options.name)
    world = options.axes.world
    places = [_place_of_slice(options, leaf, dimension, tiled) for leaf in plan.leaves]
    rows = [
        (*x.shape[:d], x.shape[d] // world, *x.shape[d + 1 :])
        for x, d in zip(plan.leaves, places, strict=True)
    ]
    return _route(options, plan, rows, in_units=in_units), places


def _route(options: Options, plan: Plan, rows: Sequence[Shape], *, in_units: bool = False) -> Route:
    plan.require_stateless(options.name)
    parts = zip(plan.leaves, rows, strict=True)
    leaves = tuple(dataclasses.replace(leaf, shape=shape) for leaf, shape in parts)
    numbers = range(len(rows)) if in_units else ()
    return route(options, dataclasses.replace(plan, leaves=leaves), numbers)


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


def _place_of_slice(options: Options, leaf: Leaf, dimension: int, tiled: bool) -> int:
    """Returns the dimension that is cut as an index of 0 or more."""
    where, world = where_of(options.name, leaf.path), options.axes.world
    shape, rank = leaf.shape, len(leaf.shape)
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


def _place_of_whole(options: Options, leaf: Leaf, dimension: int, tiled: bool) -> tuple[int, Shape]:
    """Returns the result's dimension of ranks as an index of 0 or more, and its shape."""
    shape, world = leaf.shape, options.axes.world
    rank = len(shape) if tiled else len(shape) + 1
    if not -rank <= dimension < rank:
        raise ValueError(
            f"{where_of(options.name, leaf.path)}: axis={dimension} is out of range; the operand "
            f"is {list(shape)}, and the result has {rank} dimensions."
        )
    d = dimension % rank
    if tiled:
        return d, whole_shape(shape, d, options.axes)
    return d, (*shape[:d], world, *shape[d:])


def whole_shape(shape: Shape, dimension: int, axes: Axes) -> Shape:
    """Returns the shape of all ranks' slices, joined along `dimension`."""
    return (*shape[:dimension], axes.world * shape[dimension], *shape[dimension + 1 :])
