"""CGX's surrogate search over widths. Needs scikit-learn: `pip install "cgx-jax[bayesian]"`."""

from __future__ import annotations

import dataclasses

import numpy as np

from cgx_jax.policies import knapsack
from cgx_jax.policies.problem import Problem, of_width
from cgx_jax.policies.solvers import (
    Solver,
    candidates,
    check_constraint,
    check_integer,
    check_range,
    error_limit,
)

TREES = 32
BATCH = 16  # choices tried with one forest
POOL = 512  # choices from which the forest picks a batch
# Logarithms differ in their last bits between processors, and so would the search.
DECIMALS = 9


@dataclasses.dataclass(frozen=True)
class Bayesian(Solver):
    """Fewest bytes that a random-forest search finds under the error constraint of `LeastBytes`.

    Candidates are those from the first of width `least` to the last of width `most`. The search
    minimizes log(bytes) + log(error), which is CGX's product. An error under the limit counts as
    the limit, so that only bytes matter there. The search starts from all uniform choices and the
    choice of least error. Each of `trials` choices then has the largest expected improvement in a
    pool of random choices and neighbors of the best. The answer is the smallest choice seen within
    the limit. It is never larger than a uniform choice within the limit. No other optimality is
    promised; `LeastBytes` is faster and exact. `seed` fixes the randomness.

    `solve` raises ValueError if no choice has so little error, ImportError without scikit-learn.
    Source: CGX (Markov et al., Middleware 2022), adaptive compression; there without a constraint.
    """

    least: int = 2
    most: int = 8
    alpha: float = 1.0
    uniform_bits: int = 4
    trials: int = 256
    seed: int = 0

    def __post_init__(self) -> None:
        check_range(self)
        check_constraint(self)
        check_integer("Bayesian", "trials", self.trials, 1)
        check_integer("Bayesian", "seed", self.seed, 0)

    def check(self, bits: np.ndarray) -> None:
        candidates(self, bits)
        of_width("Bayesian", "uniform_bits", self.uniform_bits, bits)

    def solve(self, problem: Problem) -> np.ndarray:
        try:
            from scipy.special import ndtr
            from sklearn.ensemble import RandomForestRegressor
        except ImportError as missing:
            raise ImportError(
                f"Bayesian: scikit-learn cannot be imported ({missing}); "
                'pip install "cgx-jax[bayesian]", or use LeastBytes.'
            ) from missing
        allowed = candidates(self, problem.bits)
        # Leaves are sorted by their numbers, so that the tree's order does not matter.
        order = np.lexsort((*problem.error.T, problem.norm, problem.values))
        nbytes, error = problem.nbytes[order, allowed], problem.error[order, allowed]
        limit, (leaves, count) = error_limit(self, problem, error), error.shape
        rng = np.random.default_rng(self.seed)

        new = np.vstack([np.repeat(np.arange(count)[:, None], leaves, 1), error.argmin(axis=1)])
        left = self.trials if leaves else 0
        tried, sizes, errors = new[:0], np.zeros(0), np.zeros(0)
        tiny = np.finfo(float).tiny
        while True:
            tried = np.vstack([tried, new])
            sizes = np.append(sizes, [knapsack.total(nbytes, choice) for choice in new])
            errors = np.append(errors, [knapsack.total(error, choice) for choice in new])
            within = np.flatnonzero(errors <= limit)
            best = tried[within[sizes[within].argmin()]]
            if not left:
                choice = np.empty(leaves, np.int64)
                choice[order] = best + allowed.start
                return choice
            goal = np.log(np.maximum(sizes, 1)) + np.log(np.maximum(errors, limit) + tiny)
            goal = goal.round(DECIMALS)
            forest = RandomForestRegressor(TREES, max_features="sqrt", random_state=self.seed)
            trees = forest.fit(tried, goal).estimators_
            pool = _pool(rng, best, count)
            predicted = np.stack([tree.predict(pool) for tree in trees])
            gain, spread = goal.min() - predicted.mean(axis=0), predicted.std(axis=0) + 1e-9
            normal = np.exp(-((gain / spread) ** 2) / 2) / np.sqrt(2 * np.pi)
            expected = gain * ndtr(gain / spread) + spread * normal
            new = pool[np.argsort(-expected.round(DECIMALS), kind="stable")[: min(BATCH, left)]]
            left -= len(new)


def _pool(rng: np.random.Generator, best: np.ndarray, count: int) -> np.ndarray:
    """Returns half random choices, and half copies of `best` with some leaves one candidate off."""
    shape = POOL // 2, best.size
    moved = rng.random(shape) < rng.random((shape[0], 1)) ** 2
    near = np.clip(best + moved * rng.choice([-1, 1], shape), 0, count - 1)
    return np.vstack([near, rng.integers(0, count, shape)])
