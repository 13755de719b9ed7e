"""Cuts leaves into rows, one per rank, around a reduce-scatter and an all-gather.

The path of every collective knows only operands and results with a leading dimension of ranks. A
policy sees whole leaves, so that it compresses a leaf in both calls or in neither.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from cgx_jax import _compat
from cgx_jax._types import Dimensions, Key, Pytree
from cgx_jax.arguments import folded
from cgx_jax.collective import Collective
from cgx_jax.debug import nonfinite
from cgx_jax.leaves import Leaf, dimensions_of, leaves_of, where_of
from cgx_jax.plan import Codes, Plan, resolve
from cgx_jax.route.route import Options, Route, route
from cgx_jax.route.run import Inputs, run, watched

Shape = tuple[int, ...]


def reduce_scatter(
    options: Options, tree: Pytree, policy: Codes, dimensions: Dimensions, tiled: bool, key: Key
) -> Pytree:
    """Returns this rank's slice of the sum of every leaf, cut along its dimension."""
    leaves, treedef = jax.tree.flatten(tree)
    plan = resolve(options.name, tree, policy)
    places = dimensions_of(options.name, "scatter_dimension", dimensions, tree)
    scatter = Scatter.of(options, plan, places, tiled)
    return jax.tree.unflatten(treedef, scatter(leaves, key))


# No index of a rank is as large, so the passes never draw from the same key.
BACKWARD = 2**31 - 1


@dataclasses.dataclass(frozen=True)
class Scatter:
    """A reduce-scatter of whole leaves whose way is decided; `places` says where each is cut."""

    taken: Route
    places: Sequence[int]
    tiled: bool

    @classmethod
    def of(
        cls,
        options: Options,
        plan: Plan,
        dimensions: Sequence[int],
        tiled: bool,
        *,
        in_units: bool = False,
    ) -> Scatter:
        """Checks where the leaves of `plan` are cut, and decides how their rows travel."""
        nonfinite.refuse_skip(options.name)
        world = options.axes.world
        pairs = zip(plan.leaves, dimensions, strict=True)
        places = [_place_of_slice(options, leaf, d, tiled) for leaf, d in pairs]
        rows = [
            (*x.shape[:d], x.shape[d] // world, *x.shape[d + 1 :])
            for x, d in zip(plan.leaves, places, strict=True)
        ]
        return cls(_route(options, plan, rows, in_units=in_units), places, tiled)

    def __call__(self, leaves: Sequence[jax.Array], key: Key) -> list[jax.Array]:
        """Returns this rank's slice of the sum of every leaf."""
        cut, world = zip(leaves, self.places, strict=True), self.taken.options.axes.world
        sums = run(self.taken, Inputs([rows_of(x, d, world) for x, d in cut], key)).values
        parts = zip(sums, self.places, strict=True)
        out = [y if self.tiled else y.squeeze(d) for y, d in parts]
        return watched(self.taken, leaves, out)[0]


@dataclasses.dataclass(frozen=True)
class Gather:
    """An all-gather of shards whose way is decided.

    `whole` is a tree like the shards with the shapes and dtypes of the results. `places` are the
    dimensions in which these have the ranks.
    """

    taken: Route
    whole: Pytree
    places: Sequence[int]
    tiled: bool

    @classmethod
    def of(
        cls, options: Options, shards: Pytree, policy: Codes, dimensions: Dimensions, tiled: bool
    ) -> Gather:
        """Decides how shards with these shapes and dtypes travel."""
        nonfinite.refuse_skip(options.name)
        known, treedef = leaves_of(shards), jax.tree.structure(shards)
        given = dimensions_of(options.name, "axis", dimensions, shards)
        pairs = zip(known, given, strict=True)
        places = [_place_of_whole(options, leaf, d, tiled) for leaf, d in pairs]
        shapes = [
            jax.ShapeDtypeStruct(shape, leaf.dtype)
            for (_, shape), leaf in zip(places, known, strict=True)
        ]
        whole = jax.tree.unflatten(treedef, shapes)
        plan = resolve(options.name, whole, policy)
        taken = _route(options, plan, [leaf.shape for leaf in known])
        return cls(taken, whole, [d for d, _ in places], tiled)

    def __call__(self, shards: Pytree, key: Key) -> Pytree:
        """Returns every rank's shards, stacked or concatenated."""
        leaves, treedef = self._checked(shards)
        rows = run(self.taken, Inputs(leaves, key)).values
        out = []
        for y, d, whole in zip(rows, self.places, jax.tree.leaves(self.whole), strict=True):
            out.append(jnp.moveaxis(y, 0, d).reshape(whole.shape))
        return jax.tree.unflatten(treedef, watched(self.taken, leaves, out)[0])

    def varying(self, shards: Pytree) -> Pytree:
        """Returns shards that vary over the axes, as the results of the derivative do."""
        leaves, treedef = self._checked(shards)
        axes = self.taken.options.axes.varying()
        return jax.tree.unflatten(treedef, [_compat.vary_over(x, axes) for x in leaves])

    def _checked(self, shards: Pytree) -> tuple[list[jax.Array], jax.tree_util.PyTreeDef]:
        options, plan = self.taken.options, self.taken.plan
        leaves, treedef = jax.tree.flatten(shards)
        pairs = zip([leaf.path for leaf in plan.leaves], leaves, strict=True)
        options.axes.check_plain(options.name, list(pairs))
        return leaves, treedef

    def transposed(self, policy: Codes) -> Callable[[Pytree, Key], Pytree]:
        """Returns the derivative: it scatters the sums of cotangents, compressed by `policy`.

        It takes the key of the gather, and draws other noise. Integers have no derivative: None.
        """
        options = self.taken.options
        options = dataclasses.replace(options, collective=Collective.REDUCE_SCATTER)
        plan = resolve(options.name, self.whole, policy)
        kept = [i for i, x in enumerate(plan.leaves) if jnp.issubdtype(x.dtype, jnp.inexact)]
        places = [self.places[i] for i in kept]
        scatter = Scatter.of(options, plan.subset(tuple(kept)), places, self.tiled)

        def transposed(cotangents: Pytree, key: Key) -> Pytree:
            leaves, treedef = jax.tree.flatten(cotangents)
            own = folded(options.name, key, BACKWARD)
            sums = dict(zip(kept, scatter([leaves[i] for i in kept], own), strict=True))
            return jax.tree.unflatten(treedef, [sums.get(i) for i in range(len(leaves))])

        return transposed


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
            f"{where}: dimension {dimension} is out of range; the operand is {list(shape)}, with "
            f"{rank} dimensions."
        )
    dimension %= rank
    length = shape[dimension]
    if length % world if tiled else length != world:
        need = f"a multiple of the world size {world}" if tiled else f"{world}, the world"
        raise ValueError(
            f"{where}: dimension {dimension} of {list(shape)} has length {length}, which must "
            f"be {need}"
            + ("; pad it, or cut it along another one." if tiled else " size; or pass tiled=True.")
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
        return d, (*shape[:d], world * shape[d], *shape[d + 1 :])
    return d, (*shape[:d], world, *shape[d:])
