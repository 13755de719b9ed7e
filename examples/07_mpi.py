"""Trains the language model on 4 MPI ranks, with 4-bit gradients in fused calls over MPI.

One command starts all ranks: without `--rank` the program starts itself under `mpiexec`. It needs
mpi4py and an MPI library: pip install "cgx-jax[mpi]" mpich. On a cluster, start it with your own
launcher: mpirun -n 16 python examples/07_mpi.py --rank, or srun.

Expected: the loss falls from about 6.1 to below 3.3 nats per byte, and the last lines are

    ranks hold the same parameters: True
    ok
"""

import argparse
import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import jax

import processes

WORLD = 4


def start_ranks(steps: int) -> int:
    """Runs this file under mpiexec, preferably the environment's own; returns its exit code."""
    own = Path(sys.executable).with_name("mpiexec")
    mpiexec = own if own.exists() else shutil.which("mpiexec")
    if mpiexec is None or importlib.util.find_spec("mpi4py") is None:
        sys.exit('07_mpi.py needs MPI: pip install "cgx-jax[mpi]" mpich')
    command = [sys.executable, __file__, "--rank", "--steps", str(steps)]
    return subprocess.call([str(mpiexec), "-n", str(WORLD), *command])


def run_rank(steps: int) -> int:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 1)
    jax.distributed.initialize(cluster_detection_method="mpi4py")
    return processes.train_and_compare(steps, exchange="mpi")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument(
        "--rank", action="store_true", help="this process is a rank: start no others"
    )
    arguments = parser.parse_args()
    return run_rank(arguments.steps) if arguments.rank else start_ranks(arguments.steps)


if __name__ == "__main__":
    sys.exit(main())
