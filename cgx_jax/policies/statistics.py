"""What the policy knows of the gradients: errors and norms, measured inside the step."""

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
from cgx_jax.compressors import Compressor
from cgx_jax.kernels.nonfinite import count_nonfinite

RUN = 512  # values of a run if no candidate codes several together
# The error of a candidate under which finite values overflow, in squared norms of the leaf.
OVERFLOWN = 1e12


class Statistics(NamedTuple):
    """Decayed sums over the observed steps, fp32; divide by `weight`, as `mean` does.

    `weight` [leaves] counts the steps in which the leaf was finite on every rank. `error` [leaves,
    candidates] is the squared L2 error of a rank's encoding of the whole leaf, and `square`
    [leaves] the squared L2 norm. Both are means over the ranks. `nonfinite` [leaves] counts the
    steps in which the leaf was not finite on some rank, and does not decay. All are the same on
    every rank, and their shapes do not depend on the plan.
    """

    weight: jax.Array
    error: jax.Array
    square: jax.Array
    nonfinite: jax.Array

    @classmethod
    def zeros(cls, leaves: int, candidates: int) -> Statistics:
        """Before the first observation."""
        shapes = (leaves,), (leaves, candidates), (leaves,), (leaves,)
        return cls(*(jnp.zeros(shape, jnp.float32) for shape in shapes))  # each can be donated


@dataclasses.dataclass(frozen=True)
class Sampler:
    """Measures leaves under `candidates`, on `runs` runs of whole blocks of each.

    The runs are the same in every step: evenly spaced from the leaf's start, each just long enough
    for whole blocks of every candidate. A candidate without blocks (`block_size` None) is measured
    on the whole leaf, with separate operations for each leaf. Static and hashable.
    """

    candidates: tuple[Compressor, ...]
    runs: int

    def observe(
        self, old: Statistics, leaves: Sequence[jax.Array], axes: Axes, decay: float
    ) -> Statistics:
        """Returns `old` times `decay` plus this step's, after a small psum over `axes`."""
        own = self._measure(leaves)
        finite = (jnp.isfinite(own).all(axis=1) & (own[:, -1] == 0)).astype(jnp.float32)
        measured = jnp.where(finite[:, None] > 0, own[:, :-1], 0)
        local = jnp.concatenate([measured, own[:, -1:], finite[:, None]], axis=1)
        (mean,) = axes.mean([local])
        # A leaf that some rank cannot measure adds nothing in this step but to its count.
        ok = (mean[:, -1] == 1).astype(jnp.float32)
        now = jnp.where(ok[:, None] > 0, mean[:, :-2], 0)
        count = len(self.candidates)
        # What is not measured in this step keeps its weight: averages stay those of good steps.
        fade = jnp.where(ok > 0, jnp.float32(decay), 1)
        return Statistics(
            fade * old.weight + ok,
            fade[:, None] * old.error + now[:, :count],
            fade * old.square + now[:, count],
            old.nonfinite + (mean[:, -2] > 0).astype(jnp.float32),
        )

    def _measure(self, leaves: Sequence[jax.Array]) -> jax.Array:
        """[leaves, candidates + 2]: squared errors, squared norm, non-finite share.

        Samples of all leaves are measured together: one operation per leaf and candidate would take
        longer to compile than the rest of a step.
        """
        if not leaves:
            return jnp.zeros((0, len(self.candidates) + 2), jnp.float32)
        blocks = [c.block_size for c in self.candidates]
        length = math.lcm(*(b for b in blocks if b is not None))
        length = RUN if length == 1 else length
        samples = [self._sample(x, length) for x in leaves]
        counts = [len(rows) for rows in samples]
        # Only a leaf that is shorter than a run leaves part of its run empty.
        filled = np.repeat([min(length, x.size) for x in leaves], counts)
        rows = jnp.concatenate(samples)
        in_runs = [c for c, b in zip(self.candidates, blocks, strict=True) if b is not None]
        errors = squared_errors(rows, filled, in_runs)
        here = np.arange(length) < filled[:, None]
        square = jnp.square(jnp.where(here, rows, 0)).sum(axis=1)
        scale = [
            x.size / max(1, n * min(length, x.size)) for x, n in zip(leaves, counts, strict=True)
        ]
        leaf = np.repeat(np.arange(len(leaves)), counts)
        sums = jax.ops.segment_sum(
            jnp.concatenate([errors, square[:, None]], axis=1), leaf, len(leaves)
        )
        # Counts over all values, since finding a single non-finite value is worth a pass.
        share = count_nonfinite(leaves)[:, :1] / np.maximum([[x.size] for x in leaves], 1)
        scaled = sums * np.array(scale, np.float32)[:, None]
        errors, square = self._with_whole(scaled[:, :-1], leaves), scaled[:, -1:]
        errors = jnp.where(jnp.isfinite(errors), errors, OVERFLOWN * square)
        return jnp.concatenate([errors, square, share.astype(jnp.float32)], axis=1)

    def _with_whole(self, errors: jax.Array, leaves: Sequence[jax.Array]) -> jax.Array:
        """Completes errors measured on runs: returns those of all candidates, in order."""
        is_whole = [c.block_size is None for c in self.candidates]
        if not any(is_whole):
            return errors
        whole = [c for c in self.candidates if c.block_size is None]
        found = [squared_errors(x[None].astype(jnp.float32), [x.size], whole) for x in leaves]
        place = np.argsort(np.argsort(is_whole, kind="stable"))
        return jnp.concatenate([errors, jnp.concatenate(found)], axis=1)[:, place]

    def _sample(self, x: jax.Array, length: int) -> jax.Array:
        """fp32[runs, length] of the leaf's values; a shorter leaf ends in copies of its last."""
        flat = jnp.ravel(x)
        if flat.size < length:
            mode = "edge" if flat.size else "constant"
            return jnp.pad(flat, (0, length - flat.size), mode=mode)[None].astype(jnp.float32)
        whole = flat.size // length
        step, count = max(1, whole // self.runs), min(self.runs, whole)
        rows = flat[: whole * length].reshape(whole, length)
        sample = lax.slice(rows, (0, 0), (step * (count - 1) + 1, length), (step, 1))
        return sample.astype(jnp.float32)


def squared_errors(rows: jax.Array, filled: Any, candidates: Sequence[Compressor]) -> jax.Array:
    """Sums of squared errors of the first `filled` values of each row, fp32[rows, candidates].

    Like `Compressor.squared_errors`, but for candidates of any classes.
    """
    columns: list[Any] = [None] * len(candidates)
    for family in dict.fromkeys(type(c) for c in candidates):
        own = [i for i, c in enumerate(candidates) if type(c) is family]
        errors = family.squared_errors([candidates[i] for i in own], rows, filled)
        if len(own) == len(candidates):
            return errors
        for i, column in zip(own, errors.T, strict=True):
            columns[i] = column
    return jnp.stack(columns, axis=1) if columns else jnp.zeros((len(rows), 0), jnp.float32)


def own(x: Any) -> np.ndarray:
    """Returns this process's copy of an array that all devices hold, or of one that was saved."""
    return np.asarray(x.addressable_data(0) if isinstance(x, jax.Array) else x)


def mean(statistics: Statistics) -> dict[str, np.ndarray]:
    """Averages over the observed steps as numpy float64: error and square.

    A leaf that was never measured has NaN.
    """
    weight, error, square, _ = (np.asarray(x, np.float64) for x in statistics)
    with np.errstate(all="ignore"):
        return {"error": error / weight[:, None], "square": square / weight}
