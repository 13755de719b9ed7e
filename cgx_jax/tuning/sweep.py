"""`tune`: measures psum and every exchange on the user's own links, for `exchange="auto"`."""

from __future__ import annotations

import functools
import logging
import math
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh

from cgx_jax.choice import auto
from cgx_jax.choice.profile import ONE_SHOT, Codec, Profile, Row
from cgx_jax.compressors import Quantize
from cgx_jax.compressors.base import CodedLeaf
from cgx_jax.compressors.buffers import chunk_code
from cgx_jax.exchanges import Exchange, Mpi, Nccl
from cgx_jax.host import agreement, files, installation
from cgx_jax.host.console import Progress
from cgx_jax.kernels.primitives import Sent
from cgx_jax.kernels.units import Units
from cgx_jax.tuning.engine import tune_engine, tune_streams
from cgx_jax.tuning.link_timer import LinkTimer, gradient, size_text

_log = logging.getLogger(__name__)
SIZES = tuple(4096 * 4**i for i in range(8))  # 4 KiB to 64 MiB
BITS = (2, 4, 8)
ROUNDS = range(3, 102)  # repeats per size: at least 3, at most 101 where repeats are cheap
CODEC = {
    "plain": Quantize(),
    "noise": Quantize(rounding="stochastic"),
    "rotation": Quantize(rotation=True),
    "units": Quantize(),
}
# "gather_sum" wins where latency dominates, but sends too many bytes for larger buffers. Between
# two ranks it sends no more than other reductions.
ONE_SHOT_BYTES = 1 << 20
CODEC_VALUES = 1 << 18  # fits in caches, where the kinds' costs differ the most
CODEC_ROUNDS = 21


def tune(
    mesh: Mesh,
    axis_name: str,
    *,
    path: str | os.PathLike[str] | None = None,
    bits: Sequence[int] = BITS,
    sizes: Sequence[int] = SIZES,
    budget_seconds: float = 60.0,
) -> Profile:
    """Measures this machine's links for `exchange="auto"` and activates the resulting profile.

    Times `lax.psum` and every usable exchange over `axis_name` of `mesh` in turns, on fp32 arrays
    of `sizes` bytes per rank, at `bits` bits per value (bucket 512). Each time is the slowest
    process's, as the median over the repeats. Up to 1 MiB, and at every size between two ranks,
    each exchange is also timed with the reduction "gather_sum". Where `Mpi` or `Nccl` is usable, it
    is tuned first: segment bytes, window and threads of `Mpi`, or streams of `Nccl`. That takes at
    most a quarter of the budget. The codec is also timed without sending anything, to price random
    rounding, rotation and units.

    The measurement ends at the first size that does not fit into the rest of `budget_seconds`.
    Returns the profile, which is active as after `use_profile`. Process 0 also writes it to `path`.
    Shows progress on stderr, and warns through its logger about sizes that are left out. With
    several processes all of them call it, and all get the same profile. Raises ValueError for a
    wrong axis, width, size or budget. Before it measures, it raises OSError for a path that cannot
    be written.
    """
    links = LinkTimer("tune", mesh, axis_name)
    sizes = sorted(set(sizes))
    if not sizes or sizes[0] < 4 or not bits or not budget_seconds > 0:
        raise ValueError(
            f"tune: sizes={sizes}, bits={list(bits)} and budget_seconds={budget_seconds} must hold "
            "a size of 4 bytes or more, a width of 1..8, and a time above 0."
        )
    asked = sizes, list(bits), budget_seconds, [e.shorthand for e in auto.available()]
    agreement.require_same(
        asked,
        "tune: the sizes, bits, budget_seconds or usable exchanges",
        "give every process the same ones, and install the same build everywhere",
    )
    agreement.writable(path)
    start = time.perf_counter()
    with Progress("tune", len(sizes), links.first) as progress:
        latency = float(np.median(links.seconds([links.psum], links.token, ROUNDS[-1])))
        codec = _codec(links)
        engine = None
        for exchange, tuned in ((Mpi(), tune_engine), (Nccl(), tune_streams)):
            if exchange in auto.available():
                progress.step(0, f"tuning {exchange.shorthand}")
                begun = _elapsed(start)
                until = begun + (budget_seconds - begun) / 4
                engine = tuned(links, functools.partial(_left, start, until))
        methods = _methods(links, bits, engine)
        rows: list[Row] = []
        set_up = one_round = 0.0
        for done, size in enumerate(sizes):
            growth = size / sizes[done - 1] if done else 1.0
            needed = set_up + growth * (1 + ROUNDS[0]) * one_round
            begun = _elapsed(start)
            if done and begun + needed > budget_seconds:
                left = max(budget_seconds - begun, 0)
                progress.step(done, f"stopped: {done} of {len(sizes)} sizes", last=True)
                if links.first:
                    _log.warning(
                        "tune: %s and larger are left out. The next size takes about %.0f s, and "
                        "%.0f s of budget_seconds=%g are left; budget_seconds=%d is enough for it.",
                        size_text(size),
                        needed,
                        left,
                        budget_seconds,
                        math.ceil(begun + needed),
                    )
                break
            progress.step(done, f"measuring {size_text(size)}")
            x = links.place(gradient, size // 4)
            once = size <= ONE_SHOT_BYTES or links.world == 2
            tried = [m for m in methods if once or not m[0].endswith(ONE_SHOT)]
            functions = [links.psum, *(methods[m] for m in tried)]
            links.seconds(functions, x, 1)  # compiles
            one_round = float(links.seconds(functions, x, 1).sum())
            now = _elapsed(start)
            set_up = now - begun
            share = (budget_seconds - now) / (len(sizes) - done)
            rounds = int(np.clip(share / one_round, ROUNDS[0], ROUNDS[-1]))
            medians = np.median(links.seconds(functions, x, rounds), axis=0)
            rows.append(Row("psum", 32, size, float(medians[0])))
            for (method, width), seconds in zip(tried, medians[1:], strict=True):
                rows.append(Row(method, width, size, float(seconds)))
        else:
            progress.step(len(sizes), "done", last=True)
    largest = [row for row in rows if row.method == "psum"][-1]
    profile = Profile(
        **installation.facts(),
        hosts=agreement.hosts(),
        mpi=installation.mpi_library(),
        world=links.world,
        axis=links.axis,
        latency=latency,
        algbw=largest.bytes / largest.seconds,
        codec=codec,
        rows=tuple(rows),
        engine=engine,
    )
    agreed = auto.use_profile(profile)
    assert agreed is not None
    if path is not None and links.first:
        files.write(path, agreed.to_json())
    return agreed


def _methods(
    links: LinkTimer, bits: Sequence[int], engine: Exchange | None
) -> dict[tuple[str, float], Callable[..., Any]]:
    """Maps (method, payload bits per value) to compiled reductions; `engine` is the tuned one."""
    methods = {}
    every = [engine if type(e) is type(engine) else e for e in auto.available()]
    for width in sorted(set(bits)):
        compressor = Quantize(width)
        payload_bits = compressor.wire_bits(compressor.bucket_size) / compressor.bucket_size
        for exchange in every:
            name = exchange.shorthand
            methods[name, payload_bits] = links.all_reduce(compressor, exchange)
            if "gather" in exchange.can:
                once = links.all_reduce(compressor, exchange, reduction="gather_sum")
                methods[name + ONE_SHOT, payload_bits] = once
    return methods


def _codec(links: LinkTimer) -> Codec:
    """Returns the seconds per value of each kind in `CODEC`, with all ranks at work."""
    works = [links.local(functools.partial(_encode_and_decode, links, kind)) for kind in CODEC]
    x = links.place(gradient, CODEC_VALUES)
    links.seconds(works, x, 1)  # compiles
    medians = np.median(links.seconds(works, x, CODEC_ROUNDS), axis=0)
    return Codec(**{k: float(s) / CODEC_VALUES for k, s in zip(CODEC, medians, strict=True)})


def _encode_and_decode(links: LinkTimer, kind: str, x: jax.Array) -> jax.Array:
    """Does a rank's computation in an all-reduce of `x` by the "xla" exchange, without sending."""
    code = chunk_code((CodedLeaf(CODEC[kind], x.shape, x.dtype, 0),), links.world)
    unit = jnp.ones((2, x.size // 512), jnp.float32), jnp.ones((2, 512), jnp.float32)
    units = Units.of([unit if kind == "units" else None])
    own = Sent(np.zeros(2, np.uint32), [x], units, lax.axis_index(links.axis))
    rows, _ = code.encode(own, residual=False)
    chunk, _ = code.reduce(own, rows, 1, None)
    return code.decode(jnp.broadcast_to(chunk, rows.shape), [x], units)[0]


def _elapsed(start: float) -> float:
    """Returns the slowest process's seconds since `start`, so that all decide alike."""
    return float(agreement.rows([time.perf_counter() - start]).max())


def _left(start: float, until: float) -> float:
    return until - _elapsed(start)
