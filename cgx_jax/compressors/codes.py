"""How a fusion buffer becomes bytes, and back: in chunks, whole, or in rows.

A reduction asks for one of three codes and is blind to what is inside. A family of compressors
may bring kernels that treat a whole buffer in one call; `buffers` has what any other runs through.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from cgx_jax.kernels.primitives import Units
from cgx_jax.scopes import Scoped
from cgx_jax.wire import Layout

Arrays = Sequence[jax.Array]


class CodedLeaf(NamedTuple):
    """A leaf of a fusion buffer: static. `number`, its place in the tree, tells noise apart."""

    compressor: Any
    shape: tuple[int, ...]
    dtype: np.dtype
    number: int

    @property
    def size(self) -> int:
        return math.prod(self.shape)


class ChunkCode(Scoped, abc.ABC):
    """A fusion buffer cut into one chunk a rank; `seed` is uint32[2], rows u8[world, row_bytes].

    `units` has one entry per leaf, as in `primitives`, or none at all. `layout` is what fused calls
    of exchanges take, None where there are no kernels for the buffer.
    """

    layout: Layout | None = None
    scopes: ClassVar[dict[str, str]] = {"encode": "encode", "reduce": "reduce", "decode": "decode"}

    @property
    @abc.abstractmethod
    def row_bytes(self) -> int:
        """Bytes one rank sends to one other in the first phase."""

    @property
    def sum_bytes(self) -> int:
        """Bytes of a chunk's sum, which its owner sends to every other rank."""
        return self.row_bytes

    def error_bounds(self, compressor: Any, x: jax.Array) -> jax.Array:
        """`compressor.error_bound` of a leaf that is cut as here, in its shape."""
        return compressor.error_bound(x)

    @abc.abstractmethod
    def encode(
        self, seed: Any, rank: Any, leaves: Arrays, *, residual: bool, units: Units
    ) -> tuple[jax.Array, list[jax.Array]]:
        """Leaves to rows, row r the chunk that rank r owns; where asked what that lost."""

    @abc.abstractmethod
    def reduce(
        self,
        seed: Any,
        rank: Any,
        rows: jax.Array,
        leaves: Arrays,
        divisor: float,
        residuals: Arrays,
        *,
        units: Units,
    ) -> tuple[jax.Array, list[jax.Array]]:
        """Rows from every rank to the payload of this rank's chunk, u8[sum_bytes].

        To `residuals`, where given, the chunk of this rank gets `divisor` times what encoding the
        sum lost.
        """

    @abc.abstractmethod
    def decode(self, rows: jax.Array, like: Sequence[Any], *, units: Units) -> list[jax.Array]:
        """Every chunk's payload to leaves with the shapes and dtypes of `like`."""

    def find_in(
        self, rank: Any, rows: jax.Array, chunk: jax.Array, leaves: Arrays
    ) -> jax.Array | None:
        """What of `leaves` is not finite, i32[leaves, 2], as in `primitives`; None if unknown.

        The leaves were encoded to `rows`, but for the chunk of this rank, whose sum is `chunk`.
        """
        return None

    def find_out(self, rows: jax.Array, leaves: Arrays, *, units: Units) -> jax.Array | None:
        """The same of `leaves` that were decoded from `rows`."""
        return None


class WholeCode(Scoped, abc.ABC):
    """A fusion buffer of whole leaves: one payload, u8[row_bytes].

    `layout` and `words` are what fused calls of exchanges take; `layout` is None without kernels.
    """

    layout: Layout | None = None
    scopes: ClassVar[dict[str, str]] = {"encode": "encode", "sum": "reduce"}

    @property
    @abc.abstractmethod
    def row_bytes(self) -> int:
        """Bytes of the payload."""

    @abc.abstractmethod
    def encode(
        self,
        seed: Any,
        rank: Any,
        leaves: Arrays,
        *,
        residual: bool,
        units: Units,
    ) -> tuple[jax.Array, list[jax.Array]]:
        """Leaves to the payload, and what it lost where asked.

        `rank` is this rank's place; compressors that share noise are given one `seed` everywhere.
        """

    @abc.abstractmethod
    def sum(
        self, rows: jax.Array, like: Sequence[Any], divisor: float, *, units: Units
    ) -> list[jax.Array]:
        """Payloads u8[ranks, row_bytes] to the leaves' sums in fp32 and rank order, divided."""

    def find_in(self, payload: jax.Array, leaves: Arrays) -> jax.Array | None:
        """What of `leaves` is not finite, i32[leaves, 2], as in `primitives`; None if unknown.

        The leaves were encoded to `payload`.
        """
        return None

    def find_out(self, rows: jax.Array, leaves: Arrays, *, units: Units) -> jax.Array | None:
        """The same of `leaves` that are sums of the payloads in `rows`."""
        return None

    def words(self, seed: Any, rank: Any) -> Any:
        """What a fused call draws its noise from on this rank: uint32[2]."""
        raise NotImplementedError


class RowCode(Scoped, abc.ABC):
    """The rows of one leaf, each encoded like a leaf of its own.

    `layout` and `words` are what fused calls of exchanges take; `layout` is None without kernels.
    """

    layout: Layout | None = None
    scopes: ClassVar[dict[str, str]] = {
        "encode": "encode",
        "decode": "decode",
        "accumulate": "reduce",
    }

    @abc.abstractmethod
    def encode(self, key: Any, rows: jax.Array) -> jax.Array:
        """[rows, ...] to payloads u8[rows, n]."""

    @abc.abstractmethod
    def decode(self, payloads: jax.Array, shape: Sequence[int], dtype: Any) -> jax.Array:
        """Payloads u8[rows, n] to [rows, *shape]."""

    @abc.abstractmethod
    def accumulate(
        self, rank: Any, payloads: jax.Array, own: jax.Array, divisor: float
    ) -> jax.Array:
        """Own exact values plus the decoded payloads of the other ranks, in fp32 and rank order."""

    def words(self, key: Any, rows: int | None) -> Any:
        """What a fused call draws its noise from: uint32[rows, 2], or [2] for a single row."""
        raise NotImplementedError


def leaf_key(leaf: CodedLeaf, seed: Any) -> Any:
    """The key of one leaf of a buffer, or None where it needs none."""
    if not leaf.compressor.needs_key:
        return None
    return jax.random.fold_in(jax.random.wrap_key_data(seed, impl="threefry2x32"), leaf.number)


def folded(seed: Any, number: Any) -> jax.Array:
    """A seed of its own for `number`, uint32[2]."""
    key = jax.random.wrap_key_data(jnp.asarray(seed), impl="threefry2x32")
    return jax.random.bits(jax.random.fold_in(key, number), (2,), jnp.uint32)


def unit_of(units: Units, i: int) -> tuple[Any, Any] | None:
    """The units of leaf `i`, of as many entries as leaves or none."""
    return units[i] if units else None
