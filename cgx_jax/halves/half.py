"""What each rank sends and receives for one leaf, in a reduce-scatter and in an all-gather."""

from __future__ import annotations

import abc
import dataclasses
import functools
from collections.abc import Sequence
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax import lax

from cgx_jax import _compat, debug
from cgx_jax._types import Key, Pytree
from cgx_jax.axes import Axes, cast, divided, sum_of_rows
from cgx_jax.compressors import PayloadCompressor
from cgx_jax.compressors.base import require_key
from cgx_jax.compressors.buffers import row_code
from cgx_jax.compressors.codes import RowCode
from cgx_jax.exchanges import Exchange
from cgx_jax.kernels.primitives import NO_RANK
from cgx_jax.leaves import sum_dtype


def where_of(name: str, path: str) -> str:
    """Returns how error messages name a leaf."""
    return f"{name}: leaf {path!r}" if path else name


@dataclasses.dataclass(frozen=True)
class Half(abc.ABC):
    """The static, hashable description of one leaf's part in a call.

    `number` gives the leaf its own noise, different from other leaves'. It is None for a bare
    array. `sums` says whether the results are sums over the ranks.
    """

    name: str
    path: str
    compressor: PayloadCompressor
    axes: Axes
    dimension: int
    tiled: bool
    number: int | None

    sums: ClassVar[bool]
    call: ClassVar[str]  # the exchange's capability to do the whole half in one call
    needs: ClassVar[str]  # the capability that it needs otherwise

    @staticmethod
    @abc.abstractmethod
    def place(
        where: str, shape: tuple[int, ...], world: int, dimension: int, tiled: bool
    ) -> tuple[int, tuple[int, ...]]:
        """Returns the dimension as an index of 0 or more, and the shape of the whole leaf."""

    @abc.abstractmethod
    def exactly(self, x: jax.Array, *, divisor: int = 1) -> jax.Array:
        """Returns the exact result, from `lax`; sums run in `sum_dtype` until they are divided."""

    def tangent(self, t: jax.Array) -> jax.Array:
        """Returns the exact result of a tangent; transposed, its sums run in `sum_dtype` too."""
        return self.exactly(t)

    @abc.abstractmethod
    def key(self, key: Key) -> Key:
        """Returns the key from which this rank draws the leaf's noise; None if it draws none."""

    @abc.abstractmethod
    def send(self, key: Key, x: jax.Array) -> jax.Array:
        """Returns the payload, u8[n], or u8[world, n] with one row per rank."""

    @abc.abstractmethod
    def move(self, exchange: Exchange, payload: jax.Array) -> jax.Array:
        """Moves the joined payloads of a message; returns u8[world, n], row r from rank r."""

    @abc.abstractmethod
    def receive(self, payloads: jax.Array, x: jax.Array) -> jax.Array:
        """Returns the result from every rank's payload, u8[world, n], and this rank's operand."""

    @abc.abstractmethod
    def fused(self, exchange: Exchange, key: Key, x: jax.Array) -> jax.Array:
        """Returns the same result by the exchange's own single call."""

    def code(self, shape: int | Sequence[int]) -> RowCode:
        """Returns the code of rows of this shape or size."""
        return row_code(self.compressor, shape)

    def in_one_call(self, exchange: Exchange, size: int) -> bool:
        """Returns whether an exchange handles rows of `size` values in a single call."""
        return self.call in exchange.can and self.code(size).layout is not None

    def _noise(self, key: Key, *, shared: bool) -> Key:
        if not require_key(where_of(self.name, self.path), [self.compressor], key):
            return None
        assert key is not None
        own = key if shared else jax.random.fold_in(key, self.axes.index())
        return own if self.number is None else jax.random.fold_in(own, self.number)


class PsumScatter(Half):
    """A reduce-scatter: row r of a leaf goes to rank r, which adds up the rows that it receives."""

    sums = True
    call, needs = "reduce_scatter", "scatter"

    @staticmethod
    def place(
        where: str, shape: tuple[int, ...], world: int, dimension: int, tiled: bool
    ) -> tuple[int, tuple[int, ...]]:
        rank = len(shape)
        if not -rank <= dimension < rank:
            raise ValueError(
                f"{where}: scatter_dimension={dimension} is out of range; the operand is "
                f"{list(shape)}, with {rank} dimensions."
            )
        dimension %= rank
        length = shape[dimension]
        if length % world if tiled else length != world:
            need = f"a multiple of the world size {world}" if tiled else f"{world}, the world"
            raise ValueError(
                f"{where}: dimension {dimension} of {list(shape)} has length {length}, which must "
                f"be {need}" + ("; pad it." if tiled else " size; or pass tiled=True.")
            )
        return dimension, shape

    def exactly(self, x: jax.Array, *, divisor: int = 1) -> jax.Array:
        total = lax.psum_scatter(
            cast(x, sum_dtype(x.dtype)),
            self.axes.names,
            scatter_dimension=self.dimension,
            axis_index_groups=self.axes.groups,
            tiled=self.tiled,
        )
        return divided(total, divisor, x.dtype)

    def key(self, key: Key) -> Key:
        return self._noise(key, shared=False)

    def rows(self, x: jax.Array) -> jax.Array:
        """Cuts a leaf into rows, [world, ...]; rank r adds up row r of all ranks."""
        d, world = self.dimension, self.axes.world
        split = x.reshape(*x.shape[:d], world, x.shape[d] // world, *x.shape[d + 1 :])
        return jnp.moveaxis(split, d, 0)

    def own(self, x: jax.Array) -> jax.Array:
        """Returns this rank's row."""
        out: jax.Array = lax.dynamic_index_in_dim(self.rows(x), self.axes.rank(), 0, keepdims=False)
        return out

    def send(self, key: Key, x: jax.Array) -> jax.Array:
        rows = self.rows(x)
        return self.code(rows.shape[1:]).encode(key, rows)

    def move(self, exchange: Exchange, payload: jax.Array) -> jax.Array:
        return exchange.scatter(self.name, payload, self.axes)

    def receive(self, payloads: jax.Array, x: jax.Array) -> jax.Array:
        own = self.own(x)
        code = self.code(own.shape)
        if self.compressor.lossless:
            # One operation for all ranks: `accumulate` would add one per rank for each small leaf.
            every = code.decode(payloads, own.shape, jnp.float32)
            return self._result(sum_of_rows(every).astype(x.dtype))
        if self.compressor.owner_exact:
            return self._result(code.accumulate(self.axes.rank(), payloads, own, 1))
        zeros = jnp.zeros(own.shape, own.dtype)
        total = code.accumulate(jnp.int32(NO_RANK), payloads, zeros, 1)
        return self._result(self.settled(total))

    def settled(self, total: jax.Array) -> jax.Array:
        """Returns the sum in the form of an all-reduce's: for votes, the sign of the majority."""
        if self.compressor.owner_exact:
            return total
        code = self.compressor.of_sums(self.axes.world)
        return code.decode(code.encode(total), total.shape, total.dtype)

    def encoded(self, shape: tuple[int, ...]) -> jax.Array:
        """Marks the values of a leaf that are encoded, bool.

        They are all values but this rank's own row, if it adds that row up exactly. Dimensions of
        the mask other than the one that is cut have length 1.
        """
        d, world = self.dimension, self.axes.world
        own = self.axes.rank() if self.compressor.owner_exact else NO_RANK
        here = jnp.arange(shape[d], dtype=jnp.int32) // (shape[d] // world) != own
        return here.reshape([-1 if i == d else 1 for i in range(len(shape))])

    def lost(self, sent: jax.Array, x: jax.Array) -> jax.Array:
        """Returns what `x` loses in the payload `sent`, in the shape of `x`."""
        rows = self.rows(x)
        back = self.code(rows.shape[1:]).decode(sent, rows.shape[1:], rows.dtype)
        lost = jnp.moveaxis(rows - back, 0, self.dimension).reshape(x.shape)
        return jnp.where(self.encoded(x.shape), lost, 0)

    def fused(self, exchange: Exchange, key: Key, x: jax.Array) -> jax.Array:
        rows, world = self.rows(x), self.axes.world
        code = self.code(rows.shape[1:])
        assert code.layout is not None
        words = code.words(key, world)
        return self._result(exchange.reduce_scatter(self.name, words, rows, code.layout, self.axes))

    def _result(self, own: jax.Array) -> jax.Array:
        return own if self.tiled else own.squeeze(self.dimension)


class AllGather(Half):
    """An all-gather: every leaf goes to all ranks."""

    sums = False
    call, needs = "all_gather", "gather"

    @staticmethod
    def place(
        where: str, shape: tuple[int, ...], world: int, dimension: int, tiled: bool
    ) -> tuple[int, tuple[int, ...]]:
        rank = len(shape) if tiled else len(shape) + 1
        if not -rank <= dimension < rank:
            raise ValueError(
                f"{where}: axis={dimension} is out of range; the operand is {list(shape)}, and the "
                f"result has {rank} dimensions."
            )
        d = dimension % rank
        if tiled:
            return d, (*shape[:d], world * shape[d], *shape[d + 1 :])
        return d, (*shape[:d], world, *shape[d:])

    def exactly(self, x: jax.Array, *, divisor: int = 1) -> jax.Array:
        narrow = jnp.issubdtype(x.dtype, jnp.floating) and sum_dtype(x.dtype) != x.dtype
        return _gathered(self, x) if narrow else self.gathered(x)

    def tangent(self, t: jax.Array) -> jax.Array:
        # The transpose of a gather is a sum, in the dtype of what is gathered.
        return cast(self.gathered(cast(t, sum_dtype(t.dtype))), t.dtype)

    def gathered(self, x: jax.Array) -> jax.Array:
        """Returns `lax.all_gather` of `x`."""
        # XLA's gather of int2 writes past the end of its result.
        sent = cast(x, sum_dtype(x.dtype)) if x.dtype.name in ("int2", "uint2") else x
        names, groups = self.axes.names, self.axes.groups
        every = lax.all_gather(
            sent, names, axis=self.dimension, axis_index_groups=groups, tiled=self.tiled
        )
        return cast(every, x.dtype)

    def key(self, key: Key) -> Key:
        # Nothing is added up here, so ranks may draw the same noise without loss.
        return self._noise(key, shared=self.compressor.shares_noise)

    def send(self, key: Key, x: jax.Array) -> jax.Array:
        with jax.named_scope("encode"):
            return self.compressor.encode(x, key=key)

    def move(self, exchange: Exchange, payload: jax.Array) -> jax.Array:
        rows = exchange.gather(self.name, payload, self.axes)
        # Typed like the result of lax.all_gather, as varying, though all ranks hold the same.
        return _compat.vary_over(rows, self.axes.varying())

    def receive(self, payloads: jax.Array, x: jax.Array) -> jax.Array:
        return self._result(self.code(x.shape).decode(payloads, x.shape, x.dtype))

    def fused(self, exchange: Exchange, key: Key, x: jax.Array) -> jax.Array:
        code = self.code(x.shape)
        assert code.layout is not None
        words = code.words(key, None)
        return self._result(exchange.all_gather(self.name, words, x, code.layout, self.axes))

    def _result(self, every: jax.Array) -> jax.Array:
        debug.compare(self.name, self.axes, [every])
        stacked, d, shape = jnp.moveaxis(every, 0, self.dimension), self.dimension, every.shape[1:]
        if not self.tiled:
            return stacked
        return stacked.reshape(*shape[:d], self.axes.world * shape[d], *shape[d + 1 :])


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _gathered(half: AllGather, x: jax.Array) -> jax.Array:
    return half.gathered(x)


@_gathered.defjvp
def _gathered_jvp(half: AllGather, primals: Pytree, tangents: Pytree) -> Pytree:
    return _gathered(half, *primals), half.tangent(*tangents)
