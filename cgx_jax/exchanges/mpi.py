"""The fused all-reduce over MPI: one call that encodes, sends, reduces and decodes in segments.

For CPU processes, one device each, started by an MPI launcher. The library is the one that mpi4py
has loaded, whatever its ABI; nothing is linked to it. Importing this module loads no MPI.
"""

from __future__ import annotations

import atexit
import dataclasses
import functools
import os
import sys
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.interpreters import mlir

from cgx_jax import _compat
from cgx_jax.exchanges import fused
from cgx_jax.kernels import native, primitives
from cgx_jax.wire import Layout

_INSTALL = 'pip install "cgx-jax[mpi]" and start the processes with mpiexec'


@dataclasses.dataclass(frozen=True)
class Settings:
    """What `configure` sets; docs/exchanges.md has the measurements behind the defaults."""

    timeout: float = 600.0
    segment_bytes: int = 1 << 17
    window: int = 4
    threads: int = max(1, min(4, (os.cpu_count() or 1) // 2))


_settings = Settings()


def configure(**changes: float) -> None:
    """Sets how fused calls run in this process; alike on every rank, with no call in flight.

    `timeout`: seconds without a message after which a call fails (default 600); `segment_bytes`
    of payload that travel as one message; `window`: segments in flight, 2 or more; `threads` that
    run kernels. Clears JAX's caches, since tracing starts the engine. Raises ValueError for an
    unknown or impossible setting.
    """
    global _settings
    unknown = set(changes) - {f.name for f in dataclasses.fields(Settings)}
    if unknown:
        raise ValueError(f"mpi.configure: unknown settings {sorted(unknown)}.")
    limits = {
        "timeout": (0.001, 1e9),
        "segment_bytes": (64, 1 << 30),
        "window": (2, 1024),
        "threads": (1, 1024),
    }
    for name, value in changes.items():
        low, high = limits[name]
        if not low <= value <= high:
            raise ValueError(f"mpi.configure: {name}={value} must be in [{low:g}, {high:g}].")
    whole = {name: value if name == "timeout" else int(value) for name, value in changes.items()}
    _settings = dataclasses.replace(_settings, **whole)  # type: ignore[arg-type]
    _start.cache_clear()
    jax.clear_caches()


def settings() -> Settings:
    """How fused calls run in this process."""
    return _settings


def usable(axes: Sequence[Any] = ()) -> bool:
    """Whether this process was started so that fused calls work here over `axes`; loads nothing."""
    mpi = sys.modules.get("mpi4py.MPI")
    return (
        mpi is not None
        and native.module() is not None
        and mpi.Is_initialized()
        and mpi.COMM_WORLD.size > 1
        and _unfit(mpi) is None
        and (not axes or _unfit_axes(axes) is None)
    )


def require(caller: str, axes: Sequence[Any]) -> None:
    """Raises ValueError, with the remedy, where a fused call over `axes` cannot work."""
    problem = _missing() or _unfit_axes(axes)
    if problem is not None:
        raise ValueError(f"{caller}: exchange='mpi' does not work here: {problem}.")
    _start()


def _missing() -> str | None:
    if native.module() is None:
        return "there is no native module; install a C++17 compiler and reinstall cgx-jax"
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        return f"mpi4py does not load ({error}); {_INSTALL}"
    return _unfit(MPI)


def _unfit(mpi: Any) -> str | None:
    """What is wrong with this process's MPI world, or None."""
    if not mpi.Is_initialized() or mpi.Is_finalized():
        return "MPI is not initialised; import mpi4py.MPI before, and leave its rc.initialize on"
    if mpi.Query_thread() < mpi.THREAD_MULTIPLE:
        return (
            f"MPI was initialised with thread level {mpi.Query_thread()}, it needs "
            f"MPI_THREAD_MULTIPLE ({mpi.THREAD_MULTIPLE}); set mpi4py.rc.thread_level = 'multiple' "
            "before importing mpi4py.MPI"
        )
    world, rank = mpi.COMM_WORLD.size, mpi.COMM_WORLD.rank
    if jax.default_backend() != "cpu":
        return f"the devices are of platform {jax.default_backend()!r}; it is for CPUs"
    if (world, rank) != (jax.process_count(), jax.process_index()):
        return (
            f"this is rank {rank} of {world} in MPI but process {jax.process_index()} of "
            f"{jax.process_count()} in JAX; call "
            "jax.distributed.initialize(cluster_detection_method='mpi4py') first, under mpiexec"
        )
    if jax.local_device_count() != 1:
        return (
            f"this process has {jax.local_device_count()} devices, it must have 1; start more "
            "processes instead"
        )
    return None


def _unfit_axes(axes: Sequence[Any]) -> str | None:
    """What is wrong with the axes that are bound where this is traced, or None."""
    if (problem := fused.unfit_axes(axes)) is not None:
        return problem
    size = jax.sharding.get_abstract_mesh().size
    if size != jax.process_count():
        return f"the mesh has {size} devices, it must have all {jax.process_count()}"
    return None


@functools.cache
def _start() -> None:
    """Binds the library and starts the engine; every rank comes here at its first fused call."""
    from mpi4py import MPI

    module = native.module()
    assert module is not None
    libraries = module.mpi_libraries()
    if len(libraries) > 1:
        raise ValueError(
            f"two MPI libraries are loaded in this process: {libraries}; they cannot work side by "
            "side. Let mpi4py, and whatever loads the other one, use the same."
        )
    own = _duplicate(MPI)
    own.Set_errhandler(MPI.ERRORS_RETURN)
    module.mpi_start(
        module=MPI.__file__,
        handle_bytes=MPI._sizeof(MPI.Request),
        status_bytes=MPI._sizeof(MPI.Status),
        communicator=MPI._handleof(own),
        byte_type=MPI._handleof(MPI.BYTE),
        null_request=MPI._handleof(MPI.REQUEST_NULL),
        largest_tag=own.Get_attr(MPI.TAG_UB),
        rank=own.rank,
        **dataclasses.asdict(_settings),
    )
    atexit.unregister(_stop)
    atexit.register(_stop)


def _duplicate(mpi: Any) -> Any:
    """A communicator of our own, so that no message of the user's meets one of ours."""
    own, request = mpi.COMM_WORLD.Idup()
    deadline = time.monotonic() + _settings.timeout
    while not request.Test():
        if time.monotonic() > deadline:
            raise ValueError(
                f"exchange='mpi': not every rank came to its first fused call in "
                f"{_settings.timeout} s; every rank must run the same program."
            )
        time.sleep(0.001)
    return own


def _stop() -> None:
    """Ends the engine before MPI ends. After a failure the other ranks are ended as well."""
    module = native.module()
    assert module is not None
    failure = module.mpi_failure()
    module.mpi_stop()
    if failure:
        from mpi4py import MPI

        print(f"cgx_jax: ending all MPI ranks, since a fused call failed: {failure}")
        sys.stdout.flush()
        sys.stderr.flush()
        MPI.COMM_WORLD.Abort(1)


def all_reduce(
    name: str,
    seeds: Sequence[Any],
    leaves: Sequence[jax.Array],
    layout: Layout,
    axes: tuple[str, ...],
    groups: fused.Groups,
    divisor: float,
    *,
    residual: bool = False,
    units: primitives.Units = (),
) -> tuple[list[jax.Array], list[jax.Array]]:
    """Quantized leaves to their sum over the group, divided; the bytes of the `xla` exchange.

    `seeds` are uint32[2] for each phase; `leaves` f32, bf16 or f16, one a slot of `layout`;
    `units` as in `primitives.encode`. Residuals follow where asked.
    """
    layout, factors = primitives.with_units(layout, units)
    mesh = jax.sharding.get_abstract_mesh()
    operands = [jnp.stack([jnp.asarray(s) for s in seeds]), lax.axis_index(mesh.axis_names)]
    label = f"{name}(exchange='mpi')"
    operands += [*leaves, *factors]
    return fused.bind(
        all_reduce_p, label, operands, layout, axes, groups, divisor, residual=residual
    )


def _lowering(
    ctx: Any,
    *operands: Any,
    layout: Layout,
    divisor: float,
    positions: Any,
    replicated: Any,
    name: str,
    residual: bool,
) -> Any:
    return jax.ffi.ffi_lowering("cgx_all_reduce_mpi")(
        ctx,
        *operands,
        **fused.attributes(layout, divisor, positions, name),
        channel=np.int64(_compat.new_channel(ctx)),
    )


all_reduce_p = fused.primitive("cgx_all_reduce_mpi", 2, fused.reduced)
# Not cacheable: every call needs a channel of its own.
mlir.register_lowering(all_reduce_p, _lowering, platform="cpu", cacheable=False)
