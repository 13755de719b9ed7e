"""`python -m cgx_jax doctor`: shows what this installation has, and how to add what it lacks."""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from cgx_jax._version import __version__
from cgx_jax.choice import auto
from cgx_jax.compressors import Quantize
from cgx_jax.exchanges import nccl as fused_on_cuda
from cgx_jax.host import installation
from cgx_jax.host.console import Column, table_lines
from cgx_jax.kernels.native import CPU_REMEDY, backends, lack_of_cuda

# A child process asks MPI, because a broken MPI library ends the process that loads it.
_ASK_MPI = """
from mpi4py import MPI
levels = ["single", "funneled", "serialized", "multiple"]
print(levels[MPI.Query_thread()])
print(MPI.Get_library_version())
"""
_LAUNCHERS = ("PMI", "OMPI", "PRTE", "HYDRA", "MPI_", "SLURM")


class Finding(NamedTuple):
    """One line: what was checked, what was found, and the remedy ("" if nothing is wrong)."""

    what: str
    found: str
    remedy: str = ""


def run(as_json: bool = False) -> int:
    """Prints process 0's findings; returns 1 if the kernels compute wrong values, else 0.

    With `as_json`, prints an object that maps each name to {"found": str, "remedy": str}.
    """
    good = _round_trip()
    if jax.process_index() > 0:
        return 0 if good else 1
    parts = (_versions(), _package(good), _memory(), _mpi(), _nvidia(), _optional())
    findings = list(itertools.chain.from_iterable(parts))
    if as_json:
        print(json.dumps({f.what: {"found": f.found, "remedy": f.remedy} for f in findings}))
        return 0 if good else 1
    lines = []
    for finding in findings:
        lines.append((finding.what, finding.found))
        if finding.remedy:
            lines.append(("", f"-> {finding.remedy}"))
    print(*table_lines((Column("", 18), Column("", 0)), lines, head=False), sep="\n")
    return 0 if good else 1


def _round_trip() -> bool:
    """Returns whether values come back from the kernels within the stated error bound."""
    x = np.linspace(-1, 1, 5000, dtype=np.float32)
    compressor = Quantize(bits=4)
    back = compressor.decode(compressor.encode(x), x.shape, x.dtype)
    return bool((np.abs(np.asarray(back) - x) <= np.asarray(compressor.error_bound(x))).all())


def _versions() -> Iterator[Finding]:
    yield Finding("cgx_jax", __version__)
    yield Finding("python", platform.python_version())
    for name in ("jax", "jaxlib", "numpy"):
        yield Finding(name, metadata.version(name))
    yield Finding("processor", f"{installation.cpu()}, {os.cpu_count()} cores")
    kinds = sorted({device.device_kind for device in jax.devices()})
    yield Finding(
        "devices", f"{jax.device_count()} ({', '.join(kinds)}) in {jax.process_count()} processes"
    )


def _package(good: bool) -> Iterator[Finding]:
    built = backends()
    yield Finding("kernels on CPU", built["cpu"], CPU_REMEDY if built["cpu"] == "jnp" else "")
    lacking = built["cuda"] == "jnp" and any(d.platform == "gpu" for d in jax.devices())
    yield Finding("kernels on CUDA", built["cuda"], lack_of_cuda()[1] if lacking else "")
    if good:
        yield Finding("self-test", "decoded values are within the error bound")
    else:
        again = "in the checkout, pip install --force-reinstall --no-deps ."
        yield Finding("self-test", "failed: decoded values exceed the error bound", again)
    yield Finding("wire format", str(built["wire_format"]))
    usable = [e.shorthand for e in auto.available()]
    without_mpi = "" if "mpi" in usable else "'mpi' needs ranks that mpiexec or srun started"
    yield Finding("exchanges", ", ".join(("psum", *usable)), without_mpi)


def _memory() -> Iterator[Finding]:
    if platform.libc_ver()[0] == "glibc" and any(d.platform == "cpu" for d in jax.devices()):
        yield Finding(
            "memory",
            "malloc frees large buffers after each step; call cgx_jax.keep_memory() to keep them",
        )


def _mpi() -> Iterator[Finding]:
    if importlib.util.find_spec("mpi4py") is None:
        yield Finding("MPI", "mpi4py is not installed", "pip install mpi4py mpich")
        return
    # Remove the launcher's variables, so that the child does not join as this process's rank.
    alone = {k: v for k, v in os.environ.items() if not k.startswith(_LAUNCHERS)}
    try:
        answer = subprocess.run(
            [sys.executable, "-c", _ASK_MPI],
            capture_output=True,
            text=True,
            timeout=60,
            env=alone,
            check=False,
        )
        said, failed = answer.stdout, answer.stderr.strip().splitlines()[-1:]
    except subprocess.TimeoutExpired:
        said, failed = "", ["no answer in 60 s"]
    threads, _, version = said.partition("\n")
    if not version:
        why = " ".join(failed) or "its process ended without output"
        yield Finding("MPI", f"mpi4py cannot be imported: {why}", "pip install mpi4py mpich")
        return
    yield Finding("MPI", f"{installation.one_line(version)}, mpi4py {metadata.version('mpi4py')}")
    yield Finding(
        "MPI threads",
        threads,
        "" if threads == "multiple" else "use an MPI library built with thread support",
    )


def _nvidia() -> Iterator[Finding]:
    installed = {(d.metadata["Name"] or "").lower(): d.version for d in metadata.distributions()}
    driver = Path("/proc/driver/nvidia/version").exists()
    plugins = [name for name in installed if name.startswith("jax-cuda") and "plugin" in name]
    if plugins:
        name = min(plugins)
        yield Finding(
            "CUDA",
            f"{name} {installed[name]}" + ("" if driver else ", but there is no NVIDIA driver"),
            "" if driver else "if this machine has a GPU, install NVIDIA's driver",
        )
    else:
        yield Finding(
            "CUDA",
            "JAX has no CUDA plugin" if driver else "no NVIDIA driver and no CUDA plugin for JAX",
            'pip install "jax[cuda13]"' if driver else "",
        )
    nvcc = shutil.which("nvcc")
    yield Finding("nvcc", nvcc or "not on PATH (only needed to build CUDA kernels)")
    nccl = [
        f"{name} {v}" for name, v in sorted(installed.items()) if name.startswith("nvidia-nccl")
    ]
    lacking = bool(plugins) and not nccl
    yield Finding("NCCL", ", ".join(nccl) or "none", 'pip install "jax[cuda13]"' if lacking else "")
    if plugins or driver:
        problem = fused_on_cuda.Nccl().missing()
        found = "no" if problem else "built in"
        yield Finding(
            "exchange 'nccl'", found, f"{problem}; until then, use 'xla'" if problem else ""
        )


def _optional() -> Iterator[Finding]:
    for name, use in (("flax", "loops"), ("optax", "sync_gradients"), ("matplotlib", "--png")):
        if importlib.util.find_spec(name) is None:
            yield Finding(name, f"not installed ({use})", f"pip install {name}")
        else:
            yield Finding(name, metadata.version(name))
