"""The protocols of a compressor: what every one states, and its two families."""

from __future__ import annotations

import abc
from collections.abc import Callable, Collection, Generator, Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from cgx_jax.axes import in_rank_order
from cgx_jax.compressors.codes import ChunkCode, CodedLeaf, RowCode, WholeCode


class Compressor(abc.ABC):
    """A code for one leaf, lossy or exact: static, hashable, equal by value.

    Subclasses are frozen dataclasses of one of two families. A `PayloadCompressor` turns a leaf
    into bytes and back. A `SummedCompressor` turns it into arrays whose sum over the ranks is the
    code of the ranks' sum. A compressor knows no axis and no tree. What it states decides how it is
    reduced:

    * `lossless`: nothing is lost, so exact leaves skip the code.
    * `reductions`: the names of the reductions that are right for it; the first is the default.
    * `unbiased`: the expectation of what comes back is what went in.
    * `needs_key`: it draws random numbers.
    * `shares_noise`: all ranks are given the same key, instead of one each.
    * `shares_state`: its state is made only of sums over the ranks, so all ranks hold the same.
    * `selects`: it sends a few values and drops the others entirely.
    * `carries_nonfinite`: if a leaf holds values that are not finite, so does what comes back.
      `debug_nonfinite` then looks only at results.

    State (momenta, low-rank factors) is a pytree that `init` makes and that every use returns anew.
    Stateless compressors have the empty tuple. `sync_gradients` keeps the state from step to step;
    calls that keep nothing raise ValueError for such a compressor. Leaves are f32, bf16 or f16 by
    default (`supports`). Terms after GRACE (Xu et al., ICDCS 2021).
    """

    lossless: ClassVar[bool] = False
    reductions: ClassVar[tuple[str, ...]]
    shares_state: ClassVar[bool] = False
    selects: ClassVar[bool] = False
    carries_nonfinite: ClassVar[bool] = False

    @property
    def unbiased(self) -> bool:
        """Whether the expectation of what comes back is what went in."""
        return False

    @property
    def needs_key(self) -> bool:
        """Whether a key is needed."""
        return False

    @property
    def shares_noise(self) -> bool:
        """Whether ranks take different parts of one common noise, instead of independent noise."""
        return False

    @property
    def block_size(self) -> int | None:
        """How many values share one code; None if a leaf is coded as a whole."""
        return None

    @property
    def codec_work(self) -> frozenset[str]:
        """What encoding spends time on beyond plain rounding: "noise", "rotation"."""
        return frozenset({"noise"} if self.needs_key else ())

    def supports(self, dtype: Any) -> bool:
        """Whether values of `dtype` can be encoded; others are reduced exactly."""
        return any(dtype == t for t in (jnp.float32, jnp.bfloat16, jnp.float16))

    @property
    def width(self) -> int:
        """Whole bits per value, 1 or more: how solvers, logs and metrics name this compressor.

        By default the payload bits of fp32[1024, 1024] per value, rounded. A subclass whose values
        have codes of one size states that size, without metadata.
        """
        return max(1, round(self.wire_bits((1024, 1024)) / 2**20))

    @classmethod
    def squared_errors(cls, candidates: Sequence[Any], rows: jax.Array, filled: Any) -> jax.Array:
        """The squared error of each of `candidates`, all of this class, on each of `rows`.

        Returns fp32[rows, candidates]. A row of fp32[rows, ...] is whole blocks or a whole leaf.
        The sum of squared errors is over its first `filled` values; the others are copies of the
        last. By default every row is approximated by itself. If a candidate needs a key, each row
        has a constant one: one draw per row stands for the expectation. A subclass may compute all
        candidates together.
        """

        def lost(compressor: Any, row: jax.Array, key: jax.Array) -> jax.Array:
            back = compressor.approximate(row, key=key if compressor.needs_key else None)
            return jnp.ravel(back - row)

        keys = jax.random.split(jax.random.key(0), len(rows))
        here = jnp.arange(rows[0].size) < jnp.asarray(filled)[:, None]
        columns = []
        for c in candidates:
            error = jax.vmap(lambda row, key, c=c: lost(c, row, key))(rows, keys)
            columns.append(jnp.where(here, jnp.square(error), 0).sum(axis=1))
        return jnp.stack(columns, axis=1)

    @abc.abstractmethod
    def approximate(self, x: jax.Array, *, key: Any = None) -> jax.Array:
        """What comes back for `x` on a single rank, from the state that `init` makes."""

    @abc.abstractmethod
    def wire_bits(self, shape: int | Sequence[int], dtype: Any = jnp.float32) -> int:
        """Exact bits of the code of a leaf of `shape` (or of that many values).

        Whole bytes travel, `payload_bytes`: if this is no multiple of 8, `encode` pads the last
        byte.
        """

    @abc.abstractmethod
    def error_bound(self, x: Any) -> jax.Array:
        """Largest possible error of what comes back for `x`: fp32, one number per value, x's shape.

        For a payload that is |decode(encode(x)) - x|. For summed arrays `x` is the ranks' sum.
        """

    @property
    def feedback_scale(self) -> float | None:
        """The factor on decoded values under error feedback that keeps the memory bounded.

        1 for compressors that lose less than they are given; 1 / (1 + ω) for unbiased ones with
        E|decode(encode(x)) - x|² <= ω |x|², around which plain feedback diverges; None if no factor
        is known to be enough.
        """
        return 1.0

    def wants(self, x: jax.Array, arrived: jax.Array) -> jax.Array | None:
        """Which of the values of `x` the code would send if it had room, bool like `x`.

        `arrived` marks those that it has sent. None for codes that always have room.
        """
        return None

    @property
    def has_rooms(self) -> bool:
        """Whether values may find no room in the payload."""
        return type(self).wants is not Compressor.wants

    def known_error(self, size: int) -> float | None:
        """The relative squared error of encoding a leaf of `size` values; None if it is not known.

        If a code states one, its decoded values are smaller by the same share on average.
        """
        return None

    def payload_bytes(self, shape: int | Sequence[int], dtype: Any = jnp.float32) -> int:
        """Bytes of the code of a leaf of `shape` (or of that many values)."""
        return -(-self.wire_bits(shape, dtype) // 8)

    def init(self, shape: Sequence[int], dtype: Any) -> Any:
        """The state before the first step for a leaf of `shape` and `dtype`."""
        return ()

    def has_state(self, shape: Sequence[int], dtype: Any) -> bool:
        """Whether `init` makes an array for such a leaf."""
        if type(self).init is Compressor.init:
            return False
        return bool(jax.tree.leaves(jax.eval_shape(lambda: self.init(shape, dtype))))


class PayloadCompressor(Compressor):
    """A compressor whose code is bytes: a payload of `wire_bits` bits, padded to whole bytes.

    A leaf is prepared as a whole, then encoded. `prepare` holds all that needs the whole leaf or
    the past: statistics, momenta. `encode` has no state. The reductions ask this of a code:

    * "scatter_gather" encodes one chunk of the leaf for each rank, so `encode` must take any run of
      values by itself.
    * "gather_sum" encodes whole leaves.
    * "ring" and "tree" encode sums over some of the ranks with the code of one rank's values.

    `owner_exact` says that the rank which adds up a chunk may add its own prepared values as they
    are, which makes the sum more exact. It is False if every rank must have the same weight, as in
    a vote; "ring" and "tree" then refuse the code. Reductions encode fp32 values unless the
    compressor brings kernels (`codes`). All-gathers encode values of the leaf's dtype. `encode`
    raises ValueError for a missing key.
    """

    reductions: ClassVar[tuple[str, ...]] = ("scatter_gather", "gather_sum", "ring", "tree")
    owner_exact: ClassVar[bool] = True

    def approximate(self, x: jax.Array, *, key: Any = None) -> jax.Array:
        x = jnp.asarray(x)
        if self.prepares:
            ready, _ = self.prepare(x.astype(jnp.float32), self.init(x.shape, x.dtype))
            return self.decode(self.encode(ready, key=key), x.shape, x.dtype)
        return self.decode(self.encode(x, key=key), x.shape, x.dtype)

    def prepare(self, x: jax.Array, state: Any) -> tuple[jax.Array, Any]:
        """What of a whole leaf is encoded, in its shape, and the new state; both fp32.

        `x` is one rank's leaf in fp32. By default it is encoded unchanged.
        """
        return x, state

    @property
    def prepares(self) -> bool:
        """Whether `prepare` does anything."""
        return type(self).prepare is not PayloadCompressor.prepare

    @abc.abstractmethod
    def encode(self, x: Any, *, key: Any = None) -> jax.Array:
        """Encodes `x`, an array of any shape: returns the payload, uint8[payload_bytes]."""

    @abc.abstractmethod
    def decode(self, payload: Any, shape: Sequence[int], dtype: Any) -> jax.Array:
        """Decodes a payload to an array of `shape` and `dtype`, without trusting it for sizes."""

    def decode_sum(self, payloads: jax.Array, shape: Sequence[int]) -> jax.Array:
        """The sum of the decoded payloads u8[ranks, n], in fp32 and rank order."""

        def add(total: jax.Array, _: Any, payload: jax.Array) -> jax.Array:
            total = total + self.decode(payload, tuple(shape), jnp.float32)
            # XLA would make one scatter of all ranks' values, which GPUs add in any order.
            return lax.optimization_barrier(total) if self.selects else total

        return in_rank_order(add, jnp.zeros(tuple(shape), jnp.float32), payloads)

    def of_sums(self, world: int) -> PayloadCompressor:
        """The code of a chunk's sum over `world` ranks, on its way from the owner to all others."""
        return self

    @classmethod
    def chunk_kernels(cls, leaves: tuple[CodedLeaf, ...], world: int) -> ChunkCode | None:
        """Code of this family for a fusion buffer, cut into chunks, in one call; or None."""
        return None

    @classmethod
    def whole_kernels(cls, leaves: tuple[CodedLeaf, ...]) -> WholeCode | None:
        """Code of this family for a fusion buffer of whole leaves, in one call; or None."""
        return None

    def row_kernels(self, size: int) -> RowCode | None:
        """Code for all rows of `size` values of a leaf, in one call; or None."""
        return None


class Summed(NamedTuple):
    """What the generator of a `SummedCompressor` returns; `total` and `own` are fp32.

    Both have the leaf's shape. `total` is the ranks' sum as the code gives it, alike on all ranks.
    Make it only from the received sums (and not from `zeros_like(x)`, whose type is this rank's).
    `own` is this rank's part of it: the sum of all ranks' `own` is `total`. `state` is the
    compressor's new state. A `total` that is typed as varying between ranks raises ValueError.
    """

    total: jax.Array
    own: jax.Array
    state: Any


class Together(NamedTuple):
    """What `rounds` may yield between two rounds to compute `function(x)`, which it then receives.

    Leaves that ask for the same function of the same shape and dtype share one call, under
    `jax.vmap`: a separate loop for each of many leaves would take long to compile.
    """

    function: Callable[[jax.Array], jax.Array]
    x: jax.Array


class Maxima(NamedTuple):
    """What `rounds` may yield as a round; it receives the arrays' maxima over the ranks.

    `arrays` have the same shapes and dtypes on every rank.
    """

    arrays: Sequence[jax.Array]


# What `rounds` yields, what it is sent, and what it returns.
Rounds = Generator[Sequence[jax.Array] | Together | Maxima, Any, Summed]


class SummedCompressor(Compressor):
    """A compressor whose code is numeric arrays that `lax.psum` adds, in one round or several.

    It is reduced by "sum_rounds". `rounds` is a generator that yields the arrays of a round,
    receives their sums, and returns `Summed`. Source: PowerSGD (Vogels et al., NeurIPS 2019).
    """

    reductions: ClassVar[tuple[str, ...]] = ("sum_rounds",)

    @abc.abstractmethod
    def rounds(self, x: jax.Array, state: Any, *, key: Any, world: int) -> Rounds:
        """A generator: yields the arrays of a round, and receives their sums over `world` ranks.

        `x` is fp32 in the leaf's shape. Every rank yields arrays of the same shapes and dtypes, in
        the same number of rounds. A round of `Maxima` receives maxima instead of sums. `Together`
        may be yielded in between. Returns `Summed`.
        """

    def summed_bytes(self, shape: Sequence[int], dtype: Any, world: int) -> int:
        """Bytes of all arrays that one of `world` ranks yields."""
        return self.payload_bytes(shape, dtype)

    def error_bound_of_sum(self, x: jax.Array) -> jax.Array:
        """`error_bound` of the ranks' sum, from every rank's values, f32[world, ...]."""
        return self.error_bound(x.sum(0))

    def approximate(self, x: jax.Array, *, key: Any = None) -> jax.Array:
        state = self.init(x.shape, x.dtype)
        end = alone(self.rounds(x.astype(jnp.float32), state, key=key, world=1))
        return end.total.reshape(x.shape).astype(x.dtype)


def alone(running: Rounds) -> Summed:
    """What `rounds` ends with on a single rank."""
    made = next(running)
    while True:
        answer: Any
        if isinstance(made, Together):
            answer = made.function(made.x)
        else:
            answer = [jnp.asarray(a) for a in (made.arrays if isinstance(made, Maxima) else made)]
        try:
            made = running.send(answer)
        except StopIteration as stop:
            return stop.value


def require_stateless(
    caller: str, compressor: Compressor, path: str, shape: Sequence[int], dtype: Any
) -> None:
    """Raises ValueError for a compressor whose state the caller would lose."""
    if compressor.has_state(shape, dtype):
        where = f" of leaf {path!r}" if path else ""
        raise ValueError(
            f"{caller}: {compressor}{where} has state, which this call cannot keep from step to "
            "step, so it would be lost; use cgx_jax.sync_gradients, which keeps it in its own "
            "state, or a compressor without state."
        )


def require_key(caller: str, compressors: Collection[Compressor], key: Any) -> bool:
    """Whether any compressor needs randomness; raises ValueError when there is none to give."""
    needy = [c for c in compressors if c.needs_key]
    if needy and key is None:
        raise ValueError(
            f"{caller}: {needy[0]} rounds at random and key is None; pass "
            "key=jax.random.key(n), the same on every rank and a new one in every step."
        )
    return bool(needy)
