"""What the C library does with memory that XLA frees."""

from __future__ import annotations

from cgx_jax.kernels import native


def keep_memory() -> bool:
    """Keeps freed memory in this process, in huge pages, for the steps to come.

    XLA on CPUs asks malloc for every result and for every step's temporaries. glibc returns large
    buffers to the system at once, so each page of the next ones costs a fault. Call this before JAX
    computes anything. The process then keeps as much memory as it ever needed at once, and all of
    its threads share one heap. It reserves addresses, not memory, for half of what the machine has.
    Returns whether the system agreed: False without native kernels or glibc.
    """
    module = native.module()
    return module is not None and module.keep_memory()
