"""The multiple-choice knapsack: one candidate for every leaf, least total cost within a budget."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

BRANCHES = 8  # subproblems split before dynamic programming takes the rest
FRONT = 4096  # states kept of a front
EFFORT = 1 << 21  # states made in all, which takes about half a second


class Solution(NamedTuple):
    """A choice of candidates, int64[leaves], its totals, and a bound on every choice's cost.

    `cost` is at most `cost - bound` above the least possible cost. If the two are equal, it is the
    least.
    """

    choice: np.ndarray
    cost: float
    weight: float
    bound: float


class _Node(NamedTuple):
    """A subproblem (a cost of inf excludes a candidate) and its linear relaxation.

    Both choices are optimal when a unit of weight costs `price`; their mixture that uses all of the
    room is the relaxation's solution, of cost `bound`. If the price is 0, `under` is optimal.
    """

    cost: np.ndarray
    bound: float
    price: float
    under: np.ndarray
    over: np.ndarray


def total(table: np.ndarray, choice: np.ndarray) -> Any:
    """Returns the sum over leaves of table[leaf, choice]. Floats are rounded only once."""
    chosen = _of(table, choice)
    return int(chosen.sum()) if table.dtype.kind == "i" else math.fsum(chosen)


def minimise(cost: np.ndarray, weight: np.ndarray, budget: float) -> Solution:
    """Returns the choice of least total cost whose total weight is within `budget`.

    `cost` and `weight` are int64 or float64 [leaves, candidates], finite and not negative. The cost
    is the least possible (for floats, to 1 part in 1e12) unless the problem outgrew FRONT or
    EFFORT, which `bound` then shows. Totals are those of `total`. Raises ValueError when no choice
    fits.

    The linear relaxation gives a bound, a choice to beat and reduced costs, which rule out most
    candidates; a few branches on the relaxation's one fractional leaf tighten all three, and
    dynamic programming over the leaves that are left settles the rest (after Pisinger, EJOR 83,
    1995).
    """
    lightest = _first(weight, cost)
    if total(weight, lightest) > budget:
        raise ValueError(
            f"minimise: budget={budget} is below {total(weight, lightest)}, the least total "
            "weight of any choice; raise the budget to that."
        )
    bound = math.inf
    for up in (False, True):  # floats: rounded down; if that misses the budget, up
        whole, room = _whole(weight, budget, up)
        room = max(room, int(_of(whole, lightest).sum()))
        # Relative to the leaf's least: sums then keep the digits in which choices differ.
        above = np.where(whole <= room, cost, np.inf)
        above -= above.min(axis=1, keepdims=True)
        choice, gap = _solve(above, whole, room, _step(cost))
        least = total(cost, choice)
        bound = min(bound, least - gap)
        if total(weight, choice) <= budget:
            return Solution(choice, least, total(weight, choice), bound)
    return Solution(lightest, total(cost, lightest), total(weight, lightest), bound)


def _of(table: np.ndarray, choice: np.ndarray) -> np.ndarray:
    return table[np.arange(len(table)), choice]


def _first(key: np.ndarray, tie: np.ndarray) -> np.ndarray:
    """Returns each leaf's candidate of least key, and among equals that of least `tie`."""
    least = key == key.min(axis=1, keepdims=True)
    return np.where(least, tie, np.inf).argmin(axis=1)


def _whole(weight: np.ndarray, budget: float, up: bool) -> tuple[np.ndarray, int]:
    """Makes weights and budget integers, whose sums are exact; scales floats by a power of 2.

    With `up`, every choice within the integer budget is within the true one. Without it, every
    choice within the true budget is within the integer one.
    """
    if weight.dtype.kind == "i":
        return weight, math.floor(budget)
    bits = 61 - len(weight).bit_length()
    exponent = bits - math.frexp(budget)[1]
    scaled = np.ldexp(np.minimum(weight, budget), exponent)
    scaled = np.ceil(scaled) if up else np.floor(scaled)
    scaled[weight > budget] = 2.0 ** (bits + 1)
    room = math.ldexp(budget if up else math.nextafter(budget, math.inf), exponent)
    return scaled.astype(np.int64), math.floor(room)


def _step(cost: np.ndarray) -> float:
    """Returns the least difference between different totals; 0 if it is not known."""
    return float(np.gcd.reduce((cost - cost[:, :1]).ravel())) if cost.dtype.kind == "i" else 0.0


def _solve(cost: np.ndarray, weight: np.ndarray, room: int, step: float) -> tuple[np.ndarray, Any]:
    """Returns the best choice found, and how much less a better one could cost at most."""
    root = _relax(cost, weight, room, None)
    assert root is not None
    best = _round(root, weight, room)
    least = float(_of(cost, best).sum())
    margin = step - 0.5 if step else 1e-12 * least  # smaller gains do not count
    nodes = [root]
    for _ in range(BRANCHES):
        nodes = sorted((n for n in nodes if n.bound < least - margin), key=lambda n: n.bound)
        if not nodes:
            return best, 0
        for child in _branch(nodes.pop(0), weight, room, least - margin):
            nodes.append(child)
            choice = _round(child, weight, room)
            if _of(cost, choice).sum() < least:
                best, least = choice, float(_of(cost, choice).sum())
    lowest, effort = math.inf, EFFORT
    for node in sorted(nodes, key=lambda n: n.bound):
        if node.bound < least - margin:
            found, dropped, effort = _search(node, weight, room, least, margin, effort)
            lowest = min(lowest, dropped)
            if found is not None:
                best, least = found, float(_of(cost, found).sum())
    return best, least - lowest if lowest < least - margin else 0


def _relax(cost: np.ndarray, weight: np.ndarray, room: int, guess: float | None) -> _Node | None:
    """Solves the relaxation, from a guess of its price; returns None if no choice fits.

    The bound is a concave, piecewise linear function of the price, and every choice is a line above
    it. The next price is where the lines of the two current choices meet. The search ends when no
    line is lower there.
    """
    over = _first(cost, weight)
    beyond = int(_of(weight, over).sum())
    if beyond <= room:
        return _Node(cost, float(_of(cost, over).sum()), 0.0, over, over)
    under = _first(np.where(np.isfinite(cost), weight, np.inf), cost)
    within = int(_of(weight, under).sum())
    if within > room:
        return None
    price = guess
    while True:
        least = float(_of(cost, under).sum())
        if price is None:
            price = (least - float(_of(cost, over).sum())) / (beyond - within)
        pick = (cost + price * weight).argmin(axis=1)
        between = int(_of(weight, pick).sum())
        if within < between <= room:
            under, within = pick, between
        elif room < between < beyond:
            over, beyond = pick, between
        elif guess is None:
            return _Node(cost, least - price * (room - within), price, under, over)
        price = guess = None


def _round(node: _Node, weight: np.ndarray, room: int) -> np.ndarray:
    """Rounds the relaxation: starts at `under`, then makes the best changes that still fit."""
    if node.price == 0:
        return node.under
    choice = node.under.copy()
    heavier = _of(weight, node.over) - _of(weight, choice)
    slack = room - int(_of(weight, choice).sum())
    for leaf in np.argsort(-heavier, kind="stable")[: np.count_nonzero(heavier > 0)]:
        if heavier[leaf] <= slack:
            choice[leaf] = node.over[leaf]
            slack -= int(heavier[leaf])
    while True:
        gain = _of(node.cost, choice)[:, None] - node.cost
        gain[weight - _of(weight, choice)[:, None] > slack] = 0
        leaf, candidate = divmod(int(gain.argmax()), gain.shape[1])
        if gain[leaf, candidate] <= 0:
            return choice
        slack -= int(weight[leaf, candidate] - weight[leaf, choice[leaf]])
        choice[leaf] = candidate


def _branch(node: _Node, weight: np.ndarray, room: int, goal: float) -> Iterator[_Node]:
    """Yields subproblems that fix the fractional leaf's candidate and could cost under `goal`."""
    leaf = int(abs(_of(weight, node.over) - _of(weight, node.under)).argmax())
    penalised = node.cost[leaf] + node.price * weight[leaf]
    for candidate in np.flatnonzero(node.bound + penalised - penalised.min() < goal):
        cost = node.cost.copy()
        cost[leaf] = np.inf
        cost[leaf, candidate] = node.cost[leaf, candidate]
        child = _relax(cost, weight, room, node.price)
        if child is not None and child.bound < goal:
            yield child


def _search(
    node: _Node, weight: np.ndarray, room: int, least: float, margin: float, effort: int
) -> tuple[np.ndarray | None, float, int]:
    """Returns (a choice under `least - margin` or None, least bound given up, effort left).

    Leaves are added in the order in which departing from `under` costs least. A state is the weight
    and cost so far, with `under` at all other leaves. Dominated states are dropped.
    """
    base = node.under
    origin = float(_of(node.cost, base).sum())
    slack = room - int(_of(weight, base).sum())
    cost = node.cost - _of(node.cost, base)[:, None]
    weight = weight - _of(weight, base)[:, None]
    reduced = cost + node.price * weight
    goal = least - margin - origin
    unused = node.price * slack  # what the relaxation gains by the room that `under` leaves

    states = np.zeros(1, np.int64), np.zeros(1)
    steps: list[tuple[int, np.ndarray, np.ndarray]] = []  # leaf, candidates, states before
    found, dropped = None, math.inf
    departure = np.where(np.arange(reduced.shape[1]) == base[:, None], np.inf, reduced)
    for leaf in np.argsort(departure.min(axis=1), kind="stable"):
        if departure[leaf].min() - unused >= goal:
            break
        live = np.flatnonzero(reduced[leaf] - unused < goal)
        heavy = np.add.outer(weight[leaf, live], states[0]).ravel()
        costly = np.add.outer(cost[leaf, live], states[1]).ravel()
        bound = costly + node.price * heavy - unused
        keep = _front(heavy, costly, np.flatnonzero(bound < goal))
        effort -= heavy.size
        most = FRONT if effort > 0 else 0
        if keep.size > most:
            thinned = keep[np.linspace(0, keep.size - 1, most).astype(int)]
            dropped = min(dropped, float(bound[np.setdiff1d(keep, thinned)].min()))
            keep = thinned
        if not keep.size:
            break
        steps.append((leaf, live[keep // states[0].size], keep % states[0].size))
        states = heavy[keep], costly[keep]
        last = int(np.searchsorted(states[0], slack, side="right")) - 1
        if last >= 0 and states[1][last] < goal:
            goal = float(states[1][last]) - margin
            found = len(steps), last
    if found is None:
        return None, origin + dropped, effort
    choice, (taken, state) = base.copy(), found
    for leaf, candidates, before in reversed(steps[:taken]):
        choice[leaf] = candidates[state]
        state = before[state]
    return choice, origin + dropped, effort


def _front(weight: np.ndarray, cost: np.ndarray, states: np.ndarray) -> np.ndarray:
    """Returns the `states` that no other state dominates, by ascending weight."""
    states = states[np.lexsort((cost[states], weight[states]))]
    cheapest = np.minimum.accumulate(np.append(np.inf, cost[states]))
    return states[cost[states] < cheapest[:-1]]
