"""The knapsack against all possible choices, at the edge of rounding, and cut short."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cgx_jax.policies import knapsack
from cgx_jax.policies.knapsack import minimise, total

NUMBERS = {
    "few": st.integers(0, 3),
    "many": st.integers(0, 10**6),
    "tenths, whose sums round": st.integers(0, 9).map(lambda n: n * 0.1),
    "decades": st.tuples(st.integers(0, 9), st.integers(-20, 20)).map(lambda t: t[0] * 4.0 ** t[1]),
}


@st.composite
def instances(draw):
    leaves, candidates = draw(st.integers(1, 5)), draw(st.integers(1, 5))
    tables = []
    for _ in range(2):
        numbers = NUMBERS[draw(st.sampled_from(sorted(NUMBERS)))]
        row = st.lists(numbers, min_size=candidates, max_size=candidates)
        table = draw(st.lists(row, min_size=leaves, max_size=leaves))
        if draw(st.booleans()):
            table[-1] = table[0]
        tables.append(np.array(table))
    cost, weight = tables
    choice = draw(st.lists(st.integers(0, candidates - 1), min_size=leaves, max_size=leaves))
    budget = total(weight, np.array(choice)) * draw(st.sampled_from([0.5, 0.9, 1, 1.3]))
    return cost, weight, budget


def every_choice(cost, weight, budget):
    """Costs of all choices within the budget."""
    all_choices = map(np.array, itertools.product(range(cost.shape[1]), repeat=len(cost)))
    return [total(cost, c) for c in all_choices if total(weight, c) <= budget]


@settings(deadline=None, max_examples=200, derandomize=True)
@given(instances())
def test_the_knapsack_finds_the_least_of_all_choices(instance):
    cost, weight, budget = instance
    costs = every_choice(*instance)
    if not costs:
        with pytest.raises(ValueError, match="raise the budget"):
            minimise(cost, weight, budget)
        return
    found = minimise(cost, weight, budget)
    assert found.weight == total(weight, found.choice) <= budget
    assert found.cost == total(cost, found.choice)
    assert found.cost == min(costs)
    # Float totals may round across the budget; the bound then counts choices just over it.
    assert found.bound == found.cost if weight.dtype.kind == "i" else found.bound <= found.cost


def test_a_choice_that_rounding_alone_would_let_in_is_refused():
    cost, weight = np.array([[0, 5], [0, 3]]), np.array([[0.1, 0.0], [0.2, 0.0]])
    found = minimise(cost, weight, 0.3)  # 0.1 + 0.2 rounds to more
    assert (found.cost, found.weight) == (3, 0.1)
    assert found.bound <= 3
    assert minimise(cost, weight, 0.1 + 0.2).cost == 0
    assert minimise(cost, weight, 0.0).cost == 8


@pytest.mark.parametrize("limit", ["FRONT", "EFFORT"])
def test_what_is_cut_short_is_within_the_budget_and_states_an_honest_bound(limit, monkeypatch):
    rng = np.random.default_rng(0)
    weight = rng.integers(1, 10**6, (40, 8))
    cost = 10**6 - weight  # as hard as subset sums
    monkeypatch.setattr(knapsack, limit, 16)
    found = minimise(cost, weight, 40 * 300_000 + 1)
    assert found.weight <= 40 * 300_000 + 1
    assert found.cost >= 40 * 700_000 - 1 - 1e-3
    assert found.bound <= 40 * 700_000 < 1.001 * found.bound
    assert found.cost < 1.001 * found.bound
