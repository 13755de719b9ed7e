"""How a fusion buffer becomes bytes and back: in chunks, or whole.

A reduction uses one of two codes without knowing what is inside. A family of compressors may
provide kernels that handle a whole buffer in one call. `buffers` has the generic codes for all
other families.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from cgx_jax._types import Shaped, Words
from cgx_jax.kernels.primitives import Sent
from cgx_jax.kernels.scaling import Residuals
from cgx_jax.kernels.scopes import Scoped
from cgx_jax.kernels.units import Units
from cgx_jax.kernels.wire import Layout

Arrays = Sequence[jax.Array]


class ChunkCode(Scoped, abc.ABC):
    """A fusion buffer cut into one chunk per rank; rows are u8[world, row_bytes].

    Units are None if no leaf has any. The fused calls of exchanges take `layout`. It is None if
    there are no kernels for the buffer.
    """

    layout: Layout | None = None
    scopes: ClassVar[dict[str, str]] = {"encode": "encode", "reduce": "reduce", "decode": "decode"}

    @property
    @abc.abstractmethod
    def row_bytes(self) -> int:
        """Bytes that a rank sends to each other rank in the first phase."""

    @property
    def sum_bytes(self) -> int:
        """Bytes of a chunk's sum, which its owner sends to every other rank."""
        return self.row_bytes

    def error_bounds(self, bound: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
        """Returns `bound`, a compressor's, of a leaf that this code cuts, in its shape."""
        return bound(x)

    @abc.abstractmethod
    def encode(self, sent: Sent, *, residual: bool) -> tuple[jax.Array, Residuals]:
        """Encodes leaves to rows, row r for rank r's chunk; returns (rows, residuals if asked)."""

    @abc.abstractmethod
    def reduce(
        self, sent: Sent, rows: jax.Array, divisor: float, residuals: Residuals
    ) -> tuple[jax.Array, Residuals]:
        """Reduces the rows from all ranks to the payload of this rank's chunk, u8[sum_bytes].

        Returns (payload, residuals). If `residuals` are not None, this rank's chunk of them gets
        `divisor` times what encoding the sum lost.
        """

    @abc.abstractmethod
    def decode(
        self, rows: jax.Array, like: Sequence[Shaped], units: Units | None
    ) -> list[jax.Array]:
        """Decodes every chunk's payload to leaves with the shapes and dtypes of `like`."""


class WholeCode(Scoped, abc.ABC):
    """A fusion buffer of whole leaves: one payload, u8[row_bytes].

    The fused calls of exchanges take `layout` and the result of `words`. `layout` is None without
    kernels.
    """

    layout: Layout | None = None
    scopes: ClassVar[dict[str, str]] = {
        "encode": "encode",
        "sum": "reduce",
        "accumulate": "reduce",
        "decode": "decode",
    }

    @property
    @abc.abstractmethod
    def row_bytes(self) -> int:
        """Bytes of the payload."""

    @abc.abstractmethod
    def encode(self, sent: Sent, *, residual: bool) -> tuple[jax.Array, Residuals]:
        """Encodes leaves to the payload. Returns (payload, residuals if asked for).

        Compressors that share noise get the same words on all ranks.
        """

    @abc.abstractmethod
    def sum(
        self, rows: jax.Array, like: Sequence[Shaped], units: Units | None, divisor: float
    ) -> list[jax.Array]:
        """Decodes payloads, u8[ranks, row_bytes], sums them in fp32 and rank order, and divides."""

    @abc.abstractmethod
    def accumulate(
        self, rank: jax.Array, rows: jax.Array, own: Arrays, divisor: float
    ) -> list[jax.Array]:
        """Adds the other ranks' decoded payloads to the exact leaves `own`, as `sum` adds.

        `rows` are u8[ranks, row_bytes]. A code whose ranks must weigh alike adds up all payloads,
        and returns the sum as it represents it (`PayloadCompressor.of_sums`).
        """

    @abc.abstractmethod
    def decode(self, rows: jax.Array, like: Sequence[Shaped]) -> list[jax.Array]:
        """Decodes every payload, u8[ranks, row_bytes], to [ranks, ...] of each leaf."""

    def words(self, seed: Words, rank: ArrayLike) -> Words:
        """Returns the words that a fused call on this rank draws its noise from, uint32[2]."""
        raise NotImplementedError


def folded(seed: Words, number: ArrayLike) -> jax.Array:
    """Derives a separate seed for `number`, uint32[2]."""
    return jax.random.bits(jax.random.fold_in(key_of(seed), number), (2,), jnp.uint32)


def key_of(seed: Words) -> jax.Array:
    """Returns the random key of a seed."""
    return jax.random.wrap_key_data(jnp.asarray(seed), impl="threefry2x32")
