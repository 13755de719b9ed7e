"""One call's loss and gradients as a program over flat lists of arrays, traced and checked."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from jax.tree_util import keystr

from cgx_jax import _compat
from cgx_jax._types import Pytree
from cgx_jax.axes import Axes, cast
from cgx_jax.leaves import SCALARS, map_with_paths, path_of, sum_dtype, with_paths
from cgx_jax.plain_jit.arguments import (
    CALLER,
    Given,
    Line,
    broadcast,
    known_spec,
    line,
    shown,
    typed_spec,
    variable_of,
    without,
)
from cgx_jax.plain_jit.gathers import Gather, Shard, evaluate
from cgx_jax.plain_jit.manual import boxes_without, logical_rules_without, names_manual, refusal
from cgx_jax.plain_jit.split import Ranks, Split
from cgx_jax.relations.relation import (
    DRAWS,
    MEAN,
    ROWS,
    SAME,
    SUM,
    Kind,
    Relation,
    growing,
    unknown,
)
from cgx_jax.relations.sizes import difference
from cgx_jax.relations.walk import relate

# What a rank's output becomes: the same on all ranks (None), a mean, a sum, or concatenated along
# a dimension.
Output = str | int | None
_EMPTY: Mapping[int, Gather] = MappingProxyType({})
_NUMBERS = (jax.Array, np.ndarray, *SCALARS)
_ALONE = "with one example per rank, the program is another than with more"
_AUX = 'P(axis) for one row per example, "mean", "sum", or P() for what is the same on every rank'


@dataclasses.dataclass(frozen=True)
class Traced:
    """A closed jaxpr. It returns the value, the loss's own results, then the leaves of `trees`.

    `trees` holds the auxiliary output, the updated states of NNX objects, and the gradients.
    """

    jaxpr: Any
    trees: Pytree

    @classmethod
    def of(cls, jaxpr: Any, out: Pytree) -> Traced:
        """Takes what `make_jaxpr` returns of `Program._differentiated`."""
        return cls(jaxpr, jax.tree.structure(out[-1]))

    def parts(self, values: Sequence[Any]) -> tuple[Any, Any, Any, Any]:
        """Splits a list like the jaxpr's outputs: (value, aux, states, gradients)."""
        count = self.trees.num_leaves
        return values[0], *jax.tree.unflatten(self.trees, values[len(values) - count :])


@dataclasses.dataclass(frozen=True)
class Program:
    """The loss, its arguments, and how it is differentiated."""

    loss_fn: Callable[..., Pytree]
    given: Given
    ranks: Ranks
    has_aux: bool
    ratio: bool

    @functools.cached_property
    def whole(self) -> Traced:
        """Plain jit's program, with the axes bound to one rank."""
        return self.whole_of((), 1)

    def whole_of(self, splits: Sequence[Split], times: int) -> Traced:
        """Traces plain jit's program for `times` the batch."""
        pairs = itertools.zip_longest(self.given.arrays, splits, fillvalue=Split())
        shapes = [_shape_of(x, split, times) for x, split in pairs]
        env = [(name, 1) for name in self.ranks.names]
        trace = jax.make_jaxpr(self._differentiated, axis_env=env, return_shape=True)
        try:
            return Traced.of(*trace(shapes))
        except Exception:
            # On an explicit mesh, types follow what a model says of its products, but not that a
            # gather over the axis leaves nothing split. They change no value, so do without.
            untyped = [
                jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=x.weak_type) for x in shapes
            ]
            if untyped != shapes:
                with contextlib.suppress(Exception):
                    return Traced.of(*trace(untyped))
            raise

    def part(
        self, splits: Sequence[Split], times: int = 1, gathers: Mapping[int, Gather] = _EMPTY
    ) -> Traced:
        """Traces the program of one rank, with its part of `times` the batch.

        It takes a shard of each parameter in `gathers`, and returns a shard of its gradient, which
        is the mean over the ranks already.
        """
        made: list[Traced] = []

        def probe() -> tuple[()]:
            pairs = zip(self.given.arrays, splits, strict=True)
            shapes = [_shape_of(x, split, times, self.ranks.world) for x, split in pairs]
            function = functools.partial(self._differentiated, gathers=gathers)
            for i, gather in gathers.items():
                shapes[i] = _shape_of(shapes[i], Split(gather.dimension), 1, self.ranks.world)
            with logical_rules_without(self.ranks.names):
                made.append(Traced.of(*jax.make_jaxpr(function, return_shape=True)(shapes)))
            return ()

        ranked = functools.partial(jax.shard_map, mesh=self.ranks.mesh, check_vma=False)
        names = set(self.ranks.names)
        try:
            jax.eval_shape(ranked(probe, in_specs=(), out_specs=(), axis_names=names))
        except ValueError as error:
            if names_manual(error, self.ranks):
                raise refusal(f"{type(error).__name__}: {error}", self.ranks) from error
            raise
        for program in _compat.programs_within(made[0].jaxpr):
            for eqn in _compat.open_program(program).eqns:
                # JAX would refuse a NamedSharding of the whole mesh only when it compiles.
                spec = getattr(eqn.params.get("sharding"), "spec", PartitionSpec())
                placed = eqn.primitive.name == "sharding_constraint"
                if placed and self.ranks.dimension(spec) is not None:
                    raise refusal(f"a constraint with {spec}", self.ranks)
        return made[0]

    def traces(self, splits: Sequence[Split]) -> bool:
        """Whether the loss can be traced for a rank's part of arrays that are split so."""
        try:
            self.part(splits)
        except Exception:
            return False
        return True

    def is_raw_key(self, i: int) -> bool:
        """Whether the loss uses array `i` for nothing but as a raw PRNG key."""
        x, key = self.given.arrays[i], jax.eval_shape(jax.random.PRNGKey, 0)
        raw = (x.shape, x.dtype) == (key.shape, key.dtype)
        return raw and _compat.is_key_data(self.whole.jaxpr, i)

    def _differentiated(
        self, arrays: Sequence[jax.Array], gathers: Mapping[int, Gather] = _EMPTY
    ) -> tuple[Any, ...]:
        """Returns the value, the loss's results, and (aux, states of NNX objects, gradients)."""
        trained = self.given.trained

        def losses_of(values: Sequence[Any]) -> Pytree:
            given = list(arrays)
            for i, x in zip(trained, values, strict=True):
                given[i] = x
            return self._gathered(given, gathers) if gathers else self._call(given)

        given = [arrays[i] for i in trained]
        losses, pull, (aux, rests) = jax.vjp(losses_of, given, has_aux=True)
        axis, dtype = self.ranks.axis, losses[0].dtype
        wide = [cast(x, sum_dtype(x.dtype)) for x in losses]
        if self.ratio:
            count = lax.psum(wide[1], axis)
            value = lax.psum(wide[0], axis) / count
            # The mean of the ranks' gradients is the gradient of sum / count.
            one = lax.psum(jnp.ones((), count.dtype), axis) / count
            marks = [one, -value * one]
        else:
            value = lax.pmean(wide[0], axis)
            marks = [jnp.ones((), dtype)]
        value = cast(value, dtype)
        (grads,) = pull(tuple(cast(m, x.dtype) for m, x in zip(marks, losses, strict=True)))
        return value, losses, (aux, rests, self.given.parameters(grads))

    def _gathered(self, arrays: Sequence[jax.Array], gathers: Mapping[int, Gather]) -> Pytree:
        """Returns what `_call` does, of whole parameters in the place of shards."""
        whole: list[Any] = list(arrays)
        given: list[Any] = list(arrays)
        for i, gather in gathers.items():
            whole[i] = _shape_of(arrays[i], Split(gather.dimension), self.ranks.world)
            given[i] = Shard(arrays[i], gather)
        traced, out = jax.make_jaxpr(self._call, return_shape=True)(whole)
        results = evaluate(traced.jaxpr, traced.consts, given)
        return jax.tree.unflatten(jax.tree.structure(out), results)

    def _call(self, arrays: Sequence[jax.Array]) -> tuple[tuple[Any, ...], tuple[Any, list[Any]]]:
        """Returns ((loss,) or (sum, count), (auxiliary output, states of NNX objects))."""
        values = []
        for number, argument in enumerate(self.given.arguments):
            own = [arrays[i] for i in self.given.numbers(number)]
            values.append(boxes_without(self.ranks.names, argument.build(own)))
        pairs = list(zip(values, self.given.arguments, strict=True))
        out = self.loss_fn(
            *(v for v, a in pairs if a.position is not None),
            **{a.name: v for v, a in pairs if a.position is None},
        )
        wanted = "(sum, count)" if self.ratio else "loss"
        wanted = f"({wanted}, aux)" if self.has_aux else wanted
        if self.has_aux and not (isinstance(out, tuple) and len(out) == 2):
            raise TypeError(
                f"{CALLER}: with has_aux=True the loss returns {wanted}, not {_kind(out)}"
            )
        out, aux = out if self.has_aux else (out, None)
        losses = out if self.ratio else (out,)
        if not isinstance(losses, tuple) or len(losses) != 1 + self.ratio:
            raise TypeError(
                f'{CALLER}: with loss="ratio" the loss returns {wanted}, not {_kind(out)}'
            )
        for x in losses:
            known = isinstance(x, _NUMBERS)
            real = known and (
                jnp.issubdtype(jnp.result_type(x), jnp.floating) or (x is losses[-1] and self.ratio)
            )
            if not real or np.shape(x):
                found = shown(jax.typeof(x)) if known else _kind(x)
                raise TypeError(
                    f"{CALLER}: the loss returns {found}, not a real number; return the mean over "
                    "the examples, with has_aux=True also auxiliary outputs: (loss, aux), with "
                    'loss="ratio" a sum and a count.'
                )
        losses = tuple(map(jnp.asarray, losses))
        if self.ratio and not jnp.issubdtype(losses[1].dtype, jnp.floating):
            losses = losses[0], losses[1].astype(losses[0].dtype)
        for path, x in with_paths(aux):
            if not isinstance(x, _NUMBERS):
                raise TypeError(f"{CALLER}: aux{keystr(path)} is {x!r}, which is no array.")
        rests = [a.rest(v) for v, a in pairs if a.graph is not None]
        return losses, (aux, rests)

    def check(
        self, splits: Sequence[Split], part: Traced
    ) -> tuple[list[Found], tuple[Any, Any, Any, Any]]:
        """Compares a rank's program with plain jit's.

        Returns the loss's results, and the parts of `part`, with a `Found` for each. JAX leaves out
        steps for dimensions of one. With one example per rank, programs for two are compared, after
        both programs turned out to be those for twice and three times the batch.
        """
        whole, arrays = self.whole, self.given.arrays
        if part.trees != whole.trees:
            raise ValueError(
                f"{CALLER}: on a part of the batch the loss returns another tree than on the whole "
                f"batch: {part.trees} instead of {whole.trees}."
            )
        world, names = self.ranks.world, self.ranks.names
        inputs = [ROWS if s.dimension is not None else DRAWS if s.fold else SAME for s in splits]
        pairs = zip(arrays, splits, strict=True)
        small, large = part.jaxpr, whole.jaxpr
        if all(s.dimension is None or x.shape[s.dimension] > world for x, s in pairs):
            related = relate(small, large, inputs, names, world)
        else:
            related = [SAME] * len(small.out_avals)
            try:
                parts = [part.jaxpr, *(self.part(splits, n).jaxpr for n in (2, 3))]
                wholes = [whole.jaxpr, *(self.whole_of(splits, n).jaxpr for n in (2, 3))]
            except (TypeError, ValueError) as error:
                at: str | None = f"{type(error).__name__}: {error}"
            else:
                related = relate(parts[1], wholes[1], inputs, names, world)
                at = difference(*parts) or difference(*wholes)
            if at is not None:
                related = [r if r.why else unknown(f"{_ALONE}: {at}") for r in related]
        found = []
        for r, x, one, other in zip(
            related, small.jaxpr.outvars, small.out_avals, large.out_avals, strict=True
        ):
            # The caller gets a key back as it gave it.
            own = r == DRAWS and x in small.jaxpr.invars
            found.append(Found(SAME if own else r, growing(one.shape, other.shape, world)))
        return found[1 : 2 + self.ratio], part.parts(found)

    def check_constants(self, traced: Traced, splits: Sequence[Split]) -> None:
        """Raises ValueError for an array that is no argument but as long as the batch."""
        pairs = zip(self.given.arrays, splits, strict=True)
        sizes = {x.shape[s.dimension] for x, s in pairs if s.dimension is not None}
        for x in traced.jaxpr.consts:
            spec = known_spec(x, self.ranks.mesh)
            split = spec is not None and self.ranks.dimension(spec) is not None
            if split or (np.ndim(x) and np.shape(x)[0] in sizes):
                raise ValueError(
                    f"{CALLER}: the loss uses {variable_of(self.loss_fn, x)}"
                    f"{shown(jax.typeof(x))}, which is as long as the batch but no argument, so "
                    f"each of the {self.ranks.world} ranks would have all of it. Pass it as an "
                    "argument of the loss."
                )

    def captured(self) -> list[str]:
        """Returns the arrays that the loss closes over, for messages."""
        consts = self.whole.jaxpr.consts
        return [f"{variable_of(self.loss_fn, x)}{shown(jax.typeof(x))}" for x in consts]

    def require_mean(self, losses: Sequence[Found], value: Found, grads: Pytree) -> None:
        """Raises ValueError for a value that is not plain jit's, or such a gradient."""
        if losses[0].output == "sum" and not self.ratio:
            raise ValueError(
                f"{CALLER}: the loss is a sum over the batch: it grows with the number of "
                "examples, and the mean over ranks would not be the sum under plain jit. Return "
                "the mean over the examples, divided by len(x) and not by a number, or "
                '(sum, count) with loss="ratio".'
            )
        if self.ratio and value.output is not None and not value.relation.why:
            names = {"mean": "a mean over them", "sum": "a sum over them"}
            first, second = (names.get(str(x.output), x.relation.kind.value) for x in losses)
            raise ValueError(
                f'{CALLER}: with loss="ratio" the loss returns a sum over the examples and their '
                f"count, or two means; the first here is {first}, the second {second}."
            )
        wrong = [("the loss", value)] if value.output is not None else []
        wrong += [
            (f"the gradient{keystr(path) and f' of {keystr(path)}'}", found)
            for path, found in with_paths(grads)
            if found.output not in ("mean", None)
        ]
        if wrong:
            (what, found), axis = wrong[0], self.ranks.axis
            raise ValueError(
                f"{CALLER}: {what} is not known to be a mean over the examples: {found.why}. What "
                "to write depends on what is computed there. A division by a count or by a sum of "
                'weights: loss="ratio", and return (sum, count) as they are, without a floor or a '
                f"small number added to the count. A BatchNorm: axis_name={axis!r}. Another "
                f"statistic of the batch: jax.lax.pmean(statistic, {axis!r}). Examples that meet: "
                f"jax.lax.all_gather(examples, {axis!r}, tiled=True). An argument that is as long "
                "as the batch but no part of it: in_specs={'argument': P()}. The mean of the "
                "ranks' losses, whatever plain jit computes: trust=True, without this check."
            )

    def outputs(
        self, aux_specs: Pytree, traced: Traced, aux: Pytree, rests: Pytree
    ) -> tuple[Pytree, Pytree]:
        """Returns trees of `Output`. `aux` and `rests` hold a `Found`, or avals if not checked."""
        avals = traced.parts(traced.jaxpr.out_avals)[1]
        leaves = with_paths(avals)
        found = [x if isinstance(x, Found) else None for x in jax.tree.leaves(aux)]
        if self.has_aux and aux_specs is None and leaves:
            suggested = [x.suggestion(self.ranks) if x else Line('"?"') for x in found]
            raise ValueError(
                f"{CALLER}: has_aux=True needs aux_specs, which says how the ranks' auxiliary "
                f"outputs become one: {_AUX}. For example "
                f"aux_specs={jax.tree.unflatten(jax.tree.structure(avals), suggested)!r}."
            )
        if callable(aux_specs):
            given = [aux_specs(path_of(path)) for path, _ in leaves]
        else:
            given = broadcast(aux_specs, avals, "aux_specs is not a prefix of the auxiliary output")
        specs = [
            self._output(f"aux{keystr(path)} {shown(aval)}", len(aval.shape), spec, x)
            for (path, aval), spec, x in zip(leaves, given, found, strict=True)
        ]
        states = map_with_paths(self._state, rests)
        return jax.tree.unflatten(jax.tree.structure(avals), specs), states

    def _output(self, where: str, ndim: int, spec: Any, found: Found | None) -> Output:
        out: Output = self.ranks.dimension(spec) if isinstance(spec, PartitionSpec) else spec
        if not isinstance(spec, PartitionSpec) and out not in ("mean", "sum"):
            raise ValueError(f"{CALLER}: {where} has aux_specs {spec!r}; use {_AUX}.")
        if isinstance(out, int) and out >= ndim:
            raise ValueError(f"{CALLER}: {where} has no dimension {out}; aux_specs gives {spec}.")
        if found is None:
            return out
        natural = found.output
        if natural != out and not (natural is None and out == "mean"):
            hint = "" if natural == "?" else f"; write {found.suggestion(self.ranks)}"
            raise ValueError(
                f"{CALLER}: {where} has aux_specs {line(spec)}, but that is not known to be plain "
                f"jit's value: {found.why}{hint}. Otherwise compute it outside of the loss, or "
                "skip this check with trust=True."
            )
        return natural

    def _state(self, path: Any, found: Any) -> Output:
        """Returns the output of one array of an NNX object, which no aux_specs describe."""
        if not isinstance(found, Found):  # trusted: statistics of the ranks' parts of the batch
            return "mean" if jnp.issubdtype(found.dtype, jnp.inexact) else None
        if found.output == "?":
            raise ValueError(
                f"{CALLER}: the loss updates the state {keystr(path)} of an NNX object from its "
                f"part of the batch, and plain jit's value does not follow: {found.why}. Pass "
                f"axis_name={self.ranks.axis!r} to a BatchNorm; update metrics outside of the "
                "loss, from auxiliary outputs."
            )
        return found.output


@dataclasses.dataclass(frozen=True)
class Found:
    """What the check says of one output: its relation, and the dimension of the examples."""

    relation: Relation
    dimension: int | None

    @property
    def output(self) -> Output:
        """What the ranks' values become; "?" if that is not known."""
        r, d = self.relation, self.dimension
        if r.kind is Kind.ZERO and d is not None:
            return d if d >= 0 else None
        if r == ROWS and d is not None and d >= 0:
            return d
        known: dict[Relation, Output] = {SAME: None, MEAN: "mean", SUM: "sum", SAME.at(1): "sum"}
        return known.get(r, "?")

    @property
    def why(self) -> str:
        """Why the output is as it is, for messages."""
        r = self.relation
        if r.why:
            return f"{r.why}{r.line}"
        power = f", times the number of ranks to the power of {r.power}" if r.power else ""
        return f"it is {r.kind.value}{power}"

    def suggestion(self, ranks: Ranks) -> Line:
        """Returns the entry of aux_specs that fits."""
        out = self.output
        return line(out if isinstance(out, str) else ranks.spec(out))


def finish(outputs: Pytree, values: Pytree, axes: Axes) -> Pytree:
    """Returns a tree of a rank's values, reduced over the axes where `outputs` says so."""
    treedef: jax.tree_util.PyTreeDef
    each, treedef = jax.tree.flatten(outputs, is_leaf=is_output)
    done = treedef.flatten_up_to(values)
    for how, reduce in (("mean", axes.mean), ("sum", axes.sum)):
        own = [i for i, out in enumerate(each) if out == how]
        for i, x in zip(own, reduce([done[i] for i in own]), strict=True):
            done[i] = x
    return jax.tree.unflatten(treedef, done)


def is_output(x: object) -> bool:
    """Whether `x` is an `Output`, for trees of them."""
    return x is None or isinstance(x, (str, int))


def _shape_of(x: Any, split: Split, times: int, world: int = 1) -> jax.ShapeDtypeStruct:
    """Returns the abstract value of a rank's part of an array, for `times` the batch."""
    shape = list(x.shape)
    if split.dimension is not None:
        shape[split.dimension] = shape[split.dimension] * times // world
    weak = bool(getattr(x, "weak_type", False))
    spec, context = typed_spec(x), jax.sharding.get_abstract_mesh()
    if context.empty or jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        sharding = None
    elif spec is None:  # as what is computed from it, which libraries compare with it
        sharding = NamedSharding(context, PartitionSpec(*(None for _ in shape)))
    else:  # on an explicit mesh, a rank's part keeps its type over the other axes
        sharding = NamedSharding(context, without(spec, context.manual_axes))
    return jax.ShapeDtypeStruct(tuple(shape), x.dtype, weak_type=weak, sharding=sharding)


def _kind(x: object) -> str:
    if isinstance(x, _NUMBERS):
        return "one value"
    return f"a tuple of {len(x)}" if isinstance(x, tuple) else f"{type(x).__name__}"
