"""What uniform widths and each solver would choose for the statistics of a run."""

from __future__ import annotations

import contextlib
import dataclasses

import numpy as np

from cgx_jax.commands.run_file import Run
from cgx_jax.policies.solvers import KMeans, LeastBytes, LeastError, Linear, Solver

FRONT_POINTS = 25


@dataclasses.dataclass(frozen=True)
class Choice:
    """One choice of widths: its mean payload bits per value and its relative L2 error."""

    name: str
    bits: float
    error: float


def choices(run: Run) -> list[Choice]:
    """Returns uniform widths, each solver's choice and the run's, by the last usable statistics."""
    last = run.measured()
    if last is None:
        return []
    refresh, averages = last
    menu, out = run.menu, []
    bits = np.array([c.bits for c in menu.candidates])
    for i, c in enumerate(menu.candidates):
        name = f"{c.bits}" if (bits == c.bits).sum() == 1 else c.name
        out.append(_choice(run, f"uniform {name}", np.full(len(menu.sizes), i), averages))
    problem = menu.problem(averages)
    for solver in _solvers(bits):
        out.append(_choice(run, type(solver).__name__, solver.solve(problem), averages))
    total = averages["square"].sum()
    per_value = 8 * refresh.nbytes / sum(menu.sizes)
    return [*out, Choice("this run", per_value, float(np.sqrt(refresh.error / total)))]


def _solvers(bits: np.ndarray) -> list[Solver]:
    """Returns the solvers that can choose among candidates of these widths."""
    narrow, wide = int(bits[0]), int(bits[-1])
    able: list[Solver] = []
    for solver in (Linear(narrow, wide), KMeans(narrow, wide), LeastBytes()):
        with contextlib.suppress(ValueError):
            solver.check(bits)
            able.append(solver)
    return able


def front(run: Run) -> list[Choice]:
    """Returns the least error at budgets from the narrowest to the widest candidate."""
    last = run.measured()
    if last is None:
        return []
    problem = run.menu.problem(last[1])
    per_value = 8 * problem.nbytes.sum(axis=0) / problem.values.sum()
    budgets = np.linspace(per_value.min() + 1e-6, per_value.max(), FRONT_POINTS)
    return [_choice(run, "front", LeastError(float(b)).solve(problem), last[1]) for b in budgets]


def _choice(run: Run, name: str, choice: np.ndarray, averages: dict[str, np.ndarray]) -> Choice:
    nbytes, error = run.menu.cost(choice, averages)
    bits = 8 * nbytes / sum(run.menu.sizes)
    return Choice(name, bits, float(np.sqrt(error / averages["square"].sum())))
