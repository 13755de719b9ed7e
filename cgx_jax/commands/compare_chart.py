"""The chart of `compare`: time per step, bytes and error, by method."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from cgx_jax._types import Json
from cgx_jax.commands.chart import COLORS, PSUM_COLOR


def draw(rows: Sequence[Json], world: int, path: Path) -> None:
    """Draws the rows of `compare` into a PNG at `path`."""
    names = [row["method"] for row in rows]
    colors = [PSUM_COLOR if name == "exact" else COLORS[1] for name in names]
    low, middle, high = (np.array([row["seconds"] for row in rows]) * 1e3).T
    figure = Figure(figsize=(13, 4.6), layout="constrained")
    panels = figure.subplots(1, 3, sharey=True)
    times, sizes, errors = panels
    spread = [middle - low, high - middle]
    times.barh(names, middle, xerr=spread, color=colors, error_kw={"lw": 1})
    times.axvline(middle[0], color="black", lw=1, ls=":")
    times.set(xlabel="ms per step, median and quartiles", title="Time")
    times.invert_yaxis()
    sizes.barh(names, [row["sent_bytes"] / 1e6 for row in rows], color=colors)
    sizes.set(xlabel="MB sent per rank and step", title="Bytes", xscale="log")
    errors.barh(names, [row["error"] or 0 for row in rows], color=colors)
    errors.set(xlabel="relative error of a step's mean", title="Error", xscale="log")
    for axes in panels:
        axes.grid(axis="x", alpha=0.25)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"A training step over {world} ranks")
    figure.savefig(path, dpi=150)
