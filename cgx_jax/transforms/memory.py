"""Error feedback: what compression lost in one step is sent with the next."""

from __future__ import annotations

import abc
import dataclasses
import numbers
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cgx_jax._types import Pytree, Shaped

# Maps a step's number, i32[], to its rate, like Optax's schedules.
Schedule = Callable[[Any], Any]


class Memory(abc.ABC):
    """What a rank remembers of one leaf between steps; instances are static and hashable.

    The state is a tuple of arrays in the leaf's shape, and keeps the dtypes that `init` gives it.
    `compensate` comes before the reduction and `remember` after it; neither knows the axis or the
    compressor. Both receive arrays of one dtype, the widest of the gradient's and the state's.
    `sync_gradients` raises ValueError for a memory around a compressor that would let it grow.
    """

    @property
    def in_rates(self) -> bool:
        """Whether residuals are kept times the learning rates of the steps that lost them."""
        return False

    @abc.abstractmethod
    def init(self, x: Shaped) -> tuple[jax.Array, ...]:
        """The state before the first step of a leaf with the shape and dtype of `x`."""

    @abc.abstractmethod
    def compensate(
        self, gradient: jax.Array, state: tuple[jax.Array, ...], step: jax.Array
    ) -> tuple[jax.Array, Pytree]:
        """Returns what is sent for the gradient, and what `remember` needs as `kept`.

        `step`, i32[], counts the updates before this one.
        """

    @abc.abstractmethod
    def remember(
        self, residual: jax.Array, kept: Pytree, arrived: jax.Array | None
    ) -> tuple[jax.Array, ...]:
        """Returns the state after a step that lost `residual` of what was sent.

        `kept` comes from `compensate`. `arrived`, bool in the leaf's shape, marks the values that a
        code of a few values has sent. It is None if the code sends every value.
        """


@dataclasses.dataclass(frozen=True)
class ErrorFeedback(Memory):
    """Adds to each gradient what the last step lost, times `decay` in (0, 1].

    With decay 1 nothing is lost. Over any number of steps the sum of what the optimizer saw and the
    sum of the gradients' means differ only by the mean of the ranks' memories. That helps an
    optimizer that adds gradients up (SGD, momentum). Adam divides by their size, and there feedback
    may cost more than it gives (see docs/accuracy.md). The memory has the shape of each parameter,
    in its dtype, but at least fp32: narrower sums stop growing.

    `learning_rate` is the optimizer's schedule, from a step's number to its rate. With it, a
    residual counts by the rate of the step that lost it, whichever step sends it. The memory then
    holds residuals times their rates, and the sums above are of gradients times rates. Without it,
    a residual counts by the rate of the step that sends it. A constant rate needs no schedule.

    Raises TypeError for a rate that is not a schedule or a decay that is not a number, ValueError
    for a decay outside of (0, 1]. Source: 1-bit SGD (Seide et al., Interspeech 2014), EF-SGD
    (Karimireddy et al., ICML 2019); here the second encoding of the reduction is fed back as well.
    """

    decay: float = 1.0
    learning_rate: Schedule | None = None

    def __post_init__(self) -> None:
        _require_number("ErrorFeedback", "decay", self.decay)
        if not 0 < self.decay <= 1:
            raise ValueError(
                f"ErrorFeedback: decay={self.decay} is outside (0, 1]; use 1 to lose nothing, or "
                "memory=None for no feedback."
            )
        _require_schedule("ErrorFeedback", self.learning_rate)

    @property
    def in_rates(self) -> bool:
        return self.learning_rate is not None

    def init(self, x: Shaped) -> tuple[jax.Array, ...]:
        return (_zeros(x),)

    def compensate(
        self, gradient: jax.Array, state: tuple[jax.Array, ...], step: jax.Array
    ) -> tuple[jax.Array, Pytree]:
        (memory,) = state
        if self.decay != 1:
            memory = jnp.asarray(self.decay, memory.dtype) * memory
        return _with_residual(gradient, memory, self.learning_rate, step)

    def remember(
        self, residual: jax.Array, kept: Pytree, arrived: jax.Array | None
    ) -> tuple[jax.Array, ...]:
        return (_in_rates(residual, kept),)


@dataclasses.dataclass(frozen=True)
class MomentumCorrection(Memory):
    """Error feedback around a momentum in [0, 1) that each rank keeps in place of the optimizer's.

    A rank sends its velocity u = momentum * u + gradient, plus what earlier steps lost of it. Put
    plain SGD after it. The sum of velocities that the optimizer sees is then that of exact momentum
    SGD, even for values that arrive late. Under a code that sends a few values, such as `TopK`, the
    velocity of a value that has arrived starts again from 0 (momentum factor masking), so that a
    late value does not push on in its old direction. A rank keeps two arrays of each leaf's shape.
    `learning_rate` is as in `ErrorFeedback`.

    Raises TypeError for a rate that is not a schedule or a momentum that is not a number,
    ValueError for a momentum outside of [0, 1). Source: DGC (Lin et al., ICLR 2018).
    """

    momentum: float = 0.9
    learning_rate: Schedule | None = None

    def __post_init__(self) -> None:
        _require_number("MomentumCorrection", "momentum", self.momentum)
        if not 0 <= self.momentum < 1:
            raise ValueError(
                f"MomentumCorrection: momentum={self.momentum} is outside [0, 1); 0.9 is usual. "
                "Use ErrorFeedback() for feedback without momentum."
            )
        _require_schedule("MomentumCorrection", self.learning_rate)

    @property
    def in_rates(self) -> bool:
        return self.learning_rate is not None

    def init(self, x: Shaped) -> tuple[jax.Array, ...]:
        return _zeros(x), _zeros(x)

    def compensate(
        self, gradient: jax.Array, state: tuple[jax.Array, ...], step: jax.Array
    ) -> tuple[jax.Array, Pytree]:
        memory, velocity = state
        velocity = jnp.asarray(self.momentum, gradient.dtype) * velocity + gradient
        sent, kept = _with_residual(velocity, memory, self.learning_rate, step)
        return sent, (kept, velocity)

    def remember(
        self, residual: jax.Array, kept: Pytree, arrived: jax.Array | None
    ) -> tuple[jax.Array, ...]:
        kept, velocity = kept
        if arrived is not None:
            velocity = jnp.where(arrived, 0, velocity).astype(velocity.dtype)
        return _in_rates(residual, kept), velocity


def _zeros(x: Shaped) -> jax.Array:
    # A sum in bfloat16 or float16 stops growing once what is added is less than half an ulp, and
    # residuals times small rates leave the range of float16.
    return jnp.zeros(x.shape, jnp.float32 if np.dtype(x.dtype).itemsize < 4 else x.dtype)


def _with_residual(
    x: jax.Array, memory: jax.Array, schedule: Schedule | None, step: jax.Array
) -> tuple[jax.Array, Pytree]:
    """Returns `x` plus the residual that the memory stands for, and what `_in_rates` needs."""
    if schedule is None:
        return x + memory, None
    rate = jnp.asarray(schedule(step), memory.dtype)
    # In a step of rate 0 nothing that is sent counts, so the memory waits.
    late = jnp.where(rate == 0, 0, memory / jnp.where(rate == 0, 1, rate))
    return x + late, (rate, memory)


def _in_rates(residual: jax.Array, kept: Pytree) -> jax.Array:
    """Returns the memory that stands for a residual."""
    if kept is None:
        return residual
    rate, before = kept
    return jnp.where(rate == 0, before, rate * residual)


def _require_schedule(caller: str, schedule: Any) -> None:
    if schedule is not None and not callable(schedule):
        raise TypeError(
            f"{caller}: learning_rate={schedule!r} is not a schedule; pass the optimizer's own, a "
            "function of the step such as optax.cosine_decay_schedule(0.1, 1000). For a constant "
            "rate, leave out learning_rate."
        )


def _require_number(caller: str, name: str, value: Any) -> None:
    if not isinstance(value, numbers.Real):
        raise TypeError(
            f"{caller}: {name}={value!r} is not a number; pass a Python float. It is a constant of "
            "the compiled step, which optax.inject_hyperparams cannot change: inject the optimizer "
            "after sync_gradients instead."
        )
