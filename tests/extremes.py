"""Arrays at the edges of what a gradient may hold, and what rounding adds to a stated bound."""

import ml_dtypes
import numpy as np

TINY = float(np.finfo(np.float32).tiny)


def _signs(rng, n):
    return rng.choice([-1.0, 1.0], n)


def _outlier(rng, n, scale):
    x = rng.standard_normal(n) * scale
    x[rng.integers(n)] *= 1e6
    return x


def _alone(rng, n, scale):
    x = np.zeros(n)
    x[rng.integers(n)] = scale
    return x


# f(rng, n, scale) -> f64[n]; what a dtype cannot hold becomes its largest value.
KINDS = {
    "normal": lambda rng, n, scale: rng.standard_normal(n) * scale,
    "zeros": lambda rng, n, scale: _signs(rng, n) * 0,
    "constant": lambda rng, n, scale: np.full(n, rng.choice([-1, 1]) * scale),
    "two values": lambda rng, n, scale: _signs(rng, n) * scale,
    "one outlier": _outlier,
    "one value": _alone,
    "decades": lambda rng, n, scale: rng.standard_normal(n) * 10.0 ** rng.uniform(-30, 30, n),
    "large mean": lambda rng, n, scale: (1 + 1e-3 * rng.standard_normal(n)) * scale,
    "subnormal": lambda rng, n, scale: rng.integers(-99, 100, n) * 2.0**-149,
    "around the normal numbers": lambda rng, n, scale: rng.uniform(-4, 4, n) * TINY,
    "huge": lambda rng, n, scale: rng.uniform(-4e38, 4e38, n),
    "largest": lambda rng, n, scale: _signs(rng, n) * 4e38,
}


def array(kind, seed, exponent, shape, dtype):
    """Returns an array of a kind; its values are about 10**exponent if the kind sets no size."""
    n, dtype = int(np.prod(shape)), np.dtype(dtype)
    rng = np.random.default_rng(seed)
    if kind == "any bits":  # NaN and infinity among them
        return rng.integers(0, 256, n * dtype.itemsize, np.uint8).view(dtype).reshape(shape)
    most = largest(dtype)
    x = KINDS[kind](rng, n, 10.0**exponent)
    return np.clip(x, -most, most).astype(dtype).reshape(shape)


def largest(dtype):
    return float(ml_dtypes.finfo(dtype).max)


def allowed(x, bound, divisor=1):
    """Returns the largest allowed error of a sum of x[world, ...] with a stated `bound`: f64[...].

    This adds to the bound the rounding of fp32 sums, which may take subnormal numbers for zero, and
    the rounding to the result's dtype. It is infinite where partial sums or the result may leave
    the range.
    """
    info = ml_dtypes.finfo(x.dtype)
    with np.errstate(all="ignore"):
        sizes = np.abs(x.astype(np.float64)).sum(0)
        bound = np.asarray(bound, np.float64)
        total = sizes + bound * divisor
        rounding = len(x) * (total * 2.0**-22 + 2 * TINY) / divisor
        result = np.abs(x.astype(np.float64).sum(0)) / divisor + bound + rounding
        rounding += result * float(info.eps) + float(info.smallest_subnormal)
        fits = (total * (1 + 2.0**-20) < largest(np.float32)) & (result < largest(x.dtype))
        return np.where(fits & np.isfinite(rounding), bound + rounding, np.inf)
