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
from cgx_jax.axes import Axes
from cgx_jax.exchanges import fused, program


def scatter(name: str, rows: Any, axes: Axes) -> jax.Array:
    """Does `Exchange.scatter`, with rows of any dtype; `name` begins error messages."""
    return _call(scatter_p, name, rows, 2, axes)


def gather(name: str, row: Any, axes: Axes) -> jax.Array:
    """Does `Exchange.gather`; with groups, the result varies over `axes`."""
    return _call(gather_p, name, row, 1, axes)


def _call(primitive: Primitive, name: str, x: Any, dimensions: int, axes: Axes) -> jax.Array:
    x, world = jnp.asarray(x), axes.world
    if x.ndim != dimensions or (dimensions == 2 and len(x) != world):
        expected = f"[{world}, n]" if dimensions == 2 else "[n]"
        raise ValueError(f"{name}: the operand is {x.dtype}{list(x.shape)}, not {expected}.")
    position = fused.position(axes.names)
    varying = _compat.varying_axes(position) | _compat.varying_axes(x)
    return primitive.bind(
        *(_compat.vary_over(operand, varying) for operand in (position, x)),
        positions=fused.positions(axes),
        replicated=axes.names if axes.groups is None else (),
        name=f"{label(name)} over axis {', '.join(map(repr, axes.names))}",
    )[0]


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
