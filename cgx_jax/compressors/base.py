"""The compressor protocol."""

from __future__ import annotations

import abc
from collections.abc import Collection, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp


class Compressor(abc.ABC):
    """A lossy (or exact) code for one leaf: static, hashable, equal by value.

    Subclasses are frozen dataclasses. A compressor knows no axis and no tree: it turns one array
    into a payload of `wire_bits` bits and back. The exchange is chosen from its class attributes:

    * `lossless`: decode(encode(x)) == x always. Exact leaves skip the codec.
    * `unbiased`: the expectation of decode(encode(x)) is x.
    * `chunkable`: any run of a leaf's values can be encoded by itself, so a leaf may be cut into
      one chunk a rank (scatter-reduce-allgather). Sparse and low-rank codes are not.
    * `needs_key`: `encode` takes a key for its randomness.

    State (momenta, low-rank factors) is a pytree that `init` makes and `encode` returns anew;
    stateless compressors use the empty tuple. No reduction keeps state yet, so each refuses a
    compressor whose `init` makes an array. Reductions encode fp32 values, except for `Quantize`,
    and all-gathers values of the leaf's dtype. Terms after GRACE (Xu et al., ICDCS 2021).
    """

    lossless: ClassVar[bool] = False
    chunkable: ClassVar[bool] = True

    @property
    @abc.abstractmethod
    def unbiased(self) -> bool:
        """Whether the expectation of decode(encode(x)) is x."""

    @property
    def needs_key(self) -> bool:
        """Whether `encode` needs a key."""
        return False

    @property
    def shares_noise(self) -> bool:
        """Whether ranks take their noise from one source, each another part, instead of apart."""
        return False

    @property
    def block_size(self) -> int | None:
        """How many values share one code; None where a leaf is coded as a whole."""
        return None

    @property
    def codec_work(self) -> frozenset[str]:
        """What encoding takes time for beyond plain rounding: "noise", "rotation"."""
        return frozenset({"noise"} if self.needs_key else ())

    @abc.abstractmethod
    def supports(self, dtype: Any) -> bool:
        """Whether values of `dtype` can be encoded; others are reduced exactly."""

    @property
    def width(self) -> int:
        """Whole bits per value, 1 or more: how solvers, logs and metrics name this compressor.

        By default those of the payload of fp32[1024, 1024], rounded. A subclass whose values have
        codes of one size states that size, without metadata.
        """
        return max(1, round(self.wire_bits((1024, 1024)) / 2**20))

    @classmethod
    def squared_errors(cls, candidates: Sequence[Any], rows: jax.Array, filled: Any) -> jax.Array:
        """What each of `candidates`, all of this class, loses of `rows`: fp32[rows, candidates].

        A row of fp32[rows, ...] is whole blocks or a whole leaf. The sum of squared errors is over
        its first `filled` values; the others are copies of the last. By default every row is
        encoded and decoded, with a constant key of its own where one is needed: one draw per row
        stands for the expectation. A subclass may compute all candidates together.
        """

        def lost(compressor: Any, row: jax.Array, key: jax.Array) -> jax.Array:
            state = compressor.init(row.shape, row.dtype)
            payload, _ = compressor.encode(row, state, key=key if compressor.needs_key else None)
            return jnp.ravel(compressor.decode(payload, row.shape, row.dtype) - row)

        keys = jax.random.split(jax.random.key(0), len(rows))
        here = jnp.arange(rows[0].size) < jnp.asarray(filled)[:, None]
        columns = []
        for c in candidates:
            error = jax.vmap(lambda row, key, c=c: lost(c, row, key))(rows, keys)
            columns.append(jnp.where(here, jnp.square(error), 0).sum(axis=1))
        return jnp.stack(columns, axis=1)

    @abc.abstractmethod
    def wire_bits(self, shape: int | Sequence[int], dtype: Any = jnp.float32) -> int:
        """Exact bits of the payload of a leaf of `shape` (or of that many values).

        A payload is whole bytes: where this is no multiple of 8, `encode` fills up the last one.
        """

    @abc.abstractmethod
    def error_bound(self, x: Any) -> jax.Array:
        """Largest possible |decode(encode(x)) - x|, one fp32 number a value, in x's shape."""

    @property
    def feedback_scale(self) -> float | None:
        """What decoded values are multiplied by under error feedback, to keep the memory bounded.

        1 for compressors that lose less than they are given; 1 / (1 + ω) for unbiased ones with
        E|decode(encode(x)) - x|² <= ω |x|², around which plain feedback diverges; None where no
        factor is known to be enough.
        """
        return 1.0

    def payload_bytes(self, shape: int | Sequence[int], dtype: Any = jnp.float32) -> int:
        """Bytes of the payload of a leaf of `shape` (or of that many values)."""
        return -(-self.wire_bits(shape, dtype) // 8)

    def init(self, shape: Sequence[int], dtype: Any) -> Any:
        """The state before the first call for a leaf of `shape` and `dtype`."""
        return ()

    @abc.abstractmethod
    def encode(self, x: Any, state: Any = (), *, key: Any = None) -> tuple[jax.Array, Any]:
        """`x` to (payload uint8[payload_bytes], new state)."""

    @abc.abstractmethod
    def decode(self, payload: Any, shape: Sequence[int], dtype: Any) -> jax.Array:
        """Payload to an array of `shape` and `dtype`; the payload is never trusted for sizes."""


def require_stateless(
    caller: str, compressor: Compressor, path: str, shape: Sequence[int], dtype: Any
) -> None:
    """Raises ValueError for a lossy compressor that needs to be kept from call to call."""
    if compressor.lossless or type(compressor).init is Compressor.init:
        return
    state = jax.tree.leaves(jax.eval_shape(lambda: compressor.init(shape, dtype)))
    if state:
        where = f" of leaf {path!r}" if path else ""
        raise ValueError(
            f"{caller}: {compressor}{where} has state ({len(state)} arrays from init), which no "
            "reduction keeps from step to step yet, so it would be lost; use a compressor without "
            "state. For what compression loses, sync_gradients has memory=ErrorFeedback()."
        )


def require_key(caller: str, compressors: Collection[Compressor], key: Any) -> bool:
    """Whether any compressor needs randomness; raises ValueError when there is none to give."""
    needy = [c for c in compressors if c.needs_key]
    if needy and key is None:
        raise ValueError(
            f"{caller}: {needy[0]} rounds at random and key is None; pass "
            "key=jax.random.key(n), the same on every rank and another one every step."
        )
    return bool(needy)
