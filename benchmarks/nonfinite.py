"""What `debug_nonfinite` adds to a training step of the suite's tasks at 4 bits.

    python benchmarks/nonfinite.py --json benchmarks/results/nonfinite.json
    python benchmarks/nonfinite.py --task language --reps 21 --exchanges xla    # a quick look

Two ranks: simulated devices of one process that reduce by the exchange "xla", then processes that
mpiexec starts here, by "mpi". Every repeat takes a step without the mode, one of the same program
compiled again, and one under `debug_nonfinite("log")`, each behind a barrier; a time is the slowest
rank's. The order turns round with every repeat. `added` is the median (and quartiles) over the
repeats of a step's time over that of the first in the same repeat, less 1: of the second it is
noise. Values are finite throughout. Needs the packages of the extra `accuracy`.
"""

import argparse
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

sys.path.append(str(Path(__file__).resolve().parent / "suite"))

from methods import METHODS
from models import MODELS
from speed import Step, Timed, of_exchange

import cgx_jax
import measure
from all_reduce import Ranks, rank_of_process

WORLD = 2
METHOD = "4 bits"
MASTER_PORT = 29_517


def parse_arguments() -> argparse.Namespace:
    parser = measure.parser(__doc__, reps=101)
    parser.add_argument("--task", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument(
        "--exchanges", nargs="+", choices=("xla", "mpi"), default=["xla", "mpi"], help="(both)"
    )
    return parser.parse_args()


def main() -> int:
    arguments = parse_arguments()
    if len(arguments.exchanges) > 1:
        return launch(arguments)
    (exchange,) = arguments.exchanges
    if exchange == "mpi" and rank_of_process() is None:
        return launch(arguments)
    ranks = Ranks(WORLD)
    rows = []
    for task in arguments.task:
        rows += compare(ranks, task, exchange, arguments.reps)
    if ranks.first:
        measure.write_json(arguments.json, rows)
    return 0


def launch(arguments: argparse.Namespace) -> int:
    """Runs every exchange in processes of its own."""
    for exchange in arguments.exchanges:
        command = [sys.executable, sys.argv[0], "--exchanges", exchange]
        command += ["--task", *arguments.task, "--reps", str(arguments.reps)]
        command += ["--json", str(arguments.json)] if arguments.json else []
        variables = {}
        if exchange == "mpi":
            beside = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
            mpiexec = shutil.which("mpiexec", path=beside)
            if mpiexec is None:
                print("nonfinite: left out 'mpi': no mpiexec; pip install mpich mpi4py")
                continue
            command = [mpiexec, "-n", str(WORLD), *command]
            variables = {
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(MASTER_PORT),
                "WORLD_SIZE": str(WORLD),
            }
        if code := subprocess.call(command, env=os.environ | variables):
            return code
    return 0


def compare(ranks: Ranks, task: str, exchange: str, reps: int) -> list[dict[str, Any]]:
    """Times a task's step without the mode, again, and with it; one row each."""
    model = MODELS[task]
    batch = tuple(x[0] for x in model.batches(1, 0))

    def step() -> Step:
        trainer = of_exchange(Timed, exchange, model, METHODS[METHOD])
        return Step(ranks, trainer, batch, sends=True)

    steps = {"off": step(), "off, again": step()}
    with cgx_jax.debug_nonfinite("log"):
        steps["on"] = step()
    seconds = in_turns(ranks, list(steps.values()), reps)
    plan = cgx_jax.Plan.build(model.initial(0)[1], METHODS[METHOD].policy(model.steps))
    values = sum(leaf.size for leaf in plan.leaves)
    rows = []
    for i, name in enumerate(steps):
        row = {
            "task": task,
            "mode": name,
            "exchange": exchange,
            "method": METHOD,
            "world": ranks.world,
            "values": values,
            "leaves": len(plan.leaves),
            "reps": reps,
            "seconds": measure.quartiles(seconds[:, i]),
            "added": measure.quartiles(seconds[:, i] / seconds[:, 0] - 1),
        }
        rows.append(row)
        if ranks.first:
            low, middle, high = (100 * x for x in row["added"])
            print(
                f"{task:<13} {exchange:<4} {values:>9,} values {len(plan.leaves):>3} leaves"
                f" {name:<11} {row['seconds'][1] * 1e3:8.2f} ms  added {middle:5.2f} %"
                f" ({low:.2f} to {high:.2f})",
                flush=True,
            )
    return rows


def in_turns(ranks: Ranks, steps: list[Step], reps: int) -> np.ndarray:
    """Seconds of every step by the slowest rank, f64[reps, steps]."""
    samples = np.empty((reps, len(steps)))
    for rep in range(-2, reps):  # two rounds of warm-up
        for i in np.roll(np.arange(len(steps)), rep):
            ranks.barrier()
            ranks.barrier()  # the first one's stragglers have arrived now
            start = time.perf_counter()
            steps[i]()
            if rep >= 0:
                samples[rep, i] = time.perf_counter() - start
    jax.effects_barrier()
    return ranks.gather(samples.ravel()).max(axis=0).reshape(samples.shape)


if __name__ == "__main__":
    sys.exit(main())
