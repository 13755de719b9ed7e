"""Finds non-finite values in many arrays: one native call on CPUs, plain jnp elsewhere."""

from __future__ import annotations

from collections.abc import Sequence

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


def _count(*arrays: jax.Array) -> list[jax.Array]:
    """Reads all values, and counts the non-finite ones if there are any."""
    axes = frozenset().union(*(_compat.varying_axes(x) for x in arrays))
    none = _compat.vary_over(jnp.zeros((len(arrays), 2), jnp.int32), axes)

    def count() -> jax.Array:
        return jnp.stack([reference.count_nonfinite(x) for x in arrays])

    return [lax.cond(reference.all_finite(arrays), lambda: none, count)]
