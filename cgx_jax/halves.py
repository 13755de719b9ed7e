"""The halves of an all-reduce, for sharded data-parallel training: reduce-scatter and all-gather.

Drop-in for `lax.psum_scatter` and `lax.all_gather`. Each leaf travels by itself, in rows, one for
each rank, and a row is encoded like a leaf of its own.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax

from cgx_jax import _compat, debug, nonfinite
from cgx_jax.axes import Axes
from cgx_jax.compressors import Compressor, Identity, PayloadCompressor
from cgx_jax.compressors.base import require_key
from cgx_jax.compressors.buffers import row_code
from cgx_jax.compressors.codes import CodedLeaf, RowCode
from cgx_jax.core import load_of
from cgx_jax.exchanges import Auto, Exchange, Xla, auto
from cgx_jax.kernels.primitives import NO_RANK
from cgx_jax.leaves import is_bare, leaves_of
from cgx_jax.plan import Plan, compressors_of
from cgx_jax.policies.rules import Policy


def psum_scatter_compressed(
    tree: Any,
    axis_name: Any,
    compressor: Compressor | Policy | Plan | None = None,
    *,
    scatter_dimension: int = 0,
    axis_index_groups: Sequence[Sequence[int]] | None = None,
    tiled: bool = False,
    key: Any = None,
    exchange: Exchange | str = "auto",
) -> Any:
    """Each rank's slice of the sum, from compressed payloads; `lax.psum_scatter`.

    `tree` is a pytree of arrays; of each the `scatter_dimension` equals the world size and is
    removed, or with `tiled` is a multiple of it and divided. With `axis_index_groups`, of equal
    size, the world is a rank's group. The results are fp32 accumulations of the other ranks'
    decoded slices on this rank's exact ones, in each leaf's dtype; they are not quantized again.
    The derivative is `lax.psum_scatter`'s.

    `compressor` is one (default `Quantize()`, 4 bits), a policy or a `Plan`, and decides as in
    `psum_compressed`: given one compressor, leaves of a tree with ndim <= 1, under 1,024 values,
    named bias or norm, or of a dtype that it does not take are summed exactly; a bare array is
    compressed as asked. A policy sees whole leaves, before they are scattered. `key` feeds
    stochastic rounding, which no two leaves share (nor ranks, so that "correlated" is "stochastic"
    here): one key for all ranks, another for every step.

    `exchange` is "xla"; "mpi" between CPU processes; "nccl" between CUDA devices, one call a leaf
    where the code is `Quantize`'s; an instance from `cgx_jax.exchanges`; or "auto": by the active
    profile, of which a leaf takes half a `psum_compressed`, and without one "xla" for leaves of a
    few megabytes and more, exact for smaller ones. Raises ValueError or TypeError while tracing,
    with the leaf's path: a dimension that cannot be divided, an operand that is already reduced, a
    missing key; and without it: an exchange that does not work here, a plan of another tree, a
    policy that adapts, a compressor whose code is sums.
    """
    name = "psum_scatter_compressed"
    axes = Axes.resolve(name, axis_name, axis_index_groups)
    return _halve(
        _PsumScatter, name, tree, axes, compressor, scatter_dimension, tiled, key, exchange
    )


def all_gather_compressed(
    tree: Any,
    axis_name: Any,
    compressor: Compressor | Policy | Plan | None = None,
    *,
    axis: int = 0,
    axis_index_groups: Sequence[Sequence[int]] | None = None,
    tiled: bool = False,
    key: Any = None,
    exchange: Exchange | str = "auto",
) -> Any:
    """Every rank's `tree`, compressed on the wire; `lax.all_gather`.

    With `axis_index_groups`, of equal size, that of every rank of the group.

    Leaves are stacked along a new dimension `axis`, or concatenated along it when `tiled`. Each
    rank decodes its own payload too, so the result is the same on all. The derivative is
    `lax.all_gather`'s.

    `compressor` as in `psum_scatter_compressed`. A policy sees whole leaves, here the results, so
    that a leaf is compressed on its way out where it is on its way back, and one `Plan` of whole
    leaves serves both calls. `key`, `exchange`, and what is raised: as there.
    """
    name = "all_gather_compressed"
    axes = Axes.resolve(name, axis_name, axis_index_groups)
    return _halve(_AllGather, name, tree, axes, compressor, axis, tiled, key, exchange)


@dataclasses.dataclass(frozen=True)
class _Half(abc.ABC):
    """What a leaf's call is traced from: static and hashable."""

    name: str
    compressor: PayloadCompressor
    axes: Axes
    exchange: Exchange
    dimension: int
    tiled: bool

    sums: ClassVar[bool]
    call: ClassVar[str]  # of an exchange, which does it in one piece
    needs: ClassVar[str]  # of an exchange otherwise

    @staticmethod
    @abc.abstractmethod
    def place(
        where: str, shape: tuple[int, ...], world: int, dimension: int, tiled: bool
    ) -> tuple[int, tuple[int, ...]]:
        """The dimension, counted from the first, and the shape of the whole leaf."""

    @abc.abstractmethod
    def exactly(self, x: jax.Array) -> jax.Array:
        """What `lax` gives."""

    @abc.abstractmethod
    def run(self, key: Any, x: jax.Array) -> jax.Array:
        """The same from compressed payloads, by the exchange named."""

    def code(self, size: int) -> RowCode:
        """The code of rows of `size` values."""
        return row_code(self.compressor, size)

    def in_one_call(self, exchange: Exchange, code: RowCode) -> bool:
        """Whether an exchange has a call of its own for rows of this code."""
        return code.layout is not None and self.call in exchange.can


class _PsumScatter(_Half):
    sums = True
    call, needs = "reduce_scatter", "scatter"

    @staticmethod
    def place(
        where: str, shape: tuple[int, ...], world: int, dimension: int, tiled: bool
    ) -> tuple[int, tuple[int, ...]]:
        rank = len(shape)
        if not -rank <= dimension < rank:
            raise ValueError(
                f"{where}: scatter_dimension={dimension} is none of the {rank} of {list(shape)}."
            )
        dimension %= rank
        length = shape[dimension]
        if length % world if tiled else length != world:
            need = f"a multiple of the world size {world}" if tiled else f"{world}, the world"
            raise ValueError(
                f"{where}: dimension {dimension} of {list(shape)} has length {length}, it must be "
                f"{need}" + ("; pad it." if tiled else " size; or pass tiled=True.")
            )
        return dimension, shape

    def exactly(self, x: jax.Array) -> jax.Array:
        return lax.psum_scatter(
            x,
            self.axes.names,
            scatter_dimension=self.dimension,
            axis_index_groups=self.axes.groups,
            tiled=self.tiled,
        )

    def run(self, key: Any, x: jax.Array) -> jax.Array:
        d, world, axes = self.dimension, self.axes.world, self.axes
        split = x.reshape(*x.shape[:d], world, x.shape[d] // world, *x.shape[d + 1 :])
        rows = jnp.moveaxis(split, d, 0)
        code = self.code(x.size // world)
        if self.in_one_call(self.exchange, code):
            words = code.words(key, world)
            assert code.layout is not None
            out = self.exchange.reduce_scatter(self.name, words, rows, code.layout, axes)
        else:
            rank = axes.rank()
            received = self.exchange.scatter(self.name, code.encode(key, rows), axes)
            if self.compressor.owner_exact:
                own = lax.dynamic_index_in_dim(rows, rank, 0, keepdims=False)
                out = code.accumulate(rank, received, own, 1)
            else:
                zeros = jnp.zeros(rows.shape[1:], rows.dtype)
                out = code.accumulate(jnp.int32(NO_RANK), received, zeros, 1)
        return out if self.tiled else out.squeeze(d)


class _AllGather(_Half):
    sums = False
    call, needs = "all_gather", "gather"

    @staticmethod
    def place(
        where: str, shape: tuple[int, ...], world: int, dimension: int, tiled: bool
    ) -> tuple[int, tuple[int, ...]]:
        rank = len(shape) if tiled else len(shape) + 1
        if not -rank <= dimension < rank:
            raise ValueError(
                f"{where}: axis={dimension} is none of the result's {rank}; the operand is "
                f"{list(shape)}."
            )
        d = dimension % rank
        if tiled:
            return d, (*shape[:d], world * shape[d], *shape[d + 1 :])
        return d, (*shape[:d], world, *shape[d:])

    def exactly(self, x: jax.Array) -> jax.Array:
        names, groups = self.axes.names, self.axes.groups
        return lax.all_gather(
            x, names, axis=self.dimension, axis_index_groups=groups, tiled=self.tiled
        )

    def run(self, key: Any, x: jax.Array) -> jax.Array:
        d, axes, code = self.dimension, self.axes, self.code(x.size)
        if self.in_one_call(self.exchange, code):
            words = code.words(key, None)
            assert code.layout is not None
            every = self.exchange.all_gather(self.name, words, x, code.layout, axes)
        else:
            payload = self.compressor.encode(x, key=key)
            rows = self.exchange.gather(self.name, payload, axes)
            # Typed as what lax.all_gather returns: it varies, though it is the same on all ranks.
            rows = _compat.vary_over(rows, axes.varying())
            every = code.decode(rows, x.shape, x.dtype)
        debug.compare(self.name, self.axes, [every])
        stacked = jnp.moveaxis(every, 0, d)
        if not self.tiled:
            return stacked
        return stacked.reshape(*x.shape[:d], self.axes.world * x.shape[d], *x.shape[d + 1 :])


def _halve(
    half: type[_Half],
    name: str,
    tree: Any,
    axes: Axes,
    compressor: Compressor | Policy | Plan | None,
    dimension: int,
    tiled: bool,
    key: Any,
    exchange: Exchange | str,
) -> Any:
    """`half` of every leaf."""
    nonfinite.refuse_skip(name)
    bare, sends = is_bare(tree), auto.named(name, exchange)
    if axes.world > 1:
        sends.require(name, axes.names)
    tree = jax.tree.map(jnp.asarray, tree)
    whole, dimensions = [], []
    for leaf in leaves_of(tree):
        where = _where(name, leaf.path)
        d, shape = half.place(where, leaf.shape, axes.world, dimension, tiled)
        whole.append(dataclasses.replace(leaf, shape=shape))
        dimensions.append(d)
    chosen = compressors_of(name, whole, compressor, bare=bare)
    leaves, treedef = jax.tree.flatten(tree)
    out = []
    for i, (x, leaf, d) in enumerate(zip(leaves, whole, dimensions, strict=True)):
        compressor, number = chosen[i], None if bare else i
        row = leaf.size // axes.world
        if axes.world == 1 or row == 0 or compressor.lossless or not compressor.supports(x.dtype):
            compressor = Identity()
        call = half(name, _with_rows(name, leaf.path, compressor), axes, sends, d, tiled)
        out.append(_apply(call, leaf.path, number, key, x, row))
    out, _ = nonfinite.watch(name, axes, [leaf.path for leaf in whole], leaves, out)
    return jax.tree.unflatten(treedef, out)


def _where(name: str, path: str) -> str:
    return f"{name}: leaf {path!r}" if path else name


def _apply(
    call: _Half, path: str, number: int | None, key: Any, x: jax.Array, row: int
) -> jax.Array:
    """One leaf's result, by the exchange asked for or the fastest.

    `row` values travel to each rank; `number` keeps a leaf's noise apart from that of others.
    """
    name, compressor, world = call.name, call.compressor, call.axes.world
    if compressor.lossless:
        return call.exactly(x)
    if call.sums:
        call.axes.check_varying(name, [(path, x)])
    own = None
    if require_key(_where(name, path), [compressor], key):
        own = jax.random.fold_in(key, call.axes.index())
        own = own if number is None else jax.random.fold_in(own, number)
    exchange: Exchange | None = call.exchange
    if isinstance(exchange, Auto):
        code = call.code(row)
        usable = [
            e
            for e in auto.available(call.axes.names)
            if isinstance(e, Xla) or call.in_one_call(e, code)
        ]
        sent = CodedLeaf(compressor, (row,), x.dtype, 0)
        exchange = exchange.choose(name, usable, world, load_of([sent], rows=world))
    if exchange is None:
        return call.exactly(x)
    if call.needs not in exchange.can and not call.in_one_call(exchange, call.code(row)):
        raise ValueError(
            f"{_where(name, path)}: exchange={exchange.shorthand!r} has no {call.needs!r}, which "
            f"{compressor} needs here; it can {', '.join(sorted(exchange.can))}. Use "
            'exchange="xla", or "auto".'
        )
    return _run(dataclasses.replace(call, exchange=exchange), own, x)


def _with_rows(name: str, path: str, compressor: Compressor) -> PayloadCompressor:
    """Raises ValueError for a compressor whose code is no bytes."""
    if isinstance(compressor, PayloadCompressor):
        return compressor
    raise ValueError(
        f"{_where(name, path)}: the code of {compressor} is numbers that all ranks sum up, and "
        "this call sends each rank a row of its own; use a compressor of bytes, such as Quantize."
    )


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _run(call: _Half, key: Any, x: jax.Array) -> jax.Array:
    value, compressor = _compat.plain(x), call.compressor
    if compressor.prepares:
        value = compressor.prepare(value.astype(jnp.float32), ())[0].astype(x.dtype)
    return _compat.typed_like(call.run(key, value), x)


@_run.defjvp
def _run_jvp(call: _Half, primals: Any, tangents: Any) -> Any:
    return _run(call, *primals), call.exactly(tangents[1])
