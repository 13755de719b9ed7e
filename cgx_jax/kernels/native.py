"""Loads the native module, once, and registers its handlers with XLA."""

from __future__ import annotations

import functools
import importlib
import warnings
from types import ModuleType
from typing import Any

import jax

from cgx_jax.wire import WIRE_VERSION


@functools.cache
def module() -> ModuleType | None:
    """The native module with its handlers registered, or None where it was not built.

    Registration initialises no backend: XLA keeps the handlers until one starts.
    """
    try:
        native = importlib.import_module("cgx_jax._native")
    except ImportError as error:
        warnings.warn(
            f"cgx_jax has no native kernels here ({error}); it falls back to plain jnp, which "
            "computes the same format several times slower. Install a C++17 compiler and "
            "reinstall cgx_jax to mend it.",
            RuntimeWarning,
            stacklevel=2,
        )
        return None
    if native.wire_version() != WIRE_VERSION:
        raise ImportError(
            f"cgx_jax._native speaks wire format {native.wire_version()}, this package "
            f"{WIRE_VERSION}: the two come from different installs. Reinstall cgx_jax."
        )
    for name, capsule in native.handlers().items():
        jax.ffi.register_ffi_target(name, capsule, platform="cpu")
    return native


def backends() -> dict[str, Any]:
    """What this installation has: a dict of platform name to the kernels used there.

    'cpu' is the instruction set of the native kernels, or 'jnp'; every other platform uses
    'jnp'. Initialises no backend.
    """
    native = module()
    return {
        "cpu": "jnp" if native is None else f"native ({native.isa()})",
        "other": "jnp",
        "wire_format": WIRE_VERSION,
    }
