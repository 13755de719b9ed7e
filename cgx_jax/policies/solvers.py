"""Solvers: choose a candidate for each leaf by its cost and error under every candidate."""

from __future__ import annotations

import abc
import dataclasses
import math
import warnings
from typing import Any

import numpy as np

from cgx_jax.arguments import store_whole
from cgx_jax.policies import knapsack

CLUSTER_STEPS = 100  # more than it takes


@dataclasses.dataclass(frozen=True, eq=False)
class Problem:
    """What a solver is given: the numbers by which it chooses a candidate for every leaf.

    * `values`, int64[leaves]: how many values a leaf has.
    * `norm`, float64[leaves]: the L2 norm of its gradient.
    * `bits`, int64[candidates]: the candidates' widths (`Compressor.width`), ascending. Several
      candidates may share a width, and 32 stands for an exact leaf.
    * `nbytes`, int64[leaves, candidates]: the bytes of the payload with its metadata.
    * `error`, float64[leaves, candidates]: the squared L2 error.
    * `noisy` and `rotated`, bool[candidates]: which candidates round at random and which rotate,
      since both take time. By default none does.
    * `change`: the share by which the norm of all gradients differs from the norm at the last look;
      None at the first look.

    Anything that converts to these is accepted. Raises ValueError for shapes that disagree and for
    numbers that are negative or not finite.
    """

    values: np.ndarray
    norm: np.ndarray
    bits: np.ndarray
    nbytes: np.ndarray
    error: np.ndarray
    noisy: Any = False
    rotated: Any = False
    change: float | None = None

    def __post_init__(self) -> None:
        leaves, candidates = np.size(self.values), np.size(self.bits)
        for name in ("noisy", "rotated"):
            kind = np.asarray(getattr(self, name), bool)
            if kind.shape not in ((), (candidates,)):
                raise ValueError(
                    f"Problem: {name} has the shape {list(kind.shape)}; give each of the "
                    f"{candidates} candidates one bool, or one for all."
                )
            object.__setattr__(self, name, np.broadcast_to(kind, (candidates,)))
        shapes = {
            "values": (leaves,),
            "norm": (leaves,),
            "bits": (candidates,),
            "nbytes": (leaves, candidates),
            "error": (leaves, candidates),
        }
        for name, shape in shapes.items():
            given = np.asarray(getattr(self, name))
            if given.shape != shape:
                raise ValueError(
                    f"Problem: {name} has the shape {list(given.shape)}, but {leaves} values and "
                    f"{candidates} bits need {list(shape)}; pass numbers of that shape."
                )
            whole = name not in ("norm", "error")
            if whole and given.size and given.dtype.kind not in "iu":
                raise ValueError(
                    f"Problem: {name} is {given.dtype}, but counts must be whole; pass integers."
                )
            wrong = np.argwhere(~(np.isfinite(given) & (given >= 0)))
            if wrong.size:
                place = tuple(wrong[0].tolist())
                raise ValueError(
                    f"Problem: {name}{list(place)}={given[place]} must be finite and at least 0; "
                    "leave that leaf or step out of the statistics."
                )
            object.__setattr__(self, name, given.astype(np.int64 if whole else np.float64))
        if self.change is not None and not 0 <= self.change < np.inf:
            raise ValueError(
                f"Problem: change={self.change} must be finite and at least 0; pass None where no "
                "earlier norm is known."
            )
        if not candidates or self.bits[0] < 1 or (np.diff(self.bits) < 0).any():
            raise ValueError(
                f"Problem: bits={self.bits.tolist()} must be widths of 1 or more, ascending; sort "
                "the candidates by width."
            )


class Solver(abc.ABC):
    """A rule that gives every leaf a candidate: static, hashable, equal by value.

    Subclasses are frozen dataclasses of their options. `solve` is a pure function of the `Problem`:
    the same statistics give the same answer everywhere. `check` raises ValueError for candidates
    that `solve` could not work with.
    """

    @abc.abstractmethod
    def solve(self, problem: Problem) -> np.ndarray:
        """The chosen candidates, int64[leaves]: indices into `problem.bits`."""

    def check(self, bits: np.ndarray) -> None:
        """Raises ValueError if `solve` could not work with candidates of these widths, ascending.

        By default it works with any.
        """
        return


def check_positive(caller: str, name: str, value: Any) -> None:
    """Raises ValueError unless `value` is a finite number above 0."""
    if not (isinstance(value, (int, float)) and math.isfinite(value) and value > 0):
        raise ValueError(f"{caller}: {name}={value!r} is not a finite number above 0.")


def of_width(caller: str, name: str, value: int, bits: np.ndarray) -> list[int]:
    """Indices of the candidates of width `value`; raises ValueError when there is none.

    `bits` are the widths of all candidates, and `name` is the option that asks for this one.
    """
    found = np.flatnonzero(bits == value).tolist()
    if not found:
        raise ValueError(
            f"{caller}: {name}={value} is not among the candidates, which have {bits.tolist()} "
            "bits; pass one of these, or add the candidate."
        )
    return found


def widths(solver: Any, bits: np.ndarray) -> slice:
    """The candidates from the first of width `least` to the last of width `most`."""
    caller = type(solver).__name__
    first = of_width(caller, "least", solver.least, bits)[0]
    return slice(first, of_width(caller, "most", solver.most, bits)[-1] + 1)


def store_range(solver: Any) -> None:
    """Stores the options `least` and `most` as ints; raises unless they are widths in order."""
    for name in ("least", "most"):
        store_whole(solver, name, 1)
    if solver.least > solver.most:
        raise ValueError(
            f"{type(solver).__name__}: least={solver.least} exceeds most={solver.most}; swap them, "
            "or make them equal for one width."
        )


class Bounded(Solver):
    """A solver with an error limit: `alpha` times the error of `uniform_bits` on every leaf."""

    alpha: float
    uniform_bits: int

    def __post_init__(self) -> None:
        check_positive(type(self).__name__, "alpha", self.alpha)
        store_whole(self, "uniform_bits", 1)

    def check(self, bits: np.ndarray) -> None:
        of_width(type(self).__name__, "uniform_bits", self.uniform_bits, bits)

    def limit(self, problem: Problem, error: np.ndarray) -> float:
        """Returns the limit of the squared error on all leaves.

        Of several candidates of the width `uniform_bits`, the first one counts. Raises ValueError
        if no choice in `error`, of the candidates that the solver may take, is within the limit.
        """
        caller = type(self).__name__
        uniform = of_width(caller, "uniform_bits", self.uniform_bits, problem.bits)[0]
        of_uniform = math.fsum(problem.error[:, uniform])
        limit = self.alpha * of_uniform
        least = math.fsum(error.min(axis=1))
        if least > limit:
            enough = least / of_uniform if of_uniform else math.inf
            remedy = f"pass an alpha of {_up(enough)} or more, or " if math.isfinite(enough) else ""
            raise ValueError(
                f"{caller}: alpha={self.alpha} allows a squared error of {limit:.4g}, but no "
                f"choice has less than {least:.4g}; {remedy}allow wider candidates."
            )
        return limit


def _up(number: float) -> str:
    """Formats `number`, rounded up to four digits."""
    digits = 3 - math.floor(math.log10(number))
    return f"{math.ceil(number * 10**digits * (1 - 1e-12)) / 10**digits:.4g}"


@dataclasses.dataclass(frozen=True)
class _ByWidth(Solver):
    """A solver that sees nothing of candidates but their widths, from `least` to `most` bits."""

    least: int = 2
    most: int = 4

    def __post_init__(self) -> None:
        store_range(self)

    def check(self, bits: np.ndarray) -> None:
        self.allowed(bits)

    def allowed(self, bits: np.ndarray) -> slice:
        """The candidates in the range; raises ValueError if two have the same width."""
        allowed = widths(self, bits)
        twice = bits[allowed][1:][np.diff(bits[allowed]) == 0]
        if twice.size:
            raise ValueError(
                f"{type(self).__name__}: it chooses only by width, but several candidates have "
                f"{twice[0]} bits; pass one candidate of each width from {self.least} to "
                f"{self.most}, or use LeastBytes() or LeastError(), which weigh errors."
            )
        return allowed


@dataclasses.dataclass(frozen=True)
class Linear(_ByWidth):
    """`most` bits for the leaf of the largest norm, one bit less per halving, down to `least`.

    Widths round up to a candidate's. There is no error constraint. Raises ValueError if two
    candidates between the two ends have the same width, and for ends that are no candidates'
    widths. Source: CGX (Markov et al., Middleware 2022), adaptive compression; there the norm is
    only of the largest values.
    """

    def solve(self, problem: Problem) -> np.ndarray:
        self.allowed(problem.bits)
        largest = problem.norm.max(initial=np.finfo(float).tiny)
        with np.errstate(divide="ignore"):
            width = np.ceil(self.most + np.log2(problem.norm / largest))
        return np.searchsorted(problem.bits, np.clip(width, self.least, self.most))


@dataclasses.dataclass(frozen=True)
class KMeans(_ByWidth):
    """Clusters of leaves of similar size and norm: the larger a cluster's norm, the wider its code.

    There is one cluster for every candidate from `least` to `most` bits. If leaves coincide, there
    are fewer clusters, which take the widest candidates. There is no error constraint: only the
    range limits the error. Raises ValueError as `Linear` does. Source: CGX (Markov et al.,
    Middleware 2022), adaptive compression; there the norm is only of the largest values, and
    starting centroids are random.
    """

    def solve(self, problem: Problem) -> np.ndarray:
        from scipy.cluster.vq import kmeans2  # jax requires SciPy; importing it takes a while

        allowed = self.allowed(problem.bits)
        if not len(problem.values):
            return np.zeros(0, np.int64)
        points = np.stack([problem.norm, problem.values], axis=1)
        spread = points.std(axis=0)
        points /= np.where(spread > 0, spread, 1)
        # No random start: leaves evenly spaced by norm are the same in any order and on any rank.
        distinct = np.unique(points, axis=0)
        count = min(len(distinct), allowed.stop - allowed.start)
        start = distinct[np.linspace(0, len(distinct) - 1, count).astype(int)]
        with warnings.catch_warnings():  # a cluster without leaves does no harm
            warnings.simplefilter("ignore", UserWarning)
            centroids, cluster = kmeans2(points, start, CLUSTER_STEPS, minit="matrix")
        rank = centroids[:, 0].argsort(kind="stable").argsort()
        return allowed.stop - count + rank[cluster]


@dataclasses.dataclass(frozen=True)
class LeastBytes(Bounded):
    """Fewest payload bytes with at most `alpha` times the error of `uniform_bits` on every leaf.

    The error is the sum over leaves of squared L2 errors, which is that of the whole gradient.
    `uniform_bits` is the width of a candidate (`Compressor.width`); of several, the first one
    counts. Raises ValueError for an `alpha` that is not above 0 and for a width that no candidate
    has. `solve` raises ValueError if no choice meets the error limit. Source: L-GreCo (Alimohammadi
    et al., arXiv 2210.17357), which sums unsquared errors, in 10,000 bins; `knapsack` needs no
    bins. The bytes are not proved to be the fewest, but never more than those of a uniform width
    within the limit.
    """

    alpha: float = 1.0
    uniform_bits: int = 4

    def solve(self, problem: Problem) -> np.ndarray:
        limit = self.limit(problem, problem.error)
        return knapsack.minimise(problem.nbytes, problem.error, limit)


@dataclasses.dataclass(frozen=True)
class LeastError(Solver):
    """Least summed squared error with at most `bits_per_value` payload bits per value on average.

    Payload bits include the buckets' metadata, as in `Problem.nbytes`. `solve` raises ValueError if
    no choice is so small. Source: the dual of L-GreCo's problem (arXiv 2210.17357).
    """

    bits_per_value: float

    def __post_init__(self) -> None:
        check_positive("LeastError", "bits_per_value", self.bits_per_value)

    def solve(self, problem: Problem) -> np.ndarray:
        budget = math.floor(self.bits_per_value * int(problem.values.sum()) / 8)
        least = int(problem.nbytes.min(axis=1).sum())
        if least > budget:
            needed = 8 * least / max(1, int(problem.values.sum()))
            raise ValueError(
                f"LeastError: bits_per_value={self.bits_per_value} allows {budget} bytes, but "
                f"no choice needs fewer than {least}; pass {_up(needed)} or more, or add "
                "narrower candidates."
            )
        return knapsack.minimise(problem.error, problem.nbytes, budget)


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
