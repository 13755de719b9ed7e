"""The compared configurations: how ranks' gradients become the mean that the optimizer sees."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import optax

import cgx_jax
from cgx_jax import Adaptive, Quantize, SecondMoment
from cgx_jax.compressors import Compressor
from cgx_jax.policies import LeastBytes, LeastError, Uniform
from cgx_jax.transforms import Memory, MomentumCorrection


@dataclass(frozen=True)
class Configuration:
    """One way to reduce gradients, which is exact without `policy`.

    `policy` makes a run's policy from its number of steps. `takes_momentum` says that `memory`
    holds the optimizer's momentum. `rate` multiplies the learning rate. With `every`, ranks train
    alone for so many steps, and movements are reduced instead: DiLoCo with the `outer` optimizer.
    `optimizer`, if given, makes the one that takes the place of the task's.
    """

    policy: Callable[[int], Compressor | Adaptive] | None = None
    memory: Memory | None = None
    precondition: SecondMoment | None = None
    takes_momentum: bool = False
    rate: float = 1.0
    every: int | None = None
    outer: optax.GradientTransformation | None = None
    optimizer: Callable[[int], optax.GradientTransformation] | None = None


def uniform(
    bits: int,
    memory: Memory | None = None,
    bucket_size: int = 512,
    rounding: str = "nearest",
    rotation: bool = False,
    **options: Any,
) -> Configuration:
    compressor = Quantize(bits, bucket_size, rounding, rotation)
    return Configuration(lambda _: compressor, memory, **options)


def adaptive(
    solver: cgx_jax.policies.solvers.Solver,
    start_bits: int,
    memory: Memory | None = None,
    rotation: bool = False,
    precondition: SecondMoment | None = None,
    start_rotated: bool = True,
) -> Configuration:
    """Adaptive with its defaults, except that its times are proportional to the run's length.

    Statistics are taken every 5 steps. Widths are chosen after a tenth of the run, and once more
    half a run later. Until the first choice every leaf has `start_bits`. Without `start_rotated`
    this width is not rotated, even if the other widths are.
    """
    start = Quantize(start_bits, rotation=rotation and start_rotated)

    def policy(steps: int) -> Adaptive:
        widths = (Quantize(bits, rotation=rotation) for bits in range(1 + (not rotation), 9))
        return Adaptive(
            solver,
            base=Uniform(start),
            candidates=tuple(start if w.bits == start_bits else w for w in widths),
            warmup=steps // 10,
            every=steps // 2,
            sample_every=5,
        )

    return Configuration(policy, memory, precondition)


FEEDBACK = cgx_jax.ErrorFeedback()
MOMENT = SecondMoment()

CONFIGURATIONS = {
    "exact": Configuration(),
    "exact, learning rate 2 % lower": Configuration(rate=0.98),
    "exact, learning rate 2 % higher": Configuration(rate=1.02),
    "8 bits": uniform(8),
    "6 bits": uniform(6),
    "5 bits": uniform(5),
    "4 bits, buckets of 128": uniform(4, bucket_size=128),
    "4 bits": uniform(4),
    "3 bits": uniform(3),
    "2 bits": uniform(2),
    "4 bits, feedback": uniform(4, FEEDBACK),
    "3 bits, feedback": uniform(3, FEEDBACK),
    "2 bits, feedback": uniform(2, FEEDBACK),
    "4 bits, stochastic": uniform(4, rounding="stochastic"),
    "2 bits, stochastic": uniform(2, rounding="stochastic"),
    "LeastBytes(1)": adaptive(LeastBytes(alpha=1.0), 4),
    "LeastBytes(1), feedback": adaptive(LeastBytes(alpha=1.0), 4, FEEDBACK),
    "LeastError(3.2)": adaptive(LeastError(3.2), 3),
    "LeastError(2.6)": adaptive(LeastError(2.6), 3),
    "4 bits, rotated": uniform(4, rotation=True),
    "3 bits, rotated": uniform(3, rotation=True),
    "2 bits, rotated": uniform(2, rotation=True),
    "2 bits, rotated, feedback": uniform(2, FEEDBACK, rotation=True),
    "LeastBytes(1) of 4 bits by rotated ones": adaptive(
        LeastBytes(alpha=1.0), 4, rotation=True, start_rotated=False
    ),
    "LeastBytes(1) of 3 bits, rotated": adaptive(
        LeastBytes(alpha=1.0, uniform_bits=3), 3, rotation=True
    ),
    "LeastError(3.2), rotated": adaptive(LeastError(3.2), 3, rotation=True),
    "LeastError(2.6), rotated": adaptive(LeastError(2.6), 3, rotation=True),
    "4 bits, preconditioned": uniform(4, precondition=MOMENT),
    "4 bits, rotated, preconditioned": uniform(4, rotation=True, precondition=MOMENT),
    "3 bits, rotated, preconditioned": uniform(3, rotation=True, precondition=MOMENT),
    "2 bits, rotated, preconditioned": uniform(2, rotation=True, precondition=MOMENT),
    "4 bits, rotated, preconditioned, learning rate 2 % higher": uniform(
        4, rotation=True, precondition=MOMENT, rate=1.02
    ),
    "3 bits, rotated, preconditioned, learning rate 5 % higher": uniform(
        3, rotation=True, precondition=MOMENT, rate=1.05
    ),
    "LeastError(3.2), rotated, preconditioned": adaptive(
        LeastError(3.2), 3, rotation=True, precondition=MOMENT
    ),
    "LeastError(2.6), rotated, preconditioned": adaptive(
        LeastError(2.6), 3, rotation=True, precondition=MOMENT
    ),
    "2 bits, momentum correction": uniform(2, MomentumCorrection(0.9), takes_momentum=True),
}
