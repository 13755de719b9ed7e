"""What the benchmarks share: quartiles, the machine they ran on, and where the numbers go."""

import argparse
import json
import os
import platform
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np

import cgx_jax

SUFFIXES = {"k": 1e3, "M": 1e6, "G": 1e9}


def size_in_bytes(text: str) -> int:
    """Takes "25M" to 25,000,000."""
    factor = SUFFIXES.get(text[-1:], 1)
    return int(float(text.rstrip("kMG")) * factor)


def quartiles(values: Any) -> list[float]:
    """Lower quartile, median, upper quartile."""
    return [float(q) for q in np.percentile(np.asarray(values, np.float64), (25, 50, 75))]


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
    path.write_text(json.dumps(runs, indent=1) + "\n")


def machine() -> dict[str, Any]:
    """Processor, cores and versions."""
    return {
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "jax": jax.__version__,
        "cgx_jax": cgx_jax.__version__,
        "backends": cgx_jax.backends(),
    }


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
