"""The knapsack behind LeastBytes and LeastError, beside dynamic programming over 10,000 bins.

    python benchmarks/solvers.py

Leaf sizes and gradient scales are log-normal, widths are 1 to 8 bits, the squared error is about
4**-bits of the leaf's squared norm. What is not minimised is limited to what uniform 4 bits have.
Seconds are medians (and quartiles) over the problems, costs are medians in terms of the uniform
width's, the gap is the most that any of the costs can be over the least possible.
"""

import argparse
import sys
import time

import numpy as np

import measure
from cgx_jax.policies.knapsack import Solution, minimise, total
from cgx_jax.policies.problem import Problem
from cgx_jax.wire import leaf_bytes

BITS = np.arange(1, 9)
UNIFORM = 4
BINS = 10_000


def problem(leaves: int, seed: int) -> Problem:
    rng = np.random.default_rng(seed)
    values = np.maximum(1, np.exp(rng.normal(10, 2, leaves))).astype(np.int64)
    norm = np.sqrt(values) * np.exp(rng.normal(-6, 1.5, leaves))
    error = np.outer(norm**2, 4.0**-BITS) * np.exp(rng.normal(0, 0.1, (leaves, len(BITS))))
    nbytes = np.array([[leaf_bytes(int(v), int(b), 512) for b in BITS] for v in values])
    return Problem(values, norm, BITS, nbytes, error)


def binned(cost: np.ndarray, weight: np.ndarray, budget: float) -> np.ndarray:
    """The least cost by dynamic programming over BINS of weight, each leaf's rounded up."""
    bins = np.ceil(weight / budget * BINS).clip(max=BINS + 1).astype(np.int64)
    least = np.zeros(BINS + 1)
    taken = np.zeros((len(cost), BINS + 1), np.int8)
    for leaf in range(len(cost)):
        options = np.full((cost.shape[1], BINS + 1), np.inf)
        for candidate, used in enumerate(bins[leaf]):
            if used <= BINS:
                options[candidate, used:] = least[: BINS + 1 - used] + cost[leaf, candidate]
        taken[leaf] = options.argmin(axis=0)
        least = options.min(axis=0)
    if not np.isfinite(least[BINS]):
        raise ValueError("the bins' rounding leaves no choice")
    choice, left = np.empty(len(cost), np.int64), BINS
    for leaf in reversed(range(len(cost))):
        choice[leaf] = taken[leaf, left]
        left -= bins[leaf, choice[leaf]]
    return choice


# The table that is minimised, the one that is limited to what uniform bits have, and how.
METHODS = {
    "fewest bytes": ("nbytes", "error", minimise),
    "fewest, in bins": ("nbytes", "error", binned),
    "least error": ("error", "nbytes", minimise),
    "least, in bins": ("error", "nbytes", binned),
}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--reps", type=int, default=11, help="random problems of each size")
    measure.add_json_option(parser)
    arguments = parser.parse_args()

    rows = []
    print(f"{'leaves':>6}  {'method':<18} {'seconds':<24} {'cost / uniform':<14} largest gap")
    for leaves in (10, 100, 1000, 5000):
        samples = {method: [] for method in METHODS}
        for seed in range(arguments.reps):
            p = problem(leaves, seed)
            uniform = np.full(leaves, UNIFORM - 1)
            for method, (least, limited, solve) in METHODS.items():
                cost, weight = getattr(p, least), getattr(p, limited)
                budget = total(weight, uniform)
                start = time.perf_counter()
                found = solve(cost, weight, budget)
                seconds = time.perf_counter() - start
                choice = found.choice if isinstance(found, Solution) else found
                assert total(weight, choice) <= budget
                gap = found.cost / found.bound - 1 if isinstance(found, Solution) else np.nan
                samples[method].append((seconds, total(cost, choice) / total(cost, uniform), gap))
        for method, sample in samples.items():
            seconds, ratio, gap = np.array(sample).T
            low, median, high = measure.quartiles(seconds)
            print(
                f"{leaves:>6}  {method:<18} {f'{median:.4f} ({low:.4f}-{high:.4f})':<24} "
                f"{np.median(ratio):<14.5f} {'' if np.isnan(gap).any() else f'{gap.max():.1e}'}"
            )
            rows.append(
                {
                    "leaves": leaves,
                    "method": method,
                    "seconds": [low, median, high],
                    "cost_of_uniform": float(np.median(ratio)),
                    "largest_gap": None if np.isnan(gap).any() else float(gap.max()),
                }
            )
    measure.write_json(arguments.json, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
