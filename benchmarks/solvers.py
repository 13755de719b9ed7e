"""The policies' solvers beside SciPy's, on the same random problems.

    python benchmarks/solvers.py

The library declares no SciPy, but jax requires it (jax 0.10.2: scipy>=1.14), so SciPy is installed
wherever the library is. The library therefore has a solver of its own only where that solver wins.

* The knapsack behind LeastBytes and LeastError, beside `scipy.optimize.milp` (HiGHS) and beside
  dynamic programming over 10,000 bins. "milp" stops at HiGHS's default gap. "milp, gap 0" stops
  when it has proved the least cost. Both stop after LIMIT seconds.
* The clusters behind KMeans, beside `scipy.cluster.vq.kmeans2`. "kmeans2" starts from the same
  centroids and steps until no point moves. "kmeans2 ++" has SciPy's own start and number of steps.

Leaf sizes and gradient scales are log-normal, widths are 1 to 8 bits, the squared error is about
4**-bits of the leaf's squared norm. The quantity that is not minimized has the budget of uniform
4 bits.

All methods solve each problem in turn. The columns hold, over the problems of one size:

* seconds: the median (and quartiles)
* times ours: the same, for the time divided by that of the library's solver on the same problem
* cost: the median, as a multiple of the uniform width's cost; for clusters, the summed squared
  distances as a share of those of one cluster
* used: the median share of the budget
* over: the number of problems whose choice is over the budget
* largest gap: how far any of the costs can be above the least possible cost, at most
"""

import argparse
import functools
import math
import sys
import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import scipy
from scipy.cluster.vq import kmeans2
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

import measure
from cgx_jax.policies.knapsack import Solution, minimise, total
from cgx_jax.policies.problem import Problem
from cgx_jax.policies.solvers import LLOYD_STEPS, KMeans, far_apart, features, lloyd
from cgx_jax.wire import leaf_bytes

BITS = np.arange(1, 9)
UNIFORM = 4
BINS = 10_000
LIMIT = 10  # seconds
CLUSTERS = KMeans().most - KMeans().least + 1


def problem(leaves: int, seed: int) -> Problem:
    rng = np.random.default_rng(seed)
    values = np.maximum(1, np.exp(rng.normal(10, 2, leaves))).astype(np.int64)
    norm = np.sqrt(values) * np.exp(rng.normal(-6, 1.5, leaves))
    error = np.outer(norm**2, 4.0**-BITS) * np.exp(rng.normal(0, 0.1, (leaves, len(BITS))))
    nbytes = np.array([[leaf_bytes(int(v), int(b), 512) for b in BITS] for v in values])
    return Problem(values, norm, BITS, nbytes, error)


def binned(cost: np.ndarray, weight: np.ndarray, budget: float) -> np.ndarray:
    """Minimizes the cost by dynamic programming over BINS of weight; weights are rounded up."""
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


def by_milp(
    cost: np.ndarray, weight: np.ndarray, budget: float, gap: float | None = None
) -> Solution:
    """Solves what `minimise` solves by `scipy.optimize.milp`: one binary variable per candidate.

    It stops at the relative `gap` (None: HiGHS's default), or at the best choice after LIMIT
    seconds. HiGHS's tolerances may let in a choice that is over the budget by a little.
    """
    candidates = cost.shape[1]
    lightest = weight.argmin(axis=1)
    # HiGHS's tolerances are absolute, about 1e-6: powers of 2 make them small beside the totals.
    room = 20 - math.frexp(budget)[1]
    up = 0 if cost.dtype.kind == "i" else 30 - math.frexp(total(cost, lightest))[1]
    fits = weight <= budget
    ones = np.ones(cost.size)
    each = csr_array((ones, np.arange(cost.size), np.arange(0, cost.size + 1, candidates)))
    weights = np.ldexp(np.where(fits, weight, 0).astype(float), room)
    found = milp(
        np.ldexp(cost.astype(float), up).ravel(),
        integrality=ones,
        bounds=Bounds(0, fits.ravel().astype(float)),
        constraints=[
            LinearConstraint(each, 1, 1),
            LinearConstraint(weights.reshape(1, -1), -np.inf, math.ldexp(budget, room)),
        ],
        options={"time_limit": LIMIT} | ({} if gap is None else {"mip_rel_gap": gap}),
    )
    choice = lightest if found.x is None else found.x.reshape(cost.shape).argmax(axis=1)
    bound = total(cost, cost.argmin(axis=1))
    if found.mip_dual_bound is not None:
        bound = max(bound, math.ldexp(found.mip_dual_bound, -up))
    least = total(cost, choice)
    return Solution(choice, least, total(weight, choice), min(bound, least))


def by_lloyd(points: np.ndarray, most: int) -> np.ndarray:
    """The clusters of `KMeans`."""
    return lloyd(points, far_apart(points, most))[0]


def by_kmeans2(points: np.ndarray, most: int) -> np.ndarray:
    """The same, with one-step calls of `kmeans2` in a loop, because it has no stopping rule."""
    centroids, before = far_apart(points, most), None
    for _ in range(LLOYD_STEPS):
        centroids, cluster = kmeans2(points, centroids, iter=1, minit="matrix")
        if before is not None and (cluster == before).all():
            break
        before = cluster
    return cluster


def by_kmeans2_alone(points: np.ndarray, most: int) -> np.ndarray:
    return kmeans2(points, most, minit="++", rng=0)[1]


def distances(points: np.ndarray, cluster: np.ndarray) -> float:
    """The summed squared distances of points to the means of their clusters."""
    each = [points[cluster == label] for label in np.unique(cluster)]
    return math.fsum(((own - own.mean(axis=0)) ** 2).sum() for own in each)


# The table that is minimized, and the one that is limited to what uniform bits have.
KNAPSACKS = {"fewest bytes": ("nbytes", "error"), "least error": ("error", "nbytes")}
# The library's way has no name.
KNAPSACK_WAYS: dict[str, Callable] = {
    "": minimise,
    "in bins": binned,
    "milp": by_milp,
    "milp, gap 0": functools.partial(by_milp, gap=0.0),
}
CLUSTER_WAYS: dict[str, Callable] = {
    "": by_lloyd,
    "kmeans2": by_kmeans2,
    "kmeans2 ++": by_kmeans2_alone,
}


class Sample(NamedTuple):
    """One problem solved by one method; `used` is a share of the budget, NaN means no value."""

    seconds: float
    cost: float
    used: float = math.nan
    over: float = math.nan
    gap: float = math.nan


def samples_of(p: Problem) -> dict[tuple[str, str], Sample]:
    """Solves the problem by every method; returns samples by (problem, way)."""
    samples = {}
    uniform = np.full(len(p.values), UNIFORM - 1)
    for name, (least, limited) in KNAPSACKS.items():
        cost, weight = getattr(p, least), getattr(p, limited)
        budget = total(weight, uniform)
        for way, solve in KNAPSACK_WAYS.items():
            start = time.perf_counter()
            found = solve(cost, weight, budget)
            seconds = time.perf_counter() - start
            proved = isinstance(found, Solution)
            choice = found.choice if proved else found
            used = total(weight, choice)
            samples[name, way] = Sample(
                seconds,
                total(cost, choice) / total(cost, uniform),
                used / budget,
                used > budget,
                found.cost / found.bound - 1 if proved else math.nan,
            )
    points = features(p)
    of_one = distances(points, np.zeros(len(points)))
    for way, solve in CLUSTER_WAYS.items():
        start = time.perf_counter()
        cluster = solve(points, CLUSTERS)
        seconds = time.perf_counter() - start
        samples["clusters", way] = Sample(seconds, distances(points, cluster) / of_one)
    return samples


def known(number: float) -> float | None:
    return None if math.isnan(number) else float(number)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--reps", type=int, default=11, help="random problems of each size")
    measure.add_json_option(parser)
    arguments = parser.parse_args()

    rows = []
    print(
        f"{'leaves':>6}  {'method':<26} {'seconds':<27} {'times ours':<24} {'cost':<9} "
        f"{'used':<9} {'over':<4} largest gap"
    )
    for leaves in (10, 100, 1000, 5000):
        solved = [samples_of(problem(leaves, seed)) for seed in range(arguments.reps)]
        for name, way in solved[0]:
            own = Sample(*np.array([samples[name, way] for samples in solved]).T)
            ours = np.array([samples[name, ""].seconds for samples in solved])
            row = {
                "leaves": leaves,
                "method": f"{name}, {way}" if way else name,
                "seconds": measure.quartiles(own.seconds),
                "over_ours": measure.quartiles(own.seconds / ours),
                "cost": float(np.median(own.cost)),
                "used": known(np.median(own.used)),
                "over_budget": known(own.over.sum()),
                "largest_gap": known(own.gap.max()),
                "scipy": scipy.__version__,
            }
            rows.append(row)
            (low, median, high), (least, ratio, most) = row["seconds"], row["over_ours"]
            cells = [
                "" if row[key] is None else format(row[key], spec)
                for key, spec in (("used", ".5f"), ("over_budget", ".0f"), ("largest_gap", ".1e"))
            ]
            print(
                f"{leaves:>6}  {row['method']:<26} "
                f"{f'{median:.4f} ({low:.4f}-{high:.4f})':<27} "
                f"{f'{ratio:.2f} ({least:.2f}-{most:.2f})':<24} {row['cost']:<9.5f} "
                f"{cells[0]:<9} {cells[1]:<4} {cells[2]}"
            )
    measure.write_json(arguments.json, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
