"""What an adaptive policy knows at a step of a training, and its form in a checkpoint."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from cgx_jax._types import Json
from cgx_jax.compressors import Compressor
from cgx_jax.host import untrusted
from cgx_jax.leaves import Leaf
from cgx_jax.policies import statistics
from cgx_jax.policies.decide import OUTCOMES, Compressors, Refresh
from cgx_jax.policies.statistics import Statistics

FORMAT = 6
_AGAIN = "Without load_state_dict, the policy measures and chooses again."


@dataclasses.dataclass
class Progress:
    """What changes from step to step.

    `step` counts calls of the training step. `current` are the compressors of the adaptive leaves,
    `plans` all choices that were ever current, and `history` the looks at the statistics. `pending`
    is a step and a copy of statistics that are used from that step on. `nonfinite`,
    float32[leaves], is that of the last look, and None before the first.
    """

    current: Compressors = ()
    plans: list[Compressors] = dataclasses.field(default_factory=list)
    step: int = 0
    history: list[Refresh] = dataclasses.field(default_factory=list)
    pending: tuple[int, Statistics] | None = None
    nonfinite: np.ndarray | None = None


class Packed(NamedTuple):
    """Plans in JSON types: the text of every compressor once, and each leaf's index into these."""

    compressors: list[str]
    plans: list[list[int]]


# The lists of `Statistics`.
Sums = tuple[list[float], list[list[float]], list[float], list[float]]


class Saved(NamedTuple):
    """The values of `Adaptive.state_dict`."""

    format: int
    leaves: list[tuple[str, tuple[int, ...], str]]
    adaptive: list[int]
    candidates: list[str]
    step: int
    current: Packed
    plans: Packed
    history: list[Refresh]
    pending: tuple[int, Sums] | None
    nonfinite: list[float] | None


def pack(plans: Sequence[Compressors]) -> Json:
    """Returns the fields of `Packed`."""
    numbers = {c: i for i, c in enumerate(dict.fromkeys(c for plan in plans for c in plan))}
    return {
        "compressors": [repr(c) for c in numbers],
        "plans": [[numbers[c] for c in plan] for plan in plans],
    }


def unpack(packed: Packed, known: Sequence[Compressor], source: str) -> list[Compressors]:
    """Returns the plans that `pack` was given, from `known` compressors: no other is ever made.

    Raises ValueError, naming `source`, for another compressor, and for plans without theirs.
    """
    by_text = {repr(c): c for c in known}
    for text in packed.compressors:
        if text not in by_text:
            raise ValueError(
                f"Adaptive: {source} has the compressor {text!a}, which is neither a "
                f"candidate nor one that base gives an adaptive leaf ({', '.join(by_text)}). Pass "
                "the candidates and the base of the run that saved it."
            )
    found = [by_text[text] for text in packed.compressors]
    if any(not 0 <= i < len(found) for plan in packed.plans for i in plan):
        raise ValueError(
            f"Adaptive: {source} has plans {untrusted.shown(packed.plans)}, but only {len(found)} "
            f"compressors. {_AGAIN}"
        )
    return [tuple(found[i] for i in plan) for plan in packed.plans]


def save(
    progress: Progress,
    leaves: Sequence[Leaf],
    adaptive: Sequence[int],
    candidates: Sequence[Compressor],
) -> Json:
    """Returns `progress`, the leaves of its tree, and which of them may take what, in JSON types.

    `adaptive` are the numbers of the leaves that are adapted.
    """
    pending = None
    if progress.pending is not None:
        due, measured = progress.pending
        pending = [due, [statistics.own(x).tolist() for x in measured]]
    nonfinite = None if progress.nonfinite is None else progress.nonfinite.tolist()
    return {
        "format": FORMAT,
        "leaves": [[x.path, list(x.shape), str(x.dtype)] for x in leaves],
        "adaptive": list(adaptive),
        "candidates": [repr(c) for c in candidates],
        "step": progress.step,
        "current": pack([progress.current]),
        "plans": pack(progress.plans),
        "history": [dataclasses.asdict(r) for r in progress.history],
        "pending": pending,
        "nonfinite": nonfinite,
    }


def load(state: Json) -> Saved:
    """Returns what `save` wrote; raises ValueError for any other state."""
    try:
        untrusted.check_version(state, "format", FORMAT)
        saved: Saved = untrusted.typed(state, Saved, "it")
        _check(saved)
    except ValueError as error:
        raise ValueError(f"Adaptive: the saved policy cannot be read: {error}. {_AGAIN}") from None
    return saved


def _check(saved: Saved) -> None:
    """Raises ValueError for numbers that no training makes."""
    untrusted.whole(saved.step, "step")
    if len(saved.current.plans) > 1:
        raise ValueError(f"current has {len(saved.current.plans)} plans, but one holds at a time")
    for i, look in enumerate(saved.history):
        where = f"history[{i}]"
        untrusted.whole(look.step, f"{where} step")
        if look.outcome not in OUTCOMES:
            raise ValueError(
                f"{where} outcome={untrusted.shown(look.outcome)} is none of {OUTCOMES}"
            )
        if look.outcome != "unusable" and look.bits:
            untrusted.positive(look.norm, f"{where} norm")
    if saved.pending is not None:
        due, (weight, error, square, nonfinite) = saved.pending
        untrusted.whole(due, "pending[0]")
        for x in itertools.chain(weight, square, nonfinite, *error):
            if x < 0:
                raise ValueError(f"pending has {x:g}, but its squares and counts are 0 or more")


def restore(
    saved: Saved,
    known: Sequence[Compressor],
    adaptive: Sequence[int],
    candidates: Sequence[Compressor],
) -> Progress:
    """Returns the progress that `save` was given, of the same adaptive leaves and candidates.

    Raises ValueError for others, and for an unknown compressor.
    """
    of = "the saved policy"
    for what, theirs, ours in (
        ("adapts leaf", saved.adaptive, adaptive),
        ("has the candidate", saved.candidates, [repr(c) for c in candidates]),
    ):
        for a, b in itertools.zip_longest(theirs, ours):
            if a != b:
                raise ValueError(
                    f"Adaptive: {of} {what} {untrusted.shown(a)} where this one has "
                    f"{untrusted.shown(b)}; pass the candidates and the base of the run that saved "
                    f"it. {_AGAIN}"
                )
    current, *more = unpack(saved.current, known, of) or [()]
    plans = unpack(saved.plans, known, of)
    struck = [] if saved.nonfinite is None else [saved.nonfinite]
    seen = [part for r in saved.history for part in (r.bits, r.relative)]
    for part in (current, *more, *plans, *struck, *seen):
        if len(part) != len(adaptive):
            raise ValueError(
                f"Adaptive: {of} has something for {len(part)} adaptive leaves, but adapts "
                f"{len(adaptive)}. {_AGAIN}"
            )
    pending = None
    if saved.pending is not None:
        due, sums = saved.pending
        pending = due, _statistics(sums, len(adaptive), len(candidates))
    return Progress(
        current=current,
        plans=plans,
        step=saved.step,
        history=saved.history,
        pending=pending,
        nonfinite=np.array(struck[0], np.float32) if struck else None,
    )


def _statistics(sums: Any, adaptive: int, candidates: int) -> Statistics:
    like = jax.eval_shape(lambda: Statistics.zeros(adaptive, candidates))
    pairs = list(zip(sums, like, strict=True))
    try:
        same = all(np.shape(x) == np.shape(np.zeros(y.shape).tolist()) for x, y in pairs)
    except ValueError:  # rows of several lengths
        same = False
    if not same:
        raise ValueError(
            f"Adaptive: the saved policy has statistics {untrusted.shown(sums)}, which are not of "
            f"{adaptive} adaptive leaves and {candidates} candidates. {_AGAIN}"
        )
    # NumPy's, since a step may be traced here.
    arrays: list[Any] = [np.asarray(x, np.float32).reshape(y.shape) for x, y in pairs]
    return Statistics(*arrays)


def saved_leaves(saved: Sequence[tuple[str, tuple[int, ...], str]]) -> tuple[Leaf, ...]:
    """The leaves of `Saved`; raises ValueError for an unknown dtype."""
    leaves = []
    for path, shape, name in saved:
        try:
            leaves.append(Leaf(path, shape, np.dtype(name)))
        except (SyntaxError, TypeError, ValueError):
            raise ValueError(
                f"Adaptive: the saved policy has a leaf of dtype {untrusted.shown(name)}, which is "
                "not known; pass the state that state_dict returned."
            ) from None
    return tuple(leaves)
