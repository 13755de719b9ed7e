"""What transformations with a memory share: how they check, compute and keep residuals."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from cgx_jax.compressors import Compressor


def require_bounded(caller: str, chosen: Sequence[tuple[str, Compressor]]) -> None:
    """Raises ValueError for a compressor that lets a memory grow; `chosen` pairs have paths."""
    for path, compressor in chosen:
        if compressor.feedback_scale is None:
            raise ValueError(
                f"{caller}: the error of {compressor} of leaf {path!r} can exceed its input, so a "
                "memory around it would grow without bound; use Quantize with 2 bits or more, or "
                "ScaledSign."
            )


def residual_of(sent: jax.Array, lost: jax.Array | None, factor: float) -> jax.Array:
    """Returns what a rank lost of what it `sent`, if decoded values count `factor` times."""
    if lost is None:
        return jnp.zeros_like(sent)
    return lost if factor == 1 else sent - jnp.asarray(factor, sent.dtype) * (sent - lost)


def taken_along(sent: jax.Array, residual: jax.Array) -> jax.Array:
    """Returns which of the values that a rank `sent` a code of a few values took along.

    Of such a value, less than half is left in the residual.
    """
    return 2 * jnp.abs(residual) < jnp.abs(sent)


def keep(finite: Any, new: jax.Array, old: jax.Array) -> jax.Array:
    """Returns `new` after a step whose mean is `finite`, else `old`."""
    # An owner's share of a float16 leaf's error may overflow where the mean did not.
    return jnp.where(finite & jnp.isfinite(new), new, jnp.where(finite, 0, old).astype(old.dtype))
