"""What uniform widths and each solver would give for the statistics of a run."""

from __future__ import annotations

import dataclasses

import numpy as np

from cgx_jax.commands.run_file import Run
from cgx_jax.policies.solvers import KMeans, LeastBytes, LeastError, Linear, Solver

FRONT_POINTS = 25


@dataclasses.dataclass(frozen=True)
class Choice:
    """What something would give every leaf: mean payload bits a value, and relative L2 error."""

    name: str
    bits: float
    error: float


def choices(run: Run) -> list[Choice]:
    """Uniform widths, every solver, and the plan that holds, by the last usable statistics."""
    last = run.measured()
    if last is None:
        return []
    refresh, averages = last
    out = []
    for i, c in enumerate(run.subject.candidates):
        out.append(_choice(run, f"uniform {c.bits}", np.full(len(run.subject.sizes), i), averages))
    widths = [c.bits for c in run.subject.candidates]
    solvers: list[Solver] = [Linear(widths[0], widths[-1]), KMeans(widths[0], widths[-1])]
    if 4 in widths:
        solvers.append(LeastBytes())
    problem = run.subject.problem(averages)
    out += [_choice(run, str(s), s.solve(problem), averages) for s in solvers]
    total = averages["square"].sum()
    bits = 8 * refresh.nbytes / sum(run.subject.sizes)
    return [*out, Choice("this run", bits, float(np.sqrt(refresh.error / total)))]


def front(run: Run) -> list[Choice]:
    """The least error for budgets from the narrowest to the widest candidate."""
    last = run.measured()
    if last is None:
        return []
    problem = run.subject.problem(last[1])
    per_value = 8 * problem.nbytes.sum(axis=0) / problem.values.sum()
    budgets = np.linspace(per_value.min() + 1e-6, per_value.max(), FRONT_POINTS)
    return [_choice(run, "front", LeastError(float(b)).solve(problem), last[1]) for b in budgets]


def _choice(run: Run, name: str, choice: np.ndarray, averages: dict[str, np.ndarray]) -> Choice:
    widths = tuple(run.subject.candidates[i] for i in choice)
    nbytes, error = run.subject.cost(widths, averages)
    bits = 8 * nbytes / sum(run.subject.sizes)
    return Choice(name, bits, float(np.sqrt(error / averages["square"].sum())))
