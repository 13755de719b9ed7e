"""The options of the MPI engine that are fastest on the user's links, by coordinate descent."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Sequence

import jax
import numpy as np

from cgx_jax import agreement
from cgx_jax.collectives import psum_compressed
from cgx_jax.compressors import Quantize
from cgx_jax.exchanges import Mpi, mpi
from cgx_jax.link_timer import LinkTimer, gradient
from cgx_jax.tuner.trials import best

VALUES = {
    "segment_bytes": (1 << 15, 1 << 17, 1 << 19),
    "window": (2, 4, 8),
    "threads": (1, 2, 4),
}
SIZES = (1 << 20, 1 << 24)  # fp32 bytes that the options are measured on
ROUNDS = 5
CODE = Quantize(4)


def tune_engine(links: LinkTimer, left: Callable[[], float]) -> Mpi:
    """The fastest options of `Mpi`, which its engine runs with from now on.

    Ends early when `left`, seconds that every process agrees on, is no longer above 0. Every
    process calls it.
    """
    calls = [
        (
            links.collective(lambda x: psum_compressed(x, links.axis, CODE, exchange="mpi")),
            links.place(gradient, size // 4),
        )
        for size in SIZES
    ]

    def measure(engines: Sequence[Mpi]) -> np.ndarray:
        """f64[rounds, engines]: the geometric mean over the sizes, of engines that take turns."""
        samples = np.empty((ROUNDS, len(engines)))
        for row in samples:
            for i, engine in enumerate(engines):
                links.barrier()  # no call is in flight when an engine ends
                engine.require("tune", ())
                times = []
                for call, x in calls:
                    links.seconds([call], x, 1)  # fills the engine's buffers
                    times.append(links.seconds([call], x, 2).min())
                row[i] = np.prod(times) ** (1 / len(times))
        return samples

    chunk = max(CODE.payload_bytes((size // 4,), np.dtype(np.float32)) for size in SIZES)
    cores = max(1, (os.cpu_count() or 1) * agreement.hosts() // jax.process_count())
    found = descend(mpi.defaults(), chunk // links.world, cores, measure, left)
    links.barrier()
    found.require("tune", ())
    return found


def descend(
    start: Mpi,
    chunk: int,
    cores: int,
    measure: Callable[[Sequence[Mpi]], np.ndarray],
    left: Callable[[], float],
) -> Mpi:
    """From `start` on, one option after the other to the value that is surely faster.

    `measure` takes engines to f64[rounds, engines], which compares them with the first. Values that
    cannot differ are left out: no segment is longer than a chunk of `chunk` payload bytes, no more
    of them are in flight than it has, and a rank with `cores` gains nothing from more threads.
    """
    current = start
    for name, values in VALUES.items():
        if left() <= 0:
            break
        segments = -(-chunk // (current.segment_bytes or chunk))
        most = {"segment_bytes": chunk, "window": segments, "threads": cores}[name]
        different = {min(value, most): value for value in (*values, getattr(current, name))}
        tried = [dataclasses.replace(current, **{name: v}) for v in different.values()]
        tried.remove(current)
        if tried:
            tried = [current, *tried]
            current = tried[best(measure(tried))]
    return current
