"""Finds gradients that two hooks would sum over one axis: marks on the values that a hook returns.

A mark is the identity. Its tangent and cotangent are marked too, so JAX's own record of a program
shows which gradients are sums already.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import Literal
from jax.interpreters import ad

from cgx_jax import _compat
from cgx_jax._types import Pytree
from cgx_jax.leaves import operand_of

# What the transpose of a mark is. A derivative of a gradient is marked as such both ways.
_TRANSPOSED = {"tangent": "cotangent", "cotangent": "tangent", "second": "second"}


def mark(name: str, path: str, x: Any, axes: Sequence[str]) -> Any:
    """Returns `x`, whose gradient a hook will sum over `axes`.

    Raises ValueError, now or while the gradient is traced, if another hook sums it already. `name`
    is the call that the user wrote.
    """
    what: dict[str, Any] = {"name": name, "path": path, "axes": tuple(axes)}
    differentiated = x
    while isinstance(differentiated, jax.core.Tracer) and not hasattr(differentiated, "tangent"):
        differentiated = getattr(differentiated, "val", None)
    _refuse(getattr(differentiated, "tangent", None), casts=True, **what)
    return _mark_p.bind(x, kind="value", **what)


def _refuse(x: Any, *, name: str, path: str, axes: tuple[Any, ...], casts: bool = False) -> None:
    def second(equation: Any) -> Any:
        """Whether this equation marks a derivative of a gradient."""
        return equation.primitive is _mark_p and equation.params["kind"] == "second"

    def summed(equation: Any) -> Any:
        """Returns the axis over which the gradient is summed at this equation, or None."""
        params = equation.params
        marked = equation.primitive is _mark_p and params["kind"] != "value"
        # The gradient of a cast is a sum. Only tangents are cast by the user.
        if marked or (casts and equation.primitive.name == "pvary"):
            return next((n for n in axes if n in params["axes"]), None)
        return None

    found = _marked(x, summed)
    if found and _marked(x, second):
        raise ValueError(
            f"{operand_of(name, path)} is differentiated twice in reverse mode, but {name} sums "
            "only gradients. For a Hessian times v, take the forward derivative of the gradient: "
            "jax.jvp(jax.grad(loss), (params,), (v,))[1]."
        )
    if found:
        raise ValueError(
            f"{operand_of(name, path)} depends on parameters whose gradient is summed over axis "
            f"{found!r} already: they are hooked, or jax.lax.pcast makes them vary inside the "
            "differentiated function. Their gradient would be multiplied by the number of ranks. "
            f"Call {name} once on each parameter, and make parameters vary before jax.grad only."
        )


def _jvp(primals: Pytree, tangents: Pytree, **params: Any) -> Any:
    (x,), (t,) = primals, tangents
    out = _mark_p.bind(x, **params)
    if type(t) is ad.Zero:
        return out, t
    kind = "tangent" if params["kind"] == "value" else "second"
    return out, _mark_p.bind(t, **params | {"kind": kind})


def _transpose(cotangent: Pytree, x: Any, *, kind: str, **params: Any) -> Any:
    if type(cotangent) is ad.Zero:
        return [cotangent]
    if kind == "tangent":
        _refuse(cotangent, **params)
    return [_mark_p.bind(cotangent, kind=_TRANSPOSED[kind], **params)]


_mark_p = _compat.identity("cgx_hooked")
ad.primitive_jvps[_mark_p] = _jvp
ad.primitive_transposes[_mark_p] = _transpose


def _marked(x: Any, summed: Callable[[Any], Any]) -> Any:
    """Returns what `summed` returns for an equation that `x` depends on, or None."""
    todo, seen = [x], set()
    while todo:
        x = todo.pop()
        while isinstance(x, jax.core.Tracer) and not hasattr(x, "parent"):  # a wrapper
            x = getattr(x, "primal", getattr(x, "val", None))
        equation = getattr(x, "parent", None)
        if equation is None:  # an input of the program
            continue
        place = [v is x.val for v in equation.outvars].index(True)
        if (id(equation), place) in seen:
            continue
        seen.add((id(equation), place))
        if axis := summed(equation):
            return axis
        axis, needed = _within(equation, {place}, summed)
        if axis is not None:
            return axis
        todo += [equation.in_tracers[i] for i in needed]
    return None


def _within(equation: Any, places: set[int], summed: Callable[[Any], Any]) -> tuple[Any, set[int]]:
    """Follows results of an equation through the programs that it holds.

    Returns the axis or None, and the numbers of the operands that the results depend on.
    """
    operands, results = len(equation.invars), len(equation.outvars)
    found = map(_compat.open_program, _compat.programs_in(equation.params.values()))
    inner = [p for p in found if len(p.outvars) == results]
    if not inner:
        return None, set(range(operands))
    needed: set[int] = set()
    loops = equation.primitive.name in ("scan", "while")
    for program in inner:
        first = operands - len(program.invars)
        constants, carry = len(program.invars) - results, results
        if equation.primitive.name == "scan":
            constants, carry = _compat.scan_operands(equation.params)
        wanted = set(places)
        while True:
            axis, inputs = _through(program, wanted, summed)
            if axis is not None:
                return axis, set()
            again = {i - constants for i in inputs if 0 <= i - constants < carry}
            if not loops or again <= wanted:
                break
            wanted |= again
        needed |= {first + i for i in inputs if first + i >= 0}
    return None, needed


def _through(program: Any, places: set[int], summed: Callable[[Any], Any]) -> tuple[Any, set[int]]:
    needed = {program.outvars[i] for i in places if not isinstance(program.outvars[i], Literal)}
    for equation in reversed(program.eqns):
        own = {i for i, v in enumerate(equation.outvars) if v in needed}
        if not own:
            continue
        axis = summed(equation)
        operands: set[int] = set()
        if axis is None:
            axis, operands = _within(equation, own, summed)
        if axis is not None:
            return axis, set()
        invars = equation.invars
        needed |= {invars[i] for i in operands if not isinstance(invars[i], Literal)}
    return None, {i for i, v in enumerate(program.invars) if v in needed}
