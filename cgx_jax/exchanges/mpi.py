"""MPI: rows of bytes, and a call that encodes, sends, reduces and decodes in segments.

For CPU processes, one device each, started by an MPI launcher. It uses the library that mpi4py has
loaded, whatever its ABI, and is not linked to it. Importing this module loads no MPI.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import dataclasses
import functools
import logging
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import mlir

from cgx_jax import _compat
from cgx_jax.axes import Axes
from cgx_jax.collective import Collective
from cgx_jax.exchanges import fused, mpi_rows, program
from cgx_jax.exchanges.base import Call, Exchange, Fused, Least
from cgx_jax.exchanges.links import Link
from cgx_jax.kernels import native, primitives, scaling
from cgx_jax.kernels.primitives import Sent

_log = logging.getLogger(__name__)
_INSTALL = "pip install mpi4py mpich and start the processes with mpiexec"


_LIMITS = {
    "timeout": (0.001, 1e9),
    "segment_bytes": (64, 1 << 30),
    "window": (2, 1024),
    "threads": (1, 1024),
}
# docs/measurements/mpi_options.md has the measurements behind these.
DEFAULTS = {
    "timeout": 600.0,
    "segment_bytes": 1 << 17,
    "window": 4,
    "threads": max(1, min(4, (os.cpu_count() or 1) // 2)),
}
# How the engine of this process runs; None before the first call.
_running: dict[str, float] | None = None
_own: Any = None  # the communicator of this process's engines
_PROCESS = os.getpid()  # and not one that it forks
_LEFT = "cgx_jax/left"  # where processes write that they ended before they had one


@dataclasses.dataclass(frozen=True)
class Mpi(Exchange):
    """MPI between CPU processes, one device each, that an MPI launcher started.

    `segment_bytes` of payload travel as one message (default 128 KiB), and `window` segments are in
    flight (4). `threads` threads run kernels (half the cores, at most 4). A call fails after
    `timeout` seconds without a message (600). A process has one engine. An option that is None
    keeps the engine's current value, or the default. Other options restart the engine, so pass them
    on every rank, with no call in flight. Raises ValueError for an impossible option.
    """

    segment_bytes: int | None = None
    window: int | None = None
    threads: int | None = None
    timeout: float | None = None

    shorthand: ClassVar[str] = "mpi"
    tuned: ClassVar[tuple[str, ...]] = ("segment_bytes", "window", "threads")
    can: ClassVar[frozenset[str]] = frozenset(
        {"scatter", "gather", "all_reduce", "gather_sum", "start"}
    )

    def __post_init__(self) -> None:
        for name, (low, high) in _LIMITS.items():
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                raise ValueError(f"Mpi: {name}={value} must be in [{low:g}, {high:g}].")

    def missing(self, axes: Sequence[str] = ()) -> str | None:
        if (problem := _missing() or (fused.refusal_of_axes(axes) if axes else None)) is not None:
            return problem
        size = jax.sharding.get_abstract_mesh().size
        if axes and size != jax.process_count():
            return f"the mesh has {size} devices, but it must have all {jax.process_count()}"
        return None

    def here(self) -> bool:
        mpi = sys.modules.get("mpi4py.MPI")
        return mpi is not None and mpi.Is_initialized() and mpi.COMM_WORLD.size > 1

    def least(self, link: Link | None = None) -> Least | None:
        return Least(1 << 19, 1.0)

    def require(self, name: str, axes: Sequence[str]) -> None:
        super().require(name, axes)
        given = {k: v for k, v in dataclasses.asdict(self).items() if v is not None}
        _start({**(_running or DEFAULTS), **given})

    def scatter(self, name: str, rows: jax.Array, axes: Axes) -> jax.Array:
        return mpi_rows.scatter(name, rows, axes)

    def gather(self, name: str, row: jax.Array, axes: Axes) -> jax.Array:
        return mpi_rows.gather(name, row, axes)

    def fused(self, call: Call, sent: Sent) -> Fused:
        return _sums(call, sent)

    def start(self, call: Call, sent: Sent, ticket: Any) -> jax.Array:
        call, operands = _operands(dataclasses.replace(call, in_place=False), sent, ticket)
        how = {"number": call.number, "residuals": int(call.residual)}
        primitive = _CALLS[call.collective].start
        return fused.bind(primitive, mpi_rows.label(call.name), call, operands, **how)[0]

    def finish(self, call: Call, sent: Sent, ticket: Any) -> Fused:
        return _sums(call, sent, ticket)


def _operands(call: Call, sent: Sent, *ticket: Any) -> tuple[Call, list[Any]]:
    layout, factors = primitives.with_units(call.layout, sent.units)
    words = jnp.asarray(sent.words).reshape(-1, 2)
    operands = [words, fused.position(call.axes.names), *ticket, *sent.leaves, *factors]
    return dataclasses.replace(call, layout=layout), operands


def _sums(call: Call, sent: Sent, *ticket: Any) -> Fused:
    now, name = _CALLS[call.collective], mpi_rows.label(call.name)
    call, operands = _operands(call, sent, *ticket)
    call = dataclasses.replace(call, in_place=call.in_place and now.in_place and not ticket)
    if ticket:
        results = fused.bind(now.finish, name, call, operands, number=call.number)
    else:
        results = fused.bind(now.call, name, call, operands)
    out = Fused.of(call, results)
    if call.collective is Collective.GATHER_SUM:  # still in units
        out = out._replace(sums=scaling.all_decoded(out.sums, sent.units, sent.leaves))
    return out


def defaults() -> Mpi:
    """Returns an exchange whose options are set explicitly to the defaults."""
    return Mpi(**{name: int(DEFAULTS[name]) for name in Mpi.tuned})


def _missing() -> str | None:
    """Returns what this process or its MPI world lacks, or None. Imports mpi4py."""
    if native.module() is None:
        return f"there is no native module; {native.CPU_REMEDY}"
    try:
        from mpi4py import MPI as mpi
    except (ImportError, RuntimeError) as error:
        return f"mpi4py cannot be imported ({error}); {_INSTALL}"
    if not mpi.Is_initialized() or mpi.Is_finalized():
        return "MPI is not initialized; import mpi4py.MPI first, with mpi4py.rc.initialize = True"
    if mpi.Query_thread() < mpi.THREAD_MULTIPLE:
        return (
            f"MPI was initialized with thread level {mpi.Query_thread()}, but this exchange needs "
            f"MPI_THREAD_MULTIPLE ({mpi.THREAD_MULTIPLE}); set mpi4py.rc.thread_level = 'multiple' "
            "before importing mpi4py.MPI"
        )
    world, rank = mpi.COMM_WORLD.size, mpi.COMM_WORLD.rank
    if (platform := _compat.platform()) != "cpu":
        return f"the devices are of platform {platform!r}, but it works only on CPUs"
    if (world, rank) != (jax.process_count(), jax.process_index()):
        return (
            f"this is rank {rank} of {world} in MPI but process {jax.process_index()} of "
            f"{jax.process_count()} in JAX; call "
            "jax.distributed.initialize(cluster_detection_method='mpi4py') first, under mpiexec"
        )
    if jax.local_device_count() != 1:
        return (
            f"this process has {jax.local_device_count()} devices, but it must have 1; start one "
            "process per rank instead"
        )
    return None


def _start(settings: dict[str, float]) -> None:
    """Binds the library and starts the engine; every rank comes here at its first call."""
    global _own, _running
    if settings == _running:
        return
    from mpi4py import MPI

    module = native.module()
    assert module is not None
    libraries = module.mpi_libraries()
    if len(libraries) > 1:
        raise ValueError(
            f"two MPI libraries are loaded in this process: {libraries}; they cannot work side by "
            "side. Make mpi4py and the package that loads the other library use the same MPI."
        )
    # Engines use one communicator after the other, since duplicating it takes all ranks and MPI has
    # few communicators. After a failure, messages may be left in it.
    if _own is None or module.mpi_failure():
        _own = _duplicate(MPI, settings["timeout"])
        _own.Set_errhandler(MPI.ERRORS_RETURN)
    module.mpi_start(
        module=MPI.__file__,
        handle_bytes=MPI._sizeof(MPI.Request),
        status_bytes=MPI._sizeof(MPI.Status),
        communicator=MPI._handleof(_own),
        byte_type=MPI._handleof(MPI.BYTE),
        null_request=MPI._handleof(MPI.REQUEST_NULL),
        largest_tag=_own.Get_attr(MPI.TAG_UB),
        error_offset=_error_offset(MPI),
        ranks=_own.size,
        rank=_own.rank,
        **{k: v if k == "timeout" else int(v) for k, v in settings.items()},
    )
    _running = settings
    atexit.unregister(_stop)
    atexit.register(_stop)


def _error_offset(mpi: Any) -> int:
    """Returns where a status holds its error, in bytes, which differs between ABIs."""
    status = mpi.Status()
    memory = (ctypes.c_char * mpi._sizeof(mpi.Status)).from_address(mpi._addressof(status))
    number = 0x1234567
    status.error = number
    return bytes(memory).index(number.to_bytes(4, sys.byteorder))


def _duplicate(mpi: Any, timeout: float) -> Any:
    """Returns a communicator of our own, so that the user's messages never mix with ours."""
    own, request = mpi.COMM_WORLD.Idup()
    start = time.monotonic()
    looked, client = start, _compat.coordination()
    while not request.Test():
        now = time.monotonic()
        if now > start + timeout:
            raise ValueError(
                f"exchange='mpi': not every rank reached its first call within "
                f"{timeout} s; start all ranks, and run the same program on each."
            )
        if client is not None and now > looked + 0.5:
            looked = now
            if left := [rank for _, rank in client.key_value_dir_get(_LEFT)]:
                raise ValueError(
                    f"exchange='mpi': rank {', '.join(left)} has ended without a first call: look "
                    "at its output for an exception, or for a program without calls."
                )
        time.sleep(0.001)
    return own


@atexit.register  # after JAX's own, and so before it
def _leave() -> None:
    """Tells the ranks that wait for this one's first call that it ends without one."""
    mpi, client = sys.modules.get("mpi4py.MPI"), _compat.coordination()
    if _own is not None or client is None or mpi is None or os.getpid() != _PROCESS:
        return
    if mpi.Is_initialized() and not mpi.Is_finalized():
        rank = str(mpi.COMM_WORLD.rank)
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # process 0 may be gone
            client.key_value_set(f"{_LEFT}/{rank}", rank)


def _stop() -> None:
    """Ends the engine before MPI ends. After a failure the other ranks are ended as well."""
    module = native.module()
    assert module is not None
    if os.getpid() != _PROCESS:
        return
    try:
        if not module.mpi_failure() and not hasattr(sys, "last_value"):
            _wait()
    finally:
        failure = module.mpi_failure()
        module.mpi_stop()
    if failure:
        from mpi4py import MPI

        _log.error(
            "exchange='mpi': a fused call failed, so this rank ends all MPI ranks: %s", failure
        )
        sys.stdout.flush()
        sys.stderr.flush()
        MPI.COMM_WORLD.Abort(1)


def _wait() -> None:
    """Waits for what this process has dispatched, since other ranks may wait for it."""
    with contextlib.suppress(RuntimeError):  # of a call that failed, or without a backend
        # What one thread dispatches to a device runs in order, so this program ends last.
        jax.block_until_ready(jax.jit(lambda: jnp.zeros(()))())
        jax.block_until_ready(jax.live_arrays("cpu"))


class _Calls(NamedTuple):
    """The primitives of a fused call: at once, or started by one program and finished by another.

    If `in_place`, a segment is decoded after it was encoded and added up, so that sums may
    overwrite the leaves.
    """

    call: Primitive
    start: Primitive
    finish: Primitive
    in_place: bool


def _calls(collective: Collective, result: Callable[..., Any], *, in_place: bool) -> _Calls:
    what = collective.value
    start = fused.operation(f"cgx_start_{what}_mpi", _ticket)
    call = fused.primitive(f"cgx_{what}_mpi", 2, result)
    finish = fused.primitive(f"cgx_finish_{what}_mpi", 3, result)
    for p in (call, start, finish):
        # Not cacheable: every call needs a channel of its own.
        lowering = functools.partial(_lowering, p.name)
        mlir.register_lowering(p, lowering, platform="cpu", cacheable=False)
    return _Calls(call, start, finish, in_place)


def _ticket(words: Any, *operands: Any, bound: fused.Bound) -> list[Any]:
    return [_compat.result_aval((2,), np.dtype(np.uint32), words)]


def _lowering(
    target: str, ctx: mlir.LoweringRuleContext, *operands: jax.Array, bound: fused.Bound
) -> Any:
    in_place = bound.call.in_place
    aliases = {2 + i: i for i in range(len(bound.layout.slots))} if in_place else None
    return jax.ffi.ffi_lowering(target, operand_output_aliases=aliases)(
        ctx,
        *operands,
        **bound.attributes(),
        channel=np.int64(_compat.new_channel(ctx)),
        program=program.label(ctx, bound.label),
    )


_CALLS = {
    Collective.ALL_REDUCE: _calls(Collective.ALL_REDUCE, fused.reduced, in_place=True),
    Collective.GATHER_SUM: _calls(Collective.GATHER_SUM, fused.summed, in_place=False),
}
