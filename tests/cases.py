"""One table of compressors, their dtypes and reductions: every property is tried on all of them.

A new compressor is a row here. Bounds are the compressors' own `error_bound`.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
import pytest

from cgx_jax import Cast, Identity, Quantize
from cgx_jax import compressors as codes
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


_WHOLE = ("gather_sum",)
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
    "sign": Case(codes.SignSGD(), reductions=("scatter_gather",), zeros="move"),
    "sign of momentum": Case(codes.Signum(0.5), reductions=("scatter_gather",), zeros="move"),
    "scaled sign": Case(codes.ScaledSign(96), zeros="move"),
    "one bit": Case(codes.OneBit(100), zeros="move"),
    "qsgd": Case(codes.QSGD(7, 128)),
    "qsgd of the largest": Case(codes.QSGD(3, 50, norm="max")),
    "qsgd in 8 bits": Case(codes.QSGD(127)),
    "ternary": Case(codes.TernGrad(64)),
    "ternary, not clipped": Case(codes.TernGrad(100, clip=None)),
    "ternary, shared scale": Case(codes.SharedTernGrad(64), reductions=("sum_rounds",)),
    "shifted lattice": Case(codes.ShiftedLattice(4, 64), zeros="move"),
    "three values": Case(codes.ThreeLC(100, sparsity=1.5)),
    "natural": Case(codes.Natural()),
    "dynamic tree": Case(codes.DynamicTree8(100)),
    "exponential levels": Case(codes.NonUniform(4, "exponential", 100)),
    "exponential levels in 2 bits": Case(codes.NonUniform(2, "exponential", 96)),
    "fitted levels": Case(codes.NonUniform(3, "fitted", 96)),
    "top k": Case(codes.TopK(0.1), _WHOLE),
    "top 5": Case(codes.TopK(5), _WHOLE),
    "top k of quantized": Case(codes.TopK(0.2, values=Quantize(8, 32)), _WHOLE, zeros="move"),
    "quantized at random": Case(codes.QSparse(0.3, values=codes.QSGD(7, 32)), _WHOLE),
    "top k of every bucket": Case(codes.BlockTopK(3, 64)),
    "top k of every bucket, bfloat16": Case(codes.BlockTopK(9, 100, values=Cast(jnp.bfloat16))),
    "threshold": Case(codes.Threshold(1.0, 0.2), _WHOLE),
    "sampled threshold": Case(codes.DGC(0.1), _WHOLE),
    "random k": Case(codes.RandomK(0.1), reductions=("sum_rounds",)),
    "random k, unbiased": Case(codes.RandomK(0.3, scaled=True), reductions=("sum_rounds",)),
    "adaptive threshold": Case(codes.AdaptiveThreshold(0.1), _WHOLE),
    "quantile bins": Case(codes.SketchML(16)),  # if so many are zeros
    "classes of exponents": Case(codes.INCEPTIONN((0.1, 0.3, 0.5))),
    "low rank": Case(codes.PowerSGD(2), reductions=("sum_rounds",), zeros="rows"),
    "chunked toy": Case(Steps()),
    "voting toy": Case(Vote(), reductions=("scatter_gather",)),
    "sparse toy": Case(Largest(), _WHOLE),
    "toy with state": Case(Difference(), _WHOLE),
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
    *("quantize 4", "sign of momentum", "top k", "random k", "quantize 4, scatter_gather"),
    *("quantize 4, ring", "top k, gather_sum", "random k, sum_rounds", "natural, ring"),
    *("stochastic, tree", "voting toy, scatter_gather"),
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
