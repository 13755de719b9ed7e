"""Debug mode: checks at run time that a collective left the same bits on every rank.

The other debug mode, `debug_nonfinite`, is in `nonfinite`.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from cgx_jax import _compat
from cgx_jax.axes import Axes
from cgx_jax.exchanges import Xla

_enabled = False


@contextlib.contextmanager
def debug_checksums() -> Iterator[None]:
    """Makes ranks compare checksums of what psum, pmean and all_gather_compressed return.

    This finds a broken build, link or memory. If bits differ between ranks, the step fails with a
    RuntimeError (under jit inside a JaxRuntimeError) that names the call, the axis and the ranks.
    The check costs a pass over the result and an exchange of 8 bytes. Beside explicit axes that are
    not manual, nothing is compared. Clears JAX's caches on entry and on exit, so that functions
    compiled outside are traced again.
    """
    global _enabled
    before, _enabled = _enabled, True
    try:
        with traced_anew():
            yield
    finally:
        _enabled = before


@contextlib.contextmanager
def traced_anew() -> Iterator[None]:
    """Clears JAX's caches on entry and on exit, so that compiled functions are traced again."""
    jax.clear_caches()
    try:
        yield
    finally:
        jax.clear_caches()


def compare(caller: str, axes: Axes, leaves: Sequence[jax.Array]) -> None:
    """In debug mode, adds a comparison of `leaves` across the ranks to the program."""
    if not _enabled:
        return
    # Beside explicit axes, JAX neither flattens arrays nor calls back.
    if not leaves or jax.sharding.get_abstract_mesh().explicit_axes:
        return
    total = sum(map(_checksum, leaves), start=jnp.uint32(0))
    if _compat.bound_by_mesh(axes.names):
        total = _compat.vary_over(total, frozenset(axes.names))
    # The zero types the rank's number as varying over what the checksum varies over.
    own = jnp.stack([total, total * 0 + axes.index().astype(jnp.uint32)])
    rows = Xla().gather(caller, lax.bitcast_convert_type(own, jnp.uint8).reshape(-1), axes)
    jax.debug.callback(functools.partial(_require_equal, caller, axes.names), rows)


def _checksum(x: jax.Array) -> jax.Array:
    """Returns the checksum of an array, u32[]: the sum of its words, weighted by their places."""
    x = _compat.plain(lax.stop_gradient(x))
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        x = jnp.stack([x.real, x.imag])
    if x.dtype == bool:
        x = x.astype(jnp.uint8)
    elif jax.dtypes.itemsize_bits(x.dtype) < 8:
        x = x.astype(jnp.float32)
    word = min(4, x.dtype.itemsize)
    words = jnp.ravel(lax.bitcast_convert_type(x, f"uint{8 * word}")).astype(jnp.uint32)
    return (words * (2 * jnp.arange(words.size, dtype=jnp.uint32) + 1)).sum(dtype=jnp.uint32)


def _require_equal(caller: str, names: Sequence[str], rows: jax.Array) -> None:
    sums, ranks = np.ascontiguousarray(rows).view(np.uint32).T
    others = np.flatnonzero(sums != sums[0])
    if len(others):
        raise RuntimeError(
            f"{caller}: the result differs across axis {', '.join(map(str, names))}: the checksum "
            f"of rank {ranks[0]} is {sums[0]:#010x}, that of rank {ranks[others[0]]} "
            f"{sums[others[0]]:#010x} "
            f"({len(others)} of {len(sums)} ranks differ). Check that every process runs the same "
            "cgx_jax and jaxlib, on processors of one kind, then the memory and the network of "
            "these ranks."
        )
