"""Leaves whose values are not all finite, and what watched reductions must find in them."""

import jax.numpy as jnp
import numpy as np

from cgx_jax import Quantize
from cgx_jax.axes import Axes
from cgx_jax.compressors.codes import CodedLeaf
from cgx_jax.exchanges import Xla
from cgx_jax.reductions import GatherSum, Job, ScatterGather

REDUCTIONS = {r.shorthand: r for r in (ScatterGather(), GatherSum())}
CODES = {
    "4 bits": Quantize(4),
    "8 bits": Quantize(8, 32),
    "stochastic": Quantize(2, 96, "stochastic"),
    "rotated": Quantize(4, 128, rotation=True),
    "rotated, correlated": Quantize(3, 96, "correlated", rotation=True),
}
SIZES = (1, 33, 640, 5000)
SPOILT = ("nothing", "one NaN", "infinities", "sums that overflow", "many", "large but finite")


def leaves(kind, world, dtype):
    """[world, size] for each of SIZES; `kind` is one of SPOILT."""
    rng = np.random.default_rng(SPOILT.index(kind))
    dtype = jnp.dtype(dtype)
    largest = float(jnp.finfo(dtype).max)
    made = []
    for n in SIZES:
        x = rng.standard_normal((world, n)).astype(np.float32)
        if kind == "one NaN" and n == SIZES[-1]:
            x[world - 1, rng.integers(n)] = np.nan
        if kind == "infinities":
            x[rng.integers(world), rng.integers(n)] = np.inf
            x[0, rng.integers(n)] = -np.inf
        if kind == "many":
            x[rng.random(x.shape) < 0.01] = np.nan
        x = x.astype(dtype)
        if kind == "sums that overflow":
            x[:, n // 2] = 0.9 * largest
        if kind == "large but finite":
            x[:, n // 3] = 0.3 * largest / world
        made.append(x)
    return made


def watched(code, reduction, exchange, *, in_units=False):
    """Returns a function of a rank's own leaves: (what is found i32[leaves, 2, 2], the sums)."""

    def f(*own):
        axes = Axes.resolve("watched", "data", None)
        coded = tuple(CodedLeaf(code, x.shape, x.dtype, i) for i, x in enumerate(own))
        seeds = (jnp.arange(2, dtype=jnp.uint32),) * reduction.seed_count
        units = ()
        if in_units:  # the last leaf's units make NaNs on the way out
            units = [None] * (len(own) - 1)
            units.append((jnp.ones((2, own[-1].size)), jnp.array([[1.0], [jnp.nan]])))
        # In place, a value must be found before its sum is written over it.
        in_place = exchange != Xla()
        job = Job(
            "watched", coded, axes, exchange, 1, residual=False, in_place=in_place, watched=True
        )
        made = reduction.run(job, seeds, list(own), units, [()] * len(own))
        return made.found, made.sums

    return f


def counted(x):
    """(how many values are not finite, the place of the first)."""
    wrong = ~np.isfinite(np.asarray(x, np.float32)).ravel()
    return [int(wrong.sum()), int(wrong.argmax())]


def expected(own, sums):
    """Returns what `watched` must find in a rank's leaves and in the sums."""
    return [[counted(x), counted(y)] for x, y in zip(own, sums, strict=True)]
