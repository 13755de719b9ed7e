"""The all-reduce on CUDA in one kernel: the GPUs of a node map each other's memory, or the host's.

There are no messages: each GPU writes its payload directly where it is read, and raises a flag
(docs/gpu.md).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from importlib import metadata
from typing import Any, ClassVar, Literal

import jax
from jax.interpreters import mlir

from cgx_jax.collective import Collective
from cgx_jax.exchanges import fused, nccl
from cgx_jax.exchanges.base import Call, Fused
from cgx_jax.exchanges.xla import Xla
from cgx_jax.kernels.constants import MOST_PEERS as MOST_RANKS
from cgx_jax.kernels.primitives import Sent
from cgx_jax.kernels.wire import Layout

TIMEOUTS = (0.001, 1e9)  # seconds
NCCL = (2, 29)  # the first that tells the host where a peer's memory is mapped


@dataclasses.dataclass(frozen=True)
class Peer(nccl.OnCommunicator):
    """One kernel per all-reduce between the CUDA devices of a node, over NVLink or PCIe.

    With memory="device", the GPUs write to each other's memory, which needs NCCL 2.29 and peer
    access between all of them. With memory="host", they write to pinned memory that the processes
    share, for GPUs without peer access. At most 32 GPUs: more raise ValueError while tracing. If a
    GPU cannot reach another's memory, the first call fails and says so. A call waits up to
    `timeout` seconds for a rank. Then its results are NaN, and the next call fails. Nobody has run
    it on several GPUs, so only `exchange=experimental.Peer()` selects it. Raises ValueError for an
    impossible timeout or memory.
    """

    timeout: float = 300.0
    memory: Literal["device", "host"] = "device"

    shorthand: ClassVar[str] = "peer"
    longest_in_units: ClassVar[float] = math.inf
    can: ClassVar[frozenset[str]] = Xla.can | {"all_reduce"}

    def __post_init__(self) -> None:
        low, high = TIMEOUTS
        if not low <= self.timeout <= high:
            raise ValueError(f"Peer: timeout={self.timeout} must be in [{low:g}, {high:g}].")
        if self.memory not in ("device", "host"):
            raise ValueError(f"Peer: memory={self.memory!r} must be 'device' or 'host'.")

    def _lacking(self) -> str | None:
        return old_nccl() if self.memory == "device" else None

    def usable(self, axes: Sequence[str] = ()) -> bool:
        return False

    def fused(self, call: Call, sent: Sent) -> Fused:
        if call.axes.world > MOST_RANKS:
            raise ValueError(
                f"{call.name}: exchange='peer' reduces over at most {MOST_RANKS} ranks of a node, "
                f'but this call has {call.axes.world}; use exchange="nccl", or a node\'s axis in '
                "`Levels`."
            )
        return super().fused(call, sent)

    def _options(self, layout: Layout) -> dict[str, int]:
        return {"timeout_ms": round(1000 * self.timeout), "in_host": self.memory == "host"}


def old_nccl() -> str | None:
    """Returns that the NCCL installed for JAX is too old, with the remedy, or None if it is not."""
    try:
        version = metadata.version("nvidia-nccl-cu13")
    except metadata.PackageNotFoundError:
        return None  # not PyPI's copy; the first call checks its version
    if tuple(int(part) for part in version.split(".")[:2]) >= NCCL:
        return None
    return (
        f"NCCL is {version}, but must be 2.29 or newer; pip install -U nvidia-nccl-cu13, or use "
        'Peer(memory="host")'
    )


def _lowering(ctx: mlir.LoweringRuleContext, *operands: jax.Array, bound: fused.Bound) -> Any:
    return jax.ffi.ffi_lowering("cgx_all_reduce_peer")(ctx, *operands, **bound.attributes())


Peer.calls = {
    Collective.ALL_REDUCE: nccl.cuda_primitive("cgx_all_reduce_peer", fused.reduced, _lowering)
}
