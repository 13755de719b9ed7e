"""Trains the language model in 2 processes that talk over gloo, with 4-bit gradients.

One command starts both: the parent picks a port and starts a copy of itself for each rank. On a
cluster, start `--rank` 0, 1, ... yourself and give every rank the first machine's host:port as
`--coordinator`.

Expected: the loss falls from about 6.1 to below 3.3 nats per byte, and the last lines are

    ranks hold the same parameters: True
    ok
"""

import argparse
import socket
import subprocess
import sys
from functools import partial

import jax
import numpy as np
from flax import nnx
from jax.experimental import multihost_utils

import cgx_jax
import corpus
from model import Transformer
from training import adamw, data_parallel_step, train

WORLD = 2
LENGTH = 64


def start_ranks(steps: int) -> int:
    """Runs this file once for each rank; returns the first exit code that is not 0, or 0."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        coordinator = f"127.0.0.1:{probe.getsockname()[1]}"
    command = [sys.executable, __file__, "--steps", str(steps), "--coordinator", coordinator]
    ranks = [subprocess.Popen([*command, "--rank", str(rank)]) for rank in range(WORLD)]
    codes = [rank.wait() for rank in ranks]
    return next((code for code in codes if code), 0)


def run_rank(rank: int, coordinator: str, steps: int) -> int:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 1)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(coordinator, WORLD, rank)
    mesh = jax.make_mesh((WORLD,), ("data",))

    text, _ = corpus.load()
    batches = corpus.windows(text, steps, 8 * WORLD, LENGTH, seed=0)
    graphdef, params = nnx.split(Transformer(64, 2, LENGTH, nnx.Rngs(0)))
    optimizer = adamw(steps)
    average = partial(
        cgx_jax.pmean_compressed, axis_name="data", compressor=cgx_jax.Quantize(bits=4)
    )
    step = data_parallel_step(graphdef, optimizer, mesh, average)
    trained, losses, seconds = train(step, params, optimizer.init(params), batches, mesh)

    local = np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(jax.device_get(trained))])
    everyone = multihost_utils.process_allgather(local)
    same = bool((everyone == everyone[:1]).all())
    passed = same and losses[-1] < 0.9 * losses[0]
    if rank == 0:
        for i in sorted({*range(0, steps, 10), steps - 1}):
            print(f"step {i:3d}  loss {losses[i]:.3f}")
        print(f"step time {seconds * 1e3:.0f} ms")
        print(f"ranks hold the same parameters: {same}")
        print("ok" if passed else "FAILED: expected equal parameters and a falling loss")
    return 0 if passed else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rank", type=int, help="started by hand: this process's rank")
    parser.add_argument("--coordinator", help="started by hand: host:port of rank 0")
    arguments = parser.parse_args()
    if arguments.rank is None:
        return start_ranks(arguments.steps)
    return run_rank(arguments.rank, arguments.coordinator, arguments.steps)


if __name__ == "__main__":
    sys.exit(main())
