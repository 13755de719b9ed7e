"""Races of settings on real steps: who takes the next step, and who goes on."""

from __future__ import annotations

from collections.abc import Generator, Sequence

import numpy as np

from cgx_jax.tuning.setting import Setting

# Yields settings that take turns, is sent their f64[rounds, settings] seconds, returns the winner.
Search = Generator[list[Setting], np.ndarray, Setting]
_SURE = 0.75  # the share of rounds in which a setting must beat `lax.psum`, which is exact


def search(psum: Setting, ranked: Sequence[Setting]) -> Search:
    """Races `ranked` settings, halves the field after every race, and races the winner with `psum`.

    All of a setting's rounds count, so the more alike two settings are, the longer they compete.
    """
    field, seconds = list(ranked), np.empty((0, len(ranked)))
    while len(field) > 1:
        seconds = np.concatenate([seconds, (yield field)])
        faster = np.sort(relative(seconds).argsort(kind="stable")[: (len(field) + 1) // 2])
        field, seconds = [field[i] for i in faster], seconds[:, faster]
    last = yield [psum, field[0]]
    return field[0] if np.quantile(last[:, 1] / last[:, 0], _SURE) < 1 else psum


def relative(seconds: np.ndarray) -> np.ndarray:
    """Returns the median of each column's time over its round's mean; f64[rounds, columns].

    Ratios within a round stay the same if the machine is slow in that round. The mean is the
    geometric one, and the result is a logarithm.
    """
    times = np.log(seconds)
    return np.median(times - times.mean(axis=1, keepdims=True), axis=0)


class Turns:
    """`rounds` rounds in which each of `count` settings takes two steps, after one to compile.

    Only the second step is timed. In the first, a setting pays for memory that the previous one has
    just freed, which happens only once in a training. The order is reversed in every second round.
    """

    def __init__(self, count: int, rounds: int) -> None:
        compiling = [(-1, i) for i in range(count)]
        turns = [(r, i) for r in range(rounds) for i in range(count)[:: 1 if r % 2 else -1]]
        self._turns = [*compiling, *((at, i) for r, i in turns for at in (-1, r))]
        self._taken = 0
        self.samples = np.zeros((rounds, count))

    @property
    def done(self) -> bool:
        """Whether every setting has taken all of its steps."""
        return self._taken == len(self._turns)

    @property
    def current(self) -> int:
        """The setting that takes the next step."""
        return self._turns[self._taken][1]

    def record(self, seconds: float) -> None:
        """Records the time of the current setting's step."""
        round_, setting = self._turns[self._taken]
        if round_ >= 0:
            self.samples[round_, setting] = seconds
        self._taken += 1
