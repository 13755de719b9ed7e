"""Times collectives over one mesh axis: ranks begin together, and the slowest one counts."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from cgx_jax.axes import require_axes
from cgx_jax.calls.psum import psum_compressed
from cgx_jax.compressors import Compressor
from cgx_jax.exchanges import Exchange
from cgx_jax.host import agreement

_SUFFIXES = {"k": 1e3, "M": 1e6, "G": 1e9}


def size_in_bytes(text: str) -> int:
    """Converts "25M" to 25,000,000; raises ValueError if the text is not a size."""
    suffix = text[-1:] if text[-1:] in _SUFFIXES else ""
    size = float(text.removesuffix(suffix)) * _SUFFIXES.get(suffix, 1)
    if not math.isfinite(size):
        raise ValueError(text)
    return int(size)


def size_text(nbytes: float) -> str:
    """Converts 25,000,000 to "25 MB"."""
    for unit in ("bytes", "kB", "MB"):
        if nbytes < 1000:
            return f"{nbytes:.3g} {unit}"
        nbytes /= 1000
    return f"{nbytes:.3g} GB"


def gradient(rank: int, values: int) -> np.ndarray:
    """Returns a rank's gradient-like input, f32[values], which is the same in every run."""
    return np.random.default_rng(rank).standard_normal(values, dtype=np.float32) * 1e-2


class LinkTimer:
    """Times functions on the ranks of `axis` of `mesh`, in one process or several.

    Every method but `place` is collective: all processes call it. Raises ValueError if the mesh
    lacks the axis, or if the axis has only one rank.
    """

    def __init__(self, caller: str, mesh: Mesh, axis: str) -> None:
        require_axes(caller, (axis,), mesh)
        self.mesh, self.axis, self.world = mesh, axis, mesh.shape[axis]
        if self.world < 2:
            raise ValueError(
                f"{caller}: axis {axis!r} has 1 rank and nothing to send; use a mesh of 2 devices "
                'or more. On one CPU, jax.config.update("jax_num_cpu_devices", 8) simulates them.'
            )
        self.first = jax.process_index() == 0
        self.token = self.place(gradient, 1)
        self.psum = self.collective(lambda x: lax.psum(x, axis))

    def place(self, value_of: Callable[[int, int], np.ndarray], values: int) -> jax.Array:
        """Returns f32[world, values]; row r lies on rank r and is value_of(r, values)."""

        def row(index: Any) -> np.ndarray:
            return value_of(index[0].start, values)[None]

        sharding = NamedSharding(self.mesh, P(self.axis))
        return jax.make_array_from_callback((self.world, values), sharding, row)

    def collective(
        self, function: Callable[[jax.Array], jax.Array], *axes: str
    ) -> Callable[..., jax.Array]:
        """Compiles `function` of a rank's row, whose result is the same on all but these axes."""
        return jax.jit(
            jax.shard_map(
                lambda x: function(x[0]), mesh=self.mesh, in_specs=P(self.axis), out_specs=P(*axes)
            )
        )

    def all_reduce(
        self, compressor: Compressor, exchange: Exchange | str, **how: Any
    ) -> Callable[..., jax.Array]:
        """Compiles `psum_compressed` of a rank's row; `how` has more of its arguments."""
        return self.collective(
            lambda x: psum_compressed(x, self.axis, compressor, exchange=exchange, **how)
        )

    def local(self, function: Callable[[jax.Array], jax.Array]) -> Callable[..., jax.Array]:
        """Compiles `function` of a rank's row, with a separate result for each rank."""
        return self.collective(lambda x: function(x)[None], self.axis)

    def barrier(self) -> None:
        """Blocks until every rank has arrived."""
        self.psum(self.token).block_until_ready()

    def timed(self, call: Callable[..., object], *arguments: Any) -> float:
        """Returns the seconds of a call on this rank, which all ranks begin together."""
        self.barrier()
        self.barrier()  # the first barrier's stragglers have arrived by now
        start = time.perf_counter()
        jax.block_until_ready(call(*arguments))
        return time.perf_counter() - start

    def seconds(
        self, functions: Sequence[Callable[..., jax.Array]], x: jax.Array, rounds: int
    ) -> np.ndarray:
        """Times functions in turns; returns the slowest process's f64[rounds, functions].

        Each round has another order, the same on all ranks: what ran before changes a function's
        time.
        """
        samples = np.empty((rounds, len(functions)))
        orders = np.random.default_rng(0)
        for sample in samples:
            for i in orders.permutation(len(functions)):
                sample[i] = self.timed(functions[i], x)
        return agreement.maximum(samples)
