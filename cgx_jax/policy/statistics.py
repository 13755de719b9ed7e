"""What the policy knows of the gradients: errors, norms and ranges, measured inside the step."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from cgx_jax.axes import Axes
from cgx_jax.compressors import Quantize


class Statistics(NamedTuple):
    """Decayed sums over the observed steps, fp32; divide by `weight`, as `mean` does.

    `weight` [leaves] counts steps in which the leaf was finite on every rank; `error`
    [leaves, candidates] is the squared L2 error that a rank's encoding of the whole leaf has,
    `square` [leaves] the squared L2 norm, `spread` [leaves] the range of values, all means over
    the ranks. `seen` [] counts steps, `nonfinite` [leaves] the share of values that were not
    finite. They hold the same on every rank, and their shapes depend on no plan.
    """

    weight: jax.Array
    error: jax.Array
    square: jax.Array
    spread: jax.Array
    seen: jax.Array
    nonfinite: jax.Array

    @classmethod
    def zeros(cls, leaves: int, candidates: int) -> Statistics:
        """Before the first observation."""
        one = jnp.zeros((leaves,), jnp.float32)
        error = jnp.zeros((leaves, candidates), jnp.float32)
        return cls(one, error, one, one, jnp.zeros((), jnp.float32), one)


@dataclasses.dataclass(frozen=True)
class Sampler:
    """Measures leaves under `candidates`, on `runs` runs of whole buckets of each.

    The runs are the same in every step: evenly spaced from the leaf's start, each as long as the
    candidates' buckets need to fit in whole. Static and hashable.
    """

    candidates: tuple[Quantize, ...]
    runs: int

    def observe(
        self, old: Statistics, leaves: Sequence[jax.Array], axes: Axes, decay: float
    ) -> Statistics:
        """`old` times `decay`, plus this step's; sums over the ranks of `axes`, a small psum."""
        rows = [self._leaf(x) for x in leaves]
        own = jnp.stack(rows) if rows else jnp.zeros((0, len(self.candidates) + 3))
        # The norm may overflow where no value does.
        finite = (jnp.isfinite(own).all(axis=1) & (own[:, -1] == 0)).astype(jnp.float32)
        measured = jnp.where(finite[:, None] > 0, own[:, :-1], 0)
        local = jnp.concatenate([measured, own[:, -1:], finite[:, None]], axis=1)
        (mean,) = axes.mean([local])
        # A leaf that some rank cannot measure says nothing in this step but that.
        ok = (mean[:, -1] == 1).astype(jnp.float32)
        now = jnp.where(ok[:, None] > 0, mean[:, :-2], 0)
        count = len(self.candidates)
        # What is not measured in this step keeps its weight: averages stay those of good steps.
        fade = jnp.where(ok > 0, jnp.float32(decay), 1)
        return Statistics(
            fade * old.weight + ok,
            fade[:, None] * old.error + now[:, :count],
            fade * old.square + now[:, count],
            fade * old.spread + now[:, count + 1],
            jnp.float32(decay) * old.seen + 1,
            jnp.float32(decay) * old.nonfinite + mean[:, -2],
        )

    def _leaf(self, x: jax.Array) -> jax.Array:
        """[candidates + 3]: squared errors, squared norm, spread, share of non-finite values."""
        rows = self._sample(x)
        # Of all values, since one that is not finite is worth a pass to find.
        share = (~jnp.isfinite(x)).mean(dtype=jnp.float32) if x.size else jnp.float32(0)
        scale = jnp.float32(x.size / max(1, rows.size))
        errors = [scale * squared_error(rows, c) for c in self.candidates]
        square = scale * jnp.square(rows).sum()
        spread = rows.max() - rows.min() if rows.size else jnp.float32(0)
        return jnp.stack([*errors, square, spread, share])

    def _sample(self, x: jax.Array) -> jax.Array:
        """fp32[runs, length] of the leaf's values; all of them where the leaf is that small."""
        length = math.lcm(*(c.bucket_size for c in self.candidates))
        flat = jnp.ravel(x)
        if flat.size < length:
            return flat[None].astype(jnp.float32)
        whole = flat.size // length
        step = max(1, whole // self.runs)
        rows = flat[: whole * length].reshape(whole, length)
        count = min(self.runs, whole)
        return lax.slice(rows, (0, 0), (step * (count - 1) + 1, length), (step, 1)).astype(
            jnp.float32
        )


def squared_error(rows: jax.Array, compressor: Quantize) -> jax.Array:
    """Sum of squared errors of fp32[runs, length] under `compressor`, fp32[].

    Stochastic rounding gives the expectation. A run shorter than a bucket is a bucket by itself.
    """
    length = rows.shape[1]
    bucket = min(compressor.bucket_size, length)
    if not bucket:
        return jnp.float32(0)
    # Only a run that is one short leaf has an end that fills no bucket.
    rows = jnp.pad(rows, ((0, 0), (0, -length % bucket)), mode="edge")
    buckets = rows.reshape(-1, bucket)
    low = buckets.min(axis=1, keepdims=True)
    unit = (buckets.max(axis=1, keepdims=True) - low) / jnp.float32(2**compressor.bits - 1)
    level = (buckets - low) / jnp.where(unit > 0, unit, 1)
    below = level - jnp.floor(level)
    above = 1 - below
    moved = below * above if compressor.unbiased else jnp.square(jnp.minimum(below, above))
    return (moved * jnp.square(unit)).sum()


def mean(statistics: Statistics) -> dict[str, Any]:
    """Averages over the observed steps as numpy float64: weight, error, square, spread, nonfinite.

    A leaf that was never measured has weight 0 and NaN.
    """
    host = {k: np.asarray(v, np.float64) for k, v in statistics._asdict().items()}
    with np.errstate(all="ignore"):
        weight = host["weight"]
        return {
            "weight": weight,
            "error": host["error"] / weight[:, None],
            "square": host["square"] / weight,
            "spread": host["spread"] / weight,
            "nonfinite": host["nonfinite"] / host["seen"],
        }
