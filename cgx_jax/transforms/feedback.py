"""What transformations with a memory share: how they check, compute and keep residuals."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from cgx_jax._types import Pytree
from cgx_jax.compressors import Compressor
from cgx_jax.kernels import scaling
from cgx_jax.kernels.nonfinite import all_finite
from cgx_jax.plan import Plan
from cgx_jax.route.run import Sums
from cgx_jax.transforms.memory import Memory
from cgx_jax.transforms.shares import Whole


def require_bounded(caller: str, chosen: Sequence[tuple[str, Compressor]]) -> None:
    """Raises ValueError for a compressor that lets a memory grow; `chosen` pairs have paths."""
    for path, compressor in chosen:
        if compressor.feedback_scale is None:
            raise ValueError(
                f"{caller}: the error of {compressor} of leaf {path!r} can exceed its input, so a "
                "memory around it would grow without bound; use Quantize with 2 bits or more, or "
                "ScaledSign."
            )


class Kept(NamedTuple):
    """What `remembered` needs of a leaf: its state `before`, and what the memory gave.

    `wide` is what it wants to send, in the dtype that it computes in. Integers and bools have no
    memory; then it is None.
    """

    before: tuple[jax.Array, ...]
    wide: jax.Array | None = None
    kept: Pytree = None


def compensated(
    memory: Memory | None,
    leaves: Sequence[Any],
    before: Sequence[tuple[jax.Array, ...]],
    step: jax.Array,
    compressed: Sequence[int],
) -> tuple[list[Any], list[Kept]]:
    """Returns what is sent for each gradient, and what is kept of it.

    `before` are the leaves' states on this rank. The memory computes in the widest dtype of the
    gradient and its state, since `init` chose the state's dtypes by the parameters. `compressed`
    leaves are sent in fp32, in which their residuals then come back.
    """
    if memory is None:
        return list(leaves), []
    sent, kept = [], []
    for i, (gradient, rows) in enumerate(zip(leaves, before, strict=True)):
        x = jnp.asarray(gradient)
        own = Kept(rows)
        if jnp.issubdtype(x.dtype, jnp.inexact):
            with jax.numpy_dtype_promotion("standard"):
                wide = functools.reduce(jnp.promote_types, [row.dtype for row in rows], x.dtype)
            state = tuple(row.astype(wide) for row in rows)
            own = Kept(rows, *memory.compensate(x.astype(wide), state, step))
        kept.append(own)
        dtype = jnp.float32 if i in compressed else x.dtype
        sent.append(x if own.wide is None else own.wide.astype(dtype))
    return sent, kept


def scaled(plan: Plan, sums: Sums) -> Sums:
    """Returns the means times the factors that keep memories bounded (`feedback_scale`)."""
    values = [
        x if lost is None or _factor(c) == 1 else x * jnp.asarray(_factor(c), x.dtype)
        for x, lost, c in zip(sums.values, sums.residuals, plan.compressors, strict=True)
    ]
    return sums._replace(values=values)


def _factor(compressor: Compressor) -> float:
    return compressor.feedback_scale or 1.0


def remembered(
    memory: Memory | None,
    share: Whole,
    sent: Sequence[jax.Array],
    kept: Sequence[Kept],
    sums: Sums,
    out: Sequence[Any],
    finite: Any,
) -> tuple[list[tuple[jax.Array, ...]], list[jax.Array]]:
    """Returns each leaf's state after a step, and how many values found no room, i32[1] each.

    `sent` and `kept` come from `compensated`. `out` are the means in the dtypes of the gradients.
    If the step's mean is not `finite`, the state stays: the step never happened. Without a memory,
    there is nothing to return.
    """
    if memory is None:
        return [], []
    states, overflow = [], []
    for i, (compressor, x) in enumerate(zip(share.plan.compressors, sent, strict=True)):
        lost = sums.residuals[i]
        left = jnp.zeros_like(x) if lost is None else share.residual(i, lost)
        residual, factor = left, _factor(compressor)
        if lost is not None and factor != 1:  # decoded values count `factor` times
            residual = x - jnp.asarray(factor, x.dtype) * (x - left)
        no_room, arrived = jnp.zeros(1, jnp.int32), None
        if compressor.has_rooms or compressor.selects:
            # What the code lost says which values came, not what the scale of feedback leaves.
            # Of a value that came, less than half is lost.
            size = jnp.abs(left)
            came = size + size < jnp.abs(x)
            wanted = compressor.wants(x, came)
            if wanted is not None:
                no_room = (wanted & ~came).sum(dtype=jnp.int32)[None]
            if compressor.selects and lost is not None:
                arrived = came & share.reached(i, sums.values[i])
        overflow.append(no_room)
        if lost is not None and out[i].dtype != sums.values[i].dtype:
            rounding = sums.values[i] - out[i].astype(sums.values[i].dtype)
            residual = residual + share.rounding(i, rounding)
        before, wide, own = kept[i]
        if wide is None:
            states.append(before)
            continue
        if wide.dtype != x.dtype:
            residual = residual.astype(wide.dtype) + (wide - x.astype(wide.dtype))
        after = memory.remember(residual, own, arrived)
        pairs = [(new.astype(was.dtype), was) for new, was in zip(after, before, strict=True)]
        # A code that sends few values may leave a NaN or infinity behind, which would then stay.
        states.append(tuple(jnp.where(jnp.isfinite(new) & finite, new, was) for new, was in pairs))
    return states, overflow


def finite_everywhere(share: Whole, means: Sequence[Any], skipped: Any) -> Any:
    """Whether a step's means are finite and not skipped, bool[]; the same on all ranks."""
    finite = all_finite([x for x in means if jnp.issubdtype(jnp.result_type(x), jnp.inexact)])
    finite = share.axes.on_every_rank(finite & jnp.logical_not(skipped), alike=share.alike)
    # XLA would otherwise compute it again for each value that is kept or not.
    return lax.optimization_barrier(finite)


def as_gradient(mean: Any, dtype: DTypeLike) -> Any:
    """Returns a mean in the dtype of the gradients: of integers and bools, the nearest one.

    Finite means stay finite.
    """
    if getattr(mean, "dtype", dtype) == dtype:
        return mean
    if jnp.issubdtype(dtype, jnp.inexact):
        return scaling.narrowed(mean, dtype)
    return jnp.round(mean).astype(dtype)
