"""Checks of Optax wrappers around a transformation that reduces."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

# With opaque_mode, its optimizer gets gradients of its own call, once per step.
_CALLED_BY_SAM = "sam.<locals>.transparent_update_fn"


def check_wrappers(caller: str, *, checked: bool, shards: bool = False) -> None:
    """Raises ValueError if an Optax wrapper around the caller cannot work across ranks.

    `checked` says whether shard_map's check_vma is on. `shards` says that after the caller each
    rank sees only a shard of the mean. Only the call stack shows what wraps a transformation, so
    this function reads it, while tracing only.
    """
    around = _optax_callers()
    workers = caller in ("diloco", "local_steps")  # which have an optimizer of their own

    def elsewhere(wrapped: str) -> str:
        if workers:
            return f"Put it around the optimizer of each worker: {caller}({wrapped}, ...)."
        return (
            f"Put it after {caller}, where all ranks see the same mean: "
            f"optax.chain({caller}(...), {wrapped})."
        )

    agree = (
        f"After {caller}, a rank would decide by its own shard only. Let the ranks agree in the "
        "training step: take jax.lax.pmin of whether the gradients are finite."
    )
    if "apply_if_finite" in around:
        raise ValueError(
            f"{caller}: optax.apply_if_finite around it checks the gradients of one rank. If they "
            "are not finite, only that rank skips the reduction, and all others wait for it "
            "forever. "
            + (agree if shards else elsewhere("optax.apply_if_finite(optimizer, n)"))
            + ("" if workers else f" {caller} keeps its memory and moments in such a step.")
        )
    skips = getattr(around.get("MultiSteps"), "_should_skip_update_fn", None)
    # Without one, MultiSteps uses a function of its own, which never skips.
    own = getattr(skips, "__qualname__", "").startswith("MultiSteps.")
    if skips is not None and not own:
        multi_steps = (
            "optax.MultiSteps(optimizer, k, should_skip_update_fn=...).gradient_transformation()"
        )
        raise ValueError(
            f"{caller}: optax.MultiSteps with should_skip_update_fn around it checks the "
            "gradients of one rank. If it skips, only that rank leaves out the reduction, and "
            "all others wait for it forever. " + (agree if shards else elsewhere(multi_steps))
        )
    if checked and "MultiSteps" in around:
        raise ValueError(
            f"{caller}: optax.MultiSteps around it accumulates gradients that differ between ranks "
            "in a state that check_vma takes to be replicated. It also runs the reduction in "
            "every mini-step. "
            + elsewhere("optax.MultiSteps(optimizer, k).gradient_transformation()")
            + " To reduce once per k mini-steps, add up the gradients in the training step "
            "(docs/training_loops.md)."
        )
    if _CALLED_BY_SAM in around:
        raise ValueError(
            f"{caller}: optax.contrib.sam around it gives its other optimizer the gradients of one "
            "rank, unless that reduces them too, so the ranks' parameters drift apart. "
            + (
                f"Leave it out: after {caller}, each rank has a shard of the gradients' norm."
                if shards
                else elsewhere("optax.contrib.sam(...)")
            )
        )


def _optax_callers() -> dict[str, Any]:
    """Returns Optax's functions and classes on the call stack, each with its `self`.

    Functions within others are also there by their whole names.
    """
    found: dict[str, Any] = {}
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__", "").startswith("optax."):
            whole = frame.f_code.co_qualname
            name = whole.partition(".")[0]
            found[name] = found.get(name) or frame.f_locals.get("self")
            found.setdefault(whole)
        frame = frame.f_back
    return found
