"""Trains the language model in 2 processes that communicate over gloo, with 4-bit gradients.

One command starts both: the parent picks a port and starts a copy of itself per rank. On a cluster,
start `--rank` 0, 1, ... yourself and pass every rank the first machine's host:port as
`--coordinator`.

Expected: the loss falls from about 6.1 to below 3.3 nats per byte, and the last lines are

    ranks hold the same parameters: True
    ok
"""

import argparse
import socket
import subprocess
import sys

import jax

import processes

WORLD = 2


def start_ranks(steps: int) -> int:
    """Runs this file once per rank; returns the first exit code that is not 0, or 0."""
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
    return processes.train_and_compare(steps, exchange="xla")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument(
        "--rank", type=int, help="this process's rank, if you start the ranks yourself"
    )
    parser.add_argument("--coordinator", help="host:port of rank 0, if you start the ranks")
    arguments = parser.parse_args()
    if arguments.rank is None:
        return start_ranks(arguments.steps)
    return run_rank(arguments.rank, arguments.coordinator, arguments.steps)


if __name__ == "__main__":
    sys.exit(main())
