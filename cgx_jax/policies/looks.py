"""Looks at the statistics: when an adaptive policy decides, and how processes agree on it."""

from __future__ import annotations

import json
import zlib
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np

from cgx_jax._types import Pytree
from cgx_jax.host import agreement
from cgx_jax.policies import statistics
from cgx_jax.policies.checkpoint import Known, Packed, Progress, pack, unpack
from cgx_jax.policies.decide import Decision
from cgx_jax.policies.statistics import Statistics

# Steps between asking for statistics and using them, so that the host does not wait for them.
LAG = 4


class Adapting(Protocol):
    """What `Looks` asks of a policy: `decision` on process 0 only, `adopt` on all processes."""

    warmup: int
    every: int
    progress: Progress
    known: Known

    def decision(self, averages: dict[str, np.ndarray]) -> Decision: ...

    def adopt(
        self, decision: Decision, averages: dict[str, np.ndarray], nonfinite: np.ndarray
    ) -> None: ...


class Looks:
    """Asks for the statistics in a step's result, and has the policy decide from them."""

    def __init__(self, policy: Adapting) -> None:
        self._policy = policy

    def look(self, out: Pytree) -> None:
        """Counts a step and, when it is time, asks for the statistics in its result."""
        policy, progress = self._policy, self._policy.progress
        progress.step += 1
        if progress.step < policy.warmup or (progress.step - policy.warmup) % policy.every:
            return
        leaves = jax.tree.leaves(out, is_leaf=lambda x: isinstance(x, Statistics))
        found = [x for x in leaves if isinstance(x, Statistics)]
        if not found:
            raise ValueError(
                "Adaptive: the step's result holds no statistics; return the optimizer state, "
                "which includes the state of sync_gradients, from the step."
            )
        # A copy, since the step's next call may reuse the memory of the originals.
        copied = jax.tree.map(jnp.copy, found[0])
        for x in jax.tree.leaves(copied):
            x.copy_to_host_async()
        progress.pending = progress.step + min(LAG, policy.every - 1), copied

    def decide(self) -> None:
        """Has the policy decide from statistics that were asked for `LAG` steps ago."""
        progress = self._policy.progress
        if progress.pending is None or progress.step < progress.pending[0]:
            return
        measured = jax.tree.map(lambda x: np.asarray(x.addressable_data(0)), progress.pending[1])
        progress.pending = None
        _require_same(measured)
        averages = statistics.mean(measured)
        self._policy.adopt(self._agreed(averages), averages, measured.nonfinite)

    def _agreed(self, averages: dict[str, np.ndarray]) -> Decision:
        """Returns process 0's decision; raises its error on every process, so that none waits."""
        message = b""
        if jax.process_index() == 0:
            try:
                made = self._policy.decision(averages)
                fields = {"outcome": made.outcome, "leaves": made.leaves}
                message = json.dumps(fields | pack([made.compressors])).encode()
            except (ArithmeticError, ImportError, ValueError) as error:
                message = b"!" + str(error).encode()
        agreed = agreement.broadcast(message)
        if agreed.startswith(b"!"):
            raise ValueError(agreed[1:].decode())
        fields = json.loads(agreed)
        packed = Packed(fields["compressors"], fields["plans"])
        (compressors,) = unpack(packed, self._policy.known, "the plan of process 0")
        return Decision(fields["outcome"], compressors, tuple(fields["leaves"]))


def _require_same(measured: Statistics) -> None:
    """Raises ValueError on every process if any has other statistics than process 0."""
    digests = agreement.gather(zlib.crc32(b"".join(x.tobytes() for x in measured)))
    others = [i for i, digest in enumerate(digests) if digest != digests[0]]
    if others:
        raise ValueError(
            f"Adaptive: the statistics of processes {others} differ from those of process 0, so "
            "the ranks no longer hold the same state; cgx_jax.debug.debug_checksums() finds where."
        )
