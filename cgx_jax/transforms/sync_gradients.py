"""`sync_gradients`: the reduction of gradients as an Optax transformation with its own state."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from cgx_jax import _compat
from cgx_jax._types import AxisName, Key, Pytree
from cgx_jax.compressors import Compressor
from cgx_jax.core import Options, Sums, reduce_leaves, ways
from cgx_jax.exchanges import Exchange
from cgx_jax.leaves import leaves_of
from cgx_jax.nonfinite import all_finite
from cgx_jax.plan import Plan, resolve
from cgx_jax.policies.adaptive import Adaptive
from cgx_jax.policies.rules import Policy
from cgx_jax.policies.stages import Stages
from cgx_jax.reductions import Levels, Reduction
from cgx_jax.transforms.checks import check_paths, check_state, check_statistics, require_type
from cgx_jax.transforms.feedback import (
    as_gradient,
    compensated,
    remembered,
    require_bounded,
    residual_of,
    taken_along,
)
from cgx_jax.transforms.memory import Memory
from cgx_jax.transforms.own_rows import axes_of
from cgx_jax.transforms.precondition import (
    Moments,
    Scale,
    SecondMoment,
    squares_of,
    stacked,
    unstacked,
)
from cgx_jax.transforms.state import (
    CALLER,
    Choices,
    SyncState,
    by_leaf,
    by_tree,
    codes_after,
    codes_by_leaf,
    init_codes,
    init_memory,
    init_overflow,
    is_any_tree,
    state_of_any_tree,
)
from cgx_jax.transforms.wrappers import check_options, check_wrappers
from cgx_jax.tuner import Tuner
from cgx_jax.tuner.resolve import check_tuner, resolve_options

if TYPE_CHECKING:
    import optax


def sync_gradients(
    axis_name: AxisName,
    policy: Compressor | Policy | Plan | Stages | None = None,
    *,
    memory: Memory | None = None,
    precondition: SecondMoment | None = None,
    seed: int = 0,
    exchange: Exchange | str | Tuner = "auto",
    reduction: Reduction | str | None = None,
    levels: Levels | None = None,
    mesh: Mesh | AbstractMesh | None = None,
) -> optax.GradientTransformationExtraArgs:
    """An Optax transformation that reduces the ranks' gradients to their mean, compressed.

    It goes first in `optax.chain`, inside shard_map or pmap over `axis_name`. Everything after it
    sees the same mean on every rank, in the gradients' shapes and dtypes; means of integers and
    bools are rounded to the nearest. `policy`, `exchange`, `reduction` and `levels` are as in
    `pmean_compressed`. `seed` feeds stochastic rounding.

    * A `Tuner` as `exchange` chooses the exchange, the reduction, the levels and the fusion
      buffers.
    * An `Adaptive` policy measures its statistics here. Its `jit`, or the tuner's, compiles the
      step.
    * `Stages` as `policy` follow one another in one program.
    * With `memory` (`ErrorFeedback()`, `MomentumCorrection()`) the next step sends what compression
      loses.
    * With `precondition` (`SecondMoment()`, the choice for Adam and its kin) values are compressed
      in units of their own size, and an adaptive policy measures errors in these units.

    The state is a `SyncState`, which also keeps the state of compressors. A step whose mean holds a
    NaN or infinity leaves memory, moments and states as they were, on all ranks of the mesh.
    `transforms.metrics` counts such steps; `debug_nonfinite` says where the values came from. Each
    rank has its own memory, so either call `init` inside shard_map or pmap, or pass the `mesh`.
    `state_specs` and `state_shardings` say how the state is split.

    Clip gradients and skip steps (`optax.apply_if_finite`) after it in the chain, where all ranks
    see the same mean. A clip before it uses each rank's own norm, so it scales ranks differently,
    and the mean of the results is not the clipped mean. To accumulate gradients, add them up in the
    training step, or put `optax.MultiSteps` after it. Extra arguments of `update` are for the rest
    of the chain and change nothing here. Options are static, except for `seed`, so put
    `optax.inject_hyperparams` around the optimizer after it.

    Raises ValueError while tracing for what `pmean_compressed` refuses, for a memory around a
    compressor that would let it grow, for a memory if `init` cannot know the number of ranks, for
    `apply_if_finite` around it and, under check_vma, for `MultiSteps` around it. Raises TypeError
    for an option of a wrong type. Source: CGX (Markov et al., Middleware 2022).
    """
    import optax

    check_options(axis_name, mesh)
    check_tuner(CALLER, exchange, reduction, levels)
    axis_name = axes_of(CALLER, axis_name)

    def init(params: Pytree) -> SyncState:
        check_wrappers(CALLER, checked=False)
        if is_any_tree(params):
            adapts = isinstance(policy, Adaptive)
            return state_of_any_tree(params, memory, precondition, adapts=adapts)
        treedef = jax.tree.structure(params)
        step, skipped = jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32)
        statistics: Pytree = ()
        moments: Pytree = ()
        known = leaves_of(params)
        if isinstance(policy, Adaptive):
            statistics = policy.empty_statistics(known)
            choices: Choices = policy.choices(known)
        else:
            stages = policy.policies if isinstance(policy, Stages) else (policy,)
            plans = [p if isinstance(p, Plan) else resolve(CALLER, params, p) for p in stages]
            for plan in plans:
                check_paths(CALLER, plan, known)
            known, choices = list(plans[0].leaves), _choices(plans)
        if precondition is not None:
            moments = precondition.init(params)
        codes = init_codes(known, choices, treedef, axis_name, mesh)
        if mesh is not None:
            replicated = NamedSharding(mesh, PartitionSpec())
            step, skipped, statistics = lax.with_sharding_constraint(
                (step, skipped, statistics), replicated
            )
            if codes != ():
                shared = lax.with_sharding_constraint(codes.shared, replicated)
                codes = codes._replace(shared=shared)
            moments = lax.with_sharding_constraint(moments, replicated)
        remembered = init_memory(memory, params, axis_name, mesh)
        overflow = init_overflow(memory, choices, treedef, axis_name, mesh)
        return SyncState(step, remembered, statistics, moments, codes, overflow, skipped)

    def update(
        updates: Pytree, state: SyncState, params: Pytree = None, **extra_args: object
    ) -> tuple[Pytree, SyncState]:
        require_type(CALLER, state, SyncState)
        if isinstance(policy, Stages):
            plans = [resolve(CALLER, updates, p) for p in policy.policies]
            choices = _choices(plans)
            branches = [functools.partial(reduce, plan, choices) for plan in plans]
            out: tuple[Pytree, SyncState] = lax.switch(
                policy.stage(state.step), branches, updates, state
            )
            return out
        plan = resolve(CALLER, updates, policy, adapts=True)
        choices = _choices([plan])
        if isinstance(policy, Adaptive):
            choices = policy.choices(plan.leaves)
        return reduce(plan, choices, updates, state)

    def reduce(
        plan: Plan, choices: Choices, updates: Pytree, state: SyncState
    ) -> tuple[Pytree, SyncState]:
        options, plan = resolve_options(
            CALLER,
            axis_name,
            plan,
            choices,
            exchange=exchange,
            reduction=reduction,
            levels=levels,
            mean=True,
            in_units=precondition is not None,
            overlaps=False,
        )
        axes = options.axes
        check_wrappers(CALLER, checked=axes.checked())
        leaves, treedef = jax.tree.flatten(updates)
        check_state(state, memory, precondition, plan, choices, treedef)
        if isinstance(policy, Adaptive):
            check_statistics(state.statistics, policy, plan.leaves)
        if memory is not None:
            pairs = zip(plan.leaves, choices, strict=True)
            require_bounded(CALLER, [(leaf.path, c) for leaf, some in pairs for c in some])
        scales: list[Scale | None] = [None] * len(leaves)
        shapes = [leaf.shape for leaf in plan.leaves]
        if precondition is not None:
            compressed = [b for b, way in ways(options, plan).items() if way is not None]
            coded = list(itertools.chain.from_iterable(compressed))
            before = stacked(state.moments)
            for i, scale in precondition.units(before, shapes, coded).items():
                scales[i] = scale
        key = jax.random.fold_in(jax.random.key(seed), state.step)
        codes = codes_by_leaf(state.codes, plan, choices, treedef)
        mean = _Mean(options, plan, key, treedef, scales, codes, state.step)
        if memory is None:
            sums, after_step, overflow = mean(leaves), (), ()
            # If nothing is kept, nothing depends on it, and the check would take a pass.
            finite = mean.finite(sums) if state.codes != () or sums.skipped is not False else True
        else:
            sums, finite, after_step, overflow = _Feedback(memory, mean)(leaves, state)
        after = codes_after(state.codes, sums.states, plan, choices, treedef, axes, finite)
        means = sums.values
        moments = state.moments
        if precondition is not None:
            moments, finite = _moved(precondition, before, mean, means, finite)
            moments = unstacked(moments, state.moments)
        measured = state.statistics
        if isinstance(policy, Adaptive):
            # Measures the gradients, not what feedback makes of them, which depends on the plan in
            # use.
            measured = policy.observe(measured, leaves, scales, state.step, axes, plan)
        skipped = state.skipped + (1 - jnp.asarray(finite, jnp.int32))
        new = SyncState(state.step + 1, after_step, measured, moments, after, overflow, skipped)
        out = [as_gradient(x, leaf.dtype) for x, leaf in zip(means, plan.leaves, strict=True)]
        return jax.tree.unflatten(treedef, out), new

    return optax.GradientTransformationExtraArgs(init, update)


@dataclasses.dataclass(frozen=True)
class _Mean:
    """One step's mean over the ranks of lists of leaves, each compressed in its units."""

    options: Options
    plan: Plan
    key: Key
    treedef: jax.tree_util.PyTreeDef
    scales: list[Scale | None]  # None for an exact leaf
    codes: list[Any]
    step: jax.Array

    def finite(self, sums: Sums) -> jax.Array:
        """Whether the means are finite and not skipped, bool[]; the same on all ranks."""
        finite = all_finite(sums.values) & jnp.logical_not(sums.skipped)
        finite = self.options.axes.on_every_rank(finite, alike=True)
        # XLA would otherwise compute it again for each value that is kept or not.
        barred: jax.Array = lax.optimization_barrier(finite)
        return barred

    def __call__(self, leaves: list[Any], *, residual: bool = False) -> Sums:
        return reduce_leaves(
            self.options,
            leaves,
            self.plan,
            self.key,
            residual=residual,
            units=tuple(None if scale is None else scale[0] for scale in self.scales),
            states=self.codes,
            step=self.step,
        )


@dataclasses.dataclass(frozen=True)
class _Feedback:
    """One update with a memory."""

    memory: Memory
    mean: _Mean

    def __call__(self, leaves: list[Any], state: SyncState) -> tuple[Sums, Any, Any, Any]:
        """Returns (means of what is sent, whether they count, memory after it, no-room counts)."""
        plan = self.mean.plan
        factors = [c.feedback_scale or 1.0 for c in plan.compressors]
        old = by_leaf(state.memory, len(leaves))
        pairs = zip(leaves, old, strict=True)
        both = [compensated(self.memory, jnp.asarray(x), s, state.step) for x, s in pairs]
        sums = self.mean([x for x, _ in both], residual=True)
        means = sums.values
        for i, number in enumerate(factors):
            if sums.residuals[i] is not None and number != 1:
                means[i] *= jnp.asarray(number, means[i].dtype)
        # A skipped step never happened: what it would have sent is neither lost nor remembered.
        finite = self.mean.finite(sums)
        rows, overflow = [], []
        for i, (before, (x, kept)) in enumerate(zip(old, both, strict=True)):
            compressor, lost = plan.compressors[i], sums.residuals[i]
            residual = residual_of(x, lost, factors[i])
            no_room, through = jnp.int32(0), None
            if compressor.has_rooms or compressor.selects:
                came = taken_along(x, residual)
                wanted = compressor.wants(x, came)
                if wanted is not None:
                    no_room = (wanted & ~came).sum(dtype=jnp.int32)
                if compressor.selects and lost is not None:
                    # In the chunk that a rank owns, its residual is what the sum of all ranks lost.
                    # A value there has arrived only if the mean has one there too.
                    through = came & (means[i] != 0)
            overflow.append(no_room)
            after = remembered(self.memory, x, residual, kept, through, finite, before)
            rows.append(tuple(map(self._varying, after)))
        counts: Any = ()
        if state.overflow != ():
            like = jax.tree.structure(state.overflow)
            counts = jax.tree.unflatten(like, [self._varying(x[None]) for x in overflow])
        treedef = jax.tree.structure(state.memory[0])
        return sums, finite, by_tree(rows, treedef, len(state.memory)), counts

    def _varying(self, row: jax.Array) -> jax.Array:
        return _compat.vary_over(row, self.mean.options.axes.varying())


def _choices(plans: list[Plan]) -> Choices:
    every = zip(*(plan.compressors for plan in plans), strict=True)
    return [tuple(dict.fromkeys(some)) for some in every]


def _moved(
    precondition: SecondMoment, old: Moments, mean: _Mean, means: list[Any], finite: Any
) -> tuple[Moments, Any]:
    """Returns the moments after a step, changed if it is due and finite; and the new `finite`."""
    coded = [i for i, scale in enumerate(mean.scales) if scale is not None]
    shapes = [leaf.shape for leaf in mean.plan.leaves]

    def update() -> tuple[Moments, jax.Array]:
        squares = {i: squares_of(means[i]) for i in coded}
        new = precondition.update(old, shapes, squares, mean.step)
        exact = [x for i, x in enumerate(means) if i not in squares]
        return new, all_finite([*new.tables, *exact])

    if not coded:
        return old, finite
    stays = (old, jnp.ones((), bool))
    new, usable = lax.cond(precondition.due(mean.step), update, lambda: stays)
    finite = mean.options.axes.on_every_rank(jnp.asarray(finite) & usable, alike=True)
    return jax.tree.map(functools.partial(jnp.where, finite), new, old), finite
