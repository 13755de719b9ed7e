"""`python -m cgx_jax report`: what an adaptive policy did in a run, in words and as a picture."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from cgx_jax.commands.run_file import Run
from cgx_jax.policy.solvers import KMeans, LeastBytes, LeastError, Linear, Solver

EXPLANATION = """\
Reads the log of one run or more (cgx_jax.Adaptive(log=FILE)) and prints the last plan, leaf by
leaf, beside what uniform widths and each solver would give for the same statistics.
--png draws the widths of all leaves over time, squared error against bytes, and the curve of every
scalar that policy.record() noted.
"""
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


def run(paths: Sequence[Path], png: Path | None) -> None:
    """Prints what the logs hold, and draws it; raises ValueError for a file that is no log."""
    runs = [Run.read(path) for path in paths]
    for one in runs:
        _print(one)
    if png is not None:
        from cgx_jax.commands import report_chart

        report_chart.draw(runs, png)
        print(f"drawn in {png}")


def _print(one: Run) -> None:
    outcomes = [r.outcome for r, _ in one.refreshes]
    print(
        f"{one.name}: {len(one.subject.paths)} adaptive leaves, {len(outcomes)} looks at their "
        f"statistics, {outcomes.count('changed')} changes of plan"
    )
    for plan in one.plans:
        print(
            f"  step {plan.step}: compiled in {plan.compile_seconds:.1f} s, a rank sends "
            f"{plan.wire_bytes:,} bytes a step"
        )
    for refresh, _ in one.refreshes:
        if refresh.nonfinite:
            print(f"  step {refresh.step}: not finite: {', '.join(refresh.nonfinite)}")
    if one.measured() is None:
        print("  no statistics yet that a solver could work with")
        return
    last = one.refreshes[-1][0]
    width = max(map(len, one.subject.paths), default=4)
    print(f"  {'leaf'.ljust(width)}  values      bits  relative error")
    for path, n, bits, error in zip(
        one.subject.paths, one.subject.sizes, last.bits, last.relative, strict=True
    ):
        print(f"  {path.ljust(width)}  {n:<10,}  {bits:>4}  {error:.4f}")
    print("  choice                bits a value  relative error")
    for choice in choices(one):
        print(f"  {choice.name.split('(')[0]:<20}  {choice.bits:>12.3f}  {choice.error:.4f}")
