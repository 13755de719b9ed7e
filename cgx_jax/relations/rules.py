"""How each primitive passes on the relations of its operands: the table `RULES`.

Examples lie along the dimension of an array that is longer in plain jit's program. A rule says when
a primitive keeps them apart, adds them up, or does neither. Without a rule, what is the same on
every rank stays so, and everything else is refused.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from cgx_jax.relations.relation import (
    DRAWS,
    NUMBERS,
    ROWS,
    SAME,
    SUM,
    ZERO,
    Kind,
    Pair,
    Relation,
    is_float,
    join,
)

STATISTIC = "a statistic of the batch, which each rank would compute from its own part"
Given = Sequence[Relation]


def apply(pair: Pair) -> list[Relation]:
    """Returns the relations of an equation's results, from its primitive's rule."""
    rule = RULES.get(pair.name)
    found = rule(pair) if rule is not None else None
    # What all ranks compute from equal values is equal, unless they communicate.
    if found is None and all(r.sure for r in pair.given) and pair.alike():
        found = None if pair.names_ranks() else SAME
    results = found if isinstance(found, list) else [found] * pair.count
    return [
        r if r is not None and _fits(r, pair.grown(-i - 1)) else pair.refuse(_reason(pair))
        for i, r in enumerate(results)
    ]


def _fits(r: Relation, grown: int | None) -> bool:
    """Whether the shapes agree with a relation: only examples are more in plain jit's program."""
    if r.kind is Kind.ZERO or grown is None:
        return grown is not None
    return (grown >= 0) == (r.kind in (Kind.ROWS, Kind.POSITION, Kind.INDEX))


def _reason(pair: Pair) -> str:
    kinds = {r.kind for r in pair.given}
    if pair.name not in RULES and not pair.names_ranks():
        return "an operation that has no rule"
    if Kind.DRAWS in kinds:
        return (
            "one random draw for the whole batch, from a key of which each rank has its own (give "
            "the key P() in in_specs; Flax's attention: broadcast_dropout=False)"
        )
    if Kind.SUM in kinds or any(r.kind is Kind.SAME and r.power for r in pair.given):
        return STATISTIC
    if pair.name.startswith("random") and pair.grown() != -1:
        return (
            "draws for each example from a key that every rank has (make it an argument, which "
            "in_specs leaves out or gives None)"
        )
    return "an operation between examples"


# The power of a result, from its operands'; None where there is none.


def _none(given: Given) -> int | None:
    return None if any(r.power for r in given) else 0


def _equal(given: Given) -> int | None:
    powers = {r.power for r in given if r.kind is not Kind.ZERO} or {0}
    return powers.pop() if len(powers) == 1 else None


def _first(given: Given) -> int | None:
    return given[0].power if all(r.sure for r in given[1:]) else None


def _total(given: Given) -> int:
    return sum(r.power for r in given)


@dataclasses.dataclass(frozen=True)
class _Rule:
    """A primitive that computes numbers.

    `power` gives the result's. With `linear`, zeros give zeros, and sums over the examples give
    such sums. In a product one operand may be such a sum; elsewhere all are. `apart` says whether
    examples along a dimension stay apart; None if they always do. `but` names parameters that may
    depend on the batch size.
    """

    power: Callable[[Given], int | None]
    linear: bool = False
    apart: Callable[[Pair, int], bool] | None = None
    but: tuple[str, ...] = ()

    def __call__(self, pair: Pair) -> Relation | None:
        given, d = pair.given, pair.grown()
        product = self.power is _total
        if product:
            # A product with zero may be NaN.
            whole = [SAME if pair.grown(i) == -1 else ROWS for i in range(len(given))]
            given = tuple(r if r != ZERO else w for r, w in zip(given, whole, strict=True))
        kinds = {r.kind for r in given}
        power = self.power(given)
        moves = self.linear and self.power is _first and kinds <= {*NUMBERS, Kind.DRAWS}
        if d is None or not pair.alike(*self.but) or not (moves or kinds <= NUMBERS):
            return None
        if any(pair.grown(-i - 1) != d for i in range(pair.count)):
            return None
        zeros = [r == ZERO for r in given]
        if self.linear and (zeros[0] if moves else all(zeros)):
            return ZERO if not moves or all(r.sure for r in given) else None
        if Kind.SUM in kinds and d == -1 and self.linear:
            if product:
                sums = [r.kind for r in given].count(Kind.SUM)
                return SUM.at(power or 0) if sums == 1 and Kind.ROWS not in kinds else None
            return given[0] if moves and power is not None else None if moves else join(given)
        if power is None or Kind.SUM in kinds:
            return None
        if Kind.DRAWS in kinds:
            return DRAWS if d == -1 else None
        if d == -1:
            return SAME.at(power) if Kind.ROWS not in kinds else None
        constant = any(zeros) and not moves
        apart = self.apart is None or self.apart(pair, d)
        return ROWS.at(power) if apart and (Kind.ROWS in kinds or constant) else None


def _off(*names: str) -> Callable[[Pair, int], bool]:
    """Says that examples stay apart if the parameter names other dimensions than theirs."""

    def apart(pair: Pair, d: int) -> bool:
        value = next(v for v in map(pair.param, names) if v is not None)
        return d not in value if isinstance(value, (tuple, list)) else bool(d != value)

    return apart


def _all_there(pair: Pair, d: int) -> bool:
    """A slice that is as long as its operand has all examples, in order."""
    keys = [
        k
        for k in ("start_indices", "limit_indices", "strides", "slice_sizes")
        if k in pair.small.params
    ]
    values = [[None if v is None else [*v[:d], *v[d + 1 :]] for v in pair.both(k)] for k in keys]
    return pair.shape(-1)[d] == pair.shape(0)[d] and all(a == b for a, b in values)


def _alone(pair: Pair, d: int) -> bool:
    """A window that holds one example at a time."""
    ones = ("window_dimensions", "window_strides", "base_dilation", "window_dilation")
    values = [v[d] for v in map(pair.param, ones) if v is not None]
    return all(v == 1 for v in values) and tuple(pair.param("padding")[d]) == (0, 0)


def _before(pair: Pair, d: int) -> bool:
    """A function of the last dimensions of each operand, and examples before these."""
    core = len(pair.param("fft_lengths")) if pair.name == "fft" else 2
    return all(d < len(pair.shape(i)) - core for i in range(len(pair.given)))


def _images(pair: Pair, d: int) -> bool:
    """A convolution of images with filters that all of them share."""
    numbers = pair.param("dimension_numbers")
    alone = pair.given[1].kind is not Kind.ROWS and pair.param("batch_group_count") == 1
    return alone and pair.grown(0) == numbers.lhs_spec[0] and d == numbers.out_spec[0]


# Primitives with more to say.


def _passes(pair: Pair) -> list[Relation]:
    return list(pair.given)


def _moves(pair: Pair) -> Relation | None:
    """Changes of shape. Examples stay together if as many values come before them as did before."""
    r, d, before = pair.given[0], pair.grown(), pair.grown(0)
    if not pair.alike("new_sizes", "shape", "reps"):
        return None
    if pair.name == "tile" and before != -1 and pair.param("reps")[before or 0] != 1:
        return None  # the examples of one rank would no longer lie together
    if d is None or r.kind is Kind.SUM or r.kind is Kind.DRAWS:
        return r if d == -1 else None
    if r.kind is Kind.SAME and len(pair.given) == 1:
        spreads = pair.name in ("broadcast_in_dim", "tile")
        return r if d == -1 else r.of(Kind.ROWS) if spreads else None
    if r.kind not in (Kind.ROWS, Kind.POSITION) or d < 0 or before is None:
        return r if r.kind is Kind.ZERO else None
    if pair.name == "reshape":
        sizes = math.prod(pair.shape(0)[:before]), math.prod(pair.shape(-1)[:d])
        split = pair.shape(0)[before] != pair.shape(-1)[d] and r.kind is Kind.POSITION
        if pair.param("dimensions") is not None or sizes[0] != sizes[1] or split:
            return None
    return r


def _converts(pair: Pair) -> Relation | None:
    r = pair.given[0]
    before, after = pair.small.invars[0].aval.dtype, pair.small.outvars[0].aval.dtype
    # Sums of floats that are rounded, and of numbers that overflow, are no longer sums.
    exact = is_float(after) and np.dtype(after).itemsize > 1
    exact = exact and (is_float(before) or np.dtype(before).itemsize >= 4)
    if (r.kind is Kind.SUM or r.power) and not exact:
        return None
    return None if r.kind is Kind.POSITION and not _counts_to(after, pair) else r


def _compares(pair: Pair) -> Relation | None:
    if pair.name == "lt" and pair.given[0].kind is Kind.POSITION and pair.given[1] == ZERO:
        return ZERO
    same = _equal(pair.given) is not None
    return _Rule(lambda given: 0 if same else None)(pair)


def _divides(pair: Pair) -> Relation | None:
    a, b = pair.given
    whole = not is_float(pair.small.outvars[0].aval.dtype)
    if whole or b.kind in (Kind.SUM, Kind.ZERO):
        return _Rule(_none)(pair)
    return _Rule(_total, linear=True)(dataclasses.replace(pair, given=(a, b.at(-b.power))))


def _solves(pair: Pair) -> Relation | None:
    """A triangular system, which is linear in its right-hand side, operand 1."""
    matrix, side = pair.given
    if side.kind is Kind.SUM:
        return _Rule(_first, linear=True)(dataclasses.replace(pair, given=(side, matrix)))
    power = side.power if matrix.power == 0 else None
    free = len(pair.shape(1)) - (1 if pair.param("left_side") else 2)

    def apart(pair: Pair, d: int) -> bool:
        return _before(pair, d) or (d == free and pair.grown(0) == -1)

    return _Rule(lambda given: power, apart=apart)(pair)


def _raises(pair: Pair) -> Relation | None:
    y = 2 if pair.name == "square" else pair.param("y")
    return _Rule(lambda given: given[0].power * y)(pair)


def _selects(pair: Pair) -> Relation | None:
    which, *cases = pair.given
    if Kind.SUM in {r.kind for r in cases}:
        return join(cases) if which.sure else None
    power = None if which.power else _equal(cases)
    return _Rule(lambda given: power)(pair)


def _concatenates(pair: Pair) -> Relation | None:
    d, axis, kinds = pair.grown(), pair.param("dimension"), {r.kind for r in pair.given}
    if any(pair.grown(i) != d for i in range(len(pair.given))):
        return None
    if Kind.POSITION in kinds and kinds <= {Kind.POSITION, Kind.ROWS, Kind.ZERO}:
        alone = all(pair.shape(i)[axis] == 1 for i in range(len(pair.given)))
        columns = tuple(int(r.kind is Kind.POSITION) for r in pair.given)
        plain = alone and d != axis and _none(pair.given) == 0
        return Relation(Kind.INDEX, columns=columns) if plain else None
    if kinds == {Kind.DRAWS}:
        return DRAWS if d == -1 else None
    return _Rule(_equal, linear=True, apart=_off("dimension"))(pair)


def _counts_up(pair: Pair) -> Relation | None:
    d = pair.grown()
    if d is None or d < 0:
        return None
    if d != pair.param("dimension"):
        return ROWS
    return Relation(Kind.POSITION) if _counts_to(pair.param("dtype"), pair) else None


def _counts_to(dtype: DTypeLike, pair: Pair) -> bool:
    """Whether a dtype has all numbers below the lengths of the result."""
    longest = max(pair.large.outvars[0].aval.shape)
    if jnp.issubdtype(dtype, jnp.integer):
        return bool(longest - 1 <= jnp.iinfo(dtype).max)
    return bool(is_float(dtype) and longest <= 2 ** jnp.finfo(dtype).nmant)


def _updates(pair: Pair) -> Relation | None:
    """An update of all examples, or one in the same place of a whole array."""
    both, d = pair.given[:2], pair.grown()
    if not all(r.sure for r in pair.given[2:]) or d is None or pair.grown(1) != d:
        return None
    if d >= 0 and pair.shape(0)[d] != pair.shape(1)[d]:
        return None
    return join(both) if {r.kind for r in both} <= NUMBERS else None


def _adds(pair: Pair) -> Relation | None:
    rank, place = sorted(pair.given, key=lambda r: r.kind is not Kind.RANK)
    if rank.kind is Kind.RANK and place.kind is Kind.POSITION and pair.name == "add":
        # A rank's examples come after those of the ranks before it.
        return ROWS if rank.columns == (pair.shape(-1)[pair.grown() or 0],) else None
    return _Rule(_equal, linear=True)(pair)


def _multiplies(pair: Pair) -> Relation | None:
    kinds = [r.kind for r in pair.given]
    if Kind.RANK in kinds:
        at = kinds.index(Kind.RANK)
        factor = np.asarray(getattr(pair.small.invars[1 - at], "val", None))
        own = pair.given[at].columns == (1,) and np.issubdtype(factor.dtype, np.integer)
        return Relation(Kind.RANK, columns=(int(factor),)) if own else None
    return _Rule(_total, linear=True)(pair)


def _numbers_rank(pair: Pair) -> Relation | None:
    return Relation(Kind.RANK, columns=(1,)) if pair.over == pair.axes else None


def _sums(pair: Pair) -> Relation | None:
    r = pair.given[0]
    if r.kind is Kind.ROWS and pair.grown() == -1:
        return r.of(Kind.SUM) if pair.alike() else None
    return _Rule(_first, linear=True)(pair) if r.kind in NUMBERS else None


def _multiplies_out(pair: Pair) -> Relation | None:
    """Products that add up: over the examples, if both operands have them and the result not."""
    if [r.kind for r in pair.given] == [Kind.ROWS, Kind.ROWS] and pair.grown() == -1:
        summed = pair.name == "dot_general"
        if not summed:
            # The gradient of filters: images are the features over which products add up.
            numbers, groups = pair.param("dimension_numbers"), pair.param("feature_group_count")
            summed = (pair.grown(0), pair.grown(1)) == (numbers.lhs_spec[1], numbers.rhs_spec[1])
            summed = summed and groups == 1
        return SUM.at(_total(pair.given)) if summed and pair.alike() else None
    apart = None if pair.name == "dot_general" else _images
    return _Rule(_total, linear=True, apart=apart)(pair)


def _gathers(pair: Pair) -> Relation | None:
    r, index = pair.given
    n, d, own, at = pair.param("dimension_numbers"), pair.grown(), pair.grown(0), pair.grown(1)
    if d is None or own is None or at is None or not pair.alike("slice_sizes"):
        return None
    small, large = pair.both("slice_sizes")
    fill, dtype = pair.param("fill_value"), pair.small.outvars[0].aval.dtype
    if "FILL" in str(pair.param("mode")) and (fill is None or fill != 0):
        # Out of bounds, a number is neither zero nor a part of a sum; a NaN is both NaN.
        if r == ZERO:
            r = SAME if own == -1 else ROWS
        nan = is_float(dtype) and (fill is None or fill != fill)
        if (r.power or r.kind not in (Kind.SAME, Kind.ROWS)) and not nan:
            return None
    last = len(pair.shape(1)) - 1
    taken = [i for i in range(len(pair.shape(-1))) if i not in n.offset_dims]
    by_row = d >= 0 and 0 <= at < last and d == taken[at]
    if r.kind in (Kind.SAME, Kind.ZERO, Kind.SUM, Kind.DRAWS):
        if tuple(small) != tuple(large):
            return None
        if index.sure:
            return r if d == -1 else None
        looks_up = by_row and index == ROWS and r.kind in (Kind.SAME, Kind.ZERO)
        return r.of(Kind.ROWS) if looks_up else None
    if r.kind is not Kind.ROWS or [*small[:own], *small[own + 1 :]] != [
        *large[:own],
        *large[own + 1 :],
    ]:
        return None
    if own in n.operand_batching_dims:
        place = n.start_indices_batching_dims[n.operand_batching_dims.index(own)]
        return r if by_row and at == place and index in (ROWS, ZERO) else None
    if _is_own(pair, index, own, n.start_index_map) and own in n.collapsed_slice_dims:
        return r if by_row else None
    everything = small[own] == pair.shape(0)[own] and large[own] == small[own] * pair.world
    return r if index.sure and everything and d in n.offset_dims else None


def _is_own(pair: Pair, index: Relation, d: int, columns: Sequence[int]) -> bool:
    """Whether an index takes each example to its own row along dimension `d`."""
    own, at = index.columns, pair.grown(1)
    if index.kind is Kind.POSITION and pair.shape(1)[-1] == 1:
        own = (1,)
    if sum(own) != 1 or d not in columns or not own[list(columns).index(d)] or at is None:
        return False
    return pair.shape(0)[d] == pair.shape(1)[at]  # else an index is the number of another row


def _scatters(pair: Pair) -> Relation | None:
    r, index, update = pair.given
    n, d, at, moved = pair.param("dimension_numbers"), pair.grown(), pair.grown(1), pair.grown(2)
    if d is None or at is None or moved is None or not pair.alike("update_jaxpr", "update_consts"):
        return None
    last = len(pair.shape(1)) - 1
    taken = [i for i in range(len(pair.shape(2))) if i not in n.update_window_dims]
    by_row = 0 <= at < last and moved == taken[at]
    if not {r.kind, update.kind} <= NUMBERS:
        return None
    if d == -1 and index.sure and moved == -1:
        return join((r, update))
    if d == -1:
        # Each example adds to a table, as in the gradient of a look-up.
        adds = by_row and index == ROWS and update.kind is Kind.ROWS and pair.name != "scatter"
        return join((r, update.of(Kind.SUM))) if adds else None
    if index.sure:
        gone = (*n.inserted_window_dims, *n.operand_batching_dims)
        kept = [i for i in range(len(pair.shape(0))) if i not in gone]
        place = n.update_window_dims[kept.index(d)] if d in kept else None
        own = place == moved and pair.shape(2)[moved] == pair.shape(0)[d]
    elif d in n.operand_batching_dims:
        place = n.scatter_indices_batching_dims[n.operand_batching_dims.index(d)]
        own = by_row and index == ROWS and at == place
    else:
        own = by_row and d in n.inserted_window_dims
        own = own and _is_own(pair, index, d, n.scatter_dims_to_operand_dims)
    found = join((r, update)) if own else None
    return found if found is not None and found.kind in (Kind.ROWS, Kind.ZERO) else None


def _draws(pair: Pair) -> Relation | None:
    """Bits and keys from keys; a key of which each rank has its own gives each example its own."""
    r, d = pair.given[0], pair.grown()
    if r.kind is Kind.DRAWS and all(x.sure for x in pair.given[1:]) and d is not None:
        if d >= 0:
            return ROWS
        return DRAWS if pair.name != "random_bits" and pair.alike() else None
    return _Rule(_none)(pair) if r.kind is Kind.ROWS else None


def _all_reduces(pair: Pair) -> list[Relation] | None:
    over, ranks = set(pair.over), set(pair.axes)
    if pair.param("axis_index_groups") is not None or (over & ranks and not ranks <= over):
        return None
    # `vmap` makes a dimension of its axis, which then has a number in place of a name.
    adds = [r.kind is Kind.ROWS and pair.grown(i) in over for i, r in enumerate(pair.given)]
    if any(adds) and not pair.alike():
        return None
    sums = [r.of(Kind.SUM) if add else r for r, add in zip(pair.given, adds, strict=True)]
    sums = [r.as_sum() if over & ranks else r for r in sums]
    if any(r.kind not in NUMBERS or (over & ranks and r.kind is Kind.ROWS) for r in sums):
        return None
    return [r.of(Kind.SAME) for r in sums] if over & ranks else sums


def _ranks_meet(pair: Pair) -> Relation | None:
    """Gathers examples from all ranks, or scatters a sum over all ranks as examples."""
    r, gathers = pair.given[0], pair.name == "all_gather"
    dimension = pair.param("all_gather_dimension" if gathers else "scatter_dimension")
    whole = pair.param("axis_index_groups") is None and pair.param("tiled")
    if pair.over != pair.axes or not whole or pair.grown(0 if gathers else -1) != dimension:
        return None
    if gathers:
        return r.of(Kind.SAME) if r.kind is Kind.ROWS and pair.grown() == -1 else None
    return r.as_sum().of(Kind.ROWS) if r.as_sum().kind is Kind.SUM else None


_NUMBERS = {
    """acos acosh and argmax argmin asin asinh atan atan2 atanh bessel_i0e bessel_i1e
    bitcast_convert_type cbrt ceil clamp clz cos cosh digamma erf erf_inv erfc exp exp2 expm1 floor
    igamma igamma_grad_a igammac is_finite lgamma log log1p log2 logistic mulhi nextafter not
    one_minus_square or polygamma polynomial population_count pow random_gamma_grad reduce_and
    reduce_or reduce_prod reduce_xor regularized_incomplete_beta rem round rsqrt shift_left
    shift_right_arithmetic shift_right_logical sign sin sinh sqrt tan tanh threefry2x32 xor
    zeta""": _Rule(_none),
    "abs complex max min reduce_max reduce_min reduce_precision": _Rule(_equal),
    "conj imag neg real unstack": _Rule(_first, linear=True),
    "rev": _Rule(_first, linear=True, apart=_off("dimensions")),
    "cumsum split": _Rule(_first, linear=True, apart=_off("axis")),
    "cumlogsumexp cummax cummin cumprod": _Rule(_none, apart=_off("axis")),
    "sort top_k": _Rule(_none, apart=_off("dimension", "axis")),
    "slice": _Rule(_first, linear=True, apart=_all_there, but=("limit_indices",)),
    "dynamic_slice": _Rule(_first, linear=True, apart=_all_there, but=("slice_sizes",)),
    "stack": _Rule(_equal, linear=True),
    "pad": _Rule(_equal, linear=True, apart=lambda p, d: not any(p.param("padding_config")[d])),
    "reduce_window_sum": _Rule(_first, linear=True, apart=_alone),
    "select_and_scatter_add": _Rule(
        lambda given: given[0].power if given[1].power == 0 else None, apart=_alone
    ),
    "reduce_window reduce_window_max reduce_window_min select_and_gather_add": _Rule(
        _none, apart=_alone
    ),
    "fft": _Rule(_first, linear=True, apart=_before),
    "cholesky eig eigh householder_product lu qr svd": _Rule(_none, apart=_before, but=("shape",)),
}
_OTHERS: dict[Any, str] = {
    _passes: """copy copy_p device_put name optimization_barrier pvary reshard
        sharding_constraint stop_gradient""",
    _moves: "broadcast_in_dim reshape squeeze tile transpose",
    _converts: "convert_element_type",
    _compares: "eq eq_to ge gt le le_to lt lt_to ne",
    _adds: "add add_any sub",
    _multiplies: "mul",
    _numbers_rank: "axis_index",
    _divides: "div",
    _solves: "triangular_solve",
    _raises: "integer_pow square",
    _selects: "select_n",
    _concatenates: "concatenate",
    _counts_up: "iota",
    _updates: "dynamic_update_slice",
    _sums: "reduce_sum",
    _multiplies_out: "conv_general_dilated dot_general",
    _gathers: "gather",
    _scatters: "scatter scatter-add",
    _draws: "random_bits random_clone random_fold_in random_split random_unwrap random_wrap",
    _all_reduces: "psum psum_invariant",
    _ranks_meet: "all_gather reduce_scatter",
}
RULES: dict[str, Callable[[Pair], Any]] = {
    name: rule
    for names, rule in [*_NUMBERS.items(), *((names, rule) for rule, names in _OTHERS.items())]
    for name in names.split()
}
