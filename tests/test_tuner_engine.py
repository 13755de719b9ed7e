"""The descent over the options of the MPI engine: what it compares, and when it stops."""

import numpy as np
import pytest

from cgx_jax.exchanges import Mpi
from cgx_jax.tuning import engine
from cgx_jax.tuning.engine import descend

START = Mpi(segment_bytes=1 << 17, window=4, threads=1)
CHUNK = 1 << 21


def away(engine):
    """Seconds, by how far an engine is from the best one; what a slow spell adds meets all."""
    best = Mpi(segment_bytes=1 << 15, window=8, threads=2)
    pairs = [(getattr(engine, k), getattr(best, k)) for k in ("segment_bytes", "window", "threads")]
    return 1 + sum(abs(np.log(a / b)) for a, b in pairs)


def run(seconds=away, chunk=CHUNK, cores=4, races=3):
    tried = []

    def measure(engines):
        tried.append(engines)
        spells = np.array([[1.0], [1.0], [9.0], [1.0], [1.0]])
        return spells * [[seconds(e) for e in engines]] if len(tried) <= races else None

    return descend(START, chunk, cores, measure), tried


def test_each_option_goes_to_its_fastest_value_and_the_next_starts_there():
    found, tried = run()
    assert found == Mpi(segment_bytes=1 << 15, window=8, threads=2)
    assert [engines[0] for engines in tried] == [START, Mpi(1 << 15, 4, 1), Mpi(1 << 15, 8, 1)]
    assert [len(engines) for engines in tried] == [3, 3, 3]


# Bytes of a chunk, cores of a rank, and how many values of each option are measured.
SAME = {
    "a rank with one core has no use for threads": (CHUNK, 1, [3, 3]),
    "of two cores it uses at most two": (CHUNK, 2, [3, 3, 2]),
    "two segments, and so one window": (1 << 18, 4, [3, 3]),
    "one segment whatever the options": (1 << 15, 4, [3]),
}


@pytest.mark.parametrize("name", SAME)
def test_what_cannot_differ_is_not_measured(name):
    chunk, cores, expected = SAME[name]
    found, tried = run(lambda engine: 1.0, chunk, cores)
    assert found == START  # nothing is faster
    assert [len(engines) for engines in tried] == expected


@pytest.mark.parametrize(("races", "found"), [(0, START), (1, Mpi(1 << 15, 4, 1))])
def test_without_time_left_the_descent_ends_where_it_is(races, found):
    assert run(races=races)[0] == found


class Links:
    """A simulated link: every call and every start of an engine takes its time of a clock."""

    world, axis = 2, "data"

    def __init__(self, speed):
        self.now, self.speed = 0.0, speed

    def all_reduce(self, compressor, exchange):
        return None

    def place(self, value_of, values):
        return np.zeros((self.world, values), np.float32)

    def seconds(self, functions, x, rounds):
        self.now += rounds * x.nbytes / self.speed
        return np.full((rounds, 1), x.nbytes / self.speed)


@pytest.mark.parametrize("start", [0.0, 0.1])  # of an engine
@pytest.mark.parametrize("speed", [1e6, 1e8, 1e10])
def test_a_descent_takes_no_longer_than_it_is_given(monkeypatch, speed, start):
    """But for the first calls of a size, which say how long it takes."""
    for budget in (0.01, 1.0, 5.0, 30.0, 100.0):
        links = Links(speed)

        def run_with(links, engine):
            links.now += start

        monkeypatch.setattr(engine, "_run_with", run_with)
        engine.tune_engine(links, lambda links=links, budget=budget: budget - links.now)
        first = sum(2 * links.world * size / speed for size in engine.SIZES)
        assert links.now <= budget + first + 2 * start
