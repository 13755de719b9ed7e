"""What transformations with a memory share: how they check, compute and keep residuals."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from cgx_jax._types import Pytree
from cgx_jax.compressors import Compressor
from cgx_jax.transforms.memory import Memory


def require_bounded(caller: str, chosen: Sequence[tuple[str, Compressor]]) -> None:
    """Raises ValueError for a compressor that lets a memory grow; `chosen` pairs have paths."""
    for path, compressor in chosen:
        if compressor.feedback_scale is None:
            raise ValueError(
                f"{caller}: the error of {compressor} of leaf {path!r} can exceed its input, so a "
                "memory around it would grow without bound; use Quantize with 2 bits or more, or "
                "ScaledSign."
            )


def compensated(
    memory: Memory, x: jax.Array, rows: tuple[jax.Array, ...], step: jax.Array
) -> tuple[jax.Array, Pytree]:
    """Returns what is sent for a leaf's gradient, in its dtype, and what `remembered` needs.

    `rows` are the leaf's state with this rank's row in front. The memory computes in the widest
    dtype of the gradient and its state, since `init` chose the state's dtypes by the parameters.
    Integers and bools are sent exactly, without a memory; then `remembered` needs None.
    """
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        return x, None
    dtype = widest(x.dtype, *(row.dtype for row in rows))
    state = tuple(row[0].astype(dtype) for row in rows)
    wide, kept = memory.compensate(x.astype(dtype), state, step)
    return wide.astype(x.dtype), (wide, kept)


def widest(*dtypes: np.dtype) -> np.dtype:
    """Returns the dtype that holds values of all `dtypes`."""
    with jax.numpy_dtype_promotion("standard"):
        return functools.reduce(jnp.promote_types, dtypes)


def remembered(
    memory: Memory,
    sent: jax.Array,
    residual: jax.Array,
    kept: Pytree,
    arrived: jax.Array | None,
    finite: Any,
    before: tuple[jax.Array, ...],
) -> tuple[jax.Array, ...]:
    """Returns a leaf's rows after a step that lost `residual`, in the dtypes of `before`.

    `kept` comes from `compensated`. If the step's mean is not `finite`, the state stays.
    """
    if kept is None:
        return before
    wide, kept = kept
    if wide.dtype != sent.dtype:
        residual = residual.astype(wide.dtype) + (wide - sent.astype(wide.dtype))
    after = memory.remember(residual, kept, arrived)
    return tuple(keep(finite, new, was) for new, was in zip(after, before, strict=True))


def residual_of(sent: jax.Array, lost: jax.Array | None, factor: float) -> jax.Array:
    """Returns what a rank lost of what it `sent`, if decoded values count `factor` times.

    `lost` is None for a leaf that was sent exactly.
    """
    if lost is None:
        return jnp.zeros_like(sent)
    return lost if factor == 1 else sent - jnp.asarray(factor, sent.dtype) * (sent - lost)


def taken_along(sent: jax.Array, residual: jax.Array) -> jax.Array:
    """Returns which of the values that a rank `sent` a code of a few values took along.

    Of such a value, less than half is left in the residual.
    """
    left = jnp.abs(residual)
    return left + left < jnp.abs(sent)


def as_gradient(mean: Any, dtype: DTypeLike) -> Any:
    """Returns a mean in the dtype of the gradients: of integers and bools, the nearest one."""
    if getattr(mean, "dtype", dtype) == dtype:
        return mean
    return (mean if jnp.issubdtype(dtype, jnp.inexact) else jnp.round(mean)).astype(dtype)


def keep(finite: Any, new: jax.Array, old: jax.Array) -> jax.Array:
    """Returns `new` after a step whose mean is `finite`, else `old`; in the shape of `old`.

    A selection between arrays of one shape needs no copy where a step is given its state to reuse.
    """
    new = new.astype(old.dtype).reshape(old.shape)
    # An owner's share of a float16 leaf's error may overflow where the mean did not.
    return jnp.where(finite & jnp.isfinite(new), new, jnp.where(finite, 0, old).astype(old.dtype))
