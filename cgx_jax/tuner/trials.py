"""Trials of settings on real steps: their order, and what their times say."""

from __future__ import annotations

import numpy as np

# The share of rounds in which the best candidate must be faster than the first one.
_ROUNDS = 0.75
# Similar settings differ by little and would pass that test by chance. They must be faster in more
# rounds, or by more.
_ROUNDS_OF_SIMILAR = 0.9
_GAIN_OF_SIMILAR = 0.05
TIE = 0.02  # relative medians of a few rounds differ by as much for no reason
TURN = 2  # steps


class Trials:
    """`rounds` rounds in which each of `count` candidates takes two steps, after one to compile.

    Only the second step is timed. In the first, a candidate pays for memory that the previous one
    has just freed, which happens only once in a training. Candidates take turns, in reverse order
    in every second round, so a slow period of the machine affects all of them.
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
        """Records the time of the current candidate's step."""
        round_, candidate = self._turns[self._taken]
        if round_ >= 0:
            self.samples[round_, candidate] = seconds
        self._taken += 1


def relative(samples: np.ndarray) -> np.ndarray:
    """Returns the median of each candidate's time over its round's mean; f64[rounds, candidates].

    The mean is the geometric one, and the result is a logarithm.
    """
    times = np.log(samples)
    return np.median(times - times.mean(axis=1, keepdims=True), axis=0)


def challenges(samples: np.ndarray) -> bool:
    """Whether the second of f64[rounds, 2] is faster than the first in surely most rounds.

    Of two that are equally fast, the second one passes in one of ten trials.
    """
    rounds = len(samples)
    wins = np.count_nonzero(samples[:, 1] < samples[:, 0])
    return bool(wins > rounds / 2 + 1.3 * np.sqrt(rounds) / 2)


def best(samples: np.ndarray, *, similar: bool = False) -> int:
    """Returns the fastest of f64[rounds, candidates] that is surely faster than the first.

    A candidate is surely faster if it took less time than the first in three rounds of four.
    `similar` says that candidates are one way to reduce, with other options or buffers of another
    size. One of them must then be faster in nine rounds of ten, or in three of four with a median
    that is 5 % less. Returns 0 if no candidate is surely faster than the first.
    """
    ratios = samples[:, 1:] / samples[:, :1]
    sure = np.quantile(ratios, _ROUNDS, axis=0) < 1
    if similar:
        often = np.quantile(ratios, _ROUNDS_OF_SIMILAR, axis=0) < 1
        sure &= often | (np.median(ratios, axis=0) < 1 - _GAIN_OF_SIMILAR)
    if not sure.any():
        return 0
    # The times of the first one say nothing about these, so they must add no noise either.
    return 1 + int(np.flatnonzero(sure)[relative(samples[:, 1:][:, sure]).argmin()])
