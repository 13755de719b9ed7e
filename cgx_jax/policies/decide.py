"""From statistics to a plan, or to keeping the old one: pure functions on numpy."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from cgx_jax.compressors import Quantize
from cgx_jax.policies.solvers import Problem, Solver

Widths = tuple[Quantize, ...]


@dataclasses.dataclass(frozen=True)
class Subject:
    """The leaves that are adapted, by path and size, and what they may take."""

    paths: tuple[str, ...]
    sizes: tuple[int, ...]
    candidates: Widths

    def nbytes(self, widths: Sequence[Quantize]) -> int:
        """Payload bytes of all leaves."""
        return sum(w.wire_bits(n) // 8 for w, n in zip(widths, self.sizes, strict=True))

    def errors(self, widths: Sequence[Quantize], averages: dict[str, Any]) -> list[float]:
        """Squared error of each leaf. A start that is no candidate counts as the nearest one."""
        bits = np.array([c.bits for c in self.candidates])
        return [
            float(row[int(np.argmin(np.abs(bits - w.bits)))])
            for w, row in zip(widths, averages["error"], strict=True)
        ]

    def cost(self, widths: Widths, averages: dict[str, Any]) -> tuple[int, float]:
        """Payload bytes and squared error of all leaves."""
        return self.nbytes(widths), math.fsum(self.errors(widths, averages))

    def problem(self, averages: dict[str, Any]) -> Problem:
        """What a solver is given."""
        table = [[c.wire_bits(n) // 8 for c in self.candidates] for n in self.sizes]
        return Problem(
            values=np.array(self.sizes, np.int64),
            norm=np.sqrt(averages["square"]),
            bits=np.array([c.bits for c in self.candidates]),
            nbytes=np.array(table, np.int64).reshape(len(self.sizes), len(self.candidates)),
            error=averages["error"],
            noisy=[c.needs_key for c in self.candidates],
            rotated=[c.rotation for c in self.candidates],
        )


class Decision(NamedTuple):
    """`outcome` as in `Refresh`; the plan that holds from now; leaves that are in the way."""

    outcome: str
    widths: Widths
    leaves: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Refresh:
    """One look at the statistics: what was decided, and from what.

    `step` counts calls of the training step. `outcome` is "changed", "kept" (the gain was under
    the hysteresis), "bounded" (a better plan would be one too many) or "unusable" (statistics of
    `unusable` leaves are missing, zero or not finite: the old plan stays). `bits` are the widths
    of the plan that holds after it, `nbytes` its payload and `error` its squared error by the
    statistics, over adaptive leaves; `relative` each leaf's error over its norm. `nonfinite` names
    leaves that held a NaN or infinity since the last look.
    """

    step: int
    outcome: str
    bits: tuple[int, ...]
    nbytes: int
    error: float
    relative: tuple[float, ...]
    unusable: tuple[str, ...]
    nonfinite: tuple[str, ...]

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Refresh:
        """The record whose `dataclasses.asdict` went through JSON, which has no tuples."""
        made: dict[str, Any] = {}
        for name, value in fields.items():
            made[name] = tuple(value) if isinstance(value, list) else value
        return cls(**made)

    @classmethod
    def of(
        cls,
        step: int,
        decision: Decision,
        subject: Subject,
        averages: dict[str, Any],
        struck: Sequence[bool],
    ) -> Refresh:
        """The record of a decision; `struck` are the leaves that were not finite."""
        errors = subject.errors(decision.widths, averages)
        relative = [
            math.sqrt(e / s) if s > 0 else math.nan
            for e, s in zip(errors, averages["square"], strict=True)
        ]
        return cls(
            step,
            decision.outcome,
            tuple(w.bits for w in decision.widths),
            subject.nbytes(decision.widths),
            math.fsum(errors),
            tuple(relative),
            decision.leaves,
            tuple(p for p, bad in zip(subject.paths, struck, strict=True) if bad),
        )


def decide(
    averages: dict[str, Any],
    subject: Subject,
    solver: Solver,
    widths: Widths,
    plans: Sequence[Widths],
    *,
    hysteresis: float,
    max_plans: int,
) -> Decision:
    """What holds after a look at `averages` (of `statistics.mean`), now that `widths` do.

    `plans` are those that were compiled already. Raises what the solver raises.
    """
    usable = np.isfinite(averages["error"]).all(axis=1) & np.isfinite(averages["square"])
    if not (usable.all() and (averages["square"] > 0).any()):
        named = [p for p, ok in zip(subject.paths, usable, strict=True) if not ok]
        return Decision("unusable", widths, tuple(named or subject.paths))
    choice = solver.solve(subject.problem(averages))
    best = tuple(subject.candidates[i] for i in choice)
    now, new = subject.cost(widths, averages), subject.cost(best, averages)
    if all(abs(b - a) <= hysteresis * a for a, b in zip(now, new, strict=True)):
        return Decision("kept", widths)
    if best in plans or len(plans) < max_plans:
        return Decision("changed", best)
    # Of the plans at hand, the smallest that errs no more than the one that is wanted.
    costs = [(subject.cost(p, averages), i) for i, p in enumerate(plans)]
    allowed = [c for c in costs if c[0][1] <= new[1] * (1 + hysteresis)]
    known = plans[min(allowed)[1]] if allowed else widths
    return Decision("bounded" if known == widths else "changed", known)
