"""Low-rank codes of matrices (PowerSGD)."""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from cgx_jax._types import Key, Pytree
from cgx_jax.arguments import store_whole
from cgx_jax.compressors import buckets
from cgx_jax.compressors.base import Rounds, Summed, SummedCompressor, Together
from cgx_jax.compressors.packing import size_of
from cgx_jax.kernels.reference import random_bits

_KEY = (np.uint32(0x706F7765), np.uint32(0x72736764))
_LARGEST_START = 8.0  # more than any value of a factor that a step starts from
_TINY = float(jnp.finfo(jnp.float32).tiny)
# If projection leaves less than this share of a column, the rest is only rounding error.
_LOST = 2.0**-20


@dataclasses.dataclass(frozen=True)
class PowerSGD(SummedCompressor):
    """A matrix of rank `rank`: the ranks' sum M becomes P Pᵀ M, with orthonormal columns in P.

    A leaf is taken as the matrix [product of all dimensions but the last, last dimension], so
    convolution kernels (HWIO) are [H * W * I, O]. Two rounds add up P = M Q and Q = Mᵀ P in fp32; P
    is orthonormalized in between. A matrix of n by m costs 4 rank (n + m) bytes. Leaves with fewer
    than two dimensions, and leaves whose factors would be no smaller than the matrix, are summed
    exactly in fp32 and have no state.

    The state is Qᵀ, f32[rank, m], from which the next step continues. On gradients that change
    slowly, P Pᵀ M approaches the best approximation of this rank. The first Q is Gaussian and
    depends only on the shape. A column of Q that is zero or not finite restarts in the same way. A
    matrix with a non-finite value becomes NaN as a whole.

    A step loses much, so use it with `ErrorFeedback`. Raises ValueError for a rank below 1,
    TypeError if it is not an integer. Source: PowerSGD (Vogels et al., NeurIPS 2019).
    """

    rank: int = 4

    shares_state = True

    def __post_init__(self) -> None:
        store_whole(self, "rank", 1)

    def wire_bits(self, shape: int | Sequence[int], dtype: DTypeLike = jnp.float32) -> int:
        sides = self._sides(shape)
        return 32 * (size_of(shape) if sides is None else self.rank * sum(sides))

    def init(self, shape: Sequence[int], dtype: DTypeLike) -> Pytree:
        sides = self._sides(shape)
        return () if sides is None else _first(self.rank, sides[1])

    def rounds(self, x: jax.Array, state: Pytree, *, key: Key, world: int) -> Rounds:
        sides = self._sides(x.shape)
        if sides is None:
            (total,) = yield [x]
            return Summed(total, x, state)
        # The matrix is always the operand that XLA's CPU backend reads in its stored layout. As the
        # other operand it would be transposed first, which takes several times as long.
        matrix = x.reshape(sides)
        (left,) = yield [_product(matrix, self._start(state), 1, 1)]
        rows = yield Together(_orthonormal, left.T)
        left = rows.T
        part = _product(left, matrix, 0, 0)
        (right,) = yield [part]
        total, own = (_outer(left, q).reshape(x.shape) for q in (right, part))
        return Summed(total, own, right)

    def error_bound(self, x: ArrayLike) -> jax.Array:
        """Returns the L2 norm of the value's column: what a column loses is a projection of it.

        For rounding, 2**-10 of the norm and an ulp of the dtype are added. A leaf that is sent
        exactly has only that ulp. The bound is infinite where a 16-bit result may overflow, where
        the matrix has a non-finite value, and where its products with the factors may overflow
        fp32. Where the ranks' values cancel out, the rounding of their own parts comes on top, as
        in `lax.psum`.
        """
        info = jnp.finfo(jnp.result_type(x))
        values = jnp.abs(jnp.asarray(x).astype(jnp.float32))
        sides = self._sides(values.shape)
        if sides is None:
            return values * float(info.eps)
        matrix = values.reshape(sides)
        peak = jnp.maximum(buckets.maximum(matrix, axis=0), _TINY)
        norm = peak * jnp.sqrt(jnp.square(matrix / peak).sum(axis=0))
        least = self.rank * sides[0] * _TINY + float(info.smallest_subnormal)
        bound = norm * (1 + 2.0**-10 + float(info.eps)) + least
        fits = self._multiplies(matrix) & (bound + matrix <= float(info.max))
        return jnp.where(fits, bound, jnp.inf).reshape(values.shape)

    def error_bound_of_sum(self, x: jax.Array) -> jax.Array:
        bound, sides = self.error_bound(x.sum(0)), self._sides(x.shape[1:])
        if sides is None:
            return bound
        # Ranks' parts that cancel out in the sum may overflow before they cancel.
        sizes = jnp.abs(x.astype(jnp.float32)).sum(0).reshape(sides)
        return jnp.where(self._multiplies(sizes), bound, jnp.inf)

    @staticmethod
    def _multiplies(sizes: jax.Array) -> jax.Array:
        """Whether products of the factors with a matrix of these magnitudes fit fp32, bool[]."""
        by_row, by_column = (buckets.maximum(sizes.sum(axis=axis)) for axis in (1, 0))
        most = jnp.maximum(by_row * _LARGEST_START, by_column)
        return most < float(jnp.finfo(jnp.float32).max)

    def _sides(self, shape: int | Sequence[int]) -> tuple[int, int] | None:
        """Returns the rows and columns of a leaf's matrix, or None if the leaf is sent exactly."""
        if isinstance(shape, int) or len(shape) < 2:
            return None
        rows, columns = math.prod(shape[:-1]), shape[-1]
        return (rows, columns) if self.rank * (rows + columns) < rows * columns else None

    def _start(self, state: jax.Array) -> jax.Array:
        """Returns the Qᵀ to start from, with values around 1: rows of the state, or fresh ones."""
        peak = buckets.maximum(jnp.abs(state), axis=1, keepdims=True)
        alive = (peak >= _TINY) & jnp.isfinite(peak)
        return jnp.where(alive, state / peak, _first(*state.shape))


@functools.partial(jax.jit, static_argnums=(0, 1))  # traced once for all leaves of one width
def _first(rank: int, columns: int) -> jax.Array:
    """Returns the Qᵀ of the first step, f32[rank, columns]."""
    bits = random_bits(_KEY, 0, 0, rank, columns)
    uniform = (bits >> 8).astype(jnp.float32) * 2.0**-23 + (2.0**-24 - 1)
    return math.sqrt(2) * lax.erf_inv(uniform)


def _product(a: jax.Array, b: jax.Array, axis: int, other: int) -> jax.Array:
    """The matrix product that contracts `axis` of `a` with `other` of `b`, in full fp32."""
    return lax.dot_general(
        a,
        b,
        (((axis,), (other,)), ((), ())),
        precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )


def _outer(left: jax.Array, right: jax.Array) -> jax.Array:
    """Returns `left @ right` as a sum of outer products, which XLA fuses with what follows."""
    terms = [left[:, i : i + 1] * right[i : i + 1] for i in range(len(right))]
    return functools.reduce(operator.add, terms)


def _orthonormal(rows: jax.Array) -> jax.Array:
    """Orthonormalizes a few long rows by Gram-Schmidt, projecting each row twice.

    Rows that depend on others become 0. A NaN in one row makes all rows after it NaN.
    """
    # Scaled first: squares of large and of small values leave the range of fp32.
    peak = jnp.abs(rows).max(axis=1, keepdims=True)
    rows = rows / jnp.where(peak < _TINY, 1, peak)
    norms = jnp.sqrt(jnp.square(rows).sum(axis=1, keepdims=True))
    rows = rows / jnp.where(norms == 0, 1, norms)

    def project(step: jax.Array, rows: jax.Array) -> jax.Array:
        # The current row is the first. Finished rows come last and stay as they are: the rounding
        # error of a later row must not turn them.
        row, others = rows[:1], rows[1:]
        norm = jnp.sqrt(_product(row, row, 1, 1))
        lost = norm <= _LOST
        row = jnp.where(lost, 0, row / jnp.where(lost, 1, norm))
        to_do = jnp.arange(len(others), dtype=jnp.int32)[:, None] < len(others) - step % len(rows)
        shares = jnp.where(to_do, _product(others, row, 1, 1), 0)
        return jnp.concatenate([others - _product(shares, row, 1, 0), row])

    return lax.fori_loop(0, 2 * len(rows), project, rows)
