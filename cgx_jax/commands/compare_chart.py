"""The picture of `compare`: time a step and bytes by method, and error against time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from cgx_jax.commands.chart import COLORS, PSUM_COLOR


def draw(rows: Sequence[dict[str, Any]], world: int, path: Path) -> None:
    """Draws the rows of `compare` into a PNG at `path`."""
    names = [row["method"] for row in rows]
    colors = [PSUM_COLOR, *(COLORS[i % len(COLORS)] for i in range(len(rows) - 1))]
    low, middle, high = (np.array([row["seconds"] for row in rows]) * 1e3).T
    figure = Figure(figsize=(13, 4.6), layout="constrained")
    times, sizes, errors = figure.subplots(1, 3)
    spread = [middle - low, high - middle]
    times.barh(names, middle, xerr=spread, color=colors, error_kw={"lw": 1})
    times.axvline(middle[0], color="black", lw=1, ls=":")
    times.set(xlabel="time a step [ms], median and quartiles", title="Time")
    sizes.barh(names, [row["sent_bytes"] / 1e6 for row in rows], color=colors)
    sizes.set(xlabel="MB that a rank sends in a step", title="Bytes", xscale="log")
    for axes in (times, sizes):
        axes.invert_yaxis()
    for row, color, x in zip(rows, colors, middle, strict=True):
        errors.plot(x, row["error"], "o", color=color)
        errors.annotate(row["method"], (x, row["error"]), xytext=(5, 3), textcoords="offset points")
    errors.set(xlabel="time a step [ms]", ylabel="relative error of the mean", title="Error")
    for axes in (times, sizes, errors):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"A training step over {world} ranks")
    figure.savefig(path, dpi=150)
