"""Compression in the optimizer's units: a small value's error counts as much as a large one's."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from cgx_jax._types import Shaped

# Units are updated in each of the first WARMUP steps, and in every PERIOD-th step after that. An
# update reads every leaf, and after the warm-up it changes little.
WARMUP, PERIOD = 32, 16


class Units(NamedTuple):
    """What a leaf's values are multiplied by before they are encoded and after they are decoded.

    `rows` is f32[2, R] and `columns` f32[2, C] for a leaf of R * C values, row by row. Value (r, c)
    is encoded as x * (rows[0, r] * columns[0, c]). The decoded value is multiplied by rows[1, r] *
    columns[1, c]. The first product is at most 1, so that no finite value overflows.
    """

    rows: jax.Array
    columns: jax.Array

    def divide(self, x: jax.Array) -> jax.Array:
        """Returns `x` in these units, fp32."""
        return self._multiply(x, 0)

    def multiply(self, x: jax.Array) -> jax.Array:
        """Returns `x`, which is in these units, as plain values, fp32."""
        return self._multiply(x, 1)

    def _multiply(self, x: jax.Array, way: int) -> jax.Array:
        matrix = x.astype(jnp.float32).reshape(self.rows.shape[1], self.columns.shape[1])
        return (matrix * (self.rows[way][:, None] * self.columns[way][None])).reshape(x.shape)


class Moments(NamedTuple):
    """What `SecondMoment` knows of one leaf, fp32.

    A step's *shares* are its squared values over their mean. Four fields are weighted sums over the
    steps. `values` (a scalar where factored) sums the shares, `rows` f32[R] and `columns` f32[C]
    sum their means over rows and columns, and `spreads` f32[3] sums the mean squares of single
    steps' rows, columns and values. A step counts as it does in Adam's second moment: by its mean
    square, and decayed. `weights` f32[3] holds the sum of the decayed weights of time, the sum of
    the steps' weights, and the inverse of how many steps of equal weight could replace these.
    `row_units` and `column_units` are the `Units` that follow from rows and columns.
    """

    weights: jax.Array
    spreads: jax.Array
    rows: jax.Array
    columns: jax.Array
    values: jax.Array
    row_units: jax.Array
    column_units: jax.Array

    @property
    def units(self) -> Units:
        """The units of rows and columns."""
        return Units(self.row_units, self.column_units)


@dataclasses.dataclass(frozen=True)
class SecondMoment:
    """Compresses each value of a gradient in units of its usual size; for Adam and its kin.

    A quantizer's error is as large on the small values of a bucket as on the large ones. Adam
    divides each value by the root of its second moment, which makes the errors of small values
    large. In these units all values have about the same scale. The units come from the reduced
    gradients of earlier steps, which every rank holds, so nothing more is sent.

    A value's unit is the product of its row's unit and its column's unit (columns lie along the
    last axis). Each is the root of a mean square in fp32. With `factored=False`, each value also
    has a factor of its own. That costs as much memory as the leaf in fp32, and a pass over it in
    every step. Units of rows, columns and values differ only as far as the differences exceed
    chance. After the first step no difference counts yet; later steps that repeat a difference
    confirm it. `decay` in (0, 1) is the decay of the averages. `floor` in (0, 1] is the least
    factor, as a share of the usual one.

    Raises ValueError for a decay or floor outside their ranges. Source: ours. The moments are
    Adam's (Kingma and Ba, ICLR 2015), factored as in Adafactor (Shazeer and Stern, ICML 2018) and
    shrunk towards their mean as by James and Stein (1961).
    """

    decay: float = 0.999
    floor: float = 0.1
    factored: bool = True

    def __post_init__(self) -> None:
        if not 0 < self.decay < 1:
            raise ValueError(
                f"SecondMoment: decay={self.decay} is outside (0, 1); use the optimizer's own, "
                "0.999 for Adam's default b2."
            )
        if not 0 < self.floor <= 1:
            raise ValueError(
                f"SecondMoment: floor={self.floor} is outside (0, 1]; 0.1 is the default, and "
                "1 leaves gradients almost unchanged before they are compressed."
            )

    def init(self, x: Shaped) -> Moments:
        """The state before the first step of a leaf like `x`."""
        rows, columns = matrix_of(x.shape)
        values = jnp.zeros((), jnp.float32)
        return Moments(
            weights=jnp.zeros(3, jnp.float32),
            spreads=jnp.zeros(3, jnp.float32),
            rows=jnp.zeros(rows, jnp.float32),
            columns=jnp.zeros(columns, jnp.float32),
            values=values if self.factored else lax.full_like(x, 0, jnp.float32),
            row_units=jnp.ones((2, rows), jnp.float32),
            column_units=jnp.ones((2, columns), jnp.float32),
        )

    def units(self, state: Moments) -> tuple[Units, jax.Array]:
        """Returns the next step's units, and the usual size, f32[], of values whose unit is 1.

        A value in these units, divided by that size, is a multiple of its own usual size.
        """
        units = state.units
        if not self.factored:
            expected = jnp.square(units.multiply(jnp.ones(state.values.shape, jnp.float32)))
            expected = (expected / expected.mean()).reshape(-1)
            single = _shrunk(state.values.reshape(-1), state.spreads[2], state.weights, expected)
            columns = _ways(jnp.sqrt(single + self.floor**2 * expected))
            units = Units(jnp.ones((2, 1), jnp.float32), columns)
        mean_square = jnp.square(units.rows[1]).mean() * jnp.square(units.columns[1]).mean()
        square = state.weights[1] / jnp.maximum(state.weights[0], _TINY) / mean_square
        return units, jnp.sqrt(jnp.where(square > 0, square, 1))

    def due(self, step: jax.Array) -> jax.Array:
        """Whether the step after `step` others updates the units, bool[]."""
        return (step < WARMUP) | (step % PERIOD == 0)

    def since(self, step: jax.Array) -> jax.Array:
        """Returns the decay over all steps that the one after `step` others stands for, if due."""
        return jnp.where(step < WARMUP, self.decay, self.decay**PERIOD).astype(jnp.float32)

    def update(self, state: Moments, mean: jax.Array, step: jax.Array) -> Moments:
        """Returns the state after a step that is due, whose reduced gradient is `mean`.

        The `weights` of the new state are not finite if `mean`, or the sum of its squares, is not.
        """
        if not mean.size:
            return state
        x = mean.astype(jnp.float32).reshape(matrix_of(mean.shape))
        row_squares = jnp.square(x).mean(axis=1)
        # The barrier separates the two sums: XLA's CPU fusion of both takes three times as long.
        x, row_squares = lax.optimization_barrier((x, row_squares))
        squares = jnp.square(x)
        values = None if self.factored else squares.reshape(state.values.shape)
        return self.follow(state, step, row_squares, squares.mean(axis=0), values)

    def follow(
        self,
        state: Moments,
        step: jax.Array,
        row_squares: jax.Array,
        column_squares: jax.Array,
        value_squares: jax.Array | None = None,
    ) -> Moments:
        """`update` from the mean squares of a gradient's rows and columns, f32[R] and f32[C].

        `value_squares`, in the leaf's shape, are needed unless factored.
        """
        mean_square = row_squares.mean()
        inverse = 1 / jnp.where(mean_square > 0, mean_square, 1)
        rows, columns = inverse * row_squares, inverse * column_squares
        values = state.values if value_squares is None else inverse * value_squares
        seen = (rows, columns, values)
        spreads = jnp.stack([jnp.square(v).mean() for v in seen])
        decay = self.since(step)
        weight = (1 - decay) * mean_square

        def add(old: jax.Array, now: Any) -> jax.Array:
            out: jax.Array = decay * old + weight * now
            return out

        total = add(state.weights[1], 1)
        parts = jnp.stack([decay * state.weights[1], weight]) / jnp.where(total > 0, total, 1)
        alike = jnp.square(parts[0]) * state.weights[2] + jnp.square(parts[1])
        new = Moments(
            jnp.stack([decay * state.weights[0] + (1 - decay), total, alike]),
            add(state.spreads, spreads),
            add(state.rows, rows),
            add(state.columns, columns),
            add(state.values, values),
            state.row_units,
            state.column_units,
        )
        new = new._replace(
            row_units=self._factors(new.rows, new.spreads[0], new.weights),
            column_units=self._factors(new.columns, new.spreads[1], new.weights),
        )
        # A leaf whose gradient is 0 says nothing about its usual gradients.
        out: Moments = jax.tree.map(lambda a, b: jnp.where(mean_square == 0, b, a), new, state)
        return out

    def _factors(self, sums: jax.Array, spread: jax.Array, weights: jax.Array) -> jax.Array:
        return _ways(jnp.sqrt(_shrunk(sums, spread, weights) + self.floor**2))


_TINY = float(jnp.finfo(jnp.float32).tiny)


def _shrunk(
    sums: jax.Array, spread: jax.Array, weights: jax.Array, expected: Any = 1.0
) -> jax.Array:
    """Averages shares and shrinks them to `expected` as far as chance explains the difference.

    The noise of an average follows from how much single steps differ, as in an analysis of
    variance. Where noise explains all of the difference from `expected`, no difference is left.
    """
    total = jnp.where(weights[1] > 0, weights[1], 1)
    average, steps = sums / total, 1 / jnp.maximum(weights[2], _TINY)
    between = jnp.square(average).mean()
    within = jnp.maximum(spread / total - between, 0)
    few = jnp.maximum(steps - 1, _TINY)
    noise = within / few * (1 + 2 / few)  # few steps make the noise itself uncertain
    difference = jnp.square(average - expected).mean()
    kept = jnp.clip(1 - noise / jnp.maximum(difference, _TINY), 0, 1)
    confirmed = (weights[2] > 0) & (steps > 1.1)
    out: jax.Array = expected + jnp.where(confirmed, kept, 0) * (average - expected)
    return out


def _ways(factors: jax.Array) -> jax.Array:
    """Returns f32[2, n]: factors into and out of units, relative to the smallest one."""
    relative = factors / factors.min()
    return jnp.stack([1 / relative, relative])


def matrix_of(shape: tuple[int, ...]) -> tuple[int, int]:
    """Returns a leaf's rows and columns: its last axis is the columns; a vector is one column."""
    if len(shape) < 2:
        return (shape[0] if shape else 1), 1
    return math.prod(shape[:-1]), shape[-1]
