"""What the fused exchanges share: one operation that encodes, sends, reduces and decodes."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import batching

from cgx_jax import _compat
from cgx_jax.axes import Axes, in_groups
from cgx_jax.exchanges.base import Call
from cgx_jax.kernels.wire import Layout, Slot


def refusal_of_axes(axes: Sequence[str]) -> str | None:
    """Returns why no fused call works over the axes bound where this is traced, or None."""
    if not _compat.bound_by_mesh(axes):
        return "the axis is a vmap axis, which does not join devices; reduce over a mesh axis"
    mesh = jax.sharding.get_abstract_mesh()
    automatic = [n for n in mesh.axis_names if n not in mesh.manual_axes]
    if automatic:
        return f"mesh axes {automatic} are not manual; let shard_map bind every axis of the mesh"
    return None


def positions(axes: Axes) -> tuple[tuple[int, ...], ...]:
    """Returns the positions in the current mesh of each group of `axes`, in rank order."""
    mesh = jax.sharding.get_abstract_mesh()
    names = list(mesh.axis_names)
    grid = np.arange(mesh.size).reshape([mesh.shape[n] for n in names])
    rows = in_groups(grid, [names.index(a) for a in axes.names], axes.groups)
    return tuple(tuple(int(i) for i in row) for row in rows)


def position(axes: Sequence[str]) -> jax.Array:
    """Returns this rank's position in the current mesh, typed as varying over `axes` only.

    The position only routes bytes. The result of a call over some axes of the mesh is the same
    along the other axes wherever its operands are.
    """
    names = jax.sharding.get_abstract_mesh().axis_names
    return _compat.same_over(lax.axis_index(names), [n for n in names if n not in axes])


@dataclasses.dataclass(frozen=True)
class Bound:
    """The static parameter of a fused primitive: a `Call` where its ranks are known.

    `label` begins its error messages. `positions` are those of each group's ranks in the mesh.
    Results are the same over the `replicated` axes. `options` are specific to the exchange.
    """

    label: str
    call: Call
    positions: tuple[tuple[int, ...], ...]
    replicated: tuple[str, ...]
    options: tuple[tuple[str, int], ...]

    @property
    def world(self) -> int:
        return len(self.positions[0])

    @property
    def layout(self) -> Layout:
        return self.call.layout

    def attributes(self) -> dict[str, Any]:
        """Returns the attributes of the handler."""
        return {
            "slots": np.asarray(self.layout.numbers, np.int64),
            "world": np.int64(self.world),
            "divisor": np.float32(self.call.divisor),
            "groups": np.asarray(self.positions, np.int64).reshape(-1),
            "name": self.label,
            **{k: np.int64(v) for k, v in self.options},
        }


def bind(
    primitive: Primitive, label: str, call: Call, operands: Sequence[Any], **options: int
) -> list[Any]:
    """Calls a primitive of this module, and returns its results.

    `operands` are those specific to the exchange, then the leaves, one per slot of the layout, then
    the array of all units if any leaf has some.
    """
    axes = call.axes
    # An all-gather accepts an operand that does not vary, but its result varies.
    index = lax.axis_index(axes.names)
    varying = frozenset().union(*(_compat.varying_axes(x) for x in (index, *operands)))
    bound = Bound(
        f"{label} over axis {', '.join(map(repr, axes.names))}",
        call,
        positions(axes),
        axes.names if axes.groups is None else (),
        tuple(sorted(options.items())),
    )
    given = [_compat.vary_over(x, varying) for x in operands]
    with jax.named_scope(call.collective.value):
        out: list[Any] = primitive.bind(*given, bound=bound)
    return out


def reduced(x: Any, slot: Slot, bound: Bound) -> Any:
    """Returns the type of an all-reduce of `x`."""
    return _compat.reduced_aval(x, bound.replicated)


def summed(x: Any, slot: Slot, bound: Bound) -> Any:
    """Returns the type of a gather-sum of `x`: fp32 if it has units.

    The sum is then still in units. The caller takes it out of them after the division, which is why
    it stays fp32 until then.
    """
    return _compat.reduced_aval(x.update(dtype=np.float32) if slot.units else x, bound.replicated)


def scattered(x: Any, slot: Slot, bound: Bound) -> Any:
    """Returns the type of a reduce-scatter of the rows of `x`."""
    return _compat.result_aval(x.shape[1:], x.dtype, x)


def gathered(x: Any, slot: Slot, bound: Bound) -> Any:
    """Returns the type of an all-gather of `x`: a row from every rank."""
    return _compat.result_aval((bound.world, *x.shape), x.dtype, x)


def primitive(name: str, leading: int, result: Callable[..., Any]) -> Primitive:
    """Makes a fused call that returns a `result` for every leaf, then residuals.

    The leaves follow `leading` other operands. The caller registers the lowerings.
    """

    def shapes(*operands: jax.Array, bound: Bound) -> list[Any]:
        slots = bound.layout.slots
        leaves = operands[leading : leading + len(slots)]
        results = (result(x, f, bound) for x, f in zip(leaves, slots, strict=True))
        return [*results, *(leaves if bound.call.residual else ())]

    return operation(name, shapes)


def operation(name: str, shapes: Callable[..., list[Any]]) -> Primitive:
    """Makes a primitive whose batches are calls of one element each.

    Each is cut into chunks by itself, as with the `xla` exchange.
    """
    p = _compat.operation(name, shapes)

    def batch(args: Sequence[Any], dims: Sequence[Any], **params: Any) -> Any:
        pairs = list(zip(args, dims, strict=True))
        size = next(x.shape[d] for x, d in pairs if d is not None)
        if size == 0:
            one = [x if d is None else jnp.zeros(np.delete(x.shape, d), x.dtype) for x, d in pairs]
            like = jax.eval_shape(functools.partial(p.bind, **params), *one)
            return [jnp.zeros((0, *y.shape), y.dtype) for y in like], [0] * len(like)
        calls = []
        for i in range(size):
            one = [x if d is None else lax.index_in_dim(x, i, d, keepdims=False) for x, d in pairs]
            calls.append(p.bind(*one, **params))
        return [jnp.stack(leaf) for leaf in zip(*calls, strict=True)], [0] * len(calls[0])

    batching.primitive_batchers[p] = batch
    return p
