"""The settings that a tuner may try, and the model's prediction for each of them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

from cgx_jax import _compat
from cgx_jax.axes import SMALL_BYTES
from cgx_jax.choice import Profile, auto
from cgx_jax.choice.profile import ONE_SHOT
from cgx_jax.exchanges import nccl
from cgx_jax.kernels.wire import FUSION_BYTES, HOOK_FUSION_BYTES
from cgx_jax.plan import Plan
from cgx_jax.reductions import GatherSum, ScatterGather
from cgx_jax.route.route import Options, Way, decide, load_of
from cgx_jax.tuning.setting import Offered, Setting

FUSION = (FUSION_BYTES, FUSION_BYTES // 4, FUSION_BYTES // 16)
IN_BACKWARD = (HOOK_FUSION_BYTES, HOOK_FUSION_BYTES // 4, HOOK_FUSION_BYTES // 16)
STREAMS = (1, 2, 4)  # of NCCL; see `streams`
REACH = 4  # times the largest measured size: predictions for larger buffers are not trusted


def streams() -> tuple[int, ...]:
    """Returns the numbers of NCCL streams to try.

    Only one if this job is set up to go on without a lost rank: with more it cannot. At most as
    many as fit on the devices.
    """
    most = 1 if nccl.recovers() else nccl.most_streams()
    return tuple(count for count in STREAMS if count <= most)


class Asked(NamedTuple):
    """A reduction of the step: its options, its plan, and whether its values have units.

    `later` holds the plans that it may have later, under a policy that adapts.
    """

    options: Options
    plan: Plan
    in_units: bool
    later: tuple[Plan, ...] = ()


class Candidate(NamedTuple):
    """A setting, and the seconds and bytes that its reductions take per step.

    `seconds` is the profile's prediction, or None without a profile or without measurements of such
    buffers. With levels it is a lower bound, because the sums inside a node are not measured. In
    the backward pass it is an upper bound, because nobody knows how much of it overlaps with
    computing. `nbytes` is the number of bytes that a rank sends.
    """

    setting: Setting
    seconds: float | None
    nbytes: int


Buffers = tuple[tuple[tuple[int, ...], Way | None], ...]
Program = tuple[Buffers, ...]  # of all reductions of the step


def candidates(
    asked: Sequence[Asked], offered: Offered, profile: Profile | None
) -> list[Candidate]:
    """Returns `lax.psum`, then the settings that the model cannot rule out, the best-ranked first.

    Larger buffers rank first: they need fewer calls, and each call has to fill the links and to
    drain them, which no profile shows. Then predicted seconds rank, then bytes. If several settings
    compile to the same program, only one of them is listed. A setting is ruled out if the profile
    predicts that it is no faster than `lax.psum` or, without a prediction, if it sends no fewer
    bytes. Raises ValueError for levels that do not fit the axes.
    """
    for call, levels in itertools.product(asked, offered.levels):
        levels.split(call.options.name, call.options.axes)
    psum = _program(Setting(), asked)
    exact = _candidate(Setting(), psum, asked, profile)
    known, found = {psum}, []
    sizes = IN_BACKWARD if any(call.options.overlaps for call in asked) else FUSION
    parts = (None, *offered.reductions), (None, *offered.levels), sizes
    for setting in itertools.starmap(Setting, itertools.product(offered.exchanges, *parts)):
        try:
            program = _program(fits(setting, asked), asked)
        except ValueError:
            continue
        if program not in known:
            known.add(program)
            found.append(_candidate(setting, program, asked, profile))
    ranked = sorted(found, key=lambda c: (-c.setting.fusion_bytes, _cost(c)))
    return [exact, *(c for c in ranked if _cost(c) < _limit(c, exact))]


def fits(setting: Setting, asked: Sequence[Asked]) -> Setting:
    """Returns the setting; raises ValueError if it is wrong for a compressor of some plan."""
    _program(setting, asked)
    for call in asked:
        for plan in call.later:
            _buffers(setting, call, plan)
    return setting


def _cost(candidate: Candidate) -> tuple[bool, float]:
    """Returns a sort key: predicted seconds, then bytes for candidates without a prediction."""
    seconds = candidate.seconds
    return seconds is None, candidate.nbytes if seconds is None else seconds


def _limit(candidate: Candidate, exact: Candidate) -> tuple[bool, float]:
    """Returns the cost at which `lax.psum` is as good."""
    unknown = candidate.seconds is None or exact.seconds is None
    return unknown, exact.nbytes if unknown else exact.seconds or 0.0


def _program(setting: Setting, asked: Sequence[Asked]) -> Program:
    """Returns how each buffer of each reduction travels."""
    return tuple(_buffers(setting, call, call.plan) for call in asked)


def _buffers(setting: Setting, call: Asked, plan: Plan) -> Buffers:
    """Returns how each buffer of `plan` travels; raises ValueError if the setting does not fit."""
    return tuple(decide(*setting.applied(call.options, plan)).ways.items())


def _candidate(
    setting: Setting, program: Program, asked: Sequence[Asked], profile: Profile | None
) -> Candidate:
    nbytes = 0
    times: list[float | None] = []
    for call, buffers in zip(asked, program, strict=True):
        world = call.options.axes.world
        measured = profile if profile is not None and profile.world == world else None
        exact = list(call.plan.exact)
        for buffer, way in buffers:
            if way is None:
                exact += buffer
            else:
                nbytes += way.reduction.bytes_sent(call.plan.coded(buffer), world)
                times.append(_predicted(measured, way, call, buffer))
        sums = _sums([call.plan.leaves[i].sum_bytes for i in exact])
        nbytes += -(-2 * (world - 1) * sum(sums) // world)
        for size in sums:
            load = auto.Load(size // 4, 32)
            times.append(auto.estimate(measured, "psum", load) if measured is not None else None)
    known = [seconds for seconds in times if seconds is not None]
    return Candidate(setting, sum(known) if len(known) == len(times) else None, nbytes)


def _sums(sizes: list[int]) -> list[int]:
    """Returns the bytes of each exact sum, for leaves of these sizes.

    On CPUs, every leaf has a sum of its own, except small leaves, which travel together. On other
    platforms XLA joins the sums.
    """
    alone = [n for n in sizes if n > SMALL_BYTES] if _compat.platform() == "cpu" else []
    return [n for n in (*alone, sum(sizes) - sum(alone)) if n]


def _predicted(
    profile: Profile | None, way: Way, call: Asked, buffer: tuple[int, ...]
) -> float | None:
    """Returns the seconds of one buffer, or None if no profile measured such buffers."""
    world = call.options.axes.world
    across, sent, _ = way.reduction.across_links(call.plan.coded(buffer), world)
    kinds = {ScatterGather(): "", GatherSum(): ONE_SHOT}
    if profile is None or across not in kinds:
        return None
    method = way.exchange.shorthand + kinds[across]
    in_units = {x.number for x in sent} if call.in_units else ()
    load = load_of(sent, in_units)
    # "gather_sum" wins where latency dominates, so its small sizes say nothing about larger ones.
    reach = auto.largest(profile, method) * (1 if kinds[across] else REACH)
    return auto.estimate(profile, method, load) if 4 * load.values <= reach else None
