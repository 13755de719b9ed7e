"""CGX's surrogate search over widths."""

from __future__ import annotations

import dataclasses

import numpy as np

from cgx_jax.arguments import store_whole
from cgx_jax.policies import knapsack
from cgx_jax.policies.solvers import Bounded, Problem, store_range, widths

BATCH = 16  # choices tried with one surrogate
POOL = 512  # choices from which the surrogate picks a batch
NOISE = 1e-3
SPREAD = 0.3  # standard deviations below the mean that count as likely
# Results differ in their last bits between processors, and so would the search.
DECIMALS = 9


@dataclasses.dataclass(frozen=True)
class Bayesian(Bounded):
    """Fewest bytes that a surrogate search finds under the error constraint of `LeastBytes`.

    Candidates are those from the first of width `least` to the last of width `most`. The search
    minimizes log(bytes) + log(error), which is CGX's product. An error under the limit counts as
    the limit, so that only bytes matter there. The search starts from all uniform choices and the
    choice of least error. Each of `trials` choices then has the least lower confidence bound, by a
    Gaussian process, in a pool of random choices and neighbors of the best. The answer is the
    smallest choice seen within the limit. It is never larger than a uniform choice within the
    limit. No other optimality is promised; `LeastBytes` is faster and finds fewer bytes. `seed`
    fixes the randomness.

    `solve` raises ValueError if no choice has so little error. Source: CGX (Markov et al.,
    Middleware 2022), adaptive compression; there without a constraint.
    """

    least: int = 2
    most: int = 8
    alpha: float = 1.0
    uniform_bits: int = 4
    trials: int = 256
    seed: int = 0

    def __post_init__(self) -> None:
        store_range(self)
        super().__post_init__()
        store_whole(self, "trials", 1)
        store_whole(self, "seed", 0)

    def check(self, bits: np.ndarray) -> None:
        widths(self, bits)
        super().check(bits)

    def solve(self, problem: Problem) -> np.ndarray:
        allowed = widths(self, problem.bits)
        # Leaves are sorted by their numbers, so that the tree's order does not matter.
        order = np.lexsort((*problem.error.T, problem.norm, problem.values))
        nbytes, error = problem.nbytes[order, allowed], problem.error[order, allowed]
        limit, (leaves, count) = self.limit(problem, error), error.shape
        rng = np.random.default_rng(self.seed)

        tried = np.vstack([np.repeat(np.arange(count)[:, None], leaves, 1), error.argmin(axis=1)])
        most = len(tried) + (self.trials if leaves else 0)
        while True:
            sizes = np.array([knapsack.total(nbytes, choice) for choice in tried])
            errors = np.array([knapsack.total(error, choice) for choice in tried])
            best = tried[np.argmin(np.where(errors <= limit, sizes, np.inf))]
            if len(tried) == most:
                choice = np.empty(leaves, np.int64)
                choice[order] = best + allowed.start
                return choice
            tiny = np.finfo(float).tiny
            goal = np.log(np.maximum(sizes, 1)) + np.log(np.maximum(errors, limit) + tiny)
            pool = _pool(rng, best, count)
            first = np.argsort(_lowest(tried, goal, pool).round(DECIMALS), kind="stable")
            tried = np.vstack([tried, pool[first[: min(BATCH, most - len(tried))]]])


def _pool(rng: np.random.Generator, best: np.ndarray, count: int) -> np.ndarray:
    """Returns half random choices, and half copies of `best` with some leaves one candidate off."""
    shape = POOL // 2, best.size
    moved = rng.random(shape) < rng.random((shape[0], 1)) ** 2
    near = np.clip(best + moved * rng.choice([-1, 1], shape), 0, count - 1)
    return np.vstack([near, rng.integers(0, count, shape)])


def _lowest(tried: np.ndarray, goal: np.ndarray, pool: np.ndarray) -> np.ndarray:
    """Returns how low a Gaussian process that knows `goal` of `tried` expects that of `pool`."""
    scale = goal.std() or 1.0
    width = max(1.0, _distances(tried, tried).mean())
    inverse = np.linalg.inv(np.exp(-_distances(tried, tried) / width) + NOISE * np.eye(len(tried)))
    near = np.exp(-_distances(pool, tried) / width)
    mean = near @ inverse @ ((goal - goal.mean()) / scale)
    variance = 1 - ((near @ inverse) * near).sum(axis=1)
    return mean - SPREAD * np.sqrt(np.maximum(variance, 0))


def _distances(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    squares = (a**2).sum(axis=1)[:, None] + (b**2).sum(axis=1)
    return squares - 2.0 * (a @ b.T)
