"""The solver that knows the links: least predicted time, from what `tune` measured."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np

from cgx_jax.arguments import store_whole
from cgx_jax.choice import auto
from cgx_jax.choice.profile import METHODS, Profile
from cgx_jax.kernels.wire import FUSION_BYTES
from cgx_jax.policies import knapsack
from cgx_jax.policies.solvers import Bounded, Problem

EXACT_BITS = 32


@dataclasses.dataclass(frozen=True)
class LeastTime(Bounded):
    """Least predicted time of the reduction, with the error constraint of `LeastBytes`.

    Measurements cannot tell apart choices whose times are within 5 % of the least. Of these choices
    it takes the one with the least error: large widths where the link hides them, small ones where
    it does not.

    The prediction assumes that leaves of fp32 share fusion buffers of at most `fusion_bytes`, all
    equally full. The time of a leaf under a candidate is its share, by number of values, of the
    time that `profile` has for a buffer with the same bits per value throughout. That is the time
    of the fastest method, including psum; for a candidate of 32 bits it is the time of psum. For
    candidates that rotate or round at random, `auto.estimate` adds to it. Profiles measure
    `Quantize`; other lossy candidates are predicted as a `Quantize` of as many bytes. For a buffer
    of mixed widths the sum is right where time is linear in bits, as it is between measured widths.
    Latency is shared in the same way. The sum ignores that a buffer of only exact leaves is one
    more collective, and it ignores all time outside the reduction.

    Pass the same profile as to `use_profile`, which `exchange="auto"` follows. Raises TypeError for
    anything that is not a profile. `solve` raises ValueError if no choice meets the error limit.
    """

    profile: Profile
    alpha: float = 1.0
    uniform_bits: int = 4
    fusion_bytes: int = FUSION_BYTES

    def __post_init__(self) -> None:
        if not isinstance(self.profile, Profile):
            raise TypeError(
                f"LeastTime: profile={self.profile!r} is not a Profile, the source of its times; "
                "pass what cgx_jax.tune or use_profile returns, or use LeastBytes()."
            )
        super().__post_init__()
        store_whole(self, "fusion_bytes", 4)

    def solve(self, problem: Problem) -> np.ndarray:
        limit = self.limit(problem, problem.error)
        seconds = self.seconds(problem)
        fastest = knapsack.minimise(seconds, problem.error, limit)
        enough = knapsack.total(seconds, fastest) / (1 - auto.LEAST_GAIN)
        finest = knapsack.minimise(problem.error, seconds, enough)
        errors = [knapsack.total(problem.error, choice) for choice in (fastest, finest)]
        return finest if errors[1] <= errors[0] else fastest

    def seconds(self, problem: Problem) -> np.ndarray:
        """Returns predicted seconds of leaves under candidates, float64[leaves, candidates]."""
        values = int(problem.values.sum())
        if not values:
            return np.zeros(problem.nbytes.shape)
        buffers = -(-4 * values // self.fusion_bytes)
        full = -(-values // buffers)

        @functools.cache
        def of_value(mean_bits: float, exact: bool, noisy: bool, rotated: bool) -> float:
            load = auto.Load(full, mean_bits, full * noisy, full * rotated)
            usable = () if exact else METHODS
            method = auto.fastest(self.profile, usable, load)
            return auto.estimate(self.profile, method, load) / full

        exact = problem.bits == EXACT_BITS
        kinds = [
            tuple(map(bool, kind))
            for kind in zip(exact, problem.noisy, problem.rotated, strict=True)
        ]
        return np.array(
            [
                [n * of_value(8 * b / max(1, n), *kind) for b, kind in zip(row, kinds, strict=True)]
                for n, row in zip(problem.values.tolist(), problem.nbytes.tolist(), strict=True)
            ]
        )
