"""Error feedback: what compression lost in one step is sent with the next."""

from __future__ import annotations

import abc
import dataclasses
import numbers
from typing import Any

import jax
import jax.numpy as jnp


class Memory(abc.ABC):
    """What a rank remembers of one leaf between steps; instances are static and hashable.

    The state is a tuple of arrays like the leaf. `compensate` comes before the reduction and
    `remember` after it; neither knows the axis or the compressor.
    """

    @abc.abstractmethod
    def init(self, x: Any) -> tuple[jax.Array, ...]:
        """The state before the first step of a leaf with the shape and dtype of `x`."""

    @abc.abstractmethod
    def compensate(
        self, gradient: jax.Array, state: tuple[jax.Array, ...]
    ) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        """The gradient to (what is sent, the state that `remember` completes)."""

    @abc.abstractmethod
    def remember(self, residual: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        """The state after a step in which `residual` of what was sent is lost."""


@dataclasses.dataclass(frozen=True)
class ErrorFeedback(Memory):
    """Adds to each gradient what the last step lost, times `decay` in (0, 1].

    With decay 1 nothing is lost: over any number of steps the sum of what the optimizer saw and
    the sum of the gradients' means differ by the mean of the ranks' memories, no more. That helps
    an optimizer that adds gradients up (SGD, momentum); Adam divides by their size, and there
    feedback may cost more than it gives: docs/accuracy.md. Source:
    1-bit SGD (Seide et al., Interspeech 2014), EF-SGD (Karimireddy et al., ICML 2019); here the
    second encoding of the reduction is fed back as well.
    """

    decay: float = 1.0

    def __post_init__(self) -> None:
        _require_number("ErrorFeedback", "decay", self.decay)
        if not 0 < self.decay <= 1:
            raise ValueError(
                f"ErrorFeedback: decay={self.decay} is outside (0, 1]; use 1 to lose nothing, "
                "memory=None for no feedback."
            )

    def init(self, x: Any) -> tuple[jax.Array, ...]:
        return (jnp.zeros(x.shape, x.dtype),)

    def compensate(
        self, gradient: jax.Array, state: tuple[jax.Array, ...]
    ) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        (residual,) = state
        decay = jnp.asarray(self.decay, gradient.dtype)
        return gradient + (residual if self.decay == 1 else decay * residual), ()

    def remember(self, residual: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        return (residual,)


@dataclasses.dataclass(frozen=True)
class MomentumCorrection(Memory):
    """Error feedback around a momentum that each rank keeps, in [0, 1): it takes the optimizer's.

    A rank sends its velocity u = momentum * u + gradient and what earlier steps lost of it; follow
    with plain SGD. The sum of velocities that the optimizer sees is then that of exact momentum
    SGD, also for values that reach it late. Source: DGC (Lin et al., ICLR 2018); nothing is
    masked, since a quantizer sends every value.
    """

    momentum: float = 0.9

    def __post_init__(self) -> None:
        _require_number("MomentumCorrection", "momentum", self.momentum)
        if not 0 <= self.momentum < 1:
            raise ValueError(
                f"MomentumCorrection: momentum={self.momentum} is outside [0, 1); 0.9 is usual, "
                "ErrorFeedback() is feedback without momentum."
            )

    def init(self, x: Any) -> tuple[jax.Array, ...]:
        return jnp.zeros(x.shape, x.dtype), jnp.zeros(x.shape, x.dtype)

    def compensate(
        self, gradient: jax.Array, state: tuple[jax.Array, ...]
    ) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        residual, velocity = state
        velocity = jnp.asarray(self.momentum, gradient.dtype) * velocity + gradient
        return residual + velocity, (velocity,)

    def remember(self, residual: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        return residual, *state


def _require_number(caller: str, name: str, value: Any) -> None:
    if not isinstance(value, numbers.Real):
        raise TypeError(
            f"{caller}: {name}={value!r} is not a number; pass a Python float. It is a constant of "
            "the compiled step, which optax.inject_hyperparams cannot change: inject the optimizer "
            "after sync_gradients instead."
        )
