"""The chart of `report`: widths over time, error against bytes, and recorded curves."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.colors import BoundaryNorm
from matplotlib.figure import Figure

from cgx_jax.commands.chart import COLORS
from cgx_jax.commands.report_choices import choices, front
from cgx_jax.commands.run_file import Run

MOST_LABELS = 40


def draw(runs: Sequence[Run], path: Path) -> None:
    """Draws the runs into a PNG at `path`; widths and errors are the first run's."""
    names = sorted({name for run in runs for name in run.scalars})
    leaves = min(MOST_LABELS, len(runs[0].menu.paths))
    columns = 2 + len(names)
    figure = Figure(figsize=(5.2 * columns, max(4.2, 0.16 * leaves + 2)), layout="constrained")
    axes = figure.subplots(1, columns)
    _draw_widths(figure, axes[0], runs[0])
    _draw_front(axes[1], runs[0])
    for one, name in zip(axes[2:], names, strict=True):
        for run, color in zip(runs, COLORS * len(runs), strict=False):
            if name in run.scalars:
                one.plot(*run.scalars[name].T, color=color, lw=1, label=run.name)
        one.set(title=name, xlabel="step")
        one.legend(frameon=False)
    for one in axes[1:]:
        one.grid(alpha=0.25)
        one.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def _draw_widths(figure: Figure, axes: Any, run: Run) -> None:
    widths = [c.bits for c in run.menu.candidates]
    axes.set(title="bits of every leaf", xlabel="step at which the policy read the statistics")
    paths = run.menu.paths
    if len(paths) <= MOST_LABELS:
        axes.set_yticks(range(len(paths)), paths, fontsize=7)
    else:
        axes.set_ylabel(f"{len(paths)} leaves")
    if not run.refreshes:
        return
    table = np.array([r.bits for r, _ in run.refreshes]).T
    lowest, highest = min(table.min(), widths[0]), max(table.max(), widths[-1])
    norm = BoundaryNorm(np.arange(lowest - 0.5, highest + 1), 256)
    image = axes.imshow(table, aspect="auto", cmap="viridis", norm=norm, interpolation="nearest")
    steps = [r.step for r, _ in run.refreshes]
    shown = np.unique(np.linspace(0, len(steps) - 1, min(8, len(steps))).astype(int))
    axes.set_xticks(shown, [steps[i] for i in shown])
    figure.colorbar(image, ax=axes, label="bits", ticks=range(lowest, highest + 1))


def _draw_front(axes: Any, run: Run) -> None:
    axes.set(
        title="error against bytes, last statistics",
        xlabel="payload bits per value",
        ylabel="relative L2 error of a gradient",
        yscale="log",
    )
    line = front(run)
    axes.plot([c.bits for c in line], [c.error for c in line], color="black", lw=1, label="least")
    uniform = [c for c in choices(run) if c.name.startswith("uniform")]
    axes.plot(
        [c.bits for c in uniform], [c.error for c in uniform], "s", color="gray", label="uniform"
    )
    others = [c for c in choices(run) if not c.name.startswith("uniform")]
    for choice, color in zip(others, COLORS, strict=False):
        size = 9 if choice.name == "this run" else 6
        axes.plot(choice.bits, choice.error, "o", ms=size, color=color, label=choice.name)
    if line:
        axes.legend(frameon=False, fontsize=8)
