"""Codes of fusion buffers: a family's kernels, or leaf by leaf with each leaf's compressor."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from cgx_jax._types import Key, Shaped, Unit, Words
from cgx_jax.axes import SMALL_BYTES, in_rank_order, split, sum_of_rows, unstack
from cgx_jax.compressors.base import CodedLeaf, PayloadCompressor
from cgx_jax.compressors.codes import Arrays, ChunkCode, WholeCode, key_of
from cgx_jax.kernels import scaling
from cgx_jax.kernels.primitives import NO_RANK, Sent
from cgx_jax.kernels.scaling import Residuals
from cgx_jax.kernels.units import Units, chosen, each


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


def leaf_keys(leaves: Sequence[CodedLeaf], seed: Words) -> jax.Array | list[None]:
    """Returns the keys of a buffer's leaves, or None for each if no compressor needs any."""
    if not any(leaf.compressor.needs_key for leaf in leaves):
        return [None] * len(leaves)
    numbers = np.array([leaf.number for leaf in leaves], np.uint32)
    return jax.vmap(functools.partial(jax.random.fold_in, key_of(seed)))(numbers)


class _Group(NamedTuple):
    """Leaves that one program codes: `numbers` in the buffer, a compressor and a shape.

    XLA would take seconds to compile a program for each leaf. The bytes are those of single calls.
    The payloads of a group lie next to each other in the buffer.
    """

    code: PayloadCompressor
    shape: tuple[int, ...]
    numbers: tuple[int, ...]

    def nbytes(self, code: PayloadCompressor) -> int:
        """Bytes of the payloads by `code`."""
        return len(self.numbers) * code.payload_bytes(self.shape)

    def stack(self, column: Sequence[jax.Array]) -> jax.Array:
        """Returns the group's entries of a column with one for each leaf of the buffer."""
        # The barrier keeps what makes an entry out of the stack's program.
        return jnp.stack(lax.optimization_barrier([column[i] for i in self.numbers]))

    def keys(self, keys: jax.Array | list[None]) -> jax.Array | None:
        """Returns the leaves' keys of `leaf_keys`."""
        return keys[np.array(self.numbers)] if isinstance(keys, jax.Array) else None

    def each(self, function: Callable[..., jax.Array], *stacks: jax.Array | None) -> jax.Array:
        """Returns function(*entries) of each leaf, stacked."""
        if len(self.numbers) > 1:
            return jax.vmap(function)(*stacks)
        return function(*(None if x is None else x[0] for x in stacks))[None]

    def unstack(self, stack: jax.Array) -> dict[int, jax.Array]:
        """Returns the entries of a stack by number."""
        # XLA would otherwise compute a stack again for each of its parts.
        parts = unstack(lax.optimization_barrier(stack)) if len(stack) > 1 else [stack[0]]
        return dict(zip(self.numbers, parts, strict=True))


def _grouped(leaves: Sequence[CodedLeaf], shapes: Sequence[tuple[int, ...]]) -> list[_Group]:
    """Returns the groups of leaves whose codes are of `shapes`."""
    kinds: dict[tuple[PayloadCompressor, tuple[int, ...], int], list[int]] = {}
    for i, (code, leaf, shape) in enumerate(zip(_codes(leaves), leaves, shapes, strict=True)):
        # Copies of a large leaf would take longer than compiling a program for it.
        alone = 0 if 4 * leaf.size <= SMALL_BYTES else i + 1
        kinds.setdefault((code, shape, alone), []).append(i)
    return [_Group(code, shape, tuple(own)) for (code, shape, _), own in kinds.items()]


def _side_by_side(stack: jax.Array) -> jax.Array:
    """Returns payloads u8[leaves, rows, n] next to each other, u8[rows, leaves * n]."""
    return jnp.moveaxis(stack, 0, 1).reshape(stack.shape[1], -1)


def _apart(rows: jax.Array, leaves: int) -> jax.Array:
    """Inverts `_side_by_side`."""
    return jnp.moveaxis(rows.reshape(len(rows), leaves, -1), 1, 0)


def _in_order(entries: Mapping[int, jax.Array]) -> list[jax.Array]:
    return [entries[i] for i in range(len(entries))]


def _encoded(code: Any, key: Key, x: jax.Array) -> jax.Array:
    return code.encode(x, key=key if code.needs_key else None)


def _decoded(code: Any, shape: tuple[int, ...], payload: jax.Array) -> jax.Array:
    return code.decode(payload, shape, jnp.float32)


def _decoded_rows(code: Any, run: tuple[int, ...], rows: jax.Array) -> jax.Array:
    return jax.vmap(lambda payload: _decoded(code, run, payload))(rows)


@dataclasses.dataclass(frozen=True)
class _ChunksLeafByLeaf(ChunkCode):
    """Each leaf padded to `world` equal runs of values, fp32 in both phases."""

    leaves: tuple[CodedLeaf, ...]
    world: int

    def _run(self, size: int) -> int:
        return -(-size // self.world)

    @functools.cached_property
    def _groups(self) -> list[_Group]:
        return _grouped(self.leaves, [(self._run(x.size),) for x in self.leaves])

    @property
    def row_bytes(self) -> int:
        return sum(group.nbytes(group.code) for group in self._groups)

    @property
    def sum_bytes(self) -> int:
        return sum(group.nbytes(self._of_sums(group)) for group in self._groups)

    def _of_sums(self, group: _Group) -> PayloadCompressor:
        return group.code.of_sums(self.world)

    def error_bounds(self, bound: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
        (code,) = _codes(self.leaves)
        return self._leaf(jax.vmap(bound)(self._runs(code, x)), x)

    def _runs(self, code: PayloadCompressor, x: jax.Array) -> jax.Array:
        """Returns fp32[world, run]; both phases encode this dtype, so payloads are alike."""
        run, flat = self._run(x.size), jnp.ravel(x).astype(jnp.float32)
        if missing := run * self.world - x.size:
            fill = code.filler(flat[(x.size - 1) // run * run :]) if x.size else 0.0
            flat = jnp.pad(flat, (0, missing), constant_values=fill)
        return flat.reshape(self.world, run)

    def _sent(self, sent: Sent) -> list[jax.Array]:
        """Returns the runs of each leaf in its units."""
        return list(map(self._runs, _codes(self.leaves), scaling.taken_in(sent.leaves, sent.units)))

    def _own(self, rank: ArrayLike, compressor: PayloadCompressor) -> jax.Array:
        """Returns bool[world, 1]: True for the row that this rank adds exactly, without loss."""
        own = rank if compressor.owner_exact else NO_RANK
        return (jnp.arange(self.world, dtype=jnp.int32) == own)[:, None]

    def encode(self, sent: Sent, *, residual: bool) -> tuple[jax.Array, Residuals]:
        runs = self._sent(sent)
        keys = leaf_keys(self.leaves, sent.words)
        if isinstance(keys, jax.Array):  # a key of its own for each row
            keys = jax.vmap(lambda key: jax.random.split(key, self.world))(keys)
        rows: list[jax.Array] = []
        lost: dict[int, jax.Array] = {}
        for group in self._groups:
            code, own = group.code, group.stack(runs)
            made = group.each(jax.vmap(functools.partial(_encoded, code)), group.keys(keys), own)
            rows.append(_side_by_side(made))
            if residual:
                back = group.each(functools.partial(_decoded_rows, code, group.shape), made)
                lost |= group.unstack(jnp.where(self._own(sent.rank, code), 0, own - back))
        if not residual:
            return jnp.concatenate(rows, axis=1), None
        units = each(sent.units, len(sent.leaves))
        parts = zip(_in_order(lost), sent.leaves, units, strict=True)
        return jnp.concatenate(rows, axis=1), [self._leaf(*part) for part in parts]

    def reduce(
        self, sent: Sent, rows: jax.Array, divisor: float, residuals: Residuals
    ) -> tuple[jax.Array, Residuals]:
        runs = self._sent(sent)
        keys, rank = leaf_keys(self.leaves, sent.words), jnp.int32(sent.rank)
        parts = split(rows, [group.nbytes(group.code) for group in self._groups], axis=1)
        out: list[jax.Array] = []
        lost: dict[int, jax.Array] = {}
        for group, part in zip(self._groups, parts, strict=True):
            code, of_sums, stack = group.code, self._of_sums(group), group.stack(runs)
            own = jnp.take(stack, rank, axis=1)
            total = group.each(
                functools.partial(_total, code, rank, divisor),
                _apart(part, len(group.numbers)),
                own,
            )
            made = group.each(functools.partial(_encoded, of_sums), group.keys(keys), total)
            out.append(made.reshape(-1))
            if residuals is not None:
                back = group.each(functools.partial(_decoded, of_sums, group.shape), made)
                mine = (total - back) * np.float32(divisor)
                lost |= group.unstack(jnp.zeros_like(stack).at[:, rank].set(mine))
        if residuals is None:
            return jnp.concatenate(out), None
        filled = []
        units = each(sent.units, len(sent.leaves))
        for code, whole, x, unit, residual in zip(
            _codes(self.leaves), _in_order(lost), sent.leaves, units, residuals, strict=True
        ):
            kept = jnp.where(self._own(rank, code), 0, self._runs(code, residual))
            filled.append(self._leaf(kept + self._runs(code, self._leaf(whole, x, unit)), x))
        return jnp.concatenate(out), filled

    def decode(
        self, rows: jax.Array, like: Sequence[Shaped], units: Units | None
    ) -> list[jax.Array]:
        parts = split(rows, [group.nbytes(self._of_sums(group)) for group in self._groups], axis=1)
        runs: dict[int, jax.Array] = {}
        for group, part in zip(self._groups, parts, strict=True):
            decoded = functools.partial(_decoded_rows, self._of_sums(group), group.shape)
            runs |= group.unstack(group.each(decoded, _apart(part, len(group.numbers))))
        wide = [jax.ShapeDtypeStruct(x.shape, jnp.float32) for x in like]
        values = [self._leaf(run, x) for run, x in zip(_in_order(runs), wide, strict=True)]
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

    @functools.cached_property
    def _groups(self) -> list[_Group]:
        return _grouped(self.leaves, [x.shape for x in self.leaves])

    @property
    def row_bytes(self) -> int:
        return sum(group.nbytes(group.code) for group in self._groups)

    def encode(self, sent: Sent, *, residual: bool) -> tuple[jax.Array, Residuals]:
        values = [x.astype(jnp.float32) for x in scaling.taken_in(sent.leaves, sent.units)]
        keys = leaf_keys(self.leaves, sent.words)
        payloads: list[jax.Array] = []
        lost: dict[int, jax.Array] = {}
        for group in self._groups:
            code, own = group.code, group.stack(values)
            made = group.each(functools.partial(_encoded, code), group.keys(keys), own)
            payloads.append(made.reshape(-1))
            if residual:
                back = group.each(functools.partial(_decoded, code, group.shape), made)
                lost |= group.unstack(own - back)
        left = _in_order(lost) if residual else None
        return jnp.concatenate(payloads), scaling.taken_out(left, sent.units, sent.leaves)

    def _from_all(
        self, rows: jax.Array, function: Callable[..., jax.Array], *columns: Sequence[Any]
    ) -> list[jax.Array]:
        """Returns function(code, shape, payloads u8[ranks, n], *entries) of each leaf."""
        parts = split(rows, [group.nbytes(group.code) for group in self._groups], axis=1)
        out: dict[int, jax.Array] = {}
        for group, part in zip(self._groups, parts, strict=True):
            call = functools.partial(function, group.code, group.shape)
            stacks = [group.stack(column) for column in columns]
            out |= group.unstack(group.each(call, _apart(part, len(group.numbers)), *stacks))
        return _in_order(out)

    def sum(
        self, rows: jax.Array, like: Sequence[Shaped], units: Units | None, divisor: float
    ) -> list[jax.Array]:
        totals = self._from_all(
            rows, lambda code, shape, part: _divided(code.decode_sum(part, shape), divisor)
        )
        return scaling.all_decoded(totals, units, like)

    def accumulate(
        self, rank: jax.Array, rows: jax.Array, own: Arrays, divisor: float
    ) -> list[jax.Array]:
        def total(code: Any, shape: tuple[int, ...], part: jax.Array, own: jax.Array) -> jax.Array:
            if code.lossless:
                # One operation for all ranks: the loop would be a program for each small leaf.
                return _divided(sum_of_rows(_decoded_rows(code, shape, part)), divisor)
            sums = _total(code, rank, divisor, part, own)
            if code.owner_exact:
                return sums
            of_sums = code.of_sums(len(part))  # a vote, which is sent as another code
            return _decoded(of_sums, shape, of_sums.encode(sums))

        totals = self._from_all(rows, total, [x.astype(jnp.float32) for x in own])
        return [y.astype(x.dtype) for y, x in zip(totals, own, strict=True)]

    def decode(self, rows: jax.Array, like: Sequence[Shaped]) -> list[jax.Array]:
        every = self._from_all(rows, _decoded_rows)
        return [y.astype(x.dtype) for y, x in zip(every, like, strict=True)]


@dataclasses.dataclass(frozen=True)
class _Joined(WholeCode):
    """The payloads of several codes, one after the other, with the leaves of each."""

    parts: tuple[tuple[tuple[int, ...], WholeCode], ...]

    @property
    def row_bytes(self) -> int:
        return sum(code.row_bytes for _, code in self.parts)

    def encode(self, sent: Sent, *, residual: bool) -> tuple[jax.Array, Residuals]:
        payloads: list[jax.Array] = []
        lost: dict[int, jax.Array] = {}
        for numbers, code in self.parts:
            own = sent._replace(
                leaves=[sent.leaves[i] for i in numbers], units=chosen(sent.units, numbers)
            )
            payload, rest = code.encode(own, residual=residual)
            payloads.append(payload)
            lost |= dict(zip(numbers, rest or (), strict=residual))
        return jnp.concatenate(payloads), [x for _, x in sorted(lost.items())] or None

    def sum(
        self, rows: jax.Array, like: Sequence[Shaped], units: Units | None, divisor: float
    ) -> list[jax.Array]:
        def total(code: WholeCode, part: jax.Array, numbers: Sequence[int]) -> list[jax.Array]:
            return code.sum(part, [like[i] for i in numbers], chosen(units, numbers), divisor)

        return self._each(rows, total)

    def accumulate(
        self, rank: jax.Array, rows: jax.Array, own: Arrays, divisor: float
    ) -> list[jax.Array]:
        def add(code: WholeCode, part: jax.Array, numbers: Sequence[int]) -> list[jax.Array]:
            return code.accumulate(rank, part, [own[i] for i in numbers], divisor)

        return self._each(rows, add)

    def decode(self, rows: jax.Array, like: Sequence[Shaped]) -> list[jax.Array]:
        return self._each(rows, lambda code, part, own: code.decode(part, [like[i] for i in own]))

    def _each(self, rows: jax.Array, function: Callable[..., list[jax.Array]]) -> list[jax.Array]:
        """Returns function(code, its part of the rows, its leaves' numbers) by leaf."""
        out: dict[int, jax.Array] = {}
        parts = split(rows, [code.row_bytes for _, code in self.parts], axis=1)
        for (numbers, code), part in zip(self.parts, parts, strict=True):
            out |= dict(zip(numbers, function(code, part, numbers), strict=True))
        return [out[i] for i in range(len(out))]


def _total(
    code: PayloadCompressor, rank: jax.Array, divisor: float, payloads: jax.Array, own: jax.Array
) -> jax.Array:
    """Adds the decoded payloads, in fp32 and rank order, and divides.

    If the code allows it, this rank's own values `own` count exactly.
    """
    if not code.owner_exact:
        return _divided(code.decode_sum(payloads, own.shape), divisor)

    def add(total: jax.Array, w: Any, payload: jax.Array) -> jax.Array:
        return jnp.where(rank == w, total, total + _decoded(code, own.shape, payload))

    return _divided(in_rank_order(add, own, payloads), divisor)


def _divided(total: jax.Array, divisor: float) -> jax.Array:
    return total if divisor == 1 else total / np.float32(divisor)
