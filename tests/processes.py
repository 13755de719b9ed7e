"""Ranks in processes of their own, which `jax.distributed` joins over gloo on loopback."""

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

MPIEXEC = shutil.which("mpiexec", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
needs_mpi = pytest.mark.skipif(
    MPIEXEC is None, reason="no mpiexec: pip install mpich mpi4py runs these tests"
)
ENVIRONMENT = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
HEADER = """
import functools
import sys
import jax
rank, world, port, devices = map(int, sys.argv[1:])
jax.config.update("jax_num_cpu_devices", devices)
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(f"localhost:{port}", world, rank, local_device_ids=[0])
import jax.numpy as jnp, numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
import cgx_jax

mesh = Mesh(np.array(jax.devices()), ("data",))
every = [np.random.default_rng(r).normal(size=(30, 1001)).astype(np.float32) for r in range(world)]
def place(x):
    return jax.make_array_from_process_local_data(NamedSharding(mesh, P("data")), x[None])
"""


def start(command: list[str], **variables: str) -> subprocess.Popen:
    return subprocess.Popen(
        command,
        env=ENVIRONMENT | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen, seconds: float = 120) -> tuple[int, str, str]:
    """Returns the exit code and what the process printed; ends it if it takes longer."""
    try:
        out, error = process.communicate(timeout=seconds)
    finally:
        process.kill()
        process.wait()
    return process.returncode, out, error


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]


def check_ranks(
    program: str, world: int, seconds: float = 240, devices: Sequence[int] | None = None
) -> None:
    """Runs HEADER and `program` on every rank; each must end by printing "ok".

    `devices` are how many devices each rank has; None: one.
    """
    command = [sys.executable, "-W", "ignore", "-c", HEADER + program]
    port = free_port()
    given = [(rank, world, port, n) for rank, n in enumerate(devices or [1] * world)]
    ranks = [start([*command, *map(str, own)]) for own in given]
    try:
        for rank in ranks:
            _, out, error = finish(rank, seconds)
            assert out.endswith("ok\n"), error
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


def launched(*arguments: object, **variables: str) -> list[subprocess.Popen]:
    """Starts `command_line` twice, with the variables of Open MPI's launcher."""
    variables |= {
        "OMPI_MCA_orte_hnp_uri": "4096.0;tcp://127.0.0.1:1",
        "OMPI_COMM_WORLD_SIZE": "2",
        "JAX_COORDINATOR_ADDRESS": f"localhost:{free_port()}",
        "JAX_PLATFORMS": "cpu",
    }
    names = "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"
    return [command_line(*arguments, **variables, **dict.fromkeys(names, r)) for r in "01"]


def command_line(*arguments: object, **variables: str) -> subprocess.Popen:
    """Starts `python -m cgx_jax` as a user does."""
    return start([sys.executable, "-m", "cgx_jax", *map(str, arguments)], **variables)
