"""Which way each fusion buffer of a call travels: decided once, before anything is computed."""

from __future__ import annotations

import abc
import dataclasses
import logging
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from cgx_jax._types import AxisName
from cgx_jax.axes import SMALL_BYTES, Axes
from cgx_jax.choice import Auto, auto
from cgx_jax.collective import Collective
from cgx_jax.compressors import Compressor
from cgx_jax.compressors.base import CodedLeaf
from cgx_jax.exchanges import Exchange, Xla, links
from cgx_jax.host.console import Column, table_lines
from cgx_jax.plan import Plan
from cgx_jax.reductions import GatherSum, Levels, Reduction
from cgx_jax.reductions.all_gather import AllGather
from cgx_jax.reductions.base import PayloadReduction
from cgx_jax.reductions.levels import Leveled, ranks_by_node
from cgx_jax.reductions.named import named as reduction_named
from cgx_jax.reductions.named import reduction_of
from cgx_jax.reductions.reduce_scatter import ReduceScatter

_LOG = logging.getLogger(__name__)
_told: set[tuple[str, str]] = set()  # the call's name and the reason, of each warning

_OF_ROWS = {each.collective: each for each in (ReduceScatter(), AllGather())}


@dataclasses.dataclass(frozen=True)
class Options:
    """The static options of a call. `name` is the call that the user wrote.

    `exchange` is an instance (of `Auto` for "auto"), a `Chooser`, which replaces these options, or
    None for exact sums by `lax.psum`. `reduction` is None for the first reduction that each
    compressor allows. `overlaps` says that the call runs inside the backward pass. `floats` says
    that means of integers are floats, as in lax; else they are the nearest integers.
    """

    name: str
    axes: Axes
    exchange: Exchange | Chooser | None
    reduction: Reduction | None = None
    levels: Levels | None = None
    collective: Collective = Collective.ALL_REDUCE
    mean: bool = False
    overlaps: bool = False
    floats: bool = False

    @classmethod
    def resolve(
        cls,
        name: str,
        axis_name: AxisName,
        *,
        groups: Sequence[Sequence[int]] | None = None,
        exchange: Exchange | Chooser | str = "auto",
        reduction: Reduction | str | None = None,
        levels: Levels | None = None,
        collective: Collective = Collective.ALL_REDUCE,
        **flags: bool,
    ) -> Options:
        """Checks the user's arguments against the bound axes and returns the options."""
        sends, sums = ways_named(name, exchange, reduction, levels, collective)
        axes = Axes.resolve(name, axis_name, groups)
        return cls(name, axes, sends, sums, levels, collective, **flags)


def ways_named(
    name: str,
    exchange: object,
    reduction: Reduction | str | None,
    levels: Levels | None,
    collective: Collective = Collective.ALL_REDUCE,
) -> tuple[Exchange | Chooser, Reduction | None]:
    """Returns the exchange and the reduction that a user's arguments stand for.

    Needs no axis, so transformations check their arguments when they are made. Raises ValueError
    and TypeError for arguments that stand for nothing.
    """
    sends: Exchange | Chooser
    if isinstance(exchange, Chooser) and collective is Collective.ALL_REDUCE:
        exchange.check(name, reduction, levels)
        sends = exchange
    else:
        sends = auto.exchange_named(name, exchange)
    if not isinstance(levels, Levels | None):
        raise TypeError(
            f"{name}: levels={levels!r} is not an instance of cgx_jax.reductions.Levels; pass "
            'Levels("local") for an axis inside a node, or Levels(groups=...).'
        )
    return sends, reduction_named(name, reduction)


Choices = Sequence[tuple[Compressor, ...]]  # the compressors that each leaf may get, now or later


class Chooser(abc.ABC):
    """What chooses how a call travels, each time that the call is traced: a `Tuner`."""

    def check(self, name: str, reduction: object, levels: object) -> None:
        """Raises ValueError if the user gave options that this object chooses."""
        if reduction is not None or levels is not None:
            raise ValueError(
                f"{name}: reduction={reduction!r} and levels={levels!r} are given, but the tuner "
                "chooses these; leave them out, or let it try yours: Tuner(reductions=[...], "
                "levels=[...])."
            )

    @abc.abstractmethod
    def chosen(
        self, options: Options, plan: Plan, choices: Choices, *, in_units: bool
    ) -> tuple[Options, Plan]:
        """Returns the options with an exchange, and `plan` in the buffers that travel.

        `in_units` says that values are compressed in units.
        """


class Way(NamedTuple):
    """How a fusion buffer is reduced."""

    reduction: Reduction
    exchange: Exchange


@dataclasses.dataclass(frozen=True)
class Route:
    """A call whose way is decided: `ways` says how each fusion buffer is reduced.

    It is None for a buffer that `lax` reduces: for exact sums, and where "auto" finds that faster.
    With one rank, no buffer is listed.
    """

    options: Options
    plan: Plan
    ways: Mapping[tuple[int, ...], Way | None]

    @property
    def taken(self) -> dict[tuple[int, ...], Way]:
        """The buffers that travel compressed."""
        return {buffer: way for buffer, way in self.ways.items() if way is not None}

    @property
    def can_start(self) -> bool:
        """Whether an exchange can start a call that a later program finishes."""
        return any("start" in way.exchange.can for way in self.taken.values())

    @property
    def compressed(self) -> list[int]:
        """The numbers of the leaves that travel compressed, in order."""
        every = sorted(i for buffer in self.taken for i in buffer)
        return [i for i in every if not self.plan.compressors[i].lossless]

    def subset(self, part: Sequence[int]) -> Route:
        """Returns the route of only these leaves, which are a buffer's or exact ones."""
        place = {i: n for n, i in enumerate(part)}
        ways = {
            tuple(place[i] for i in buffer): way
            for buffer, way in self.ways.items()
            if buffer[0] in place
        }
        return Route(self.options, self.plan.subset(part), ways)


def route(
    options: Options, plan: Plan, in_units: Collection[int] = (), choices: Choices | None = None
) -> Route:
    """Decides how each fusion buffer of a call travels, and warns if none travels compressed.

    Takes and raises the same as `decide`.
    """
    decided = decide(options, plan, in_units, choices)
    if decided.plan.buffers and not decided.taken:
        _warn_of_exact(decided.options, decided.plan)
    return decided


def decide(
    options: Options, plan: Plan, in_units: Collection[int] = (), choices: Choices | None = None
) -> Route:
    """Decides how each fusion buffer of `plan` is reduced; nothing else consults "auto".

    `in_units` are the numbers of the leaves that are compressed in units. `choices` are those of a
    plan that changes. Raises ValueError for a reduction that is wrong for a compressor, and for a
    named exchange that lacks a capability that the reduction needs. Raises TypeError for a leaf of
    random keys.
    """
    if not options.overlaps:  # the hook returns what has no gradient as it is
        plan.require_numbers(options.name)
    if isinstance(options.exchange, Chooser):
        some = [(c,) for c in plan.compressors] if choices is None else choices
        options, plan = options.exchange.chosen(options, plan, some, in_units=bool(in_units))
    name, axes = options.name, options.axes
    near = _nodes(options)
    found: dict[tuple[int, ...], Way | None] = {}
    for buffer in plan.buffers:
        coded = plan.coded(buffer)
        paths = [plan.leaves[i].path for i in buffer]
        pairs = list(zip(paths, coded, strict=True))
        wanted = _OF_ROWS.get(options.collective, options.reduction)
        flat = reduction_of(name, wanted, pairs)
        if axes.world == 1:
            continue
        exchange, reduction = options.exchange, _over_levels(options, flat, pairs)
        if near is not None and not any(_against_levels(leaf.compressor) for leaf in coded):
            reduction = _over_levels(dataclasses.replace(options, levels=near), flat, pairs)
        if reduction is None or not isinstance(exchange, Exchange):
            found[buffer] = None
        elif isinstance(exchange, Auto):
            found[buffer] = _fastest(options, exchange, reduction, coded, in_units)
        else:
            lacking = sorted(reduction.needs - exchange.can)
            if lacking and not reduction.in_one_call(exchange, coded, axes.world):
                raise ValueError(
                    f"{name}: exchange={exchange.shorthand!r} lacks {lacking[0]!r}, which the "
                    f"reduction {reduction.shorthand!r} needs; it has "
                    f'{", ".join(sorted(exchange.can))}. Use exchange="xla", or "auto".'
                )
            found[buffer] = Way(reduction, exchange)
    if options.collective in _OF_ROWS:
        found = _with_small_leaves(plan, found, axes.world)
    return Route(options, plan, found)


def _warn_of_exact(options: Options, plan: Plan) -> None:
    """Warns that no buffer is compressed, although the plan has compressors: once per reason."""
    axes, exchange = options.axes, options.exchange
    if axes.world == 1 and axes.groups is not None:
        why = "each of axis_index_groups has one rank, which sends nothing"
        what = "Pass groups of several ranks"
    elif axes.world == 1:
        why = f"axis {', '.join(map(repr, axes.names))} has one rank, which sends nothing"
        what = "Name an axis of several ranks, such as the one between nodes"
    elif not isinstance(exchange, Exchange):
        return  # a tuner found exact sums faster, and says so
    elif options.levels is not None and options.levels.split(options.name, axes)[1].world == 1:
        why = "levels= finds one node, inside which sums are exact"
        what = "Leave out levels= to compress inside the node"
    else:
        largest = max(sum(plan.leaves[i].nbytes for i in buffer) for buffer in plan.buffers)
        why = 'exchange="auto" sends every buffer exactly'
        what = f"The largest has {largest:,} bytes, where compression "
        if isinstance(exchange, Auto) and exchange.follows() is not None:
            what += 'does not pay by the profile. To compress it, name an exchange: exchange="xla"'
        else:
            what += (
                "is not known to pay on every link. Measure yours with python -m cgx_jax tune, or "
                'name an exchange: exchange="xla"'
            )
            link = links.between(axes)
            if options.levels is None and link is not None and link.shared:
                what += ". GPUs share the link of their node: pass levels=, or call jax.set_mesh"
    if (options.name, why) not in _told:
        _told.add((options.name, why))
        _LOG.warning("%s: nothing is compressed: %s. %s.", options.name, why, what)


def _with_small_leaves(
    plan: Plan, ways: Mapping[tuple[int, ...], Way | None], world: int
) -> dict[tuple[int, ...], Way | None]:
    """Adds small exact leaves to the nearest buffers, to save the latency of their own call.

    There they travel in fp32, so their values must fit in it.
    """
    buffers = {
        buffer: list(buffer)
        for buffer, way in ways.items()
        if way is not None
        and not way.reduction.in_one_call(way.exchange, plan.coded(buffer), world)
    }
    home = {i: buffer for buffer in buffers for i in buffer}
    for i in plan.exact:
        leaf, compressor = plan.leaves[i], plan.compressors[i]
        small = 0 < leaf.nbytes * world <= SMALL_BYTES and compressor.lossless
        if home and small and Compressor.supports(compressor, leaf.dtype):
            buffers[home[min(home, key=lambda j: abs(i - j))]].append(i)
    return {tuple(buffers.get(buffer, buffer)): way for buffer, way in ways.items()}


def _nodes(options: Options) -> Levels | None:
    """Returns the levels that "auto" takes by itself: where several GPUs of a node share a link.

    A profile has measured reductions without levels, and a reduction that the user named is kept.
    """
    exchange, given = options.exchange, options.reduction is not None or options.levels is not None
    if not isinstance(exchange, Auto) or exchange.follows() is not None or given:
        return None
    if options.collective in _OF_ROWS:
        return None
    groups = links.nodes_of(options.axes)
    return None if groups is None else Levels(groups=groups)


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
        if (problem := _against_levels(leaf.compressor)) is not None:
            raise ValueError(
                f"{options.name}: {leaf.compressor} of leaf {path!r} {problem}; use another "
                "compressor, or leave out levels=."
            )
    if not isinstance(reduction, PayloadReduction):
        return reduction  # its arrays are small
    nodes = ranks_by_node(options.axes, inner)
    return Leveled(reduction, inner, outer, nodes, options.levels.compressor)


def _against_levels(code: Compressor) -> str | None:
    """Returns why a code does not go with levels, or None if it does."""
    if code.prepares:
        return (
            "needs whole leaves for its state or statistics, but levels= gives each rank of a node "
            "a different share"
        )
    if not code.owner_exact:
        return "counts a vote of each rank, but levels= adds up a node's values before they vote"
    return None


def _fastest(
    options: Options,
    exchange: Auto,
    reduction: Reduction,
    coded: tuple[CodedLeaf, ...],
    in_units: Collection[int],
) -> Way | None:
    _, sent, world = reduction.across_links(coded, options.axes.world)
    here = auto.available(options.axes.names)

    def measured(reduction: Reduction) -> list[Exchange]:
        # Profiles measure calls that do a whole reduction. Exchanges without such a call are left
        # out, but for XLA's own collectives.
        return [e for e in here if isinstance(e, Xla) or reduction.in_one_call(e, sent, world)]

    rows = world if options.collective in _OF_ROWS else 1
    load = load_of(sent, in_units, rows=rows)
    # Where latency dominates, one phase may be faster than two. A reduction that the user named is
    # kept.
    once = GatherSum()
    either = reduction.collective is Collective.ALL_REDUCE and options.reduction is None
    if either and all(once.refusal(x.compressor) is None for x in coded):
        one = exchange.one_shot(options.name, measured(reduction), measured(once), world, load)
        if one is not None:
            return Way(once, one)
    gathers = reduction.collective is Collective.GATHER_SUM
    link = links.between(options.axes)
    flat = isinstance(reduction, PayloadReduction) and options.reduction is None
    if link is not None and link.shared and flat and exchange.follows() is None:
        return None  # over the link, flat payloads of all ranks are as many bytes as a sum
    best = exchange.choose(
        options.name, measured(reduction), world, load, gathers=gathers, link=link
    )
    return None if best is None else Way(reduction, best)


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


_COLUMNS = (
    *map(Column, ("leaf", "shape", "compressor")),
    *(Column(heading, right=True) for heading in ("bits", "bytes", "method")),
)


def plan_table(plan: Plan, world: int | None = None) -> str:
    """Returns a plan as a table: leaf, shape, compressor, bits per value and payload bytes.

    With `world`, a number of ranks, the table also has the method that `exchange="auto"` takes for
    each leaf. It depends on the active profile, or on the size if there is none. A leaf with the
    method "psum" is sent uncompressed. Raises ValueError if the profile was measured at another
    world size, and TypeError for a leaf of random keys.
    """
    plan.require_numbers("plan_table")
    way_of: dict[int, Way | None] = {}
    if world is not None:
        options = Options("plan_table", Axes((), None, world), Auto())
        way_of = {i: way for buffer, way in decide(options, plan).ways.items() for i in buffer}
    rows = []
    total = 0
    for i, (leaf, compressor) in enumerate(zip(plan.leaves, plan.compressors, strict=True)):
        way = way_of.get(i)
        exact = world is not None and way is None
        bits = 8 * leaf.sum_bytes if exact else compressor.wire_bits(leaf.shape, leaf.dtype)
        nbytes = -(-bits // 8)
        total += nbytes
        per_value = f"{bits / leaf.size:.2f}" if leaf.size else "-"
        shape = f"{leaf.dtype}{list(leaf.shape)}"
        method = "psum" if way is None else way.exchange.shorthand
        if way is not None and way.reduction.shorthand != compressor.reductions[0]:
            method += f"/{way.reduction.shorthand}"
        rows.append((leaf.path or ".", shape, str(compressor), per_value, f"{nbytes:,}", method))
    columns = _COLUMNS[: len(_COLUMNS) - (world is None)]
    lines = table_lines(columns, rows, gap="  ")
    raw = sum(leaf.nbytes for leaf in plan.leaves)
    lines.insert(1, "-" * max(map(len, lines)))
    lines.append(
        f"{len(plan.leaves)} leaves in {len(plan.buffers)} fusion buffers and "
        f"{len(plan.exact)} exact: {total:,} of {raw:,} bytes ({raw / max(total, 1):.2f}x less)"
    )
    return "\n".join(lines)
