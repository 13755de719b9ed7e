"""`diloco`: workers train on their own for many steps, then send how far they have moved."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from cgx_jax import _compat
from cgx_jax._types import AxisName, Pytree
from cgx_jax.arguments import whole_number
from cgx_jax.axes import Axes, after, names_of
from cgx_jax.leaves import leaves_of, map_with_paths, path_of, same_structure
from cgx_jax.plan import Plan, resolve
from cgx_jax.policies.rules import Policy
from cgx_jax.policies.stages import Stages
from cgx_jax.route.route import Chooser
from cgx_jax.transforms.checks import (
    Expected,
    require_count,
    require_dtypes,
    require_own_row,
    require_paths,
    require_rows,
    require_type,
)
from cgx_jax.transforms.inner_axes import (
    at_specs,
    init_on_shards,
    shards_of,
    specs_in_types,
    specs_of,
)
from cgx_jax.transforms.own_rows import as_rows, axes_of, is_bound, own_row, rows_of
from cgx_jax.transforms.state import Fragment, LocalState, is_any_tree, sync_states
from cgx_jax.transforms.sync_gradients import Sync

if TYPE_CHECKING:
    import optax


def diloco(
    inner: optax.GradientTransformation,
    axis_name: AxisName,
    policy: Any = None,
    *,
    every: int,
    outer: optax.GradientTransformation | None = None,
    fragments: int | Callable[[str], int] = 1,
    delay: int = 0,
    mix: float = 0.0,
    mesh: Mesh | AbstractMesh | None = None,
    specs: Pytree = None,
    **options: Any,
) -> optax.GradientTransformationExtraArgs:
    """DiLoCo: workers take `every` steps of `inner` alone, then one of `outer` together.

    Each rank of `axis_name` is a worker. Each update moves the worker's own parameters, which are
    `local_params(params, state)`: compute gradients at these. `params` are the same on all workers.
    Every `every` steps, the workers reduce how far they have moved, and `outer` takes a step on the
    negative mean, the outer gradient; its default is Nesterov's momentum, `optax.sgd(0.7,
    momentum=0.9, nesterov=True)`. In all other steps the update of `params` is 0 and nothing is
    sent. Each worker keeps its own state of `inner`. `policy` and `options` (`memory`, `seed`,
    `exchange` and so on) are those of `sync_gradients`, which does the reduction.

    * `fragments` splits the leaves into parts of about as many bytes, which are sent at different
      steps of a round: a peak of the traffic is shorter by this number. A function of a leaf's path
      gives the number of its fragment.
    * `delay`: what is sent in a step is applied `delay` steps later, less than `every`. Over
      `exchange="mpi"`, the workers send it while they take these steps.
    * `mix`, in [0, 1], is how much of its own parameters a worker keeps when a fragment is applied;
      the rest are the shared ones.
    * `update(..., weight=w)`: the mean counts this worker `w` times, such as its number of tokens.
      The weight of the step that sends counts. Weights are 0 or more. A worker with weight 0 adds
      nothing, whatever its parameters are; if all weights are 0, the outer gradient is 0.

    A worker may be many devices, on a mesh whose other axes XLA handles. `specs` say how parameters
    are sharded over these, as in `sync_gradients`; `init` shards its state alike. Nothing overlaps
    then, whatever the delay.

    Sources: DiLoCo (Douillard et al., 2023); Streaming DiLoCo (Douillard et al., 2025) for
    fragments, delay and mix. With `TopK` and `ErrorFeedback` and an `outer` without momentum this
    is SparseLoCo (2025).

    The state is a `LocalState`. `state_specs`, `state_shardings` and `resize_state` take it. Raises
    TypeError or ValueError for numbers that do not fit, for an `Adaptive` policy or `Stages` with
    several fragments, for a `Tuner`, which times single steps, for what `sync_gradients` refuses,
    and, under check_vma, for gradients that are the same on all workers.
    """
    import optax

    if outer is None:
        outer = optax.sgd(0.7, momentum=0.9, nesterov=True)
    how = every, fragments, delay, mix, mesh, options, specs
    return _Workers("diloco", inner, outer, axis_name, policy, *how).transformation()


def local_steps(
    optimizer: optax.GradientTransformation,
    axis_name: AxisName,
    policy: Any = None,
    *,
    every: int,
    mesh: Mesh | AbstractMesh | None = None,
    specs: Pytree = None,
    **options: Any,
) -> optax.GradientTransformationExtraArgs:
    """Local SGD: `diloco` in which the workers' mean is the new parameters.

    Ranks take steps of `optimizer` by themselves and average every `every` steps. `policy` and
    `options` are those of `sync_gradients`, and `specs` those of `diloco`. With
    `memory=ErrorFeedback()`, what compression loses is sent in the next step that reduces.

    `optax.MultiSteps` is different: it adds up gradients at the same parameters.

    Raises TypeError or ValueError for an `every` that is not an integer of 1 or more. Source:
    Qsparse-local-SGD (Basu et al., NeurIPS 2019).
    """
    import optax

    mean = optax.sgd(1.0)
    return _Workers(
        "local_steps", optimizer, mean, axis_name, policy, every, 1, 0, 0.0, mesh, options, specs
    ).transformation()


# Those of `sync_gradients`, which does the reductions.
_OPTIONS = frozenset({"memory", "precondition", "seed", "exchange", "reduction", "levels"})


@dataclasses.dataclass(frozen=True)
class _Workers:
    """The arguments of `diloco`; `name` is the call that the user wrote."""

    name: str
    inner: Any
    outer: Any
    axis_name: AxisName
    policy: Any
    every: int
    fragments: int | Callable[[str], int]
    delay: int
    mix: float
    mesh: Mesh | AbstractMesh | None
    options: dict[str, Any]
    specs: Pytree = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "axis_name", axes_of(self.name, self.axis_name))
        for option in ("inner", "outer"):
            if not hasattr(value := getattr(self, option), "update"):
                raise TypeError(
                    f"{self.name}: {option}={value!r} is not an optimizer; pass one of Optax, such "
                    "as optax.adamw(1e-3)."
                )
        if unknown := sorted(set(self.options) - _OPTIONS):
            raise TypeError(
                f"{self.name}: {unknown[0]!r} is not an option; it takes {sorted(_OPTIONS)} of "
                "sync_gradients."
            )
        whole_number(self.name, "every", self.every, 1)
        whole_number(self.name, "delay", self.delay)
        if isinstance(self.options.get("exchange"), Chooser):
            raise ValueError(
                f"{self.name}: exchange is a tuner, which chooses by the time of single steps, but "
                'most steps send nothing; name an exchange, such as exchange="mpi".'
            )
        self._sync(self.policy)
        if not 0 <= self.delay < self.every:
            raise ValueError(
                f"{self.name}: delay={self.delay} must be in [0, {self.every - 1}]: what is sent "
                f"must be applied before it is sent again, every={self.every} steps later."
            )
        if not isinstance(self.mix, int | float) or not 0 <= self.mix <= 1:
            raise ValueError(f"{self.name}: mix={self.mix} must be in [0, 1].")
        if not callable(self.fragments):  # each is sent in a step of its own
            whole_number(self.name, "fragments", self.fragments, 1, self.every)

    def transformation(self) -> optax.GradientTransformationExtraArgs:
        import optax

        return optax.GradientTransformationExtraArgs(self.init, self.update)

    def init(self, params: Pytree) -> LocalState:
        specs = specs_in_types(params) if self.specs is None else self.specs
        return init_on_shards(self.name, self._init, params, specs, self.axis_name, self.mesh)

    def _init(self, params: Pytree) -> LocalState:
        like = jax.eval_shape(lambda p: p, params)
        rows = functools.partial(rows_of, self.axis_name, self.mesh, self.name)

        def zeros(tree: Pytree) -> Pytree:
            return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), tree)

        def none() -> Any:
            count = jnp.zeros((), jnp.int32)  # each its own array, so that it can be donated
            if self.mesh is None or is_bound(names_of(self.axis_name)):
                return count
            at = NamedSharding(self.mesh, PartitionSpec())
            return lax.with_sharding_constraint(count, at)

        def none_sent(own: Pytree) -> tuple[Pytree, Pytree]:
            return (zeros(own), jnp.zeros(2, jnp.uint32)) if self.delay else ((), ())

        parts = self._parts(params)
        synced = [part.sync.init(part.of(params)) for part in parts]  # refuses wrong wrappers

        def own_of(params: Pytree) -> Pytree:
            sent = [none_sent(part.of(like)) for part in parts]
            return zeros(like), self.inner.init(params), sent

        moved, optimizer, sent = rows(own_of, operands=(params,))
        made = []
        for part, sync, (waiting, ticket) in zip(parts, synced, sent, strict=True):
            late = waiting, ticket, none() if self.delay else ()
            made.append(Fragment(sync, self._outer_init(part.of(params)), *late))
        fragments: Any = tuple(made)
        if is_any_tree(params) and self.fragments != 1:
            fragments = jnp.zeros((), jnp.int32)  # stands for parts that depend on the leaves
        return LocalState(none(), moved, optimizer, fragments)

    def update(
        self,
        updates: Pytree,
        state: LocalState,
        params: Pytree = None,
        *,
        weight: Any = None,
        **extra_args: object,
    ) -> tuple[Pytree, LocalState]:
        import optax

        require_type(self.name, state, LocalState)
        axes = Axes.resolve(self.name, self.axis_name, None)
        _check_moved(self.name, state, updates)
        updates = self._own(axes, updates)
        before = own_row(state.moved)
        if params is not None:
            _require_as_wide(self.name, "moved", before, params)
        parts = self._parts(before)  # what is sent has the parameters' dtypes
        made = self._check(axes, state, parts, before)
        here = None if params is None else _moved_from(params, before)
        step = optax.with_extra_args_support(self.inner).update
        held = own_row(state.optimizer)
        if any(jax.tree.leaves(jax.tree.map(_is_narrower, held, made))):
            # What follows the gradients' dtype may be narrower than init makes it.
            _, after_one = jax.eval_shape(step, updates, made, here, **extra_args)
            least = jax.tree.map(lambda a, b: a if _is_narrower(a, b) else b, after_one, made)
            _require_as_wide(self.name, "inner optimizer's state", held, least)
        updates, own = step(updates, held, here, **extra_args)
        moved, treedef = jax.tree.flatten(
            jax.tree.map(lambda a, b: a + b.astype(a.dtype), before, updates)
        )
        # A branch's collectives wait for those of the step.
        number = after(state.step, moved) + 1
        out, kept = [*moved], []
        for part, fragment in zip(parts, state.fragments, strict=True):
            mine = [moved[i] for i in part.numbers]
            shared = None if params is None else part.of(params)
            change, mine, fragment = self._exchanged(
                axes, part, number, mine, fragment, shared, weight
            )
            kept.append(fragment)
            for i, u, x in zip(part.numbers, change, mine, strict=True):
                out[i], moved[i] = u, x
        ahead, own = as_rows(axes, (jax.tree.unflatten(treedef, moved), own))
        new = LocalState(state.step + 1, ahead, own, tuple(kept))
        return jax.tree.unflatten(treedef, [_compat.same_over(x, axes.names) for x in out]), new

    def _exchanged(
        self,
        axes: Axes,
        part: _Part,
        number: jax.Array,
        moved: list[jax.Array],
        fragment: Fragment,
        params: Pytree,
        weight: Any,
    ) -> tuple[list[jax.Array], list[jax.Array], Fragment]:
        """Returns a fragment's update, how far this worker has moved from it, and its state."""
        treedef = jax.tree.structure(part.like)

        def vary(xs: list[jax.Array]) -> list[jax.Array]:
            names = axes.varying()
            return [_compat.vary_over(x, names) for x in xs]

        def sent() -> Pytree:
            own = moved if weight is None else self._weighted(axes, moved, weight)
            return jax.tree.unflatten(treedef, vary(own))

        def apply(mean: Pytree, state: Any) -> Any:
            gradient = jax.tree.map(jnp.negative, mean)
            change, state = self.outer.update(gradient, state, params)
            pairs = zip(moved, jax.tree.leaves(change), strict=True)
            change = [u.astype(x.dtype) for x, u in pairs]
            ahead = [jnp.zeros_like(x) for x in moved]  # of the parameters that all share now
            if self.mix:
                each = zip(moved, change, strict=True)
                ahead = [jnp.asarray(self.mix, x.dtype) * (x - u) for x, u in each]
            return change, vary(ahead), state

        zeros = [_compat.same_over(jnp.zeros_like(x), axes.names) for x in moved]
        idle = zeros, vary(moved), fragment.outer

        def arrive() -> Any:
            if self.delay:
                waiting, ticket = own_row((fragment.waiting, fragment.ticket))
                mean, synced = part.sync.finish(waiting, fragment.sync, ticket)
            else:
                mean, synced = part.sync.update(sent(), fragment.sync)
            return *apply(mean, fragment.outer), synced

        if self.every == 1:
            change, ahead, state, synced = arrive()
            specs = jax.tree.leaves(part.sync.specs) or None
            return change, at_specs(ahead, specs), Fragment(synced, state)
        due = (number % self.every) == part.offset
        left = after(fragment.left, moved) if self.delay else jnp.int32(0)
        arrives = left == 1 if self.delay else due
        change, ahead, state, synced = lax.cond(arrives, arrive, lambda: (*idle, fragment.sync))
        if not self.delay:
            return change, ahead, Fragment(synced, state)

        def send() -> Pytree:
            own = sent()
            return as_rows(axes, (own, part.sync.start(own, synced)))

        # What arrives was sent before this step, and leaves its place before the next is sent. With
        # another delay than before, something may still wait.
        due &= left <= 1
        waiting, ticket = lax.cond(due, send, lambda: (fragment.waiting, fragment.ticket))
        left = jnp.where(due, self.delay, jnp.maximum(left - 1, 0)).astype(jnp.int32)
        return change, ahead, Fragment(synced, state, waiting, ticket, left)

    def _outer_init(self, own: Pytree) -> Pytree:
        """Returns the outer optimizer's state, in the dtypes that its update keeps.

        An fp32 schedule, for example, makes momentum in bfloat16 fp32. Raises ValueError if the
        state of an integer changes its dtype.
        """
        state = self.outer.init(own)
        if is_any_tree(own):
            return state
        state, after = jax.tree.map(jnp.asarray, state), self._outer_after(own)
        if not same_structure(after, state):
            raise ValueError(
                f"{self.name}: the update of the outer optimizer returns another tree than its "
                "init, so it has no state that fits both."
            )

        def kept(path: Any, x: Any, after: Any) -> Any:
            if x.dtype == after.dtype:
                return x
            if not jnp.issubdtype(x.dtype, jnp.inexact):
                raise ValueError(
                    f"{self.name}: after a step, the outer optimizer keeps {after.dtype} in place "
                    f"of {x.dtype} in its state {path_of(path)!r}, as momentum of an integer does. "
                    "Keep integers out of params, or pass outer=optax.sgd(0.7), which has no "
                    "momentum."
                )
            return x.astype(after.dtype)

        return map_with_paths(kept, state, after)

    def _outer_after(self, own: Pytree) -> Pytree:
        """Returns shapes and dtypes of the outer optimizer's state after some steps."""
        like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), own)
        after = jax.eval_shape(self.outer.init, like)
        free = [(n, 1) for n in names_of(self.axis_name) if not is_bound((n,))]
        trace = jax.make_jaxpr(self.outer.update, axis_env=free, return_shape=True)
        for _ in range(4):  # what is wider may widen another part in the step after
            before = [x.dtype for x in jax.tree.leaves(after)]
            with jax.numpy_dtype_promotion("standard"):  # as Optax is written
                _, (_, after) = trace(like, after, like)
            if [x.dtype for x in jax.tree.leaves(after)] == before:
                break
        return after

    def _own(self, axes: Axes, updates: Pytree) -> Pytree:
        """Returns the gradients, with numbers that the program knows as each worker's own.

        Raises ValueError for gradients that all workers have computed together.
        """
        leaves, treedef = jax.tree.flatten(updates)
        for i, leaf in enumerate(leaves_of(updates)):
            x = leaves[i]
            if not jnp.issubdtype(leaf.dtype, jnp.inexact):
                continue
            missing = sorted(axes.varying() - _compat.varying_axes(x))
            known = not isinstance(x, jax.core.Tracer) or _compat.is_filled(x, axes.names)
            if missing and not known:
                raise ValueError(
                    f"{self.name}: the gradient of leaf {leaf} does not vary over axis "
                    f"{missing[0]!r}, so it is the same on all workers: it was taken at params, "
                    "where jax.grad inserts a psum, or averaged. Take it at "
                    "cgx_jax.transforms.local_params(params, state), and leave out lax.pmean."
                )
            leaves[i] = _compat.vary_over(jnp.asarray(x), axes.varying())
        return jax.tree.unflatten(treedef, leaves)

    def _check(self, axes: Axes, state: LocalState, parts: list[_Part], like: Pytree) -> Pytree:
        """Raises ValueError for a state that was made with other options.

        Returns the shapes of the inner optimizer's state as init makes it.
        """
        remedy = "Use the state that init returned with these options."
        require_count(self.name, "step", state.step)
        if len(parts) != len(state.fragments):
            raise ValueError(
                f"{self.name}: the state has {len(state.fragments)} fragments, but these leaves "
                f"have {len(parts)}. {remedy}"
            )

        same = functools.partial(_compat.same_over, axes=axes.names)
        inner: Any = jax.eval_shape(lambda xs: self.inner.init(jax.tree.map(same, xs)), like)
        both = inner, own_row(state.optimizer)
        shapes = [[x.shape for x in jax.tree.leaves(tree)] for tree in both]
        if not same_structure(inner, state.optimizer) or shapes[0] != shapes[1]:
            raise ValueError(f"{self.name}: the state is of another inner optimizer. {remedy}")
        for part, fragment in zip(parts, state.fragments, strict=True):
            require_type(self.name, fragment, Fragment)
            require_own_row(self.name, (fragment.waiting, fragment.ticket))
            own = part.of(like)
            waits = not same_structure(fragment.waiting, ())
            if waits != (self.delay > 0 and not same_structure(own, ())):
                raise ValueError(
                    f"{self.name}: delay={self.delay}, but the state was made "
                    f"{'without' if self.delay else 'with'} a delay. {remedy}"
                )
            made: Any = jax.eval_shape(self._outer_init, own)
            if not same_structure(made, fragment.outer):
                raise ValueError(
                    f"{self.name}: the state is of another outer optimizer, or of fragments with "
                    f"other leaves. {remedy}"
                )
            require_dtypes(self.name, "outer optimizer's state", fragment.outer, made)
            if self.delay:
                expected = Expected(self.name, leaves_of(own), jax.tree.structure(own), remedy)
                require_paths(expected, "reduction that waits", (fragment.waiting,))
                require_dtypes(self.name, "reduction that waits", fragment.waiting, own)
        return inner

    def _weighted(self, axes: Axes, moved: list[jax.Array], weight: Any) -> list[jax.Array]:
        """Returns what each worker sends, so that the mean counts a worker by its weight."""
        own = jnp.asarray(weight, jnp.float32)
        if own.ndim:
            raise ValueError(
                f"{self.name}: weight has shape {list(own.shape)}; pass a number, f32[]."
            )
        own = _compat.vary_over(own, axes.varying())
        (total,) = axes.sum([own])
        factor = own * axes.world / jnp.where(total == 0, 1, total)

        def scaled(x: jax.Array) -> jax.Array:
            # A worker that does not count may hold anything, such as NaN.
            y = jnp.where(own == 0, 0, x.astype(jnp.result_type(x, jnp.float32)) * factor)
            whole = not jnp.issubdtype(x.dtype, jnp.inexact)
            return (jnp.round(y) if whole else y).astype(x.dtype)

        with jax.numpy_dtype_promotion("standard"):
            return [scaled(x) for x in moved]

    def _parts(self, tree: Pytree) -> list[_Part]:
        leaves = leaves_of(tree)
        numbers = self._numbers([leaf.path for leaf in leaves], [leaf.nbytes for leaf in leaves])
        whole = len(numbers) == 1
        policy, specs, local = self.policy, self.specs, None
        if specs is None:
            specs = specs_in_types(tree)
        if specs is not None:
            given = specs_of(self.name, specs, tree, names_of(self.axis_name), self.mesh)
            specs = jax.tree.unflatten(jax.tree.structure(tree), given)
            local = shards_of(tree, given, self.mesh)
        if not whole:
            if isinstance(policy, Stages) or (isinstance(policy, Policy) and policy.adapts):
                raise ValueError(
                    f"{self.name}: {type(policy).__name__} sees the whole tree, but there are "
                    f"{len(numbers)} fragments, each with a reduction of its own; use a fixed "
                    "policy, or fragments=1."
                )
            policy = resolve(self.name, tree if local is None else local, policy)
        return [
            _Part(
                own,
                round(place * self.every / len(numbers)) % self.every,
                _holes(tree, own),
                self._sync(
                    policy.subset(own) if isinstance(policy, Plan) and not whole else policy,
                    None if specs is None else _holes(specs, own),
                ),
            )
            for place, own in enumerate(numbers)
        ]

    def _sync(self, policy: Any, specs: Pytree = None) -> Sync:
        own: dict[str, Any] = {"axis_name": self.axis_name, "mesh": self.mesh, "name": self.name}
        return Sync(policy=policy, specs=specs, **own, **self.options)

    def _numbers(self, paths: list[str], nbytes: list[int]) -> list[tuple[int, ...]]:
        """Returns the numbers of the leaves of each fragment."""
        if not paths:
            return [()]
        if callable(self.fragments):
            chosen = [int(x) if isinstance(x, bool) else x for x in map(self.fragments, paths)]
            for number in chosen:
                whole_number(self.name, "fragments(path)", number)
            count = max(chosen, default=0) + 1
            if sorted(set(chosen)) != list(range(count)) or count > self.every:
                raise ValueError(
                    f"{self.name}: fragments gives the numbers {sorted(set(chosen))}; they must be "
                    f"0, 1, 2 and so on without gaps, at most every={self.every} of them."
                )
        else:
            count = min(self.fragments, len(paths))
            ends = np.cumsum(nbytes)
            middles = ends - np.asarray(nbytes) / 2
            total = max(1, math.fsum(nbytes))
            chosen = [min(count - 1, int(count * m / total)) for m in middles]
        found = [tuple(i for i, n in enumerate(chosen) if n == f) for f in range(count)]
        return [own for own in found if own]


@dataclasses.dataclass(frozen=True)
class _Part:
    """A fragment: its leaves, the step of a round in which it is sent, and its reduction."""

    numbers: tuple[int, ...]
    offset: int
    like: Pytree
    sync: Sync

    def of(self, tree: Pytree) -> Pytree:
        """Returns the fragment's leaves of a tree, which keep their paths."""
        return _holes(tree, self.numbers)


def _holes(tree: Pytree, numbers: tuple[int, ...]) -> Pytree:
    """Returns `tree` with None in place of all other leaves."""
    leaves, treedef = jax.tree.flatten(tree)
    own = set(numbers)
    return jax.tree.unflatten(treedef, [x if i in own else None for i, x in enumerate(leaves)])


def local_params(params: Pytree, state: Pytree) -> Pytree:
    """This worker's parameters: `params` plus how far it has moved since the last reduction.

    Call it inside shard_map or pmap. `state` is the optimizer's state, which holds the state of one
    `diloco` or `local_steps`. The result has the shapes and dtypes of `params`. Raises ValueError
    if `state` holds no such state, or several, and for a state of other parameters.
    """

    def is_local(x: object) -> bool:
        return isinstance(x, LocalState)

    sync_states("local_params", state)  # refuses a state that lost its types
    found = [x for x in jax.tree.leaves(state, is_leaf=is_local) if is_local(x)]
    if len(found) != 1:
        raise ValueError(
            f"local_params: the state holds {len(found)} states of diloco or local_steps, but must "
            "hold one; pass the state of a chain with one of them."
        )
    _check_moved("local_params", found[0], params)
    moved = own_row(found[0].moved)
    _require_as_wide("local_params", "moved", moved, params)
    return _moved_from(params, moved)


def _moved_from(params: Pytree, moved: Pytree) -> Pytree:
    """Returns `params` plus `moved`, which may be wider, in the dtypes of `params`."""

    def add(x: Any, by: jax.Array) -> jax.Array:
        return (jnp.asarray(x, by.dtype) + by).astype(jnp.result_type(x))

    return jax.tree.map(add, params, moved)


def _check_moved(caller: str, state: LocalState, like: Pytree) -> None:
    """Raises ValueError if the state belongs to other leaves than those of `like`."""
    leaves = leaves_of(like)
    require_own_row(caller, (state.moved, state.optimizer))
    expected = Expected(caller, leaves, jax.tree.structure(like))
    require_paths(expected, "moved", (state.moved,))
    require_rows(expected, "moved", state.moved)


def _require_as_wide(caller: str, what: str, state: Pytree, like: Pytree) -> None:
    """Raises ValueError for a part of the state that was cast to less than the dtypes of `like`."""
    for x, own in zip(jax.tree.leaves(state), jax.tree.leaves(like), strict=True):
        if _is_narrower(x, own):
            require_dtypes(caller, what, x, own)


def _is_narrower(x: Any, like: Any) -> bool:
    key = jnp.issubdtype(x.dtype, jax.dtypes.extended)
    return not key and x.dtype.itemsize < jnp.result_type(like).itemsize
