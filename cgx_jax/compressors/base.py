"""The compressor protocols: what every compressor declares, and the two families."""

from __future__ import annotations

import abc
import math
from collections.abc import Callable, Generator, Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from cgx_jax._types import Key, Pytree
from cgx_jax.arguments import check_key
from cgx_jax.axes import in_rank_order
from cgx_jax.compressors.codes import ChunkCode, WholeCode


class Compressor(abc.ABC):
    """A code for one leaf, lossy or exact: static, hashable, equal by value.

    Subclasses are frozen dataclasses of one of two families. A `PayloadCompressor` turns a leaf
    into bytes and back. A `SummedCompressor` turns it into arrays whose sum over the ranks is the
    code of the ranks' sum. A compressor knows nothing of axes or trees. What it declares decides
    how it is reduced:

    * `lossless`: nothing is lost, so its leaves are reduced exactly and skip the code.
    * `reductions`: the names of the reductions that it allows; the first is the default.
    * `unbiased`: the expectation of a decoded value is the value itself.
    * `needs_key`: it draws random numbers.
    * `shares_noise`: all ranks get the same key instead of one key each.
    * `shares_state`: its state is computed only from sums over the ranks, so all ranks hold the
      same state.
    * `selects`: it sends a few values and drops the others entirely.
    * `owner_exact`: the rank that adds up a chunk may add its own values without encoding them,
      which makes the sum more accurate. False if all ranks must have the same weight, as in a vote.
    * `carries_nonfinite`: if a leaf holds non-finite values, so does the decoded leaf.
      `debug_nonfinite` then looks only at results.

    State (momenta, low-rank factors) is a pytree. `init` makes it, and every use returns a new one.
    Stateless compressors have the empty tuple. `sync_gradients` keeps the state from step to step;
    calls that keep no state raise ValueError for a compressor that has one. Leaves are f32, bf16 or
    f16 by default (`supports`). Terms follow GRACE (Xu et al., ICDCS 2021).
    """

    lossless: ClassVar[bool] = False
    reductions: ClassVar[tuple[str, ...]]
    shares_state: ClassVar[bool] = False
    selects: ClassVar[bool] = False
    owner_exact: ClassVar[bool] = True
    carries_nonfinite: ClassVar[bool] = False

    @property
    def unbiased(self) -> bool:
        """Whether the expectation of a decoded value is the value itself."""
        return False

    @property
    def needs_key(self) -> bool:
        """Whether the compressor needs a key for random numbers."""
        return False

    @property
    def shares_noise(self) -> bool:
        """Whether ranks take different parts of one common noise, instead of independent noise."""
        return False

    @property
    def block_size(self) -> int | None:
        """The number of values that are coded together; None if a leaf is coded as a whole."""
        return None

    @property
    def codec_work(self) -> frozenset[str]:
        """What encoding spends time on beyond plain rounding: "noise", "rotation"."""
        return frozenset({"noise"} if self.needs_key else ())

    def supports(self, dtype: DTypeLike) -> bool:
        """Whether values of `dtype` can be encoded; others are reduced exactly."""
        return any(dtype == t for t in (jnp.float32, jnp.bfloat16, jnp.float16))

    @property
    def width(self) -> int:
        """Whole bits per value, 1 or more: how solvers, logs and metrics name this compressor.

        By default this is the payload of fp32[1024, 1024] in bits per value, rounded. A subclass
        whose values all have codes of one size returns that size, without metadata.
        """
        return max(1, round(self.wire_bits((1024, 1024)) / 2**20))

    @classmethod
    def squared_errors(cls, candidates: Sequence[Any], rows: jax.Array, filled: Any) -> jax.Array:
        """The squared error of each of `candidates`, all of this class, on each of `rows`.

        Returns fp32[rows, candidates]. Each row of fp32[rows, ...] holds whole blocks or a whole
        leaf. Squared errors are summed over the first `filled` values of a row; its other values
        are copies of the last one. By default each row is approximated by itself. If a candidate
        needs a key, each row has a constant key, so one draw per row stands for the expectation. A
        subclass may compute all candidates together.
        """

        def lost(compressor: Any, row: jax.Array, key: jax.Array) -> jax.Array:
            back = compressor.approximate(row, key=key if compressor.needs_key else None)
            return jnp.ravel(back - row)

        keys = jax.random.split(jax.random.key(0), len(rows))
        here = jnp.arange(rows[0].size, dtype=jnp.int32) < jnp.asarray(filled)[:, None]
        columns = []
        for c in candidates:
            error = jax.vmap(lambda row, key, c=c: lost(c, row, key))(rows, keys)
            columns.append(jnp.where(here, jnp.square(error), 0).sum(axis=1))
        return jnp.stack(columns, axis=1)

    @abc.abstractmethod
    def approximate(self, x: jax.Array, *, key: Key = None) -> jax.Array:
        """Returns `x` as one rank encodes and decodes it, from the state that `init` makes."""

    @abc.abstractmethod
    def wire_bits(self, shape: int | Sequence[int], dtype: DTypeLike = jnp.float32) -> int:
        """Returns the exact bits of the code of a leaf of `shape` (or of that many values).

        Payloads travel as whole bytes (`payload_bytes`). If the bits are not a multiple of 8,
        `encode` pads the last byte.
        """

    @abc.abstractmethod
    def error_bound(self, x: ArrayLike) -> jax.Array:
        """Returns the largest possible error of each decoded value: fp32, in the shape of `x`.

        For a payload, the error is |decode(encode(x)) - x|. For summed arrays `x` is the ranks'
        sum.
        """

    @property
    def feedback_scale(self) -> float | None:
        """The factor on decoded values under error feedback that keeps the memory bounded.

        It is 1 for compressors that lose less than they are given. It is 1 / (1 + ω) for unbiased
        compressors with E|decode(encode(x)) - x|² <= ω |x|², around which plain feedback diverges.
        It is None if no factor is known to be enough.
        """
        return 1.0

    def wants(self, x: jax.Array, arrived: jax.Array) -> jax.Array | None:
        """Returns which values of `x` the code would send if it had room, bool in the shape of `x`.

        `arrived` marks the values that it has sent. Returns None for codes that always have room.
        """
        return None

    @property
    def has_rooms(self) -> bool:
        """Whether values may find no room in the payload."""
        return type(self).wants is not Compressor.wants

    def payload_bytes(self, shape: int | Sequence[int], dtype: DTypeLike = jnp.float32) -> int:
        """Bytes of the code of a leaf of `shape` (or of that many values)."""
        return -(-self.wire_bits(shape, dtype) // 8)

    def init(self, shape: Sequence[int], dtype: DTypeLike) -> Pytree:
        """The state before the first step for a leaf of `shape` and `dtype`."""
        return ()

    def prepare(self, x: jax.Array, state: Pytree) -> tuple[jax.Array, Pytree]:
        """Returns (what is encoded of a whole leaf, in the leaf's shape; the new state), both fp32.

        `x` is one rank's leaf in fp32. By default it is encoded unchanged.
        """
        return x, state

    @property
    def prepares(self) -> bool:
        """Whether `prepare` does anything."""
        return type(self).prepare is not Compressor.prepare

    def has_state(self, shape: Sequence[int], dtype: DTypeLike) -> bool:
        """Whether `init` makes any array for a leaf of `shape` and `dtype`."""
        if type(self).init is Compressor.init:
            return False
        return bool(jax.tree.leaves(jax.eval_shape(lambda: self.init(shape, dtype))))


class CodedLeaf(NamedTuple):
    """A leaf of a fusion buffer: static. `number`, its place in the tree, selects its noise."""

    compressor: Compressor
    shape: tuple[int, ...]
    dtype: np.dtype
    number: int

    @property
    def size(self) -> int:
        return math.prod(self.shape)


class PayloadCompressor(Compressor):
    """A compressor whose code is bytes: a payload of `wire_bits` bits, padded to whole bytes.

    A leaf is prepared as a whole, then encoded. `prepare` does all that needs the whole leaf or
    earlier steps, such as statistics and momenta. `encode` has no state. The reductions differ in
    what they require of a code:

    * "scatter_gather" encodes one chunk of the leaf for each rank, so `encode` must be able to
      encode any run of values by itself.
    * "gather_sum" encodes whole leaves.
    * "ring" and "tree" encode sums over some of the ranks with the same code as a single rank's
      values.

    "ring" and "tree" refuse a code that is not `owner_exact`. A chunk shorter than others is filled
    with its `filler`. Reductions encode fp32 values unless the compressor provides kernels
    (`codes`). `encode` raises ValueError for a missing key.
    """

    reductions: ClassVar[tuple[str, ...]] = ("scatter_gather", "gather_sum", "ring", "tree")

    def filler(self, chunk: jax.Array) -> jax.Array:
        """Returns what fills up a short chunk f32[n], n > 0: 0, or what changes no mean, f32[]."""
        return jnp.zeros((), jnp.float32)

    def approximate(self, x: jax.Array, *, key: Key = None) -> jax.Array:
        x = jnp.asarray(x)
        if self.prepares:
            ready, _ = self.prepare(x.astype(jnp.float32), self.init(x.shape, x.dtype))
            return self.decode(self.encode(ready, key=key), x.shape, x.dtype)
        return self.decode(self.encode(x, key=key), x.shape, x.dtype)

    @abc.abstractmethod
    def encode(self, x: ArrayLike, *, key: Key = None) -> jax.Array:
        """Encodes `x`, an array of any shape: returns the payload, uint8[payload_bytes]."""

    @abc.abstractmethod
    def decode(self, payload: jax.Array, shape: Sequence[int], dtype: DTypeLike) -> jax.Array:
        """Decodes a payload to an array of `dtype` and of the encoded array's `shape`.

        Takes no sizes from the payload.
        """

    def decode_sum(self, payloads: jax.Array, shape: Sequence[int]) -> jax.Array:
        """Decodes the payloads, u8[ranks, n], and adds them up in fp32 and in rank order."""

        def add(total: jax.Array, _: object, payload: jax.Array) -> jax.Array:
            total = total + self.decode(payload, tuple(shape), jnp.float32)
            # XLA would merge all ranks' values into one scatter, and a GPU adds those in any order.
            return lax.optimization_barrier(total) if self.selects else total

        return in_rank_order(add, jnp.zeros(tuple(shape), jnp.float32), payloads)

    def of_sums(self, world: int) -> PayloadCompressor:
        """Returns the code for a chunk's sum over `world` ranks, on its way to all others."""
        return self

    @classmethod
    def chunk_kernels(cls, leaves: tuple[CodedLeaf, ...], world: int) -> ChunkCode | None:
        """Returns the code that handles a whole chunked fusion buffer in one call, or None."""
        return None

    @classmethod
    def whole_kernels(cls, leaves: tuple[CodedLeaf, ...]) -> WholeCode | None:
        """Returns the code that handles a fusion buffer of whole leaves in one call, or None."""
        return None


class Summed(NamedTuple):
    """What the generator of a `SummedCompressor` returns; `total` and `own` are fp32.

    Both have the leaf's shape. `total` is the ranks' sum as the code represents it, the same on all
    ranks. Compute it only from the received sums, and not from `zeros_like(x)`, which has the type
    of this rank's own values. `own` is this rank's part of `total`: the sum of all ranks' `own` is
    `total`. `state` is the compressor's new state. A `total` that is typed as varying between ranks
    raises ValueError.
    """

    total: jax.Array
    own: jax.Array
    state: Pytree


class Together(NamedTuple):
    """What `rounds` may yield between two rounds to compute `function(x)`, which it then receives.

    Leaves that yield the same function with the same shape and dtype share one call under
    `jax.vmap`, because a separate loop for each of many leaves would take long to compile.
    """

    function: Callable[[jax.Array], jax.Array]
    x: jax.Array


class Maxima(NamedTuple):
    """A round of maxima: `rounds` may yield it and receives the arrays' maxima over the ranks.

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
    def rounds(self, x: jax.Array, state: Pytree, *, key: Key, world: int) -> Rounds:
        """A generator: yields the arrays of a round, and receives their sums over `world` ranks.

        `x` is fp32 in the leaf's shape. Every rank yields arrays of the same shapes and dtypes, in
        the same number of rounds. A round of `Maxima` receives maxima instead of sums. It may yield
        `Together` in between. Returns `Summed`.
        """

    def summed_bytes(self, shape: Sequence[int], dtype: DTypeLike, world: int) -> int:
        """Returns the bytes of all arrays that one of `world` ranks yields."""
        return self.payload_bytes(shape, dtype)

    def error_bound_of_sum(self, x: jax.Array) -> jax.Array:
        """Returns `error_bound` of the ranks' sum, given every rank's values, f32[world, ...]."""
        return self.error_bound(x.sum(0))

    def approximate(self, x: jax.Array, *, key: Key = None) -> jax.Array:
        state = self.init(x.shape, x.dtype)
        end = alone(self.rounds(x.astype(jnp.float32), state, key=key, world=1))
        return end.total.reshape(x.shape).astype(x.dtype)


def alone(running: Rounds) -> Summed:
    """Runs `rounds` on a single rank and returns its result."""
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


def require_key(caller: str, compressor: Compressor, key: Key) -> None:
    """Raises ValueError if a compressor needs a key and has none, TypeError for what is no key."""
    if compressor.needs_key and key is None:
        raise ValueError(
            f"{caller}: {compressor} rounds at random and key is None; pass "
            "key=jax.random.key(n), the same on every rank and a new one in every step."
        )
    check_key(caller, key)
