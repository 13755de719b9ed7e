"""One table of compressors, their dtypes and reductions: every property is tried on all of them.

A new compressor is a row here. Bounds are the compressors' own `error_bound`.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
import pytest

from cgx_jax.compressors import (
    DGC,
    INCEPTIONN,
    QSGD,
    AdaptiveThreshold,
    BlockTopK,
    Cast,
    DynamicTree8,
    Identity,
    Natural,
    NonUniform,
    OneBit,
    PowerSGD,
    QSparse,
    Quantize,
    RandomK,
    ScaledSign,
    SharedTernGrad,
    ShiftedLattice,
    SignSGD,
    Signum,
    SketchML,
    TernGrad,
    ThreeLC,
    Threshold,
    TopK,
)
from toys import Difference, Largest, RankOne, Steps, Vote

FLOATS = ("float32", "bfloat16", "float16")


@dataclasses.dataclass(frozen=True)
class Case:
    """A compressor, the dtypes it takes, and the reductions that it allows."""

    compressor: Any
    reductions: tuple[str, ...] = ("scatter_gather", "gather_sum", "ring", "tree")
    dtypes: tuple[str, ...] = FLOATS
    zeros: str = "stay"  # exactly; "rows": rows of zeros do; "move": none do

    @property
    def stateful(self):
        return self.compressor.has_state((8, 8), jnp.float32)


CASES = {
    "quantize 1": Case(Quantize(1, 64), zeros="rows"),
    "quantize 3": Case(Quantize(3, 96), zeros="rows"),
    "quantize 4": Case(Quantize(4), zeros="rows"),
    "quantize 8": Case(Quantize(8, 32), zeros="rows"),
    "stochastic": Case(Quantize(2, 128, "stochastic"), zeros="rows"),
    "correlated": Case(Quantize(4, 128, "correlated"), zeros="rows"),
    "rotated, correlated": Case(Quantize(4, 96, "correlated", rotation=True), zeros="rows"),
    "rotated": Case(Quantize(4, 128, rotation=True), zeros="rows"),
    "rotated, stochastic": Case(Quantize(3, 96, "stochastic", rotation=True), zeros="rows"),
    "bfloat16": Case(Cast(jnp.bfloat16)),
    "bfloat16, stochastic": Case(Cast(jnp.bfloat16, rounding="stochastic")),
    "float16": Case(Cast(jnp.float16)),
    "float8": Case(Cast(jnp.float8_e5m2)),
    "float8 without infinity": Case(Cast(jnp.float8_e4m3fn)),
    "identity": Case(Identity(), reductions=()),
    "sign": Case(SignSGD(), reductions=("scatter_gather",), zeros="move"),
    "sign of momentum": Case(Signum(0.5), reductions=("scatter_gather",), zeros="move"),
    "scaled sign": Case(ScaledSign(96), zeros="move"),
    "one bit": Case(OneBit(100), zeros="move"),
    "qsgd": Case(QSGD(7, 128)),
    "qsgd of the largest": Case(QSGD(3, 50, norm="max")),
    "qsgd in 8 bits": Case(QSGD(127)),
    "ternary": Case(TernGrad(64)),
    "ternary, not clipped": Case(TernGrad(100, clip=None)),
    "ternary, shared scale": Case(SharedTernGrad(64), reductions=("sum_rounds",)),
    "shifted lattice": Case(ShiftedLattice(4, 64), zeros="move"),
    "three values": Case(ThreeLC(100, sparsity=1.5)),
    "natural": Case(Natural()),
    "dynamic tree": Case(DynamicTree8(100)),
    "exponential levels": Case(NonUniform(4, "exponential", 100)),
    "exponential levels in 2 bits": Case(NonUniform(2, "exponential", 96)),
    "fitted levels": Case(NonUniform(3, "fitted", 96)),
    "top k": Case(TopK(0.1), reductions=("gather_sum",)),
    "top 5": Case(TopK(5), reductions=("gather_sum",)),
    "top k of quantized": Case(
        TopK(0.2, values=Quantize(8, 32)), reductions=("gather_sum",), zeros="move"
    ),
    "quantized at random": Case(QSparse(0.3, values=QSGD(7, 32)), reductions=("gather_sum",)),
    "top k of every bucket": Case(BlockTopK(3, 64)),
    "top k of every bucket, bfloat16": Case(BlockTopK(9, 100, values=Cast(jnp.bfloat16))),
    "threshold": Case(Threshold(1.0, 0.2), reductions=("gather_sum",)),
    "sampled threshold": Case(DGC(0.1), reductions=("gather_sum",)),
    "random k": Case(RandomK(0.1), reductions=("sum_rounds",)),
    "random k, unbiased": Case(RandomK(0.3, scaled=True), reductions=("sum_rounds",)),
    "adaptive threshold": Case(AdaptiveThreshold(0.1), reductions=("gather_sum",)),
    "quantile bins": Case(SketchML(16)),  # if so many are zeros
    "classes of exponents": Case(INCEPTIONN((0.1, 0.3, 0.5))),
    "low rank": Case(PowerSGD(2), reductions=("sum_rounds",), zeros="rows"),
    "chunked toy": Case(Steps()),
    "voting toy": Case(Vote(), reductions=("scatter_gather",)),
    "sparse toy": Case(Largest(), reductions=("gather_sum",)),
    "toy with state": Case(Difference(), reductions=("gather_sum",)),
    "summed toy": Case(RankOne(), reductions=("sum_rounds",), zeros="rows"),
}
LOSSY = {name: case for name, case in CASES.items() if case.reductions}
CHUNKED = {
    name: case.compressor
    for name, case in LOSSY.items()
    if "scatter_gather" in case.reductions and not case.stateful
}
# One of every kind; the slow tests try the others.
_QUICK = (
    *("quantize 3", "quantize 4", "stochastic", "rotated", "bfloat16", "identity"),
    *("sign", "sign of momentum", "qsgd", "ternary", "ternary, shared scale"),
    *("top k", "top k of every bucket", "sampled threshold", "random k"),
    *("chunked toy", "voting toy", "sparse toy", "toy with state", "summed toy"),
)
# Sums that grow from rank to rank are slow to compile, and depend only on the kind of a code.
_PARTIAL_SUMS = ("ring", "tree")
_ADDED_UP = {*_QUICK, "scaled sign", "natural", "fitted levels", "ternary, not clipped"}
PAIRS = {
    f"{n}, {r}": (case.compressor, r)
    for n, case in LOSSY.items()
    for r in case.reductions
    if r not in _PARTIAL_SUMS or n in _ADDED_UP
}
_QUICK_PAIRS = {
    *("quantize 4, tree", "stochastic, tree", "ternary, not clipped, tree"),
    *("natural, ring", "chunked toy, ring"),
}
# One for each way in which codes are made and reduced.
FEW = {
    *("quantize 4", "sign of momentum", "top k", "random k"),
    *(
        "quantize 4, scatter_gather",
        "quantize 4, ring",
        "top k, gather_sum",
        "random k, sum_rounds",
    ),
    *("natural, ring", "stochastic, tree", "voting toy, scatter_gather"),
}


def every(table, *, first_reduction=False, quick=None):
    """Returns a table's names as parameters, slow ones marked.

    With `first_reduction`, only the first reduction of a case counts as quick.
    """
    if quick is None:
        count = 1 if first_reduction else None
        pairs = [(n, r) for n in _QUICK for r in CASES[n].reductions[:count]]
        quick = {f"{n}, {r}" for n, r in pairs if r not in _PARTIAL_SUMS} | _QUICK_PAIRS | {*_QUICK}
    return [pytest.param(n, marks=() if n in quick else pytest.mark.slow) for n in table]
