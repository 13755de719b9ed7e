"""What native kernels of codes are worth in a training step of the suite's tasks.

    python benchmarks/native_codes.py --json benchmarks/results/native_codes.jsonl
    python benchmarks/native_codes.py --task words --methods "TopK 1 %, feedback"    # a quick look

Two ranks, simulated by devices of one process. Every repeat takes a step with the code's native
kernels, one of the same program compiled again, and one in plain jnp; the order rotates with every
repeat. `ratio` is a step's time divided by that of the first: the median (and quartiles) over the
repeats. For the second step it is noise. Needs the packages of the extra `accuracy`.
"""

import sys
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.append(str(Path(__file__).resolve().parent / "suite"))

from methods import METHODS
from models import MODELS
from speed import Step, Timed, of_exchange

import measure
from all_reduce import Ranks
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
    ranks = Ranks(WORLD)
    rows = []
    for task in arguments.task:
        for method in arguments.methods.split(";"):
            rows += compare(ranks, task, method, arguments.reps)
    measure.write_json(arguments.json, rows)
    return 0


def compare(ranks: Ranks, task: str, method: str, reps: int) -> list[dict[str, Any]]:
    """Times a task's step by a method with native kernels, again, and in plain jnp."""
    model = MODELS[task]
    batch = tuple(x[0] for x in model.batches(1, 0))

    def step() -> Step:
        trainer = of_exchange(Timed, "xla", model, METHODS[method])
        return Step(trainer, batch)

    steps = {"native": step(), "native, again": step()}
    with mock.patch.object(Platform, "has", return_value=False):
        steps["jnp"] = step()
    ranks.in_turns(steps, 1)
    seconds = ranks.in_turns(steps, reps)
    rows = []
    for kernels, own in seconds.items():
        row = {"task": task, "method": method, "kernels": kernels, "reps": reps, "world": WORLD}
        row |= {"seconds": measure.quartiles(own)}
        row |= {"ratio": measure.quartiles(own / seconds["native"])}
        rows.append(row)
        print(f"{task:<13} {method:<30} {kernels:<14} {measure.spread(row['ratio'])}")
    return rows


if __name__ == "__main__":
    sys.exit(main())
