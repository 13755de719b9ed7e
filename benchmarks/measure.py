"""What the benchmarks share: quartiles, the machine they ran on, and where the numbers go."""

import argparse
import importlib.util
import json
import os
import platform
import shutil
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import cgx_jax
from cgx_jax.choice import auto
from cgx_jax.commands import rig
from cgx_jax.commands.bench import quartiles as quartiles
from cgx_jax.exchanges import Mpi
from cgx_jax.host import installation
from cgx_jax.tuning.link_timer import size_in_bytes as size_in_bytes

# The options that several benchmarks have.
OPTIONS = {
    "rates": "of the links, list",
    "rate": "of the links",
    "worlds": "numbers of ranks, list",
    "world": "ranks",
    "sizes": "fp32 bytes per rank, with k, M, G, list",
    "bits": "per value",
    "leaves": "of the tree",
    "models": "numbers of leaves, or names, list",
    "segments": "bytes of a segment, list",
    "windows": "segments in flight, list",
    "tune": "seconds of tune",
    "exchange": "how bytes travel",
    "reductions": "list",
    "seconds": "for each setting",
    "reps": "repeats, at most",
}


def parser(doc: str | None, **defaults: Any) -> argparse.ArgumentParser:
    """Returns a parser with `--json` and options, each of its default's type."""
    made = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in defaults.items():
        says = f"{OPTIONS.get(name, '')} (default %(default)s)"
        made.add_argument(f"--{name}", type=type(default), default=default, help=says)
    add_json_option(made)
    return made


def command(arguments: argparse.Namespace, **cell: Any) -> list[str]:
    """Returns the command that runs this benchmark again, for the options of one cell only."""
    line = [sys.executable, sys.argv[0]]
    for name, value in (vars(arguments) | cell).items():
        if value is not None:
            line += [f"--{name}", *map(str, value if isinstance(value, list) else [value])]
    return line


def launch(arguments: argparse.Namespace, cells: Iterable[Any], **how: Any) -> int:
    """Runs this benchmark for cells (ranks, rate, options), each in processes of its own.

    Without options, the command is this one. Returns the exit status of the first that fails, or 0.
    `how` is as in `rig.run`.
    """
    for world, rate, options in cells:
        line = command(arguments, **options) if options else [sys.executable, *sys.argv]
        if code := rig.run(int(world), rate, line, **{"timeout": 3600, **how}):
            return code
    return 0


def spread(quartiles: Sequence[float], digits: str = ".2f") -> str:
    """Formats quartiles as the median, with the others in parentheses."""
    low, median, high = (format(x, digits) for x in quartiles)
    return f"{median} ({low}-{high})"


def fastest() -> str:
    """Returns the exchange that CPU ranks use: "mpi" if it is available, otherwise "xla"."""
    return "mpi" if Mpi() in auto.available() else "xla"


def updating(transform: Any, state: Any, mesh: Mesh, axis: str) -> Callable[..., Any]:
    """Returns f(gradients of all ranks, state), which is the ranks' `transform.update`."""
    specs = cgx_jax.state_specs(state, axis)
    return jax.shard_map(
        lambda grads, s: transform.update(jax.tree.map(lambda x: x[0], grads), s),
        mesh=mesh,
        in_specs=(P(axis), specs),
        out_specs=(P(), specs),
    )


def mpiexec() -> str | None:
    """Returns the path of mpiexec, first of the one beside this Python, or None."""
    beside = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return shutil.which("mpiexec", path=beside)


def has_mpi() -> bool:
    """Whether mpiexec can start ranks here."""
    return bool(mpiexec() and importlib.util.find_spec("mpi4py"))


def add_json_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="add the numbers to this file of runs, JSON lines"
    )


def read(path: Path) -> list[dict[str, Any]]:
    """Returns the runs of a file of results: what describes a run, and its `rows`.

    A line {"run": ...} describes the run of the rows that follow it, one a line.
    """
    runs: list[dict[str, Any]] = []
    for line in path.read_text().splitlines():
        found = json.loads(line)
        if list(found) == ["run"]:
            runs.append({**found["run"], "rows": []})
        else:
            runs[-1]["rows"].append(found)
    return runs


def rows(path: Path) -> list[dict[str, Any]]:
    """Returns the rows of all runs in a file of results."""
    return [row for run in read(path) for row in run["rows"]]


def write(path: Path, runs: list[dict[str, Any]]) -> None:
    """Writes a file of results, with nine digits of each number: all that fp32 has."""
    lines = []
    for run in runs:
        fields = {key: value for key, value in run.items() if key != "rows"}
        lines += [{"run": fields}, *run["rows"]]
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text("".join(json.dumps(_rounded(line)) + "\n" for line in lines))
    partial.replace(path)  # the file is whole at any time, even if this process dies


def _rounded(line: Any) -> Any:
    return json.loads(json.dumps(line), parse_float=lambda text: float(f"{float(text):.9g}"))


def write_json(path: Path | None, rows: list[dict[str, Any]]) -> None:
    """Writes this run, with its command and machine; replaces the last run of that command."""
    if path is None:
        return
    runs = [run for run in _known(path) if run["command"] != _command()]
    write(path, [*runs, {"command": _command(), "machine": machine(), "rows": rows}])


def add_json(path: Path | None, row: dict[str, Any], cell: Sequence[str]) -> None:
    """Adds a row to this run, and removes the row's `cell` (the values of these keys) elsewhere.

    A benchmark of many long cells can thus be measured cell by cell, with any number of commands.
    """
    if path is None:
        return
    own: list[dict[str, Any]] = []
    runs = []
    for run in _known(path):
        kept = [r for r in run["rows"] if any(r[key] != row[key] for key in cell)]
        if run["command"] == _command():
            own = kept
        elif kept:
            runs.append({**run, "rows": kept})
    write(path, [*runs, {"command": _command(), "machine": machine(), "rows": [*own, row]}])


def add_run(path: Path, rows: list[dict[str, Any]], **fields: Any) -> None:
    """Adds a run that is described by `fields`."""
    write(path, [*_known(path), {**fields, "rows": rows}])


def _known(path: Path) -> list[dict[str, Any]]:
    return read(path) if path.exists() else []


def _command() -> str:
    return " ".join(["python", os.path.relpath(sys.argv[0]), *sys.argv[1:]])


def machine() -> dict[str, Any]:
    """Processor, cores and versions."""
    return {
        "cpu": installation.cpu(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "jax": jax.__version__,
        "cgx_jax": cgx_jax.__version__,
        "backends": cgx_jax.kernels.backends(),
    }
