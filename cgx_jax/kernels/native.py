"""Loads the native modules, once, and registers their handlers with XLA."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import warnings
from importlib import metadata
from types import ModuleType

import jax

from cgx_jax._types import Json
from cgx_jax._version import __version__
from cgx_jax.kernels import constants
from cgx_jax.kernels.wire import WIRE_VERSION

_CUDA = "cgx_jax_cuda13"
DRIVER = 13000  # the oldest, as cudaDriverGetVersion numbers them
_REINSTALL = "then, in the checkout, pip install --force-reinstall --no-deps . -C cgx.native="
CPU_REMEDY = f"install a C++17 compiler, {_REINSTALL}on"
CUDA_REMEDY = f"put nvcc (CUDA 13 or newer) on PATH or name it in CUDACXX, {_REINSTALL}cuda"


@functools.cache
def module() -> ModuleType | None:
    """Returns the module of CPU kernels with its handlers registered, or None if it was not built.

    Registration does not initialize a backend: XLA keeps the handlers until one starts.
    """
    try:
        importlib.import_module("cgx_jax._native")
    except ImportError as error:
        warnings.warn(
            f"cgx_jax has no native kernels here ({error}); it falls back to plain jnp, which "
            f"computes the same format several times slower. To fix this, {CPU_REMEDY}.",
            RuntimeWarning,
            stacklevel=2,
        )
        return None
    return _register(_import("cgx_jax._native", constants.CPU), "cpu")


@functools.cache
def cuda_module() -> ModuleType | None:
    """Returns the module of CUDA kernels with its handlers registered, or None: `lack_of_cuda`."""
    if importlib.util.find_spec(_CUDA) is None:
        return None
    with contextlib.suppress(metadata.PackageNotFoundError):  # if built with this package
        if (other := metadata.version("cgx-jax-cuda13")) != __version__:
            raise ImportError(
                f"cgx-jax-cuda13 has version {other}, and cgx-jax has {__version__}; they must be "
                "the same: in the checkout, pip install . ./cmake/cuda13"
            )
    native = _import(_CUDA, constants.CUDA)
    # Without a driver there is no GPU, but programs for one may be compiled.
    return None if 0 < native.driver_version() < DRIVER else _register(native, "CUDA")


def lack_of_cuda() -> tuple[str, str]:
    """Returns why `cuda_module` is None, and what to do about it."""
    if importlib.util.find_spec(_CUDA) is None:
        return "cgx_jax was installed without CUDA kernels", CUDA_REMEDY
    version = importlib.import_module(_CUDA).driver_version()
    why = (
        f"the CUDA kernels need a driver for CUDA {_cuda_version(DRIVER)}, but NVIDIA's driver "
        f"here is for CUDA {_cuda_version(version)}"
    )
    return why, "install NVIDIA's driver 580 or newer"


def _cuda_version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"


def _import(name: str, own: dict[str, int]) -> ModuleType:
    native = importlib.import_module(name)
    given = native.constants() if hasattr(native, "constants") else {}
    if differing := [k for k in own | given if own.get(k) != given.get(k)]:
        which = ", ".join(f"{k} ({given.get(k)} and {own.get(k)})" for k in differing)
        raise ImportError(
            f"{name} and cgx_jax differ in {which}: they come from different installs. "
            "Reinstall cgx_jax."
        )
    return native


def _register(native: ModuleType, platform: str) -> ModuleType:
    for target, capsule in native.handlers().items():
        jax.ffi.register_ffi_target(target, capsule, platform=platform)
    return native


@functools.cache
def warn_of_missing_cuda() -> None:
    """Warns once that a program for CUDA is compiled without CUDA kernels."""
    why, remedy = lack_of_cuda()
    warnings.warn(
        f"{why}; on GPUs cgx_jax falls back to plain jnp, which computes the same format slower. "
        f"To fix this, {remedy}.",
        RuntimeWarning,
        stacklevel=2,
    )


def backends() -> Json:
    """Returns what this installation has: a dict from platform name to the kernels used there.

    "cpu" has the instruction set of the native kernels, or is "jnp". "cuda" has the architectures
    for which the CUDA kernels are built, or is "jnp". "other" stands for all other platforms, which
    use "jnp". "wire_format" is the version of the payload format. Does not initialize a backend.
    """
    cpu, cuda = module(), cuda_module()
    return {
        "cpu": "jnp" if cpu is None else f"native ({cpu.isa()})",
        "cuda": "jnp" if cuda is None else f"native ({cuda.architectures()})",
        "other": "jnp",
        "wire_format": WIRE_VERSION,
    }


def keep_memory() -> bool:
    """Keeps freed memory in this process, in huge pages, for later steps.

    XLA on CPUs allocates every result and every step's temporaries with malloc. glibc returns large
    buffers to the system as soon as they are freed, so each page of the next buffer costs a page
    fault. Call this function before JAX computes anything. The process then keeps as much memory as
    it ever needed at once, and all of its threads share one heap. This reserves addresses, not
    memory, for half of the machine's memory. Returns whether the system agreed: False without
    native kernels or glibc.
    """
    return (native := module()) is not None and native.keep_memory()
