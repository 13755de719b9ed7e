"""The halves of an all-reduce, for sharded data-parallel training: reduce-scatter and all-gather.

Drop-in for `lax.psum_scatter` and `lax.all_gather`. Each works on rows, one for each rank, and a
row is a leaf by itself.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax

from cgx_jax import debug
from cgx_jax.axes import Axes
from cgx_jax.codecs import accumulate_rows, encode_rows, row_words
from cgx_jax.compressors import Compressor, Quantize
from cgx_jax.compressors.base import require_key
from cgx_jax.exchange import choose, xla
from cgx_jax.wire import Layout


def psum_scatter_compressed(
    x: Any,
    axis_name: Any,
    compressor: Compressor | None = None,
    *,
    scatter_dimension: int = 0,
    tiled: bool = False,
    key: Any = None,
    exchange: str = "auto",
) -> jax.Array:
    """Each rank's slice of the sum, from compressed payloads; `lax.psum_scatter`.

    `x` is one array; its `scatter_dimension` equals the world size and is removed, or with
    `tiled` is a multiple of it and divided. The result is fp32 accumulation of the other ranks'
    decoded slices on this rank's exact ones, in x's dtype; it is not quantized again. Dtypes that
    the compressor does not take are reduced exactly. The derivative is `lax.psum_scatter`'s.

    `exchange` is "xla"; "nccl", one fused call between CUDA devices (for `Quantize`; others go by
    "xla"); or "auto": by the active profile, of which this takes half a `psum_compressed` of x,
    and without one "xla". Raises ValueError or TypeError while tracing: a dimension that cannot
    be divided, an exchange that does not work here ("mpi" is for sums alone), a missing key, an
    operand that is already reduced.
    """
    name = "psum_scatter_compressed"
    choose.require_half(name, exchange)
    compressor = _one_compressor(name, compressor)
    axes, x = Axes.resolve(name, axis_name, None), jnp.asarray(x)
    dimension = range(x.ndim)[scatter_dimension] if -x.ndim <= scatter_dimension < x.ndim else None
    if dimension is None:
        raise ValueError(f"{name}: scatter_dimension={scatter_dimension} of an array of {x.ndim}.")
    length = x.shape[dimension]
    if length % axes.world if tiled else length != axes.world:
        need = f"a multiple of the world size {axes.world}" if tiled else f"{axes.world}, the world"
        raise ValueError(
            f"{name}: dimension {dimension} of {list(x.shape)} has length {length}, it must be "
            f"{need}" + ("; pad it." if tiled else " size; or pass tiled=True.")
        )
    call = _PsumScatter(name, compressor, axes, exchange, dimension, tiled)
    return _apply(call, key, x, x.size // axes.world)


def all_gather_compressed(
    x: Any,
    axis_name: Any,
    compressor: Compressor | None = None,
    *,
    axis: int = 0,
    tiled: bool = False,
    key: Any = None,
    exchange: str = "auto",
) -> jax.Array:
    """Every rank's `x`, compressed on the wire; `lax.all_gather`.

    Stacked along a new dimension `axis`, or concatenated along it when `tiled`. Each rank decodes
    its own payload too, so the result is the same on all. Dtypes that the compressor does not
    take are gathered exactly. The derivative is `lax.all_gather`'s. `exchange`, and what is
    raised: as for `psum_scatter_compressed`, with the result in place of x.
    """
    name = "all_gather_compressed"
    choose.require_half(name, exchange)
    compressor = _one_compressor(name, compressor)
    axes, x = Axes.resolve(name, axis_name, None), jnp.asarray(x)
    rank_of_result = x.ndim if tiled else x.ndim + 1
    if not -rank_of_result <= axis < rank_of_result:
        raise ValueError(f"{name}: axis={axis} of a result with {rank_of_result} dimensions.")
    call = _AllGather(name, compressor, axes, exchange, axis % rank_of_result, tiled)
    return _apply(call, key, x, x.size)


def _one_compressor(name: str, compressor: Compressor | None) -> Compressor:
    compressor = Quantize() if compressor is None else compressor
    if not isinstance(compressor, Compressor):
        raise TypeError(
            f"{name}: {type(compressor).__name__} is not a compressor; it takes one array and one "
            "compressor such as cgx_jax.Quantize(bits=4)."
        )
    return compressor


@dataclasses.dataclass(frozen=True)
class _Half(abc.ABC):
    """What a call is traced from: static and hashable."""

    name: str
    compressor: Compressor
    axes: Axes
    exchange: str
    dimension: int
    tiled: bool

    sums: ClassVar[bool]

    @abc.abstractmethod
    def exactly(self, x: jax.Array) -> jax.Array:
        """What `lax` gives."""

    @abc.abstractmethod
    def run(self, key: Any, x: jax.Array) -> jax.Array:
        """The same from compressed payloads, by the exchange named."""

    def quantizer(self) -> Quantize:
        assert isinstance(self.compressor, Quantize)  # for a fused call; choose.resolve sees to it
        return self.compressor


class _PsumScatter(_Half):
    sums = True

    def exactly(self, x: jax.Array) -> jax.Array:
        return lax.psum_scatter(
            x, self.axes.names, scatter_dimension=self.dimension, tiled=self.tiled
        )

    def run(self, key: Any, x: jax.Array) -> jax.Array:
        d, world, names = self.dimension, self.axes.world, self.axes.names
        split = x.reshape(*x.shape[:d], world, x.shape[d] // world, *x.shape[d + 1 :])
        rows = jnp.moveaxis(split, d, 0)
        if (fused := choose.HALVES.get(self.exchange)) is not None:
            words = row_words(self.quantizer(), key, world)
            layout = Layout((self.quantizer().field(x.size // world),), 1)
            out = fused.reduce_scatter(self.name, words, rows, layout, names)
        else:
            rank = self.axes.rank()
            sent = encode_rows(self.compressor, key, rows)
            received = xla.scatter(sent, names, self.axes.groups)
            own = lax.dynamic_index_in_dim(rows, rank, 0, keepdims=False)
            out = accumulate_rows(self.compressor, rank, received, own, 1)
        return out if self.tiled else out.squeeze(d)


class _AllGather(_Half):
    sums = False

    def exactly(self, x: jax.Array) -> jax.Array:
        return lax.all_gather(x, self.axes.names, axis=self.dimension, tiled=self.tiled)

    def run(self, key: Any, x: jax.Array) -> jax.Array:
        d, names = self.dimension, self.axes.names
        if (fused := choose.HALVES.get(self.exchange)) is not None:
            layout = Layout((self.quantizer().field(x.size),), 1)
            every = fused.all_gather(self.name, self.quantizer().words(key), x, layout, names)
        else:
            payload = self.compressor.encode(x, key=key)[0]
            rows = lax.all_gather(payload, names)
            every = jax.vmap(lambda p: self.compressor.decode(p, x.shape, x.dtype))(rows)
        debug.compare(self.name, self.axes, [every])
        stacked = jnp.moveaxis(every, 0, d)
        if not self.tiled:
            return stacked
        return stacked.reshape(*x.shape[:d], self.axes.world * x.shape[d], *x.shape[d + 1 :])


def _apply(call: _Half, key: Any, x: jax.Array, row: int) -> jax.Array:
    """The result, by the exchange asked for or the fastest; `row` values travel to each rank."""
    name, compressor, world = call.name, call.compressor, call.axes.world
    fused = choose.HALVES.get(call.exchange)
    if fused is not None and world > 1:
        fused.require(name, call.axes.names)
    if world == 1 or row == 0 or compressor.lossless or not compressor.supports(x.dtype):
        return call.exactly(x)
    if call.sums:
        call.axes.check_varying(name, [("", x)])
    needs_key = require_key(name, [compressor], key)
    own = jax.random.fold_in(key, call.axes.index()) if needs_key else None
    usable = [e for e in choose.available(call.axes.names) if e == "xla" or e in choose.HALVES]
    bits = compressor.wire_bits(row, x.dtype) / row
    load = choose.Load(world * row, world * row * x.dtype.itemsize, bits)
    quantized = isinstance(compressor, Quantize)
    method = choose.resolve(name, call.exchange, usable, world, load, quantized)
    if method == "psum":
        return call.exactly(x)
    return _run(dataclasses.replace(call, exchange=method), own, x)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _run(call: _Half, key: Any, x: jax.Array) -> jax.Array:
    return call.run(key, x)


@_run.defjvp
def _run_jvp(call: _Half, primals: Any, tangents: Any) -> Any:
    return _run(call, *primals), call.exactly(tangents[1])
