"""Whole rows over MPI, in segments of bytes: an all-to-all and an all-gather.

They run on the engine of the fused all-reduce, with its settings, timeouts and errors;
`Mpi.require` comes first. Only the caller knows what the bytes mean.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import mlir

from cgx_jax import _compat
from cgx_jax.exchanges import fused, program


def scatter(name: str, rows: jax.Array, axes: tuple[str, ...], groups: fused.Groups) -> jax.Array:
    """Sends row r of `rows`, [world, n], to rank r; row r of the result comes from rank r.

    `world` is the size of a group of `axes`, ranks count within the group, and `name` begins error
    messages.
    """
    return _call(scatter_p, name, rows, 2, axes, groups)


def gather(name: str, row: Any, axes: tuple[str, ...], groups: fused.Groups) -> jax.Array:
    """Returns every rank's `row`, [n], as [world, n], including this rank's own.

    Without groups the result is the same on all ranks, so it does not vary over `axes`.
    """
    return _call(gather_p, name, row, 1, axes, groups)


def _call(
    primitive: Primitive,
    name: str,
    x: jax.Array,
    dimensions: int,
    axes: tuple[str, ...],
    groups: fused.Groups,
) -> jax.Array:
    x = jnp.asarray(x)
    positions = fused.positions(axes, groups)
    world = len(positions[0])
    if x.ndim != dimensions or (dimensions == 2 and len(x) != world):
        expected = f"[{world}, n]" if dimensions == 2 else "[n]"
        raise ValueError(f"{name}: the operand is {x.dtype}{list(x.shape)}, not {expected}.")
    position = fused.position(axes)
    varying = _compat.varying_axes(position) | _compat.varying_axes(x)
    out: jax.Array
    (out,) = primitive.bind(
        *(_compat.vary_over(operand, varying) for operand in (position, x)),
        positions=positions,
        replicated=axes if groups is None else (),
        name=f"{label(name)} over axis {', '.join(map(repr, axes))}",
    )
    return out


def label(name: str) -> str:
    """Returns `name` for errors, after the line of the user's code that is being traced."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _package(frame) in ("cgx_jax", "jax", "optax"):
        frame = frame.f_back
    call = f"{name}(exchange='mpi')"
    if frame is None:
        return call
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}: {call}"


def _package(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


def _scattered(x: jax.Array, **params: Any) -> Any:
    return _compat.result_aval(x.shape, x.dtype, x)


def _gathered(
    x: jax.Array, *, positions: Sequence[Sequence[int]], replicated: Sequence[str], **params: Any
) -> Any:
    rows = _compat.result_aval((len(positions[0]), *x.shape), x.dtype, x)
    return _compat.reduced_aval(rows, replicated)


def _lowering(target: str) -> Callable[..., Any]:
    def rule(
        ctx: mlir.LoweringRuleContext,
        *operands: jax.Array,
        positions: Sequence[Sequence[int]],
        replicated: Sequence[str],
        name: str,
    ) -> Any:
        return jax.ffi.ffi_lowering(target)(
            ctx,
            *operands,
            world=np.int64(len(positions[0])),
            groups=np.asarray(positions, np.int64).reshape(-1),
            channel=np.int64(_compat.new_channel(ctx)),
            program=program.label(ctx, name),
            name=name,
        )

    return rule


def _primitive(target: str, result: Callable[..., Any]) -> Primitive:
    p = fused.operation(target, lambda position, x, **params: [result(x, **params)])
    # Not cacheable: every call needs a channel of its own.
    mlir.register_lowering(p, _lowering(target), platform="cpu", cacheable=False)
    return p


scatter_p = _primitive("cgx_scatter_mpi", _scattered)
gather_p = _primitive("cgx_gather_mpi", _gathered)
