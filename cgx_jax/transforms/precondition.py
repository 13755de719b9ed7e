"""Compression in the optimizer's units: a small value's error counts as much as a large one's."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from cgx_jax._types import Pytree
from cgx_jax.axes import SMALL_BYTES, unstack

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


class Moments(NamedTuple):
    """What `SecondMoment` knows of the leaves, fp32.

    A step's *shares* are a leaf's squared values over their mean. The moments are weighted sums
    over the steps. A step counts as it does in Adam's second moment: by its mean square, and
    decayed. `weights`, f32[leaves, 3], holds the sum of the decayed weights of time, the sum of the
    steps' weights, and the inverse of how many steps of equal weight could replace these. `lines`,
    a tree like the parameters of i32[], has each leaf's line of `weights`. It says which leaves the
    moments are of, and never changes.

    A leaf of R rows and C columns has two vectors: the mean shares of rows, f32[R], and of columns,
    f32[C]. A table, f32[vectors, 1 + width], holds vectors of similar lengths: the longest has
    `width` values, and the others more than an eighth. A row of it begins with the mean square of
    single steps' vectors. Then it has the vector, and zeros. So there are few arrays, however many
    leaves.
    """

    lines: Pytree
    weights: jax.Array
    tables: Pytree


# A leaf's units and their size: what `SecondMoment.units` returns of it.
Scale = tuple[Units, jax.Array]


class Squares(NamedTuple):
    """The sums of squares of vectors of one length, f32[vectors, length].

    Leaf i of R rows and C columns has two vectors: `numbers` 2 i, of the R rows' sums, and 2 i + 1,
    of the C columns' sums.
    """

    numbers: np.ndarray
    sums: jax.Array


@dataclasses.dataclass(frozen=True)
class _Table:
    """The vectors of one table: their numbers as in `Squares`, and their lengths.

    An entry of a vector is the mean of so many squares as `depths` says.
    """

    width: int
    numbers: np.ndarray
    lengths: np.ndarray
    depths: np.ndarray

    @property
    def leaves(self) -> np.ndarray:
        """The number of each vector's leaf."""
        numbers: np.ndarray = self.numbers // 2
        return numbers

    def means(self, x: jax.Array) -> jax.Array:
        """Returns each vector's mean, f32[vectors], of values f32[vectors, width]."""
        counts = np.maximum(self.lengths, 1).astype(np.float32)
        means: jax.Array = jnp.where(self.used(), x, 0).sum(axis=1) / counts
        return means

    def used(self) -> jax.Array:
        """Whether a place has a value, bool[vectors, width]; a vector of none has a 0."""
        shape = len(self.numbers), self.width
        places = lax.broadcasted_iota(np.int32, shape, 1)
        used: jax.Array = places < np.maximum(self.lengths, 1)[:, None]
        return used


def _tables(shapes: Sequence[tuple[int, ...]]) -> list[_Table]:
    lengths = np.array([n for shape in shapes for n in matrix_of(shape)], np.int32)
    kinds = np.array([max(int(n) - 1, 0).bit_length() // 3 for n in lengths])
    numbers = [np.flatnonzero(kinds == kind) for kind in np.unique(kinds)]
    depths = lengths.reshape(-1, 2)[:, ::-1].reshape(-1)
    return [_Table(int(np.max(lengths[n], initial=1)), n, lengths[n], depths[n]) for n in numbers]


@dataclasses.dataclass(frozen=True)
class SecondMoment:
    """Compresses each value of a gradient in units of its usual size; for Adam and its kin.

    A quantizer's error is as large on the small values of a bucket as on the large ones. Adam
    divides each value by the root of its second moment, which makes the errors of small values
    large. In these units all values have about the same scale. The units come from the reduced
    gradients of earlier steps, which every rank holds, so nothing more is sent.

    A value's unit is the product of its row's unit and its column's unit (columns lie along the
    last axis). Each is the root of a mean square in fp32. Units differ only as far as the
    differences exceed chance. After the first step no difference counts yet; later steps that
    repeat a difference confirm it. `decay` in (0, 1) is the decay of the averages. `floor` in
    (0, 1] is the least factor, as a share of the usual one.

    Raises ValueError for a decay or floor outside their ranges. Source: ours. The moments are
    Adam's (Kingma and Ba, ICLR 2015), factored as in Adafactor (Shazeer and Stern, ICML 2018) and
    shrunk towards their mean as by James and Stein (1961).
    """

    decay: float = 0.999
    floor: float = 0.1

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

    def init(self, params: Pytree) -> Moments:
        """The state before the first step of leaves like `params`."""
        leaves, treedef = jax.tree.flatten(params)
        return Moments(
            jax.tree.unflatten(treedef, [jnp.int32(i) for i in range(len(leaves))]),
            jnp.zeros((len(leaves), 3), jnp.float32),
            tuple(
                jnp.zeros((len(t.numbers), 1 + t.width), jnp.float32)
                for t in _tables([x.shape for x in leaves])
            ),
        )

    def units(
        self, moments: Moments, shapes: Sequence[tuple[int, ...]], wanted: Iterable[int]
    ) -> dict[int, Scale]:
        """Returns the next step's units of the `wanted` leaves, and the usual size, f32[].

        A value in these units, divided by that size, is a multiple of its own usual size. `shapes`
        are those of all leaves.
        """
        tables, weights = _tables(shapes), moments.weights
        ways: list[jax.Array] = []
        places: dict[int, tuple[int, int]] = {}
        for table, sums in zip(tables, moments.tables, strict=True):
            places |= {int(n): (len(ways), line) for line, n in enumerate(table.numbers)}
            ways.append(self._ways(table, sums, weights[table.leaves]))
        # XLA would otherwise compute a table again for each of its vectors.
        ways = lax.optimization_barrier(ways)
        lines = [unstack(both) for both in ways]
        squares = [t.means(jnp.square(both[:, 1])) for t, both in zip(tables, ways, strict=True)]
        rows, columns = _by_leaf(tables, squares)
        square = weights[:, 1] / jnp.maximum(weights[:, 0], _TINY) / (rows * columns)
        size = jnp.sqrt(jnp.where(square > 0, square, 1))

        def vector(number: int, length: int) -> jax.Array:
            table, line = places[number]
            out: jax.Array = lines[table][line][:, :length]
            return out

        def units(leaf: int) -> Units:
            rows, columns = matrix_of(shapes[leaf])
            return Units(vector(2 * leaf, rows), vector(2 * leaf + 1, columns))

        return {leaf: (units(leaf), size[leaf]) for leaf in wanted}

    def due(self, step: jax.Array) -> jax.Array:
        """Whether the step after `step` others updates the units, bool[]."""
        return (step < WARMUP) | (step % PERIOD == 0)

    def since(self, step: jax.Array) -> jax.Array:
        """Returns the decay over all steps that the one after `step` others stands for, if due."""
        return jnp.where(step < WARMUP, self.decay, self.decay**PERIOD).astype(jnp.float32)

    def update(
        self,
        moments: Moments,
        shapes: Sequence[tuple[int, ...]],
        squares: Sequence[Squares],
        step: jax.Array,
    ) -> Moments:
        """Returns the moments after a step that is due.

        `squares` are those of the leaves' reduced gradients; the moments of leaves without any
        stay. `shapes` are those of all leaves. New `tables` are not finite if a mean square is not.
        """
        tables = _tables(shapes)
        old = moments.weights
        now = lax.optimization_barrier([_filled(table, squares) for table in tables])
        mean_square, _ = _by_leaf(tables, [t.means(x) for t, x in zip(tables, now, strict=True)])
        inverse = 1 / jnp.where(mean_square > 0, mean_square, 1)
        decay = self.since(step)
        weight = (1 - decay) * mean_square
        # A leaf whose gradient is 0 says nothing about its usual gradients.
        stays = mean_square == 0
        total = decay * old[:, 1] + weight
        parts = jnp.stack([decay * old[:, 1], weight]) / jnp.where(total > 0, total, 1)[None]
        alike = jnp.square(parts[0]) * old[:, 2] + jnp.square(parts[1])
        new = jnp.stack([decay * old[:, 0] + (1 - decay), total, alike], axis=1)
        new = jnp.where(stays[:, None], old, new)
        after = []
        for table, sums, seen in zip(tables, moments.tables, now, strict=True):
            own = table.leaves
            shares = inverse[own][:, None] * seen
            spreads = table.means(jnp.square(shares))
            add = weight[own][:, None] * jnp.concatenate([spreads[:, None], shares], axis=1)
            after.append(jnp.where(stays[own][:, None], sums, decay * sums + add))
        return Moments(moments.lines, new, tuple(after))

    def _ways(self, table: _Table, sums: jax.Array, weights: jax.Array) -> jax.Array:
        """Returns f32[vectors, 2, width]: factors into and out of units.

        Averages of shares are shrunk to 1 as far as chance explains the difference. The noise of an
        average follows from how much single steps differ, as in an analysis of variance. Where
        noise explains all of the difference from 1, no difference is left.
        """
        total = jnp.where(weights[:, 1] > 0, weights[:, 1], 1)[:, None]
        average = sums[:, 1:] / total
        steps = 1 / jnp.maximum(weights[:, 2], _TINY)
        within = jnp.maximum(sums[:, 0] / total[:, 0] - table.means(jnp.square(average)), 0)
        few = jnp.maximum(steps - 1, _TINY)
        noise = within / few * (1 + 2 / few)  # few steps make the noise itself uncertain
        difference = table.means(jnp.square(average - 1))
        kept = jnp.clip(1 - noise / jnp.maximum(difference, _TINY), 0, 1)
        confirmed = (weights[:, 2] > 0) & (steps > 1.1)
        kept = jnp.where(confirmed, kept, 0)[:, None]
        factors = jnp.sqrt(1 + kept * (average - 1) + self.floor**2)
        smallest = jnp.where(table.used(), factors, jnp.inf).min(axis=1, keepdims=True)
        relative = factors / smallest
        return jnp.stack([1 / relative, relative], axis=1)


_TINY = float(jnp.finfo(jnp.float32).tiny)


def _by_leaf(tables: Sequence[_Table], values: Sequence[jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Returns what rows and what columns have, each f32[leaves], of one value for each vector."""
    if not tables:
        return jnp.zeros(0, jnp.float32), jnp.zeros(0, jnp.float32)
    place = np.argsort(np.concatenate([table.numbers for table in tables]))
    flat = jnp.concatenate(list(values))
    return flat[place[::2]], flat[place[1::2]]


def _filled(table: _Table, squares: Sequence[Squares]) -> jax.Array:
    """Returns a table's mean squares, f32[vectors, width]; 0 for leaves without squares."""
    own = [x for x in squares if x.numbers[0] in table.numbers]
    known = np.array([n for x in own for n in x.numbers], np.int64)
    rest = np.setdiff1d(table.numbers, known)
    parts = [jnp.pad(x.sums, ((0, 0), (0, table.width - x.sums.shape[1]))) for x in own]
    rows = jnp.concatenate([*parts, jnp.zeros((len(rest), table.width), jnp.float32)])
    order = np.argsort(np.concatenate([known, rest]))
    depths = np.maximum(table.depths, 1).astype(np.float32)
    means: jax.Array = rows[order] / depths[:, None]
    return means


def squares_of(leaves: Mapping[int, jax.Array]) -> list[Squares]:
    """Returns the sums of squares of leaves by number.

    Leaves of one shape and up to `SMALL_BYTES` are stacked and share one program.
    """
    kinds: dict[tuple[Any, ...], list[int]] = {}
    for i, x in leaves.items():
        alone = 0 if x.nbytes <= SMALL_BYTES else i + 1
        kinds.setdefault((x.shape, x.dtype, alone), []).append(i)
    out = []
    for (shape, *_), numbers in kinds.items():
        # The barrier keeps what makes the leaves out of the sums' program.
        stack = lax.optimization_barrier(jnp.stack([leaves[i] for i in numbers]))
        matrix = stack.astype(jnp.float32).reshape(len(numbers), *matrix_of(shape))
        rows = jnp.square(matrix).sum(axis=2)
        # The barrier separates the two sums: XLA's CPU fusion of both takes three times as long.
        matrix, rows = lax.optimization_barrier((matrix, rows))
        places = 2 * np.array(numbers)
        out += [Squares(places, rows), Squares(places + 1, jnp.square(matrix).sum(axis=1))]
    return out


def matrix_of(shape: tuple[int, ...]) -> tuple[int, int]:
    """Returns a leaf's rows and columns: its last axis is the columns; a vector is one column."""
    if len(shape) < 2:
        return (shape[0] if shape else 1), 1
    return math.prod(shape[:-1]), shape[-1]
