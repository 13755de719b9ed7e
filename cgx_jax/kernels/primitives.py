"""JAX primitives of the codec: encode, reduce, decode, accumulate over many leaves at once.

Each primitive is one native call on the CPU and on CUDA, and plain jnp elsewhere. Leaves are read
in place. A leading batch of independent buffers is part of the primitive, so `vmap` stays one call.
Results vary over the mesh axes over which the operands vary.

Leaves may have units (`Units`), by which values are multiplied before they are encoded and after
they are decoded, before they are rounded to the leaf's dtype. The array of all units is then a
call's last operand.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir
from jax.typing import ArrayLike

from cgx_jax import _compat
from cgx_jax._types import Shaped, Words
from cgx_jax.kernels import chunk, platforms, reference, scaling
from cgx_jax.kernels.scaling import Residuals, Shapes
from cgx_jax.kernels.units import Units
from cgx_jax.kernels.wire import Layout

NO_RANK = -1


def bind(primitive: Primitive, *operands: ArrayLike, **params: Any) -> list[jax.Array]:
    """Binds a primitive after typing all operands as varying over the same axes, as it needs."""
    arrays = [jnp.asarray(x) for x in operands]
    axes = frozenset().union(*(_compat.varying_axes(x) for x in arrays))
    return primitive.bind(*(_compat.vary_over(x, axes) for x in arrays), **params)


def _check_payload(name: str, payload: jax.Array, expected: int) -> None:
    if payload.dtype != jnp.uint8 or payload.size != expected:
        raise ValueError(
            f"{name}: the payload is {payload.dtype}[{payload.size}], but its layout needs "
            f"uint8[{expected}]; encode and decode with the same compressor, leaves and world size."
        )


def with_units(layout: Layout, units: Units | None) -> tuple[Layout, list[jax.Array]]:
    """Returns the layout with these units, and the kernel operands that they need."""
    if units is None:
        return layout, []
    return layout.with_units(units.places), [units.factors]


class Sent(NamedTuple):
    """What a rank sends of its own.

    `words` are what noise is drawn from, uint32[2]. `leaves` are f32, bf16 or f16 of any shape, one
    per slot of a layout. `units` are those of the leaves, None if no leaf has any. The chunk of
    `rank`, i32[], is the caller's own.
    """

    words: Words
    leaves: Sequence[jax.Array]
    units: Units | None = None
    rank: ArrayLike = NO_RANK


def encode(sent: Sent, layout: Layout, *, residual: bool = False) -> tuple[jax.Array, Residuals]:
    """Encodes leaves; returns the payload u8[world, chunk_bytes], and residuals or None.

    The own chunk is never sent, so its row is zeros and its residual is 0.
    """
    layout, factors = with_units(layout, sent.units)
    params = {"layout": layout, "residual": residual, "batch": 1}
    out = bind(encode_p, sent.words, jnp.int32(sent.rank), *sent.leaves, *factors, **params)
    payload = out[0].reshape(layout.world, layout.chunk_bytes)
    if not residual:
        return payload, None
    return payload, [r.reshape(x.shape) for r, x in zip(out[1:], sent.leaves, strict=True)]


def reduce(
    sent: Sent,
    payload: jax.Array,
    layout: Layout,
    *,
    divisor: float = 1,
    residuals: Residuals = None,
) -> tuple[jax.Array, Residuals]:
    """Reduces the own chunk: own exact values plus the other rows of `payload`, re-encoded.

    `payload` is u8[world, chunk_bytes], with row r from rank r. The sum runs in fp32 in rank order
    and is divided by `divisor`. Returns the chunk, u8[chunk_bytes], and residuals. If the
    `residuals` of `encode` are given, they are returned with `divisor` times what encoding the
    chunk lost in the chunk's place. Otherwise the residuals are None.
    """
    _check_payload("reduce", payload, layout.world * layout.chunk_bytes)
    layout, factors = with_units(layout, sent.units)
    params = {"layout": layout, "divisor": float(divisor), "batch": 1}
    given = (*sent.leaves, *(residuals or ()), *factors)
    out = bind(reduce_p, sent.words, jnp.int32(sent.rank), payload, *given, **params)
    if residuals is None:
        return out[0], None
    return out[0], [r.reshape(x.shape) for r, x in zip(out[1:], residuals, strict=True)]


def decode(
    payload: jax.Array, layout: Layout, like: Sequence[Shaped], *, units: Units | None = None
) -> list[jax.Array]:
    """Decodes a payload, u8[world, chunk_bytes], to leaves with the shapes and dtypes of `like`."""
    _check_payload("decode", payload, layout.world * layout.chunk_bytes)
    shapes = tuple((tuple(x.shape), np.dtype(x.dtype)) for x in like)
    rows = jnp.asarray(payload).reshape(layout.world, layout.chunk_bytes)
    layout, factors = with_units(layout, units)
    return bind(decode_p, rows, *factors, layout=layout, shapes=shapes, batch=1)


def accumulate(
    rank: jax.Array,
    payload: jax.Array,
    leaves: Sequence[jax.Array],
    layout: Layout,
    *,
    divisor: float = 1,
) -> list[jax.Array]:
    """Adds every other rank's decoded row of `payload`, u8[peers, total_bytes], to the leaves.

    The sum runs in fp32 in rank order, is divided by `divisor` and is rounded to each leaf's dtype.
    """
    peers = payload.shape[0]
    _check_payload("accumulate", payload, peers * layout.total_bytes)
    params = {"layout": layout, "divisor": float(divisor), "peers": peers, "batch": 1}
    return bind(accumulate_p, rank, payload, *leaves, **params)


# --- shapes. A batch of one adds no dimension, so results then have the leaves' own shapes.


def lead(batch: int, shape: Sequence[int]) -> tuple[int, ...]:
    """Returns the shape of a batch of results."""
    return tuple(shape) if batch == 1 else (batch, *shape)


def _encode_shapes(
    key: Words, rank: jax.Array, *operands: jax.Array, layout: Layout, residual: bool, batch: int
) -> Any:
    leaves = operands[: len(layout.slots)]
    rows = _compat.result_aval(
        lead(batch, (layout.world, layout.chunk_bytes)), jnp.dtype(jnp.uint8), key
    )
    return [rows, *(_compat.result_aval(x.shape, x.dtype, key) for x in leaves if residual)]


def _reduce_shapes(
    key: Words, rank: Any, payload: Any, *operands: Any, layout: Layout, batch: int, **_: Any
) -> Any:
    chunk = _compat.result_aval(lead(batch, (layout.chunk_bytes,)), jnp.dtype(jnp.uint8), key)
    # They are between the leaves and the units.
    residuals = operands[len(layout.slots) : len(operands) - layout.has_units]
    return [chunk, *(_compat.result_aval(x.shape, x.dtype, key) for x in residuals)]


def _decode_shapes(payload: Any, *factors: Any, shapes: Shapes, batch: int, **_: Any) -> Any:
    return [_compat.result_aval(lead(batch, shape), dtype, payload) for shape, dtype in shapes]


def _accumulate_shapes(rank: jax.Array, payload: Any, *leaves: jax.Array, **_: Any) -> Any:
    return [_compat.result_aval(x.shape, x.dtype, rank) for x in leaves]


# --- plain jnp: one buffer at a time, or a batch of buffers, with shapes restored at the end.


def _all(
    one: Callable[..., Any], batch: int, *operands: jax.Array, in_turn: bool = False
) -> list[Any]:
    """Returns one(*operands) for all elements of the batch, at once or one after the other."""
    if batch > 1 and in_turn:
        return list(lax.map(lambda xs: one(*xs), operands))
    if batch > 1:
        return list(jax.vmap(one)(*operands))
    return [y[None] for y in one(*(x[0] for x in operands))]


def flat(batch: int, arrays: Sequence[jax.Array], *shape: int) -> list[Any]:
    """Reshapes operands to [batch, values], or to [batch, *shape]."""
    return [x.reshape(batch, *(shape or (x.size // batch,))) for x in arrays]


def _encode_jnp(
    key: jax.Array, rank: jax.Array, *leaves: jax.Array, layout: Layout, residual: bool, batch: int
) -> Any:
    one = functools.partial(reference.encode, layout=layout, residual=residual)
    out = _all(one, batch, key.reshape(batch, 2), rank.reshape(batch), *flat(batch, leaves))
    rows = out[0].reshape(lead(batch, out[0].shape[1:]))
    asked = leaves if residual else ()
    return [rows, *(r.reshape(x.shape) for r, x in zip(out[1:], asked, strict=True))]


def reduce_jnp(
    key: Any, rank: Any, payload: Any, *leaves: Any, layout: Layout, divisor: float, batch: int
) -> Any:
    """The kernel cgx_reduce, in plain jnp."""
    one = functools.partial(chunk.reduce, layout=layout, divisor=divisor)
    (payload,) = flat(batch, [payload], layout.world, layout.chunk_bytes)
    # One after the other: under vmap, a cond runs both branches, so a rank would also compute parts
    # of which it owns nothing, and drop them.
    operands = key.reshape(batch, 2), rank.reshape(batch), payload, *flat(batch, leaves)
    out = _all(one, batch, *operands, in_turn=True)
    residuals = leaves[len(layout.slots) :]
    first = out[0].reshape(lead(batch, (layout.chunk_bytes,)))
    return [first, *(r.reshape(x.shape) for r, x in zip(out[1:], residuals, strict=True))]


def _decode_jnp(payload: jax.Array, *, layout: Layout, shapes: Shapes, batch: int) -> Any:
    one = functools.partial(reference.decode, layout=layout, dtypes=[d for _, d in shapes])
    (payload,) = flat(batch, [payload], layout.world, layout.chunk_bytes)
    out = _all(one, batch, payload)
    return [x.reshape(lead(batch, shape)) for x, (shape, _) in zip(out, shapes, strict=True)]


def _accumulate_jnp(
    rank: Any, payload: Any, *leaves: Any, layout: Layout, divisor: float, peers: int, batch: int
) -> Any:
    one = functools.partial(reference.accumulate, layout=layout, divisor=divisor)
    (payload,) = flat(batch, [payload], peers, layout.total_bytes)
    out = _all(one, batch, rank.reshape(batch), payload, *flat(batch, leaves))
    return [y.reshape(x.shape) for y, x in zip(out, leaves, strict=True)]


# --- native calls: the handlers' attributes from the static parameters.


def _native_lowering(target: str) -> Callable[..., Any]:
    def rule(
        ctx: mlir.LoweringRuleContext, *operands: jax.Array, layout: Layout, **params: Any
    ) -> Any:
        aliases = {}
        if target == "cgx_reduce":  # residuals are filled in where they lie
            first = 3 + len(layout.slots)
            aliases = {first + i: 1 + i for i in range(len(ctx.avals_out) - 1)}
        slots = np.asarray(layout.numbers, np.int64)
        attributes: dict[str, Any] = {"slots": slots, "world": np.int64(layout.world)}
        if "divisor" in params:
            attributes["divisor"] = np.float32(params["divisor"])
        lower = jax.ffi.ffi_lowering(target, operand_output_aliases=aliases)
        return lower(ctx, *operands, **attributes)

    return rule


# --- batching: one call over a larger batch.


def _batched(
    primitive: Primitive, results: Callable[..., Any], args: Any, dims: Any, /, **params: Any
) -> Any:
    pairs = list(zip(args, dims, strict=True))
    size = next(x.shape[d] for x, d in pairs if d is not None)
    front = [batching.bdim_at_front(x, d, size) for x, d in pairs]
    old = params["batch"]
    if old != 1:
        front = [x.reshape(size * old, *x.shape[2:]) for x in front]
    elif size == 1:  # a batch of one adds no dimension to operands either
        front = [x.reshape(x.shape[1:]) for x in front]
    out = bind(primitive, *front, **{**params, "batch": size * old})
    # With a total batch of one, results lack the batch dimension. Restore the shapes here.
    own = [x.shape if d is None else (*x.shape[:d], *x.shape[d + 1 :]) for x, d in pairs]
    one = [_compat.result_aval(s, x.dtype, jax.typeof(x)) for s, x in zip(own, args, strict=True)]
    like = results(*one, **params)
    return [y.reshape(size, *x.shape) for y, x in zip(out, like, strict=True)], [0] * len(out)


def define(
    name: str,
    shapes: Callable[..., Any],
    fallback: Callable[..., Any],
    scaled: Callable[..., Any] | None = None,
) -> Primitive:
    """Defines a primitive by its results' `shapes`, its jnp `fallback` and native calls of `name`.

    `scaled` applies units around a call without units, for kernels that do not take them.
    """
    p = _compat.operation(name, shapes)
    batching.primitive_batchers[p] = functools.partial(_batched, p, shapes)

    def rule(lowering: Callable[..., Any], longest_in_units: float = 0) -> Callable[..., Any]:
        if scaled is None:
            return lowering
        around = mlir.lower_fun(functools.partial(scaled, p), multiple_results=True)

        def with_units(
            ctx: mlir.LoweringRuleContext, *operands: jax.Array, layout: Layout, **params: Any
        ) -> Any:
            outside = any(f.units and f.bucket_size > longest_in_units for f in layout.slots)
            lower = around if outside else lowering
            return lower(ctx, *operands, layout=layout, **params)

        return with_units

    def on(_: str, platform: platforms.Platform) -> Callable[..., Any]:
        return rule(_native_lowering(name), platform.longest_in_units)

    platforms.register(p, rule(mlir.lower_fun(fallback, multiple_results=True)), on)
    return p


encode_p = define("cgx_encode", _encode_shapes, _encode_jnp, scaling.encode)
reduce_p = define("cgx_reduce", _reduce_shapes, reduce_jnp, scaling.reduce)
decode_p = define("cgx_decode", _decode_shapes, _decode_jnp, scaling.decode)
accumulate_p = define("cgx_accumulate", _accumulate_shapes, _accumulate_jnp)
