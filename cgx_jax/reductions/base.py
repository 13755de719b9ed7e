"""What a reduction is: how the ranks' codes become a sum."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from cgx_jax.axes import Axes
from cgx_jax.compressors import Compressor, PayloadCompressor
from cgx_jax.compressors.codes import CodedLeaf, unit_of
from cgx_jax.exchanges import Exchange
from cgx_jax.kernels import outside
from cgx_jax.kernels.primitives import Units

Seeds = Sequence[Any]


@dataclasses.dataclass(frozen=True)
class Job:
    """One fusion buffer to reduce: static and hashable.

    `name` is the call that the user wrote. `leaves` have their compressors, shapes and dtypes. Sums
    over `axes` travel by `exchange` and are divided by `divisor`. `residual` asks for what this
    rank lost. `in_place` says that the program computes all leaves itself. Sums may then take the
    memory of the leaves. New memory costs a large buffer more than the reduction does, since the
    system maps it page by page. A parameter of the program belongs to its caller, so XLA would copy
    it first, which costs even more. `watched` says that `debug_nonfinite` is on.
    """

    name: str
    leaves: tuple[CodedLeaf, ...]
    axes: Axes
    exchange: Exchange
    divisor: int
    residual: bool
    in_place: bool
    watched: bool = False


class Reduced(NamedTuple):
    """What a reduction returns: sums, residuals and new states, one entry per leaf.

    `sums` are alike on all ranks, in the leaves' shapes and dtypes. `residuals`, if asked for, are
    what this rank's part of them lost; otherwise there are none. `states` are those of the
    compressors. The ranks' sum minus `sums` times the divisor is the sum of the ranks' `residuals`,
    up to the rounding of the leaves' dtypes. `found`, i32[leaves, 2, 2], is what of this rank's
    leaves and of their sums is not finite: how many values, and the place of the first. It is None
    unless the job is `watched`, and where that would take a search.
    """

    sums: list[jax.Array]
    residuals: list[jax.Array]
    states: list[Any]
    found: jax.Array | None = None


class Reduction(abc.ABC):
    """An order of steps: static, hashable, equal by value; it knows no transport and no tree.

    It asks the exchange for the capabilities in `needs`. It takes `seed_count` seeds, which differ
    from rank to rank unless it `shares_seeds` or the compressor shares noise. A compressor lists
    the reductions that are right for it by their `shorthand`. A call raises ValueError for a
    compressor that is `unfit` and for an exchange that lacks a capability.
    """

    shorthand: ClassVar[str]
    needs: ClassVar[frozenset[str]]
    seed_count: ClassVar[int] = 1
    shares_seeds: ClassVar[bool] = False

    def unfit(self, compressor: Compressor) -> str | None:
        """Why this reduction is wrong for a compressor, or None."""
        if self.shorthand in compressor.reductions:
            return None
        return f"it allows {', '.join(compressor.reductions)}"

    def in_one_call(self, exchange: Exchange, leaves: tuple[CodedLeaf, ...], world: int) -> bool:
        """Whether the exchange has a call that does the whole reduction of these leaves."""
        return False

    def across_links(
        self, leaves: tuple[CodedLeaf, ...], world: int
    ) -> tuple[tuple[CodedLeaf, ...], int]:
        """The parts of the leaves that cross the slowest links, and between how many ranks."""
        return leaves, world

    @abc.abstractmethod
    def bytes_sent(self, leaves: tuple[CodedLeaf, ...], world: int) -> int:
        """Exact bytes that a rank sends in a reduction of these leaves over `world` ranks."""

    @abc.abstractmethod
    def error_bound(self, compressor: Any, x: jax.Array, divisor: float = 1) -> jax.Array:
        """Largest possible error of one leaf's sum, from all ranks' values f32[world, ...]."""

    def kept(self, error: float, world: int) -> float | None:
        """The share of a mean's signal that is left, for a code of relative squared error `error`.

        An encoding keeps 1 - error of what it is given. If ranks are independent, the same share of
        the mean square of the mean is signal. None if it is not known.
        """
        return None

    @abc.abstractmethod
    def run(
        self,
        job: Job,
        seeds: Seeds,
        leaves: Sequence[jax.Array],
        units: Units,
        states: Sequence[Any],
    ) -> Reduced:
        """Reduces a buffer; `seeds` are `seed_count` times uint32[2].

        `units` has one entry per leaf, as in `primitives`, or none at all. `states` has one entry
        per leaf, () for a compressor without state.
        """


class Rows(NamedTuple):
    """What `PayloadReduction.rows` returns: encoded sums, and what this rank lost.

    `rows`, u8[k, n], are the same on all ranks of the job. `residuals`, in the leaves' shapes, are
    empty unless the job asks for them. `found`, i32[leaves, 2], is the part of `Reduced.found` that
    went in.
    """

    rows: jax.Array
    residuals: list[jax.Array]
    found: jax.Array | None = None


class PayloadReduction(Reduction):
    """A reduction of payloads, which ends in rows of bytes that every rank decodes alike.

    Write `rows`, `rows_bytes` and `sums`; `run` prepares the leaves and calls them. It works across
    `Levels` too. `found` is optional. If the reduction `adds_decoded`, `rows` and `sums` are given
    fp32 leaves without units.
    """

    adds_decoded: ClassVar[bool] = False

    def run(
        self,
        job: Job,
        seeds: Seeds,
        leaves: Sequence[jax.Array],
        units: Units,
        states: Sequence[Any],
    ) -> Reduced:
        if not self.adds_decoded and not any(leaf.compressor.prepares for leaf in job.leaves):
            rows, residuals, found = self.rows(job, seeds, leaves, units)
            sums = self.sums(job, rows, leaves, units)
            if found is not None:
                out = self.found(job, rows, sums, units)
                found = None if out is None else jnp.stack([found, out], axis=1)
            return Reduced(sums, residuals, list(states), found)
        each = [unit_of(units, i) for i in range(len(leaves))]
        values = [
            outside.multiply(x, unit, outside.IN).astype(jnp.float32)
            for x, unit in zip(leaves, each, strict=True)
        ]
        made = [
            leaf.compressor.prepare(x, state) if leaf.compressor.prepares else (x, state)
            for leaf, x, state in zip(job.leaves, values, states, strict=True)
        ]
        ready = [y for y, _ in made]
        inner = dataclasses.replace(job, watched=False)  # these are not the leaves
        rows, residuals, _ = self.rows(inner, seeds, ready, ())
        sums = self.sums(job, rows, ready, ())
        # What preparing took away is lost like what encoding did.
        lost = [x - y + e for x, y, e in zip(values, ready, residuals, strict=False)]
        return Reduced(
            [outside.decoded(y, u, x.dtype) for y, u, x in zip(sums, each, leaves, strict=True)],
            [
                outside.multiply(e, u, outside.OUT).astype(x.dtype)
                for e, u, x in zip(lost, each, leaves, strict=False)
            ],
            [state for _, state in made],
        )

    @abc.abstractmethod
    def rows(self, job: Job, seeds: Seeds, leaves: Sequence[jax.Array], units: Units) -> Rows:
        """The steps between preparing the leaves and the last decoding."""

    @abc.abstractmethod
    def rows_bytes(self, leaves: tuple[CodedLeaf, ...], world: int) -> int:
        """Bytes of `rows` of these leaves over `world` ranks."""

    @abc.abstractmethod
    def sums(self, job: Job, rows: jax.Array, like: Sequence[Any], units: Units) -> list[jax.Array]:
        """The sums, with the shapes and dtypes of `like`."""

    def found(
        self, job: Job, rows: jax.Array, sums: Sequence[jax.Array], units: Units
    ) -> jax.Array | None:
        """What of the sums is not finite, i32[leaves, 2]; None if that would take a search."""
        return None


def largest_error(error_bound: Callable[[jax.Array], jax.Array], size: jax.Array) -> jax.Array:
    """The most that encoding may lose of a value, where magnitudes are at most `size`.

    Of such values no more is known than that none is larger than the largest.
    """
    signs = jnp.where(jnp.arange(size.size) % 2 == 0, 1.0, -1.0).reshape(size.shape)
    return error_bound(signs * size.max()).max()


def sum_of_bounds(compressor: PayloadCompressor, x: jax.Array) -> jax.Array:
    """What the decoded values of all ranks together may be off."""
    return sum((compressor.error_bound(row) for row in x), start=jnp.zeros(x.shape[1:]))
