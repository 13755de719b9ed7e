"""Controls what the C library does with memory that XLA frees."""

from __future__ import annotations

from cgx_jax.kernels import native


def keep_memory() -> bool:
    """Keeps freed memory in this process, in huge pages, for later steps.

    XLA on CPUs allocates every result and every step's temporaries with malloc. glibc returns large
    buffers to the system as soon as they are freed, so each page of the next buffer costs a page
    fault. Call this function before JAX computes anything. The process then keeps as much memory as
    it ever needed at once, and all of its threads share one heap. This reserves addresses, not
    memory, for half of the machine's memory. Returns whether the system agreed: False without
    native kernels or glibc.
    """
    module = native.module()
    return module is not None and module.keep_memory()
