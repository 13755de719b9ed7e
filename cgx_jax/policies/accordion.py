"""Many bits while the gradients change fast, few while they do not."""

from __future__ import annotations

import dataclasses

import numpy as np

from cgx_jax.policies.problem import Problem
from cgx_jax.policies.solvers import Solver, check_positive


@dataclasses.dataclass(frozen=True)
class Accordion(Solver):
    """Many bits in the critical phases of a training, few in all others.

    A phase is critical if the norm of the gradients of all adaptive leaves differs from the norm at
    the last look by at least `threshold` times that norm. The time before the second look is
    critical too. `Adaptive` takes two candidates, few bits and many, and looks every `every` steps.
    It starts with many bits if `base` gives them: `Adaptive(Accordion(), base=Uniform(many),
    candidates=(few, many))`.

    Raises ValueError for a threshold that is not above 0, and for another number of candidates.
    Source: Accordion (Agarwal et al., MLSys 2021). There each layer decides by itself, and by the
    norm of an epoch's summed gradients. Here all leaves decide together, so that there are two
    plans. They decide by the average norm of the ranks' own gradients, which `Adaptive` measures
    anyway.
    """

    threshold: float = 0.5

    def __post_init__(self) -> None:
        check_positive("Accordion", "threshold", self.threshold)

    def check(self, bits: np.ndarray) -> None:
        if len(bits) != 2:
            raise ValueError(
                f"Accordion: {len(bits)} candidates, of {bits.tolist()} bits; pass two: one of few "
                "bits and one of many."
            )

    def solve(self, problem: Problem) -> np.ndarray:
        self.check(problem.bits)
        critical = problem.change is None or problem.change >= self.threshold
        return np.full(len(problem.values), int(critical))
