"""What a reduction is: how the ranks' codes become a sum."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from cgx_jax._types import Pytree, Words
from cgx_jax.axes import Axes
from cgx_jax.collective import Collective
from cgx_jax.compressors import Compressor, PayloadCompressor
from cgx_jax.compressors.base import CodedLeaf
from cgx_jax.compressors.buffers import whole_code
from cgx_jax.exchanges import Exchange
from cgx_jax.exchanges.base import Call
from cgx_jax.kernels import scaling
from cgx_jax.kernels.primitives import Sent
from cgx_jax.kernels.scaling import Residuals
from cgx_jax.kernels.units import Units
from cgx_jax.kernels.wire import Layout


@dataclasses.dataclass(frozen=True)
class Job:
    """One fusion buffer to reduce: static and hashable.

    `name` is the call that the user wrote, and `collective` says what it leaves on each rank.
    `leaves` hold compressors, shapes and dtypes; those of a reduce-scatter are rows. Sums over
    `axes` travel by `exchange` and are divided by `divisor`. `residual` asks for what this rank
    lost. `number` tells apart the jobs of a call that are started. `in_place` says that the program
    computes all leaves itself, so sums may reuse their memory. For a large buffer, new memory costs
    more than the reduction does, since the system maps it page by page. A leaf that is a parameter
    of the program belongs to the program's caller: XLA would first copy it, which costs even more.
    """

    name: str
    collective: Collective
    leaves: tuple[CodedLeaf, ...]
    axes: Axes
    exchange: Exchange
    divisor: int
    residual: bool
    in_place: bool
    number: int = 0

    def call(self, collective: Collective, layout: Layout | None) -> Call:
        """Returns the fused call of an exchange for this job, whose code has a layout."""
        assert layout is not None
        how = self.divisor, self.residual, self.in_place, self.number
        return Call(self.name, collective, layout, self.axes, *how)

    @property
    def prepares(self) -> bool:
        """Whether a compressor prepares its leaf."""
        return any(leaf.compressor.prepares for leaf in self.leaves)

    def prepared(self, given: Operands) -> tuple[list[jax.Array], Operands]:
        """Returns the leaves in their units, and what is encoded of them with new states; fp32."""
        values = given.values()
        made = [
            leaf.compressor.prepare(x, state) if leaf.compressor.prepares else (x, state)
            for leaf, x, state in zip(self.leaves, values, given.states, strict=True)
        ]
        ready = given.plain([y for y, _ in made])
        return values, ready._replace(states=[state for _, state in made])


class Operands(NamedTuple):
    """What a reduction computes with: `leaves` and `states` have one entry per leaf.

    `seeds` are `seed_count` seeds of uint32[2]. `units` are None if no leaf has any. `states` are
    those of the compressors, () for one without state. `ticket` is that of `start`, if the
    reduction was started, else None.
    """

    seeds: Sequence[Any]
    leaves: Sequence[jax.Array]
    units: Units | None
    states: Sequence[Pytree]
    ticket: Any = None

    def plain(self, leaves: Sequence[jax.Array]) -> Operands:
        """Returns the same with other leaves, which have no units."""
        return self._replace(leaves=leaves, units=None)

    def values(self) -> list[jax.Array]:
        """Returns the leaves in their units, fp32."""
        inside = scaling.taken_in(self.leaves, self.units)
        return [x.astype(jnp.float32) for x in inside]


class Reduced(NamedTuple):
    """What a reduction returns: sums, residuals and new states, one entry per leaf.

    `sums` are the same on all ranks, in the leaves' shapes and dtypes. `residuals`, if asked for,
    are what this rank's part of the sums lost; otherwise they are None. `states` are the
    compressors' new states. The ranks' sum minus `sums` times the divisor is the sum of the ranks'
    `residuals`, up to the rounding of the leaves' dtypes.
    """

    sums: list[jax.Array]
    residuals: Residuals
    states: list[Any]


class Reduction(abc.ABC):
    """A sequence of steps: static, hashable, equal by value; it knows no transport and no tree.

    The exchange must have the capabilities in `needs`. A reduction takes `seed_count` seeds. If
    `shares_seeds` is True, all ranks have the same ones; if it is None, that is so for compressors
    that share noise. A compressor
    lists the reductions that it allows by their `shorthand`. A call raises ValueError for a
    compressor that it refuses (`refusal`) and for an exchange that lacks a capability.
    """

    shorthand: ClassVar[str]
    needs: ClassVar[frozenset[str]]
    seed_count: ClassVar[int] = 1
    shares_seeds: ClassVar[bool | None] = None
    collective: ClassVar[Collective | None] = None  # of the fused call that does it whole

    def refusal(self, compressor: Compressor) -> str | None:
        """Returns why this reduction does not suit a compressor, or None if it does."""
        if self.shorthand in compressor.reductions:
            return None
        return f"it allows {', '.join(compressor.reductions)}"

    def in_one_call(self, exchange: Exchange, leaves: tuple[CodedLeaf, ...], world: int) -> bool:
        """Whether the exchange has a call that does the whole reduction of these leaves."""
        if self.collective is None or self.collective.value not in exchange.can:
            return False
        if any(leaf.compressor.prepares for leaf in leaves):  # no such call prepares
            return False
        return self.layout(leaves, world) is not None

    def layout(self, leaves: tuple[CodedLeaf, ...], world: int) -> Layout | None:
        """Returns what the kernels know of these leaves, or None if there are none for them."""
        return None

    def across_links(
        self, leaves: tuple[CodedLeaf, ...], world: int
    ) -> tuple[Reduction, tuple[CodedLeaf, ...], int]:
        """Returns what crosses the slowest links: by which reduction, of what, between how many."""
        return self, leaves, world

    @abc.abstractmethod
    def bytes_sent(self, leaves: tuple[CodedLeaf, ...], world: int) -> int:
        """Returns the exact bytes that each of `world` ranks sends to reduce these leaves."""

    @abc.abstractmethod
    def error_bound(self, compressor: Any, x: jax.Array, divisor: float = 1) -> jax.Array:
        """Returns one leaf's largest possible error, given all ranks' values f32[world, ...]."""

    @abc.abstractmethod
    def run(self, job: Job, given: Operands) -> Reduced:
        """Reduces a buffer."""

    def starts(self, job: Job) -> bool:
        """Whether it can be started by one program and finished by a later one."""
        one = self.in_one_call(job.exchange, job.leaves, job.axes.world)
        return one and "start" in job.exchange.can

    def start(self, job: Job, given: Operands) -> jax.Array:
        """Starts it with the operands of `run`, and returns its ticket (`Exchange.start`)."""
        raise NotImplementedError


class Rows(NamedTuple):
    """What `PayloadReduction.rows` returns: encoded sums, and what this rank lost.

    `rows`, u8[k, n], are the same on all ranks of the job. `residuals`, in the leaves' shapes, are
    None unless the job asks for them.
    """

    rows: jax.Array
    residuals: Residuals


class PayloadReduction(Reduction):
    """A reduction of payloads, which ends in rows of bytes that every rank decodes alike.

    A subclass defines `rows`, `rows_bytes` and `sums`. `run` prepares the leaves and calls these
    methods. One with a `collective` also defines `layout` and `words`. Such a reduction also works
    across `Levels`. If `adds_decoded` is set, `rows` and `sums` receive fp32 leaves without units.
    """

    adds_decoded: ClassVar[bool] = False

    def run(self, job: Job, given: Operands) -> Reduced:
        if self.in_one_call(job.exchange, job.leaves, job.axes.world):
            call, sent = self._call(job, given)
            if given.ticket is None:
                done = job.exchange.fused(call, sent)
            else:
                done = job.exchange.finish(call, sent, given.ticket)
            return Reduced(done.sums, done.residuals, list(given.states))
        if not self.adds_decoded and not job.prepares:
            rows, residuals = self.rows(job, given)
            return Reduced(self.sums(job, rows, given), residuals, list(given.states))
        values, ready = job.prepared(given)
        rows, residuals = self.rows(job, ready)
        sums = self.sums(job, rows, ready)
        # What preparing took away is lost, just like what encoding lost.
        if residuals is not None:
            parts = zip(values, ready.leaves, residuals, strict=True)
            residuals = [x - y + e for x, y, e in parts]
        return Reduced(
            scaling.all_decoded(sums, given.units, given.leaves),
            scaling.taken_out(residuals, given.units, given.leaves),
            list(ready.states),
        )

    def start(self, job: Job, given: Operands) -> jax.Array:
        return job.exchange.start(*self._call(job, given), given.ticket)

    def _call(self, job: Job, given: Operands) -> tuple[Call, Sent]:
        assert self.collective is not None
        call = job.call(self.collective, self.layout(job.leaves, job.axes.world))
        return call, Sent(self.words(job, given), given.leaves, given.units)

    def words(self, job: Job, given: Operands) -> Words:
        """Returns what a fused call draws its noise from (`Sent`)."""
        raise NotImplementedError

    @abc.abstractmethod
    def rows(self, job: Job, given: Operands) -> Rows:
        """Runs the steps between preparing the leaves and the last decoding."""

    @abc.abstractmethod
    def rows_bytes(self, leaves: tuple[CodedLeaf, ...], world: int) -> int:
        """Bytes of `rows` of these leaves over `world` ranks."""

    @abc.abstractmethod
    def sums(self, job: Job, rows: jax.Array, given: Operands) -> list[jax.Array]:
        """The sums, with the shapes and dtypes of the leaves that are given."""


class OfWholes(Reduction):
    """A reduction of one phase, in which payloads of whole leaves travel once."""

    def layout(self, leaves: tuple[CodedLeaf, ...], world: int) -> Layout | None:
        return whole_code(leaves).layout

    def bytes_sent(self, leaves: tuple[CodedLeaf, ...], world: int) -> int:
        return (world - 1) * whole_code(leaves).row_bytes


class OfRows(OfWholes):
    """Half of an all-reduce: nothing is added up twice.

    It takes every code of bytes, since no leaf is cut.
    """

    def refusal(self, compressor: Compressor) -> str | None:
        if isinstance(compressor, PayloadCompressor):
            return None
        return (
            "it sends numbers that the ranks sum, but this call sends each rank a different row; "
            "use a compressor that sends bytes, such as Quantize"
        )


def largest_error(error_bound: Callable[[jax.Array], jax.Array], size: jax.Array) -> jax.Array:
    """Returns the most that encoding may lose of any value, if magnitudes are at most `size`.

    All that is known of such values is that none is larger than the largest of `size`.
    """
    return error_bound(widest(size)).max()


def widest(size: jax.Array) -> jax.Array:
    """Returns values of the widest range among those whose magnitudes are at most `size`."""
    signs = jnp.where(jnp.arange(size.size) % 2 == 0, 1.0, -1.0).reshape(size.shape)
    return signs * size.max()


def sum_of_bounds(compressor: PayloadCompressor, x: jax.Array) -> jax.Array:
    """Returns the largest possible error of the sum of all ranks' decoded values."""
    return sum(
        (compressor.error_bound(row) for row in x), start=jnp.zeros(x.shape[1:], jnp.float32)
    )
