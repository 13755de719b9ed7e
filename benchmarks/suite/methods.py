"""The methods that the suite compares, as configurations of benchmarks/accuracy/run.py."""

import dataclasses
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax

sys.path.append(str(Path(__file__).resolve().parents[1] / "accuracy"))

import tasks
from configurations import FEEDBACK, MOMENT, Configuration

from cgx_jax import Cast, Quantize
from cgx_jax.compressors import (
    DGC,
    QSGD,
    BlockTopK,
    Compressor,
    Natural,
    OneBit,
    PowerSGD,
    RandomK,
    ScaledSign,
    TernGrad,
    TopK,
)
from cgx_jax.transforms import MomentumCorrection


@dataclasses.dataclass(frozen=True)
class UnscaledQSGD(QSGD):
    """QSGD as it is often used with feedback: without the factor that keeps feedback bounded."""

    feedback_scale = 1.0


def method(compressor: Compressor, memory: Any = None, **options: Any) -> Configuration:
    return Configuration(lambda _: compressor, memory, **options)


METHODS = {
    "exact": Configuration(),
    "bf16": method(Cast(jnp.bfloat16)),
    "4 bits, rotated, SecondMoment": method(Quantize(4, rotation=True), precondition=MOMENT),
    "3 bits, rotated, SecondMoment": method(Quantize(3, rotation=True), precondition=MOMENT),
    "TopK 1 %": method(TopK(0.01)),
    "TopK 1 %, feedback": method(TopK(0.01), FEEDBACK),
    "DGC 1 %, momentum correction": method(DGC(0.01), MomentumCorrection(0.9), takes_momentum=True),
    "PowerSGD 4, feedback": method(PowerSGD(4), FEEDBACK),
    "ScaledSign, feedback": method(ScaledSign(), FEEDBACK),
    "QSGD, feedback without factor": method(UnscaledQSGD(), FEEDBACK),
    "QSGD, feedback": method(QSGD(), FEEDBACK),
    "BlockTopK 5 of 512, feedback": method(BlockTopK(5), FEEDBACK),
    "4 bits, rotated": method(Quantize(4, rotation=True)),
    "8 bits": method(Quantize(8)),
    "DGC 1 %, feedback": method(DGC(0.01), FEEDBACK),
    "4 bits": method(Quantize(4)),
    "QSGD": method(QSGD()),
    "TernGrad": method(TernGrad()),
    "Natural": method(Natural()),
    "OneBit, feedback": method(OneBit(), FEEDBACK),
    "RandomK 1 %, feedback": method(RandomK(0.01), FEEDBACK),
}


def diloco(
    every: int,
    compressor: Compressor | None = None,
    memory: Any = None,
    outer: Any = None,
    rate: float = 2.0,
    inner: Any = None,
) -> Configuration:
    """DiLoCo, which is exact without a compressor; `rate` multiplies the inner learning rate.

    `inner` makes the inner optimizer, by default the task's.
    """
    policy = None if compressor is None else lambda _: compressor
    return Configuration(policy, memory, rate=rate, every=every, outer=outer, optimizer=inner)


def muon(steps: int) -> optax.GradientTransformation:
    """Muon for matrices; Adam for other leaves, embeddings and the output layer, as is usual."""

    def matrices(params: Any) -> Any:
        def kind(path: Any, x: Any) -> Any:
            ends = "embedding", "logits"
            inside = x.ndim == 2 and not any(end in jax.tree_util.keystr(path) for end in ends)
            return optax.contrib.MuonDimensionNumbers(0, 1) if inside else None

        return jax.tree_util.tree_map_with_path(kind, params)

    return optax.contrib.muon(
        tasks.schedule(0.02, steps),
        adam_learning_rate=tasks.schedule(3e-3, steps),
        muon_weight_dimension_numbers=matrices,
    )


DILOCO = {"exact": Configuration()}
for every in (8, 32, 100):
    DILOCO |= {
        f"DiLoCo, every {every}": diloco(every),
        f"DiLoCo, every {every}, 4 bits": diloco(every, Quantize(4, rotation=True)),
        f"DiLoCo, every {every}, 2 bits, feedback": diloco(every, Quantize(2), FEEDBACK),
        # Feedback takes the place of the outer momentum.
        f"SparseLoCo, every {every}": diloco(every, TopK(0.02), FEEDBACK, optax.sgd(1.0)),
    }
DILOCO |= {
    "Muon, every 32": diloco(32, inner=muon),
    "Muon, every 32, 4 bits": diloco(32, Quantize(4, rotation=True), inner=muon),
    "Muon, every 32, 2 bits, feedback": diloco(32, Quantize(2), FEEDBACK, inner=muon),
}
MULTIPLES = 0.5, 1, 2, 4
RATES = {f"rate × {rate:g}": diloco(32, rate=rate) for rate in MULTIPLES}
MORE = *MULTIPLES, 8, 16, 32, 64
RATES |= {f"exact, rate × {rate:g}": Configuration(rate=rate) for rate in MORE}
RATES |= {f"Muon, rate × {rate:g}": diloco(32, rate=rate, inner=muon) for rate in MULTIPLES}
