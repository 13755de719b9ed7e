"""One table of compressors, their dtypes and reductions: every property is tried on all of them.

A new compressor is a row here. Bounds are the compressors' own `error_bound`.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp

from cgx_jax import Cast, Identity, PowerSGD, Quantize
from toys import Difference, Largest, RankOne, Steps, Vote

FLOATS = ("float32", "bfloat16", "float16")


@dataclasses.dataclass(frozen=True)
class Case:
    """A compressor, the dtypes it takes, and the reductions that it allows."""

    compressor: Any
    reductions: tuple[str, ...] = ("scatter_gather", "gather_sum")
    dtypes: tuple[str, ...] = FLOATS

    @property
    def stateful(self):
        return self.compressor.has_state((8, 8), jnp.float32)


CASES = {
    "quantize 1": Case(Quantize(1, 64)),
    "quantize 3": Case(Quantize(3, 96)),
    "quantize 4": Case(Quantize(4)),
    "quantize 8": Case(Quantize(8, 32)),
    "stochastic": Case(Quantize(2, 128, "stochastic")),
    "correlated": Case(Quantize(4, 128, "correlated")),
    "rotated, correlated": Case(Quantize(4, 96, "correlated", rotation=True)),
    "rotated": Case(Quantize(4, 128, rotation=True)),
    "rotated, stochastic": Case(Quantize(3, 96, "stochastic", rotation=True)),
    "bfloat16": Case(Cast(jnp.bfloat16)),
    "float16": Case(Cast(jnp.float16)),
    "float8": Case(Cast(jnp.float8_e5m2)),
    "float8 without infinity": Case(Cast(jnp.float8_e4m3fn)),
    "identity": Case(Identity(), reductions=()),
    "low rank": Case(PowerSGD(2), reductions=("sum_rounds",)),
    "chunked toy": Case(Steps()),
    "voting toy": Case(Vote(), reductions=("scatter_gather",)),
    "sparse toy": Case(Largest(), reductions=("gather_sum",)),
    "toy with state": Case(Difference(), reductions=("gather_sum",)),
    "summed toy": Case(RankOne(), reductions=("sum_rounds",)),
}
LOSSY = {name: case for name, case in CASES.items() if case.reductions}
CHUNKED = {n: c.compressor for n, c in LOSSY.items() if "scatter_gather" in c.reductions}
PAIRS = {f"{n}, {r}": (case.compressor, r) for n, case in LOSSY.items() for r in case.reductions}
