"""`value_and_grad`: compressed data-parallel gradients under plain `jax.jit`."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding

from cgx_jax.compressors import Compressor
from cgx_jax.exchanges import Exchange
from cgx_jax.plain_jit import inference
from cgx_jax.plain_jit.arguments import CALLER, Argument, Place, is_nnx, names_of, nnx
from cgx_jax.plain_jit.closures import Closure
from cgx_jax.plain_jit.inference import Ranks, Split
from cgx_jax.plain_jit.model_axes import Shards
from cgx_jax.plain_jit.program import Program
from cgx_jax.plain_jit.reduction import GradientMean
from cgx_jax.plain_jit.step import Step
from cgx_jax.plan import Plan
from cgx_jax.policies.rules import Policy
from cgx_jax.reductions import Levels, Reduction
from cgx_jax.transforms.memory import Memory
from cgx_jax.transforms.precondition import SecondMoment


def value_and_grad(
    loss_fn: Callable[..., Any],
    axis_name: Any,
    policy: Compressor | Policy | Plan | None = None,
    *,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    mesh: Any = None,
    in_specs: Mapping[Any, Any] | None = None,
    aux_specs: Any = None,
    specs: Any = None,
    memory: Memory | None = None,
    precondition: SecondMoment | None = None,
    seed: int = 0,
    exchange: Exchange | str = "auto",
    reduction: Reduction | str | None = None,
    levels: Levels | None = None,
) -> ValueAndGrad:
    """`jax.value_and_grad` for data-parallel training under plain jit, with compressed gradients.

    Returns `f`, which takes the loss's positional and keyword arguments, as global arrays:
    `loss, grads = f(params, batch)`, or `(loss, aux), grads` with `has_aux`. Every rank of
    `axis_name` (a name or a tuple of names) differentiates the loss of its part of the batch. Loss
    and gradients are the means over the ranks. A gradient has its parameter's shape and dtype.
    `mesh` defaults to the mesh of `jax.set_mesh`, or that of the arguments' NamedShardings.
    `policy`, `exchange`, `reduction` and `levels` are as in `pmean_compressed`.

    *State.* `memory`, `precondition`, stochastic rounding, compressors with state and an `Adaptive`
    policy need a state. Create it with `state = f.init(params)`, and call `(loss, grads), state =
    f.apply(state, params, batch)`. It is a `SyncState` like that of `sync_gradients`, and `seed`
    has the same meaning. `state_shardings` places it. With `Adaptive`, compile the step with the
    policy's `jit`.

    *Differentiated arguments* (`argnums`) are pytrees (bare, Linen's, Equinox's) or NNX modules. In
    a pytree, the inexact arrays are differentiated, and the gradient of any other leaf is None. In
    an NNX module, the `nnx.Param` state is differentiated and the rest is updated, as in
    `nnx.value_and_grad`. These arguments are whole on every rank. If the mesh has other axes, they
    stay sharded over those. Where NNX metadata and concrete arrays do not show how, pass `specs`, a
    tree of PartitionSpecs like the differentiated argument.

    *Which arrays are split.* An array whose sharding over the axis is known (from a concrete
    NamedSharding, or a type on an explicit mesh) is split accordingly. Otherwise, the batch size is
    the first dimension of the first argument after the differentiated ones, and arrays with that
    first dimension are split. Other values are whole on every rank: scalars, PRNG keys, Python
    values, NNX objects such as `nnx.Rngs`, trees that hold the parameters, and trees like the
    parameters (with the same shapes, or with the same modules, like batch statistics). Each rank
    folds its index into keys, so that dropout differs between ranks. Variables that the loss closes
    over are treated as arguments. Anything else is refused until `in_specs` names it:
    `in_specs={"table": P(), "labels": P("data")}`. `in_specs` maps an argument's name or position,
    or a closed-over variable's name, to a spec or a prefix tree of specs. A key with P() is not
    folded.

    *Auxiliary outputs* are what plain jit returns. Per-example arrays are concatenated, sums over
    the batch are summed, other float scalars are averaged, and values that are the same on all
    ranks are returned unchanged. Any other output is refused until `aux_specs` says what it is.
    `aux_specs` is a prefix tree of PartitionSpecs, "mean" and "sum". NNX state that the loss
    updates follows the same rules.

    *The loss must be a mean over the batch.* To check this, it is traced at two batch sizes. A sum
    is refused. A loss that divides by a sum of weights or normalizes by a statistic of the batch is
    refused too, since these differ from rank to rank. Use `jax.lax.pmean(weights.sum(), axis_name)`
    inside the loss to make it exact. BatchNorm of NNX and Linen is given the axis, so its
    statistics are those of the whole batch. The check does not see statistics inside a
    `while_loop`, a loop over the examples or a custom kernel.

    Outside jit, a loss that closes over arrays is compiled again at every call. Raises ValueError
    and TypeError while tracing, with the value, the limit and the remedy.
    """
    names = tuple(axis_name) if isinstance(axis_name, (tuple, list)) else (axis_name,)
    if mesh is not None:
        _ranks(names, mesh)
    mean = GradientMean(axis_name, policy, memory, precondition, seed, exchange, reduction, levels)
    wanted = (argnums,) if isinstance(argnums, int) else tuple(argnums)
    options = _Options(names, mesh, wanted, isinstance(argnums, int), has_aux, aux_specs)
    return ValueAndGrad(loss_fn, options, dict(in_specs or {}), specs, mean)


@dataclasses.dataclass(frozen=True)
class _Options:
    names: tuple[str, ...]
    mesh: Any
    wanted: tuple[int, ...]
    single: bool
    has_aux: bool
    aux_specs: Any


class ValueAndGrad:
    """The function that `value_and_grad` returns, documented there."""

    def __init__(
        self,
        loss_fn: Callable[..., Any],
        options: _Options,
        in_specs: Mapping[Any, Any],
        specs: Any,
        mean: GradientMean,
    ):
        functools.update_wrapper(self, loss_fn, updated=())
        self._loss_fn, self._options = loss_fn, options
        self._in_specs, self._specs, self._mean = in_specs, specs, mean
        # A new function per instance, since jax.jit shares compiled programs between all users of
        # the same function.
        self._compiled = jax.jit(lambda step, *given: step(*given), static_argnums=0)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Returns (value, gradients) of the loss at these arguments, without a state."""
        self._mean.require_stateless()
        return self._run(None, args, kwargs)[0]

    def init(self, params: Any) -> Any:
        """Returns the state before the first step.

        `params` is the differentiated argument, or a tuple of them if `argnums` is a sequence. The
        state is a `SyncState`. It is the same on every rank, except for per-rank parts such as
        memories, which are split over the axis.
        """
        options = self._options
        given = (params,) if options.single else tuple(params)
        trees, arrays = [], []
        for number, value in enumerate(given):
            argument, own, places = Argument.of(value, number, f"argument {number}", number, True)
            trained = iter(zip(own, places, strict=True))
            leaves = [
                next(trained) if is_array else (None, None) for is_array, _ in argument.leaves
            ]
            kept = [x if place is not None and place.trained else None for x, place in leaves]
            trees.append(argument.parameters(kept))
            arrays += own
        ranks = _ranks(options.names, options.mesh or _mesh(options.names, arrays))
        return self._mean.init(trees[0] if options.single else tuple(trees), ranks.mesh)

    def apply(self, state: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Returns ((value, gradients), the state after the step)."""
        return self._run(state, args, kwargs)

    def _run(self, state: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        options = self._options
        arguments, arrays, places = _arguments(self._loss_fn, args, kwargs, options.wanted)
        ranks = _ranks(options.names, options.mesh or _mesh(options.names, arrays))
        closure = Closure(self._loss_fn)
        program = Program(
            closure=closure,
            arguments=arguments,
            places=tuple(places),
            captured=(),
            splits=(),
            ranks=ranks,
            has_aux=options.has_aux,
        )
        if closure.arrays:
            captured = program.used_captures(arrays)
            arrays += [closure.arrays[i] for i in captured]
            places += [
                Place.of_variable(closure.names[i], len(arguments), closure.arrays[i])
                for i in captured
            ]
            program = dataclasses.replace(program, captured=tuple(captured))
        places = _with_state(arrays, places, closure)
        program = dataclasses.replace(program, places=tuple(places))
        splits = inference.infer(ranks, arguments, arrays, places, self._in_specs)
        _require_a_split(splits, ranks, places)
        program = dataclasses.replace(program, splits=tuple(splits))
        specs = (self._specs,) if options.single else self._specs
        specs = (None,) * len(options.wanted) if self._specs is None else tuple(specs)
        shards = Shards.of(arguments, arrays, places, ranks, specs)
        step = Step(program, shards, self._mean, options.aux_specs, single=options.single)
        loss, grads, aux, rests, state = self._execute(step, arrays, state)
        objects = [x for x in (*args, *kwargs.values()) if is_nnx(x)]
        for owner, rest in zip(objects, rests, strict=True):
            nnx().update(owner, rest)
        return (((loss, aux) if options.has_aux else loss), grads), state

    def _execute(self, step: Step, arrays: list[Any], state: Any) -> Any:
        if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves((arrays, state))):
            return step(arrays, state)
        if not self._mean.adapts and step.hashable():
            return self._compiled(step, arrays, state)
        return jax.jit(lambda *given: step(*given))(arrays, state)


def _arguments(
    loss_fn: Callable[..., Any], args: Any, kwargs: Any, wanted: Sequence[int]
) -> tuple[tuple[Argument, ...], list[Any], list[Place]]:
    if any(not 0 <= i < len(args) for i in wanted):
        raise ValueError(
            f"{CALLER}: argnums {list(wanted)} are positions of arguments, but the call has "
            f"{len(args)} positional ones; pass the arguments to differentiate by position."
        )
    names = names_of(loss_fn, len(args))
    given: list[Any] = [(x, names[i], i, i in wanted) for i, x in enumerate(args)]
    given += [(x, name, None, False) for name, x in kwargs.items()]
    arguments, arrays, places = [], [], []
    for number, (value, name, position, own) in enumerate(given):
        argument, new, where = Argument.of(value, number, name, position, own)
        arguments.append(argument)
        arrays += new
        places += where
    return tuple(arguments), arrays, places


def _with_state(arrays: Sequence[Any], places: Sequence[Place], closure: Closure) -> list[Place]:
    """Returns places in which arrays that share a tree with differentiated arrays are state too.

    For instance, a training state holds the parameters of the call, but also statistics and other
    arrays.
    """
    trained = {id(x) for x, p in zip(arrays, places, strict=True) if p.trained}
    groups = list(closure.variables)
    for number in {p.argument for p in places}:
        own = [id(x) for x, p in zip(arrays, places, strict=True) if p.argument == number]
        if not set(own) & closure.arrays.keys():
            groups.append(set(own))
    state = {i for ids in groups if ids & trained for i in ids}
    return [
        dataclasses.replace(p, state=True) if id(x) in state else p
        for x, p in zip(arrays, places, strict=True)
    ]


def _ranks(names: tuple[str, ...], mesh: Any) -> Ranks:
    missing = [n for n in names if n not in mesh.axis_names]
    if missing or not names:
        raise ValueError(
            f"{CALLER}: axis {missing[0] if missing else names!r} is not in the mesh; it has "
            f"{mesh.axis_names}. Pass one of these, or a tuple of them, as axis_name."
        )
    return Ranks(mesh, names, math.prod(mesh.shape[n] for n in names))


def _mesh(names: tuple[str, ...], arrays: Sequence[Any]) -> Any:
    """Returns the mesh of `jax.set_mesh`, or that of an argument that is sharded over the axes."""
    context = jax.sharding.get_abstract_mesh()
    if not context.empty:
        return context
    for x in arrays:
        sharding = None if isinstance(x, jax.core.Tracer) else getattr(x, "sharding", None)
        if isinstance(sharding, NamedSharding) and set(names) <= set(sharding.mesh.axis_names):
            return sharding.mesh
    raise ValueError(
        f"{CALLER}: no mesh has axis {', '.join(map(repr, names))}: mesh=None, no mesh is set, and "
        "no argument shows a NamedSharding. Pass mesh=, or call jax.set_mesh(mesh) first."
    )


def _require_a_split(splits: Sequence[Split], ranks: Ranks, places: Sequence[Place]) -> None:
    if ranks.world == 1 or any(split.dimension is not None for split in splits):
        return
    whole = [p.path for p in places if not p.state]
    raise ValueError(
        f"{CALLER}: nothing is split over {ranks.axis!r}, so each of its {ranks.world} ranks would "
        f"compute the whole batch: {ranks.world} times the work. Arrays that every rank has "
        f"whole: {whole or 'none beside the parameters'}. Pass the batch as an argument of the "
        "loss (globals and attributes of objects are not seen), or name it: "
        f"in_specs={{'batch': P({ranks.axis!r})}}."
    )
