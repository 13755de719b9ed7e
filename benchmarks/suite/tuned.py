"""Trains the suite's tasks at the learning rate at which exact training is best.

    python benchmarks/suite/diloco.py rates --seeds 9    # tries the rates
    python benchmarks/suite/tuned.py

Otherwise it is quality.py. The rate was chosen on a seed that is none of those compared, and for
exact training, as by a user who adds compression to a recipe that is tuned.
"""

import dataclasses
import re
import sys
from pathlib import Path

import optax

sys.path.append(str(Path(__file__).resolve().parents[1]))

from methods import METHODS, RATES
from models import METRICS, MODELS
from quality import RESULTS, run
from tasks import Task

import measure

NAMES = (
    "exact",
    "bf16",
    "8 bits",
    "4 bits, rotated, SecondMoment",
    "3 bits, rotated, SecondMoment",
    "4 bits, rotated",
    "4 bits",
)
TUNED = {name: METHODS[name] for name in NAMES}


def best_rate(task: str) -> float:
    """Returns the multiple of a task's learning rate at which exact training was best."""
    field, _, more, _ = METRICS[task]
    rows = measure.rows(RESULTS / "diloco_rate" / f"{task}.jsonl")
    exact = [r for r in rows if re.match("exact", r["configuration"])]
    best = (max if more else min)(exact, key=lambda row: row[field])
    return RATES[best["configuration"]].rate


def tuned(task: str) -> Task:
    rate, own = best_rate(task), MODELS[task]

    def optimizer(steps: int) -> optax.GradientTransformation:
        return optax.chain(own.optimizer(steps), optax.scale(rate))

    return dataclasses.replace(own, optimizer=optimizer, plain=None)


if __name__ == "__main__":
    sys.exit(run.main(__doc__, {task: tuned(task) for task in MODELS}, TUNED, RESULTS / "tuned"))
