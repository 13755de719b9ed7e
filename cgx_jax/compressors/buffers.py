"""How a group of leaves becomes one row of bytes a rank, and back.

A codec joins a compressor to the order of steps in `collectives`, which is blind to it. There are
two: `QuantizeCodec` calls the kernels over all leaves at once; `ComposedCodec` runs any chunkable
compressor leaf by leaf through its protocol.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from cgx_jax.compressors import Compressor, Quantize
from cgx_jax.kernels import outside, primitives
from cgx_jax.kernels.primitives import Units
from cgx_jax.wire import Layout

Arrays = Sequence[jax.Array]


class Codec(Protocol):
    """The three sides of a fusion buffer; `seed` is uint32[2], `rank` int32, rows u8[world, n].

    `units` has one entry per leaf, as in `primitives`, or none at all.
    """

    @property
    def row_bytes(self) -> int:
        """Bytes one rank sends to one other in each of the two phases."""

    def encode(
        self, seed: Any, rank: Any, leaves: Arrays, *, residual: bool = False, units: Units = ()
    ) -> tuple[jax.Array, list[jax.Array]]:
        """Leaves to rows: row r holds the chunk that rank r owns; and where asked the residuals.

        A residual is what encoding a leaf lost, 0 in this rank's own chunk.
        """

    def reduce(
        self,
        seed: Any,
        rank: Any,
        rows: jax.Array,
        leaves: Arrays,
        divisor: float,
        residuals: Arrays = (),
        *,
        units: Units = (),
    ) -> tuple[jax.Array, list[jax.Array]]:
        """Rows from every rank and this rank's own values to its chunk's payload, u8[n].

        In `residuals`, where given, the chunk becomes `divisor` times what encoding it lost.
        """

    def decode(self, rows: jax.Array, like: Sequence[Any], *, units: Units = ()) -> list[jax.Array]:
        """Every chunk's payload to leaves with the shapes and dtypes of `like`."""


@dataclasses.dataclass(frozen=True)
class QuantizeCodec:
    """Quantized leaves, cut at bucket boundaries; one kernel call a phase."""

    layout: Layout

    @property
    def row_bytes(self) -> int:
        return self.layout.chunk_bytes

    def encode(
        self, seed: Any, rank: Any, leaves: Arrays, *, residual: bool = False, units: Units = ()
    ) -> tuple[jax.Array, list[jax.Array]]:
        return primitives.encode(
            seed, leaves, self.layout, rank=rank, residual=residual, units=units
        )

    def reduce(
        self,
        seed: Any,
        rank: Any,
        rows: jax.Array,
        leaves: Arrays,
        divisor: float,
        residuals: Arrays = (),
        *,
        units: Units = (),
    ) -> tuple[jax.Array, list[jax.Array]]:
        return primitives.reduce(
            seed,
            rank,
            rows,
            leaves,
            self.layout,
            divisor=divisor,
            residuals=residuals,
            units=units,
        )

    def decode(self, rows: jax.Array, like: Sequence[Any], *, units: Units = ()) -> list[jax.Array]:
        return primitives.decode(rows, self.layout, like, units=units)


@dataclasses.dataclass(frozen=True)
class ComposedCodec:
    """Leaves of any chunkable compressor, each padded to `world` equal runs of values."""

    compressors: tuple[Compressor, ...]
    sizes: tuple[int, ...]
    streams: tuple[int, ...]
    world: int

    def _run(self, size: int) -> int:
        return -(-size // self.world)

    @property
    def row_bytes(self) -> int:
        return sum(self._bytes())

    def _bytes(self) -> list[int]:
        return [
            c.payload_bytes(self._run(n)) for c, n in zip(self.compressors, self.sizes, strict=True)
        ]

    def _runs(self, x: jax.Array) -> jax.Array:
        """fp32[world, run]: both phases encode the same dtype, so their payloads are alike."""
        run = self._run(x.size)
        flat = jnp.ravel(x).astype(jnp.float32)
        return jnp.pad(flat, (0, run * self.world - x.size)).reshape(self.world, run)

    def _key(self, compressor: Compressor, seed: Any, number: int) -> Any:
        if not compressor.needs_key:
            return None
        return jax.random.fold_in(jax.random.wrap_key_data(seed, impl="threefry2x32"), number)

    def encode(
        self, seed: Any, rank: Any, leaves: Arrays, *, residual: bool = False, units: Units = ()
    ) -> tuple[jax.Array, list[jax.Array]]:
        rows, residuals = [], []
        for i, (c, x, s) in enumerate(zip(self.compressors, leaves, self.streams, strict=True)):
            unit = units[i] if units else None
            runs = self._runs(outside.multiply(x, unit, outside.IN))
            rows.append(encode_rows(c, self._key(c, seed, s), runs))
            if residual:
                lost = runs - _decode_rows(c, rows[-1], runs.shape[1:])
                lost = jnp.where((jnp.arange(self.world) == rank)[:, None], 0, lost)
                residuals.append(self._leaf(lost, x, unit))
        return jnp.concatenate(rows, axis=1), residuals

    def _split(self, rows: jax.Array) -> list[jax.Array]:
        return jnp.split(rows, np.cumsum(self._bytes())[:-1].tolist(), axis=1)

    def reduce(
        self,
        seed: Any,
        rank: Any,
        rows: jax.Array,
        leaves: Arrays,
        divisor: float,
        residuals: Arrays = (),
        *,
        units: Units = (),
    ) -> tuple[jax.Array, list[jax.Array]]:
        out, filled = [], []
        parts = zip(self.compressors, leaves, self.streams, self._split(rows), strict=True)
        for i, (c, x, s, part) in enumerate(parts):
            unit = units[i] if units else None
            inner = self._runs(outside.multiply(x, unit, outside.IN))
            own = jnp.take(inner, rank, axis=0)
            total = accumulate_rows(c, rank, part, own, divisor)
            out.append(c.encode(total, key=self._key(c, seed, s))[0])
            if residuals:
                lost = (total - c.decode(out[-1], total.shape, jnp.float32)) * np.float32(divisor)
                whole = jnp.zeros(inner.shape, jnp.float32).at[rank].set(lost)
                own_run = (jnp.arange(self.world) == rank)[:, None]
                mine = self._runs(self._leaf(whole, x, unit))
                filled.append(self._leaf(jnp.where(own_run, mine, self._runs(residuals[i])), x))
        return jnp.concatenate(out), filled

    def decode(self, rows: jax.Array, like: Sequence[Any], *, units: Units = ()) -> list[jax.Array]:
        out = []
        for i, (c, part, x) in enumerate(
            zip(self.compressors, self._split(rows), like, strict=True)
        ):
            unit = units[i] if units else None
            run = (self._run(math.prod(x.shape)),)
            like_runs = jax.ShapeDtypeStruct(x.shape, jnp.float32)
            leaf = self._leaf(_decode_rows(c, part, run), like_runs)
            out.append(outside.decoded(leaf, unit, x.dtype))
        return out

    @staticmethod
    def _leaf(runs: jax.Array, like: Any, unit: tuple[Any, Any] | None = None) -> jax.Array:
        """The inverse of `_runs`, in the shape and dtype of `like`, out of its units."""
        leaf = runs.reshape(-1)[: math.prod(like.shape)].reshape(like.shape)
        return outside.multiply(leaf, unit, outside.OUT).astype(like.dtype)


def encode_rows(compressor: Compressor, key: Any, rows: jax.Array) -> jax.Array:
    """[rows, ...] -> payloads u8[rows, n], each row a leaf by itself."""
    if not isinstance(compressor, Quantize):  # its kernels read 16-bit values as they are
        rows = rows.astype(jnp.float32)
    if not compressor.needs_key:
        return jax.vmap(lambda x: compressor.encode(x)[0])(rows)
    keys = jax.random.split(key, rows.shape[0])
    return jax.vmap(lambda x, k: compressor.encode(x, key=k)[0])(rows, keys)


def _decode_rows(compressor: Compressor, rows: jax.Array, run: tuple[int, ...]) -> jax.Array:
    """Payloads u8[rows, n] -> fp32[rows, *run]."""
    return jax.vmap(lambda payload: compressor.decode(payload, run, jnp.float32))(rows)


def row_words(quantizer: Quantize, key: Any, rows: int) -> Any:
    """What `encode_rows` feeds the kernels for each row, uint32[rows, 2]."""
    if not quantizer.needs_key:
        return np.zeros((rows, 2), np.uint32)
    return jax.vmap(quantizer.words)(jax.random.split(key, rows))


def accumulate_rows(
    compressor: Compressor, rank: Any, rows: jax.Array, own: jax.Array, divisor: float
) -> jax.Array:
    """Own exact values plus the decoded rows of every other rank, in fp32 and rank order."""
    if isinstance(compressor, Quantize):
        layout = Layout((compressor.slot(own.size),), 1)
        return primitives.accumulate(rank, rows, [own], layout, divisor=divisor)[0]
    total = own.astype(jnp.float32)
    for w in range(rows.shape[0]):
        peer = compressor.decode(rows[w], own.shape, jnp.float32)
        total = jnp.where(rank == w, total, total + peer)
    return (total if divisor == 1 else total / np.float32(divisor)).astype(own.dtype)
