"""What the benchmarks share: quartiles, the machine they ran on, and where the numbers go."""

import argparse
import json
import os
import platform
import sys
from pathlib import Path
from typing import Any

import jax

import cgx_jax
from cgx_jax import installation
from cgx_jax.commands.bench import quartiles as quartiles
from cgx_jax.link_timer import size_in_bytes as size_in_bytes


def add_json_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="add the numbers to this list of runs"
    )


def write_json(path: Path | None, rows: list[dict[str, Any]]) -> None:
    """Puts this run, with its command and machine, in place of the last one of that command."""
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    command = " ".join(["python", os.path.relpath(sys.argv[0]), *sys.argv[1:]])
    runs = json.loads(path.read_text()) if path.exists() else []
    runs = [run for run in runs if run["command"] != command]
    runs.append({"command": command, "machine": machine(), "rows": rows})
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(json.dumps(runs, indent=1) + "\n")
    partial.replace(path)  # whole, whenever this process ends


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
