"""How the examples show their runs: a progress bar, tables and charts."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from training import Run

COLORS = ("#4c566a", "#d9622b", "#2b7a78", "#9a6fb0", "#c9a227")


def progress_bar() -> Progress:
    """One bar per run, with the latest loss and the remaining time."""
    return Progress(
        TextColumn("{task.description:>8}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.3f}"),
        TimeRemainingColumn(compact=True, elapsed_when_finished=True),
    )


def add_run(bar: Progress, name: str, steps: int) -> Callable[[float], None]:
    """Adds a run of `steps` steps to the bar; call the result with each step's loss."""
    task = bar.add_task(name, total=steps, loss=float("nan"))
    return lambda loss: bar.update(task, advance=1, loss=loss)


def print_table(runs: list[Run]) -> None:
    """Prints one row per run."""
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("gradients")
    for heading in ("training loss", "held-out loss", "sent per rank and step", "step time"):
        table.add_column(heading, justify="right")
    for run in runs:
        table.add_row(
            run.name,
            f"{run.final_loss:.4f}",
            f"{run.held_out:.4f}",
            f"{run.sent_bytes / 1e6:.3f} MB",
            f"{run.step_seconds * 1e3:.0f} ms",
        )
    Console().print(table)


Runs = dict[str, tuple[np.ndarray, np.ndarray]]  # (losses, seconds until then) by name


def print_times(by_link: dict[str, Runs], check: int) -> None:
    """Prints one row per link and run. Each run has its losses after every `check` steps."""
    table = Table(box=box.SIMPLE_HEAD)
    for heading in ("link", "gradients"):
        table.add_column(heading)
    for heading in ("step", "held-out loss", "seconds to the same loss"):
        table.add_column(heading, justify="right")
    for link, runs in by_link.items():
        # A run that was cut short is not measured by where it ends.
        longest = max(losses.size for losses, _ in runs.values())
        goal = max(losses[-1] for losses, _ in runs.values() if losses.size == longest)
        for name, (losses, seconds) in runs.items():
            reached = np.flatnonzero(losses <= goal)
            table.add_row(
                link,
                name,
                f"{seconds[-1] / (check * losses.size) * 1e3:.0f} ms",
                f"{losses[-1]:.3f}",
                f"{seconds[reached[0]]:.0f} s to {goal:.2f}" if reached.size else "not yet",
            )
    Console().print(table)


def draw_times(by_link: dict[str, Runs], path: Path) -> None:
    """Draws loss against time, one panel per link, into a PNG at `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure = Figure(figsize=(11, 4.6), layout="constrained")
    panels = figure.subplots(1, len(by_link), sharey=True, squeeze=False)[0]
    for axes, (link, runs) in zip(panels, by_link.items(), strict=True):
        for (name, (losses, seconds)), color in zip(runs.items(), COLORS, strict=False):
            alone = "o" if losses.size == 1 else None
            axes.plot(seconds, losses, color=color, lw=2, marker=alone, label=name)
        axes.set(xlabel="seconds of training", title=f"Link of {link}")
        axes.margins(x=0.01)
        axes.legend(frameon=False)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", alpha=0.25)
    panels[0].set_ylabel("held-out loss [nats per byte]")
    figure.suptitle("The same model, batches and optimizer between two processes")
    figure.savefig(path, dpi=150)


def draw_chart(runs: list[Run], path: Path) -> None:
    """Draws the loss curves and the bytes side by side into a PNG at `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure = Figure(figsize=(11, 4.6), layout="constrained")
    curves, bars = figure.subplots(1, 2, width_ratios=(2.2, 1))
    for run, color, style in zip(runs, COLORS[:2], ("-", "--"), strict=True):
        steps = np.arange(1, run.losses.size + 1)
        label = f"{run.name} (held-out {run.held_out:.3f})"
        curves.plot(steps, run.losses, color=color, alpha=0.25, lw=1)
        curves.plot(steps, _moving_average(run.losses), style, color=color, lw=2, label=label)
    curves.set(xlabel="step", ylabel="training loss [nats per byte]", title="Training loss")
    curves.margins(x=0.01)
    curves.legend(frameon=False)

    megabytes = [run.sent_bytes / 1e6 for run in runs]
    drawn = bars.bar([run.name for run in runs], megabytes, color=COLORS[:2], width=0.55)
    times = [f"{megabytes[0] / size:.1f}× fewer" for size in megabytes[1:]]
    labels = [f"{size:.2f} MB" for size in megabytes]
    labels[1:] = [f"{label}\n{fewer}" for label, fewer in zip(labels[1:], times, strict=True)]
    bars.bar_label(drawn, labels, padding=4)
    bars.set(ylabel="sent per rank and step [MB]", title="Bytes on the wire")
    bars.margins(x=0.2, y=0.15)

    for axes in (curves, bars):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", alpha=0.25)
        axes.set_axisbelow(True)
    figure.suptitle("Data-parallel language model on 8 ranks: exact against compressed gradients")
    figure.savefig(path, dpi=150)


def draw_widths(metrics: list[dict[str, Any]], path: Path) -> None:
    """Draws the bits of every leaf in every step, by the policy's metrics, into a PNG at `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    leaves = [name for name in metrics[0] if name.startswith("cgx/bits/")]
    figure = Figure(figsize=(9, 0.25 * len(leaves) + 1.5), layout="constrained")
    axes = figure.subplots()
    table = [[step[leaf] for step in metrics] for leaf in leaves]
    image = axes.imshow(table, aspect="auto", interpolation="nearest", vmin=1, vmax=8)
    axes.set_yticks(
        range(len(leaves)), [name.removeprefix("cgx/bits/") for name in leaves], fontsize=7
    )
    axes.set(xlabel="step", title="Bits per value of every leaf")
    figure.colorbar(image, ax=axes)
    figure.savefig(path, dpi=150)


def draw_workers(entries: list[dict[str, Any]], path: Path) -> None:
    """Draws loss by time, and by bytes over links, in one color per number of workers."""
    ends = [i for i in range(1, len(entries)) if entries[i]["world"] != entries[i - 1]["world"]]
    gaps = [entries[i]["time"] - entries[i - 1]["time"] for i in ends]
    figure = Figure(figsize=(10, 4), layout="constrained")
    panels = figure.subplots(1, 1 + ("sent" in entries[0]), sharey=True, squeeze=False)[0]
    start, most = entries[0]["time"], entries[0]["world"]
    for begin, end, gap in zip([0, *ends], [*ends, len(entries)], [0, *gaps], strict=True):
        part = entries[begin:end]
        world = part[0]["world"]
        start += gap
        color, after = COLORS[most - world], f", after {gap:.0f} s" if gap else ""
        label = f"{world} workers, from step {part[0]['step']}{after}"
        losses = [e["loss"] for e in part]
        xs = [[e["time"] - start for e in part], [e.get("sent", 0) / 1e6 for e in part]]
        for axes, x in zip(panels, xs, strict=False):
            axes.plot(x, losses, color=color, label=label)
    for axes, label in zip(
        panels, ["seconds, without restarts", "MB that the first host has sent"], strict=False
    ):
        axes.set(xlabel=label)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set(ylabel="loss of a worker [nats per byte]")
    panels[0].legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def _moving_average(losses: np.ndarray) -> np.ndarray:
    """Centered mean over a twentieth of the run, over fewer steps at the ends."""
    window = np.ones(max(1, losses.size // 20))
    return np.convolve(losses, window, "same") / np.convolve(np.ones_like(losses), window, "same")
