"""The fused calls on CUDA, on the NCCL communicator that XLA itself has made.

One call encodes, sends, reduces and decodes in segments, on XLA's communication stream, so that
it overlaps with the computation around it and comes in one order with XLA's own collectives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import mlir

from cgx_jax import _compat
from cgx_jax.exchanges import fused
from cgx_jax.kernels import native, outside, primitives
from cgx_jax.wire import Layout

# Of payload to each peer. Kernels take a small part of the time that a link takes, so there is
# little to overlap, and each message more costs what NCCL needs to start one (docs/gpu.md).
SEGMENT_BYTES = 8 << 20
ALIGNMENT = 128  # of a message's first byte, as `CudaFused::kAlignment`


def missing() -> str | None:
    """What this installation lacks, with the remedy, or None."""
    module = native.cuda_module()
    if module is None:
        return (
            "there are no CUDA kernels; put nvcc (CUDA 13 or newer) on PATH and reinstall cgx-jax"
        )
    if all_reduce_p.name not in module.handlers():
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
    units: primitives.Units = (),
) -> tuple[list[jax.Array], list[jax.Array]]:
    """Quantized leaves to their sum over the group, divided; the bytes of the `xla` exchange.

    `seeds` are uint32[2] for each phase; `leaves` f32, bf16 or f16, one a slot of `layout`;
    `units` as in `primitives.encode`. Residuals follow where asked.
    """
    keys = jnp.stack([jnp.asarray(s) for s in seeds])
    # The CUDA kernels know no units: they see float32 leaves that are multiplied already.
    each = list(units) or [None] * len(leaves)
    inner = [outside.multiply(x, u, outside.IN) for x, u in zip(leaves, each, strict=True)]
    reduced, lost = _call(
        all_reduce_p, name, [keys, *inner], layout, axes, groups, divisor, residual=residual
    )

    means = [outside.decoded(y, u, x.dtype) for y, u, x in zip(reduced, each, leaves, strict=True)]
    lost = [
        outside.multiply(e, u, outside.OUT).astype(x.dtype)
        for e, u, x in zip(lost, each, leaves, strict=False)
    ]
    return means, lost


def reduce_scatter(
    name: str,
    seeds: Any,
    rows: jax.Array,
    layout: Layout,
    axes: tuple[str, ...],
    groups: fused.Groups,
) -> jax.Array:
    """Rows, f32, bf16 or f16 and one for each rank, to the sum of this rank's: the bytes of `xla`.

    `seeds` are uint32[world, 2]; `layout` is that of one row.
    """
    return _call(reduce_scatter_p, name, [seeds, rows], layout, axes, groups)[0][0]


def all_gather(
    name: str,
    seed: Any,
    x: jax.Array,
    layout: Layout,
    axes: tuple[str, ...],
    groups: fused.Groups,
) -> jax.Array:
    """Every rank's `x`, f32, bf16 or f16, decoded: [world, ...], the bytes of the `xla` exchange.

    `seed` is uint32[2]; `layout` is that of `x` for one rank.
    """
    return _call(all_gather_p, name, [seed, x], layout, axes, groups)[0][0]


def _call(
    primitive: Primitive,
    name: str,
    operands: Sequence[Any],
    layout: Layout,
    axes: tuple[str, ...],
    groups: fused.Groups,
    divisor: float = 1,
    *,
    residual: bool = False,
) -> tuple[list[jax.Array], list[jax.Array]]:
    def call(*operands: Any) -> tuple[list[jax.Array], list[jax.Array]]:
        label = f"{name}(exchange='nccl')"
        return fused.bind(
            primitive, label, operands, layout, axes, groups, divisor, residual=residual
        )

    return _compat.on_collective_stream(call)(*(jnp.asarray(x) for x in operands))


def payload_bytes(rows: int, layout: Layout) -> int:
    """Room for `rows` payload rows of aligned segments: `CudaFused::row_bytes` in C++."""
    row = -(-layout.chunk_bytes // ALIGNMENT) * ALIGNMENT
    segments = max(1, -(-layout.chunk_bytes // SEGMENT_BYTES))
    return rows * (row + ALIGNMENT * segments)


def _lowering(target: str, rows_per_rank: int) -> Callable[..., Any]:
    def rule(
        ctx: Any,
        *operands: Any,
        layout: Layout,
        divisor: float,
        positions: Any,
        replicated: Any,
        name: str,
        residual: bool,
    ) -> Any:
        # The last result holds the payloads: both streams use them until the asynchronous call is
        # done, and XLA keeps only results for as long.
        rows = rows_per_rank * len(positions[0])
        payloads = jax.core.ShapedArray((payload_bytes(rows, layout),), np.uint8)
        *results, _ = jax.ffi.ffi_lowering(target)(
            ctx.replace(avals_out=[*ctx.avals_out, payloads]),
            *operands,
            **fused.attributes(layout, divisor, positions, name),
            segment_bytes=np.int64(SEGMENT_BYTES),
        )
        return results

    return rule


def _no_lowering(ctx: Any, *operands: Any, name: str, **params: Any) -> Any:
    platforms = ", ".join(ctx.module_context.platforms)
    raise ValueError(
        f"{name}: it is for CUDA devices, and this program is compiled for {platforms}; use "
        'exchange="auto" or "xla" there.'
    )


def _primitive(target: str, result: Callable[..., Any], rows_per_rank: int) -> Primitive:
    p = fused.primitive(target, 1, result)
    mlir.register_lowering(p, _no_lowering)
    mlir.register_lowering(p, _lowering(target, rows_per_rank), platform="cuda")
    return p


# What a call receives to sum up needs rows of its own, beside those that it sends.
all_reduce_p = _primitive("cgx_all_reduce_nccl", fused.reduced, 2)
reduce_scatter_p = _primitive("cgx_reduce_scatter_nccl", fused.scattered, 2)
all_gather_p = _primitive("cgx_all_gather_nccl", fused.gathered, 1)
