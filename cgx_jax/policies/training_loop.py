"""Around the training step: one compilation for each choice that it was traced for."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Hashable
from typing import Any, ClassVar, NamedTuple, Protocol

import jax

from cgx_jax._types import Pytree
from cgx_jax.host import agreement

clock = time.perf_counter


class Names(NamedTuple):
    """How error messages name a part: its class, a variable that holds it, and what it chooses."""

    name: str
    variable: str
    choice: str


class Part(Protocol):
    """Something that chooses how a step is compiled, such as a policy or a tuner.

    The step is compiled once for each `key`. `traces` counts how often the part was asked for its
    choice while a step was traced, and `running` is True while the loop calls a step. A part that
    is not `bound` has to see the step traced before its first choice. While a part is `trying`,
    steps are timed, and the parts after it make no new choice.
    """

    words: ClassVar[Names]
    traces: int
    running: bool

    @property
    def key(self) -> Hashable: ...

    @property
    def bound(self) -> bool: ...

    @property
    def trying(self) -> bool: ...

    def before(self) -> None:
        """Makes the choice for the next step; every process calls it."""

    def after(self, out: Pytree, seconds: float, fresh: bool) -> None:
        """Notes a step's result and time; a `fresh` step was compiled in that time."""


class TrainingLoop:
    """Calls a training step for `parts`, and owns its compiled versions."""

    def __init__(self, *parts: Part) -> None:
        self._parts = parts
        self._asked: dict[int, int] = {}  # how often the first trace asked each part

    def jit(self, step: Callable[..., Pytree], **options: Any) -> Callable[..., Pytree]:
        """`jax.jit(step, **options)`, compiled once for each choice of the parts."""
        parts = self._parts
        compiled: dict[tuple[Hashable, ...], Callable[..., Pytree]] = {}

        def anew() -> Pytree:
            # Another function object each time, since jax.jit caches by it.
            return jax.jit(functools.wraps(step)(lambda *a, **k: step(*a, **k)), **options)

        @functools.wraps(step)
        def run(*args: Pytree, **kwargs: Pytree) -> Pytree:
            self._require_values(args, kwargs)
            if not all(part.bound for part in parts):
                self._trace(anew().trace, args, kwargs)
            for part in parts:
                part.before()
                if part.trying:
                    break
            function = compiled.get(self._key())
            timed = any(part.trying for part in parts)
            if timed:
                jax.block_until_ready((args, kwargs))
                agreement.gather(0)  # all ranks begin together:
                agreement.gather(0)  # the first one's stragglers have arrived now
            start = clock()
            fresh = function is None
            if function is None:
                function = anew()
                out = self._trace(function, args, kwargs)
                # The policy may have met its tree only now, which changes its choice and the key.
                compiled[self._key()] = function
            else:
                out = self._call(function, args, kwargs)
            if timed:
                jax.block_until_ready(out)
            seconds = clock() - start
            for part in parts:
                part.after(out, seconds, fresh)
            return out

        return run

    def _key(self) -> tuple[Hashable, ...]:
        return tuple(part.key for part in self._parts)

    def _call(self, function: Callable[..., Pytree], args: Pytree, kwargs: Pytree) -> Pytree:
        for part in self._parts:
            part.running = True
        try:
            return function(*args, **kwargs)
        finally:
            for part in self._parts:
                part.running = False

    def _require_values(self, *arguments: Pytree) -> None:
        """Raises ValueError within another program, which would keep the first choice forever."""
        if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(arguments)):
            name, variable, choice = self._parts[0].words
            raise ValueError(
                f"{name}: the step that {variable}.jit returned is called while another function "
                f"is traced, which would keep the first {choice}. Call it from Python, and not "
                "within jax.jit, jax.lax.scan or jax.vmap."
            )

    def _trace(self, function: Callable[..., Pytree], args: Pytree, kwargs: Pytree) -> Pytree:
        """Calls and so traces the step.

        Raises ValueError if the step did not ask every part, or less often than in its first trace.
        """
        before = [part.traces for part in self._parts]
        out = self._call(function, args, kwargs)
        for i, (part, traces) in enumerate(zip(self._parts, before, strict=True)):
            asked = part.traces - traces
            if asked < self._asked.setdefault(i, max(asked, 1)):
                name, variable, choice = part.words
                raise ValueError(
                    f"{name}: the step did not use the {choice} of this {variable} when it was "
                    f"compiled. Either the step is already jitted and would keep its {choice}, or "
                    "so is a part of it that calls sync_gradients (an inner jax.jit, or the body "
                    f"of a scan that is defined outside of the step). Or another {name} is in its "
                    f"sync_gradients. Pass {variable}.jit the function without jax.jit, with this "
                    f"{variable} in its sync_gradients."
                )
        return out
