"""The fused calls on CUDA over NCCL: on XLA's own communicator and those split from it.

One call encodes, sends, reduces and decodes in segments, on XLA's communication stream, so it
overlaps with the computation around it and stays in order with XLA's own collectives.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import mlir

from cgx_jax import _compat
from cgx_jax.collective import Collective
from cgx_jax.exchanges import fused, xla
from cgx_jax.exchanges.base import Call, Fused
from cgx_jax.kernels import native, primitives, scaling
from cgx_jax.kernels.constants import ALIGNMENT, LONGEST_IN_UNITS, MOST_STREAMS
from cgx_jax.kernels.primitives import Sent
from cgx_jax.kernels.wire import Layout

# Bytes of payload to each peer. Kernels take a small part of the time that a link takes, so there
# is little to overlap (docs/measurements/gpu_exchanges.md).
SEGMENT_BYTES = 8 << 20
XLA_BLOCKS = 32  # multiprocessors that messages on XLA's communicator take, at most


class OnCommunicator(xla.OverXla):
    """What exchanges on XLA's NCCL communicator share.

    All that has no fused call goes by XLA's collectives, which are NCCL's.
    """

    calls: ClassVar[dict[Collective, Primitive]]  # the fused calls
    longest_in_units: ClassVar[float]  # bucket whose values they multiply by units

    def here(self) -> bool:
        version = jax.devices()[0].client.platform_version.lower()
        return _compat.platform() == "gpu" and "cuda" in version

    def missing(self, axes: Sequence[str] = ()) -> str | None:
        if (problem := not_installed() or bound_to_threads() or self._lacking()) is not None:
            return problem
        return fused.refusal_of_axes(axes) if axes else None

    def _lacking(self) -> str | None:
        """Returns what else this exchange lacks here, with the remedy, or None."""
        return None

    def fused(self, call: Call, sent: Sent) -> Fused:
        leaves, units = sent.leaves, sent.units
        layout, factors = primitives.with_units(call.layout, units)
        if all(slot.bucket_size <= self.longest_in_units for slot in layout.slots if slot.units):
            out = self._call(dataclasses.replace(call, layout=layout), sent, factors)
            if call.collective is Collective.GATHER_SUM:  # still in units
                out = out._replace(sums=scaling.all_decoded(out.sums, units, leaves))
            return out
        # The kernels get float32 leaves that are already multiplied.
        inside = sent._replace(leaves=scaling.taken_in(leaves, units))
        sums, lost = self._call(call, inside)
        means = scaling.all_decoded(sums, units, leaves)
        return Fused(means, scaling.taken_out(lost, units, leaves))

    def _options(self, layout: Layout) -> dict[str, int]:
        """Returns the options of a call of that layout."""
        return {}

    def _call(self, call: Call, sent: Sent, factors: Sequence[jax.Array] = ()) -> Fused:
        """Makes a call on leaves in plain values, with the units that its layout asks for."""
        label, options = f"{call.name}(exchange={self.shorthand!r})", self._options(call.layout)

        def bound(*operands: jax.Array) -> list[jax.Array]:
            return fused.bind(self.calls[call.collective], label, call, operands, **options)

        operands = jnp.asarray(sent.words), *sent.leaves, *factors
        return Fused.of(call, _compat.on_collective_stream(bound)(*operands))


@dataclasses.dataclass(frozen=True)
class Nccl(OnCommunicator):
    """This library's own calls between CUDA devices, on the NCCL communicator that XLA has made.

    A payload travels in messages of `segment_bytes`, a multiple of 128, or in shorter ones, so that
    every one of `streams` has a message. The streams, 1 to 8, take turns on as many communicators,
    for links that one connection does not fill. All ranks must have the same number. Needs NCCL
    2.18. Raises ValueError for impossible options, and while compiling for other devices. Source of
    the streams: AIACC-Training (Lin et al., ICDCS 2022).
    """

    segment_bytes: int = SEGMENT_BYTES
    streams: int = 1

    shorthand: ClassVar[str] = "nccl"
    longest_in_units: ClassVar[float] = LONGEST_IN_UNITS
    tuned: ClassVar[tuple[str, ...]] = ("streams",)
    can: ClassVar[frozenset[str]] = xla.Xla.can | {collective.value for collective in Collective}

    def __post_init__(self) -> None:
        if self.streams not in range(1, MOST_STREAMS + 1):
            raise ValueError(
                f"Nccl: streams={self.streams} must be a whole number in [1, {MOST_STREAMS}]; the "
                "default is 1."
            )
        if self.segment_bytes < ALIGNMENT or self.segment_bytes % ALIGNMENT:
            raise ValueError(
                f"Nccl: segment_bytes={self.segment_bytes} is not a positive multiple of "
                f"{ALIGNMENT}; the default is {SEGMENT_BYTES}."
            )

    def _lacking(self) -> str | None:
        if self.streams == 1 or not recovers():
            return None
        return (
            "this job is set up to go on without a lost rank, but messages on "
            f"streams={self.streams} would wait for that rank forever; use streams=1"
        )

    def _options(self, layout: Layout) -> dict[str, int]:
        share = -(-layout.chunk_bytes // self.streams)
        aligned = max(1, -(-share // ALIGNMENT)) * ALIGNMENT
        segment_bytes = min(self.segment_bytes, aligned) if self.streams > 1 else self.segment_bytes
        return {"segment_bytes": segment_bytes, "streams": self.streams}


def not_installed() -> str | None:
    """Returns what this installation lacks, with the remedy, or None."""
    module = native.cuda_module()
    if module is None:
        why, remedy = native.lack_of_cuda()
        return f"{why}; {remedy}"
    if "cgx_all_reduce_nccl" not in module.handlers():
        return (
            "cgx-jax was built against a jaxlib without the collectives extension of XLA's FFI; "
            "reinstall it on Python 3.12 or newer, where it builds against jaxlib 0.11.2"
        )
    return None


# With these values, XLA uses a communicator only on the thread that has made it.
_ON_ONE_THREAD = {
    "xla_gpu_nccl_async_execution": ("true", "1", ""),
    "xla_gpu_nccl_blocking_communicators": ("false", "0"),
}


def bound_to_threads() -> str | None:
    """Returns that XLA_FLAGS keep XLA's communicators from other threads, with the remedy, or None.

    XLA calls this library on a thread of its own choice.
    """
    given = re.findall(r"--(\w+)(?:=(\w*))?", os.environ.get("XLA_FLAGS", ""))
    for name, value in dict(given).items():  # the last one counts
        if value.lower() in _ON_ONE_THREAD.get(name, ()):
            return (
                f"XLA_FLAGS has --{name}{value and '='}{value}, with which only one thread of XLA "
                'may use its communicators; use exchange="xla", or remove this flag'
            )
    return None


def recovers() -> bool:
    """Returns whether this job is set up to go on without a lost rank.

    XLA then aborts its communicators. Messages on those that are split from them wait forever.
    """
    aborts = os.environ.get("XLA_PYTHON_CLIENT_ABORT_COLLECTIVES_ON_FAILURE", "")
    return bool(jax.config.jax_enable_recoverability) or aborts.lower() in ("true", "1")


def most_streams() -> int:
    """Returns how many streams fit on every device: `CudaLane::connect` refuses more."""
    processors = (getattr(device, "core_count", None) for device in jax.devices())
    room: list[int] = [1 + n - XLA_BLOCKS for n in processors if n is not None]
    return max(1, min((MOST_STREAMS, *room)))


def payload_bytes(rows: int, layout: Layout, segment_bytes: int = SEGMENT_BYTES) -> int:
    """Returns bytes of `rows` payload rows of aligned segments: `CudaFused::row_bytes` in C++."""
    row = -(-layout.chunk_bytes // ALIGNMENT) * ALIGNMENT
    segments = max(1, -(-layout.chunk_bytes // segment_bytes))
    return rows * (row + ALIGNMENT * segments)


def _lowering(target: str, rows_per_rank: int) -> Callable[..., Any]:
    def rule(ctx: mlir.LoweringRuleContext, *operands: jax.Array, bound: fused.Bound) -> Any:
        # The last result holds the payloads. All streams use them until the asynchronous call is
        # done, and XLA keeps only results for that long.
        rows, segment_bytes = rows_per_rank * bound.world, dict(bound.options)["segment_bytes"]
        nbytes = payload_bytes(rows, bound.layout, segment_bytes)
        payloads = jax.core.ShapedArray((nbytes,), np.uint8)
        *results, _ = jax.ffi.ffi_lowering(target)(
            ctx.replace(avals_out=[*ctx.avals_out, payloads]), *operands, **bound.attributes()
        )
        return results

    return rule


def _no_lowering(ctx: mlir.LoweringRuleContext, *operands: jax.Array, bound: fused.Bound) -> Any:
    platforms = ", ".join(ctx.module_context.platforms)
    raise ValueError(
        f"{bound.label}: this exchange is only for CUDA devices, but the program is compiled for "
        f'{platforms}; use exchange="auto" or "xla" there.'
    )


def cuda_primitive(
    target: str, result: Callable[..., Any], lowering: Callable[..., Any]
) -> Primitive:
    """Makes a fused call for CUDA devices only; compiling it for others raises ValueError."""
    p = fused.primitive(target, 1, result)
    mlir.register_lowering(p, _no_lowering)
    mlir.register_lowering(p, lowering, platform="cuda")
    return p


def _primitive(target: str, result: Callable[..., Any], rows_per_rank: int) -> Primitive:
    return cuda_primitive(target, result, _lowering(target, rows_per_rank))


# What a call receives to sum up needs rows of its own, beside those that it sends.
Nccl.calls = {
    Collective.ALL_REDUCE: _primitive("cgx_all_reduce_nccl", fused.reduced, 2),
    Collective.GATHER_SUM: _primitive("cgx_gather_sum_nccl", fused.summed, 1),
    Collective.REDUCE_SCATTER: _primitive("cgx_reduce_scatter_nccl", fused.scattered, 2),
    Collective.ALL_GATHER: _primitive("cgx_all_gather_nccl", fused.gathered, 1),
}
