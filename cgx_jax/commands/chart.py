"""The chart of `bench`: time and bus bandwidth against size, drawn by matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from cgx_jax._types import Json
from cgx_jax.exchanges.table import EXCHANGES
from cgx_jax.tuning.link_timer import size_text

PSUM_COLOR = "#4c566a"
COLORS = ("#d9622b", "#2b7bba", "#3a9a5b", "#8a5bb5", "#b58a2b", "#b52b5b")


def draw(rows: Sequence[Json], world: int, path: Path) -> None:
    """Draws the rows of `bench` into a PNG at `path`."""
    sizes = np.unique([row["bytes"] for row in rows])
    series = _series(rows)
    figure = Figure(figsize=(11, 4.6), layout="constrained")
    times, speeds = figure.subplots(1, 2)
    for (name, mine), color in zip(series.items(), _colors(len(series)), strict=True):
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


def _colors(count: int) -> list[str]:
    return [PSUM_COLOR, *(COLORS[i % len(COLORS)] for i in range(count - 1))]
