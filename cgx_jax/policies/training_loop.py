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

# Under a new value, JAX traces again what is jitted, so no part of a step keeps an earlier choice.
_choice = jax.make_user_context()


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

    def begin(self) -> None:
        """Compares with the other processes what must be the same; before a step is traced."""

    def before(self) -> None:
        """Makes the choice for the next step; every process calls it."""

    def after(self, out: Pytree, seconds: float, fresh: bool) -> None:
        """Notes a step's result and time; a `fresh` step was compiled in that time."""


class TrainingLoop:
    """Calls a training step for `parts`, and owns its compiled versions."""

    def __init__(self, *parts: Part) -> None:
        self._parts = parts

    def jit(self, step: Callable[..., Pytree], **options: Any) -> Callable[..., Pytree]:
        """`jax.jit(step, **options)`, compiled once for each choice of the parts."""
        parts = self._parts
        # JAX hashes what it compiles, and a callable object may have no hash.
        called = functools.wraps(step)(lambda *args, **kwargs: step(*args, **kwargs))
        jitted: Any = jax.jit(called, **options)
        compiled: dict[tuple[Hashable, ...], object] = {}  # what `_choice` was for each choice

        @functools.wraps(step)
        def run(*args: Pytree, **kwargs: Pytree) -> Pytree:
            self._require_values(args, kwargs)
            for part in parts:
                part.begin()
            if not all(part.bound for part in parts):
                self._trace(jitted.trace, object(), args, kwargs)
            for part in parts:
                part.before()
                if part.trying:
                    break
            choice = compiled.get(self._key())
            timed = any(part.trying for part in parts)
            if timed:
                jax.block_until_ready((args, kwargs))
                agreement.gather(0)  # all ranks begin together:
                agreement.gather(0)  # the first one's stragglers have arrived now
            start = clock()
            fresh = choice is None
            if choice is None:
                choice = object()
                out = self._trace(jitted, choice, args, kwargs)
                # The policy may have met its tree only now, which changes its choice and the key.
                compiled[self._key()] = choice
            else:
                out = self._call(jitted, choice, args, kwargs)
            self._require_values(out)
            if timed:
                jax.block_until_ready(out)
            seconds = clock() - start
            for part in parts:
                part.after(out, seconds, fresh)
            return out

        return run

    def _key(self) -> tuple[Hashable, ...]:
        return tuple(part.key for part in self._parts)

    def _call(
        self, function: Callable[..., Pytree], choice: object, args: Pytree, kwargs: Pytree
    ) -> Pytree:
        for part in self._parts:
            part.running = True
        try:
            with _choice(choice):
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

    def _trace(
        self, function: Callable[..., Pytree], choice: object, args: Pytree, kwargs: Pytree
    ) -> Pytree:
        """Calls and so traces the step; raises ValueError if it did not ask every part."""
        before = [part.traces for part in self._parts]
        out = self._call(function, choice, args, kwargs)
        for part, traces in zip(self._parts, before, strict=True):
            if part.traces == traces:
                name, variable, chosen = part.words
                raise ValueError(
                    f"{name}: the step did not use the {chosen} of this {variable} when it was "
                    f"compiled. Pass {variable}.jit a step whose sync_gradients has this "
                    f"{variable}, and not another {name}."
                )
        return out
