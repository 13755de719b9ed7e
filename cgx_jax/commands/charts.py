"""The charts of `bench` and `compare`, drawn by matplotlib."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from cgx_jax._types import Json
from cgx_jax.exchanges.table import EXCHANGES
from cgx_jax.tuning.link_timer import size_text

PSUM_COLOR = "#4c566a"
COLORS = ("#d9622b", "#2b7bba", "#3a9a5b", "#8a5bb5", "#b58a2b", "#b52b5b")


def draw_bench(rows: Sequence[Json], world: int, path: Path) -> None:
    """Draws time and bus bandwidth against size, from the rows of `bench`, into a PNG at `path`."""
    sizes = np.unique([row["bytes"] for row in rows])
    series = _series(rows)
    figure = Figure(figsize=(11, 4.6), layout="constrained")
    times, speeds = figure.subplots(1, 2)
    colors = itertools.chain([PSUM_COLOR], itertools.cycle(COLORS))
    for (name, mine), color in zip(series.items(), colors, strict=False):
        style = "-" if name == "psum" else "--"
        seconds = np.array([row["seconds"] for row in mine]) * 1e3
        times.fill_between(sizes, seconds[:, 0], seconds[:, 2], color=color, alpha=0.2, lw=0)
        times.plot(sizes, seconds[:, 1], style, marker=".", color=color, label=name)
        busbw = [row["busbw_gbit"] for row in mine]
        speeds.plot(sizes, busbw, style, marker=".", color=color, label=name)
    # Leave out "auto": it is one of the others, and where it takes psum their difference is noise.
    sends = {exchange.shorthand for exchange in EXCHANGES}
    ours = [[row["ratio"][0] for row in m] for m in series.values() if m[0]["method"] in sends]
    least = pays_from(sizes, np.max(ours, axis=0))
    title = "compression does not clearly pay off at these sizes"
    if least is not None:
        title = f"compression pays off from {size_text(least)}"
    for axes in (times, speeds):
        if least is not None:
            axes.axvline(least, color="black", lw=1, ls=":")
        axes.set(xscale="log", xlabel="fp32 bytes per rank")
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    times.set(yscale="log", ylabel="time [ms], median and quartiles", title="Time")
    speeds.set(ylabel="busbw [Gbit/s]", title="Bus bandwidth")
    speeds.set_ylim(bottom=0)
    times.legend(frameon=False)
    figure.suptitle(f"All-reduce over {world} ranks: {title}")
    figure.savefig(path, dpi=150)


def draw_compare(rows: Sequence[Json], world: int, path: Path) -> None:
    """Draws time, bytes and error by method, from the rows of `compare`, into a PNG at `path`."""
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


def pays_from(sizes: np.ndarray, lower: np.ndarray) -> float | None:
    """Returns the size from which compression is faster in three repeats of four, or None.

    It is one of `sizes`. `lower` has, for each size, the lower quartile of psum's time divided by
    the best method's time.
    """
    unsure = np.flatnonzero(lower <= 1)
    first = unsure[-1] + 1 if unsure.size else 0
    return float(sizes[first]) if first < len(sizes) else None


def _series(rows: Sequence[Json]) -> dict[str, list[Json]]:
    """Groups the rows into one curve per method and width, psum first."""
    series: dict[str, list[Json]] = {}
    for row in rows:
        name = "psum" if row["method"] == "psum" else f"{row['method']}, {row['bits']} bits"
        series.setdefault(name, []).append(row)
    return series
