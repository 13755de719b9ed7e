"""The largest error that a compressed sum may have, computed from its inputs."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

FLOAT_STEP = 2.0**-24  # relative error of one fp32 rounding
META_ERROR = 2.0**-20  # rounding in encode and decode, relative to a bucket's largest magnitude
SMALLEST_UNIT = 2.0**-126  # encoding stores a smaller unit as 0


@dataclass(frozen=True)
class Allowed:
    """The exact sum, f64[values], and the errors that fp32 and compression may add per value."""

    total: np.ndarray
    summing: np.ndarray
    compressing: np.ndarray

    def wrong(self, result: np.ndarray, *, exact: bool) -> int:
        """Counts the values of `result` that are farther from the sum than allowed, and NaNs."""
        limit = self.summing if exact else self.summing + self.compressing
        return int(np.count_nonzero(~(np.abs(result - self.total) <= limit)))


def all_reduce(inputs: Iterable[np.ndarray], bits: int, bucket_size: int) -> Allowed:
    """Bounds the error of scatter-reduce-allgather of one f32[values] per rank, nearest rounding.

    Each share is quantized once, except the share of the chunk's owner, and the sum is quantized
    once more. The bound does not depend on which rank owns a chunk: it adds the largest world - 1
    errors.
    """
    inputs = list(inputs)
    levels = 2**bits - 1
    total = np.asarray(np.sum(inputs, axis=0, dtype=np.float64))
    magnitudes = np.asarray(np.sum(np.abs(inputs), axis=0, dtype=np.float64))
    summing = len(inputs) * FLOAT_STEP * magnitudes
    errors = np.sort([_one_pass(x, levels, bucket_size, 0.0) for x in inputs], axis=0)
    first = errors[1:].sum(axis=0)
    second = _one_pass(total, levels, bucket_size, first + _bucket_max(summing, bucket_size))
    compressing = np.repeat(first + second, bucket_size)[: total.size]
    return Allowed(total, summing, compressing)


def all_reduce_cast(inputs: Sequence[np.ndarray], rounding: float) -> Allowed:
    """Bounds the same for values that are rounded to a narrower float with this relative error."""
    total = np.asarray(np.sum(inputs, axis=0, dtype=np.float64))
    magnitudes = np.asarray(np.sum(np.abs(inputs), axis=0, dtype=np.float64))
    summing = len(inputs) * FLOAT_STEP * magnitudes
    first = rounding * magnitudes
    second = rounding * (np.abs(total) + first + summing)
    return Allowed(total, summing, first + second)


def _one_pass(
    x: np.ndarray, levels: int, bucket_size: int, moved: np.ndarray | float
) -> np.ndarray:
    """Returns the largest error in each bucket of x, whose values may be off by `moved` already."""
    high, low = _bucket_max(x, bucket_size), -_bucket_max(-x, bucket_size)
    unit = (high - low + 2 * moved) / levels
    magnitude = np.maximum(np.abs(high), np.abs(low)) + moved
    return unit / 2 + META_ERROR * magnitude + levels * SMALLEST_UNIT


def _bucket_max(x: np.ndarray, bucket_size: int) -> np.ndarray:
    starts = np.arange(0, x.size, bucket_size)
    return np.maximum.reduceat(x, starts).astype(np.float64)
