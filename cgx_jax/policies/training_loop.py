"""Around the training step: one compilation for each plan, and looks at the statistics."""

from __future__ import annotations

import functools
import json
import time
import zlib
from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from cgx_jax import agreement
from cgx_jax.policies import statistics
from cgx_jax.policies.checkpoint import Known, Progress, pack, unpack
from cgx_jax.policies.decide import Compressors, Decision
from cgx_jax.policies.statistics import Statistics

# Steps between asking for statistics and using them, so that the host does not wait for them.
LAG = 4


class Adapting(Protocol):
    """What `TrainingLoop` asks of a policy.

    `traces` counts how often the policy was asked to choose, and `plan` is None unless the current
    choice was traced. `decision` is called on process 0 alone, `adopt` on all of them.
    """

    warmup: int
    every: int
    progress: Progress
    known: Known
    traces: int

    @property
    def plan(self) -> Any: ...

    def decision(self, averages: dict[str, Any]) -> Decision: ...

    def adopt(
        self, decision: Decision, averages: dict[str, Any], nonfinite: np.ndarray
    ) -> None: ...

    def compiled(self, seconds: float) -> None: ...


class TrainingLoop:
    """Calls training steps for a policy; `running` while it does."""

    def __init__(self, policy: Adapting) -> None:
        self._policy = policy
        self.running = False

    def jit(self, step: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        """`jax.jit(step, **options)`, compiled once for each plan."""
        policy = self._policy
        compiled: dict[Compressors, Callable[..., Any]] = {}

        @functools.wraps(step)
        def run(*args: Any, **kwargs: Any) -> Any:
            self._decide()
            current = policy.progress.current
            fresh = current not in compiled
            if fresh:
                # Another function object each time, since jax.jit caches by it.
                own = functools.wraps(step)(lambda *a, **k: step(*a, **k))
                compiled[current] = jax.jit(own, **options)
            start, traces = time.perf_counter(), policy.traces
            self.running = True
            try:
                out = compiled[current](*args, **kwargs)
            finally:
                self.running = False
            if fresh:
                _require_traced(policy, traces)
                policy.compiled(time.perf_counter() - start)
                # The tree may be new to the policy, and its choice with it.
                compiled[policy.progress.current] = compiled.pop(current)
            self._look(out)
            return out

        return run

    def _look(self, out: Any) -> None:
        """Counts a step, and where it is time asks for the statistics in its result."""
        policy, progress = self._policy, self._policy.progress
        progress.step += 1
        if progress.step < policy.warmup or (progress.step - policy.warmup) % policy.every:
            return
        leaves = jax.tree.leaves(out, is_leaf=lambda x: isinstance(x, Statistics))
        found = [x for x in leaves if isinstance(x, Statistics)]
        if not found:
            raise ValueError(
                "Adaptive: the step's result holds no statistics; return the optimizer state, "
                "with that of sync_gradients, from the step."
            )
        # A copy, since the step's next call may be given the originals' memory.
        copied = jax.tree.map(jnp.copy, found[0])
        for x in jax.tree.leaves(copied):
            x.copy_to_host_async()
        progress.pending = progress.step + min(LAG, policy.every - 1), copied

    def _decide(self) -> None:
        """Has the policy decide from statistics that were asked for `LAG` steps ago."""
        progress = self._policy.progress
        if progress.pending is None or progress.step < progress.pending[0]:
            return
        measured = jax.tree.map(lambda x: np.asarray(x.addressable_data(0)), progress.pending[1])
        progress.pending = None
        _require_same(measured)
        averages = statistics.mean(measured)
        self._policy.adopt(self._agreed(averages), averages, measured.nonfinite)

    def _agreed(self, averages: dict[str, Any]) -> Decision:
        """Process 0's decision; its error is raised on every process, so that none waits."""
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
        (compressors,) = unpack(fields, self._policy.known, "the plan of process 0")
        return Decision(fields["outcome"], compressors, tuple(fields["leaves"]))


def _require_traced(policy: Adapting, before: int) -> None:
    if policy.traces == before or policy.plan is None:
        raise ValueError(
            "Adaptive: the step did not ask for its plan while it was compiled: it is jitted "
            "already, and would keep the plan it has. Give policy.jit the function without "
            "jax.jit, with this policy in its sync_gradients."
        )


def _require_same(measured: Statistics) -> None:
    """Raises ValueError on every process where one has other statistics than process 0."""
    digests = agreement.gather(zlib.crc32(b"".join(x.tobytes() for x in measured)))
    others = [i for i, digest in enumerate(digests) if digest != digests[0]]
    if others:
        raise ValueError(
            f"Adaptive: processes {others} have other statistics than process 0, so the ranks no "
            "longer hold the same state; find out where with cgx_jax.debug.debug_checksums()."
        )
