"""Compression in the optimizer's units: a small value's error counts as much as a large one's."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from cgx_jax._types import Pytree
from cgx_jax.axes import SMALL_BYTES
from cgx_jax.kernels.units import ALIGNED, Units
from cgx_jax.kernels.wire import UnitPlace

# Units are updated in each of the first WARMUP steps, and in every PERIOD-th step after that. An
# update reads every leaf, and after the warm-up it changes little.
WARMUP, PERIOD = 32, 16
WIDTH = 32  # values of a line of vectors; XLA on CPUs compiles longer reductions in steps


class Moments(NamedTuple):
    """What `SecondMoment` knows of the leaves, and the units that follow from it; fp32.

    A step's *shares* are a leaf's squared values over their mean. The moments are weighted sums
    over the steps. A step counts as it does in Adam's second moment: by its mean square, and
    decayed. `weights`, f32[leaves, 3], holds the sum of the decayed weights of time, the sum of the
    steps' weights, and the inverse of how many steps of equal weight could replace these. `lines`,
    a tree like the parameters of i32[], has each leaf's line of `weights`. It says which leaves the
    moments are of, and never changes.

    A leaf of R rows and C columns has two vectors: the mean shares of rows, f32[R], and of columns,
    f32[C]. All vectors lie in `shares`, f32[lines, `WIDTH`], each in lines of its own. `spreads`,
    f32[2 * leaves], holds the mean square of single steps' vectors. `factors`, f32[2, N], holds the
    units of all vectors, one after the other, and `sizes`, f32[leaves], the values' usual sizes in
    them. So there are few arrays, however many leaves.
    """

    lines: Pytree
    weights: jax.Array
    spreads: jax.Array
    shares: jax.Array
    factors: jax.Array
    sizes: jax.Array


class Squares(NamedTuple):
    """The sums of squares of vectors of one length, f32[vectors, length].

    Leaf i of R rows and C columns has two vectors: `numbers` 2 i, of the R rows' sums, and 2 i + 1,
    of the C columns' sums.
    """

    numbers: np.ndarray
    sums: jax.Array


@dataclasses.dataclass(frozen=True, eq=False)
class _Vectors:
    """Where the vectors of leaves lie, in lines of `WIDTH` values and one after the other.

    Vector v has `lengths[v]` values from line `starts[v]` on. Line n has `used[n]` values, of
    vector `owners[n]`. One after the other, vectors begin at `places`, and end at the last of them.
    """

    lengths: np.ndarray
    starts: np.ndarray
    owners: np.ndarray
    used: np.ndarray
    places: np.ndarray

    @classmethod
    def of(cls, shapes: Sequence[tuple[int, ...]]) -> _Vectors:
        """Returns the places of leaves' vectors. A vector without values counts as one 0."""
        lengths = np.array([max(n, 1) for shape in shapes for n in matrix_of(shape)], np.int64)
        lines = -(-lengths // WIDTH)
        ends = np.cumsum(lines)
        owners = np.repeat(np.arange(len(lengths)), lines)
        before = (np.arange(len(owners)) - (ends - lines)[owners]) * WIDTH
        used = np.minimum(lengths[owners] - before, WIDTH)
        places = np.cumsum([0, *(-(-lengths // ALIGNED) * ALIGNED)])
        return cls(lengths, ends - lines, owners.astype(np.int32), used.astype(np.int32), places)

    def by_line(self, x: jax.Array) -> jax.Array:
        """Returns each line's value of f32[vectors], f32[lines, 1]."""
        return x[self.owners][:, None]

    def means(self, x: jax.Array) -> jax.Array:
        """Returns each vector's mean, f32[vectors], of f32[lines, WIDTH]."""
        return self._reduced(x, 0, jnp.sum) / self.lengths.astype(np.float32)

    def least(self, x: jax.Array) -> jax.Array:
        """Returns each vector's least value, f32[vectors], of f32[lines, WIDTH]."""
        return self._reduced(x, jnp.inf, jnp.min)

    def _reduced(self, x: jax.Array, nothing: float, reduce: Callable[..., jax.Array]) -> jax.Array:
        place = lax.broadcasted_iota(np.int32, x.shape, 1)
        lines = reduce(jnp.where(place < self.used[:, None], x, nothing), axis=1)
        # All ranks must get the same bits, so no order of additions may be left open, as it is in
        # a scatter on GPUs.
        vector = lax.broadcasted_iota(np.int32, (len(self.lengths), len(lines)), 0)
        return reduce(jnp.where(vector == self.owners[None], lines[None], nothing), axis=1)

    def flat(self, x: jax.Array) -> jax.Array:
        """Returns the vectors of f32[lines, WIDTH] one after the other, f32[N]."""
        begins = np.repeat(self.starts * WIDTH - self.places[:-1], np.diff(self.places))
        return x.reshape(-1)[(begins + np.arange(len(begins))).astype(np.int32)]

    def filled(self, squares: Sequence[Squares]) -> jax.Array:
        """Returns sums of squares in their places, f32[lines, WIDTH]; 0 where there are none."""
        parts = [_in_lines(own.sums) for own in squares]
        vectors = [v for own in squares for v in own.numbers]
        known = [self.starts[v] + np.arange(-(-self.lengths[v] // WIDTH)) for v in vectors]
        rest = np.setdiff1d(np.arange(len(self.owners)), np.concatenate([*known, []]))
        parts.append(jnp.zeros((len(rest), WIDTH), jnp.float32))
        order = np.argsort(np.concatenate([*known, rest]))
        return jnp.concatenate(parts)[order]


def _in_lines(x: jax.Array) -> jax.Array:
    """Returns vectors f32[vectors, length] one after the other, f32[lines, WIDTH]."""
    count = max(-(-x.shape[1] // WIDTH), 1)
    return jnp.pad(x, ((0, 0), (0, count * WIDTH - x.shape[1]))).reshape(-1, WIDTH)


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
    repeat a difference confirm it. A step with a mean whose square leaves fp32 (above 1e19) changes
    no unit, as if the mean were not finite. `decay` in (0, 1) is the decay of the averages. `floor`
    in (0, 1] is the least factor, as a share of the usual one.

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
        vectors = _Vectors.of([x.shape for x in leaves])
        return Moments(
            jax.tree.unflatten(treedef, [jnp.int32(i) for i in range(len(leaves))]),
            jnp.zeros((len(leaves), 3), jnp.float32),
            jnp.zeros(2 * len(leaves), jnp.float32),
            jnp.zeros((len(vectors.owners), WIDTH), jnp.float32),
            jnp.ones((2, vectors.places[-1]), jnp.float32),
            jnp.ones(len(leaves), jnp.float32),
        )

    def units(
        self, moments: Moments, shapes: Sequence[tuple[int, ...]], wanted: Iterable[int]
    ) -> Units:
        """Returns the next step's units of the `wanted` leaves.

        A value in these units, divided by its leaf's size, is a multiple of its own usual size. The
        factors into units are at most 1, so that no finite value overflows. `shapes` are those of
        all leaves.
        """
        starts = _Vectors.of(shapes).places.tolist()
        places: list[UnitPlace | None] = [None] * len(shapes)
        for leaf in wanted:
            places[leaf] = UnitPlace(*matrix_of(shapes[leaf]), *starts[2 * leaf : 2 * leaf + 2])
        return Units(moments.factors, tuple(places))

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
        stay. `shapes` are those of all leaves. New `shares` or `spreads` are not finite if a mean
        square is not.
        """
        vectors, old = _Vectors.of(shapes), moments.weights
        depths = np.maximum([n for shape in shapes for n in matrix_of(shape)[::-1]], 1)
        now = vectors.filled(squares) / vectors.by_line(jnp.float32(depths))
        now = lax.optimization_barrier(now)  # XLA would otherwise compute it for each use
        mean_square = vectors.means(now)[::2]
        decay = self.since(step)
        weight = (1 - decay) * mean_square
        total = decay * old[:, 1] + weight
        parts = jnp.stack([decay * old[:, 1], weight]) / jnp.where(total > 0, total, 1)[None]
        alike = jnp.square(parts[0]) * old[:, 2] + jnp.square(parts[1])
        # A leaf whose gradient is 0 says nothing about its usual gradients.
        stays = mean_square == 0
        new = jnp.stack([decay * old[:, 0] + (1 - decay), total, alike], axis=1)
        weights = jnp.where(stays[:, None], old, new)
        inverse = 1 / jnp.where(stays, 1, mean_square)
        keep, weight, inverse = _by_vector(jnp.where(stays, 1, decay), weight, inverse)
        now = now * vectors.by_line(inverse)
        spreads = keep * moments.spreads + weight * vectors.means(jnp.square(now))
        shares = vectors.by_line(keep) * moments.shares + vectors.by_line(weight) * now
        factors, sizes = self._scales(vectors, weights, spreads, shares)
        return Moments(moments.lines, weights, spreads, shares, factors, sizes)

    def _scales(
        self, vectors: _Vectors, weights: jax.Array, spreads: jax.Array, shares: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Returns `factors` and `sizes` of `Moments`.

        Averages of shares are shrunk to 1, which is their mean, as far as chance explains the
        difference. The noise of an average follows from how much single steps differ, as in an
        analysis of variance. Where noise explains all of the difference, none is left.
        """
        steps = 1 / jnp.maximum(weights[:, 2], _TINY)
        few = jnp.maximum(steps - 1, _TINY)
        confirmed = (weights[:, 2] > 0) & (steps > 1.1)
        total = jnp.where(weights[:, 1] > 0, weights[:, 1], 1)
        total, few, confirmed = _by_vector(total, few, confirmed)
        away = shares / vectors.by_line(total) - 1
        difference = vectors.means(jnp.square(away))
        noise = jnp.maximum(spreads / total - 1 - difference, 0) / few
        noise *= 1 + 2 / few  # few steps make the noise itself uncertain
        kept = jnp.clip(1 - noise / jnp.maximum(difference, _TINY), 0, 1) * confirmed
        usual = 1 + self.floor**2
        smallest = usual + kept * vectors.least(away)
        squares = (usual + vectors.by_line(kept) * away) / vectors.by_line(smallest)
        relative = vectors.flat(jnp.sqrt(jnp.maximum(squares, 1)))
        rows, columns = smallest[::2], smallest[1::2]
        square = weights[:, 1] / jnp.maximum(weights[:, 0], _TINY) * rows * columns / usual**2
        sizes = jnp.sqrt(jnp.where(square > 0, square, 1))
        return jnp.stack([1 / relative, relative]), sizes


_TINY = float(jnp.finfo(jnp.float32).tiny)


def _by_vector(*values: jax.Array) -> Iterator[jax.Array]:
    """Yields each vector's values of f32[leaves]."""
    pairs = jnp.stack([x.astype(jnp.float32) for x in values])[:, :, None]
    return iter(jnp.broadcast_to(pairs, (*pairs.shape[:2], 2)).reshape(len(values), -1))


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
