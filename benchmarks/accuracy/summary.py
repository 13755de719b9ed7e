"""Writes the tables of docs/accuracy.md and docs/measurements/accuracy_*.md.

The results are in benchmarks/results/accuracy.

    python benchmarks/accuracy/summary.py
"""

import argparse
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[1]))

from configurations import CONFIGURATIONS

import tables

TEXTS = (
    tables.DOCS / "accuracy.md",
    *sorted((tables.DOCS / "measurements").glob("accuracy_*.md")),
)
TASKS = ("language", "images", "autoencoder", "recurrent", "words")
METRICS = {  # task: (what a row holds, whether more is better, digits)
    "language": {"held_out_loss": (False, 3)},
    "images": {"held_out_accuracy": (True, 4), "held_out_loss": (False, 3)},
    "autoencoder": {"held_out_loss": (False, 4)},
    "recurrent": {"held_out_loss": (False, 3)},
    "words": {"held_out_loss": (False, 3)},
}


class Runs:
    """A task's results by configuration and seed."""

    def __init__(
        self,
        task: str,
        folder: str = "accuracy",
        configurations: Mapping[str, Any] = CONFIGURATIONS,
    ) -> None:
        self.task = task
        self.rows = {(r["configuration"], r["seed"]): r for r in tables.rows(f"{folder}/{task}")}
        present = {name for name, _ in self.rows}
        self.names = [name for name in configurations if name in present]

    def seeds(self, name: str) -> list[int]:
        """The seeds that both `name` and exact have run."""
        both = {s for n, s in self.rows if n == name} & {s for n, s in self.rows if n == "exact"}
        return sorted(both)

    def values(self, name: str, field: str, of: str | None = None) -> np.ndarray:
        """Returns `field` at the seeds of `name`, of that configuration or of `of` if given."""
        return np.array([self.rows[of or name, seed][field] for seed in self.seeds(name)])

    def gap(self, name: str, metric: str) -> float:
        """Returns how much worse than exact the mean is, in exact's standard deviations."""
        better, _ = METRICS[self.task][metric]
        exact = self.values(name, metric, "exact")
        worse = self.values(name, metric).mean() - exact.mean()
        return float((-worse if better else worse) / exact.std(ddof=1))


def spread(x: np.ndarray, digits: int, sign: str = "") -> str:
    return f"{x.mean():{sign}.{digits}f} ± {x.std(ddof=1):.{digits}f}"


def task_table(task: str) -> str:
    runs = Runs(task)
    head = ["", "bits per value"]
    for metric in METRICS[task]:
        head += [metric.replace("held_out_", "held-out "), "difference to exact", "worse by"]
    body = []
    for name in runs.names:
        line = [name, f"{runs.values(name, 'bits_per_value').mean():.3f}"]
        for metric, (_, digits) in METRICS[task].items():
            own = runs.values(name, metric)
            line.append(spread(own, digits))
            if name == "exact":
                line += ["", ""]
            else:
                line.append(spread(own - runs.values(name, metric, "exact"), digits, "+"))
                line.append(f"{runs.gap(name, metric):+.2f} sd")
        if len(runs.seeds(name)) != len(runs.seeds("exact")):
            line[0] += f" ({len(runs.seeds(name))} seeds)"
        body.append(line)
    return tables.table(head, body)


def longer() -> str:
    """The gap to exact in runs of the task's own length, and in runs three times as long."""
    body = []
    for task in ("language", "autoencoder"):
        _, digits = METRICS[task]["held_out_loss"]
        every = [Runs(task), Runs(task, "accuracy/longer")]
        for name in every[1].names:
            for runs in every:
                own, exact = (runs.values(name, "held_out_loss", of) for of in (name, "exact"))
                steps = str(runs.rows[name, runs.seeds(name)[0]]["steps"])
                line = [task, name, steps, spread(own, digits)]
                if name != "exact":
                    line += [spread(own - exact, digits, "+")]
                    line += [f"{runs.gap(name, 'held_out_loss'):+.2f} sd"]
                body.append([*line, "", ""][:6])
    head = ["task", "", "steps", "held-out loss", "difference to exact", "worse by"]
    return tables.table(head, body)


def settings() -> str:
    """How much worse than exact each fixed setting is, by task."""
    names = ["exact, learning rate 2 % lower", "8 bits", "6 bits", "5 bits"]
    for bits in (4, 3):
        rotated = f"{bits} bits, rotated, preconditioned"
        names += [f"{bits} bits", f"{bits} bits, rotated", rotated]
    names += [f"2 bits{way}" for way in ("", ", rotated", ", feedback", ", rotated, feedback")]
    body = []
    for name in names:
        every = [Runs(task) for task in TASKS]
        bits_per_value = next(r.values(name, "bits_per_value") for r in every if name in r.names)
        metrics = [next(iter(METRICS[task])) for task in TASKS]
        gaps = [
            f"{runs.gap(name, metric):+.2f}" if name in runs.names else ""
            for runs, metric in zip(every, metrics, strict=True)
        ]
        body.append([name, f"{bits_per_value.mean():.3f}", *gaps])
    return tables.table(["", "bits per value", *TASKS], body)


def adaptive() -> str:
    """Bytes and squared error of adaptive plans, relative to 4 bits everywhere."""
    body: list[list[str]] = []
    for task in TASKS:
        runs = Runs(task)
        for name in runs.names:
            rows = [runs.rows[name, seed] for seed in runs.seeds(name)]
            if "widths" in rows[0]:
                ratios = [
                    spread(runs.values(name, f"{f}_to_4_bits"), 3) for f in ("bytes", "error")
                ]
                first = rows[0]["widths"][-1]
                body.append([task, name, *ratios, f"`{first[2]}`"])
    head = ["task", "solver", "bytes to 4 bits", "squared error to 4 bits", "last widths, seed 0"]
    return tables.table(head, body)


def worse_with_error(gaps: np.ndarray, exact: np.ndarray) -> str:
    """Formats the mean gap to exact, in exact's standard deviations, with its standard error."""
    worse = gaps / exact.std(ddof=1)
    return f"{worse.mean():+.2f} ± {worse.std(ddof=1) / len(worse) ** 0.5:.2f}"


def step_size() -> str:
    """How much worse than exact under Adam, with shorter and longer steps."""
    tasks = [task for task in TASKS if task != "images"]
    names = [f"exact, learning rate 2 % {way}" for way in ("lower", "higher")]
    for bits, percent in ((4, 2), (3, 5)):
        full = f"{bits} bits, rotated, preconditioned"
        names += [full, f"{full}, learning rate {percent} % higher"]
    every = [Runs(task, "accuracy/step_size") for task in tasks]
    body = []
    for name in names:
        cells = []
        for runs in every:
            exact = runs.values(name, "held_out_loss", "exact")
            gap = runs.values(name, "held_out_loss") - exact
            cells.append(worse_with_error(gap, exact) if name in runs.names else "")
        if any(cells):
            body.append([name, *cells])
    return tables.table(["", *tasks], body)


def where_lost() -> str:
    """How much worse than exact if a part of the leaves or of the steps is reduced exactly."""
    rows: list[dict[str, Any]] = tables.rows("accuracy/where_lost")
    parts = dict.fromkeys(r["exact"] for r in rows)
    body = []
    for task in dict.fromkeys(r["task"] for r in rows):
        runs = Runs(task)
        exact = runs.values("exact", "held_out_loss")
        cells = []
        for part in parts:
            own = {
                r["seed"]: r["held_out_loss"]
                for r in rows
                if (r["task"], r["exact"]) == (task, part)
            }
            gap = np.array([own[seed] for seed in runs.seeds("exact")]) - exact
            cells.append(worse_with_error(gap, exact))
        body.append([task, *cells])
    return tables.table(["exact:", *parts], body)


TABLES: dict[str, Callable[[], str]] = {
    **{task: partial(task_table, task) for task in TASKS},
    "settings": settings,
    "longer": longer,
    "adaptive": adaptive,
    "where_lost": where_lost,
    "step_size": step_size,
    "critical_phases": tables.critical_phases,
}


def main() -> int:
    argparse.ArgumentParser(description=__doc__).parse_args()
    for path in TEXTS:
        path.write_text("".join(tables.filled(path.read_text(), TABLES)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
