"""Compression in an optimizer's own units: what small values lose counts as what large ones do."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


@dataclasses.dataclass(frozen=True)
class SecondMoment:
    """Compresses each value of a gradient in units of its own root mean square.

    A quantizer errs by as much on the small values of a bucket as on the large ones; Adam and its
    kin divide by the root of the second moment, so there the small ones' errors come out as
    large. In these units all are alike: Adam's step has the least error, and so has its second
    moment. The units come from the reduced gradients of earlier steps, which every rank knows, so
    that nothing more is sent. `decay` in [0, 1) is that of the mean of squares; `floor` > 0 is what
    is added to each root, as a share of the leaf's own root mean square. A leaf costs as much
    memory as itself in fp32; `factored` keeps the sums of rows and of columns alone, for a
    leaf [..., n] of as many as it has rows and n columns, and errs a little more.

    Raises ValueError for a decay or floor outside their ranges. Source: ours; the moments are
    Adam's (Kingma and Ba, ICLR 2015), factored as in Adafactor (Shazeer and Stern, ICML 2018).
    """

    decay: float = 0.999
    floor: float = 0.03
    factored: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.decay < 1:
            raise ValueError(
                f"SecondMoment: decay={self.decay} is outside [0, 1); use the optimizer's own, "
                "0.999 for Adam's default b2."
            )
        if not 0 < self.floor < float("inf"):
            raise ValueError(
                f"SecondMoment: floor={self.floor} must be a positive number; 0.03 is the default, "
                "larger ones come nearer to compressing gradients as they are."
            )

    def init(self, x: Any) -> tuple[jax.Array, ...]:
        """The state before the first step of a leaf like `x`: zeros, fp32."""
        if not self.factored:
            return (lax.full_like(x, 0, jnp.float32),)
        rows, columns = _matrix(x.shape)
        return jnp.zeros((rows,), jnp.float32), jnp.zeros((columns,), jnp.float32)

    def scale(
        self, state: tuple[jax.Array, ...], shape: tuple[int, ...]
    ) -> tuple[jax.Array, jax.Array]:
        """(divisors fp32[*shape], each at least 1, and the fp32[] unit that they are relative to).

        A value over divisor and unit is in units of its own root mean square plus the floor.
        Divisors are taken relative to the floor so that no dtype overflows; and so the bias that
        the moment has in the first steps cancels.
        """
        if self.factored:
            rows, columns = state
            mean = rows.mean()
            square = rows[:, None] * (columns / jnp.where(mean > 0, mean, 1))
            square = square.reshape(shape)
        else:
            (square,) = state
            mean = square.mean()
        unit = self.floor * jnp.sqrt(mean)
        unit = jnp.where(unit > 0, unit, 1)
        return 1 + jnp.sqrt(square) / unit, unit

    def update(self, state: tuple[jax.Array, ...], mean: jax.Array) -> tuple[jax.Array, ...]:
        """The state after a step whose reduced gradient is `mean`."""
        square = jnp.square(mean.astype(jnp.float32))
        if self.factored:
            matrix = square.reshape(_matrix(mean.shape))
            new: tuple[jax.Array, ...] = (matrix.mean(axis=1), matrix.mean(axis=0))
        else:
            new = (square,)
        decay = jnp.float32(self.decay)
        moved = [decay * old + (1 - decay) * x for old, x in zip(state, new, strict=True)]
        # A square may overflow where the value did not.
        kept = zip(moved, state, strict=True)
        return tuple(jnp.where(jnp.isfinite(x), x, old) for x, old in kept)


def _matrix(shape: tuple[int, ...]) -> tuple[int, int]:
    """A leaf's rows and columns: its last axis is the columns, vectors are one column."""
    if len(shape) < 2:
        return (shape[0] if shape else 1), 1
    rows = 1
    for n in shape[:-1]:
        rows *= n
    return rows, shape[-1]
