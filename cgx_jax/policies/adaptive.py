"""`Adaptive`: chooses every leaf's compressor by what the gradients look like during training."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from cgx_jax._types import Json, Pytree
from cgx_jax.arguments import whole_number
from cgx_jax.axes import Axes
from cgx_jax.compressors import Compressor
from cgx_jax.host import agreement
from cgx_jax.kernels import scaling
from cgx_jax.leaves import Leaf
from cgx_jax.policies import checkpoint, statistics
from cgx_jax.policies.checkpoint import Progress, saved_leaves
from cgx_jax.policies.decide import Compressors, Decision, Refresh, Subject, decide, last_norm
from cgx_jax.policies.rules import DEFAULT, Policy, Uniform
from cgx_jax.policies.solvers import LeastBytes, Solver
from cgx_jax.policies.statistics import Sampler, Statistics
from cgx_jax.policies.training_loop import Names, TrainingLoop

# Steps between asking for statistics and using them, so that the host does not wait for them.
LAG = 4
CANDIDATES = tuple(dataclasses.replace(DEFAULT, bits=bits) for bits in range(2, 9))


class Adaptive(Policy):
    """Gives every leaf the compressor that `solver` finds from statistics of the running training.

    It is used in three places. `sync_gradients(axis, policy)` follows the plan and measures.
    `policy.jit(step)` replaces `jax.jit(step)` and compiles the step again when the plan changes.
    `policy.metrics()` reports what the policy does. The step must return the optimizer state.

    `candidates` are compressors of any kind, in order of ascending `Compressor.width`. A leaf is
    adaptive if `base` (default: 4 bits, rotated) gives it a lossy compressor and every candidate
    takes its dtype. It starts with that compressor; all other leaves keep what `base` gives them.

    Every `sample_every` steps the error of each candidate is measured, on `runs` runs of each leaf.
    Every `every` steps, from step `warmup` on, `solver` chooses from the averages, in which a
    sample counts `decay` times the next one. The new plan is taken if it changes bytes or error by
    more than the share `hysteresis`. At most `max_plans` plans are ever compiled; after that, the
    best of them is taken. All processes follow process 0.

    Raises ValueError for invalid options, such as candidates that `solver` cannot choose from;
    while tracing for another tree than the first; and from the compiled step if the solver cannot
    meet its budget or processes disagree. Source: CGX (Markov et al., Middleware 2022), L-GreCo
    (arXiv 2210.17357).
    """

    adapts = True
    words: ClassVar[Names] = Names("Adaptive", "policy", "plan")
    trying = False

    def __init__(
        self,
        solver: Solver | None = None,
        *,
        base: Policy | None = None,
        candidates: Sequence[Compressor] = CANDIDATES,
        warmup: int = 100,
        every: int = 1000,
        sample_every: int = 10,
        runs: int = 8,
        decay: float = 0.9,
        hysteresis: float = 0.05,
        max_plans: int = 3,
    ) -> None:
        self.solver = LeastBytes() if solver is None else solver
        self.base = Uniform() if base is None else base
        self.sampler = Sampler(tuple(candidates), runs)
        self.warmup, self.every = warmup, every
        self.sample_every, self.decay = sample_every, decay
        self.hysteresis, self.max_plans = hysteresis, max_plans
        _check_options(self)
        self.compile_seconds: list[float] = []
        self.progress = Progress()
        self.traces = 0  # reductions that were traced
        self.running = False
        self.known = self.sampler.candidates
        self._leaves: tuple[Leaf, ...] | None = None  # of the tree, once it is known
        self._adaptive: tuple[int, ...] = ()
        self._subject = Subject((), self.sampler.candidates)
        self._saved: Json | None = None  # waits for the tree
        self._compared = False  # whether all processes are known to begin alike
        self._traced: dict[Compressors, tuple[Any, int]] = {}  # each plan, and what a rank sends

    def __repr__(self) -> str:
        return f"Adaptive({self.solver})"

    # --- while tracing: the choice, and the statistics beside it.

    def bind(self, leaves: Sequence[Leaf]) -> None:
        """Fixes the tree that is adapted; raises ValueError if it differs from an earlier one."""
        leaves = tuple(Leaf(x.path, tuple(x.shape), np.dtype(x.dtype)) for x in leaves)
        if self._leaves is not None:
            _check_same(leaves, self._leaves, "the policy's first tree")
            return
        if self._saved is not None:
            saved = checkpoint.load(self._saved)
            _check_same(leaves, saved_leaves(saved.leaves), "the saved policy's")
        candidates = self.sampler.candidates
        given = {
            i: c
            for i, (c, leaf) in enumerate(zip(self.base.choose(leaves), leaves, strict=True))
            if not c.lossless and leaf.size  # an empty leaf has no error to weigh
            if all(other.lossless or other.supports(leaf.dtype) for other in candidates)
        }
        start = tuple(given.values())
        known = tuple(dict.fromkeys((*candidates, *start)))
        progress = Progress(start, [start])
        if self._saved is not None:
            progress = checkpoint.restore(saved, known, list(given), candidates)
        self.progress, self.known, self._saved = progress, known, None
        self._leaves, self._adaptive = leaves, tuple(given)
        self._subject = Subject(tuple(leaves[i] for i in given), candidates)

    def choose(self, leaves: Sequence[Leaf]) -> list[Compressor]:
        self.bind(leaves)
        chosen = self.base.choose(leaves)
        for i, compressor in zip(self._adaptive, self.progress.current, strict=True):
            chosen[i] = compressor
        return chosen

    def choices(self, leaves: Sequence[Leaf]) -> list[tuple[Compressor, ...]]:
        """Returns every compressor that each leaf may take; the state has an entry for each."""
        self.bind(leaves)
        some: list[tuple[Compressor, ...]] = [(c,) for c in self.base.choose(leaves)]
        for i in self._adaptive:
            some[i] = tuple(dict.fromkeys((*self.sampler.candidates, *some[i])))
        return some

    def empty_statistics(self, leaves: Sequence[Leaf]) -> Statistics:
        """Returns the state of the statistics before training."""
        self.bind(leaves)
        return Statistics.zeros(len(self._adaptive), len(self.sampler.candidates))

    def observe(
        self,
        old: Statistics,
        grads: Sequence[jax.Array],
        scales: Any,
        step: jax.Array,
        axes: Axes,
        plan: Any,
    ) -> Statistics:
        """Returns the statistics after a step with a rank's `grads`, by `plan` over `axes`.

        `grads` are those of all leaves. `scales` are None, or the units that leaves are compressed
        in and the usual sizes in them. The statistics are those of the values in these units.
        """
        if not self.running:
            raise ValueError(
                "Adaptive: the policy did not compile the step, so it could never change the plan; "
                "write policy.jit(step) or Tuner(policy).jit(step) in place of jax.jit(step)."
            )
        self.traces += 1
        self._subject = dataclasses.replace(self._subject, world=axes.world)
        self._traced[self.progress.current] = plan, plan.wire_bytes(axes.world)

        def in_units(i: int) -> Any:
            if scales is None or scales.units[i] is None:
                return grads[i]
            return scaling.multiply(grads[i], scales.units[i], scaling.IN) / scales.sizes[i]

        def measure(old: Statistics) -> Statistics:
            values = [in_units(i) for i in self._adaptive]
            return self.sampler.observe(old, values, axes, self.decay)

        return jax.lax.cond(step % self.sample_every == 0, measure, lambda old: old, old)

    # --- around the step.

    def jit(self, step: Callable[..., Pytree], **options: Any) -> Callable[..., Pytree]:
        """`jax.jit(step, **options)`, compiled once per plan, with looks at the statistics.

        `step` may be jitted already, in whole or in part. Its result must hold the state of
        `sync_gradients` somewhere.
        """
        return TrainingLoop(self).jit(step, **options)

    @property
    def bound(self) -> bool:
        """Whether `before` has what it needs: after a restore, the tree and the number of ranks."""
        return bool(self._traced) or (self._saved is None and self.progress.pending is None)

    @property
    def key(self) -> Compressors:
        """The compressors for which a step is compiled."""
        return self.progress.current

    def begin(self) -> None:
        """Raises ValueError on every process if any has other options or another saved state.

        The base is compared by what it gives the leaves, since its text may hold a set, whose order
        differs between processes.
        """
        if self._compared:
            return
        kept = self.state_dict() if self._saved or self.progress.step else None
        # In one form, whether it waits for its tree or not.
        saved = None if kept is None else checkpoint.load(kept)
        base = None if self._leaves is None else self.base.choose(self._leaves)
        options = self.warmup, self.every, self.sample_every, self.decay, self.sampler, base
        agreement.require_same(
            (options, saved),
            "Adaptive: the options, or what load_state_dict has set,",
            "give every process the same ones before its first step",
        )
        self._compared = True

    def before(self) -> None:
        """Chooses a plan from statistics that were asked for `LAG` steps ago."""
        progress = self.progress
        if progress.pending is None or progress.step < progress.pending[0]:
            return
        measured = jax.tree.map(statistics.own, progress.pending[1])
        progress.pending = None
        agreement.require_same(
            b"".join(x.tobytes() for x in measured),
            "Adaptive: the statistics",
            "the ranks no longer hold the same state, and cgx_jax.debug.debug_checksums() finds "
            "where",
        )
        averages = statistics.mean(measured)
        decision = self._agreed(averages)
        progress.current = decision.compressors
        if progress.current not in progress.plans:
            progress.plans.append(progress.current)
        # Which leaves were not finite since the last look.
        last, progress.nonfinite = progress.nonfinite, measured.nonfinite
        struck = [bool(bad) for bad in measured.nonfinite > (0 if last is None else last)]
        progress.history.append(
            Refresh.of(progress.step, decision, self._subject, averages, struck)
        )

    def after(self, out: Pytree, seconds: float, fresh: bool) -> None:
        """Counts a step and, when it is time, asks for the statistics in its result."""
        if fresh:
            self.compile_seconds.append(seconds)
        progress = self.progress
        progress.step += 1
        if progress.step < self.warmup or (progress.step - self.warmup) % self.every:
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
        progress.pending = progress.step + min(LAG, self.every - 1), copied

    def _agreed(self, averages: dict[str, np.ndarray]) -> Decision:
        """Returns process 0's decision; raises its error on every process, so that none waits."""
        message, failed = b"", None
        if jax.process_index() == 0:
            try:
                made = decide(
                    averages,
                    self._subject,
                    self.solver,
                    self.progress.current,
                    self.progress.plans,
                    hysteresis=self.hysteresis,
                    max_plans=self.max_plans,
                    before=last_norm(self.progress.history),
                )
                numbers = [self.known.index(c) for c in made.compressors]
                message = json.dumps([made.outcome, numbers, made.leaves]).encode()
            except Exception as error:  # a user's solver may raise anything
                failed, text = error, str(error)
                if not isinstance(error, ArithmeticError | ImportError | ValueError):
                    text = f"Adaptive: the solver failed: {error!r}"
                message = b"!" + text.encode()
        agreed = agreement.broadcast(message)
        if agreed.startswith(b"!"):
            raise ValueError(agreed[1:].decode()) from failed
        outcome, numbers, leaves = json.loads(agreed)
        return Decision(outcome, tuple(self.known[i] for i in numbers), tuple(leaves))

    # --- what others may see and keep.

    @property
    def history(self) -> list[Refresh]:
        """Every look at the statistics."""
        return self.progress.history

    @property
    def plan(self) -> Any:
        """The `Plan` by which the last step reduced; None before the first."""
        return self._traced.get(self.progress.current, (None, 0))[0]

    def metrics(self) -> dict[str, float | str]:
        """Returns numbers and names for any logger; keys of a leaf end in its path.

        docs/policy.md lists them. Strings are names; all else is a number. Fetches nothing.
        """
        wire_bytes = self._traced.get(self.progress.current, (None, None))[1]
        progress, history = self.progress, self.progress.history
        last = history[-1] if history else None
        each = self._subject.nbytes(progress.current)
        out: dict[str, float | str] = {
            "cgx/bytes": sum(each),
            "cgx/bits_per_value": 8 * sum(each) / max(1, sum(x.size for x in self._subject.leaves)),
            "cgx/plan_changes": sum(r.outcome == "changed" for r in history),
            "cgx/plans": len(progress.plans),
            "cgx/compile_seconds": sum(self.compile_seconds),
            "cgx/nonfinite_leaves": len(last.nonfinite) if last else 0,
            "cgx/refresh": last.outcome if last else "warmup",
        }
        if wire_bytes is not None:
            out["cgx/wire_bytes"] = wire_bytes
        for i, (path, compressor) in enumerate(
            zip(self._subject.paths, progress.current, strict=True)
        ):
            out[f"cgx/bits/{path}"] = compressor.width
            out[f"cgx/bytes/{path}"] = each[i]
            if last:
                out[f"cgx/relative_error/{path}"] = last.relative[i]
        if last and last.unusable:
            out["cgx/unusable"] = ", ".join(last.unusable)
        if last and last.nonfinite:
            out["cgx/nonfinite"] = ", ".join(last.nonfinite)
        return out

    def state_dict(self) -> Json:
        """Returns what a resumed run needs besides the optimizer state, in JSON types only."""
        if self._saved is not None:
            return self._saved
        own = self._leaves or (), self._adaptive, self.sampler.candidates
        return checkpoint.save(self.progress, *own)

    def load_state_dict(self, state: Json) -> None:
        """Continues from what `state_dict` returned.

        Raises ValueError here for what `state_dict` never returns. Raises it here, or when the tree
        becomes known, for the state of another tree, with the first path that differs, of other
        candidates or other adaptive leaves, and for a compressor that `base` does not give.
        """
        saved = checkpoint.load(state)
        seen = saved.leaves or saved.step
        self._compared = False
        if self._leaves is None:
            self._saved = state if seen else None
        elif seen:
            _check_same(self._leaves, saved_leaves(saved.leaves), "the saved policy's")
            own = self._adaptive, self.sampler.candidates
            self.progress = checkpoint.restore(saved, self.known, *own)
        else:
            start = self.progress.plans[0]
            self.progress = Progress(start, [start])


def _check_options(policy: Adaptive) -> None:
    """Raises ValueError or TypeError for invalid options."""
    for name in ("warmup", "every", "sample_every", "max_plans"):
        whole_number("Adaptive", name, getattr(policy, name), 1)
    whole_number("Adaptive", "runs", policy.sampler.runs, 1)
    candidates = policy.sampler.candidates
    if not 0 < policy.decay <= 1:
        raise ValueError(f"Adaptive: decay={policy.decay} is outside (0, 1]; 0.9 is usual.")
    if not 0 <= policy.hysteresis < 1:
        raise ValueError(f"Adaptive: hysteresis={policy.hysteresis} is outside [0, 1).")
    widths = [c.width for c in candidates if isinstance(c, Compressor)]
    distinct = len(widths) == len(set(candidates)) == len(candidates)
    if not widths or not distinct or widths != sorted(widths):
        raise ValueError(
            f"Adaptive: candidates={[str(c) for c in candidates]} must be Quantize(...) or other "
            "compressors, all different and sorted by ascending bits (Compressor.width)."
        )
    policy.solver.check(np.array(widths))


_ONE_TREE = (
    "use one policy for one tree. Where optax.multi_transform splits it, put one sync_gradients "
    "before that."
)


def _check_same(ours: Sequence[Leaf], theirs: Sequence[Leaf], of: str) -> None:
    """Raises ValueError at the first leaf that differs from `theirs`, the leaves of `of`."""
    for a, b in zip(ours, theirs, strict=False):
        if a != b:
            raise ValueError(
                f"Adaptive: the tree has leaf {a.path!r} {a.dtype}{list(a.shape)} where {of} has "
                f"{b.path!r} {b.dtype}{list(b.shape)}; {_ONE_TREE}"
            )
    if len(ours) != len(theirs):
        longer, which = (ours, "the tree") if len(ours) > len(theirs) else (theirs, of)
        path = longer[min(len(ours), len(theirs))].path
        raise ValueError(
            f"Adaptive: the tree has {len(ours)} leaves and {of} {len(theirs)}; leaf {path!r} of "
            f"{which} is the first without a counterpart; {_ONE_TREE}"
        )
