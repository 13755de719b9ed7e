"""Trials of settings on real steps: in which order, and what their times say."""

from __future__ import annotations

import numpy as np

# Of rounds in which other options of the same program must be faster. They differ by little, so
# three of four, which is enough beside `lax.psum`, would be met by chance.
OF_OPTIONS = 0.9


class Trials:
    """`rounds` rounds in which each of `count` candidates takes two steps, after one to compile.

    The second of the two is timed: in the first, memory that the candidate before has freed is new
    to this one, which in training happens once. Candidates take turns, in the other direction in
    every second round, so what slows a machine down for some steps meets all of them.
    """

    def __init__(self, count: int, rounds: int) -> None:
        compiling = [(-1, i) for i in range(count)]
        turns = [(r, i) for r in range(rounds) for i in range(count)[:: 1 if r % 2 else -1]]
        self._turns = [*compiling, *((at, i) for r, i in turns for at in (-1, r))]
        self._taken = 0
        self.samples = np.zeros((rounds, count))

    @property
    def done(self) -> bool:
        """Whether every candidate has taken all of its steps."""
        return self._taken == len(self._turns)

    @property
    def current(self) -> int:
        """The candidate that takes the next step."""
        return self._turns[self._taken][1]

    def record(self, seconds: float) -> None:
        """Notes the time of the current candidate's step."""
        round_, candidate = self._turns[self._taken]
        if round_ >= 0:
            self.samples[round_, candidate] = seconds
        self._taken += 1


def best(samples: np.ndarray, rounds: float = 0.75) -> int:
    """The fastest candidate of f64[rounds, candidates], of those surely faster than the first.

    A candidate is surely faster if it took less time than the first in the given part of the
    rounds: that quantile of its time over the first's in the same round is below 1. The least
    median of these ratios wins. Without any such candidate it is 0.
    """
    ratios = samples[:, 1:] / samples[:, :1]
    sure = np.quantile(ratios, rounds, axis=0) < 1
    medians = np.where(sure, np.median(ratios, axis=0), np.inf)
    return 1 + int(medians.argmin()) if sure.any() else 0
