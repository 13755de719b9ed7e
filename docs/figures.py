"""The figures of README and docs, as SVG in docs/figures.

    python docs/figures.py    # needs matplotlib: pip install -e ".[demo]"

`losses.svg` and `speed.svg` are drawn from benchmarks/results, as the tables are. `choosing.svg` is
the model of benchmarks/predict.py with measured steps in it. The others explain how the library
works.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, Rectangle

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))

import measure
import predict
from cgx_jax.commands import rig
from cgx_jax.tuning.link_timer import size_text

HERE = Path(__file__).resolve().parent
RESULTS = HERE.parent / "benchmarks" / "results"
RATES = ("100mbit", "1gbit", "10gbit", "unlimited")
BYTES, WORLD = 25_000_000, 4
DARK, BLUE, LIGHT, GREEN, GRAY = "#263238", "#1565c0", "#90caf9", "#2e7d32", "#b0bec5"
LABEL_AT = 3e9  # the link at which the chart names its ways
LOSSES = {"exact": DARK, "4 bits": BLUE, "DiLoCo, 4 bits": "#ffb300"}
WAY_COLORS = dict(
    zip((*predict.WAYS, None), (GREEN, BLUE, "#ffb300", "#d84315", GRAY), strict=True)
)
# Text stays text, and the same numbers give the same file.
STYLE = {"svg.fonttype": "none", "svg.hashsalt": "cgx_jax", "font.size": 11, "text.color": DARK}


def speeds() -> dict[tuple[str, str], float]:
    """Returns the speed of a reduction of 25 MB on 4 ranks, as a multiple of `lax.psum`'s speed."""
    return {
        (row["links"], row["method"]): row["ratio"][1]
        for row in measure.rows(RESULTS / "all_reduce.jsonl")
        if row["bytes"] == BYTES and row["world"] == WORLD and row["method"] != "psum"
    }


def link(rate: str) -> str:
    """Returns a rate as readers write it: "1gbit" is 1 Gbit/s."""
    return rate.replace("mbit", " Mbit/s").replace("gbit", " Gbit/s")


def speed() -> Figure:
    """Draws the chart of README."""
    figure, axes = plt.subplots(figsize=(7.5, 3.2))
    measured = speeds()
    for i, (method, color) in enumerate((("mpi", BLUE), ("xla", LIGHT))):
        places = [k + 0.4 * i - 0.2 for k in range(len(RATES))]
        heights = [measured[rate, method] for rate in RATES]
        bars = axes.bar(places, heights, 0.38, color=color, label=f'exchange="{method}"')
        axes.bar_label(bars, [f"{height:.1f}" for height in heights], padding=2)
    axes.axhline(1, color=DARK, linewidth=1, linestyle="--")
    axes.text(len(RATES) - 0.5, 1.1, "lax.psum, fp32", va="bottom", fontsize=9)
    axes.set_xlim(-0.6, len(RATES) + 0.3)
    axes.set_xticks(range(len(RATES)), [link(rate) for rate in RATES])
    axes.set_ylabel("times lax.psum's speed")
    axes.set_title("25 MB at 4 bits, 4 ranks on 2 cores, by link", fontsize=11)
    axes.margins(y=0.15)
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def losses() -> Figure:
    """Draws the chart of README: loss against time over two slow links."""
    by_link: dict[str, list[dict[str, Any]]] = {}
    for row in measure.rows(RESULTS / "time_to_loss.jsonl"):
        if row["way"] in LOSSES:
            by_link.setdefault(row["links"], []).append(row)
    size = {"figsize": (9, 3.6), "layout": "constrained"}
    figure, panels = plt.subplots(1, len(by_link), sharey=True, **size)
    for axes, (rate, rows) in zip(panels, by_link.items(), strict=True):
        for row in rows:
            axes.plot(row["seconds"], row["losses"], color=LOSSES[row["way"]], label=row["way"])
        axes.set(title=f"links of {link(rate)}", xlabel="seconds of training")
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("held-out loss [nats per byte]")
    panels[0].legend(frameon=False)
    figure.suptitle("One model, four workers: the same batches and optimizer", fontsize=11)
    return figure


def measured_steps() -> list[tuple[float, float, float, dict[str, float]]]:
    """Returns the measured steps of 4 ranks over links of a known rate.

    Each is (bits per second of the link, bytes of gradients, seconds of computing, seconds of a
    step by what it sends).
    """
    found = []
    names = {"exact, small leaves together": "fp32", "4 bits, rotated, SecondMoment": "4 bits"}
    tasks: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
    for row in measure.rows(RESULTS / "suite" / "speed.jsonl"):
        if row["world"] == predict.WORLD and row["method"] in names:
            tasks.setdefault((row["task"], row["links"]), {})[names[row["method"]]] = row
    for (_, rate), rows in tasks.items():
        exact = rows["fp32"]
        nbytes = exact["sent_bytes"] * predict.WORLD / (2 * (predict.WORLD - 1))
        seconds = {sends: row["seconds"][1] for sends, row in rows.items()}
        found.append((rig.bits_per_second(rate), nbytes, exact["compute"][1], seconds))
    for name in ("training_step", "gpu_h100_models/models"):
        for run in measure.read(RESULTS / f"{name}.jsonl"):
            by_way = {row["way"]: row["seconds"][1] for row in run["rows"] if "way" in row}
            of = run | run["rows"][0]
            rate = of.get("links", of.get("rate"))
            if not by_way or of["world"] != predict.WORLD or rate == "unlimited":
                continue
            on_gpu = "rate" in of
            exact, coded = ("fp32 psum", "4 bits, xla") if on_gpu else ("fp32", "4 bits")
            found.append(
                (
                    1e9 * float(rate) if on_gpu else rig.bits_per_second(rate),
                    4 * of["parameters"] if on_gpu else 1e6 * of["megabytes"],
                    by_way["compute alone"],
                    {"fp32": by_way[exact], "4 bits": by_way[coded]},
                )
            )
    return found


def choosing() -> Figure:
    """Which way to train, by the link and by the gradients per second of computing."""
    figure, axes = plt.subplots(figsize=(7.5, 5.2))
    axes.set(xscale="log", yscale="log", xlim=(1e7, 1e11), ylim=(1e6, 1e11))
    x = np.array(axes.get_xlim())
    reaches = [predict.reach(way) / 8 for way in predict.WAYS]  # bytes per bit
    edges = [1e-9, *reaches, 1e9]
    middles = np.sqrt([reaches[0] / 25, *reaches]) * np.sqrt([*reaches, reaches[-1] * 16])
    for i, (way, color) in enumerate(WAY_COLORS.items()):
        axes.fill_between(x, edges[i] * x, edges[i + 1] * x, color=color, alpha=0.35, linewidth=0)
        axes.text(
            *(LABEL_AT, LABEL_AT * middles[i], way or "longer rounds"),
            rotation=29,  # along the edges, on these axes
            ha="center",
            va="center",
        )
    for link_rate, nbytes, computing, seconds in measured_steps():
        axes.plot(
            *(link_rate, nbytes / computing),
            marker="o" if nbytes > 1e7 else "^",
            color=WAY_COLORS[predict.way_for(computing, seconds)],
            markeredgecolor=DARK,
            markersize=8,
        )
    rates, amounts = 10.0 ** np.arange(7, 12), 10.0 ** np.arange(6, 12)
    axes.set_xticks(
        rates, [f"{r / 1e6:g} Mbit/s" if r < 1e9 else f"{r / 1e9:g} Gbit/s" for r in rates]
    )
    axes.set_yticks(amounts, [size_text(amount) for amount in amounts])
    axes.minorticks_off()
    axes.set_xlabel("link of each rank")
    axes.set_ylabel("fp32 gradients / seconds that a step computes")
    return figure


def schedule() -> Figure:
    """What a rank does with the segments of its chunk, as time goes by."""
    figure, axes = _blank(7.5, 2.6, (0, 15.5), (0, 5))
    stages = ("encode", "scatter", "reduce", "gather", "decode")
    for row, stage in enumerate(stages):
        wire = stage in ("scatter", "gather")
        y = 4 - row
        axes.text(1.9, y + 0.4, stage, ha="right", va="center")
        for segment in range(4):
            # The wire is what is never idle, so it sets the pace of all others.
            start = 2 + 2 * segment + (0, 1.05, 3.05, 4.1, 6.1)[row]
            width = 1.95 if wire else 1.0
            axes.add_patch(Rectangle((start, y), width, 0.8, color=BLUE if wire else LIGHT))
            axes.text(
                *(start + width / 2, y + 0.4, f"{segment}"),
                ha="center",
                va="center",
                color="white" if wire else DARK,
            )
    axes.add_patch(_arrow((2, -0.25), (15.2, -0.25)))
    axes.text(15.2, -0.65, "time", ha="right", va="center", fontsize=9)
    axes.text(2, -0.65, "dark: on the wire; light: on the cores", va="center", fontsize=9)
    axes.set_ylim(-0.9, 5)
    return figure


def levels() -> Figure:
    """Two nodes of two ranks: exact sums inside, codes across, codes inside."""
    figure, axes = _blank(7.5, 3.4, (0, 15), (0, 7))
    for node, left in enumerate((0.5, 9.0)):
        axes.add_patch(Rectangle((left, 0.6), 5.5, 5.9, fill=False, edgecolor=GRAY, linewidth=1.5))
        axes.text(left + 2.75, 6.7, f"node {node}", ha="center")
        for rank in range(2):
            y = 4.4 - 3 * rank
            axes.add_patch(Rectangle((left + 1.75, y), 2.0, 1.2, color=LIGHT))
            text = f"rank {2 * node + rank}"
            axes.text(left + 2.75, y + 0.6, text, ha="center", va="center")
        axes.add_patch(_arrow((left + 2.3, 4.3), (left + 2.3, 2.7), GREEN, "<->"))
        axes.add_patch(_arrow((left + 3.2, 4.3), (left + 3.2, 2.7), BLUE, "<->"))
        axes.text(left + 2.05, 3.5, "1", color=GREEN, ha="right", va="center", weight="bold")
        axes.text(left + 3.45, 3.5, "3", color=BLUE, va="center", weight="bold")
    for rank in range(2):
        y = 5.0 - 3 * rank
        axes.add_patch(_arrow((4.4, y), (10.6, y), BLUE, "<->"))
        axes.text(7.5, y + 0.15, "2", color=BLUE, ha="center", va="bottom", weight="bold")
    says = "1: exact sums, a share per rank; 2: each share, in codes; 3: the codes of the sums"
    axes.text(7.5, 0.05, says, ha="center", va="center", fontsize=10)
    return figure


def record() -> Figure:
    """The bytes of one bucket, and the codes in them."""
    figure, axes = _blank(7.5, 3.0, (0, 15), (0, 6))
    parts = (("lo", 2, GRAY), ("unit", 2, GRAY), ("plane 0", 3, LIGHT), ("plane 1", 3, LIGHT))
    x = 0.4
    for name, width, color in (*parts, ("...", 1, "white"), ("plane bits - 1", 3, LIGHT)):
        edge = "white" if name == "..." else DARK
        axes.add_patch(Rectangle((x, 4.4), width, 1.1, facecolor=color, edgecolor=edge))
        axes.text(x + width / 2, 4.95, name, ha="center", va="center", fontsize=10)
        size = {"lo": "4 bytes", "unit": "4 bytes", "...": ""}.get(name, "m bytes")
        axes.text(x + width / 2, 4.15, size, ha="center", va="top", fontsize=9)
        x += width
    axes.text(0.4, 3.0, "codes of n values: 8 rows of m = 4 ceil(n / 32) columns", va="center")
    left, top, wide, high = 0.4, 2.65, 0.45, 0.3  # of a code
    axes.add_patch(Rectangle((left + 5 * wide, top - 8 * high), wide, 8 * high, color=BLUE))
    columns, rows = [left + wide * i for i in range(17)], [top - high * i for i in range(9)]
    axes.vlines(columns, rows[-1], rows[0], color=GRAY, linewidth=1)
    axes.hlines(rows, columns[0], columns[-1], color=GRAY, linewidth=1)
    says = (
        "The 8 codes of a column make a number\n"
        "of 8 * bits bits. Byte j of that number\n"
        "lies in plane j, at the column's place.\n"
        "Value i is in row i / m, column i % m."
    )
    axes.text(8.0, 1.3, says, va="center", fontsize=10)
    return figure


def _blank(
    width: float, height: float, x: tuple[float, float], y: tuple[float, float]
) -> tuple[Figure, Axes]:
    figure = plt.figure(figsize=(width, height))
    axes: Axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=x, ylim=y)
    axes.axis("off")
    return figure, axes


def _arrow(
    start: tuple[float, float], end: tuple[float, float], color: str = DARK, style: str = "->"
) -> FancyArrowPatch:
    return FancyArrowPatch(start, end, arrowstyle=style, mutation_scale=14, color=color, lw=1.6)


FIGURES: dict[str, Callable[[], Figure]] = {
    draw.__name__: draw for draw in (choosing, levels, losses, record, schedule, speed)
}


def write(folder: Path) -> None:
    """Draws every figure into `folder`."""
    folder.mkdir(exist_ok=True)
    for name, draw in FIGURES.items():
        with plt.rc_context(STYLE):
            figure = draw()
            figure.savefig(
                folder / f"{name}.svg",
                facecolor="white",
                bbox_inches="tight",
                metadata={"Date": None, "Creator": None},
            )
            plt.close(figure)


if __name__ == "__main__":
    write(HERE / "figures")
    sys.exit(0)
