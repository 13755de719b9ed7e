"""The fused all-reduce on CUDA, on the NCCL communicator that XLA itself has made.

One call encodes, sends, reduces and decodes in segments, on XLA's communication stream, so that
it overlaps with the computation around it and comes in one order with XLA's own collectives.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import mlir

from cgx_jax import _compat
from cgx_jax.exchange import fused
from cgx_jax.kernels import native
from cgx_jax.wire import Layout

TARGET = "cgx_all_reduce_nccl"
# Of payload to each peer. A message should take much longer than NCCL needs to start one, and a
# buffer should have several of them to overlap. A guess until it is measured: docs/gpu.md.
SEGMENT_BYTES = 1 << 20


def missing() -> str | None:
    """What this installation lacks, with the remedy, or None."""
    module = native.cuda_module()
    if module is None:
        return (
            "there are no CUDA kernels; put nvcc (CUDA 13 or newer) on PATH and reinstall cgx-jax"
        )
    if TARGET not in module.handlers():
        return (
            "cgx-jax was built against a jaxlib without the collectives extension of XLA's FFI; "
            "reinstall it on Python 3.12 or newer, where it builds against jaxlib 0.11.2"
        )
    return None


def usable(axes: Sequence[Any] = ()) -> bool:
    """Whether fused calls work on this process's devices over `axes`."""
    return (
        missing() is None
        and jax.default_backend() == "gpu"
        and "cuda" in jax.devices()[0].client.platform_version.lower()
        and (not axes or fused.unfit_axes(axes) is None)
    )


def require(caller: str, axes: Sequence[Any]) -> None:
    """Raises ValueError, with the remedy, where a fused call over `axes` cannot work."""
    problem = missing() or fused.unfit_axes(axes)
    if problem is not None:
        raise ValueError(f"{caller}: exchange='nccl' does not work here: {problem}.")


def all_reduce(
    name: str,
    seeds: Sequence[Any],
    leaves: Sequence[jax.Array],
    layout: Layout,
    axes: tuple[str, ...],
    groups: fused.Groups,
    divisor: float,
    *,
    residual: bool = False,
) -> tuple[list[jax.Array], list[jax.Array]]:
    """Quantized leaves to their sum over the group, divided; the bytes of the `xla` exchange.

    `seeds` are uint32[2] for each phase; `leaves` f32, bf16 or f16, one a field of `layout`.
    Residuals follow where asked.
    """

    def call(*operands: Any) -> tuple[list[jax.Array], list[jax.Array]]:
        label = f"{name}(exchange='nccl')"
        return fused.bind(
            all_reduce_p, label, operands, layout, axes, groups, divisor, residual=residual
        )

    keys = jnp.stack([jnp.asarray(s) for s in seeds])
    return _compat.on_collective_stream(call)(keys, *leaves)


def _lowering(
    ctx: Any,
    *operands: Any,
    layout: Layout,
    divisor: float,
    positions: Any,
    replicated: Any,
    name: str,
    residual: bool,
) -> Any:
    return jax.ffi.ffi_lowering(TARGET)(
        ctx,
        *operands,
        **fused.attributes(layout, divisor, positions, name),
        segment_bytes=np.int64(SEGMENT_BYTES),
    )


def _no_lowering(ctx: Any, *operands: Any, name: str, **params: Any) -> Any:
    platforms = ", ".join(ctx.module_context.platforms)
    raise ValueError(
        f"{name}: it is for CUDA devices, and this program is compiled for {platforms}; use "
        'exchange="auto" or "xla" there.'
    )


all_reduce_p = fused.primitive(TARGET, leading=1)
mlir.register_lowering(all_reduce_p, _no_lowering)
mlir.register_lowering(all_reduce_p, _lowering, platform="cuda")
