"""One call's loss as a function of flat lists of arrays, and what its traces show."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax

from cgx_jax.plain_jit import batch_norm, outputs, statistics
from cgx_jax.plain_jit.arguments import CALLER, Argument, Place, known_spec, shown
from cgx_jax.plain_jit.closures import Closure
from cgx_jax.plain_jit.inference import Ranks, Split
from cgx_jax.plain_jit.statistics import Value


@dataclasses.dataclass(frozen=True)
class Program:
    """The loss, the structure of its arguments, and the closed-over arrays that are passed to it.

    Its arrays are those of the arguments, followed by those that it closes over, whose ids are in
    `captured`.
    """

    closure: Closure
    arguments: tuple[Argument, ...]
    places: tuple[Place, ...]
    captured: tuple[int, ...]
    splits: tuple[Split, ...]
    ranks: Ranks
    has_aux: bool

    def __call__(self, arrays: Sequence[Any]) -> tuple[Any, Any, list[Any]]:
        """Returns (loss, auxiliary output, updated state of NNX objects); runs inside the axes."""
        axis = self.ranks.axis
        given = [
            jax.random.fold_in(x, lax.axis_index(axis)) if split.fold else x
            for x, split in zip(arrays, self.splits, strict=True)
        ]
        values = []
        for number, argument in enumerate(self.arguments):
            own = [x for x, p in zip(given, self.places, strict=True) if p.argument == number]
            values.append(argument.build(own))
            if argument.graph is not None:
                batch_norm.give_axis(values[-1], axis)
        captured = given[len(given) - len(self.captured) :]
        loss_fn = self.closure.replaced(dict(zip(self.captured, captured, strict=True)))
        args = [v for v, a in zip(values, self.arguments, strict=True) if a.position is not None]
        kwargs = {
            a.name: v for v, a in zip(values, self.arguments, strict=True) if a.position is None
        }
        with batch_norm.linen_axis(axis):
            out = loss_fn(*args, **kwargs)
        if self.has_aux and not (isinstance(out, tuple) and len(out) == 2):
            raise TypeError(
                f"{CALLER}: with has_aux=True the loss returns (loss, aux), not {type(out)}."
            )
        loss, aux = out if self.has_aux else (out, None)
        # Only the loss sees the key with the rank folded in; its owner gets the original key back.
        keys = {
            place.path: x
            for x, place, split in zip(arrays, self.places, self.splits, strict=True)
            if split.fold
        }
        rests = [
            jax.tree_util.tree_map_with_path(
                lambda path, x, a=a: keys.get(a.path(path), x), a.rest(v)
            )
            for v, a in zip(values, self.arguments, strict=True)
            if a.graph is not None
        ]
        return loss, aux, rests

    def used_captures(self, arrays: Sequence[Any]) -> list[int]:
        """Returns the ids of the closed-over arrays that the loss reads."""
        alone = dataclasses.replace(self, splits=tuple(Split() for _ in arrays))
        trace: Callable[..., Any] = lambda xs: jax.tree.leaves(alone(xs))  # noqa: E731
        for name in self.ranks.names:
            # An axis of one rank: it has the whole batch, and the loss can reduce over the axis.
            trace = jax.vmap(trace, in_axes=None, axis_name=name, axis_size=1)
        used = {id(x) for x in jax.make_jaxpr(trace)(list(arrays)).consts}
        return [i for i in self.closure.arrays if i in used]

    def study(self, arrays: Sequence[Any], aux_specs: Any) -> tuple[Any, Any]:
        """Returns trees of `Output` for the auxiliary output and the states of NNX objects.

        Raises ValueError for a loss whose mean over ranks is not the loss of the whole batch.
        """
        small, large, ratio, trees = self._traces(arrays)
        self._check_constants(large.consts, arrays)
        values = statistics.study(
            small,
            large,
            [Value(s.dimension is not None, s.dimension is not None) for s in self.splits],
            frozenset(self.ranks.names),
            ratio,
        )
        self._check_loss(small.out_avals[0], values[0])
        aux, rests = trees
        paths = [
            *(f"aux{p}" for p in _paths(aux)),
            *(f"state{p}" for p in _paths(rests)),
        ]
        given = outputs.given_specs(aux_specs, aux) + [None] * len(jax.tree.leaves(rests))
        found = [
            outputs.classify(path, a, b, value, self.ranks, ratio, spec)
            for path, a, b, value, spec in zip(
                paths, small.out_avals[1:], large.out_avals[1:], values[1:], given, strict=True
            )
        ]
        aux_at, rests_at = jax.tree.unflatten(jax.tree.structure(trees), found)
        return aux_at, rests_at

    def _traces(self, arrays: Sequence[Any]) -> tuple[Any, Any, int, Any]:
        """Returns the loss's jaxprs at two batch sizes, the sizes' ratio, and its output trees."""
        world = self.ranks.world
        local = [self._local(x, split) for x, split in zip(arrays, self.splits, strict=True)]
        # A dimension of 1 broadcasts, so a trace with one example can differ in more than sizes.
        # Such batches are doubled.
        alone = any(
            s.dimension is not None and x.shape[s.dimension] == 1
            for x, s in zip(local, self.splits, strict=True)
        )
        factor, ratio = (2 if alone else 1), max(world, 2)
        found: list[Any] = []
        trees: list[Any] = []

        def flat(xs: Sequence[Any]) -> list[Any]:
            loss, aux, rests = self(xs)
            trees.append((aux, rests))
            return [loss, *jax.tree.leaves((aux, rests))]

        def probe() -> tuple[()]:
            for times in (factor, factor * ratio):
                shapes = [
                    self._scaled(x, s, times) for x, s in zip(local, self.splits, strict=True)
                ]
                found.append(jax.make_jaxpr(flat)(shapes))
            return ()

        names = set(self.ranks.names)
        jax.eval_shape(
            jax.shard_map(
                probe,
                mesh=self.ranks.mesh,
                in_specs=(),
                out_specs=(),
                axis_names=names,
                check_vma=False,
            )
        )
        return found[0], found[1], ratio, jax.tree.map(lambda _: 0, trees[0])

    def _local(self, x: Any, split: Split) -> jax.ShapeDtypeStruct:
        shape = list(x.shape)
        if split.dimension is not None:
            shape[split.dimension] //= self.ranks.world
        return jax.ShapeDtypeStruct(tuple(shape), x.dtype)

    @staticmethod
    def _scaled(x: jax.ShapeDtypeStruct, split: Split, times: int) -> jax.ShapeDtypeStruct:
        shape = list(x.shape)
        if split.dimension is not None:
            shape[split.dimension] *= times
        return jax.ShapeDtypeStruct(tuple(shape), x.dtype)

    def _check_constants(self, constants: Sequence[Any], arrays: Sequence[Any]) -> None:
        """Raises ValueError for an array that is no argument but looks like part of the batch."""
        sizes = {
            x.shape[s.dimension]
            for x, s in zip(arrays, self.splits, strict=True)
            if s.dimension is not None
        }
        for x in constants:
            spec = known_spec(x, self.ranks.mesh)
            split = spec is not None and self.ranks.dimension(spec) is not None
            if split or (np.ndim(x) and np.shape(x)[0] in (sizes or {np.shape(x)[0]})):
                raise ValueError(
                    f"{CALLER}: the loss uses an array {shown(jax.typeof(x))} that is "
                    "neither an argument nor a variable of an enclosing function. It may be part "
                    f"of the batch, and each of the {self.ranks.world} ranks would compute all of "
                    "it. Pass it as an argument of the loss."
                )

    def _check_loss(self, aval: Any, loss: Value) -> None:
        axis = self.ranks.axis
        if loss.misuse is not None:
            raise ValueError(
                f"{CALLER}: the loss depends on a statistic of the batch, {loss.misuse}. Each rank "
                "would compute it from its own part, but plain jit computes it from the whole "
                f"batch. Average it over the ranks: jax.lax.pmean(statistic, {axis!r}). For a "
                f"weighted mean, write loss.sum() / jax.lax.pmean(weights.sum(), {axis!r}). For a "
                f"BatchNorm that is neither NNX's nor Linen's, pass axis_name={axis!r}. For a loss "
                "over pairs of examples, gather the other ranks' examples: "
                f"jax.lax.all_gather(examples, {axis!r}, tiled=True)."
            )
        if loss.batch and loss.growth == 1:
            raise ValueError(
                f"{CALLER}: the loss is a sum over the batch, {shown(aval)}: it grows "
                "with the number of examples, and the mean over ranks would not be the sum under "
                "plain jit. Return the mean over the batch."
            )


def _paths(tree: Any) -> list[str]:
    return [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
