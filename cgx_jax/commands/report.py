"""`python -m cgx_jax report`: what an adaptive policy did in a run, in words and as a picture."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from cgx_jax.compressors import Quantize
from cgx_jax.policy import run_log
from cgx_jax.policy.decide import Refresh, Subject
from cgx_jax.policy.solvers import KMeans, LeastBytes, LeastError, Linear, Solver

EXPLANATION = """\
Reads the log of one run or more (cgx_jax.Adaptive(log=FILE)) and prints the last plan, leaf by
leaf, beside what uniform widths and each solver would give for the same statistics.
--png draws the widths of all leaves over time, squared error against bytes, and the curve of every
scalar that policy.record() noted.
"""
FRONT_POINTS = 25


class Traced(NamedTuple):
    """A plan that was compiled after `step` steps: its widths and what a rank sends a step."""

    step: int
    bits: tuple[int, ...]
    wire_bytes: int
    compile_seconds: float


@dataclasses.dataclass(frozen=True)
class Run:
    """A run's log: leaves with their candidates, plans, refreshes with averages, scalars."""

    name: str
    subject: Subject
    refreshes: tuple[tuple[Refresh, dict[str, np.ndarray]], ...]
    plans: tuple[Traced, ...]
    scalars: dict[str, np.ndarray]  # name -> [count, 2]: step, value

    @classmethod
    def read(cls, path: Path) -> Run:
        """The run logged at `path`; raises ValueError for a file that is no log."""
        subject: Subject | None = None
        refreshes: list[tuple[Refresh, dict[str, np.ndarray]]] = []
        plans: list[Traced] = []
        scalars: dict[str, list[tuple[int, float]]] = {}
        for number, line in enumerate(path.read_text().splitlines(), 1):
            try:
                entry = json.loads(line)
                kind = entry.pop("kind")
                if kind == "run":
                    subject = _subject(entry)
                elif kind == "refresh":
                    averages = {k: np.array(v, float) for k, v in entry.pop("averages").items()}
                    refreshes.append((Refresh.from_json(entry), averages))
                elif kind == "plan":
                    plans.append(Traced(**entry | {"bits": tuple(entry["bits"])}))
                elif kind == "scalars":
                    step = entry.pop("step")
                    for name, value in entry.items():
                        scalars.setdefault(name, []).append((step, value))
            except (AttributeError, KeyError, TypeError, ValueError) as error:
                raise ValueError(
                    f"report: line {number} of {path} is not of a run's log ({error!r}); pass the "
                    "file that was given to cgx_jax.Adaptive(log=...)."
                ) from None
        if subject is None:
            raise ValueError(f"report: {path} is empty: the run has not taken its first step.")
        curves = {name: np.array(points, float) for name, points in scalars.items()}
        return cls(path.stem, subject, tuple(refreshes), tuple(plans), curves)

    def measured(self) -> tuple[Refresh, dict[str, np.ndarray]] | None:
        """The last refresh that a solver could work with."""
        usable = [r for r in self.refreshes if r[0].outcome != "unusable"]
        return usable[-1] if usable else None


def _subject(entry: dict[str, Any]) -> Subject:
    if entry["schema"] != run_log.SCHEMA:
        raise ValueError(f"schema {entry['schema']}, this version reads {run_log.SCHEMA}")
    candidates = tuple(Quantize(**c) for c in entry["candidates"])
    return Subject(tuple(entry["paths"]), tuple(entry["sizes"]), candidates)


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
