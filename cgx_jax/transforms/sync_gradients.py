"""`sync_gradients` and `scatter_gradients`: reductions as Optax transformations with a state."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from cgx_jax import _compat
from cgx_jax._types import AxisName, Dimensions, Pytree, Shaped
from cgx_jax.axes import Axes, after, names_of
from cgx_jax.collective import Collective
from cgx_jax.compressors import Compressor
from cgx_jax.exchanges import Exchange
from cgx_jax.leaves import dimensions_of, leaves_of
from cgx_jax.plan import Plan, require_policy, resolve
from cgx_jax.policies.adaptive import Adaptive
from cgx_jax.policies.rules import Policy
from cgx_jax.policies.stages import Stages
from cgx_jax.reductions import Levels, Reduction
from cgx_jax.route.route import Chooser, Options, route, ways_named
from cgx_jax.route.rows import Scatter
from cgx_jax.route.run import Inputs, no_ticket, run, start, watched
from cgx_jax.transforms.checks import (
    OTHER_LEAVES,
    Expected,
    check_paths,
    check_state,
    check_statistics,
    require_options,
    require_type,
    require_whole,
)
from cgx_jax.transforms.feedback import (
    Kept,
    as_gradient,
    compensated,
    finite_everywhere,
    remembered,
    require_bounded,
    scaled,
)
from cgx_jax.transforms.inner_axes import (
    init_on_shards,
    is_outside,
    on_shards,
    require_parts,
    specs_in_types,
    specs_of,
    step_on_ranks,
)
from cgx_jax.transforms.memory import Memory
from cgx_jax.transforms.own_rows import axes_of, is_bound, rows_of
from cgx_jax.transforms.precondition import SecondMoment
from cgx_jax.transforms.shares import Cut, Scales, Shards, Whole, moved, scales_of
from cgx_jax.transforms.state import (
    CALLER,
    Choices,
    SyncState,
    by_leaf,
    codes_after,
    codes_by_leaf,
    init_rows,
    is_any_tree,
    overflow_after,
    rows_after,
    state_of_any_tree,
    trees_of,
)
from cgx_jax.transforms.wrappers import check_wrappers
from cgx_jax.tuning import Tuner

if TYPE_CHECKING:
    import optax

_OF_SHARDS = (
    "Give init whole parameters outside shard_map, and this rank's shards inside shard_map or "
    "pmap. Parameters that were renamed or reshaped since the checkpoint need a new state."
)


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
    specs: Pytree = None,
) -> optax.GradientTransformationExtraArgs:
    """An Optax transformation that reduces the ranks' gradients to their mean, compressed.

    It goes first in `optax.chain`, inside shard_map or pmap over `axis_name`. On a mesh of explicit
    axes it also works outside, on the gradients at `cgx_jax.reduced(params, axis_name, policy)`:
    the result is then their value, as of a loss over the whole batch. Everything after it sees the
    same mean on every rank, in the gradients' shapes and dtypes; means of integers and bools are
    rounded to the nearest. `policy`, `exchange`, `reduction` and `levels` are as in
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

    Inside a shard_map over `axis_name` that leaves other axes of the mesh to XLA (HSDP), `specs`
    say how gradients are sharded over these: a tree of PartitionSpecs like the parameters, the
    sharded parameters themselves, or a function of a leaf's path. Each device then sends its shard.
    Without them XLA gathers each gradient, and each device sends all of it.

    The state is a `SyncState`, which also keeps the state of compressors. A step whose mean holds a
    NaN or infinity leaves memory, moments and states as they were, on all ranks of the mesh.
    `transforms.metrics` counts these; `debug_nonfinite` says where the values came from. Each rank
    has its own memory, so either call `init` inside shard_map or pmap, or pass the `mesh`.
    `state_specs` and `state_shardings` say how the state is split.

    Clip gradients and skip steps (`optax.apply_if_finite`) after it in the chain, where all ranks
    see the same mean. A clip before it uses each rank's own norm, so it scales ranks differently,
    and the mean of the results is not the clipped mean. To accumulate gradients, add them up in the
    training step, or put `optax.MultiSteps` after it. Extra arguments of `update` are for the rest
    of the chain and change nothing here. Options are static, except for `seed`, so put
    `optax.inject_hyperparams` around the optimizer after it.

    Raises ValueError while tracing for what `pmean_compressed` refuses, for a memory around a
    compressor that would let it grow, for a memory if `init` cannot know the number of ranks, for
    `apply_if_finite` or transparent `sam` around it and, under check_vma, for `MultiSteps` around
    it and for a state that would differ between devices that share a rank. Raises TypeError for an
    option of a wrong type. Source: CGX (Markov et al., Middleware 2022).
    """
    import optax

    sync = Sync(
        axis_name=axis_name,
        policy=policy,
        memory=memory,
        precondition=precondition,
        seed=seed,
        mesh=mesh,
        exchange=exchange,
        reduction=reduction,
        levels=levels,
        specs=specs,
    )
    return optax.GradientTransformationExtraArgs(sync.init, sync.update)


def scatter_gradients(
    axis_name: AxisName,
    policy: Compressor | Policy | Plan | Stages | None = None,
    *,
    memory: Memory | None = None,
    precondition: SecondMoment | None = None,
    dimensions: Dimensions = 0,
    seed: int = 0,
    exchange: Exchange | str = "auto",
    mesh: Mesh | AbstractMesh | None = None,
) -> optax.GradientTransformationExtraArgs:
    """An Optax transformation that reduces whole gradients to this rank's shard of their mean.

    It is for sharded data-parallel training (FSDP, ZeRO). It goes first in `optax.chain`, where
    `sync_gradients` does, and everything after it sees shards. `dimensions` says where a leaf is
    cut: an int, a tree (or a prefix of one) of ints, or a function from a leaf's path to an int.
    The length there must be a multiple of the world size. A leaf keeps its dtype. `policy` and
    `exchange` are as in `psum_scatter_compressed`, and `Stages` as `policy` follow one another.
    `seed` feeds stochastic rounding.

    With `memory`, the next step sends what compression loses. Each rank remembers whole gradients,
    so a memory takes as much space as they do. The rank's own shard is not encoded, so it leaves no
    residual. With `precondition`, values are compressed in units of their size. Only the owner of a
    shard knows its mean. In a step that updates the units, the ranks therefore share the mean
    squares of rows and columns: rows + columns fp32 numbers per leaf, in one `lax.psum` for all
    leaves. A step whose mean holds a NaN or infinity on any rank leaves memory and moments as they
    were; one more number per step tells all ranks.

    The state is a `SyncState`, which `state_specs`, `state_shardings` and `resize_state` take.
    `init` takes whole parameters, with the `mesh` given, or shards, inside shard_map or pmap or
    typed on explicit axes. What follows in the chain sees only a shard:
    `optax.clip_by_global_norm` would use the norm of that shard, and `optax.apply_if_finite` would
    skip the step only on some ranks.

    Raises ValueError while tracing for what `psum_scatter_compressed` refuses, for a memory around
    a compressor that would let it grow, for the state of an `init` that mistook shards for whole
    parameters, and for `optax.apply_if_finite` around it. Source of the scheme: QSDP (Markov et
    al., ICML 2023).
    """
    import optax

    sync = Sync(
        axis_name=axis_name,
        policy=policy,
        memory=memory,
        precondition=precondition,
        seed=seed,
        mesh=mesh,
        exchange=exchange,
        dimensions=dimensions,
        name="scatter_gradients",
    )
    return optax.GradientTransformationExtraArgs(sync.init, sync.update)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sync:
    """The arguments of `sync_gradients`. `name` is the call that the user wrote.

    With `dimensions`, each rank gets a shard of the mean (`scatter_gradients`). `cuts` say how the
    leaves that `update` gets are shards over other axes of the mesh. With `specs`, it gets whole
    leaves that XLA shards.
    """

    axis_name: AxisName
    policy: Compressor | Policy | Plan | Stages | None = None
    memory: Memory | None = None
    precondition: SecondMoment | None = None
    seed: int = 0
    exchange: Exchange | Chooser | str = "auto"
    reduction: Reduction | str | None = None
    levels: Levels | None = None
    mesh: Mesh | AbstractMesh | None = None
    specs: Pytree = None
    dimensions: Dimensions | None = None
    cuts: tuple[Cut, ...] | None = None
    name: str = CALLER

    def __post_init__(self) -> None:
        options = self.axis_name, self.mesh, self.memory, self.precondition, self.seed
        require_options(self.name, *options)
        if not isinstance(self.policy, Plan | Stages):
            require_policy(self.name, self.policy)
        ways_named(self.name, **self.how)
        object.__setattr__(self, "axis_name", axes_of(self.name, self.axis_name))

    @property
    def how(self) -> dict[str, Any]:
        """The options of the reduction."""
        how = {"exchange": self.exchange, "reduction": self.reduction, "levels": self.levels}
        return how if self.dimensions is None else how | {"collective": Collective.REDUCE_SCATTER}

    def init(self, params: Pytree) -> SyncState:
        return init_on_shards(self.name, self._init, params, self.specs, self.axis_name, self.mesh)

    def _init(self, params: Pytree) -> SyncState:
        check_wrappers(self.name, checked=False, shards=self.dimensions is not None)
        if is_any_tree(params):
            adapts = isinstance(self.policy, Adaptive)
            return state_of_any_tree(params, self.memory, self.precondition, adapts=adapts)
        bound = is_bound(self._names)
        given = params
        if bound and self.dimensions is not None:
            params = _grown(self.name, params, self._names, self.dimensions)
        step, skipped = jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32)
        statistics: Pytree = ()
        moments: Pytree = ()
        known = leaves_of(params, self.name)
        # With their dtypes in jit: without x64, NumPy's float64 becomes float32.
        like = jax.eval_shape(lambda tree: tree, params)
        if isinstance(self.policy, Adaptive):
            statistics = self.policy.empty_statistics(known)
            choices: Choices = self.policy.choices(known)
        else:
            stages = self.policy.policies if isinstance(self.policy, Stages) else (self.policy,)
            plans = [p if isinstance(p, Plan) else resolve(self.name, like, p) for p in stages]
            for plan in plans:
                check_paths(self.name, plan, known)
            known, choices = list(plans[0].leaves), _choices(plans)
        if self.precondition is not None:
            moments = self.precondition.init(params)
        rows = functools.partial(rows_of, self.axis_name, self.mesh, self.name)
        codes, overflow, memory = init_rows(self.memory, params, known, choices, self._names, rows)
        whole = any(part != () for part in (codes, statistics, overflow))
        if bound and not (self.memory is None and self.precondition is None and not whole):
            self._require_one_state(given, whole)
        if self.mesh is not None and not bound:
            replicated = NamedSharding(self.mesh, PartitionSpec())
            step, skipped, statistics = lax.with_sharding_constraint(
                (step, skipped, statistics), replicated
            )
            if codes != ():
                shared = lax.with_sharding_constraint(codes.shared, replicated)
                codes = codes._replace(shared=shared)
            moments = lax.with_sharding_constraint(moments, replicated)
        return SyncState(step, memory, statistics, moments, codes, overflow, skipped)

    def _require_one_state(self, params: Pytree, whole: bool) -> None:
        """Raises ValueError if the devices of a rank would keep different states.

        `whole` says that a part of the state needs whole leaves.
        """
        listed = ", ".join(map(repr, self._names))
        remedy = (
            "Make only the axis of the reduction manual, jax.shard_map(..., "
            f"axis_names={{{listed}}}), so that XLA shards the others"
        )
        if whole:
            remedy = (
                "Adaptive, and compressors that keep a state or count what found no room, need "
                "whole gradients; use a fixed policy of other compressors"
            )
        elif self.dimensions is None:
            remedy += ", and pass specs= with the parameters' PartitionSpecs"
        for leaf, x in zip(leaves_of(params), jax.tree.leaves(params), strict=True):
            if other := sorted(_compat.varying_axes(x) - {*self._names}):
                raise ValueError(
                    f"{self.name}: parameter {leaf.path!r} is sharded over axis {other[0]!r}, too, "
                    "and devices that share a rank would keep different states, of which a "
                    f"checkpoint holds one. {remedy} (docs/quickstart/hsdp.md)."
                )

    def _require_kept(self, updates: Pytree, state: SyncState) -> None:
        """Raises ValueError if devices that share a rank would keep different states."""
        treedef: Any = jax.tree.structure(updates)
        over = [_compat.varying_axes(x) - {*self._names} for x in jax.tree.leaves(updates)]
        of_all: frozenset[str] = frozenset().union(*over)
        kept = [(of_all, x) for x in jax.tree.leaves((state.moments[1:], state.statistics))]
        of_leaves = *trees_of(state.memory), *itertools.chain(*state.codes), state.overflow
        for tree in of_leaves:
            with contextlib.suppress(ValueError):  # of other leaves, which is refused later
                parts = zip(over, treedef.flatten_up_to(tree), strict=True)
                kept += [(axes, x) for axes, part in parts for x in jax.tree.leaves(part)]
        if lacking := sorted(other for axes, x in kept for other in axes - _compat.varying_axes(x)):
            raise ValueError(
                f"{self.name}: gradients also vary over axis {lacking[0]!r}, but the state does "
                "not, so devices that share a rank would keep different states, of which a "
                f"checkpoint holds one. Reduce over all axes at once: {self.name}("
                f"{(*self._names, lacking[0])}, ...). Or average over {lacking[0]!r} before, as "
                "jax.lax.pmean does. For parameters that are sharded over it, see "
                "docs/quickstart/hsdp.md."
            )

    def update(
        self, updates: Pytree, state: SyncState, params: Pytree = None, **extra_args: object
    ) -> tuple[Pytree, SyncState]:
        require_type(self.name, state, SyncState)
        names = self._names
        if is_outside(names) and not is_bound(names):
            require_parts(self.name, names, updates, self.policy)
            return step_on_ranks(
                self.name, names, self._on_shards, updates, state, self._places(updates)
            )
        updates = self._own(updates)
        if self.cuts is None:
            self._require_kept(updates, state)
        specs = specs_in_types(updates) if self.specs is None else self.specs
        if specs is not None:
            each = specs_of(self.name, specs, updates, names, None)
            return on_shards(self.name, self._on_shards, each, updates, state)
        return self._planned(self._step, updates, state)(updates, state, None)

    def _on_shards(
        self, updates: Pytree, state: SyncState, cuts: tuple[Cut, ...]
    ) -> tuple[Pytree, SyncState]:
        if self.dimensions is not None and self.precondition and any(cut.names for cut in cuts):
            raise ValueError(
                f"{self.name}: SecondMoment needs whole gradients, but some are sharded over other "
                "axes of the mesh; use sync_gradients, or leave out precondition."
            )
        return dataclasses.replace(self, cuts=cuts, specs=None).update(updates, state)

    @property
    def _names(self) -> tuple[str, ...]:
        return names_of(self.axis_name)

    def _own(self, updates: Pytree) -> Pytree:
        """Returns the rank's gradients, with those that are known, such as zeros, as its own.

        Raises ValueError for wrappers that cannot work, and for gradients that JAX has summed.
        Types show these before the traces within.
        """
        axes = Axes.resolve(self.name, self._names, None)
        checked = axes.checked()
        check_wrappers(self.name, checked=checked, shards=self.dimensions is not None)
        named = leaves_of(updates, self.name)
        if axes.world == 1 or not checked:
            return updates
        leaves, treedef = jax.tree.flatten(updates)
        for i, leaf in enumerate(named):
            x, counts = leaves[i], jnp.issubdtype(leaf.dtype, jnp.inexact)
            if not (counts and leaf.size):
                continue
            if not isinstance(x, jax.core.Tracer) or _compat.is_filled(x, axes.names):
                leaves[i] = _compat.vary_over(jnp.asarray(x), axes.varying())
            axes.check_varying(self.name, [(leaf.path, leaves[i])])
        return jax.tree.unflatten(treedef, leaves)

    def _places(self, tree: Pytree) -> list[int] | None:
        """Returns the dimension along which each leaf is cut, or None if means stay whole."""
        if self.dimensions is None:
            return None
        return dimensions_of(self.name, "dimensions", self.dimensions, tree)

    def start(self, updates: Pytree, state: SyncState) -> jax.Array:
        """Starts what `finish` of the same operands waits for, and returns its ticket, uint32[2].

        Inside shard_map. The reduction goes on while later programs run, where the exchange can do
        that; all else is left to `finish`. So is what is sharded over other axes: each device would
        have a ticket of its own.
        """
        updates = self._own(updates)
        if self.specs is not None:
            return no_ticket(Axes.resolve(self.name, self._names, None))
        return self._planned(self._started, updates, state)(updates, state)

    def finish(
        self, updates: Pytree, state: SyncState, ticket: jax.Array
    ) -> tuple[Pytree, SyncState]:
        """Returns what `update` of the same operands returns."""
        if self.specs is not None:
            return self.update(updates, state)
        return self._planned(self._step, updates, state)(updates, state, ticket)

    def _planned(
        self, step: Callable[..., Any], updates: Pytree, state: SyncState
    ) -> Callable[..., Any]:
        """Returns step(plan, choices, ...) for the policy's plan, without these two arguments."""
        policy = self.policy
        if any(cut.names for cut in self.cuts or ()):
            require_whole(self.name, state)
        if isinstance(policy, Stages):
            plans = [resolve(self.name, updates, p) for p in policy.policies]
            choices = _choices(plans)
            branches = [functools.partial(step, plan, choices) for plan in plans]
            return functools.partial(lax.switch, policy.stage(state.step), branches)
        plan = resolve(self.name, updates, policy, adapts=self.dimensions is None)
        choices = _choices([plan])
        if isinstance(policy, Adaptive):
            choices = policy.choices(plan.leaves)
        return functools.partial(step, plan, choices)

    def _started(
        self, plan: Plan, choices: Choices, updates: Pytree, state: SyncState
    ) -> jax.Array:
        share = self._share(plan, choices, updates)
        if not share.taken.can_start:
            return no_ticket(share.axes)
        *_, inputs = self._ready(share, choices, updates, state)
        return start(share.taken, inputs)

    def _share(self, plan: Plan, choices: Choices, updates: Pytree) -> Whole:
        """Decides how the leaves travel."""
        in_units, places = self.precondition is not None, self._places(updates)
        options = Options.resolve(self.name, self.axis_name, mean=True, **self.how)
        cuts = self.cuts or tuple(Cut(((),) * len(leaf.shape)) for leaf in plan.leaves)
        if places is not None:
            scatter = Scatter.of(options, plan, places, True, in_units=in_units)
            shapes = [leaf.shape for leaf in plan.leaves]
            return Shards(plan, scatter.taken, shapes, cuts, scatter.places)
        taken = route(options, plan, range(len(plan.leaves)) if in_units else (), choices)
        plan = taken.plan
        shapes = [cut.whole(leaf.shape) for cut, leaf in zip(cuts, plan.leaves, strict=True)]
        return Whole(plan, taken, shapes, cuts)

    def _ready(
        self, share: Whole, choices: Choices, updates: Pytree, state: SyncState
    ) -> tuple[Scales | None, list[Any], list[Kept], Inputs]:
        """Checks the state, and returns what is sent in an update, and what remains to be known.

        These are the scales, which follow from the moments; the gradients and what was late; what
        the memories keep of each; and the reduction's inputs.
        """
        plan, (leaves, treedef) = share.plan, jax.tree.flatten(updates)
        remedy = OTHER_LEAVES if self.dimensions is None else _OF_SHARDS
        expected = Expected(self.name, plan.leaves, treedef, remedy)
        check_state(state, expected, self.memory, self.precondition, choices, share.shapes)
        if isinstance(self.policy, Adaptive):
            check_statistics(self.name, state.statistics, self.policy, plan.leaves)
        if self.memory is not None:
            pairs = zip(plan.leaves, choices, strict=True)
            require_bounded(self.name, [(leaf.path, c) for leaf, some in pairs for c in some])
        scales = scales_of(self.precondition, state.moments, share)
        before = by_leaf(trees_of(state.memory), len(leaves))
        wanted, kept = compensated(self.memory, leaves, before, state.step, share.taken.compressed)
        units = None if scales is None else share.units(scales.units)
        key = jax.random.fold_in(jax.random.key(self.seed), state.step)
        codes = codes_by_leaf(state.codes, plan, choices, treedef)
        sent = [share.sent(i, x) for i, x in enumerate(wanted)]
        return scales, wanted, kept, Inputs(sent, key, self.memory is not None, units, codes)

    def _step(
        self,
        plan: Plan,
        choices: Choices,
        updates: Pytree,
        state: SyncState,
        ticket: jax.Array | None,
    ) -> tuple[Pytree, SyncState]:
        """One update by a plan, in the order of the docstring of `sync_gradients`."""
        share = self._share(plan, choices, updates)
        plan, axes = share.plan, share.axes
        scales, wanted, kept, inputs = self._ready(share, choices, updates, state)
        leaves, treedef = jax.tree.flatten(updates)
        sums = run(share.taken, inputs, ticket)
        means, skipped = watched(share.taken, wanted, sums.values, state.step)
        sums = scaled(plan, sums._replace(values=means))
        means, moments, finite = sums.values, state.moments, True
        # If nothing is kept, nothing depends on it, and the check would take a pass. The moments
        # find by themselves what is not finite in means that all ranks hold.
        keeps = self.memory is not None or state.codes != () or skipped is not False
        if keeps or (self.precondition is not None and not share.alike):
            finite = finite_everywhere(share, means, skipped)
        out = [as_gradient(x, leaf.dtype) for x, leaf in zip(means, plan.leaves, strict=True)]
        rows, no_room = remembered(self.memory, share, wanted, kept, sums, out, finite)
        codes = codes_after(
            self.name, state.codes, sums.states, plan, choices, treedef, axes, finite
        )
        if self.precondition is not None and share.taken.compressed:
            moments, finite = moved(self.precondition, moments, share, means, state.step, finite)
        measured = state.statistics
        if isinstance(self.policy, Adaptive):
            # Measures the gradients, not what feedback makes of them, which depends on the plan in
            # use.
            step = after(state.step, means)
            measured = self.policy.observe(measured, leaves, scales, step, axes, plan)
        new = SyncState(
            state.step + 1,
            rows_after(state.memory, rows, axes),
            measured,
            moments,
            codes,
            overflow_after(state.overflow, no_room, axes),
            state.skipped + (1 - jnp.asarray(finite, jnp.int32)),
        )
        return jax.tree.unflatten(treedef, out), new


def _grown(caller: str, shards: Pytree, names: tuple[str, ...], dimensions: Dimensions) -> Pytree:
    """Returns the shapes and dtypes of whole leaves, given this rank's shards."""
    leaves, treedef = jax.tree.flatten(shards)
    places = dimensions_of(caller, "dimensions", dimensions, shards)
    world = Axes.resolve(caller, names, None).world
    pairs = zip(leaves, places, strict=True)
    return jax.tree.unflatten(treedef, [grown(x, d, world) for x, d in pairs])


def grown(x: Shaped, dimension: int | None, world: int) -> jax.ShapeDtypeStruct:
    """Returns the whole array's shape and dtype, of which `x` is a shard along a dimension."""
    shape = list(x.shape)
    if dimension is not None and -len(shape) <= dimension < len(shape):  # `update` refuses others
        shape[dimension] *= world
    return jax.ShapeDtypeStruct(tuple(shape), x.dtype)


def _choices(plans: list[Plan]) -> Choices:
    every = zip(*(plan.compressors for plan in plans), strict=True)
    return [tuple(dict.fromkeys(some)) for some in every]
