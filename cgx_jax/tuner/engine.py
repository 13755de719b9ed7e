"""The options of exchanges that are fastest on the user's links.

Those of the MPI engine by coordinate descent, the streams of NCCL by trying each number.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Sequence

import jax
import numpy as np

from cgx_jax import agreement
from cgx_jax.collectives import psum_compressed
from cgx_jax.compressors import Quantize
from cgx_jax.exchanges import Mpi, Nccl, mpi
from cgx_jax.link_timer import LinkTimer, gradient
from cgx_jax.tuner.candidates import STREAMS
from cgx_jax.tuner.trials import best

VALUES = {
    "segment_bytes": (1 << 15, 1 << 17, 1 << 19),
    "window": (2, 4, 8),
    "threads": (1, 2, 4),
}
SIZES = (1 << 20, 1 << 24)  # fp32 bytes that the options are measured on
ROUNDS = 6
LEAST_ROUNDS = 4  # for quartiles
CALLS = 3 * ROUNDS * sum(map(len, VALUES.values()))  # on a size, of a descent
CODE = Quantize(4)
STREAM_BYTES = 1 << 26  # fp32, of the buffer on which they are compared


def tune_engine(links: LinkTimer, left: Callable[[], float]) -> Mpi:
    """The fastest options of `Mpi`, which its engine runs with from now on.

    `left` returns seconds that every process agrees on. Sizes on which a descent would take longer
    are left out, and a round that does not fit into what is left ends it. Every process calls it.
    """
    _run_with(links, mpi.defaults())
    reduce = links.collective(lambda x: psum_compressed(x, links.axis, CODE, exchange="mpi"))
    arrays: list[jax.Array] = []
    needed = 0.0
    for size in SIZES:
        if needed >= left():
            break
        x = links.place(gradient, size // 4)
        links.seconds([reduce], x, 1)  # compiles
        begun = left()
        links.seconds([reduce], x, 1)
        now = left()
        needed += CALLS * (begun - now)
        if needed > now:
            break
        arrays.append(x)
    if not arrays:
        return mpi.defaults()

    def measure(engines: Sequence[Mpi]) -> np.ndarray:
        """f64[rounds, engines]: the geometric mean over the sizes, of engines that take turns."""
        samples = np.empty((ROUNDS, len(engines)))
        remaining, longest = left(), 0.0  # seconds, and those of a round
        for done, row in enumerate(samples):
            if remaining <= longest:
                return samples[:done]
            for i, engine in enumerate(engines):
                _run_with(links, engine)
                times = []
                for x in arrays:
                    links.seconds([reduce], x, 1)  # fills the engine's buffers
                    times.append(links.seconds([reduce], x, 2).min())
                row[i] = np.prod(times) ** (1 / len(times))
            begun, remaining = remaining, left()
            longest = max(longest, begun - remaining)
        return samples

    payload = CODE.payload_bytes((arrays[-1].shape[1],), np.dtype(np.float32))
    cores = max(1, (os.cpu_count() or 1) * agreement.hosts() // jax.process_count())
    found = descend(mpi.defaults(), payload // links.world, cores, measure)
    _run_with(links, found)
    return found


def _run_with(links: LinkTimer, engine: Mpi) -> None:
    links.barrier()  # no call is in flight when an engine ends
    engine.require("tune", ())


def descend(
    start: Mpi,
    chunk: int,
    cores: int,
    measure: Callable[[Sequence[Mpi]], np.ndarray],
) -> Mpi:
    """From `start` on, one option after the other to the value that is surely faster.

    `measure` takes engines to f64[rounds, engines], which compares them with the first. The descent
    ends at fewer than four rounds. Values that cannot differ are left out: no segment is longer
    than a chunk of `chunk` payload bytes, a chunk has no more segments in flight than it has at
    all, and a rank with `cores` gains nothing from more threads.
    """
    current = start
    for name, values in VALUES.items():
        segments = -(-chunk // (current.segment_bytes or chunk))
        most = {"segment_bytes": chunk, "window": segments, "threads": cores}[name]
        different: dict[int, int] = {}
        for value in (getattr(current, name), *values):  # of values that cannot differ the least
            different.setdefault(min(value, most), value)
        tried = [dataclasses.replace(current, **{name: v}) for v in different.values()]
        if len(tried) > 1:
            samples = measure(tried)
            if len(samples) < LEAST_ROUNDS:
                break
            current = tried[best(samples, similar=True)]
    return current


def tune_streams(links: LinkTimer, left: Callable[[], float]) -> Nccl:
    """The fastest number of streams; one, unless another is surely faster.

    `left` returns seconds that every process agrees on. Where the rounds do not fit into them, it
    is one. Every process calls it.
    """
    tried = [Nccl(streams=count) for count in STREAMS]
    call = functools.partial(psum_compressed, axis_name=links.axis, compressor=CODE)
    reductions = [links.collective(functools.partial(call, exchange=e)) for e in tried]
    x = links.place(gradient, STREAM_BYTES // 4)
    links.seconds(reductions, x, 1)  # compiles and connects
    begun = left()
    links.seconds(reductions, x, 1)
    now = left()
    if ROUNDS * (begun - now) > now:
        return tried[0]
    return tried[best(links.seconds(reductions, x, ROUNDS))]
