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
from cgx_jax.kernels import primitives
from cgx_jax.wire import Layout

Arrays = Sequence[jax.Array]


class Codec(Protocol):
    """The four sides of a fusion buffer; `seed` is uint32[2], `rank` int32, rows u8[world, n]."""

    @property
    def row_bytes(self) -> int:
        """Bytes one rank sends to one other in each of the two phases."""

    def encode(
        self, seed: Any, rank: Any, leaves: Arrays, *, residual: bool = False
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
    ) -> tuple[jax.Array, list[jax.Array]]:
        """Rows from every rank and this rank's own values to its chunk's payload, u8[n].

        In `residuals`, where given, the chunk becomes `divisor` times what encoding it lost.
        """

    def decode(self, rows: jax.Array, like: Sequence[Any]) -> list[jax.Array]:
        """Every chunk's payload to leaves with the shapes and dtypes of `like`."""


@dataclasses.dataclass(frozen=True)
class QuantizeCodec:
    """Quantized leaves, cut at bucket boundaries; one kernel call a phase."""

    layout: Layout

    @property
    def row_bytes(self) -> int:
        return self.layout.chunk_bytes

    def encode(
        self, seed: Any, rank: Any, leaves: Arrays, *, residual: bool = False
    ) -> tuple[jax.Array, list[jax.Array]]:
        return primitives.encode(seed, leaves, self.layout, rank=rank, residual=residual)

    def reduce(
        self,
        seed: Any,
        rank: Any,
        rows: jax.Array,
        leaves: Arrays,
        divisor: float,
        residuals: Arrays = (),
    ) -> tuple[jax.Array, list[jax.Array]]:
        return primitives.reduce(
            seed, rank, rows, leaves, self.layout, divisor=divisor, residuals=residuals
        )

    def decode(self, rows: jax.Array, like: Sequence[Any]) -> list[jax.Array]:
        return primitives.decode(rows, self.layout, like)


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
            c.wire_bits(self._run(n)) // 8
            for c, n in zip(self.compressors, self.sizes, strict=True)
        ]

    def _runs(self, x: jax.Array) -> jax.Array:
        run = self._run(x.size)
        return jnp.pad(jnp.ravel(x), (0, run * self.world - x.size)).reshape(self.world, run)

    def _key(self, compressor: Compressor, seed: Any, stream: int) -> Any:
        if not compressor.needs_key:
            return None
        return jax.random.fold_in(jax.random.wrap_key_data(seed, impl="threefry2x32"), stream)

    def encode(
        self, seed: Any, rank: Any, leaves: Arrays, *, residual: bool = False
    ) -> tuple[jax.Array, list[jax.Array]]:
        rows, residuals = [], []
        for c, x, s in zip(self.compressors, leaves, self.streams, strict=True):
            runs = self._runs(x)
            rows.append(encode_rows(c, self._key(c, seed, s), runs))
            if residual:
                lost = runs.astype(jnp.float32) - _decode_rows(c, rows[-1], runs.shape[1:])
                lost = jnp.where((jnp.arange(self.world) == rank)[:, None], 0, lost)
                residuals.append(self._leaf(lost, x))
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
    ) -> tuple[jax.Array, list[jax.Array]]:
        out, filled = [], []
        parts = zip(self.compressors, leaves, self.streams, self._split(rows), strict=True)
        for i, (c, x, s, part) in enumerate(parts):
            own = jnp.take(self._runs(x), rank, axis=0).astype(jnp.float32)
            total = accumulate_rows(c, rank, part, own, divisor)
            out.append(c.encode(total, key=self._key(c, seed, s))[0])
            if residuals:
                lost = (total - c.decode(out[-1], total.shape, jnp.float32)) * np.float32(divisor)
                runs = self._runs(residuals[i])
                filled.append(self._leaf(runs.at[rank].set(lost.astype(x.dtype)), x))
        return jnp.concatenate(out), filled

    def decode(self, rows: jax.Array, like: Sequence[Any]) -> list[jax.Array]:
        out = []
        for c, part, x in zip(self.compressors, self._split(rows), like, strict=True):
            run = (self._run(math.prod(x.shape)),)
            out.append(self._leaf(_decode_rows(c, part, run, x.dtype), x))
        return out

    @staticmethod
    def _leaf(runs: jax.Array, like: Any) -> jax.Array:
        """The inverse of `_runs`, in the shape and dtype of `like`."""
        return runs.reshape(-1)[: math.prod(like.shape)].reshape(like.shape).astype(like.dtype)


def encode_rows(compressor: Compressor, key: Any, rows: jax.Array) -> jax.Array:
    """[rows, ...] -> payloads u8[rows, n], each row a leaf by itself."""
    if not compressor.needs_key:
        return jax.vmap(lambda x: compressor.encode(x)[0])(rows)
    keys = jax.random.split(key, rows.shape[0])
    return jax.vmap(lambda x, k: compressor.encode(x, key=k)[0])(rows, keys)


def _decode_rows(
    compressor: Compressor, rows: jax.Array, run: tuple[int, ...], dtype: Any = jnp.float32
) -> jax.Array:
    """Payloads u8[rows, n] -> [rows, *run]."""
    return jax.vmap(lambda payload: compressor.decode(payload, run, dtype))(rows)


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
        layout = Layout((compressor.field(own.size),), 1)
        return primitives.accumulate(rank, rows, [own], layout, divisor=divisor)[0]
    total = own.astype(jnp.float32)
    for w in range(rows.shape[0]):
        peer = compressor.decode(rows[w], own.shape, jnp.float32)
        total = jnp.where(rank == w, total, total + peer)
    return (total if divisor == 1 else total / np.float32(divisor)).astype(own.dtype)
