"""`value_and_grad`: compressed data-parallel gradients under plain `jax.jit`."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from cgx_jax import _compat
from cgx_jax._types import AxisName, Pytree
from cgx_jax.axes import Axes, names_of
from cgx_jax.compressors import Compressor, Identity
from cgx_jax.exchanges import Exchange
from cgx_jax.plain_jit import split
from cgx_jax.plain_jit.arguments import (
    CALLER,
    Given,
    Wanted,
    argument_names,
    is_nnx,
    line,
    nnx,
)
from cgx_jax.plain_jit.model_axes import Shards, as_now
from cgx_jax.plain_jit.program import Program, Traced, finish, is_output
from cgx_jax.plain_jit.reduction import GradientMean
from cgx_jax.plain_jit.split import Ranks, Split
from cgx_jax.plan import Plan
from cgx_jax.policies.rules import Policy
from cgx_jax.reductions import Levels, Reduction
from cgx_jax.transforms.checks import require_rows_of, require_type
from cgx_jax.transforms.inner_axes import init_on_shards, on_shards, shards_of
from cgx_jax.transforms.memory import Memory
from cgx_jax.transforms.precondition import SecondMoment
from cgx_jax.transforms.state import SyncState, state_specs
from cgx_jax.transforms.sync_gradients import Sync

_LOG = logging.getLogger(__name__)
_EXACT = Identity()


def value_and_grad(
    loss_fn: Callable[..., Pytree] | None,
    axis_name: AxisName,
    policy: Compressor | Policy | Plan | None = None,
    *,
    argnums: Any = 0,
    has_aux: bool = False,
    loss: str = "mean",
    mesh: Mesh | AbstractMesh | None = None,
    in_specs: Mapping[Any, Any] | None = None,
    aux_specs: Pytree = None,
    specs: Pytree = None,
    weights: Compressor | Policy | Plan | None = _EXACT,
    trust: bool = False,
    memory: Memory | None = None,
    precondition: SecondMoment | None = None,
    seed: int = 0,
    exchange: Exchange | str = "auto",
    reduction: Reduction | str | None = None,
    levels: Levels | None = None,
) -> ValueAndGrad:
    """`jax.value_and_grad` for data-parallel training under plain jit, with compressed gradients.

    Returns `f`, which takes the loss's positional and keyword arguments, as global arrays:
    `value, grads = f(params, batch)`, or `(value, aux), grads` with `has_aux`. Every rank of
    `axis_name` (a name or a tuple of names) differentiates the loss of its part of the batch. Value
    and auxiliary outputs are those of plain jit, and so are the gradients, up to the error of
    compression. A gradient has its parameter's shape and dtype. `mesh` defaults to the mesh of
    `jax.set_mesh`, or that of the arguments' NamedShardings. `policy`, `exchange`, `reduction` and
    `levels` are as in `pmean_compressed`.

    *The loss* is a mean over the examples (`loss="mean"`), or a sum over the examples and their
    count, `(sum, count)`, which are added up over the ranks and then divided (`loss="ratio"`). Use
    the second for weights, masks and padding.

    *The batch.* `in_specs` maps the name or position of an argument to a spec, or a prefix tree of
    specs: `in_specs={"batch": P("data"), "table": P()}`. Arrays that it does not name are split if
    their sharding over the axis is known (a concrete NamedSharding, or a type on an explicit mesh).
    The other arrays hold the batch if all of them have the same first dimension, and are refused
    otherwise. Differentiated arguments, scalars, Python values and NNX objects are whole on every
    rank. So are PRNG keys, into which each rank folds its index, so that ranks draw different
    dropout masks; with `in_specs={"key": P()}` they draw the same. An array of keys needs an
    entry; None does what it does for one key. Arrays that the loss closes over are whole on every
    rank too, and refused if they are as long as the batch.

    *Auxiliary outputs* need `aux_specs`: a tree like them, a prefix of one, or a function of a
    leaf's path, with "mean", "sum", `P(axis)` for one row per example, or `P()` for what is the
    same on every rank. NNX state that the loss updates needs no entry.

    *The check.* While tracing, the gradient's program is compared with plain jit's, operation by
    operation. A loss, gradient or output that does not provably follow from those of the ranks is
    refused, with the operation and its line. `trust=True` skips this check: the value is then the
    mean of the ranks' values, and outputs are what `aux_specs` makes of them.

    *Differentiated arguments* (`argnums`, ascending) are pytrees (bare, Linen's, Equinox's) or NNX
    modules. In a pytree, the inexact arrays are differentiated, and the gradient of any other leaf
    is None. In an NNX module, the `nnx.Param` state is differentiated and the rest is updated,
    as in `nnx.value_and_grad`. `nnx.DiffState(0, nnx.LoRAParam)` names other state.

    *Other axes of the mesh.* Parameters, gradients and memories stay sharded over them (HSDP). NNX
    metadata, concrete arrays and types on an explicit mesh show how. For what else jit hides, pass
    `specs`:

    * A tree of PartitionSpecs like the differentiated argument, or a prefix of one. With a sequence
      of `argnums`, a tuple of them.
    * Such a tree of NamedShardings, or of arrays from outside jit that have NamedShardings.
    * A function that takes a leaf's path, such as "layer/kernel" as policies see it, and returns
      its PartitionSpec.

    Inside the loss, `axis_name` is manual: wrap specs that name it in `drop_manual_axes`. Flax's
    logical axis rules that are set around the call, and the boxes of `nn.with_partitioning`, are
    followed without it.

    *Parameters sharded over `axis_name`* (FSDP) have it in their specs, for one dimension and alone
    there. They are gathered by `weights` (a compressor, policy or `Plan`; exact by default) before
    the operation that uses them: inside `jit` and `jax.checkpoint`, and layer by layer in a
    `lax.scan`, whose backward pass gathers again. Gradients are shards, whose mean travels by
    `policy`. There is no state: what needs one is refused. Source: QSDP (Markov et al., ICML 2023).

    *State.* `memory`, `precondition`, stochastic rounding, compressors with state and an `Adaptive`
    policy need a state. Create it with `state = f.init(params)`, and call `(value, grads), state =
    f.apply(state, params, batch)`. It is a `SyncState` like that of `sync_gradients`, and `seed`
    has the same meaning. `state_shardings` places it. For a loss that is made inside the step, pass
    None here: `value_and_grad(None, ...).init(params)` needs no loss. With `Adaptive`, compile the
    step with the policy's `jit`.

    Outside jit, every call traces the loss anew. Raises ValueError and TypeError while tracing,
    with the value, the limit and the remedy.
    """
    names = names_of(axis_name)
    if weights is None:  # as by default
        weights = _EXACT
    if mesh is not None:
        Ranks.of(names, mesh)
    if loss not in ("mean", "ratio"):
        raise ValueError(f'{CALLER}: loss={loss!r} must be "mean" or "ratio", for (sum, count).')
    if not isinstance(in_specs, Mapping | None):
        raise TypeError(
            f"{CALLER}: in_specs={in_specs!r} is no mapping; name the arguments of the loss that "
            f'are split: in_specs={{"batch": P({names[0]!r})}}.'
        )
    single = not isinstance(argnums, (tuple, list))
    try:
        wanted = tuple(map(Wanted.of, (argnums,) if single else argnums))
    except TypeError:
        raise TypeError(
            f"{CALLER}: argnums={argnums!r} must be a position, an nnx.DiffState, or a tuple of "
            "them."
        ) from None
    axis = names[0] if len(names) == 1 else names
    sync = Sync(
        axis_name=axis,
        policy=policy,
        memory=memory,
        precondition=precondition,
        seed=seed,
        exchange=exchange,
        reduction=reduction,
        levels=levels,
        name=CALLER,
    )
    mean = GradientMean(sync, weights)
    options = _Options(
        names=names,
        mesh=mesh,
        wanted=wanted,
        single=single,
        has_aux=has_aux,
        ratio=loss == "ratio",
        in_specs=dict(in_specs or {}),
        aux_specs=aux_specs,
        specs=as_now(specs),
        trust=trust,
    )
    return ValueAndGrad(loss_fn, options, mean)


@dataclasses.dataclass(frozen=True)
class _Options:
    names: tuple[str, ...]
    mesh: Mesh | AbstractMesh | None
    wanted: tuple[Wanted, ...]
    single: bool
    has_aux: bool
    ratio: bool
    in_specs: Mapping[Any, Any]
    aux_specs: Pytree
    specs: Pytree
    trust: bool


class ValueAndGrad:
    """The function that `value_and_grad` returns, documented there."""

    def __init__(
        self, loss_fn: Callable[..., Pytree] | None, options: _Options, mean: GradientMean
    ) -> None:
        if loss_fn is not None:
            functools.update_wrapper(self, loss_fn, updated=())
        self._loss_fn, self._options, self._mean = loss_fn, options, mean
        self._eager_calls = 0
        # A new function per instance, since jax.jit shares compiled programs between all users of
        # the same function.
        self._compiled = jax.jit(lambda step, *given: step(*given), static_argnums=0)

    def __call__(self, *args: Pytree, **kwargs: Pytree) -> Pytree:
        """Returns (value, gradients) of the loss at these arguments, without a state."""
        self._mean.require_stateless()
        return self._run(None, args, kwargs)[0]

    def init(self, params: Pytree) -> Pytree:
        """Returns the state before the first step.

        `params` is the differentiated argument, or a tuple of them if `argnums` is a sequence. The
        state is a `SyncState`. It is the same on every rank, except for per-rank parts such as
        memories, which are split over the axis, and sharded like the parameters over the others.
        """
        options = self._options
        trees = (params,) if options.single else tuple(params)
        if len(trees) != len(options.wanted):
            raise ValueError(
                f"{CALLER}: init has {len(trees)} trees of parameters, but argnums names "
                f"{len(options.wanted)} arguments; pass one tree for each."
            )
        pairs = enumerate(zip(trees, options.wanted, strict=True))
        entries = ((value, f"argument {n}", n, wanted) for n, (value, wanted) in pairs)
        given = Given.of(entries, options.single)
        tree = given.parameters(given.arrays[i] for i in given.trained)
        ranks = Ranks.of(options.names, options.mesh or _mesh(options.names, given.arrays))
        shards = Shards.of(given, ranks, options.specs)
        shards.require_whole()
        init = dataclasses.replace(self._mean.sync, mesh=ranks.mesh).init
        sharded = any(map(len, shards.specs))
        specs = jax.tree.unflatten(jax.tree.structure(tree), shards.specs) if sharded else None
        return init_on_shards(CALLER, init, tree, specs, options.names, ranks.mesh)

    def apply(self, state: Pytree, *args: Pytree, **kwargs: Pytree) -> tuple[Pytree, Pytree]:
        """Returns ((value, gradients), the state after the step)."""
        require_type(CALLER, state, SyncState)
        return self._run(state, args, kwargs)

    def _run(self, state: Pytree, args: Pytree, kwargs: Pytree) -> tuple[Pytree, Pytree]:
        options = self._options
        if self._loss_fn is None:
            raise TypeError(
                f"{CALLER}: the loss is None, which is for `init` only; pass the loss to "
                "value_and_grad inside the step."
            )
        _require_plain(options.names)
        names = argument_names(self._loss_fn, len(args))
        wanted = {each.position: each for each in _positive(options.wanted, len(args))}
        entries: list[Any] = [(x, names[i], i, wanted.get(i)) for i, x in enumerate(args)]
        entries += [(x, name, None, None) for name, x in kwargs.items()]
        given = Given.of(entries, options.single)
        found = [p for p in given.places if given.arguments[p.argument].wanted]
        if found and not given.trained:
            raise TypeError(
                f"{CALLER}: {found[0].path} holds no floats, and nor does any other array of "
                "argnums, so there is nothing to differentiate."
            )
        ranks = Ranks.of(options.names, options.mesh or _mesh(options.names, given.arrays))
        if state is not None:
            require_rows_of(CALLER, state, ranks.world)
        program = Program(self._loss_fn, given, ranks, options.has_aux, options.ratio)
        step = self._step(program)
        if state is not None:
            step.shards.require_whole()
        value, grads, aux, rests, state = self._execute(step, given.arrays, state)
        objects = [x for x in (*args, *kwargs.values()) if is_nnx(x)]
        for owner, rest in zip(objects, rests, strict=True):
            nnx().update(owner, rest)
        return (((value, aux) if options.has_aux else value), grads), state

    def _step(self, program: Program) -> _Step:
        """Traces and checks one call's program."""
        options, ranks, given = self._options, program.ranks, program.given
        shards = Shards.of(given, ranks, options.specs)
        trained = given.trained
        pairs = zip(trained, shards.dimensions, strict=True)
        cut = {i: d for i, d in pairs if d is not None}
        asks = program.is_raw_key, program.traces
        splits = split.choose(ranks, given, options.in_specs, cut, *asks)
        if ranks.world > 1 and all(s.dimension is None for s in splits):
            raise ValueError(
                f"{CALLER}: nothing is split over {ranks.axis!r}, so each of its {ranks.world} "
                f"ranks would compute the whole batch: {ranks.world} times the work. Pass the "
                "batch as an argument of the loss. The loss closes over these arrays: "
                f"{program.captured() or 'none'}."
            )
        if ranks.world > 1 and not options.trust:
            _ = program.whole  # fails as plain jit does, if the loss is wrong
        try:
            part = program.part(splits)
        except Exception as error:
            known = str(error).startswith(f"{CALLER}: ")
            if ranks.world > 1 and isinstance(error, (TypeError, ValueError)) and not known:
                program.check_constants(program.whole, splits)
                raise _of_a_part(program, splits, error) from error
            raise
        program.check_constants(part, splits)
        _, aux, rests, _ = part.parts(part.jaxpr.out_avals)
        if ranks.world > 1 and not options.trust:
            losses, (value, aux, rests, grads) = program.check(splits, part)
            program.require_mean(losses, value, grads)
        outputs = program.outputs(options.aux_specs, part, aux, rests)
        if cut:
            self._mean.require_flat()
            whole = [given.arrays[i] for i in trained]
            local = shards_of(whole, shards.specs, ranks.mesh)
            tree = given.parameters(local)
            each = zip(trained, self._mean.gathers(tree, shards), strict=True)
            gathers = {i: gather for i, gather in each if gather is not None}
            part = program.part(splits, gathers=gathers)
        elif self._mean.weights != _EXACT and ranks.world > 1:
            raise ValueError(
                f"{CALLER}: weights={self._mean.weights} is for parameters that are sharded over "
                f"{ranks.axis!r}, and none is known to be; name the axis in specs=, as in "
                f"specs={{'w': {line(ranks.spec(0))}}}."
            )
        return _Step(part, splits, ranks, shards, outputs, self._mean)

    def _execute(self, step: _Step, arrays: list[jax.Array], state: Pytree) -> Pytree:
        consts = step.part.jaxpr.consts
        if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves((consts, arrays, state))):
            return step(consts, arrays, state)
        self._eager_calls += 1
        if self._eager_calls == 2:
            _LOG.warning(
                "%s: outside jit, every call traces the loss; a jitted step is faster.", CALLER
            )
        if self._mean.adapts:
            return jax.jit(lambda *given: step(*given))(consts, arrays, state)
        return self._compiled(step, consts, arrays, state)


@dataclasses.dataclass(eq=False)
class _Step:
    """A checked program as a function of global arrays; equal ones share what is compiled."""

    part: Traced
    splits: tuple[Split, ...]
    ranks: Ranks
    shards: Shards
    outputs: tuple[Pytree, Pytree]
    mean: GradientMean

    @functools.cached_property
    def _key(self) -> tuple[object, ...]:
        outputs = jax.tree.flatten(self.outputs, is_leaf=is_output)
        # The program's text: it names objects by their address, and this step keeps them alive. The
        # text of a program within it leaves out its constants.
        jaxpr = self.part.jaxpr
        text = str(jaxpr) + str([id(x) for x in _compat.constants_within(jaxpr.jaxpr)])
        if "callback" in text or "..." in text:  # a text that leaves something out
            text += f" {id(self.part)}"
        return text, self.part.trees, self.splits, self.ranks, self.shards, str(outputs)

    def __hash__(self) -> int:
        return hash(self._key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Step) and self._key == other._key

    def __call__(self, consts: Pytree, arrays: Sequence[jax.Array], state: Pytree) -> Pytree:
        """Returns (value, gradients, aux, NNX states, state)."""
        ranks, everywhere = self.ranks, PartitionSpec()

        def local(consts: Pytree, arrays: Sequence[jax.Array], state: Pytree) -> Pytree:
            own = [
                _folded(x, lax.axis_index(ranks.axis)) if s.fold else x
                for x, s in zip(arrays, self.splits, strict=True)
            ]
            results = _compat.evaluate(self.part.jaxpr, consts, own)
            # The caller gets a key back as it gave it.
            inputs = self.part.jaxpr.jaxpr.invars
            back = dict(zip(inputs, arrays, strict=True))
            results = [
                back.get(x, value) if x in inputs else value
                for x, value in zip(self.part.jaxpr.jaxpr.outvars, results, strict=True)
            ]
            value, aux, rests, grads = self.part.parts(results)
            mean = functools.partial(self.mean, dimensions=self.shards.dimensions)
            if self.shards.axes:
                grads, state = on_shards(CALLER, mean, self.shards.specs, grads, state)
            else:
                grads, state = mean(grads, state, None)
            axes = Axes(ranks.names, None, ranks.world)
            done = finish(self.outputs, (aux, rests), axes)
            return value, grads, *done, state

        def specs(tree: Pytree) -> Pytree:
            spec = lambda o: ranks.spec(o if isinstance(o, int) else None)  # noqa: E731
            return jax.tree.map(spec, tree, is_leaf=is_output)

        kept = everywhere
        if state is not None:
            kept = state_specs(state, ranks.axis)
            row = lambda x, spec: ranks.placed(x, 0 if len(spec) else None)  # noqa: E731
            state = jax.tree.map(row, state, kept)
        arrays_at = [ranks.spec(s.cut) for s in self.splits]
        like = self.part.parts(self.part.jaxpr.out_avals)[3]
        grads_at = jax.tree.unflatten(
            jax.tree.structure(like), map(ranks.spec, self.shards.dimensions)
        )
        placed = [ranks.placed(x, s.dimension) for x, s in zip(arrays, self.splits, strict=True)]
        return jax.shard_map(
            local,
            mesh=ranks.mesh,
            in_specs=(everywhere, arrays_at, kept),
            out_specs=(everywhere, grads_at, *specs(self.outputs), kept),
            axis_names=set(ranks.names),
            check_vma=False,
        )(list(consts), placed, state)


def _folded(key: jax.Array, rank: jax.Array) -> jax.Array:
    """Folds the rank into a key, raw or not, or into each of an array of keys."""
    if not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        return jax.random.fold_in(key, rank)
    each = jax.vmap(lambda k: jax.random.fold_in(k, rank))(key.reshape(-1))
    return each.reshape(key.shape)


def _of_a_part(program: Program, splits: tuple[Split, ...], error: Exception) -> Exception:
    """Returns the error of a loss that works on the whole batch and fails on a part of it."""
    ranks, given = program.ranks, program.given
    cut = [i for i, s in enumerate(splits) if s.dimension is not None]
    listed = ", ".join(f"{given.shown(i)} in dimension {splits[i].dimension}" for i in cut)

    def others() -> Iterator[str]:
        """Yields the entries of in_specs with which the loss can be traced."""
        for number in dict.fromkeys(given.places[i].argument for i in cut):
            own = [i for i in cut if given.places[i].argument == number]
            for other in (Split(), Split(0)):
                changed = tuple(other if i in own else s for i, s in enumerate(splits))
                whole = all(s.dimension is None for s in changed)
                rows = (given.arrays[i].shape[0] for i in own)
                uneven = other.dimension == 0 and any(n % ranks.world for n in rows)
                if not (changed == splits or whole or uneven) and program.traces(changed):
                    yield f"{given.arguments[number].name!r}: {line(ranks.spec(other.dimension))}"

    remedy = (
        "If an array carries global sizes, as haliax's named arrays do, build it inside the loss. "
        "If the loss needs a number of examples, as groups of a fixed size do, take a batch of "
        f"{ranks.world} times as many"
    )
    if "with_sharding_constraint" in str(error):
        remedy = (
            "A spec in the loss does not fit its array, which shows under a mesh only. Flax's "
            "DenseGeneral constrains a partitioned kernel so; take nn.Dense, or no box around it"
        )
    elif entry := next(others(), None):
        remedy = f"If that fits the batch, the loss can be traced with in_specs={{{entry}}}"
    return ValueError(
        f"{CALLER}: the loss works on the whole batch, but fails on the part of one of the "
        f"{ranks.world} ranks, with these split over {ranks.axis!r}: {listed}. {remedy}. The error "
        f"was: {type(error).__name__}: {error}"
    )


def _require_plain(names: tuple[str, ...]) -> None:
    """Raises ValueError inside a shard_map or pmap over one of the axes."""
    inside = next((n for n in names if _compat.bound_by_mesh((n,))), None)
    if inside is not None:
        raise ValueError(
            f"{CALLER}: it is for plain jit, but shard_map or pmap around this call gives each "
            f"rank of axis {inside!r} its part of the batch already. Inside, take "
            "jax.value_and_grad, and reduce the gradients with cgx_jax.sync_gradients or "
            "cgx_jax.pmean_compressed."
        )


def _positive(wanted: Sequence[Wanted], count: int) -> tuple[Wanted, ...]:
    """Returns what to differentiate; negative positions count from the end."""
    given = [each.position for each in wanted]
    if any(not -count <= i < count for i in given):
        raise ValueError(
            f"{CALLER}: argnums {given} are positions of arguments, but the call has "
            f"{count} positional ones; pass the arguments to differentiate by position."
        )
    found = [i % count for i in given]
    if found != sorted(set(found)):
        raise ValueError(
            f"{CALLER}: argnums {given} must ascend, each position once, since gradients "
            f"come in the order of the arguments; write argnums={tuple(sorted(set(found)))}."
        )
    return tuple(Wanted(i, each.part) for i, each in zip(found, wanted, strict=True))


def _mesh(names: tuple[str, ...], arrays: Sequence[jax.Array]) -> Mesh | AbstractMesh:
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
