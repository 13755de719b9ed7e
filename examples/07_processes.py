"""Trains the language model in several processes, with 4-bit gradients over gloo or MPI.

One command starts all processes here, one rank each:

    python 07_processes.py           # over gloo, XLA's own collectives for CPUs
    python 07_processes.py --mpi     # in fused calls over MPI: pip install mpi4py mpich

On a cluster, start the ranks yourself. Over gloo, give each its number and the first machine's
host:port: `--rank 3 --world 16 --coordinator host:port`. Over MPI, use your launcher:
`mpirun -n 16 python 07_processes.py --mpi --rank 0`, or srun; MPI then counts the ranks. On GPUs,
leave out the three settings of `jax.config`: JAX finds the devices, and "auto" the exchange.

Expected: the loss falls from about 6.1 to below 3.3 nats per byte, and the last lines are

    ranks hold the same parameters: True
    ok
"""

import argparse
import importlib.util
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import optax
from flax import nnx
from jax.experimental import multihost_utils

import cgx_jax
import corpus
from model import Transformer
from training import adamw, data_parallel_step, train

LENGTH = 64


def start_ranks(given: argparse.Namespace) -> int:
    """Runs this file once per rank; returns the first exit code that is not 0, or 0."""
    command = [sys.executable, __file__, "--steps", str(given.steps), "--world", str(given.world)]
    if given.mpi:
        own = Path(sys.executable).with_name("mpiexec")  # preferably the environment's
        mpiexec = own if own.exists() else shutil.which("mpiexec")
        if mpiexec is None or importlib.util.find_spec("mpi4py") is None:
            sys.exit("07_processes.py --mpi needs MPI: pip install mpi4py mpich")
        launched = [str(mpiexec), "-n", str(given.world), *command, "--mpi", "--rank", "0"]
        return subprocess.call(launched)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        command += ["--coordinator", f"127.0.0.1:{probe.getsockname()[1]}"]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    ranks = [subprocess.Popen([*command, "--rank", str(r)]) for r in range(given.world)]
    try:
        codes = [rank.wait() for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    return next((code for code in codes if code), 0)


def run_rank(given: argparse.Namespace) -> int:
    """Trains as one of the ranks; returns 0 if the loss falls and all end with the same bits."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 1)
    if given.mpi:
        jax.distributed.initialize(cluster_detection_method="mpi4py")
    else:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(given.coordinator, given.world, given.rank)
    world, steps = jax.device_count(), given.steps
    mesh = jax.make_mesh((world,), ("data",))
    text, _ = corpus.load()
    batches = corpus.windows(text, steps, 8 * world, LENGTH, seed=0)
    graphdef, params = nnx.split(Transformer(64, 2, LENGTH, nnx.Rngs(0)))
    # "auto" would sum a model this small exactly.
    exchange = "mpi" if given.mpi else "xla"
    mean = cgx_jax.sync_gradients("data", cgx_jax.Quantize(bits=4), exchange=exchange)
    optimizer = optax.chain(mean, adamw(steps))
    step = data_parallel_step(graphdef, optimizer, mesh)
    trained, losses, seconds = train(step, params, optimizer.init(params), batches, mesh)

    local = np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(jax.device_get(trained))])
    everyone = multihost_utils.process_allgather(local)
    same = bool((everyone == everyone[:1]).all())
    passed = same and losses[-1] < 0.9 * losses[0]
    if jax.process_index() == 0:
        for i in sorted({*range(0, steps, 10), steps - 1}):
            print(f"step {i:3d}  loss {losses[i]:.3f}")
        print(f"step time {seconds * 1e3:.0f} ms")
        print(f"ranks hold the same parameters: {same}")
        failed = "FAILED: expected equal parameters and a falling loss"
        print("ok" if passed else failed, flush=True)
    return 0 if passed else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--world", type=int, default=2, help="number of ranks")
    parser.add_argument("--mpi", action="store_true", help="send over MPI")
    parser.add_argument("--rank", type=int, help="be this rank, and start no others")
    parser.add_argument("--coordinator", help="host:port of rank 0, over gloo")
    given = parser.parse_args()
    return start_ranks(given) if given.rank is None else run_rank(given)


if __name__ == "__main__":
    sys.exit(main())
