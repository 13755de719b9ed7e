"""The machine and the installed versions, on which every measurement depends."""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path

import jax
import jaxlib.version

from cgx_jax._types import Json
from cgx_jax._version import __version__

MOST_NAME = 200  # characters


def facts() -> Json:
    """Returns processor, cores, devices, processes and versions; starts the backend."""
    return {
        "cpu": cpu(),
        "cores": os.cpu_count(),
        "device": one_line(jax.devices()[0].device_kind),
        "processes": jax.process_count(),
        "jax": jax.__version__,
        "jaxlib": jaxlib.version.__version__,
        "cgx_jax": __version__,
    }


def cpu() -> str:
    """Returns the processor's model name."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return one_line(names[0] if names else platform.processor() or platform.machine())


def mpi_library() -> str | None:
    """Returns the name and version of the MPI library that mpi4py loaded here, or None."""
    mpi = sys.modules.get("mpi4py.MPI")
    return None if mpi is None else one_line(mpi.Get_library_version())


def one_line(text: str) -> str:
    """Returns the first line of a reported name: printable, at most MOST_NAME characters."""
    # Open MPI counts the terminating zero in the length, so mpi4py returns it as a character.
    printable = "".join(c if c.isprintable() else " " for c in text.strip().partition("\n")[0])
    return " ".join(printable.split())[:MOST_NAME]
