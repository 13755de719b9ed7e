"""The options of a call, from its user or from a tuner."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cgx_jax.axes import Axes
from cgx_jax.compressors import Compressor
from cgx_jax.exchanges import Exchange
from cgx_jax.plan import Plan
from cgx_jax.reductions import Levels, Reduction
from cgx_jax.route.route import Options
from cgx_jax.tuning.tuner import Tuner


def check_tuner(
    caller: str,
    exchange: Exchange | str | Tuner,
    reduction: Reduction | str | None,
    levels: Levels | None,
) -> None:
    """Raises ValueError if options are given that the tuner chooses."""
    if isinstance(exchange, Tuner) and (reduction is not None or levels is not None):
        raise ValueError(
            f"{caller}: reduction={reduction!r} and levels={levels!r} are given, but the tuner "
            "chooses these; leave them out, or let it try yours: Tuner(reductions=[...], "
            "levels=[...])."
        )


def resolve_options(
    caller: str,
    axis_name: Any,
    plan: Plan,
    choices: Sequence[tuple[Compressor, ...]],
    *,
    exchange: Exchange | str | Tuner,
    reduction: Reduction | str | None,
    levels: Levels | None,
    mean: bool,
    in_units: bool,
    overlaps: bool,
) -> tuple[Options, Plan]:
    """Returns the options of a call, and `plan` in the fusion buffers that travel.

    `choices`, `in_units` and `overlaps` are as in `Tuner.setting`. Raises the same errors as
    `Options.resolve`.
    """
    if not isinstance(exchange, Tuner):
        options = Options.resolve(
            caller, axis_name, exchange=exchange, reduction=reduction, levels=levels, mean=mean
        )
        return options, plan
    axes = Axes.resolve(caller, axis_name, None)
    setting = exchange.setting(caller, plan, axes, choices, in_units=in_units, overlaps=overlaps)
    return setting.options(caller, axes, mean=mean), setting.buffered(plan)
