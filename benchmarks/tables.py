"""Writes the tables of README.md and of docs from benchmarks/results.

    python benchmarks/tables.py

A table stands between <!-- table:NAME --> and <!-- end -->. One that was measured with an older
wire format says so.
"""

import argparse
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import alpha_beta
import measure
import predict
from cgx_jax.compressors import BlockTopK, Compressor, Quantize, ScaledSign, TopK
from cgx_jax.compressors.base import CodedLeaf
from cgx_jax.kernels.wire import WIRE_VERSION
from cgx_jax.reductions import GatherSum, Reduction, ScatterGather, Tree
from cgx_jax.tuning.link_timer import size_text
from measure import spread

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
DOCS = ROOT / "docs"
TEXTS = (
    ROOT / "README.md",
    # Those of accuracy and of the suite are made by the scripts beside their benchmarks.
    *(
        path
        for path in sorted((DOCS / "measurements").glob("*.md"))
        if not path.name.startswith(("accuracy_", "diloco", "suite"))
    ),
)
RATES = ("100mbit", "1gbit", "10gbit", "unlimited")


_read: set[int] = set()  # the wire formats of the results that a table has read


def runs_of(name: str) -> list[dict[str, Any]]:
    """The runs in one file of results."""
    runs = measure.read(RESULTS / f"{name}.jsonl")
    for run in runs:
        machine = run.get("machine")
        # Runs on GPUs name only the machine; all of them are older than format 2.
        _read.add(machine["backends"]["wire_format"] if isinstance(machine, dict) else 1)
    return runs


def rows(name: str) -> list[dict[str, Any]]:
    """The rows of all runs in one file of results."""
    return [row for run in runs_of(name) for row in run["rows"]]


def table(head: list[str], body: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *([_shown(cell) for cell in line] for line in body)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def grid(head: list[str], cells: dict[tuple[Any, ...], str]) -> str:
    """A table of cells by (*line, column). Lines and columns stand in the order of the cells."""
    columns = dict.fromkeys(column for *_, column in cells)
    body = [
        [*map(str, line), *(cells.get((*line, column), "") for column in columns)]
        for line in dict.fromkeys(key[:-1] for key in cells)
    ]
    return table([*head, *columns], body)


def by_link(row: dict[str, Any]) -> tuple[int, int]:
    """The order of rows by their links and ranks."""
    return RATES.index(row["links"]), row["world"]


def listed(of: Iterable[dict[str, Any]], columns: dict[str, str | Callable[[Any], str]]) -> str:
    """A table with a line per row; a column shows a field, or what a function makes of the row."""

    def cell(row: dict[str, Any], shown: str | Callable[[Any], str]) -> str:
        return str(row[shown]) if isinstance(shown, str) else shown(row)

    return table(list(columns), [[cell(row, x) for x in columns.values()] for row in of])


def _shown(cell: str) -> str:
    """Returns a cell as readers write it: the rate "1gbit" of `tc` is "1 Gbit/s"."""
    return re.sub(r"^(\d+)([mg])bit$", lambda rate: f"{rate[1]} {rate[2].upper()}bit/s", cell)


def all_reduce() -> str:
    measured = {
        (row["links"], row["world"], row["method"], row["bytes"]): row["ratio"][1]
        for row in rows("all_reduce")
    }
    sizes = sorted({key[3] for key in measured})
    body = []
    for rate in RATES:
        for world in (2, 4):
            for method in ("xla", "mpi"):
                cells = [measured.get((rate, world, method, size)) for size in sizes]
                if any(cells):
                    values = [f"{cell:.1f}" if cell else "" for cell in cells]
                    body.append([rate, str(world), f'`"{method}"`', *values])
    return table(["link", "ranks", "exchange", *(f"{s / 1e6:g} MB" for s in sizes)], body)


def auto_default() -> str:
    order = lambda r: (*by_link(r), r["launcher"] == "mpi", r["compressor"], r["bytes"])  # noqa: E731
    cells = {
        (
            r["links"],
            r["world"],
            "MPI" if r["launcher"] == "mpi" else "no MPI",
            r["compressor"],
            size_text(r["bytes"]),
        ): f"{r['ratio'][1]:.2f}"
        for r in sorted(rows("auto_default"), key=order)
    }
    return grid(["link", "ranks", "started with", "compressor"], cells)


def codec() -> str:
    measured = {(row["isa"], row["bits"], row["kernel"]): row["ratio"] for row in rows("codec")}

    def range_of(isa: str, bits: list[int], kernel: str) -> str:
        medians = [measured[isa, b, kernel][1] for b in bits if (isa, b, kernel) in measured]
        low, high = min(medians), max(medians)
        return f"{low:.2f}" if low == high else f"{low:.2f}-{high:.2f}"

    every = list(range(1, 9))
    columns = [
        ("encode, 4 bits", [4], "nearest"),
        ("8 bits", [8], "nearest"),
        ("other widths", [1, 2, 3, 5, 6, 7], "nearest"),
        ("stochastic", every, "stochastic"),
        ("decode", every, "decode"),
        ("rotated: encode", every, "rotated"),
        ("decode", every, "decode rotated"),
    ]
    isas = dict.fromkeys(isa for isa, _, _ in measured)
    body = [[isa, *(range_of(isa, *column[1:]) for column in columns)] for isa in isas]
    return table(["instructions", *(heading for heading, *_ in columns)], body)


NATIVE_CODES = {
    "signs": "`SignSGD`",
    "decode signs": "`SignSGD`, decoded",
    "natural": "`Natural()`",
    "ternary": "`TernGrad()`",
    "qsgd": "`QSGD(7)`",
    "qsgd of the largest": '`QSGD(7, norm="max")`',
    "largest": "`TopK(0.01)`: places and values",
    "above a sampled threshold": "`DGC(0.01)`: places and values",
    "largest of every bucket": "`BlockTopK(5)`: places and values",
}


def native_codes() -> str:
    body = [[NATIVE_CODES[row["kernel"]], spread(row["ratio"])] for row in rows("codes")]
    return table(["code", "time of memcpy over the kernel's"], body)


def native_code_steps() -> str:
    """The time of steps in plain jnp, and of native ones again, over that of native ones."""
    every: dict[tuple[str, str], dict[str, list[float]]] = {}
    for row in rows("native_codes"):
        every.setdefault((row["method"], row["task"]), {})[row["kernels"]] = row["ratio"]
    body = [
        [method, task, spread(found["jnp"]), spread(found["native, again"])]
        for (method, task), found in sorted(every.items())
    ]
    return table(["method", "task", "plain jnp", "native, again"], body)


def nonfinite() -> str:
    """What `debug_nonfinite` adds to a step, in percent of it."""
    every: dict[tuple[str, str, str], dict[str, Any]] = {}
    for row in rows("nonfinite"):
        every.setdefault((row["task"], row["exchange"], row["what"]), {})[row["mode"]] = row
    body = []
    for (task, exchange, what), found in every.items():
        if what == "step":
            alone = every[task, exchange, "reduction"]["on"]
            shown = (found["on"], found["off, again"], alone)
            each = ([f"{100 * x:.1f}" for x in row["added"]] for row in shown)
            percents = [f"{middle} ({low} to {high})" for low, middle, high in each]
            values = f"{found['on']['values']:,}"
            ms = f"{1e3 * found['off']['seconds'][1]:.1f}"
            body.append([task, exchange, values, ms, *percents])
    head = ["task", "exchange", "values", "ms per step", "added, %", "the same step again, %"]
    return table([*head, "by the reduction alone, %"], body)


def power_sgd() -> str:
    names = {
        "psum": "`lax.pmean`, fp32",
        "4 bits": "`Quantize(4)`",
        "PowerSGD, rank 2": "`PowerSGD(2)`",
        "... ErrorFeedback()": "`PowerSGD(2)` with `ErrorFeedback()`",
    }
    columns = {
        "method": lambda r: names[r["method"]],
        "ms per all-reduce": lambda r: spread([1e3 * t for t in r["seconds"]], ".0f"),
        "times psum's speed": lambda r: spread(r["ratio"], ".1f"),
        "MB sent per rank": lambda r: f"{r['sent_bytes'] / 1e6:.1f}",
    }
    return listed([row for row in rows("power_sgd") if "method" in row], columns)


def segments() -> str:
    columns = {
        "size": lambda r: f"{r['bytes'] / 1e6:g} MB",
        "segment bytes": lambda r: str(r.get("segment_bytes", "default")),
        "window": lambda r: str(r.get("window", "default")),
        "threads": lambda r: str(r.get("threads", "default")),
        "times faster than the defaults": lambda r: spread(r["ratio"]),
    }
    return listed(rows("segments"), columns)


def rivals() -> str:
    """Ratios at 100 MB to the fp32 sum of the same framework, by link and ranks."""
    ours = [r | {"what": "ours"} for r in rows("cast") if r["bytes"] == 100_000_000]
    every = sorted([*ours, *rows("rivals")], key=by_link)
    columns = {
        ("ours", "mpi"): "ours, 4 bits (`mpi`)",
        ("ours", "cast"): "ours, bf16 (`Cast`)",
        ("all_reduce", "bf16"): "torch, bf16 all-reduce",
        ("ddp", "bf16"): "DDP, bf16",
        **{("ddp", f"PowerSGD {k}"): f"DDP, PowerSGD rank {k}" for k in (1, 2, 4)},
    }
    cells = {
        (r["links"], r["world"], heading): f"{r['ratio'][1]:.1f}"
        for (links, world) in dict.fromkeys((r["links"], r["world"]) for r in every)
        for which, heading in columns.items()
        for r in every
        if (r["links"], r["world"], r["what"], r["method"]) == (links, world, *which)
    }
    return grid(["link", "ranks"], cells)


def gpu_cases(machine: str) -> list[dict[str, Any]]:
    return [row for row in rows(f"{machine}/kernels") if "case" in row]


def gpu_kernels() -> str:
    measured = gpu_cases("gpu_h100")
    largest = max(row["values"] for row in measured)
    share = {row["case"]: row["share"][1] for row in measured if row["values"] == largest}
    dtypes = ("f32", "bf16", "f16")
    # A case is named "kernel bits dtype ranks, and so on".
    ways = dict.fromkeys(" ".join(case.split()[:2] + case.split()[3:]) for case in share)

    def line(way: str) -> list[str]:
        kernel, bits, *rest = way.split()
        cells = [share.get(" ".join([kernel, bits, dtype, *rest])) for dtype in dtypes]
        return [
            " ".join([f"`{kernel}`", *rest]),
            bits,
            *("" if c is None else f"{c:.2f}" for c in cells),
        ]

    return table(["kernel", "bits", *dtypes], [line(way) for way in ways])


def gpu_machines() -> str:
    """Measured shares of a copy's speed at the largest size, by case and machine."""
    machines = {"H100": gpu_cases("gpu_h100"), "H200": gpu_cases("gpu_h200")}
    largest = max(row["values"] for row in machines["H100"])
    shares = {
        name: {r["case"]: r["share"][1] for r in measured if r["values"] == largest}
        for name, measured in machines.items()
    }
    cases = [c for c in shares["H100"] if c.split()[1] == "4" and "bucket" not in c]
    body = [[f"`{case}`", *(f"{share[case]:.2f}" for share in shares.values())] for case in cases]
    return table(["kernel", *shares], body)


def gpu_small() -> str:
    measured = gpu_cases("gpu_h100")
    times = {(row["case"], row["values"]): row["microseconds"] for row in measured}
    sizes = sorted({row["values"] for row in measured})[:-1]
    cases = dict.fromkeys(case for case, size in times if size == sizes[0])
    body = [[f"`{case}`", *(f"{times[case, size]:.1f} us" for size in sizes)] for case in cases]
    return table(["kernel", *(size_text(4 * size) for size in sizes)], body)


def _gpu_runs() -> list[dict]:
    """Returns the runs of tests/gpu/ranks.py on one stream, in two phases, on unlimited links."""
    runs = runs_of("gpu_h100/ranks")
    found: dict[tuple, dict] = {}
    for r in runs:
        options = (r.get("reduction", "scatter_gather"), r.get("streams", 1))
        links = (r["rate"], r.get("connection_rate"))
        if (*options, *links) == ("scatter_gather", 1, "unlimited", None):
            found.setdefault((r["world"], r["megabytes"], r["segment_bytes"]), r)
    return list(found.values())


def gpu_ranks() -> str:
    runs = _gpu_runs()
    body = [
        [
            str(run["world"]),
            f"`{row['call']}`",
            f"`{row['method']}`" if row["method"] != "lax" else "exact, by `lax`",
            size_text(run["segment_bytes"]) if row["method"] == "nccl" else "",
            f"{row['seconds'] * 1e3:.1f} ms",
            f"{row['ratio'][1]:.1f}",
        ]
        for run in runs
        if run["megabytes"] == runs[0]["megabytes"]
        for row in run["rows"]
        if run["segment_bytes"] == runs[0]["segment_bytes"] or row["method"] == "nccl"
    ]
    return table(["ranks", "call", "method", "segment", "time", "times faster"], body)


def gpu_sizes() -> str:
    runs = sorted(_gpu_runs(), key=lambda run: run["megabytes"])
    segment = _gpu_runs()[0]["segment_bytes"]
    cells = {
        (run["world"], f'`"{row["method"]}"`', f"{run['megabytes']:g} MB"): f"{row['ratio'][1]:.1f}"
        for run in runs
        if run["segment_bytes"] == segment
        for row in run["rows"]
        if row["call"] == "psum" and row["method"] != "lax"
    }
    return grid(["ranks", "exchange"], cells)


def gpu_streams(machine: str = "gpu_h200", others: Sequence[str] = ("lax", "xla")) -> str:
    """The times of psum by the links' limits: by `others`, and by "nccl" on several streams."""
    runs: dict[tuple, dict[int, dict]] = {}
    for run in runs_of(f"{machine}/ranks"):
        seconds = {row["method"]: row["seconds"] for row in run["rows"] if row["call"] == "psum"}
        limit = run["rate"].replace("gbit", " Gbit/s, shared")
        if run["connection_rate"]:
            limit = f"{run['connection_rate']:g} Gbit/s per connection"
        if run["sockets"]:
            limit += f", {run['sockets']} socket{'s' * (run['sockets'] > 1)}"
        usual = run["reduction"] == "scatter_gather" and run["segment_bytes"] == 8 << 20
        if usual and run["megabytes"] == 100 and "nccl" in seconds:
            # A later run with the same options has other streams beside it.
            runs.setdefault((run["world"], limit), {})[run["streams"]] = seconds
    several = {key: by for key, by in runs.items() if len(by) > 1}
    counts = sorted({count for by in several.values() for count in by})
    names = {"lax": "exact", "lax, bf16": "bf16", "xla": "`xla`"}

    def line(world: int, limit: str, by: dict[int, dict]) -> list[str]:
        rest = [float(np.median([s[name] for s in by.values()])) for name in others]
        times = [*rest, *(by[n]["nccl"] if n in by else None for n in counts)]
        return [str(world), limit, *("" if t is None else f"{t * 1e3:.1f}" for t in times)]

    head = ["ranks", "links", *(names[name] for name in others)]
    head += [f"{n} stream{'s' * (n > 1)}" for n in counts]
    return table(head, [line(*key, by) for key, by in several.items()])


def gpu_codes() -> str:
    columns = {
        "code": lambda r: f"`{r['code'].replace('values=Identity(), ', '')}`",
        "kernel": lambda r: f"{r['kernel']:.2f}",
        "plain jnp": lambda r: f"{r['jnp']:.2f}",
    }
    return listed([row for row in rows("gpu_h200/checks") if "jnp" in row], columns)


def gpu_tuned() -> str:
    body = []
    for run in runs_of("gpu_h200/tuned"):
        limit = f"{run['connection_rate']:g} Gbit/s per connection"
        seconds = {row["setting"]: row["seconds"] for row in run["rows"]}
        times = [seconds[name] * 1e3 for name in ("psum", run["best"], "choice")]
        body.append([limit, *(f"{t:.1f} ms" for t in times), f"{run['share']:.2f}"])
    return table(["links", "`lax.psum`", "best", "choice", "share"], body)


def gpu_models(model: str = "gpt2", world: int = 2) -> str:
    """The times of training steps by the ranks' rate."""
    runs = runs_of("gpu_h100_models/models")
    case = ("model_steps", model, world)
    runs = [run for run in runs if (run.get("check"), run.get("model"), run["world"]) == case]
    columns = [{row["way"]: row["seconds"] for row in run["rows"]} for run in runs]
    rates = [r["rate"] if r["rate"] == "unlimited" else f"{r['rate']} Gbit/s" for r in runs]
    body = [
        [way, *(spread([1e3 * t for t in c[way]], ".0f") for c in columns)] for way in columns[0]
    ]
    return table(["way", *rates], body)


def gpu_pretrain() -> str:
    """The held-out losses of GPT-2 after parts of a run, and how far each way ends behind."""
    shown = slice(1, None, 2)
    body, parts = [], []
    for run in runs_of("gpu_h100_models/pretrain"):
        total, exact = run["steps_of_run"], run["rows"][0]["held_out_loss"][-1]
        for row in run["rows"]:
            losses = row["held_out_loss"]
            behind = f"{losses[-1] - exact:.3f}" if row["way"] != "exact" else ""
            cells = (f"{loss:.3f}" for loss in losses[shown])
            body.append([f"{total} steps", row["way"], *cells, behind])
            parts = [str(Fraction(step, total)) for step in row["steps"][shown]]
    return table(["run", "way", *parts[:-1], "end", "behind exact"], body)


def gpu_windows() -> str:
    """The times of psum between two ranks that share a GPU's memory, by size."""
    runs = runs_of("gpu_h100_models/models")
    runs = [run for run in runs if run.get("transport") == "p2p" and run["world"] == 2]
    columns = [{row["method"]: row["seconds"] for row in run["rows"]} for run in runs]
    names = {"lax": "fp32 `psum`", "lax, bf16": "bf16 `psum`"}
    body = [[names.get(m, f"`{m}`"), *(f"{c[m] * 1e3:.2f}" for c in columns)] for m in columns[0]]
    return table(["method", *(f"{run['megabytes']:g} MB" for run in runs)], body)


def gather_sum_mpi() -> str:
    made = {(r["world"], r["bytes"], r["reduction"]): r for r in rows("gather_sum_mpi")}
    pairs = [
        {"chunks": made[*cell, "scatter_gather"], "whole": made[*cell, "gather_sum"]}
        for cell in sorted({key[:2] for key in made})
    ]
    columns = {
        "ranks": lambda r: str(r["whole"]["world"]),
        "size": lambda r: size_text(r["whole"]["bytes"]),
        "speed over scatter_gather": lambda r: spread(r["whole"]["ratio"]),
        "scatter_gather over psum": lambda r: f"{r['chunks']['over_psum'][1]:.2f}",
        "gather_sum over psum": lambda r: f"{r['whole']['over_psum'][1]:.2f}",
        "bytes": lambda r: f"{r['whole']['sent'] / r['chunks']['sent']:.2f}",
        "error, scatter_gather": lambda r: f"{r['chunks']['relative_error']:.3f}",
        "error, gather_sum": lambda r: f"{r['whole']['relative_error']:.3f}",
    }
    return listed(pairs, columns)


def _three_digits(number: float) -> str:
    """Returns three digits without an exponent; all digits before the point from 1,000 on."""
    return f"{number:.3g}" if number < 999.5 else f"{number:.0f}"


def _alpha_and_beta(measured: list[dict[str, Any]]) -> tuple[float, float]:
    """Returns alpha and beta, fitted to the median times of the rows."""
    return alpha_beta.fitted(
        [(r["reduction"], r["bytes"] // 4, r["world"], r["seconds"][1]) for r in measured]
    )


def algorithms() -> str:
    """Median times, and those of the model that is fitted to each number of ranks."""
    made = {(r["world"], r["bytes"], r["reduction"]): r for r in rows("algorithms")}
    fits = {
        world: _alpha_and_beta([r for key, r in made.items() if key[0] == world])
        for world in {key[0] for key in made}
    }
    body = []
    for world, size in sorted({key[:2] for key in made}):
        cells = []
        for name in alpha_beta.REDUCTIONS:
            row = made[world, size, name]
            predicted = alpha_beta.seconds(name, size // 4, world, *fits[world])
            took = row["seconds"][1]
            cells.append(f"{_three_digits(took * 1e3)} ({_three_digits(predicted * 1e3)})")
            cells.append(f"{row['over_psum'][1]:.2f}")
        body.append([str(world), size_text(size), *cells])
    head = [cell for name in alpha_beta.REDUCTIONS for cell in (f"{name}, ms (model)", "over psum")]
    return table(["ranks", "size", *head], body)


def algorithm_errors() -> str:
    """Bytes as a multiple of one payload, and errors, at the largest size."""
    every = rows("algorithms_error")
    largest = max(row["bytes"] for row in every)
    payload = Quantize(every[0]["bits"]).payload_bytes(largest // 4)
    cells = {
        (r["world"], f"{r['reduction']}: bytes, error"): (
            f"{r['sent'] / payload:.2f}, {r['relative_error']:.3f}"
        )
        for r in sorted(every, key=lambda r: r["world"])
        if r["bytes"] == largest
    }
    return grid(["ranks"], cells)


PHASES = ("scatter_gather", "gather_sum")


def algorithm_model() -> str:
    """The fastest reduction by the model, its time, and how much faster than scatter_gather.

    If several are within 1 % of the fastest, the first of them counts as the fastest.
    """
    small = [r for r in rows("algorithms") if r["bytes"] <= 4_000_000]
    alpha, beta = _alpha_and_beta([r for r in small if r["reduction"] in PHASES])
    sizes = [4_000, 256_000, 4_000_000, 256_000_000]
    body = []
    for world in (2, 4, 8, 64, 512, 4096):
        line = [str(world)]
        for size in sizes:
            times = {
                name: alpha_beta.seconds(name, size // 4, world, alpha, beta)
                for name in alpha_beta.REDUCTIONS
            }
            best = next(name for name in times if times[name] <= 1.01 * min(times.values()))
            gain = times["scatter_gather"] / times[best]
            took = times[best]
            shown = f"{took:.3g} s" if took >= 1 else f"{_three_digits(took * 1e3)} ms"
            line.append(f"`{best}` {shown}, {gain:.3g}")
        body.append(line)
    head = f"ranks (alpha {alpha * 1e3:.2f} ms, beta {beta * 1e9:.1f} ns per byte)"
    return table([head, *map(size_text, sizes)], body)


def kills() -> str:
    """How trainings went on after kills, by the way they reduce."""
    modes: dict[tuple[int, str], list[dict[str, Any]]] = {}
    for row in rows("kills"):
        modes.setdefault((row["round"], row["links"]), []).append(row)
    cells = []
    for (steps, links), every in modes.items():
        went_on = [row for row in every if row["outcome"] == "went on"]
        lost = [row["step"] + 1 - row["from_step"] for row in went_on if row["step"] is not None]
        after = measure.quartiles([row["went_on_after"] for row in went_on])
        cells.append(
            {
                "training": f"DiLoCo, {steps} steps a round" if steps else "4 bits in every step",
                "link": links,
                "kills": len(every),
                "of the coordinator": sum(row["victim"] == 0 for row in every),
                "before its first step": sum(row["while"] == "starting" for row in every),
                "training continued, with the same bits on all ranks": len(went_on),
                "most steps lost": max(lost),
                "seconds until it continued": spread(after, ".0f"),
            }
        )
    return listed(cells, {name: name for name in cells[0]})


def levels() -> str:
    """Speeds, bytes and errors of flat and leveled reductions over both exchanges."""
    columns = {
        "link between nodes": "links",
        "size": lambda r: size_text(r["bytes"]),
        "exchange": lambda r: f'`"{r["exchange"]}"`',
        "reduction": "method",
        "speed over psum": lambda r: spread(r["ratio"]),
        "over flat": lambda r: f"{r['over_flat'][1]:.2f}",
        "a node sends": lambda r: size_text(r["between"]),
        "relative error": lambda r: f"{r['relative_error']:.3f}",
    }
    return listed([row for row in rows("levels") if row["method"] != "psum"], columns)


def fsdp_speed() -> str:
    """What sharded training sends, by every method."""
    columns = {
        "link": "links",
        "ranks": "world",
        "method": "method",
        "ms": lambda r: f"{r['seconds'][1] * 1e3:.0f}",
        "times exact's speed": lambda r: spread(r["ratio"]),
        "a rank sends": lambda r: size_text(r["sent"]),
    }
    return listed(sorted(rows("fsdp_speed"), key=by_link), columns)


def in_flight() -> str:
    """Buffers that wait for one another, and buffers that do not, by the delay of a link."""
    cells = {
        (
            f'`"{r["exchange"]}"`',
            f"{2e3 * r['delay']:g} ms",
            f"{r['method']}: ms (times the speed)",
        ): f"{r['seconds'][1] * 1e3:.0f} ({r['ratio'][1]:.2f})"
        for r in rows("in_flight")
    }
    return grid(["exchange", "round trip"], cells)


def auto_choice() -> str:
    """The share of the best fixed choice's speed that "auto" reaches, and what it took."""
    cells = {
        (r["links"], r["world"], size_text(r["bytes"])): f"{r['share'][1]:.2f}: `{r['auto']}`"
        for r in sorted(rows("auto_choice"), key=lambda r: (*by_link(r), r["bytes"]))
    }
    return grid(["link", "ranks"], cells)


STEPS = "exact, small leaves together", "bf16, lax.psum", "8 bits", "4 bits, rotated, SecondMoment"


def steps() -> str:
    """Training steps: the speed of exact ones, the gains of others, and the ceiling of any gain."""

    def of_exact(row: dict[str, Any]) -> list[str]:
        speed = f"{row['batch'] / row['seconds'][1]:.0f}"
        return [speed, f"{row['seconds'][1] / row['compute'][1]:.1f}"]

    return _steps(lambda name: name in STEPS, ["exact: samples per second", "ceiling"], of_exact)


def steps_of_codes() -> str:
    """The gains of the other codes."""
    return _steps(lambda name: name not in STEPS)


def _steps(
    wanted: Callable[[str], bool],
    head: Sequence[str] = (),
    of_exact: Callable[[dict[str, Any]], list[str]] = lambda row: [],
) -> str:
    made = {(r["task"], r["world"], r["links"], r["method"]): r for r in rows("suite/speed")}
    names = [n for n in dict.fromkeys(key[3] for key in made) if n != "exact" and wanted(n)]
    body = []
    for cell in dict.fromkeys(key[:3] for key in made):
        gains = [_gain(made.get((*cell, name))) for name in names]
        body.append([*map(str, cell), *of_exact(made[*cell, "exact"]), *gains])
    return table(["task", "ranks", "link", *head, *names], body)


def _gain(row: dict[str, Any] | None) -> str:
    """Formats a speed over the exact step's; in parentheses if 1 lies between the quartiles."""
    if row is None:
        return ""
    low, ratio, high = row["ratio"]
    return f"{ratio:.2f}" if low > 1 or high < 1 else f"({ratio:.2f})"


def training_step() -> str:
    """The milliseconds of a training step by every way to reduce its gradients."""
    cells = {
        (
            r["way"],
            f"{r['megabytes']:g} MB, {r['world']} ranks, {_shown(r['links'])}",
        ): spread([1e3 * t for t in r["seconds"]], ".0f")
        for r in rows("training_step")
    }
    return grid(["way"], cells)


def compile_time(name: str = "compile_time") -> str:
    """The seconds to trace and compile a step by its model, and over those of an exact step."""
    cells = {
        (r["way"], r["model"]): f"{r['total_seconds']:.1f} ({r['ratio'][1]:.1f} x)"
        for r in rows(name)
        if r["base"] != "lax.psum"
    }
    return grid(["way"], cells)


def compile_time_codes() -> str:
    """The seconds to trace and compile a reduction of 100 leaves by its code."""
    of = ("lax.psum", "100 leaves")
    columns = {
        "reduction": lambda r: f"`{r['way']}`",
        "seconds": lambda r: f"{r['total_seconds']:.1f}",
    }
    return listed([r for r in rows("compile_time") if (r["base"], r["model"]) == of], columns)


def critical_phases() -> str:
    def loss(row: dict[str, Any]) -> str:
        losses = np.array(row["losses"])
        return f"{losses.mean():.4f} ± {losses.std(ddof=1):.4f}"

    columns = {
        "widths": "way",
        "bits per value": lambda r: f"{r['bits']:.2f}",
        "MB sent": lambda r: f"{r['sent_bytes'] / 1e6:.1f}",
        "training loss": loss,
    }
    return listed(rows("critical_phases"), columns)


def small_leaves() -> str:
    """The milliseconds of the sums of many small leaves, one by one and together."""

    def ms(row: dict[str, Any], how: str) -> str:
        return spread([1e3 * t for t in row["seconds"][how]], ".1f")

    columns = {
        "link": "links",
        "ranks": "world",
        "one `lax.psum` per leaf: ms": lambda r: ms(r, "psum"),
        "one sum of all: ms": lambda r: ms(r, "psum_compressed"),
    }
    return listed(rows("small_leaves"), columns)


def overlap() -> str:
    """Steps that reduce in the backward pass, against those that reduce after it."""
    made = {(r["task"], r["world"], r["links"], r["way"]): r for r in rows("overlap")}
    ways = dict.fromkeys(key[3] for key in made)
    others = [way for way in ways if way not in ("lax.pmean", "after", "compute", "tuned")]
    body = []
    for task, world, links in dict.fromkeys(key[:3] for key in made):
        own = {way: made.get((task, world, links, way)) for way in ways}
        after, tuned = own["after"], own["tuned"]
        share = own["compute"]["seconds"][1] / after["seconds"][1]
        first = f"{after['seconds'][1] * 1e3:.1f}", f"{after['over_pmean'][1]:.2f}", f"{share:.2f}"
        cells = [spread(own[w]["over_after"]) if own[w] else "" for w in others]
        chosen = f"{spread(tuned['over_after'])}: {tuned['setting'].split(', ')[-1]}"
        body.append([task, str(world), links, *first, *cells, chosen])
    head = ["task", "ranks", "link", "after it: ms", "over `lax.pmean`", "compute's share", *others]
    return table([*head, "the tuner's"], body)


def delayed() -> str:
    """A round of DiLoCo against the same steps of its inner optimizer alone."""
    columns = {
        "": "method",
        "link": "links",
        "workers": "world",
        "steps of a round": "every",
        "ms a step": lambda r: f"{r['step_seconds'][1] * 1e3:.0f}",
        "over the steps alone": lambda r: spread(r["ratio"]),
    }
    return listed(rows("delayed"), columns)


def predicted_steps() -> str:
    body = []
    for machine in predict.MACHINES:
        for how in predict.PRICES:
            if how == "levels" and machine.nodes == 1:
                continue
            gains = [f"{predict.step_speedup(machine, how, c):.2f}" for c in predict.STEPS]
            milliseconds = predict.reduction_seconds(machine, how) * 1e3
            body.append([machine.name, how, f"{milliseconds:.0f}", *gains])
    heads = [f"step that computes {seconds:g} s" for seconds in predict.STEPS]
    return table(["machine (model)", "reduction", "ms", *heads], body)


SCALED: dict[str, tuple[Compressor, Reduction]] = {
    "4 bits": (Quantize(4), ScatterGather()),
    "4 bits, tree": (Quantize(4), Tree()),
    "ScaledSign": (ScaledSign(), ScatterGather()),
    "TopK 1 %": (TopK(0.01), GatherSum()),
    "BlockTopK 5 of 512": (BlockTopK(5), ScatterGather()),
}


def scaling() -> str:
    """The bytes of a leaf of 25 million values, by the format's arithmetic."""
    worlds = (8, 64, 512, 4096)
    body = []
    for name, (code, reduction) in SCALED.items():
        leaf = CodedLeaf(code, (25_000_000,), np.dtype(np.float32), 0)
        sent = (reduction.bytes_sent((leaf,), w) for w in worlds)
        body.append([name, *(f"{n / 1e6:.1f} MB" for n in sent)])
    return table(["100 MB of gradients", *(f"{w:,} ranks" for w in worlds)], body)


def tuner() -> str:
    """The tuner's choice beside psum and the best of a grid of fixed settings."""
    columns = {
        "tree": "tree",
        "link": "links",
        "ranks": "world",
        "choice": "choice",
        "ms": lambda r: f"{r['seconds'][1] * 1e3:.0f}",
        "times `lax.psum`'s speed": lambda r: f"{r['gain'][1]:.1f}",
        "share of the best": lambda r: spread(r["share"]),
        "turns": "turns",
    }
    return listed(sorted(rows("tuner"), key=lambda r: (r["tree"], *by_link(r))), columns)


def time_to_loss() -> str:
    """When each way reached the loss that the last of the full runs over its link ended with."""
    body = []
    every = rows("time_to_loss")
    longest = max(row["steps"] for row in every)
    for rate in dict.fromkeys(row["links"] for row in every):
        runs = [row for row in every if row["links"] == rate]
        goal = max(row["losses"][-1] for row in runs if row["steps"] == longest)
        for row in runs:
            pairs = zip(row["losses"], row["seconds"], strict=True)
            at = next((seconds for loss, seconds in pairs if loss <= goal), None)
            took = row["seconds"][-1]
            without = f"not in {row['steps']} steps, {took:.0f} s"
            reached = without if at is None else f"{at:.0f} s"
            ends = f"{row['losses'][-1]:.2f}" if row["steps"] == longest else ""
            step = f"{took / row['steps'] * 1e3:.0f}"
            body.append([rate, row["way"], step, f"{goal:.2f}: {reached}", ends])
    return table(
        ["link", "gradients", "ms per step", "loss reached after", "loss at the end"], body
    )


TABLES: dict[str, Callable[[], str]] = {
    f.__name__: f
    for f in (
        algorithm_errors,
        algorithm_model,
        algorithms,
        all_reduce,
        auto_choice,
        auto_default,
        codec,
        compile_time,
        compile_time_codes,
        delayed,
        fsdp_speed,
        gather_sum_mpi,
        gpu_kernels,
        gpu_machines,
        gpu_ranks,
        gpu_sizes,
        gpu_small,
        gpu_streams,
        gpu_codes,
        gpu_tuned,
        gpu_models,
        gpu_pretrain,
        gpu_windows,
        in_flight,
        kills,
        levels,
        native_code_steps,
        native_codes,
        nonfinite,
        overlap,
        power_sgd,
        predicted_steps,
        rivals,
        scaling,
        segments,
        small_leaves,
        steps,
        steps_of_codes,
        time_to_loss,
        training_step,
        tuner,
    )
} | {
    "compile_time_models": partial(compile_time, "compile_time_models"),
    "gpu_models_4": partial(gpu_models, world=4),
    "gpu_models_resnet50": partial(gpu_models, "resnet50"),
    "gpu_sockets": partial(gpu_streams, "gpu_h100_models", ("lax", "lax, bf16", "xla")),
}


def filled(text: str, tables: dict[str, Callable[[], str]] = TABLES) -> Iterator[str]:
    """Yields the parts of the text, with every table made anew."""
    for part in re.split(r"(<!-- table:\w+ -->.*?<!-- end -->)", text, flags=re.DOTALL):
        match = re.match(r"<!-- table:(\w+) -->", part)
        if match is None:
            yield part
            continue
        _read.clear()
        made = tables[match[1]]()
        if older := sorted(_read - {WIRE_VERSION}):
            made += f"\n\nMeasured with wire format {' and '.join(map(str, sorted(_read)))}."
            made += f" Today's is {WIRE_VERSION}." if len(older) == len(_read) else ""
        yield f"{match[0]}\n{made}\n<!-- end -->"


def main() -> int:
    argparse.ArgumentParser(description=__doc__).parse_args()
    for path in TEXTS:
        path.write_text("".join(filled(path.read_text())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
