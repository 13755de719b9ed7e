"""The backward-pass hook: compressed reduction of gradients while the backward pass runs.

A hook marks the values that it returns. A mark is the identity. Its tangent and cotangent are
marked too, so JAX's own record of a program shows which gradients another hook sums already.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Literal
from jax.interpreters import ad

from cgx_jax import _compat
from cgx_jax._types import AxisName, Key, Pytree
from cgx_jax.arguments import folded
from cgx_jax.axes import SMALL_BYTES
from cgx_jax.compressors import Compressor
from cgx_jax.debug import nonfinite
from cgx_jax.exchanges import Exchange
from cgx_jax.kernels.wire import HOOK_FUSION_BYTES
from cgx_jax.leaves import operand_of
from cgx_jax.plan import Plan, consecutive, resolve
from cgx_jax.policies.rules import Policy
from cgx_jax.reductions import Levels, Reduction
from cgx_jax.route.route import Options, Route, route
from cgx_jax.route.run import values_of
from cgx_jax.tuning import Tuner

_HOOK = "reduce_in_backward"


def reduce_in_backward(
    params: Pytree,
    axis_name: AxisName,
    compressor: Compressor | Policy | Plan | None = None,
    *,
    key: Key = None,
    exchange: Exchange | str | Tuner = "auto",
    reduction: Reduction | str | None = None,
    levels: Levels | None = None,
) -> Pytree:
    """Returns `params` unchanged; the backward pass sums their gradients with compression.

    `params` is a pytree of arrays. Wrap the parameters inside the loss. Each fusion buffer (4 MiB,
    or the plan's) is reduced as soon as its own gradients are ready, while the backward pass
    continues. Exact leaves travel in buffers of up to 64 KiB. The gradient is that of a replicated
    parameter: the sum over `axis_name`. To get the mean, take the mean of the loss
    (`lax.pmean(loss, axis_name)` under check_vma), or divide the gradients.

    `compressor`, `key`, `exchange`, `reduction`, `levels` and errors are as in `psum_compressed`. A
    `Tuner` as `exchange` chooses the exchange, the reduction, the levels and the buffer size. Also
    raises ValueError for compressors with state, and for parameters that are hooked over the axis
    already or are made to vary inside the differentiated function: their gradient would be
    multiplied by the number of ranks. Under `jax.jit` this is seen through jit, scan and remat too.
    Without it, two hooks are seen only if no such function lies between them.
    """
    nonfinite.refuse_skip(_HOOK)
    plan = resolve(_HOOK, params, compressor, fusion_bytes=HOOK_FUSION_BYTES)
    plan.require_stateless(_HOOK)
    options = Options.resolve(
        _HOOK, axis_name, exchange=exchange, reduction=reduction, levels=levels, overlaps=True
    )
    taken = route(options, plan)
    plan = taken.plan
    leaves, treedef = jax.tree.flatten(params)
    options.axes.check_plain(_HOOK, list(zip([x.path for x in plan.leaves], leaves, strict=True)))
    for i, leaf in enumerate(plan.leaves):
        if jnp.issubdtype(leaf.dtype, jnp.inexact):
            leaves[i] = _mark(leaf.path, jnp.asarray(leaves[i]), options.axes.names)
    inexact = [i for i in plan.exact if jnp.issubdtype(plan.leaves[i].dtype, jnp.inexact)]
    together = consecutive(plan.leaves, dict.fromkeys(inexact), SMALL_BYTES)
    for number, part in enumerate([*plan.buffers, *together]):
        own = folded(_HOOK, key, number)
        same = _hooked(taken.subset(part), own, tuple(leaves[i] for i in part))
        for i, x in zip(part, same, strict=True):
            leaves[i] = x
    return jax.tree.unflatten(treedef, leaves)


def _hooked(taken: Route, key: Key, leaves: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns leaves as they are; the backward pass sums their cotangents by `taken`."""
    before = [_compat.varying_axes(x) for x in leaves]
    vary = taken.options.axes.varying()

    def forward(key: Key, leaves: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(_compat.vary_over(x, vary) for x in leaves)

    def backward(key: Key, cotangents: tuple[Any, ...]) -> tuple[None, tuple[Any, ...]]:
        summed = zip(values_of(taken, cotangents, key), before, strict=True)
        return None, tuple(_compat.vary_over(x, axes) for x, axes in summed)

    identity = jax.custom_vjp(forward)
    identity.defvjp(lambda key, xs: (forward(key, xs), key), backward)
    return identity(key, leaves)


# What the transpose of a mark is. A derivative of a gradient is marked as such both ways.
_TRANSPOSED = {"tangent": "cotangent", "cotangent": "tangent", "second": "second"}


def _mark(path: str, x: Any, axes: tuple[str, ...]) -> Any:
    """Returns `x`, whose gradient a hook will sum over `axes`.

    Raises ValueError, now or while the gradient is traced, if another hook sums it already.
    """
    differentiated = x
    while isinstance(differentiated, jax.core.Tracer) and not hasattr(differentiated, "tangent"):
        differentiated = getattr(differentiated, "val", None)
    _refuse(getattr(differentiated, "tangent", None), path, axes, casts=True)
    return _mark_p.bind(x, kind="value", path=path, axes=axes)


def _refuse(x: Any, path: str, axes: tuple[str, ...], *, casts: bool = False) -> None:
    def summed(equation: Any) -> Any:
        """Returns the axis over which the gradient is summed at this equation, or None."""
        params = equation.params
        marked = equation.primitive is _mark_p and params["kind"] != "value"
        # The gradient of a cast is a sum. Only tangents are cast by the user.
        if marked or (casts and equation.primitive.name == "pvary"):
            return next((n for n in axes if n in params["axes"]), None)
        return None

    found = next(filter(None, map(summed, _equations(x))), None)
    second = (e.primitive is _mark_p and e.params["kind"] == "second" for e in _equations(x))
    if found and any(second):
        raise ValueError(
            f"{operand_of(_HOOK, path)} is differentiated twice in reverse mode, but {_HOOK} sums "
            "only gradients. For a Hessian times v, take the forward derivative of the gradient: "
            "jax.jvp(jax.grad(loss), (params,), (v,))[1]."
        )
    if found:
        raise ValueError(
            f"{operand_of(_HOOK, path)} depends on parameters whose gradient is summed over axis "
            f"{found!r} already: they are hooked, or jax.lax.pcast makes them vary inside the "
            "differentiated function. Their gradient would be multiplied by the number of ranks. "
            f"Call {_HOOK} once on each parameter, and make parameters vary before jax.grad only."
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


def _equations(x: Any) -> Iterator[Any]:
    """Yields the equations that `x` depends on, those of programs within others too."""
    todo, seen = [x], set()
    while todo:
        x = todo.pop()
        while isinstance(x, jax.core.Tracer) and not hasattr(x, "parent"):  # a wrapper
            x = getattr(x, "primal", getattr(x, "val", None))
        equation = getattr(x, "parent", None)
        if equation is None:  # an input of the program
            continue
        place = [v is x.val for v in equation.outvars].index(True)
        if (id(equation), place) not in seen:
            seen.add((id(equation), place))
            needed = yield from _within(equation, {place})
            todo += [equation.in_tracers[i] for i in needed]


# These yield equations, and return the numbers of the operands, or of the inputs, that are needed.


def _within(equation: Any, places: set[int]) -> Generator[Any, None, set[int]]:
    """Follows results of an equation through the programs that it holds."""
    yield equation
    operands, results = len(equation.invars), len(equation.outvars)
    found = map(_compat.open_program, _compat.programs_in(equation.params.values()))
    inner = [p for p in found if len(p.outvars) == results]
    if not inner:
        return set(range(operands))
    needed: set[int] = set()
    loops = equation.primitive.name in ("scan", "while")
    for program in inner:
        first = operands - len(program.invars)
        constants, carry = len(program.invars) - results, results
        if equation.primitive.name == "scan":
            constants, carry = _compat.scan_operands(equation.params)
        wanted = set(places)
        while True:
            inputs = yield from _through(program, wanted)
            again = {i - constants for i in inputs if 0 <= i - constants < carry}
            if not loops or again <= wanted:
                break
            wanted |= again
        needed |= {first + i for i in inputs if first + i >= 0}
    return needed


def _through(program: Any, places: set[int]) -> Generator[Any, None, set[int]]:
    needed = {program.outvars[i] for i in places if not isinstance(program.outvars[i], Literal)}
    for equation in reversed(program.eqns):
        if own := {i for i, v in enumerate(equation.outvars) if v in needed}:
            operands = yield from _within(equation, own)
            invars = equation.invars
            needed |= {invars[i] for i in operands if not isinstance(invars[i], Literal)}
    return {i for i, v in enumerate(program.invars) if v in needed}
