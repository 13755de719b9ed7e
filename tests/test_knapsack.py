"""The knapsack against all possible choices, and at the edge of rounding."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cgx_jax.policies.knapsack import minimise, total
from problems import problem, uniform

NUMBERS = {
    "few": st.integers(0, 3),
    "many": st.integers(0, 10**6),
    "tenths, whose sums round": st.integers(0, 9).map(lambda n: n * 0.1),
    "decades": st.tuples(st.integers(0, 9), st.integers(-20, 20)).map(lambda t: t[0] * 4.0 ** t[1]),
}


@st.composite
def instances(draw):
    leaves, candidates = draw(st.integers(0, 5)), draw(st.integers(1, 5))
    tables = []
    for _ in range(2):
        numbers = NUMBERS[draw(st.sampled_from(sorted(NUMBERS)))]
        row = st.lists(numbers, min_size=candidates, max_size=candidates)
        table = draw(st.lists(row, min_size=leaves, max_size=leaves))
        tables.append(np.array(table).reshape(leaves, candidates))
    choice = draw(st.lists(st.integers(0, candidates - 1), min_size=leaves, max_size=leaves))
    budget = total(tables[1], np.array(choice, int)) * draw(st.sampled_from([0.5, 0.9, 1, 1.3]))
    return *tables, budget


@settings(deadline=None, max_examples=100, derandomize=True)
@given(instances())
def test_a_choice_is_within_the_budget_and_no_worse_than_uniform_ones(instance):
    cost, weight, budget = instance
    if weight.min(axis=1).sum() > budget * (1 + 1e-9):
        with pytest.raises(ValueError, match="raise the budget"):
            minimise(cost, weight, budget)
        return
    try:
        found = minimise(cost, weight, budget)
    except ValueError:
        assert total(weight, weight.argmin(axis=1)) > budget
        return
    assert total(weight, found) <= budget
    uniforms = [np.full(len(cost), candidate) for candidate in range(cost.shape[1])]
    fitting = [total(cost, choice) for choice in uniforms if total(weight, choice) <= budget]
    assert total(cost, found) <= min(fitting, default=np.inf)


@pytest.mark.parametrize("leaves", [1, 2, 4, 6])
@pytest.mark.parametrize("budget", [0.6, 1, 1.4])
def test_small_problems_are_solved_to_1_percent_of_the_optimum(leaves, budget):
    bits = (2, 3, 4, 5, 8)
    choices = np.array(list(itertools.product(range(len(bits)), repeat=leaves)))
    for seed in range(5):
        p = problem(leaves, seed, bits)
        for cost, weight in ((p.nbytes, p.error), (p.error, p.nbytes)):
            room = budget * total(weight, uniform(p, 4))
            costs, weights = (table[range(leaves), choices].sum(axis=1) for table in (cost, weight))
            least = costs[weights <= room * (1 + 1e-12)].min()
            assert total(cost, minimise(cost, weight, room)) <= 1.01 * least


def test_a_choice_that_rounding_alone_would_let_in_is_refused():
    cost, weight = np.array([[0, 5], [0, 3]]), np.array([[0.1, 0.0], [0.2, 0.0]])
    for budget, least in ((0.3, 3), (0.1 + 0.2, 0), (0.0, 8)):  # 0.1 + 0.2 rounds to more than 0.3
        assert total(cost, minimise(cost, weight, budget)) == least
