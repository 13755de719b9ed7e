"""How the benchmarks on shaped links let methods take turns."""

import numpy as np
import pytest

import scripts
from cgx_jax.host import agreement

CALLS, SECONDS = 3, 0.5


@pytest.fixture(scope="module")
def benchmark():
    return scripts.load("benchmarks/tuner.py")


class Clocks:
    """Two ranks: this one takes SECONDS for a call, and the other one twice as long."""

    def __init__(self):
        self.events = []

    def timed(self, call):
        call()
        self.events[-1] = ("timed", self.events[-1][1])
        return SECONDS

    def maximum(self, values):
        self.events.append(("gather", values.size))
        return 2 * values

    def barrier(self):
        self.events.append(("barrier", None))

    def calls(self, count):
        return [lambda i=i: self.events.append(("untimed", i)) for i in range(count)]


@pytest.fixture
def clocks(monkeypatch):
    made = Clocks()
    monkeypatch.setattr(agreement, "maximum", made.maximum)
    return made


def rounds_of(clocks, count):
    """The order of the timed calls in each round, without the one that warms up."""
    order = [i for kind, i in clocks.events if kind == "timed"]
    return np.reshape(order, (-1, count))[1:]


def test_methods_take_turns_in_a_random_order_that_all_ranks_share(benchmark, clocks):
    ranks = [clocks, Clocks()]
    for own in ranks:
        benchmark.turns(own, own.calls(CALLS), 20, 1e9)
    orders = [rounds_of(own, CALLS) for own in ranks]
    assert orders[0].shape == (20, CALLS)
    np.testing.assert_array_equal(*orders)
    np.testing.assert_array_equal(np.sort(orders[0]), np.tile(np.arange(CALLS), (20, 1)))
    assert set(orders[0][:, 0]) == set(range(CALLS))


def test_ranks_gather_nothing_between_two_turns(benchmark, clocks):
    """A rank that gathers would take processors from one that still works."""
    benchmark.turns(clocks, clocks.calls(CALLS), 20, 1e9)
    kinds = [kind for kind, _ in clocks.events]
    first = kinds.index("gather")  # after the round that warms up
    assert kinds[first + 1 :] == ["untimed", "timed"] * CALLS * 20 + ["barrier", "gather"]


@pytest.mark.parametrize("count", [1, CALLS])
def test_of_each_turn_the_second_call_is_timed(benchmark, clocks, count):
    """Unless there is one method, whose memory and options never change."""
    benchmark.turns(clocks, clocks.calls(count), 5, 1e9)
    called = [(kind, i) for kind, i in clocks.events if kind in ("timed", "untimed")]
    if count == 1:
        assert called == [("timed", 0)] * 6
    else:
        assert [kind for kind, _ in called] == ["untimed", "timed"] * count * 6
        assert [i for _, i in called[::2]] == [i for _, i in called[1::2]]


@pytest.mark.parametrize(
    ("seconds", "reps"),
    [
        pytest.param(0, 3, id="the least"),
        pytest.param(7 * 2 * CALLS * 2 * SECONDS, 7, id="as many as fit"),
        pytest.param(1e9, 20, id="the most"),
    ],
)
def test_repeats_fill_the_time(benchmark, clocks, seconds, reps):
    samples = benchmark.turns(clocks, clocks.calls(CALLS), 20, seconds)
    np.testing.assert_array_equal(samples, np.full((reps, CALLS), 2 * SECONDS))
