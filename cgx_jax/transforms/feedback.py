"""What every transformation with a memory does around it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from cgx_jax.compressors import Compressor


def require_bounded(caller: str, chosen: Sequence[tuple[str, Compressor]]) -> None:
    """Raises ValueError for a compressor around which a memory would grow; pairs with a path."""
    for path, compressor in chosen:
        if compressor.feedback_scale is None:
            raise ValueError(
                f"{caller}: {compressor} of leaf {path!r} may lose more than it is given, "
                "so a memory around it grows without end; use Quantize with 2 bits or more, or "
                "ScaledSign."
            )


def residual_of(sent: jax.Array, lost: jax.Array | None, factor: float) -> jax.Array:
    """What a rank lost of what it `sent`, where `factor` of what comes back counts."""
    if lost is None:
        return jnp.zeros_like(sent)
    return lost if factor == 1 else sent - jnp.asarray(factor, sent.dtype) * (sent - lost)


def taken_along(sent: jax.Array, residual: jax.Array) -> jax.Array:
    """Which of the values that a rank sent a code of a few values has taken along.

    Less than half of such a value is left.
    """
    return 2 * jnp.abs(residual) < jnp.abs(sent)


def keep(finite: Any, new: jax.Array, old: jax.Array) -> jax.Array:
    """`new` after a step whose mean is `finite`, else `old`."""
    # An owner's share of a float16 leaf's error may overflow where the mean did not.
    return jnp.where(finite & jnp.isfinite(new), new, jnp.where(finite, 0, old).astype(old.dtype))
