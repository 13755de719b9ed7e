"""Runs a call whose way is decided: from its leaves and their route to their sums.

Every collective of the library comes here. This file also defines their derivatives.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from cgx_jax import _compat
from cgx_jax._types import Key, Pytree
from cgx_jax.axes import Axes
from cgx_jax.collective import Collective
from cgx_jax.compressors import Compressor, buckets
from cgx_jax.compressors.base import require_key
from cgx_jax.debug import checksums, nonfinite
from cgx_jax.exchanges import Exchange
from cgx_jax.kernels.units import Units, chosen
from cgx_jax.leaves import SCALARS, where_of
from cgx_jax.reductions import Job, Operands, Reduced, Reduction
from cgx_jax.route.route import Route


class Sums(NamedTuple):
    """The results of a call, one entry per leaf.

    Residuals are None for exact leaves, and for all leaves unless they were asked for.
    """

    values: list[jax.Array]
    residuals: list[jax.Array | None]
    states: list[Pytree]


class Inputs(NamedTuple):
    """What a call computes with.

    `leaves` are those of the route's plan. Operands of a reduce-scatter have a leading dimension
    with a row for each rank; the plan's leaves are rows.

    Compressors with state need `states`, one entry per leaf. With `residual`, each compressed leaf
    also has a residual: what this rank must send again to lose nothing. The exact sum (or mean)
    over ranks minus the result is the sum (or mean) of the residuals, up to the rounding of the
    leaves' dtype.

    `units` are those of the leaves, None if no leaf has any. Residuals are converted out of them as
    results are. All ranks pass the same units. A leaf that is reduced exactly ignores its units.
    """

    leaves: Sequence[Any]
    key: Key
    residual: bool = False
    units: Units | None = None
    states: Sequence[Pytree] | None = None


def run(route: Route, inputs: Inputs, ticket: jax.Array | None = None) -> Sums:
    """Returns sums or means of the leaves, or for an all-gather every rank's leaf.

    `ticket`, if given, is that of `start` with the same inputs.
    """
    inputs, states = _checked(route, inputs)
    out = Sums(list(inputs.leaves), [None] * len(inputs.leaves), states)
    _run_exact(route, out.values)
    for part, call, given in _jobs(route, inputs, ticket):
        reduced = _reduced(call, given)
        for n, i in enumerate(part):
            out.values[i] = reduced.sums[n]
            out.states[i] = reduced.states[n]
            out.residuals[i] = None if reduced.residuals is None else reduced.residuals[n]
    return out


def start(route: Route, inputs: Inputs) -> jax.Array:
    """Starts what can go on beside later programs, and returns the ticket for `run`, uint32[2].

    What cannot be started is left to `run`: exact leaves, and buffers whose exchange or code has no
    call that can be. If that is all, the ticket is 0.
    """
    inputs, _ = _checked(route, inputs)
    ticket = no_ticket(route.options.axes)
    for _, (reduction, job), given in _jobs(route, inputs, ticket):
        if given.ticket is not None:
            ticket = reduction.start(job, given._replace(ticket=ticket))
    return ticket


def no_ticket(axes: Axes) -> jax.Array:
    """Returns the ticket of no call, uint32[2]."""
    return _compat.vary_over(jnp.zeros(2, jnp.uint32), axes.varying())


def _checked(route: Route, inputs: Inputs) -> tuple[Inputs, list[Pytree]]:
    """Checks a call, and returns its inputs, in which compressed numbers are arrays; and states."""
    options, plan, axes = route.options, route.plan, route.options.axes
    if inputs.states is None:
        plan.require_stateless(options.name)
    leaves = list(inputs.leaves)
    for i in _coded(route):
        if isinstance(leaves[i], SCALARS):
            # As in lax.psum, a number that the program knows is the value of every rank.
            leaves[i] = _compat.vary_over(jnp.asarray(leaves[i]), axes.varying())
    if axes.world > 1:
        named = {options.exchange} if isinstance(options.exchange, Exchange) else set()
        for exchange in {way.exchange for way in route.taken.values()} | named:
            exchange.require(options.name, axes.names)
    states = list(inputs.states or [()] * len(leaves))
    return inputs._replace(leaves=leaves, states=states), states


def _coded(route: Route) -> list[int]:
    """Returns the numbers of the leaves in buffers that have a lossy code."""
    coded = sorted(i for buffer in route.ways for i in buffer)
    return [i for i in coded if not route.plan.compressors[i].lossless]


def _jobs(
    route: Route, inputs: Inputs, ticket: jax.Array | None
) -> Iterator[tuple[tuple[int, ...], tuple[Reduction, Job], Operands]]:
    """Yields the numbers of a job's leaves, its reduction and the job, and its operands."""
    plan, listed, (leaves, key, residual, units, states) = route.plan, _coded(route), inputs
    options, axes = route.options, route.options.axes
    if not listed:
        return
    # Refuse a wrong call even if the profile sends all buffers by lax.psum.
    _check_operands(route, listed, leaves, key)
    assert states is not None
    seeds = _seeds(route, key)
    for buffer, way in route.taken.items():
        own: dict[int, jax.Array] = {i: jnp.asarray(leaves[i]) for i in buffer}
        for part, shared in _parts(buffer, own, plan.compressors):
            reduction = way.reduction
            if reduction.shares_seeds is not None:
                shared = reduction.shares_seeds
            given = Operands(
                seeds(shared)[: reduction.seed_count],
                [own[i] for i in part],
                chosen(units, part),
                [states[i] for i in part],
            )
            # A report of what is not finite reads the operands again.
            in_place = not nonfinite.watching() and all(map(_compat.is_computed, given.leaves))
            job = Job(
                options.name,
                options.collective,
                plan.coded(part),
                axes,
                way.exchange,
                axes.world if options.mean else 1,
                residual,
                in_place,
            )
            if ticket is not None and reduction.starts(job):
                job = dataclasses.replace(job, number=_number(part, reduction, job))
                given = given._replace(ticket=ticket)
            yield part, (reduction, job), given


def _number(part: tuple[int, ...], reduction: Reduction, job: Job) -> int:
    """Returns the number of a job that is started.

    Where the plan changes before the job is finished, what was started is not found, and so never
    taken for another leaf's or another code's.
    """
    text = repr((part, reduction, [leaf.compressor for leaf in job.leaves]))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")


def values_of(route: Route, leaves: Sequence[Any], key: Key) -> list[Any]:
    """Returns the results of an all-reduce that keeps no state; `watched` in debug mode."""
    return watched(route, leaves, run(route, Inputs(leaves, key)).values)[0]


def watched(
    route: Route, before: Sequence[Any], after: Sequence[Any], step: jax.Array | None = None
) -> tuple[list[Any], Any]:
    """Returns the results `after`, in debug mode with a search for values that are not finite.

    Also returns whether `debug_nonfinite` has set all values to 0, bool[], or False if it cannot.
    `before` are the operands, in the shapes that the user knows. `step`, i32[], is this step's
    number in reports.
    """
    options, plan, lossy = route.options, route.plan, route.compressed
    carried = [i for i, c in enumerate(plan.compressors) if i not in lossy or c.carries_nonfinite]
    if options.levels is not None and options.levels.compressor is not None:
        carried = [i for i in carried if options.levels.compressor.carries_nonfinite]
    whole = options.collective is Collective.ALL_REDUCE
    # Buckets of rows, runs and shares begin elsewhere than those of the leaf that the user knows.
    aligned = [
        i
        for buffer, way in route.taken.items()
        for i in buffer
        if whole and way.reduction.layout(plan.coded(buffer), options.axes.world) is not None
    ]
    call = nonfinite.Watched(
        options.name,
        options.axes,
        [leaf.path for leaf in plan.leaves],
        {i: plan.compressors[i].block_size for i in aligned},
        carried,
        alike=whole and options.axes.groups is None,
    )
    return nonfinite.watch(call, before, after, step)


def _run_exact(route: Route, values: list[Any]) -> None:
    """Reduces the leaves that do not travel compressed where they lie in `values`."""
    options, axes = route.options, route.options.axes
    sent = {i for buffer in route.taken for i in buffer}
    exact = [i for i in range(len(values)) if i not in sent]
    known = [i for i in exact if isinstance(values[i], bool | int | float | complex)]
    arrays = [i for i in exact if i not in known]
    given = [values[i] for i in arrays]
    summed = options.collective.exact(axes, given, mean=options.mean, floats=options.floats)
    if options.collective is not Collective.REDUCE_SCATTER:
        checksums.compare(options.name, axes, summed)
    for i, x in zip(arrays, summed, strict=True):
        values[i] = x
    for i in known:  # as in lax, the answer is a number, without any communication
        total = values[i] * axes.world
        values[i] = total / axes.world if options.mean else total


def _check_operands(route: Route, listed: Sequence[int], leaves: Sequence[Any], key: Key) -> None:
    """Raises ValueError for an operand that is already reduced, and for a missing key."""
    options, plan = route.options, route.plan
    name, axes = options.name, options.axes
    if options.collective.sums:
        axes.check_varying(name, [(plan.leaves[i].path, leaves[i]) for i in listed])
    for i in listed:
        require_key(where_of(name, plan.leaves[i].path), plan.compressors[i], key)
    if options.levels is not None and options.levels.compressor is not None:
        require_key(name, options.levels.compressor, key)


# Every collective is linear, so its derivative in direction t is the exact collective of t.
# Rounding moves the value by a bounded step and has no useful derivative of its own. The tangent of
# the residuals is 0. Units and states are constants.
@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _reduced(call: tuple[Reduction, Job], given: Operands) -> Reduced:
    reduction, job = call
    leaves = given.leaves
    plain = given._replace(leaves=[_compat.own(x, job.axes.names) for x in leaves])
    with jax.named_scope(job.name):
        sums, residuals, after = reduction.run(job, plain)
    if job.collective is not Collective.REDUCE_SCATTER:
        checksums.compare(job.name, job.axes, sums)

    def typed(values: Sequence[jax.Array]) -> list[jax.Array]:
        pairs = zip(values, leaves, strict=True)
        return [_compat.typed_like(y, x, job.axes.names) for y, x in pairs]

    return Reduced(typed(sums), None if residuals is None else typed(residuals), after)


@_reduced.defjvp
def _reduced_jvp(call: tuple[Reduction, Job], primals: Pytree, tangents: Pytree) -> Pytree:
    _, job = call
    reduced = _reduced(call, *primals)
    (tangent,) = tangents
    exact = job.collective.exact(job.axes, tangent.leaves, mean=job.divisor != 1)
    none = jax.tree.map(_no_tangent, (reduced.residuals, reduced.states))
    return reduced, Reduced(exact, *none)


def _no_tangent(x: jax.Array) -> Pytree:
    inexact = jnp.issubdtype(x.dtype, jnp.inexact)
    return jnp.zeros_like(x) if inexact else np.zeros(x.shape, jax.dtypes.float0)


def _parts(
    buffer: Sequence[int], leaves: Mapping[int, jax.Array], compressors: Sequence[Compressor]
) -> list[tuple[tuple[int, ...], bool]]:
    """Splits a buffer into jobs; returns (leaf numbers, whether ranks share noise) for each.

    The leaves of one job vary over the same mesh axes, and ranks share the noise of all of them or
    of none. Exact leaves, which come last in a buffer, draw no noise and travel with either kind.
    """
    parts: dict[tuple[frozenset[str], bool], list[int]] = {}
    for i in buffer:
        axes, shared = _compat.varying_axes(leaves[i]), compressors[i].shares_noise
        if compressors[i].lossless:
            shared = next((s for a, s in parts if a == axes), shared)
        parts.setdefault((axes, shared), []).append(i)
    return [(tuple(part), shared) for (_, shared), part in parts.items()]


def _seeds(route: Route, key: Key) -> Callable[[bool], tuple[Any, ...]]:
    """Returns a function that gives this rank's own seeds for False, and shared ones for True.

    Both are zeros if no compressor needs a key. Own seeds make the ranks' rounding errors
    independent, so that the errors average out. Compressors that share noise use shared seeds.
    """
    options, compressors = route.options, route.plan.compressors
    reductions = [way.reduction for way in route.taken.values()]
    count = max((reduction.seed_count for reduction in reductions), default=1)
    chosen: list[Compressor] = [compressors[i] for buffer in route.taken for i in buffer]
    if options.levels is not None and options.levels.compressor is not None:
        chosen.append(options.levels.compressor)
    needed = any(c.needs_key for c in chosen)

    @functools.cache
    def seeds(shared: bool) -> tuple[Any, ...]:
        if not needed:
            return (np.zeros(2, np.uint32),) * count
        assert key is not None
        own = key if shared else jax.random.fold_in(key, options.axes.index())
        return tuple(buckets.words(jax.random.fold_in(own, phase)) for phase in range(count))

    return seeds
