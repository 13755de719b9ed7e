"""The alpha-beta model of the reductions: a rank sends its messages one after the other.

A message takes alpha seconds plus beta seconds per byte. The model leaves out what ranks compute.
"""

from collections.abc import Sequence

import numpy as np

from cgx_jax import Quantize
from cgx_jax.compressors.base import CodedLeaf
from cgx_jax.reductions import GatherSum, Reduction, Ring, ScatterGather, Tree

REDUCTIONS: dict[str, Reduction] = {
    r.shorthand: r for r in (ScatterGather(), GatherSum(), Ring(), Tree())
}


def messages(reduction: str, world: int) -> int:
    """Messages that a rank sends; raises ValueError for a world that is no power of two."""
    if world & (world - 1):
        raise ValueError(f"messages: world={world} is not a power of two.")
    counts = {
        "scatter_gather": 2 * (world - 1),
        "gather_sum": world - 1,
        "ring": 2 * (world - 1),
        "tree": world.bit_length() - 1,
    }
    return counts[reduction]


def sent(reduction: str, values: int, world: int, bits: int = 4) -> int:
    """Bytes that a rank sends to reduce one leaf of `values`."""
    leaf = CodedLeaf(Quantize(bits), (values,), np.dtype(np.float32), 0)
    return REDUCTIONS[reduction].bytes_sent((leaf,), world)


def seconds(reduction: str, values: int, world: int, alpha: float, beta: float) -> float:
    """Predicted seconds of reducing one leaf of `values` at 4 bits."""
    return messages(reduction, world) * alpha + sent(reduction, values, world) * beta


def fitted(cells: Sequence[tuple[str, int, int, float]]) -> tuple[float, float]:
    """Fits alpha and beta, both at least 0, to measured (reduction, values, world, seconds).

    Minimizes the squares of relative errors, so that small buffers count as much as large ones.
    """
    terms = np.array([(messages(r, w), sent(r, n, w)) for r, n, w, _ in cells], float)
    terms /= np.array([cell[3] for cell in cells])[:, None]
    both = np.linalg.lstsq(terms, np.ones(len(cells)), rcond=None)[0]
    if (both >= 0).all():
        return float(both[0]), float(both[1])
    # One of the two is 0: keep the one that fits the times better by itself.
    single = terms.sum(axis=0) / np.square(terms).sum(axis=0)
    errors = np.square(terms * single - 1).sum(axis=0)
    return (float(single[0]), 0.0) if errors[0] < errors[1] else (0.0, float(single[1]))
