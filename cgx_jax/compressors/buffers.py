"""Codes of fusion buffers: a family's kernels, or leaf by leaf with each leaf's compressor."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from cgx_jax._types import Key, Shaped, Unit, Words
from cgx_jax.axes import in_rank_order
from cgx_jax.compressors.base import PayloadCompressor
from cgx_jax.compressors.codes import (
    Arrays,
    ChunkCode,
    CodedLeaf,
    RowCode,
    WholeCode,
    encoded_rows,
    leaf_key,
    unit_of,
)
from cgx_jax.kernels import outside
from cgx_jax.kernels.outside import Residuals
from cgx_jax.kernels.primitives import NO_RANK, Units


@functools.lru_cache(maxsize=1024)
def chunk_code(leaves: tuple[CodedLeaf, ...], world: int) -> ChunkCode:
    """Returns the code for a buffer of one family's leaves, cut into `world` chunks."""
    kernels = type(leaves[0].compressor).chunk_kernels(leaves, world)
    return _ChunksLeafByLeaf(leaves, world) if kernels is None else kernels


@functools.lru_cache(maxsize=1024)
def whole_code(leaves: tuple[CodedLeaf, ...]) -> WholeCode:
    """Returns the code for a buffer of one family's whole leaves."""
    kernels = type(leaves[0].compressor).whole_kernels(leaves)
    return _WholeLeafByLeaf(leaves) if kernels is None else kernels


def row_code(compressor: PayloadCompressor, size: int) -> RowCode:
    """Returns the code for rows of `size` values each."""
    kernels = compressor.row_kernels(size)
    return _RowByRow(compressor) if kernels is None else kernels


@dataclasses.dataclass(frozen=True)
class _ChunksLeafByLeaf(ChunkCode):
    """Each leaf padded to `world` equal runs of values, fp32 in both phases."""

    leaves: tuple[CodedLeaf, ...]
    world: int

    def _run(self, size: int) -> int:
        return -(-size // self.world)

    @property
    def row_bytes(self) -> int:
        return sum(self._bytes([x.compressor for x in self.leaves]))

    @property
    def sum_bytes(self) -> int:
        return sum(self._bytes(self._of_sums()))

    def _of_sums(self) -> list[PayloadCompressor]:
        return [x.compressor.of_sums(self.world) for x in self.leaves]

    def _bytes(self, codes: Sequence[PayloadCompressor]) -> list[int]:
        pairs = zip(codes, self.leaves, strict=True)
        return [c.payload_bytes(self._run(x.size)) for c, x in pairs]

    def error_bounds(self, compressor: Any, x: jax.Array) -> jax.Array:
        return self._leaf(jax.vmap(compressor.error_bound)(self._runs(x)), x)

    def _runs(self, x: jax.Array) -> jax.Array:
        """Returns fp32[world, run]; both phases encode this dtype, so payloads are alike."""
        run = self._run(x.size)
        flat = jnp.ravel(x).astype(jnp.float32)
        return jnp.pad(flat, (0, run * self.world - x.size)).reshape(self.world, run)

    def _own(self, rank: jax.Array, compressor: PayloadCompressor) -> jax.Array:
        """Returns bool[world, 1]: True for the row that this rank adds exactly, without loss."""
        own = rank if compressor.owner_exact else NO_RANK
        return (jnp.arange(self.world, dtype=jnp.int32) == own)[:, None]

    def encode(
        self, seed: Words, rank: jax.Array, leaves: Arrays, *, residual: bool, units: Units
    ) -> tuple[jax.Array, Residuals]:
        rows: list[jax.Array] = []
        residuals: Residuals = [] if residual else None
        for i, (leaf, x) in enumerate(zip(self.leaves, leaves, strict=True)):
            c, unit = leaf.compressor, unit_of(units, i)
            code = _RowByRow(c)
            runs = self._runs(outside.multiply(x, unit, outside.IN))
            rows.append(code.encode(leaf_key(leaf, seed), runs))
            if residuals is not None:
                lost = runs - code.decode(rows[-1], runs.shape[1:], jnp.float32)
                lost = jnp.where(self._own(rank, c), 0, lost)
                residuals.append(self._leaf(lost, x, unit))
        return jnp.concatenate(rows, axis=1), residuals

    def _split(self, rows: jax.Array, codes: Sequence[PayloadCompressor]) -> list[jax.Array]:
        return jnp.split(rows, np.cumsum(self._bytes(codes))[:-1].tolist(), axis=1)

    def reduce(
        self,
        seed: Words,
        rank: jax.Array,
        rows: jax.Array,
        leaves: Arrays,
        divisor: float,
        residuals: Residuals,
        *,
        units: Units,
    ) -> tuple[jax.Array, Residuals]:
        out: list[jax.Array] = []
        filled: Residuals = None if residuals is None else []
        of_sums = self._of_sums()
        received = self._split(rows, [x.compressor for x in self.leaves])
        parts = zip(self.leaves, leaves, received, strict=True)
        for i, (leaf, x, part) in enumerate(parts):
            c, again, unit = leaf.compressor, of_sums[i], unit_of(units, i)
            inner = self._runs(outside.multiply(x, unit, outside.IN))
            own = jnp.take(inner, rank, axis=0)
            if c.owner_exact:
                total = _RowByRow(c).accumulate(rank, part, own, divisor)
            else:
                total = _divided(c.decode_sum(part, own.shape), divisor)
            out.append(again.encode(total, key=leaf_key(leaf, seed)))
            if residuals is not None and filled is not None:
                back = again.decode(out[-1], total.shape, jnp.float32)
                lost = (total - back) * np.float32(divisor)
                whole = jnp.zeros(inner.shape, jnp.float32).at[rank].set(lost)
                mine = self._runs(self._leaf(whole, x, unit))
                before = self._runs(residuals[i])
                kept = jnp.where(self._own(rank, c), 0, before)
                filled.append(self._leaf(kept + mine, x))
        return jnp.concatenate(out), filled

    def decode(self, rows: jax.Array, like: Sequence[Shaped], *, units: Units) -> list[jax.Array]:
        out, codes = [], self._of_sums()
        parts = zip(codes, self._split(rows, codes), like, strict=True)
        for i, (code, part, x) in enumerate(parts):
            run = (self._run(math.prod(x.shape)),)
            like_runs = jax.ShapeDtypeStruct(x.shape, jnp.float32)
            runs = _RowByRow(code).decode(part, run, jnp.float32)
            out.append(outside.decoded(self._leaf(runs, like_runs), unit_of(units, i), x.dtype))
        return out

    @staticmethod
    def _leaf(runs: jax.Array, like: Shaped, unit: Unit = None) -> jax.Array:
        """Inverts `_runs`, in the shape and dtype of `like`, and takes values out of units."""
        leaf = runs.reshape(-1)[: math.prod(like.shape)].reshape(like.shape)
        return outside.multiply(leaf, unit, outside.OUT).astype(like.dtype)


@dataclasses.dataclass(frozen=True)
class _WholeLeafByLeaf(WholeCode):
    """Each leaf in its own shape, fp32."""

    leaves: tuple[CodedLeaf, ...]

    @property
    def row_bytes(self) -> int:
        return sum(self._bytes())

    def _bytes(self) -> list[int]:
        return [x.compressor.payload_bytes(x.shape) for x in self.leaves]

    def encode(
        self,
        seed: Words,
        rank: jax.Array,
        leaves: Arrays,
        *,
        residual: bool,
        units: Units,
    ) -> tuple[jax.Array, Residuals]:
        payloads: list[jax.Array] = []
        lost: list[jax.Array] = []
        for i, (leaf, x) in enumerate(zip(self.leaves, leaves, strict=True)):
            c, unit = leaf.compressor, unit_of(units, i)
            value = outside.multiply(x, unit, outside.IN).astype(jnp.float32)
            payloads.append(c.encode(value, key=leaf_key(leaf, seed)))
            if residual:
                lost.append(value - c.decode(payloads[-1], x.shape, jnp.float32))
        each = [unit_of(units, i) for i in range(len(leaves))]
        residuals = outside.taken_out(lost if residual else None, each, leaves)
        return jnp.concatenate(payloads), residuals

    def sum(
        self, rows: jax.Array, like: Sequence[Shaped], divisor: float, *, units: Units
    ) -> list[jax.Array]:
        out = []
        parts = jnp.split(rows, np.cumsum(self._bytes())[:-1].tolist(), axis=1)
        for i, (leaf, part, x) in enumerate(zip(self.leaves, parts, like, strict=True)):
            total = _divided(leaf.compressor.decode_sum(part, x.shape), divisor)
            out.append(outside.decoded(total, unit_of(units, i), x.dtype))
        return out


@dataclasses.dataclass(frozen=True)
class _RowByRow(RowCode):
    compressor: PayloadCompressor

    def encode(self, key: Key, rows: jax.Array) -> jax.Array:
        return encoded_rows(self.compressor, key, rows.astype(jnp.float32))

    def decode(self, payloads: jax.Array, shape: Sequence[int], dtype: DTypeLike) -> jax.Array:
        return jax.vmap(lambda p: self.compressor.decode(p, tuple(shape), dtype))(payloads)

    def accumulate(
        self, rank: jax.Array, payloads: jax.Array, own: jax.Array, divisor: float
    ) -> jax.Array:
        def add(total: jax.Array, w: Any, payload: jax.Array) -> jax.Array:
            peer = self.compressor.decode(payload, own.shape, jnp.float32)
            return jnp.where(rank == w, total, total + peer)

        total = in_rank_order(add, own.astype(jnp.float32), payloads)
        return _divided(total, divisor).astype(own.dtype)


def _divided(total: jax.Array, divisor: float) -> jax.Array:
    return total if divisor == 1 else total / np.float32(divisor)
