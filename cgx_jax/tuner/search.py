"""The search of a tuner: which settings take turns, one trial after the other, and which wins."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

import numpy as np

from cgx_jax.reductions import GatherSum
from cgx_jax.tuner.candidates import Candidate, other_size
from cgx_jax.tuner.setting import Setting
from cgx_jax.tuner.trials import TIE, TURN, best, challenges, relative

# Yields settings that take turns, is sent their f64[rounds, settings] seconds, returns the best.
Search = Generator[list[Setting], np.ndarray, Setting]
LEAST_SECONDS, MOST_BLOCKS = 5.0, 6  # of a comparison; a block is the rounds of one trial


def search(
    psum: Setting, ranked: Sequence[Setting], found: Sequence[Candidate], compilations: int
) -> Search:
    """Searches `ranked` settings, the most promising first, by at most `compilations` programs.

    `found` are the candidates. `psum` comes last: its turns take longest and vary most.
    """
    programs = compilations - 1  # besides the one of lax.psum
    by_way: dict[Any, Setting] = {}
    for setting in ranked:
        by_way.setdefault(setting.way, setting)
    tried = list(by_way.values())[:programs]
    if len(tried) == programs > 1 and any(other_size(found, x, tried) for x in tried[:-1]):
        tried.pop()  # The last program is for another size of the fastest one's buffers.
    first = tried[0]
    if len(tried) > 1:
        first = _fastest_way(tried, (yield from _compared(tried)))
    similar = [first]
    while len(tried) < programs:
        size = other_size(found, first, tried)
        if size is None:
            break
        tried.append(size)
        similar.append(size)
    similar += first.nearby()
    if len(similar) > 1:
        fastest = similar[relative((yield from _compared(similar))).argmin()]
        # The best of many is partly luck, so it has to be faster again.
        if fastest != first and challenges((yield from _compared([first, fastest], blocks=2))):
            first = fastest
    last = [psum, first]
    return last[best((yield from _compared(last)))]


def _compared(
    settings: list[Setting], blocks: int = 1
) -> Generator[list[Setting], np.ndarray, np.ndarray]:
    """Yields settings for `blocks` trials or more, and returns the seconds of all of them.

    Short steps vary most, since other work of a machine delays them by more of their time. More
    rounds of them cost little.
    """
    done: list[np.ndarray] = []
    while len(done) < blocks or (len(done) < MOST_BLOCKS and TURN * np.sum(done) < LEAST_SECONDS):
        done.append((yield settings))
    return np.concatenate(done)


def _fastest_way(tried: Sequence[Setting], seconds: np.ndarray) -> Setting:
    """Returns the fastest setting; of those that tie with it, one that encodes once, if any does.

    No other reduction has less error than `GatherSum`.
    """
    times = relative(seconds)
    ties = [i for i, time in enumerate(times) if time <= times.min() + TIE]
    return tried[min(ties, key=lambda i: (not isinstance(tried[i].reduction, GatherSum), times[i]))]
