"""Codes of fusion buffers: a family's kernels, or leaf by leaf with each leaf's compressor."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from cgx_jax._types import Key, Shaped, Unit, Words
from cgx_jax.axes import SMALL_BYTES, in_rank_order, split, sum_of_rows, unstack
from cgx_jax.compressors.base import CodedLeaf, PayloadCompressor
from cgx_jax.compressors.codes import Arrays, ChunkCode, WholeCode, key_of
from cgx_jax.kernels import scaling
from cgx_jax.kernels.primitives import NO_RANK, Units
from cgx_jax.kernels.scaling import Residuals


@functools.lru_cache(maxsize=1024)
def chunk_code(leaves: tuple[CodedLeaf, ...], world: int) -> ChunkCode:
    """Returns the code for a buffer of one family's leaves, cut into `world` chunks."""
    kernels = _codes(leaves)[0].chunk_kernels(leaves, world)
    return _ChunksLeafByLeaf(leaves, world) if kernels is None else kernels


@functools.lru_cache(maxsize=1024)
def whole_code(leaves: tuple[CodedLeaf, ...]) -> WholeCode:
    """Returns the code for a buffer of whole leaves, each family of which has a code of its own."""
    families: dict[type, list[int]] = {}
    for i, leaf in enumerate(leaves):
        families.setdefault(type(leaf.compressor), []).append(i)
    if len(families) > 1:
        parts = (tuple(numbers) for numbers in families.values())
        return _Joined(tuple((own, whole_code(tuple(leaves[i] for i in own))) for own in parts))
    kernels = _codes(leaves)[0].whole_kernels(leaves)
    return _WholeLeafByLeaf(leaves) if kernels is None else kernels


def _codes(leaves: Sequence[CodedLeaf]) -> list[PayloadCompressor]:
    """Returns the leaves' compressors. Reductions of payloads allow no other family."""
    return [cast(PayloadCompressor, leaf.compressor) for leaf in leaves]


def leaf_key(leaf: CodedLeaf, seed: Words) -> jax.Array | None:
    """Returns the key of one leaf of a buffer, or None if its compressor needs none."""
    return leaf_keys([leaf], seed)[0]


def leaf_keys(leaves: Sequence[CodedLeaf], seed: Words) -> jax.Array | list[None]:
    """Returns the keys of a buffer's leaves, or None for each if no compressor needs any."""
    if not any(leaf.compressor.needs_key for leaf in leaves):
        return [None] * len(leaves)
    numbers = np.array([leaf.number for leaf in leaves], np.uint32)
    keys: jax.Array = jax.vmap(functools.partial(jax.random.fold_in, key_of(seed)))(numbers)
    return keys


# What leaves have in common that one program can code: their compressor, a shape, and 0. A large
# leaf has its place + 1 instead: copies of it would take longer than compiling a program for it.
_Kind = tuple[PayloadCompressor, tuple[int, ...], int]


def _kind(compressor: PayloadCompressor, shape: tuple[int, ...], leaf: CodedLeaf, i: int) -> _Kind:
    return compressor, shape, 0 if 4 * leaf.size <= SMALL_BYTES else i + 1


def _each(
    kinds: Sequence[_Kind], function: Callable[..., jax.Array], *columns: Sequence[Any] | jax.Array
) -> list[jax.Array]:
    """Returns function(compressor, shape, *entries) for each leaf's kind and its entries.

    Leaves of a kind are stacked and share one program: XLA would take seconds to compile a program
    for each. Their bytes are those of single calls. A column may be one array.
    """
    out: dict[int, jax.Array] = {}
    for kind in dict.fromkeys(kinds):
        numbers = [i for i, other in enumerate(kinds) if other == kind]
        call = functools.partial(function, *kind[:2])
        if len(numbers) == 1:
            results = [call(*(column[numbers[0]] for column in columns))]
        else:
            stacks = [_stacked(column, numbers) for column in columns]
            # XLA would otherwise compute a stack again for each of its parts.
            results = unstack(lax.optimization_barrier(jax.vmap(call)(*stacks)))
        out |= dict(zip(numbers, results, strict=True))
    return [out[i] for i in range(len(kinds))]


def _stacked(column: Sequence[Any] | jax.Array, numbers: list[int]) -> jax.Array | None:
    if isinstance(column, jax.Array):
        return column[np.array(numbers)]
    # The barrier keeps what makes an entry out of the stack's program.
    entries = [column[i] for i in numbers]
    return None if entries[0] is None else jnp.stack(lax.optimization_barrier(entries))


def _encoded(code: Any, shape: tuple[int, ...], key: Key, x: jax.Array) -> jax.Array:
    payload: jax.Array = code.encode(x, key=key if code.needs_key else None)
    return payload


def _decoded(code: Any, shape: tuple[int, ...], payload: jax.Array) -> jax.Array:
    values: jax.Array = code.decode(payload, shape, jnp.float32)
    return values


def _decoded_rows(code: Any, run: tuple[int, ...], rows: jax.Array) -> jax.Array:
    values: jax.Array = jax.vmap(lambda payload: _decoded(code, run, payload))(rows)
    return values


@dataclasses.dataclass(frozen=True)
class _ChunksLeafByLeaf(ChunkCode):
    """Each leaf padded to `world` equal runs of values, fp32 in both phases."""

    leaves: tuple[CodedLeaf, ...]
    world: int

    def _run(self, size: int) -> int:
        return -(-size // self.world)

    @property
    def row_bytes(self) -> int:
        return sum(self._bytes(_codes(self.leaves)))

    @property
    def sum_bytes(self) -> int:
        return sum(self._bytes(self._of_sums()))

    def _of_sums(self) -> list[PayloadCompressor]:
        return [code.of_sums(self.world) for code in _codes(self.leaves)]

    def _bytes(self, codes: Sequence[PayloadCompressor]) -> list[int]:
        pairs = zip(codes, self.leaves, strict=True)
        return [c.payload_bytes(self._run(x.size)) for c, x in pairs]

    def error_bounds(self, bound: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
        return self._leaf(jax.vmap(bound)(self._runs(x)), x)

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
        self, seed: Words, rank: jax.Array, leaves: Arrays, units: Units, *, residual: bool
    ) -> tuple[jax.Array, Residuals]:
        runs = [self._runs(x) for x in scaling.taken_in(leaves, units)]
        codes = _codes(self.leaves)
        kinds = self._kinds(codes)
        keys = leaf_keys(self.leaves, seed)
        rows = _each(kinds, _encoded_rows, keys, runs)
        joined = jnp.concatenate(rows, axis=1)
        if not residual:
            return joined, None
        back = _each(kinds, _decoded_rows, rows)
        parts = zip(codes, runs, back, leaves, units, strict=True)
        return joined, [
            self._leaf(jnp.where(self._own(rank, code), 0, run - b), x, unit)
            for code, run, b, x, unit in parts
        ]

    def _kinds(self, codes: Sequence[PayloadCompressor]) -> list[_Kind]:
        pairs = enumerate(zip(codes, self.leaves, strict=True))
        return [_kind(code, (self._run(leaf.size),), leaf, i) for i, (code, leaf) in pairs]

    def _split(self, rows: jax.Array, codes: Sequence[PayloadCompressor]) -> list[jax.Array]:
        return split(rows, self._bytes(codes), axis=1)

    def reduce(
        self,
        seed: Words,
        rank: jax.Array,
        rows: jax.Array,
        leaves: Arrays,
        units: Units,
        divisor: float,
        residuals: Residuals,
    ) -> tuple[jax.Array, Residuals]:
        codes = _codes(self.leaves)
        kinds, of_sums = self._kinds(codes), self._kinds(self._of_sums())
        inner = [self._runs(x) for x in scaling.taken_in(leaves, units)]
        own = [jnp.take(x, rank, axis=0) for x in inner]

        def total(code: Any, run: Any, part: jax.Array, own: jax.Array) -> jax.Array:
            if code.owner_exact:
                return _accumulated(code, rank, part, own, divisor)
            return _divided(code.decode_sum(part, own.shape), divisor)

        totals = _each(kinds, total, self._split(rows, codes), own)
        keys = leaf_keys(self.leaves, seed)
        out = _each(of_sums, _encoded, keys, totals)
        if residuals is None:
            return jnp.concatenate(out), None
        filled = []
        back = _each(of_sums, _decoded, out)
        for i, (c, x) in enumerate(zip(codes, leaves, strict=True)):
            lost = (totals[i] - back[i]) * np.float32(divisor)
            whole = jnp.zeros(inner[i].shape, jnp.float32).at[rank].set(lost)
            mine = self._runs(self._leaf(whole, x, units[i]))
            before = self._runs(residuals[i])
            kept = jnp.where(self._own(rank, c), 0, before)
            filled.append(self._leaf(kept + mine, x))
        return jnp.concatenate(out), filled

    def decode(self, rows: jax.Array, like: Sequence[Shaped], units: Units) -> list[jax.Array]:
        codes = self._of_sums()
        every = _each(self._kinds(codes), _decoded_rows, self._split(rows, codes))
        wide = [jax.ShapeDtypeStruct(x.shape, jnp.float32) for x in like]
        values = [self._leaf(runs, x) for runs, x in zip(every, wide, strict=True)]
        return scaling.all_decoded(values, units, like)

    @staticmethod
    def _leaf(runs: jax.Array, like: Shaped, unit: Unit = None) -> jax.Array:
        """Inverts `_runs`, in the shape and dtype of `like`, and takes values out of units."""
        leaf = runs.reshape(-1)[: math.prod(like.shape)].reshape(like.shape)
        return scaling.multiply(leaf, unit, scaling.OUT).astype(like.dtype)


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
        self, seed: Words, rank: jax.Array, leaves: Arrays, units: Units, *, residual: bool
    ) -> tuple[jax.Array, Residuals]:
        values = [x.astype(jnp.float32) for x in scaling.taken_in(leaves, units)]
        keys = leaf_keys(self.leaves, seed)
        payloads = _each(self._kinds(), _encoded, keys, values)
        lost = None
        if residual:
            back = _each(self._kinds(), _decoded, payloads)
            lost = [x - y for x, y in zip(values, back, strict=True)]
        return jnp.concatenate(payloads), scaling.taken_out(lost, units, leaves)

    def _kinds(self) -> list[_Kind]:
        pairs = enumerate(zip(_codes(self.leaves), self.leaves, strict=True))
        return [_kind(code, leaf.shape, leaf, i) for i, (code, leaf) in pairs]

    def sum(
        self, rows: jax.Array, like: Sequence[Shaped], units: Units, divisor: float
    ) -> list[jax.Array]:
        parts = split(rows, self._bytes(), axis=1)
        totals = _each(
            self._kinds(),
            lambda code, shape, part: _divided(code.decode_sum(part, shape), divisor),
            parts,
        )
        return scaling.all_decoded(totals, units, like)

    def accumulate(
        self, rank: jax.Array, rows: jax.Array, own: Arrays, divisor: float
    ) -> list[jax.Array]:
        def total(code: Any, shape: tuple[int, ...], part: jax.Array, own: jax.Array) -> jax.Array:
            if code.lossless:
                # One operation for all ranks: the loop would be a program for each small leaf.
                return _divided(sum_of_rows(_decoded_rows(code, shape, part)), divisor)
            if code.owner_exact:
                return _accumulated(code, rank, part, own, divisor)
            votes = _divided(code.decode_sum(part, shape), divisor)
            of_sums = code.of_sums(len(part))
            return _decoded(of_sums, shape, of_sums.encode(votes))

        parts = split(rows, self._bytes(), axis=1)
        exact = [x.astype(jnp.float32) for x in own]
        totals = _each(self._kinds(), total, parts, exact)
        return [y.astype(x.dtype) for y, x in zip(totals, own, strict=True)]

    def decode(self, rows: jax.Array, like: Sequence[Shaped]) -> list[jax.Array]:
        every = _each(self._kinds(), _decoded_rows, split(rows, self._bytes(), axis=1))
        return [y.astype(x.dtype) for y, x in zip(every, like, strict=True)]


@dataclasses.dataclass(frozen=True)
class _Joined(WholeCode):
    """The payloads of several codes, one after the other, with the leaves of each."""

    parts: tuple[tuple[tuple[int, ...], WholeCode], ...]

    @property
    def row_bytes(self) -> int:
        return sum(code.row_bytes for _, code in self.parts)

    def encode(
        self, seed: Words, rank: jax.Array, leaves: Arrays, units: Units, *, residual: bool
    ) -> tuple[jax.Array, Residuals]:
        payloads: list[jax.Array] = []
        lost: dict[int, jax.Array] = {}
        for numbers, code in self.parts:
            own, scales = [leaves[i] for i in numbers], [units[i] for i in numbers]
            payload, rest = code.encode(seed, rank, own, scales, residual=residual)
            payloads.append(payload)
            lost |= dict(zip(numbers, rest or (), strict=residual))
        return jnp.concatenate(payloads), [x for _, x in sorted(lost.items())] or None

    def sum(
        self, rows: jax.Array, like: Sequence[Shaped], units: Units, divisor: float
    ) -> list[jax.Array]:
        return self._each(
            rows,
            lambda code, part, own, scales: code.sum(part, own, scales, divisor),
            like,
            units,
        )

    def accumulate(
        self, rank: jax.Array, rows: jax.Array, own: Arrays, divisor: float
    ) -> list[jax.Array]:
        add = lambda code, part, leaves: code.accumulate(rank, part, leaves, divisor)  # noqa: E731
        return self._each(rows, add, own)

    def decode(self, rows: jax.Array, like: Sequence[Shaped]) -> list[jax.Array]:
        return self._each(rows, lambda code, part, own: code.decode(part, own), like)

    def _each(
        self, rows: jax.Array, function: Callable[..., list[jax.Array]], *columns: Sequence[Any]
    ) -> list[jax.Array]:
        """Returns function(code, its part of the rows, its entries of each column) by leaf."""
        out: dict[int, jax.Array] = {}
        parts = split(rows, [code.row_bytes for _, code in self.parts], axis=1)
        for (numbers, code), part in zip(self.parts, parts, strict=True):
            entries = ([column[i] for i in numbers] for column in columns)
            out |= dict(zip(numbers, function(code, part, *entries), strict=True))
        return [out[i] for i in range(len(out))]


def _encoded_rows(
    code: PayloadCompressor, run: tuple[int, ...], key: Key, rows: jax.Array
) -> jax.Array:
    """Encodes each row by itself, with a key of its own if the compressor draws numbers."""
    encode: Callable[..., jax.Array] = code.encode
    if not code.needs_key:
        return jax.vmap(encode)(rows)
    assert key is not None
    keys = jax.random.split(key, rows.shape[0])
    return jax.vmap(lambda x, k: encode(x, key=k))(rows, keys)


def _accumulated(
    code: Any, rank: jax.Array, payloads: jax.Array, own: jax.Array, divisor: float
) -> jax.Array:
    """Adds the other ranks' decoded payloads to the exact `own`, in fp32 and rank order."""

    def add(total: jax.Array, w: Any, payload: jax.Array) -> jax.Array:
        return jnp.where(rank == w, total, total + _decoded(code, own.shape, payload))

    return _divided(in_rank_order(add, own, payloads), divisor)


def _divided(total: jax.Array, divisor: float) -> jax.Array:
    return total if divisor == 1 else total / np.float32(divisor)
