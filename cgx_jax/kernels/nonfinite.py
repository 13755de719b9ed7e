"""Finds non-finite values in many leaves: one native call on CPUs, plain jnp elsewhere.

The payload that encodes a leaf, or from which it was decoded, tells which buckets must be read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from cgx_jax import _compat
from cgx_jax.kernels import reference
from cgx_jax.kernels.primitives import NO_RANK, bind, define, flat, lead
from cgx_jax.wire import Layout, Slot

DTYPES = tuple(np.dtype(t) for t in (jnp.float32, jnp.bfloat16, jnp.float16))


def find_nonfinite(
    payload: Any,
    leaves: Sequence[Any],
    layout: Layout,
    *,
    rank: Any = NO_RANK,
    own: Any = None,
    in_units: Sequence[bool] = (),
) -> jax.Array:
    """Finds non-finite values of `leaves`: their number and the first one's place, i32[leaves, 2].

    `payload`, u8[rows, chunk_bytes], encodes the leaves, or the leaves were decoded from it. It has
    one row per chunk, or several times as many. The records of the chunk of `rank` are in `own`,
    u8[chunk_bytes]. A bucket's values are read only if its records leave it possible that one is
    not finite, or if its leaf is `in_units`, since records do not bound such values. Without rows,
    all values are read.
    """
    if any(in_units):
        layout = layout.with_units(tuple(in_units))
    rows = payload if payload.ndim == 2 else payload[None]
    own = jnp.zeros((0,), jnp.uint8) if own is None else own
    (found,) = bind(find_nonfinite_p, jnp.int32(rank), rows, own, *leaves, layout=layout, batch=1)
    return found


def count_nonfinite(arrays: Sequence[Any]) -> jax.Array:
    """Counts the non-finite values of any arrays, without a payload: i32[arrays, 2]."""
    coded = [i for i, x in enumerate(arrays) if x.dtype in DTYPES]
    pairs = {
        i: reference.count_nonfinite(x.ravel()) for i, x in enumerate(arrays) if i not in coded
    }
    if coded:
        leaves = [arrays[i] for i in coded]
        # Any code will do for the layout, since there are no records.
        slots = tuple(Slot(x.size, 8, 512, "nearest", 0) for x in leaves)
        layout = Layout(slots, 1)
        nothing = jnp.zeros((0, layout.chunk_bytes), jnp.uint8)
        found = find_nonfinite(nothing, leaves, layout)
        if len(coded) == len(arrays):
            return found
        pairs |= {i: found[n] for n, i in enumerate(coded)}
    return jnp.stack([pairs[i] for i in range(len(arrays))])


def _shapes(rank: Any, payload: Any, own: Any, *leaves: Any, layout: Any, batch: Any) -> Any:
    shape = lead(batch, (len(leaves), 2))
    return [_compat.result_aval(shape, jnp.dtype(jnp.int32), payload)]


def _fallback(rank: Any, payload: Any, own: Any, *leaves: Any, layout: Any, batch: Any) -> Any:
    """Reads all values, and counts the non-finite ones if there are any."""
    rows = flat(batch, leaves)
    none = _compat.vary_over(
        jnp.zeros((batch, len(leaves), 2), jnp.int32), _compat.varying_axes(payload)
    )

    def count() -> jax.Array:
        return jnp.stack([reference.count_nonfinite(x) for x in rows], axis=1)

    found = lax.cond(reference.all_finite(rows), lambda: none, count) if leaves else none
    return [found.reshape(lead(batch, found.shape[1:]))]


find_nonfinite_p = define("cgx_find_nonfinite", _shapes, _fallback, cuda=False)
