"""`Adaptive`: every leaf's width from what the gradients look like, chosen anew as they change."""

from __future__ import annotations

import dataclasses
import functools
import json
import time
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cgx_jax import agreement
from cgx_jax.axes import Axes
from cgx_jax.compressors import Compressor, Quantize
from cgx_jax.leaves import Leaf
from cgx_jax.policies import run_log, statistics
from cgx_jax.policies.decide import Decision, Refresh, Subject, Widths, decide
from cgx_jax.policies.rules import Policy, Uniform
from cgx_jax.policies.run_log import RunLog
from cgx_jax.policies.same_tree import check_same, saved_leaves
from cgx_jax.policies.solvers import LeastBytes, Solver
from cgx_jax.policies.statistics import Sampler, Statistics

START = Quantize(4, rotation=True)
CANDIDATES = tuple(dataclasses.replace(START, bits=bits) for bits in range(2, 9))
# Steps between asking for statistics and using them, so that the host does not wait for them.
LAG = 4


class Adaptive(Policy):
    """Gives every leaf the width that `solver` finds from statistics of the running training.

    Used in three places: `sync_gradients(axis, policy)` follows and measures, `policy.jit(step)`
    stands where `jax.jit(step)` stood and compiles the step anew when the plan changes, and
    `policy.metrics()` says what it does. The step must return the optimizer state.

    Leaves that `base` (default: 4 bits, rotated) gives a `Quantize` are adaptive and start with it;
    all others stay as `base` has them. Every `sample_every` steps the error of each of the
    `candidates` is measured, on `runs` runs of whole buckets of each leaf; every `every` steps,
    from `warmup` on, `solver` chooses from the averages, in which a sample counts `decay` times the
    next one. The new plan is taken when it changes bytes or error by more than the share
    `hysteresis`; at most `max_plans` plans are ever compiled, and after that the best of them. All
    processes follow process 0, which appends each compiled plan, each look at the statistics and
    what `record` is given to the file `log`, for `python -m cgx_jax report`.

    Raises ValueError for options that cannot hold, while tracing for another tree than the first,
    and from the compiled step when the solver cannot meet its budget or processes disagree.
    Source: CGX (Markov et al., Middleware 2022), L-GreCo (arXiv 2210.17357).
    """

    adapts = True

    def __init__(
        self,
        solver: Solver | None = None,
        *,
        base: Policy | None = None,
        candidates: Sequence[Quantize] = CANDIDATES,
        warmup: int = 100,
        every: int = 1000,
        sample_every: int = 10,
        runs: int = 8,
        decay: float = 0.9,
        hysteresis: float = 0.05,
        max_plans: int = 3,
        log: Path | str | None = None,
    ) -> None:
        self.solver = LeastBytes() if solver is None else solver
        self.base = Uniform(START) if base is None else base
        self.sampler = Sampler(tuple(candidates), runs)
        self.warmup, self.every = warmup, every
        self.sample_every, self.decay = sample_every, decay
        self.hysteresis, self.max_plans = hysteresis, max_plans
        _check_options(self)
        self._log = RunLog(None if log is None else Path(log))
        self.history: list[Refresh] = []
        self.compile_seconds: list[float] = []
        self._leaves: tuple[Leaf, ...] | None = None  # of the tree, once it is known
        self._adaptive: tuple[int, ...] = ()
        self._subject = Subject((), (), self.sampler.candidates)
        self._widths: Widths = ()
        self._plans: list[Widths] = []
        self._saved: dict[str, Any] | None = None  # waits for the tree
        self._step = 0
        self._pending: tuple[int, Statistics] | None = None
        self._nonfinite: np.ndarray | None = None  # the statistics' of the last look
        self._traced: dict[Widths, tuple[Any, int]] = {}  # each plan, and what a rank sends by it
        self._traces = 0
        self._within = False

    # --- while tracing: the choice, and the statistics beside it.

    def bind(self, leaves: Sequence[Leaf]) -> None:
        """Fixes the tree that is adapted; raises ValueError for another one than before."""
        leaves = tuple(Leaf(x.path, tuple(x.shape), np.dtype(x.dtype)) for x in leaves)
        if self._leaves is not None:
            check_same(leaves, self._leaves, "the policy's first tree")
            return
        if self._saved is not None:
            check_same(leaves, saved_leaves(self._saved), "the saved policy's")
        chosen = self.base.choose(leaves)
        self._leaves = leaves
        # An empty leaf has no error to weigh.
        given = {i: c for i, c in enumerate(chosen) if isinstance(c, Quantize) and leaves[i].size}
        self._adaptive = tuple(given)
        self._subject = Subject(
            tuple(leaves[i].path for i in self._adaptive),
            tuple(leaves[i].size for i in self._adaptive),
            self.sampler.candidates,
        )
        self._widths = tuple(given.values())
        self._plans = [self._widths]
        if self._saved is not None:
            self._restore(self._saved)
        candidates = [dataclasses.asdict(c) for c in self.sampler.candidates]
        paths, sizes = self._subject.paths, self._subject.sizes
        self._log.write(
            "run", schema=run_log.SCHEMA, paths=paths, sizes=sizes, candidates=candidates
        )

    def choose(self, leaves: Sequence[Leaf]) -> list[Compressor]:
        self.bind(leaves)
        self._traces += 1
        chosen = self.base.choose(leaves)
        for i, width in zip(self._adaptive, self._widths, strict=True):
            chosen[i] = width
        return chosen

    def empty_statistics(self, leaves: Sequence[Leaf]) -> Statistics:
        """The statistics' state before training."""
        self.bind(leaves)
        return Statistics.zeros(len(self._adaptive), len(self.sampler.candidates))

    def observe(
        self,
        old: Statistics,
        sent: Sequence[Any],
        units: Sequence[Any],
        step: Any,
        axes: Axes,
        plan: Any,
    ) -> Statistics:
        """The statistics after a step in which `sent`, all leaves, go by `plan` over `axes`.

        `units` has one entry per leaf: None, or the `precondition.Units` that it is compressed in
        and their size. Statistics are those of values in these units.
        """
        if not self._within:
            raise ValueError(
                "Adaptive: the step is compiled by something else than the policy, which then "
                "could never change the plan; write policy.jit(step) where jax.jit(step) stands."
            )
        self._traced[self._widths] = plan, plan.wire_bytes(axes.world)

        def measure(old: Statistics) -> Statistics:
            values = [
                sent[i] if units[i] is None else units[i][0].divide(sent[i]) / units[i][1]
                for i in self._adaptive
            ]
            return self.sampler.observe(old, values, axes, self.decay)

        return jax.lax.cond(step % self.sample_every == 0, measure, lambda old: old, old)

    # --- around the step.

    def jit(self, step: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        """`jax.jit(step, **options)`, compiled once for each plan, with a look at the statistics.

        `step` is not jitted itself (shard_map is fine) and returns, somewhere in its result, the
        state of `sync_gradients`.
        """
        compiled: dict[Widths, Callable[..., Any]] = {}

        @functools.wraps(step)
        def run(*args: Any, **kwargs: Any) -> Any:
            self._decide()
            known = self._widths
            fresh = known not in compiled
            if fresh:
                # Another function object each time, since jax.jit caches by it.
                own = functools.wraps(step)(lambda *a, **k: step(*a, **k))
                compiled[known] = jax.jit(own, **options)
            start, traces = time.perf_counter(), self._traces
            self._within = True
            try:
                out = compiled[known](*args, **kwargs)
            finally:
                self._within = False
            if fresh:
                self.compile_seconds.append(time.perf_counter() - start)
                self._check_traced(traces)
                self._log_plan()
                compiled[self._widths] = compiled.pop(known)  # the tree may be new to the policy
            self._look(out)
            return out

        return run

    def _check_traced(self, before: int) -> None:
        if self._traces == before or self._widths not in self._traced:
            raise ValueError(
                "Adaptive: the step did not ask for its plan while it was compiled: it is jitted "
                "already, and would keep the plan it has. Give policy.jit the function without "
                "jax.jit, with this policy in its sync_gradients."
            )

    def _log_plan(self) -> None:
        self._log.write(
            "plan",
            step=self._step,
            bits=[w.bits for w in self._widths],
            wire_bytes=self._traced[self._widths][1],
            compile_seconds=self.compile_seconds[-1],
        )

    def _look(self, out: Any) -> None:
        self._step += 1
        if self._step < self.warmup or (self._step - self.warmup) % self.every:
            return
        found = _statistics_in(out)
        if not found:
            raise ValueError(
                "Adaptive: the step's result holds no statistics; return the optimizer state, "
                "with that of sync_gradients, from the step."
            )
        # A copy, since the step's next call may be given the originals' memory.
        copied = jax.tree.map(jnp.copy, found[0])
        for x in jax.tree.leaves(copied):
            x.copy_to_host_async()
        self._pending = (self._step + min(LAG, self.every - 1), copied)

    def _decide(self) -> None:
        if self._pending is None or self._step < self._pending[0]:
            return
        measured = jax.tree.map(lambda x: np.asarray(x.addressable_data(0)), self._pending[1])
        self._pending = None
        averages = statistics.mean(measured)
        digests = agreement.gather(zlib.crc32(b"".join(x.tobytes() for x in measured)))
        others = [i for i, digest in enumerate(digests) if digest != digests[0]]
        if others:
            raise ValueError(
                f"Adaptive: processes {others} have other statistics than process 0, so the ranks "
                "no longer hold the same state; find out where with cgx_jax.debug_checksums()."
            )
        message = b""
        if jax.process_index() == 0:
            try:
                message = self._decision(averages)
            except (ArithmeticError, ImportError, ValueError) as error:
                message = b"!" + str(error).encode()
        agreed = agreement.broadcast(message)
        if agreed.startswith(b"!"):
            raise ValueError(agreed[1:].decode())
        made = json.loads(agreed)
        self._widths = tuple(Quantize(**w) for w in made["widths"])
        if self._widths not in self._plans:
            self._plans.append(self._widths)
        decision = Decision(made["outcome"], self._widths, tuple(made["leaves"]))
        struck = self._struck(measured.nonfinite)
        self.history.append(Refresh.of(self._step, decision, self._subject, averages, struck))
        kept = {name: averages[name].tolist() for name in ("error", "square")}
        self._log.write("refresh", averages=kept, **dataclasses.asdict(self.history[-1]))

    def _struck(self, now: np.ndarray) -> list[bool]:
        """Which leaves were not finite since the last look, from decayed sums that never end."""
        before = np.zeros_like(now) if self._nonfinite is None else self._nonfinite
        self._nonfinite = now
        # What is left at most of what the last look saw; the margin is for fp32's rounding.
        left = self.decay ** (self.every // self.sample_every) * before
        return [bool(bad) for bad in now > 1.0001 * left]

    def _decision(self, averages: dict[str, Any]) -> bytes:
        decision = decide(
            averages,
            self._subject,
            self.solver,
            self._widths,
            self._plans,
            hysteresis=self.hysteresis,
            max_plans=self.max_plans,
        )
        widths = [dataclasses.asdict(w) for w in decision.widths]
        made = {"outcome": decision.outcome, "widths": widths, "leaves": decision.leaves}
        return json.dumps(made).encode()

    # --- what others may see and keep.

    @property
    def plan(self) -> Any:
        """The `Plan` by which the last step reduced; None before the first."""
        return self._traced.get(self._widths, (None, 0))[0]

    def metrics(self) -> dict[str, float | str]:
        """Numbers and names for any logger; a leaf's end in its path. Cheap: nothing is fetched.

        docs/policy.md lists them. Strings are names; all else is a number.
        """
        subject, last = self._subject, self.history[-1] if self.history else None
        nbytes = subject.nbytes(self._widths)
        out: dict[str, float | str] = {
            "cgx/bytes": nbytes,
            "cgx/bits_per_value": 8 * nbytes / max(1, sum(subject.sizes)),
            "cgx/plan_changes": sum(r.outcome == "changed" for r in self.history),
            "cgx/plans": len(self._plans),
            "cgx/compile_seconds": sum(self.compile_seconds),
            "cgx/nonfinite_leaves": len(last.nonfinite) if last else 0,
            "cgx/refresh": last.outcome if last else "warmup",
        }
        if self._widths in self._traced:
            out["cgx/wire_bytes"] = self._traced[self._widths][1]
        for i, (path, width) in enumerate(zip(subject.paths, self._widths, strict=True)):
            out[f"cgx/bits/{path}"] = width.bits
            out[f"cgx/bytes/{path}"] = width.wire_bits(subject.sizes[i]) // 8
            if last:
                out[f"cgx/relative_error/{path}"] = last.relative[i]
        if last and last.unusable:
            out["cgx/unusable"] = ", ".join(last.unusable)
        if last and last.nonfinite:
            out["cgx/nonfinite"] = ", ".join(last.nonfinite)
        return out

    def record(self, **scalars: float) -> None:
        """Notes numbers of the last step, such as loss=, in the log; does nothing without one."""
        self._log.write("scalars", step=self._step, **{k: float(v) for k, v in scalars.items()})

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs beside the optimizer state; JSON types alone."""
        pending = None
        if self._pending is not None:
            due, measured = self._pending
            pending = [due, [np.asarray(x.addressable_data(0)).tolist() for x in measured]]
        return {
            "leaves": [[x.path, list(x.shape), str(x.dtype)] for x in self._leaves or ()],
            "step": self._step,
            "pending": pending,
            "widths": [dataclasses.asdict(w) for w in self._widths],
            "plans": [[dataclasses.asdict(w) for w in p] for p in self._plans],
            "history": [dataclasses.asdict(r) for r in self.history],
            "nonfinite": None if self._nonfinite is None else self._nonfinite.tolist(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from what `state_dict` returned.

        Raises ValueError that names the first differing path for the state of another tree: here,
        or when the tree becomes known.
        """
        if self._leaves is not None:
            check_same(self._leaves, saved_leaves(state), "the saved policy's")
            self._restore(state)
        else:
            self._saved = state

    def _restore(self, state: dict[str, Any]) -> None:
        self._step = state["step"]
        self._widths = tuple(Quantize(**w) for w in state["widths"])
        self._plans = [tuple(Quantize(**w) for w in p) for p in state["plans"]]
        self.history = [Refresh.from_json(r) for r in state["history"]]
        self._saved = self._pending = self._nonfinite = None
        if state["nonfinite"] is not None:
            self._nonfinite = np.array(state["nonfinite"], np.float32)
        if state["pending"] is not None:
            due, measured = state["pending"]
            self._pending = (due, Statistics(*(jnp.asarray(x, jnp.float32) for x in measured)))


def _statistics_in(tree: Any) -> list[Statistics]:
    leaves = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, Statistics))
    return [x for x in leaves if isinstance(x, Statistics)]


def _check_options(policy: Adaptive) -> None:
    for name in ("warmup", "every", "sample_every", "max_plans"):
        value = getattr(policy, name)
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"Adaptive: {name}={value!r} must be an integer of 1 or more.")
    runs, widths = policy.sampler.runs, policy.sampler.candidates
    if not isinstance(runs, int) or runs < 1:
        raise ValueError(f"Adaptive: runs={runs!r} must be an integer of 1 or more.")
    if not 0 < policy.decay <= 1:
        raise ValueError(f"Adaptive: decay={policy.decay} is outside (0, 1]; 0.9 is usual.")
    if not 0 <= policy.hysteresis < 1:
        raise ValueError(f"Adaptive: hysteresis={policy.hysteresis} is outside [0, 1).")
    bits = [c.bits for c in widths if isinstance(c, Quantize)]
    if not bits or len(bits) != len(widths) or bits != sorted(set(bits)):
        raise ValueError(
            f"Adaptive: candidates={[str(c) for c in widths]} must be Quantize of ascending bits, "
            "one of each width."
        )
