"""Finds the options of exchanges that are fastest on the user's links.

A coordinate descent finds the options of the MPI engine. The streams of NCCL are tried one by one.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Sequence

import jax
import numpy as np

from cgx_jax.compressors import Quantize
from cgx_jax.exchanges import Mpi, Nccl, mpi
from cgx_jax.host import agreement
from cgx_jax.tuning.candidates import streams
from cgx_jax.tuning.link_timer import LinkTimer, gradient
from cgx_jax.tuning.race import relative

VALUES = {"segment_bytes": (1 << 15, 1 << 17, 1 << 19), "window": (2, 4, 8), "threads": (1, 2, 4)}
SIZES = (1 << 20, 1 << 24)  # fp32 bytes of the buffers on which options are measured
ROUNDS = 6
CALLS = 3 * ROUNDS * sum(map(len, VALUES.values()))  # of a descent, per size
CODE = Quantize(4)
STREAM_BYTES = 1 << 26  # fp32 bytes of the buffer on which streams are compared


def fewest() -> tuple[int, int]:
    """Returns the fewest threads of an engine, and cores of a host, of all processes.

    Hosts may differ in both, but all processes must try the same options.
    """
    own = mpi.defaults().threads, os.cpu_count() or 1
    threads, cores = agreement.rows(own).min(axis=0)
    return int(threads), int(cores)


def tune_engine(links: LinkTimer, left: Callable[[], float]) -> Mpi:
    """Returns the fastest options of `Mpi`, and restarts its engine with them.

    `left` returns the remaining seconds, on which all processes agree. A size is skipped if the
    descent would not fit into them, and the descent ends before a round that does not fit. Every
    process calls this function.
    """
    threads, cores = fewest()
    start = dataclasses.replace(mpi.defaults(), threads=threads)
    _run_with(links, start)
    reduce = links.all_reduce(CODE, "mpi")
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
        return start

    def measure(engines: Sequence[Mpi]) -> np.ndarray | None:
        """Returns f64[ROUNDS, engines], which take turns: geometric means over the sizes."""
        samples = np.empty((ROUNDS, len(engines)))
        remaining, longest = left(), 0.0  # seconds, also of the longest round
        for row in samples:
            if remaining <= longest:
                return None
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
    of_a_process = max(1, cores * agreement.hosts() // jax.process_count())
    found = descend(start, payload // links.world, of_a_process, measure)
    _run_with(links, found)
    return found


def _run_with(links: LinkTimer, engine: Mpi) -> None:
    links.barrier()  # no call is in flight when an engine ends
    engine.require("tune", ())


def descend(
    start: Mpi, chunk: int, cores: int, measure: Callable[[Sequence[Mpi]], np.ndarray | None]
) -> Mpi:
    """Returns the options that a descent from `start` finds, one option after the other.

    `measure` maps engines to f64[rounds, engines], or to None if no time is left, which ends the
    descent. Values that cannot make a difference are skipped: segments longer than a chunk of
    `chunk` payload bytes, windows of more segments than a chunk has, and more threads than the
    `cores` of a rank.
    """
    current = start
    for name, values in VALUES.items():
        segments = -(-chunk // (current.segment_bytes or chunk))
        most = {"segment_bytes": chunk, "window": segments, "threads": cores}[name]
        different: dict[int, int] = {}
        for value in (getattr(current, name), *values):  # of equivalent values, the first
            different.setdefault(min(value, most), value)
        tried = [dataclasses.replace(current, **{name: v}) for v in different.values()]
        if len(tried) > 1:
            samples = measure(tried)
            if samples is None:
                break
            current = tried[np.argmin(relative(samples))]
    return current


def tune_streams(links: LinkTimer, left: Callable[[], float]) -> Nccl:
    """Returns `Nccl` with the fastest number of streams.

    `left` returns the remaining seconds, on which all processes agree. If the rounds do not fit
    into them, the result has one stream. Every process calls this function.
    """
    tried = [Nccl(streams=count) for count in streams()]
    if len(tried) == 1:
        return tried[0]
    reductions = [links.all_reduce(CODE, exchange) for exchange in tried]
    x = links.place(gradient, STREAM_BYTES // 4)
    links.seconds(reductions, x, 1)  # compiles and connects
    begun = left()
    links.seconds(reductions, x, 1)
    now = left()
    if ROUNDS * (begun - now) > now:
        return tried[0]
    return tried[np.argmin(relative(links.seconds(reductions, x, ROUNDS)))]
