"""Proves how the values of plain jit's program follow from those of the ranks' programs.

The same function is traced twice: `large` is plain jit's program, over the whole batch, and `small`
is a rank's, over its part. Both are walked together, equation by equation, and each value of
`large` gets a `Relation` to the ranks' values. What no rule covers is UNKNOWN. The result depends
only on what the program does with its arrays, not on what their shapes or names suggest.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cgx_jax import _compat
from cgx_jax.relations import rules
from cgx_jax.relations.relation import (
    ROWS,
    SAME,
    ZERO,
    Kind,
    Pair,
    Relation,
    growing,
    is_float,
    join,
    unknown,
    where,
    without_placement,
)


def relate(
    small: Any, large: Any, inputs: Sequence[Relation], axes: Sequence[str], world: int
) -> list[Relation]:
    """Returns the relation of each output of two closed jaxprs, from those of their inputs.

    The batch is split over `axes`, which have `world` ranks in `small` and one in `large`.
    """
    return _Walk(world, tuple(axes)).inside(small, large, inputs)


@dataclasses.dataclass(frozen=True)
class _Walk:
    world: int
    axes: tuple[Any, ...]

    def inside(self, small: Any, large: Any, given: Sequence[Relation]) -> list[Relation]:
        """Returns the relations of the outputs of a closed or open jaxpr."""
        constants = getattr(small, "consts", ()), getattr(large, "consts", ())
        small, large = map(_compat.open_program, (small, large))
        (steps, aliases), (others, more) = without_placement(small), without_placement(large)
        aliases.update(more)
        if list(map(_form, steps)) != list(map(_form, others)):
            return [_first_difference(steps, others)] * len(small.outvars)
        # For each value of `large`: the value of `small` in its place, and the relation.
        env: dict[Any, tuple[Any, Relation]] = {}
        env.update(zip(large.invars, zip(small.invars, given, strict=True), strict=True))
        if len(small.constvars) != len(large.constvars):
            return [_DEPENDS] * len(small.outvars)
        for one, other, x, y in zip(small.constvars, large.constvars, *constants, strict=True):
            env[other] = one, self.constant(x, y)

        def read(one: Any, other: Any) -> Relation:
            one, other = aliases.get(id(one), one), aliases.get(id(other), other)
            if _is_literal(one) or _is_literal(other):
                both = _is_literal(one) and _is_literal(other)
                return self.constant(one.val, other.val) if both else _DEPENDS
            twin, relation = env[other]
            return relation if twin is one else _DEPENDS

        def operand(one: Any, other: Any, eqn: Any) -> Relation:
            """Says where a literal is used, since it has no line of its own."""
            found = read(one, other)
            return _at(found, eqn) if _is_literal(one) else found

        for one, other in zip(steps, others, strict=True):
            pairs = zip(one.invars, other.invars, strict=True)
            operands = tuple(operand(x, y, one) for x, y in pairs)
            results = self.equation(Pair(self.world, self.axes, one, other, operands))
            env.update(zip(other.outvars, zip(one.outvars, results, strict=True), strict=True))
        return [read(x, y) for x, y in zip(small.outvars, large.outvars, strict=True)]

    def equation(self, pair: Pair) -> list[Relation]:
        """Returns the relations of an equation's results."""
        follow = _PROGRAMS.get(pair.name)
        if follow is not None:
            return follow(self, pair)
        if pair.name == "select_n" and pair.given[0] == ZERO:
            return [pair.given[1]]
        lost = next((r for r in pair.given if r.kind is Kind.UNKNOWN), None)
        if lost is not None:
            return [lost] * pair.count
        if any(pair.grown(i) is None for i in range(len(pair.given))):
            return [pair.refuse("an operand whose shape depends on the batch size")] * pair.count
        if not _is_pure(pair.small):
            return [pair.refuse("an operation with effects")] * pair.count
        in_turn = any(r.kind in (Kind.CARRY, Kind.EACH) for r in pair.given)
        if in_turn and pair.names_ranks():
            return [pair.refuse("ranks that meet in a loop over examples")] * pair.count
        if any(r.kind is Kind.CARRY for r in pair.given):
            return [_running_sum(pair)] * pair.count
        if any(r.kind is Kind.EACH for r in pair.given):
            return _of_one_example(pair)
        return rules.apply(pair)

    def constant(self, small: Any, large: Any) -> Relation:
        """Returns the relation of a literal, or of an array that the program holds."""
        if small is large:
            return SAME
        keys = (jnp.issubdtype(jnp.result_type(x), jax.dtypes.prng_key) for x in (small, large))
        if any(isinstance(x, jax.core.Tracer) for x in (small, large)) or any(keys):
            return unknown("the loss makes an array anew in each trace")
        one, other = np.asarray(small), np.asarray(large)
        d = growing(one.shape, other.shape, self.world)
        if d is None or one.dtype != other.dtype:
            return unknown("the shape of a constant depends on the batch size")
        if d == -1 and np.array_equal(one, other, equal_nan=is_float(one.dtype)):
            return SAME if np.any(one) else ZERO
        if d == -1:
            return self.number(one, other)
        first = np.take(one, [0], axis=d)
        if all(np.array_equal(x, np.repeat(first, x.shape[d], axis=d)) for x in (one, other)):
            return ROWS if np.any(first) else ZERO
        if one.ndim == 1 and all(np.array_equal(x, np.arange(len(x))) for x in (one, other)):
            return Relation(Kind.POSITION)
        return unknown("a constant array is as long as the batch")

    def number(self, small: np.ndarray, large: np.ndarray) -> Relation:
        """Returns the relation of a number that depends on the batch size, such as the size."""
        eps = float(jnp.finfo(small.dtype).eps) if is_float(small.dtype) else 0.0
        # Each number is rounded; narrow ones must be exact.
        rtol = 1.05 * eps if eps < 1e-6 else 0.0
        if small.ndim == 0 and small.dtype != bool and small != 0:
            for power in range(-4, 5):
                one = small.item() * self.world ** max(power, 0)
                other = large.item() * self.world ** max(-power, 0)
                if abs(one - other) <= rtol * abs(other):
                    return SAME.at(power)
        return unknown(f"a number depends on the batch size: {small} on a rank, {large} in all")

    def call(self, pair: Pair) -> list[Relation]:
        """Follows a call into its program."""
        small, large = _body(pair.small), _body(pair.large)
        if small is None or len(_compat.open_program(small).invars) != len(pair.given):
            return [pair.refuse("a call whose program cannot be seen")] * pair.count
        # What a library's own program computes has no line of the user's.
        return [_at(r, pair.small) for r in self.inside(small, large, pair.given)]

    def nested(self, pair: Pair) -> list[Relation]:
        """Follows a shard_map over other axes of the mesh."""
        found, count = self.call(pair), len(pair.given)
        if not pair.alike("jaxpr", "mesh"):
            return [pair.refuse("a shard_map that depends on the batch size")] * pair.count
        specs = *pair.param("in_specs"), *pair.param("out_specs")
        grown = [pair.grown(i if i < count else count - i - 1) for i in range(len(specs))]
        if any(d is None or (0 <= d < len(s) and s[d]) for s, d in zip(specs, grown, strict=True)):
            return [pair.refuse("a shard_map that splits the examples again")] * pair.count
        return found

    def linear_solve(self, pair: Pair) -> list[Relation]:
        """Follows the program that solves a linear system."""
        lengths, programs = pair.param("const_lengths"), pair.both("jaxprs")
        start = lengths.matvec + lengths.vecmat
        constants = pair.given[start : start + lengths.solve]
        sides = pair.given[sum(lengths) :]
        small, large = (own.solve for own in programs)
        return self.inside(small, large, [*constants, *sides])

    def branches(self, pair: Pair) -> list[Relation]:
        """Joins what the branches of a cond return, if all ranks take the same one."""
        which, *rest = pair.given
        if not _decides(which):
            refused = pair.refuse("a branch that depends on the batch")
            return [which if which.kind is Kind.UNKNOWN else refused] * pair.count
        pairs = zip(*pair.both("branches"), strict=True)
        found = zip(*(self.inside(small, large, rest) for small, large in pairs), strict=True)
        return [_decided(_joined(pair, results), which) for results in found]

    def while_loop(self, pair: Pair) -> list[Relation]:
        """Follows a while loop in which all ranks make the same number of turns."""
        n, m = pair.param("cond_nconsts"), pair.param("body_nconsts")
        test, consts, carry = pair.given[:n], pair.given[n : n + m], pair.given[n + m :]
        bodies, tests = pair.both("body_jaxpr"), pair.both("cond_jaxpr")
        settled = _settled(pair, carry, lambda x: self.inside(*bodies, [*consts, *x]))
        (again,) = self.inside(*tests, [*test, *settled])
        if not _decides(again):
            refused = pair.refuse("a loop whose number of turns depends on the batch")
            return [again if again.kind is Kind.UNKNOWN else refused] * pair.count
        return [_decided(r, again) for r in settled]

    def scan(self, pair: Pair) -> list[Relation]:
        """Follows a scan, over the examples or over anything else."""
        first, count = _compat.scan_operands(pair.small.params)
        consts, carry = pair.given[:first], pair.given[first : first + count]
        over, (one, other) = pair.given[first + count :], pair.both("length")
        bodies = pair.both("jaxpr")
        if other == one * self.world:
            return self.over_examples(pair, consts, carry, over)
        if one != other or not pair.alike("jaxpr"):
            return [pair.refuse("a loop whose number of turns depends on the batch")] * pair.count
        settled = _settled(
            pair, carry, lambda x: self.inside(*bodies, [*consts, *x, *over])[:count]
        )
        return [*settled, *self.inside(*bodies, [*consts, *settled, *over])[count:]]

    def over_examples(
        self, pair: Pair, consts: Sequence[Relation], carry: Sequence[Relation], over: Any
    ) -> list[Relation]:
        """Each turn sees one example. A carry stays as it is, or adds something up."""
        lost, keeps = pair.refuse("a loop over the examples"), (Kind.SAME, Kind.ZERO, Kind.UNKNOWN)
        consts = [r if r.kind in (*keeps, Kind.EACH) else lost for r in consts]
        kinds = (Kind.ROWS, Kind.ZERO, Kind.UNKNOWN)
        turn = [
            r if r.kind in kinds[1:] else r.of(Kind.EACH) if r.kind in kinds else lost for r in over
        ]
        # Turns are fewer on a rank, so what else a carry holds may not change.
        body = pair.both("jaxpr")
        adds = [not all(_keeps(x, len(consts), i) for x in body) for i in range(len(carry))]
        state = [Relation(Kind.CARRY, _EMPTY, (i,)) if adds[i] else r for i, r in enumerate(carry)]
        out = self.inside(*body, [*consts, *state, *turn])
        found = list(carry)
        for i in (i for i, moves in enumerate(adds) if moves):
            r = out[i]
            if r.kind is Kind.CARRY and r.columns == (i,):
                r = ZERO if r.power == _EMPTY else r.of(Kind.SUM)
                r = join((carry[i], r)) or pair.refuse("a sum over examples that starts elsewhere")
            elif r.kind is not Kind.UNKNOWN:
                r = pair.refuse("a loop over the examples in which their order counts")
            found[i] = r
        for r in out[len(carry) :]:
            each = r.kind in (Kind.EACH, Kind.SAME)
            found.append(r.of(Kind.ROWS) if each else r if r.kind in keeps else lost)
        return found


def _of_one_example(pair: Pair) -> list[Relation]:
    """In a loop over examples, the value of one example is like a value that all ranks have."""
    if any(r.kind is Kind.SUM for r in pair.given):
        return [pair.refuse(rules.STATISTIC)] * pair.count
    alone = tuple(r.of(Kind.SAME) if r.kind is Kind.EACH else r for r in pair.given)
    found = rules.apply(dataclasses.replace(pair, given=alone))
    fits, meets = (Kind.SAME, Kind.ZERO, Kind.UNKNOWN), "one example meets the whole batch"
    found = [r if r.kind in fits else pair.refuse(meets) for r in found]
    return [r.of(Kind.EACH) if r.kind is Kind.SAME else r for r in found]


def _decides(which: Relation) -> bool:
    return which.sure or which == Relation(Kind.EACH)


def _decided(r: Relation, which: Relation) -> Relation:
    """Returns what a result becomes if one example decides about it."""
    return r.of(Kind.EACH) if which.kind is Kind.EACH and r.kind is Kind.SAME else r


def _settled(
    pair: Pair, carry: Sequence[Relation], turn: Callable[..., list[Relation]]
) -> list[Relation]:
    """Returns the relations of a loop's carry that hold before and after every turn."""
    settled = list(carry)
    for _ in range(4 * len(settled) + 4):
        after = [_joined(pair, x) for x in zip(settled, turn(settled), strict=True)]
        if after == settled:
            return settled
        settled = after
    return [pair.refuse(_CHANGES)] * len(settled)


def _joined(pair: Pair, relations: Sequence[Relation]) -> Relation:
    return join(relations) or pair.refuse(_CHANGES)


_CHANGES = "branches or turns that differ in how their results depend on the batch"
_DEPENDS = unknown("the program itself depends on the batch size")
_EMPTY = 99  # the power of a running sum to which nothing has been added
_PROGRAMS: dict[str, Callable[[_Walk, Pair], list[Relation]]] = {
    **dict.fromkeys(
        (
            *("jit", "pjit", "closed_call", "core_call", "remat", "remat2", "checkpoint"),
            *("custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr", "call_hi_primitive"),
            "eval_jaxpr",
        ),
        _Walk.call,
    ),
    "shard_map": _Walk.nested,
    "custom_linear_solve": _Walk.linear_solve,
    "cond": _Walk.branches,
    "while": _Walk.while_loop,
    "scan": _Walk.scan,
}


def _running_sum(pair: Pair) -> Relation:
    """Adds the value of one example to the sum so far, in a loop over examples."""
    a, *others = sorted(pair.given, key=lambda r: r.kind is not Kind.CARRY)
    if len(others) == 1 and pair.name in ("add", "add_any"):
        (r,) = others
        if r.kind is Kind.ZERO:
            return a
        if r.kind in (Kind.EACH, Kind.SAME) and a.power in (_EMPTY, r.power):
            return a.at(r.power)
    return pair.refuse("a running sum over the examples that is more than added to")


def _body(eqn: Any) -> Any:
    if "_prim" in eqn.params:
        return _compat.written_out(eqn)
    for key in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
        if key in eqn.params:
            return eqn.params[key] if _compat.is_program(eqn.params[key]) else None
    return None


def _keeps(body: Any, consts: int, i: int) -> bool:
    """Whether a loop's body returns its carry `i` as it is."""
    body = _compat.open_program(body)
    return body.outvars[i] is body.invars[consts + i]


def _is_pure(eqn: Any) -> bool:
    """Whether an equation only computes values from values."""
    values = all(isinstance(x.aval, jax.core.ShapedArray) for x in (*eqn.invars, *eqn.outvars))
    effects = {type(e).__name__ for e in eqn.effects} - {"NamedAxisEffect"}
    return values and (not effects or not eqn.outvars)


def _is_literal(x: Any) -> bool:
    return hasattr(x, "val")


def _at(r: Relation, eqn: Any) -> Relation:
    """Returns a relation with the line of an equation, if it is UNKNOWN and has none."""
    return dataclasses.replace(r, line=where(eqn)) if r.why and not r.line else r


def _form(eqn: Any) -> tuple[Any, int, int]:
    return eqn.primitive, len(eqn.invars), len(eqn.outvars)


def _shown(eqn: Any) -> str:
    return f"{eqn.primitive.name!r} with {len(eqn.invars)} operands"


def _first_difference(small: Any, large: Any) -> Relation:
    for one, other in zip(small, large, strict=False):
        if _form(one) != _form(other):
            names = f"{_shown(one)} on a rank, {_shown(other)} in all"
            return unknown(f"{_DEPENDS.why}: {names}", where(other))
    return _DEPENDS
