"""Finds what a loss does with its batch, from two traces at different batch sizes.

A value that depends on the batch but has the same shape at both sizes is a statistic of the batch,
such as a sum of weights or a mean over examples. Each rank has its own. If statistics enter the
loss only linearly, the mean over the ranks is the loss of the whole batch. With any other use (a
quotient, a broadcast over the examples) the loss would differ from that under plain jit.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cgx_jax import _compat
from cgx_jax.plain_jit.arguments import shown

_REDUCTIONS = {"psum", "pmin", "pmax", "all_gather"}
_CALLS = {
    "jit",
    "pjit",
    "closed_call",
    "checkpoint",
    "custom_jvp_call",
    "custom_vjp_call",
    "custom_vjp_call_jaxpr",
}
# These are linear in the first operand: each value of the result copies one of its values or more.
_MOVES = {
    "neg",
    "convert_element_type",
    "copy",
    "reduce_precision",
    "reshape",
    "squeeze",
    "expand_dims",
    "transpose",
    "rev",
    "slice",
    "dynamic_slice",
    "gather",
    "concatenate",
    "pad",
    "broadcast_in_dim",
    "optimization_barrier",
    "stop_gradient",
    "name",
    "sharding_constraint",
    "psum",
}
_LOOP_ROUNDS = 4


@dataclasses.dataclass(frozen=True)
class Value:
    """What is known about a value in the trace.

    `varying`: ranks hold different values. `batch`: it depends on split data and has not been
    reduced over the axis since. `growth`: it is proportional to this power of the batch size; None
    if that is not known. `misuse`: where a statistic entered it other than linearly, or None.
    """

    varying: bool = False
    batch: bool = False
    growth: int | None = 0
    misuse: str | None = None


CONSTANT = Value()


def study(
    small: Any, large: Any, inputs: Sequence[Value], axes: frozenset[str], ratio: int
) -> list[Value]:
    """Returns one `Value` per output of two traces of the same loss, as closed jaxprs.

    Batches in `large` are `ratio` times as large as in `small`.
    """
    walk = _Walk(axes, ratio)
    constants = [
        Value(growth=walk.scaling(a, b)) for a, b in zip(small.consts, large.consts, strict=False)
    ]
    return walk.run(small.jaxpr, large.jaxpr, inputs, constants)


class _Walk:
    def __init__(self, axes: frozenset[str], ratio: int):
        self.axes, self.ratio = axes, ratio

    def run(
        self, small: Any, large: Any, inputs: Sequence[Value], constants: Sequence[Value] = ()
    ) -> list[Value]:
        """Returns the values of a jaxpr's outputs; `large`, its twin, is None if there is none."""
        env: dict[Any, Value] = dict(zip(small.invars, inputs, strict=True))
        env.update(zip(small.constvars, constants, strict=False))
        sizes = _Sizes(small, large)

        def read(x: Any) -> Value:
            return CONSTANT if _is_literal(x) else env.get(x, CONSTANT)

        for eqn, twin in zip(small.eqns, sizes.twins, strict=True):
            results = self.equation(eqn, twin, [read(x) for x in eqn.invars], sizes)
            env.update(zip(eqn.outvars, results, strict=True))
        return [read(x) for x in small.outvars]

    def equation(self, eqn: Any, twin: Any, given: list[Value], sizes: _Sizes) -> list[Value]:
        name = eqn.primitive.name
        over = _axes_of(eqn)
        if name == "axis_index" and over & self.axes:
            return [Value(varying=True)]
        if name in _REDUCTIONS and self.axes <= over:
            return [Value(growth=v.growth) for v in given]
        bodies = _bodies(eqn, twin)
        if name == "cond" and bodies:
            return self.branches(bodies, given)
        if name == "scan" and bodies:
            return self.loop(eqn, bodies[0], given)
        if bodies:
            return self.run(*bodies[0], given)
        statistics = [v.batch and sizes.fixed(x) for v, x in zip(given, eqn.invars, strict=True)]
        misuse = next((v.misuse for v in given if v.misuse), None)
        if any(statistics) and not misuse and not _linear(eqn, given, statistics, sizes):
            x = eqn.invars[statistics.index(True)]
            misuse = f"{shown(x.aval)} in {name!r}{_where(eqn)}"
        if not misuse and sum(v.batch for v in given) > 1 and sizes.crosses(eqn):
            misuse = f"pairs of examples, {shown(eqn.outvars[0].aval)} in {name!r}{_where(eqn)}"
        found = Value(
            varying=any(v.varying for v in given),
            batch=any(v.batch for v in given),
            growth=self.growth(eqn, twin, given, sizes),
            misuse=misuse,
        )
        return [found] * len(eqn.outvars)

    def branches(self, bodies: list[tuple[Any, Any]], given: list[Value]) -> list[Value]:
        predicate, *rest = given
        found = [_merge(v) for v in zip(*(self.run(*pair, rest) for pair in bodies), strict=True)]
        if predicate.varying:
            found = [_merge((v, dataclasses.replace(predicate, growth=None))) for v in found]
        return found

    def loop(self, eqn: Any, body: tuple[Any, Any], given: list[Value]) -> list[Value]:
        """Returns a scan's values, after several passes in which its carry feeds findings back."""
        first, count = _compat.scan_operands(eqn.params)
        values = list(given)
        for _ in range(_LOOP_ROUNDS):
            out = self.run(*body, values)
            for i in range(count):
                values[first + i] = _merge((values[first + i], out[i]))
        return self.run(*body, values)

    def growth(self, eqn: Any, twin: Any, given: list[Value], sizes: _Sizes) -> int | None:
        """Returns the power of the batch size to which the results are proportional, or None."""
        name = eqn.primitive.name
        if twin is None:
            return None if any(v.batch for v in given) else 0
        powers = [
            _plus(v.growth, self.scaling(x.val, y.val) if _is_literal(x) and _is_literal(y) else 0)
            for v, x, y in zip(given, eqn.invars, twin.invars, strict=True)
        ]
        reduced = 1 if sizes.reduces(eqn, twin) else 0
        if name in _MOVES:
            return powers[0]
        if name == "reduce_sum":
            return _plus(powers[0], reduced)
        if name in ("add", "add_any", "sub", "max", "min"):
            return powers[0] if len(set(powers)) == 1 else None
        if name == "select_n":
            return powers[1] if len(set(powers[1:])) == 1 else None
        if name in ("mul", "div"):
            return _plus(powers[0], powers[1], 1 if name == "mul" else -1)
        if name == "dot_general":
            return _plus(_plus(powers[0], powers[1]), reduced)
        return 0 if set(powers) <= {0} and not reduced else None

    def scaling(self, small: Any, large: Any) -> int | None:
        """Returns the growth of a constant, such as the count by which a mean divides."""
        if isinstance(small, jax.core.Tracer) or np.size(small) != 1 or np.size(large) != 1:
            return 0
        if not jnp.issubdtype(jnp.result_type(small), jnp.number):
            return 0
        a, b = (complex(np.ravel(np.asarray(x))[0]) for x in (small, large))
        powers = {0: a, 1: a * self.ratio, -1: a / self.ratio}
        return next((p for p, x in powers.items() if np.isclose(b, x, rtol=1e-3)), None)


def _linear(eqn: Any, given: list[Value], statistics: list[bool], sizes: _Sizes) -> bool:
    """Returns whether an equation is linear in its statistics, with only statistics as results."""
    name = eqn.primitive.name
    if not all(sizes.fixed(x) for x in eqn.outvars):
        return False
    if name in _MOVES or name in ("reduce_sum", "add", "add_any", "sub"):
        return not any(statistics[1:]) or name in ("add", "add_any", "sub", "concatenate", "pad")
    if name in ("mul", "dot_general"):
        return sum(v.batch for v in given) == 1
    return name == "div" and not given[1].batch


class _Sizes:
    """The shapes in two traces of one program, equation by equation."""

    def __init__(self, small: Any, large: Any):
        same = large is not None and [e.primitive for e in small.eqns] == [
            e.primitive for e in large.eqns
        ]
        self.twins = list(large.eqns) if same else [None] * len(small.eqns)
        self._large: dict[Any, tuple[int, ...]] = {}
        if same:
            for one, other in [(small, large), *zip(small.eqns, large.eqns, strict=True)]:
                twins = zip(
                    (*one.invars, *one.outvars), (*other.invars, *other.outvars), strict=True
                )
                self._large.update((x, y.aval.shape) for x, y in twins if not _is_literal(x))

    def fixed(self, x: Any) -> bool:
        """Returns whether the shape of `x` is independent of the batch size, as for scalars."""
        return x.aval.shape == () or self._large.get(x) == x.aval.shape

    def crosses(self, eqn: Any) -> bool:
        """Returns whether an equation pairs examples, so that two dimensions of its result grow."""

        def grown(x: Any) -> int:
            large = () if _is_literal(x) else self._large.get(x, ())
            return sum(a != b for a, b in zip(x.aval.shape, large, strict=False))

        before = max(map(grown, eqn.invars), default=0)
        return max(map(grown, eqn.outvars), default=0) > 1 >= before

    def reduces(self, eqn: Any, twin: Any) -> bool:
        """Returns whether an equation sums or otherwise reduces over the examples."""
        if eqn.primitive.name == "dot_general":
            (contracted, _), _ = eqn.params["dimension_numbers"]
        else:
            contracted = eqn.params.get("axes", ())
        if not eqn.invars or not all(isinstance(d, int) for d in contracted):
            return False
        small, large = eqn.invars[0].aval.shape, twin.invars[0].aval.shape
        return any(small[d] != large[d] for d in contracted)


def _bodies(eqn: Any, twin: Any) -> list[tuple[Any, Any]]:
    """Returns an equation's inner programs in both traces; none if it is treated as a whole."""
    name = eqn.primitive.name
    if name == "cond":
        inner = [b.jaxpr for b in eqn.params["branches"]]
        others = [b.jaxpr for b in twin.params["branches"]] if twin else [None] * len(inner)
        return list(zip(inner, others, strict=True))
    # A loop over the examples works on one example at a time. Its shape is the same in both traces,
    # but it is not a statistic.
    if name == "scan" and (twin is None or twin.params["length"] != eqn.params["length"]):
        return []
    if name not in _CALLS and name != "scan":
        return []
    body, other = _program(eqn), _program(twin) if twin else None
    if body is None or len(body.invars) != len(eqn.invars):
        return []
    return [(body, other)]


def _program(eqn: Any) -> Any:
    for key in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
        if key in eqn.params:
            found = eqn.params[key]
            return getattr(found, "jaxpr", found)
    return None


def _axes_of(eqn: Any) -> frozenset[Any]:
    axes = eqn.params.get("axes", eqn.params.get("axis_name", ()))
    return frozenset(axes if isinstance(axes, (tuple, list)) else (axes,))


def _is_literal(x: Any) -> bool:
    return hasattr(x, "val")


def _plus(a: int | None, b: int | None, sign: int = 1) -> int | None:
    return None if a is None or b is None else a + sign * b


def _merge(values: Sequence[Value]) -> Value:
    growths = {v.growth for v in values}
    return Value(
        any(v.varying for v in values),
        any(v.batch for v in values),
        growths.pop() if len(growths) == 1 else None,
        next((v.misuse for v in values if v.misuse), None),
    )


def _where(eqn: Any) -> str:
    """Returns the line of the user's program for an equation, or "" if JAX does not know it."""
    frames = getattr(getattr(eqn.source_info, "traceback", None), "frames", ())
    for frame in frames:
        if not any(part in frame.file_name for part in _LIBRARIES):
            return f" ({os.path.basename(frame.file_name)}:{frame.line_num})"
    return ""


_LIBRARIES = (
    os.path.dirname(__file__),
    *(os.sep.join(("site-packages", name, "")) for name in ("jax", "flax", "optax", "equinox")),
)
