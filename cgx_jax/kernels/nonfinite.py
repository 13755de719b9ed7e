"""Finds non-finite values in many arrays: one native call on CPUs, plain jnp elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from cgx_jax import _compat
from cgx_jax.kernels import codes, reference

_NATIVE = tuple(np.dtype(t) for t in (jnp.float32, jnp.bfloat16, jnp.float16))


def count_nonfinite(arrays: Sequence[jax.Array]) -> jax.Array:
    """Counts the non-finite values of arrays and finds the first of each: i32[arrays, 2]."""
    coded = [i for i, x in enumerate(arrays) if x.dtype in _NATIVE]
    pairs = {
        i: reference.count_nonfinite(x.ravel()) for i, x in enumerate(arrays) if i not in coded
    }
    if coded:
        (found,) = codes.call("cgx_find_nonfinite", _count, *(arrays[i].ravel() for i in coded))
        if not pairs:
            return found
        pairs |= {i: found[n] for n, i in enumerate(coded)}
    return jnp.stack([pairs[i] for i in range(len(arrays))])


def all_finite(arrays: Sequence[Any]) -> jax.Array:
    """Returns whether all values of all arrays are finite, bool[]; integers and bools are."""
    arrays = [jnp.asarray(x) for x in arrays]
    arrays = [x for x in arrays if jnp.issubdtype(x.dtype, jnp.inexact)]
    coded = [x.ravel() for x in arrays if x.dtype in _NATIVE]
    finite = reference.all_finite([x for x in arrays if x.dtype not in _NATIVE])
    if coded:
        (found,) = codes.call("cgx_find_nonfinite", _any, *coded)
        finite &= ~found[:, 0].any()
    return finite


def _any(*arrays: jax.Array) -> list[jax.Array]:
    """Returns i32[arrays, 2] that are 0 if all values are finite, and 1 if not."""
    wrong = (~reference.all_finite(arrays)).astype(jnp.int32)
    return [jnp.broadcast_to(wrong, (len(arrays), 2))]


def _count(*arrays: jax.Array) -> list[jax.Array]:
    """Reads all values, and counts the non-finite ones if there are any."""
    axes = frozenset().union(*(_compat.varying_axes(x) for x in arrays))
    none = _compat.vary_over(jnp.zeros((len(arrays), 2), jnp.int32), axes)

    def count() -> jax.Array:
        return jnp.stack([reference.count_nonfinite(x) for x in arrays])

    return [lax.cond(reference.all_finite(arrays), lambda: none, count)]
