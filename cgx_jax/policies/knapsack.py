"""The multiple-choice knapsack: one candidate for every leaf, least total cost within a budget."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

# A cost this close to the relaxation's is close to the optimum. With many leaves the first one is.
CLOSE = 1e-3
# Leaves that are fixed one after another at most, and the relaxations kept each time.
DEPTH, KEPT = 12, 4


def total(table: np.ndarray, choice: np.ndarray) -> float:
    """Returns the sum over leaves of table[leaf, choice], rounded only once."""
    return math.fsum(_of(table, choice).tolist())


def minimise(cost: np.ndarray, weight: np.ndarray, budget: float) -> np.ndarray:
    """Returns a choice of low total cost whose total weight is within `budget`, int64[leaves].

    `cost` and `weight` are [leaves, candidates], finite and not negative. Totals are those of
    `total`. Raises ValueError when no choice fits.

    The linear relaxation leaves one leaf between two candidates. It is rounded. Unless the cost is
    then within `CLOSE` of the relaxation's, it is solved again with the leaf fixed to each of the
    two, and the best of these go on in the same way. The result is not proved to be optimal, but
    never costs more than one candidate for all leaves.
    """
    lightest = _first(weight, cost)
    if total(weight, lightest) > budget:
        raise ValueError(
            f"minimise: budget={budget} is below {total(weight, lightest)}, the least total "
            "weight of any choice; raise the budget to that."
        )
    uniform = (np.full(len(cost), candidate) for candidate in range(cost.shape[1]))
    found = [lightest, *(choice for choice in uniform if total(weight, choice) <= budget)]
    # Relative to the leaf's least: sums then keep the digits in which choices differ.
    above = np.where(weight <= budget, cost, np.inf)
    least = above.min(axis=1, keepdims=True)
    kept = _relax(above - least, weight, budget)
    enough = (1 + CLOSE) * (least.sum() + sum(node.bound for node in kept))
    for _ in range(DEPTH):
        found += [_round(node, weight, budget) for node in kept]
        if min(total(cost, choice) for choice in found) <= enough:
            break
        children = [child for node in kept for child in _fixed(node, weight, budget)]
        kept = sorted(children, key=lambda node: node.bound)[:KEPT]
    return min(found, key=lambda choice: total(cost, choice))


class _Node(NamedTuple):
    """A problem (a cost of inf excludes a candidate) and its linear relaxation's solution.

    That is a mixture, of cost `bound`, of a choice within the budget and one beyond it.
    """

    cost: np.ndarray
    bound: float
    under: np.ndarray
    over: np.ndarray


def _of(table: np.ndarray, choice: np.ndarray) -> np.ndarray:
    return table[np.arange(len(table)), choice]


def _first(key: np.ndarray, tie: np.ndarray) -> np.ndarray:
    """Returns each leaf's candidate of least key, and among equals that of least `tie`."""
    least = key == key.min(axis=1, keepdims=True)
    return np.where(least, tie, np.inf).argmin(axis=1)


def _relax(cost: np.ndarray, weight: np.ndarray, budget: float) -> list[_Node]:
    """Solves the relaxation; returns nothing if no choice fits.

    The bound is a concave, piecewise linear function of the price of a unit of weight, and every
    choice is a line above it. The next price is where the lines of the two current choices meet.
    The search ends when no line is lower there.
    """
    over = _first(cost, weight)
    under = _first(np.where(np.isfinite(cost), weight, np.inf), cost)
    beyond, within = total(weight, over), total(weight, under)
    if within > budget:
        return []
    if beyond <= budget:
        return [_Node(cost, total(cost, over), over, over)]
    while True:
        price = (total(cost, under) - total(cost, over)) / (beyond - within)
        pick = (cost + price * weight).argmin(axis=1)
        between = total(weight, pick)
        if within < between <= budget:
            under, within = pick, between
        elif budget < between < beyond:
            over, beyond = pick, between
        else:
            return [_Node(cost, total(cost, under) - price * (budget - within), under, over)]


def _round(node: _Node, weight: np.ndarray, budget: float) -> np.ndarray:
    """Starts at `under`, then makes the best changes that still fit, one leaf at a time."""
    choice = node.under
    while True:
        gain = _of(node.cost, choice)[:, None] - node.cost
        more = weight - _of(weight, choice)[:, None]
        gain[more > budget - total(weight, choice)] = 0
        changed = choice.copy()
        if gain.size:
            leaf, candidate = divmod(int(gain.argmax()), gain.shape[1])
            changed[leaf] = candidate
        # Totals decide: they are rounded only once.
        better = total(node.cost, changed) < total(node.cost, choice)
        if not better or total(weight, changed) > budget:
            return choice
        choice = changed


def _fixed(node: _Node, weight: np.ndarray, budget: float) -> list[_Node]:
    """Returns the relaxations with the divided leaf fixed to each of its two candidates."""
    nodes = []
    for leaf in np.flatnonzero(node.under != node.over)[:1]:
        for candidate in (node.under[leaf], node.over[leaf]):
            cost = node.cost.copy()
            cost[leaf] = np.inf
            cost[leaf, candidate] = node.cost[leaf, candidate]
            nodes += _relax(cost, weight, budget)
    return nodes
