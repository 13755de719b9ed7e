"""What an exchange is: how bytes travel between the ranks of a collective."""

from __future__ import annotations

import abc
import dataclasses
import functools
import warnings
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol, TypeVar

import jax

from cgx_jax import _compat
from cgx_jax.axes import Axes
from cgx_jax.collective import Collective
from cgx_jax.exchanges.links import Link
from cgx_jax.kernels.primitives import Sent
from cgx_jax.kernels.scaling import Residuals
from cgx_jax.kernels.scopes import Scoped
from cgx_jax.kernels.wire import Layout


class _Named(Protocol):
    shorthand: ClassVar[str]


N = TypeVar("N", bound=_Named)


def by_name(caller: str, given: object, kind: type[N], choices: Iterable[N], example: str) -> N:
    """Returns the choice that a name stands for, or an instance of `kind` unchanged.

    `caller` begins error messages. Raises ValueError for an unknown name, TypeError for anything
    that is neither a name nor an instance.
    """
    if isinstance(given, kind):
        return given
    option, known = kind.__name__.lower(), {choice.shorthand: choice for choice in choices}
    if not isinstance(given, str):
        article = "an" if option.startswith(tuple("aeiou")) else "a"
        raise TypeError(
            f"{caller}: {option}={given!r} is not {article} {option}; pass one of {list(known)} or "
            f"an instance such as {example}."
        )
    if given not in known:
        raise ValueError(f"{caller}: {option}={given!r} is unknown; use one of {list(known)}.")
    return known[given]


class Least(NamedTuple):
    """The size from which on a fusion buffer is compressed while no profile is active.

    That is `nbytes` / (1 - share / even) uncompressed bytes, where `share` is the payload's share
    of them. `nbytes` is the limit for a negligible payload. If the share is `even` or more, no size
    is compressed.
    """

    nbytes: float
    even: float


@dataclasses.dataclass(frozen=True)
class Call:
    """What a fused call computes: static and hashable.

    `name` is the call that the user wrote, which begins error messages. `layout` is that of the
    leaves, in chunks for an all-reduce; for a reduce-scatter, that of one row. Sums over `axes` are
    divided by `divisor`. `residual` asks for what this rank lost. If `in_place`, sums may take the
    leaves' memory (`Job`). `number` tells apart the calls that share a ticket (`Exchange.start`).
    """

    name: str
    collective: Collective
    layout: Layout
    axes: Axes
    divisor: float = 1
    residual: bool = False
    in_place: bool = False
    number: int = 0


class Fused(NamedTuple):
    """What a fused call returns, one entry per leaf.

    `sums` are, for an all-gather, every rank's leaf: [world, ...]. `residuals` are None unless
    asked for.
    """

    sums: list[jax.Array]
    residuals: Residuals

    @classmethod
    def of(cls, call: Call, results: Sequence[jax.Array]) -> Fused:
        """Parts the results of a call's primitive."""
        count = len(call.layout.slots)
        return cls(list(results[:count]), list(results[count:]) if call.residual else None)


class Exchange(Scoped, abc.ABC):
    """A way for payloads to travel: static, hashable, equal by value; it knows no compressor.

    `can` holds what an exchange provides. "scatter", "gather" and "permute" are methods that move
    rows of bytes, and "sum" is XLA's own sum of numbers. The names of a `Collective` are those that
    `fused` does in one call. "start" is for an all-reduce or a gather-sum that a later program
    finishes. Those that move bytes take
    `name`, the call that the user wrote, which begins error messages. `require` raises ValueError
    if the exchange does not work.
    """

    shorthand: ClassVar[str]
    can: ClassVar[frozenset[str]]
    scopes: ClassVar[dict[str, str]] = dict.fromkeys(
        ("scatter", "gather", "permute", "sum"), "exchange"
    )
    tuned: ClassVar[tuple[str, ...]] = ()  # the options that `cgx_jax.tune` chooses

    @abc.abstractmethod
    def missing(self, axes: Sequence[str] = ()) -> str | None:
        """Returns why no program can use it here, with the remedy, or None.

        `axes`, if any are named, are the axes that it should reduce over.
        """

    @abc.abstractmethod
    def here(self) -> bool:
        """Whether it is for devices like those of this process; loads nothing."""

    def usable(self, axes: Sequence[str] = ()) -> bool:
        """Whether `exchange="auto"` may take it over `axes`; loads nothing."""
        return self.here() and self.missing(axes) is None

    def least(self, link: Link | None = None) -> Least | None:
        """Returns the size from which it beat `lax.psum` on all links tried, on this platform.

        `link` is the slowest between the ranks, if known. If the result is None, `exchange="auto"`
        takes this exchange only where a profile measured it.
        """
        return None

    def require(self, name: str, axes: Sequence[str]) -> None:
        """Makes it ready for calls over `axes`; raises ValueError if it does not work."""
        problem = self.missing(axes)
        if problem is not None:
            raise ValueError(f"{name}: exchange={self.shorthand!r} does not work here: {problem}.")
        config: Any = jax.config
        caches = config.jax_compilation_cache_dir and config.jax_enable_compilation_cache
        if caches and jax.device_count() > 1 and _compat.platform() == "cpu":
            _warn_of_cached_programs()

    def scatter(self, name: str, rows: jax.Array, axes: Axes) -> jax.Array:
        """[world, n], row r for rank r -> [world, n], row r from rank r.

        Rows are u8, or f32 for sums inside a node.
        """
        raise NotImplementedError

    def gather(self, name: str, row: jax.Array, axes: Axes) -> jax.Array:
        """u8[n] of every rank -> u8[world, n], the same on all, and typed so under check_vma."""
        raise NotImplementedError

    def permute(
        self, name: str, row: jax.Array, axes: Axes, pairs: Sequence[tuple[int, int]]
    ) -> jax.Array:
        """u8[n] from one rank to another, for each (source, destination) in `pairs`.

        Each rank is a source at most once, and a destination at most once. A rank that receives
        nothing gets zeros.
        """
        raise NotImplementedError

    def fused(self, call: Call, sent: Sent) -> Fused:
        """Makes a call that encodes, sends, reduces and decodes.

        The bytes sent, and the results, are those of the kernels around `scatter` and `gather`:
        an all-reduce encodes chunks, and its sums again; a gather-sum adds up all payloads, this
        rank's own among them; a reduce-scatter adds up this rank's own row as it is.

        The words of `sent` are uint32[2, 2] for the phases of an all-reduce, uint32[2] for a
        gather-sum or an all-gather, uint32[world, 2] for the rows of a reduce-scatter. The axes
        say what rank this is.
        """
        raise NotImplementedError

    def start(self, call: Call, sent: Sent, ticket: Any) -> jax.Array:
        """Starts an all-reduce or a gather-sum, and returns its ticket, uint32[2].

        The call goes on while this program and later ones run. `ticket` is zeros, or that of
        another call with which this one shares it.
        """
        raise NotImplementedError

    def finish(self, call: Call, sent: Sent, ticket: Any) -> Fused:
        """Returns what the call that was started with the same operands returns.

        If this process knows no such call, as after a restart, it makes the call now. All ranks of
        the call must then do so, and all do if they run the same programs on states of one step.
        """
        raise NotImplementedError


@functools.cache
def _warn_of_cached_programs() -> None:
    """Warns once that ranks may hang or crash: XLA forgets the order of cached collectives."""
    warnings.warn(
        "jax_compilation_cache_dir is set. XLA on CPUs runs the collectives of a cached program in "
        "an order that differs between ranks, so ranks may hang, crash, or abort in gloo. Call "
        'jax.config.update("jax_enable_compilation_cache", False) in programs that use several '
        "CPU devices.",
        RuntimeWarning,
        stacklevel=2,
    )
