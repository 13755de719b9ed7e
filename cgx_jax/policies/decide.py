"""From statistics to a plan, or to keeping the old one: pure functions on numpy."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from cgx_jax.compressors import Compressor
from cgx_jax.leaves import Leaf
from cgx_jax.policies.solvers import Problem, Solver

Compressors = tuple[Compressor, ...]
OUTCOMES = "changed", "kept", "bounded", "unusable"


@dataclasses.dataclass(frozen=True)
class Subject:
    """The leaves that are adapted, the compressors that each may take, and the number of ranks."""

    leaves: tuple[Leaf, ...]
    candidates: Compressors
    world: int = 2

    @functools.cached_property
    def paths(self) -> tuple[str, ...]:
        return tuple(leaf.path for leaf in self.leaves)

    @functools.cached_property
    def _payloads(self) -> np.ndarray:
        """Payload bytes, int64[leaves, candidates]."""
        each = [self.nbytes((c,) * len(self.leaves)) for c in self.candidates]
        return np.array(each, np.int64).reshape(len(each), len(self.leaves)).T

    def nbytes(self, compressors: Compressors) -> list[int]:
        """Payload bytes of each leaf."""
        pairs = zip(compressors, self.leaves, strict=True)
        return [c.payload_bytes(x.shape, x.dtype) for c, x in pairs]

    def errors(self, compressors: Compressors, averages: dict[str, np.ndarray]) -> list[float]:
        """Squared error of each leaf.

        Only candidates are measured. A run may start with a compressor that is not a candidate. It
        counts as the candidate whose payload of the leaf is nearest to its own, in bytes.
        """
        return [float(averages["error"][i][self._index(i, c)]) for i, c in enumerate(compressors)]

    def _index(self, leaf: int, compressor: Compressor) -> int:
        if compressor in self.candidates:
            return self.candidates.index(compressor)
        own = compressor.payload_bytes(self.leaves[leaf].shape, self.leaves[leaf].dtype)
        return int(np.abs(self._payloads[leaf] - own).argmin())

    def cost(
        self, compressors: Compressors, averages: dict[str, np.ndarray]
    ) -> tuple[float, float]:
        """Returns payload bytes, weighted as in `problem`, and squared error of all leaves."""
        pairs = zip(compressors, self.nbytes(compressors), strict=True)
        nbytes = math.fsum(self._weight(c) * n for c, n in pairs)
        return nbytes, math.fsum(self.errors(compressors, averages))

    def problem(self, averages: dict[str, np.ndarray]) -> Problem:
        """Returns the solver's problem; bytes are those of a chunked code that sends as much."""
        weights = np.array([self._weight(c) for c in self.candidates])
        return Problem(
            values=np.array([leaf.size for leaf in self.leaves], np.int64),
            norm=np.sqrt(averages["square"]),
            bits=np.array([c.width for c in self.candidates]),
            nbytes=np.ceil(self._payloads * weights).astype(np.int64),
            error=averages["error"],
            noisy=["noise" in c.codec_work for c in self.candidates],
            rotated=["rotation" in c.codec_work for c in self.candidates],
        )

    def _weight(self, compressor: Compressor) -> float:
        """Returns how much more a byte of payload costs than in a code of chunks or sums.

        With a code of chunks or sums, a rank sends 2 (world - 1) / world payloads. With a gathered
        code, it sends world - 1.
        """
        gathered = not compressor.lossless and compressor.reductions[0] == "gather_sum"
        return max(1.0, self.world / 2) if gathered else 1.0


class Decision(NamedTuple):
    """`outcome` is as in `Refresh`; `compressors` hold from now on; `leaves` are unusable."""

    outcome: str
    compressors: Compressors
    leaves: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Refresh:
    """One look at the statistics: what was decided, and from what.

    `step` counts calls of the training step. `outcome` is "changed", "kept" (the gain was under the
    hysteresis), "bounded" (a better plan would be one too many) or "unusable" (statistics of
    `unusable` leaves are missing, zero or not finite: the old plan stays). `bits` are the widths
    (`Compressor.width`) of the plan that holds afterwards. `nbytes` is its payload, and `error` its
    squared error according to the statistics, both over adaptive leaves. `relative` is each leaf's
    error over its norm. `nonfinite` names leaves that held a NaN or infinity since the last look.
    `norm` is the L2 norm of all adaptive leaves' gradients together.
    """

    step: int
    outcome: str
    bits: tuple[int, ...]
    nbytes: int
    error: float
    relative: tuple[float, ...]
    unusable: tuple[str, ...]
    nonfinite: tuple[str, ...]
    norm: float

    @classmethod
    def of(
        cls,
        step: int,
        decision: Decision,
        subject: Subject,
        averages: dict[str, np.ndarray],
        struck: Sequence[bool],
    ) -> Refresh:
        """Returns the record of a decision; `struck` marks the leaves that were not finite."""
        errors = subject.errors(decision.compressors, averages)
        relative = [
            math.sqrt(e / s) if s else 0.0  # zeros lose nothing
            for e, s in zip(errors, averages["square"], strict=True)
        ]
        return cls(
            step,
            decision.outcome,
            tuple(c.width for c in decision.compressors),
            sum(subject.nbytes(decision.compressors)),
            math.fsum(errors),
            tuple(relative),
            decision.leaves,
            tuple(p for p, bad in zip(subject.paths, struck, strict=True) if bad),
            norm_of(averages),
        )


def norm_of(averages: dict[str, np.ndarray]) -> float:
    """The L2 norm of all leaves together; NaN if that of a leaf is not known."""
    return math.sqrt(math.fsum(averages["square"]))


def last_norm(history: Sequence[Refresh]) -> float | None:
    """Returns the norm at the last look that was usable; None without one."""
    norms = [r.norm for r in history if r.outcome != "unusable"]
    return norms[-1] if norms else None


def decide(
    averages: dict[str, np.ndarray],
    subject: Subject,
    solver: Solver,
    current: Compressors,
    plans: Sequence[Compressors],
    *,
    hysteresis: float,
    max_plans: int,
    before: float | None = None,
) -> Decision:
    """Decides which plan holds after a look at `averages` (of `statistics.mean`).

    `current` is the plan that holds now, `plans` are those that were compiled already, and `before`
    is the norm at the last look. Raises what the solver raises, and ValueError if its answer is not
    a candidate for each leaf.
    """
    if not subject.leaves:
        return Decision("kept", current)
    usable = np.isfinite(averages["error"]).all(axis=1) & np.isfinite(averages["square"])
    if not (usable.all() and (averages["square"] > 0).any()):
        named = [p for p, ok in zip(subject.paths, usable, strict=True) if not ok]
        return Decision("unusable", current, tuple(named or subject.paths))
    change = None if before is None else abs(norm_of(averages) - before) / before
    answer = solver.solve(dataclasses.replace(subject.problem(averages), change=change))
    choice, count = np.asarray(answer), len(subject.candidates)
    fits = choice.shape == (len(subject.leaves),) and choice.dtype.kind in "iu"
    if not fits or not ((choice >= 0) & (choice < count)).all():
        raise ValueError(
            f"Adaptive: {type(solver).__name__}.solve returned {answer!r}; return an integer from "
            f"0 to {count - 1} for each of the {len(subject.leaves)} leaves, the number of its "
            "candidate in problem.bits."
        )
    best = tuple(subject.candidates[i] for i in choice)
    now, new = subject.cost(current, averages), subject.cost(best, averages)
    if all(abs(b - a) <= hysteresis * a for a, b in zip(now, new, strict=True)):
        return Decision("kept", current)
    if best in plans or len(plans) < max_plans:
        return Decision("changed", best)
    # Of the compiled plans, the smallest whose error is no larger than that of the wanted plan, up
    # to the hysteresis.
    costs = [(subject.cost(p, averages), i) for i, p in enumerate(plans)]
    allowed = [c for c in costs if c[0][1] <= new[1] * (1 + hysteresis)]
    known = plans[min(allowed)[1]] if allowed else current
    return Decision("bounded" if known == current else "changed", known)
