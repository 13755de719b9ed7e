"""The common path of every all-reduce: from leaves and their plan to their sums.

`psum_compressed`, `sync_gradients` and the backward-pass hook all use it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from cgx_jax import _compat, debug, nonfinite
from cgx_jax._types import AxisName, Key, Pytree
from cgx_jax.axes import Axes
from cgx_jax.compressors import Compressor, buckets
from cgx_jax.compressors.base import require_key
from cgx_jax.compressors.codes import CodedLeaf
from cgx_jax.exchanges import Auto, Exchange, Xla, auto
from cgx_jax.kernels.primitives import Units
from cgx_jax.leaves import SCALARS
from cgx_jax.plan import Plan
from cgx_jax.reductions import (
    GatherSum,
    Job,
    Levels,
    PayloadReduction,
    Reduced,
    Reduction,
    ScatterGather,
)
from cgx_jax.reductions.levels import Leveled
from cgx_jax.reductions.named import named as reduction_named
from cgx_jax.reductions.named import reduction_of


@dataclasses.dataclass(frozen=True)
class Options:
    """The static options of a call. `name` is the call that the user wrote.

    `exchange` is an instance (of `Auto` for "auto"), or None for exact sums by `lax.psum`.
    `reduction` is None for the first reduction that each compressor allows.
    """

    name: str
    axes: Axes
    exchange: Exchange | None
    reduction: Reduction | None = None
    levels: Levels | None = None
    mean: bool = False

    @classmethod
    def resolve(
        cls,
        name: str,
        axis_name: AxisName,
        *,
        groups: Sequence[Sequence[int]] | None = None,
        exchange: Exchange | str = "auto",
        reduction: Reduction | str | None = None,
        levels: Levels | None = None,
        mean: bool = False,
    ) -> Options:
        """Checks the user's arguments against the bound axes and returns the options."""
        sends = auto.exchange_named(name, exchange)
        sums = reduction_named(name, reduction)
        if not isinstance(levels, Levels | None):
            raise TypeError(
                f"{name}: levels={levels!r} is not an instance of cgx_jax.reductions.Levels; pass "
                'Levels("local") for an axis inside a node, or Levels(groups=...).'
            )
        axes = Axes.resolve(name, axis_name, groups)
        return cls(name, axes, sends, sums, levels, mean)


class Way(NamedTuple):
    """How a fusion buffer is reduced."""

    reduction: Reduction
    exchange: Exchange


class Sums(NamedTuple):
    """The results of a reduction, one entry per leaf.

    Residuals are None for exact leaves, and for all leaves unless they were asked for. `skipped`,
    bool[], says that `debug_nonfinite` set all values to 0. It is False if that mode is off.
    """

    values: list[jax.Array]
    residuals: list[jax.Array | None]
    states: list[Pytree]
    skipped: Any = False


def ways(
    options: Options, plan: Plan, in_units: Collection[int] = ()
) -> dict[tuple[int, ...], Way | None]:
    """Returns how each fusion buffer is reduced, or None for a buffer that `lax.psum` reduces.

    It is `lax.psum` for exact sums and where "auto" finds it faster. With one rank, no buffer is
    listed. `in_units` are the numbers of the leaves that are compressed in units. Raises ValueError
    for a reduction that is wrong for a compressor, and for a named exchange that lacks a capability
    that the reduction needs.
    """
    name, axes = options.name, options.axes
    found: dict[tuple[int, ...], Way | None] = {}
    for buffer in plan.buffers:
        coded = plan.coded(buffer)
        paths = [plan.leaves[i].path for i in buffer]
        pairs = list(zip(paths, coded, strict=True))
        flat = reduction_of(name, options.reduction, pairs)
        if axes.world == 1:
            continue
        reduction = _over_levels(options, flat, pairs)
        if reduction is None or options.exchange is None:
            found[buffer] = None
        elif isinstance(options.exchange, Auto):
            found[buffer] = _fastest(options, reduction, coded, in_units)
        else:
            _require_able(name, options.exchange, reduction)
            found[buffer] = Way(reduction, options.exchange)
    return found


def _over_levels(
    options: Options, reduction: Reduction, leaves: list[tuple[str, CodedLeaf]]
) -> Reduction | None:
    """Returns `reduction` across the nodes of `levels`, if any, or None if there is one node."""
    if options.levels is None:
        return reduction
    inner, outer = options.levels.split(options.name, options.axes)
    if outer.world == 1:
        return None
    if inner.world == 1:
        return reduction
    for path, leaf in leaves:
        if isinstance(reduction, PayloadReduction) and leaf.compressor.prepares:
            raise ValueError(
                f"{options.name}: {leaf.compressor} of leaf {path!r} needs whole leaves for its "
                "state or statistics, but levels= gives each rank of a node a different share; "
                "use another compressor, or leave out levels=."
            )
    return Leveled(reduction, inner, outer, options.levels.compressor)


def _fastest(
    options: Options, reduction: Reduction, coded: tuple[CodedLeaf, ...], in_units: Collection[int]
) -> Way | None:
    sent, world = reduction.across_links(coded, options.axes.world)
    here = auto.available(options.axes.names)

    def measured(reduction: Reduction) -> list[Exchange]:
        # Profiles measure calls that do a whole reduction. Exchanges without such a call are left
        # out, but for XLA's own collectives.
        return [e for e in here if isinstance(e, Xla) or reduction.in_one_call(e, sent, world)]

    assert isinstance(options.exchange, Auto)
    load = load_of(sent, in_units)
    # Where latency dominates, one phase may be faster than two. A reduction that the user named is
    # kept.
    once = GatherSum()
    either = isinstance(reduction, ScatterGather) and options.reduction is None
    if either and all(once.unfit(x.compressor) is None for x in coded):
        exchange = options.exchange.one_shot(
            options.name, measured(reduction), measured(once), world, load
        )
        if exchange is not None:
            return Way(once, exchange)
    gathers = isinstance(reduction, GatherSum)
    exchange = options.exchange.choose(
        options.name, measured(reduction), world, load, gathers=gathers
    )
    return None if exchange is None else Way(reduction, exchange)


def load_of(
    leaves: Sequence[CodedLeaf], in_units: Collection[int] = (), *, rows: int = 1
) -> auto.Load:
    """Returns the load that the choice of an exchange depends on: `leaves`, `rows` times.

    `in_units` are the numbers of the leaves that have units.
    """
    size = sum(x.size for x in leaves)
    bits = sum(x.compressor.wire_bits(x.shape, x.dtype) for x in leaves)
    dear = {
        kind: sum(x.size for x in leaves if kind in x.compressor.codec_work)
        for kind in ("noise", "rotation")
    }
    units = sum(x.size for x in leaves if x.number in in_units)
    counts = (dear["noise"], dear["rotation"], units)
    return auto.Load(rows * size, bits / size, *(rows * n for n in counts))


def _require_able(name: str, exchange: Exchange, reduction: Reduction) -> None:
    lacking = sorted(reduction.needs - exchange.can)
    if lacking:
        raise ValueError(
            f"{name}: exchange={exchange.shorthand!r} lacks {lacking[0]!r}, which the reduction "
            f"{reduction.shorthand!r} needs; it has {', '.join(sorted(exchange.can))}. Use "
            'exchange="xla", or "auto".'
        )


def reduce_leaves(
    options: Options,
    leaves: Sequence[Any],
    plan: Plan,
    key: Key,
    *,
    residual: bool = False,
    units: Units | None = None,
    states: Sequence[Pytree] | None = None,
    step: jax.Array | None = None,
) -> Sums:
    """Returns the sums or means of `leaves`, which must be the leaves of `plan`.

    Compressors with state need `states`, one entry per leaf. With `residual`, each compressed leaf
    also has a residual: what this rank must send again to lose nothing. The exact sum (or mean)
    over ranks minus the result is the sum (or mean) of the residuals, up to the rounding of the
    leaves' dtype. `step`, i32[], is this step's number in the reports of `debug_nonfinite`.

    `units` has one entry per leaf: None, or (rows float32[2, R], columns float32[2, C]) for a leaf
    of R * C values. Value i is multiplied by rows[0, i // C] * columns[0, i % C] before encoding.
    After decoding, the result and the residual are multiplied by the products of rows[1] and
    columns[1], so the residual is in the leaf's own units. All ranks pass the same units. A leaf
    that is reduced exactly ignores its units. Raises ValueError for units that do not fit their
    leaf.
    """
    name, axes = options.name, options.axes
    if units is not None:
        _check_units(name, plan, leaves, units)
    if states is None:
        plan.require_stateless(name)
    in_units = {i for i, unit in enumerate(units or ()) if unit is not None}
    by_buffer = ways(options, plan, in_units)
    taken = {b: way for b, way in by_buffer.items() if way is not None}
    # As in lax.psum, a number that the program knows is the value of every rank.
    coded = {i for buffer in by_buffer for i in buffer}
    leaves = [
        _compat.vary_over(jnp.asarray(x), axes.varying())
        if i in coded and isinstance(x, SCALARS)
        else x
        for i, x in enumerate(leaves)
    ]
    out = Sums(list(leaves), [None] * len(leaves), list(states or [()] * len(leaves)))
    lossy = sorted(i for buffer in taken for i in buffer)
    exact = sorted(set(range(len(leaves))).difference(lossy))
    if exact:
        known = [i for i in exact if isinstance(leaves[i], bool | int | float | complex)]
        arrays = {i: leaves[i] for i in exact if i not in known}
        summed = (axes.mean if options.mean else axes.sum)(list(arrays.values()))
        for i, x in zip(arrays, summed, strict=True):
            out.values[i] = x
        for i in known:  # as in lax, the answer is a number, without any communication
            total = leaves[i] * axes.world
            out.values[i] = total / axes.world if options.mean else total
    if axes.world > 1:
        named = set() if options.exchange is None else {options.exchange}
        for exchange in {way.exchange for way in taken.values()} | named:
            exchange.require(name, axes.names)
    if by_buffer:  # refuse a wrong call even if the profile sends all buffers by lax.psum
        every = sorted(i for buffer in by_buffer for i in buffer)
        axes.check_varying(name, [(plan.leaves[i].path, leaves[i]) for i in every])
        inside = options.levels.compressor if options.levels is not None else None
        drawing = [plan.compressors[i] for i in every] + ([inside] if inside is not None else [])
        require_key(name, drawing, key)
        chosen = [plan.compressors[i] for i in lossy] + drawing[len(every) :]
        most = max((way.reduction.seed_count for way in taken.values()), default=1)
        alike = any(way.reduction.shares_seeds for way in taken.values())
        seeds = _seeds(chosen, key, axes, most, alike=alike)
        for buffer, way in taken.items():
            for part, shared in _calls(buffer, leaves, plan.compressors):
                divisor = axes.world if options.mean else 1
                own = tuple(jnp.asarray(leaves[i]) for i in part)
                # A report of what is not finite reads the operands again.
                in_place = not nonfinite.watching() and all(map(_compat.is_computed, own))
                job = Job(name, plan.coded(part), axes, way.exchange, divisor, residual, in_place)
                reduced = _reduce_buffer(
                    (way.reduction, job),
                    seeds[shared or way.reduction.shares_seeds][: way.reduction.seed_count],
                    own,
                    tuple(units[i] for i in part) if units else (),
                    [out.states[i] for i in part],
                )
                for n, i in enumerate(part):
                    out.values[i] = reduced.sums[n]
                    out.states[i] = reduced.states[n]
                    out.residuals[i] = None if reduced.residuals is None else reduced.residuals[n]
    paths = [leaf.path for leaf in plan.leaves]
    sizes = {i: plan.compressors[i].block_size for i in lossy}
    carried = [*exact, *(i for i in lossy if plan.compressors[i].carries_nonfinite)]
    if options.levels is not None and options.levels.compressor is not None:
        carried = [i for i in carried if options.levels.compressor.carries_nonfinite]
    values, skipped = nonfinite.watch(
        name,
        axes,
        paths,
        leaves,
        out.values,
        block_sizes=sizes,
        carried=carried,
        alike=axes.groups is None,
        step=step,
    )
    return out._replace(values=values, skipped=skipped)


# The sum is linear, so its derivative in direction t is the sum of t. Rounding moves the value by
# a bounded step and has no useful derivative of its own. The tangent of the sums is therefore the
# exact sum of the tangents, and the tangent of the residuals is 0. Units and states are constants.
@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _reduce_buffer(
    call: tuple[Reduction, Job], seeds: Any, leaves: tuple[Any, ...], units: Units, states: Any
) -> Reduced:
    reduction, job = call
    plain = [_compat.plain(x) for x in leaves]
    with jax.named_scope(job.name):
        sums, residuals, after = reduction.run(job, seeds, plain, units, states)
    debug.compare(job.name, job.axes, sums)
    typed = [_compat.typed_like(y, x) for y, x in zip(sums, leaves, strict=True)]
    if residuals is not None:
        residuals = [_compat.typed_like(e, x) for e, x in zip(residuals, leaves, strict=True)]
    return Reduced(typed, residuals, after)


@_reduce_buffer.defjvp
def _reduce_buffer_jvp(call: tuple[Reduction, Job], primals: Pytree, tangents: Pytree) -> Pytree:
    _, job = call
    reduced = _reduce_buffer(call, *primals)
    leaves = list(tangents[1])
    exact = job.axes.mean(leaves) if job.divisor != 1 else job.axes.sum(leaves)
    none = jax.tree.map(_no_tangent, (reduced.residuals, reduced.states))
    return reduced, Reduced(list(exact), *none)


def _no_tangent(x: jax.Array) -> Pytree:
    inexact = jnp.issubdtype(x.dtype, jnp.inexact)
    return jnp.zeros_like(x) if inexact else np.zeros(x.shape, jax.dtypes.float0)


def _check_units(name: str, plan: Plan, leaves: Sequence[jax.Array], units: Units) -> None:
    if len(units) != len(leaves):
        raise ValueError(
            f"{name}: {len(units)} units for {len(leaves)} leaves; pass one entry per leaf, None "
            "for a leaf without units."
        )
    for known, leaf, unit in zip(plan.leaves, leaves, units, strict=True):
        if unit is None:
            continue
        shapes = [tuple(x.shape) for x in unit]
        types = {jnp.result_type(x) for x in unit}
        fits = all(len(s) == 2 and s[0] == 2 for s in shapes) and types == {jnp.dtype(jnp.float32)}
        if not fits or shapes[0][1] * shapes[1][1] != leaf.size:
            raise ValueError(
                f"{name}: the units of leaf {known.path!r} have shapes {shapes} and dtypes "
                f"{sorted(map(str, types))}; a leaf of {leaf.size} values needs float32[2, R] and "
                "float32[2, C] with R * C values."
            )


def _calls(
    buffer: Sequence[int], leaves: Sequence[jax.Array], compressors: Sequence[Compressor]
) -> list[tuple[tuple[int, ...], bool]]:
    """Splits a buffer into calls; returns (leaf numbers, whether ranks share noise) for each.

    The leaves of one call vary over the same mesh axes, and ranks share the noise of all of them or
    of none.
    """
    parts: dict[tuple[frozenset[str], bool], list[int]] = {}
    for i in buffer:
        kind = _compat.varying_axes(leaves[i]), compressors[i].shares_noise
        parts.setdefault(kind, []).append(i)
    return [(tuple(part), shared) for (_, shared), part in parts.items()]


def _seeds(
    compressors: Collection[Compressor], key: Key, axes: Axes, count: int, *, alike: bool
) -> Mapping[bool, tuple[Any, ...]]:
    """Returns `count` seeds of this rank's own under False, and `count` shared ones under True.

    Only the kinds that are needed are there. Both are zeros if no compressor needs a key. Own seeds
    make the ranks' rounding errors independent, so that the errors average out. Compressors that
    share noise use shared seeds. `alike` says that a reduction needs shared seeds for every
    compressor.
    """
    if not any(c.needs_key for c in compressors):
        return dict.fromkeys((False, True), (np.zeros(2, np.uint32),) * count)
    assert key is not None
    keys: dict[bool, ArrayLike] = {}
    if any(not c.shares_noise for c in compressors):
        keys[False] = jax.random.fold_in(key, axes.index())
    if alike or any(c.shares_noise for c in compressors):
        keys[True] = key
    return {
        shared: tuple(buckets.words(jax.random.fold_in(k, phase)) for phase in range(count))
        for shared, k in keys.items()
    }
