"""What native kernels of codes are worth in a training step of the suite's tasks.

    python benchmarks/native_codes.py --json benchmarks/results/native_codes.jsonl
    python benchmarks/native_codes.py --task words --methods "TopK 1 %, feedback"    # a quick look

Two ranks, simulated by devices of one process. Every repeat takes a step with the code's native
kernels, one of the same program compiled again, and one in plain jnp; the order rotates with every
repeat. `ratio` is a step's time divided by that of the first: the median (and quartiles) over the
repeats. For the second step it is noise. Needs the packages of the extra `accuracy`.
"""

import argparse
import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.append(str(Path(__file__).resolve().parent / "suite"))

from methods import METHODS
from models import MODELS
from speed import Step, Timed, of_exchange
from tasks import Task

import measure
from all_reduce import Ranks, run
from cgx_jax.kernels.platforms import Platform

WORLD = 2
CODES = [
    "ScaledSign, feedback",
    "TopK 1 %, feedback",
    "DGC 1 %, feedback",
    "BlockTopK 5 of 512, feedback",
    "QSGD",
    "TernGrad",
    "Natural",
]


def main() -> int:
    parser = measure.parser(__doc__, reps=31)
    parser.add_argument("--task", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--methods", default=";".join(CODES), help="names separated by ';'")
    arguments = parser.parse_args()
    return run(arguments, [], compare, line, world=WORLD)


def compare(ranks: Ranks, arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Times each task's step by every method: with native kernels, again, and in plain jnp."""
    for task, method in itertools.product(arguments.task, arguments.methods.split(";")):
        model = MODELS[task]
        batch = tuple(x[0] for x in model.batches(1, 0))

        def step(model: Task = model, batch: Any = batch, method: str = method) -> Step:
            return Step(of_exchange(Timed, "xla", model, METHODS[method]), batch)

        steps = {"native": step(), "native, again": step()}
        with mock.patch.object(Platform, "has", return_value=False):
            steps["jnp"] = step()
        ranks.in_turns(steps, 1)
        seconds = ranks.in_turns(steps, arguments.reps)
        for kernels, own in seconds.items():
            yield {
                "task": task,
                "method": method,
                "kernels": kernels,
                "reps": arguments.reps,
                "world": WORLD,
                "seconds": measure.quartiles(own),
                "ratio": measure.quartiles(own / seconds["native"]),
            }


def line(row: dict[str, Any]) -> str:
    ratio = measure.spread(row["ratio"])
    return f"{row['task']:<13} {row['method']:<30} {row['kernels']:<14} {ratio}"


if __name__ == "__main__":
    sys.exit(main())
