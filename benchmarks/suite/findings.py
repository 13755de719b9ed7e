"""The suite's tables and pictures, from benchmarks/results/suite.

    python benchmarks/suite/findings.py                      # for suite.md and diloco.md
    python benchmarks/suite/findings.py --pictures FOLDER    # and the pictures

"Worse by" is in standard deviations of exact over seeds, with the standard error over the seeds
that a method and exact have both run.
"""

import argparse
import functools
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[1]))
sys.path.append(str(Path(__file__).resolve().parents[1] / "accuracy"))

from configurations import Configuration
from methods import DILOCO, METHODS, RATES
from models import METRICS
from summary import Runs, worse_with_error
from tuned import TUNED, best_rate

import tables
from cgx_jax import Identity, Plan, Quantize
from cgx_jax.commands.charts import COLORS, PSUM_COLOR
from cgx_jax.compressors import TopK

TEXTS = [tables.DOCS / "measurements" / f"{name}.md" for name in ("suite", "diloco")]
FOLDER = tables.RESULTS / "suite"
ENOUGH = 5  # seeds that a claim needs
MARKERS = "osD^vP*X"
VALUES, LINK = 124_000_000, 100e6  # of a model like GPT-2; bits per second of a worker's link


def quality(runs: dict[str, Runs], said: Callable[[str], str] = str) -> str:
    """One line per method: bytes, and per task how much worse than exact it learns."""
    body = []
    for name in METHODS:
        cells = [quality_cell(one, name) for one in runs.values()]
        if any(cells):
            shares = [bytes_share(one, name) for one in runs.values() if name in one.names]
            body.append([name, f"{np.mean(shares):.3f}", *cells])
    heads = [f"{said(task)}: {METRICS[task][1]}" for task in runs]
    return tables.table(["", "bytes to exact", *heads], body)


def tuned() -> str:
    """As `quality`, at the learning rates at which exact training is best."""
    return quality(done("suite/tuned", TUNED), lambda task: f"{task} × {best_rate(task):g}")


def diloco(task: str) -> str:
    """One line per method: bytes, and how much worse a task learns than exact, and than fp32.

    Exact training takes its best learning rate, as DiLoCo does.
    """
    runs, (field, metric, _, digits) = Runs(task, "suite/diloco", DILOCO), METRICS[task]
    best = f"exact, rate × {best_rate(task):g}"
    kept = Runs(task, "suite/tuned", TUNED).rows.items()
    runs.rows |= {(best, seed): row for (name, seed), row in kept if name == "exact"}
    runs.names.insert(1, best)
    exact = runs.values(best, field)
    body = []
    for name in runs.names:
        seeds, own = len(runs.seeds(name)), runs.values(name, field)
        worse = {
            of: worse_with_error(gaps(runs, name, of), exact)
            for of in (best, fp32_of(name))
            if seeds > 1 and name != of and of in runs.names
        }
        value = f"{own.mean():.{digits}f}" + f" ({seeds} seeds)" * (seeds < ENOUGH)
        cells = [worse.get(best, ""), worse.get(fp32_of(name), "")]
        body.append([name, f"{bytes_share(runs, name):.4f}", value, *cells])
    heads = [f"{task}: {metric}", "worse than exact", "than in fp32"]
    return tables.table(["", "bytes to exact", *heads], body)


def fp32_of(name: str) -> str:
    """Returns the method that sends fp32 as rarely, and trains by the same inner optimizer."""
    kind, _, rest = name.partition(", ")
    return ", ".join([kind.replace("SparseLoCo", "DiLoCo"), rest.partition(", ")[0]])


def rates() -> str:
    """What exact training learns by its learning rate: data parallel, and DiLoCo every 32 steps."""
    tasks = [task for task in METRICS if (FOLDER / "diloco_rate" / f"{task}.jsonl").exists()]
    body = []
    for name in RATES:
        line = [name]
        for task in tasks:
            field, _, _, digits = METRICS[task]
            rows = tables.rows(f"suite/diloco_rate/{task}")
            found = [f"{row[field]:.{digits}f}" for row in rows if row["configuration"] == name]
            line += found or [""]
        body.append(line)
    return tables.table(["", *(f"{task}: {METRICS[task][1]}" for task in tasks)], body)


def workers() -> str:
    """What a worker sends in a round, by arithmetic: bytes per value, and time on a slow link."""
    like = jax.ShapeDtypeStruct((VALUES,), np.float32)
    counts = (4, 16, 100)
    body = []
    for code in (Identity(), Quantize(4, rotation=True), Quantize(2, rotation=True), TopK(0.02)):
        sent = [Plan.build(like, code).wire_bytes(world) for world in counts]
        cells = [f"{nbytes / VALUES:.2f}" for nbytes in sent]
        body.append([f"`{code}`", *cells, f"{8 * sent[-1] / LINK:.0f}"])
    heads = [f"{world} workers" for world in counts]
    return tables.table(["bytes per value", *heads, f"{counts[-1]} workers: seconds"], body)


def done(folder: str = "suite", methods: Mapping[str, Configuration] = METHODS) -> dict[str, Runs]:
    """The tasks that have results, each with the methods that were run."""
    found = {}
    for task in METRICS:
        if (tables.RESULTS / folder / f"{task}.jsonl").exists():
            found[task] = Runs(task, folder, methods)
    return found


def gaps(runs: Runs, name: str, against: str = "exact") -> np.ndarray:
    """Returns how much worse than another a method is per seed, in the task's own metric."""
    field, _, more, _ = METRICS[runs.task]
    own, other = (runs.values(name, field, of) for of in (name, against))
    return other - own if more else own - other


def quality_cell(runs: Runs, name: str) -> str:
    field, _, _, digits = METRICS[runs.task]
    if name not in runs.names or not runs.seeds(name):
        return ""
    own = runs.values(name, field)
    text = f"{own.mean():.{digits}f}"
    seeds = len(own)
    if seeds < ENOUGH:
        return f"{text} ({seeds} seed{'s' * (seeds > 1)})"
    exact = runs.values(name, field, "exact")
    if name == "exact":
        return f"{text} ± {own.std(ddof=1):.{digits}f}"
    return f"{text}, worse by {worse_with_error(gaps(runs, name), exact)} sd"


def bytes_share(runs: Runs, name: str) -> float:
    own, exact = (runs.values(name, "bytes_per_step", of) for of in (name, "exact"))
    return float((own / exact).mean())


def speed_rows() -> list[dict[str, Any]]:
    return tables.rows("suite/speed") if (FOLDER / "speed.jsonl").exists() else []


def draw(folder: Path) -> None:
    """Draws quality against bytes, and against samples per second, as GRACE did."""
    runs = {task: one for task, one in done().items() if len(one.seeds("exact")) >= ENOUGH}
    by_bytes = {
        task: {name: bytes_share(one, name) for name in one.names} for task, one in runs.items()
    }
    picture(folder / "quality.png", runs, by_bytes, "bytes a rank sends, to exact's", "log")
    for world, links in dict.fromkeys((r["world"], r["links"]) for r in speed_rows()):
        rows = [r for r in speed_rows() if (r["world"], r["links"]) == (world, links)]
        by_speed = {
            task: {
                r["method"]: r["batch"] / r["seconds"][1]
                for r in rows
                if r["task"] == task and r["method"] in one.names
            }
            for task, one in runs.items()
        }
        label = f"samples a second, {world} ranks at {links}"
        picture(folder / f"speed_{world}_{links}.png", runs, by_speed, label, "linear")


def picture(
    path: Path, runs: dict[str, Runs], places: dict[str, dict[str, float]], label: str, scale: str
) -> None:
    """Draws a panel per task: how much worse than exact each method is, best on top, by place."""
    from matplotlib.figure import Figure

    runs = {task: one for task, one in runs.items() if places[task]}
    if not runs:
        return
    figure = Figure(figsize=(max(11, 4.2 * len(runs)), 6), layout="constrained")
    panels = np.atleast_1d(figure.subplots(1, len(runs)))
    handles = {}
    for axes, (task, one) in zip(panels, runs.items(), strict=True):
        deviation = one.values("exact", METRICS[task][0]).std(ddof=1)
        for i, name in enumerate(METHODS):
            if name not in places[task]:
                continue
            worse = gaps(one, name) / deviation
            error = worse.std(ddof=1) / len(worse) ** 0.5 if len(worse) > 1 else 0
            color = PSUM_COLOR if name == "exact" else COLORS[i % len(COLORS)]
            style = {"fmt": MARKERS[i % len(MARKERS)], "color": color}
            if len(worse) < ENOUGH:
                style["markerfacecolor"] = "none"
            handles[name] = axes.errorbar(places[task][name], worse.mean(), error, **style)
        axes.set_yscale("symlog", linthresh=1)
        axes.invert_yaxis()
        axes.set(title=task, xlabel=label, ylabel="worse by [sd of exact]", xscale=scale)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    note = f"hollow: fewer than {ENOUGH} seeds"
    figure.legend(
        handles.values(), handles, loc="outside lower center", ncols=4, frameon=False, title=note
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    print(f"drawn in {path}")


TABLES: dict[str, Callable[[], str]] = {
    "suite_quality": lambda: quality(done()),
    "suite_tuned": tuned,
    **{f"diloco_{task}": functools.partial(diloco, task) for task in METRICS},
    "diloco_rate": rates,
    "diloco_workers": workers,
}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pictures", type=Path, metavar="FOLDER", help="draw the pictures there")
    arguments = parser.parse_args()
    for path in TEXTS:
        path.write_text("".join(tables.filled(path.read_text(), TABLES)))
    if arguments.pictures is not None:
        draw(arguments.pictures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
