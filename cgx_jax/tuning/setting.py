"""`Setting`: what a tuner chooses for a step, and its form in JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

from cgx_jax.exchanges import Exchange
from cgx_jax.host import untrusted
from cgx_jax.kernels.wire import FUSION_BYTES
from cgx_jax.plan import Plan
from cgx_jax.reductions import Levels, Reduction
from cgx_jax.route.route import Options


@dataclasses.dataclass(frozen=True)
class Setting:
    """How the gradients of a step are reduced: static, hashable, equal by value.

    `exchange` has its own options, such as the segment bytes of `Mpi`; None means exact sums by
    `lax.psum`. `reduction` is None for each compressor's first. Leaves share buffers of up to
    `fusion_bytes`.
    """

    exchange: Exchange | None = None
    reduction: Reduction | None = None
    levels: Levels | None = None
    fusion_bytes: int = FUSION_BYTES

    def __str__(self) -> str:
        if self.exchange is None:
            return "psum"
        options = ", ".join(f"{k}={v}" for k, v in _options(self.exchange).items())
        name = self.exchange.shorthand + (f"({options})" if options else "")
        if self.reduction is not None:
            name += f"/{self.reduction.shorthand}"
        near = "" if self.levels is None else f", {_described(self.levels)}"
        return f"{name}{near}, {self.fusion_bytes / 2**20:g} MiB"

    def applied(self, options: Options, plan: Plan) -> tuple[Options, Plan]:
        """Returns a call's options with this setting, and its plan in this setting's buffers.

        `lax.psum` needs no buffers, so it leaves the plan as it is.
        """
        options = dataclasses.replace(
            options, exchange=self.exchange, reduction=self.reduction, levels=self.levels
        )
        return options, plan if self.exchange is None else plan.in_buffers(self.fusion_bytes)

    def to_fields(self) -> dict[str, Any]:
        """Returns the setting in JSON types."""
        exchange, reduction = self.exchange, self.reduction
        return {
            "exchange": None if exchange is None else exchange.shorthand,
            "options": {} if exchange is None else _options(exchange),
            "reduction": None if reduction is None else reduction.shorthand,
            "levels": None if self.levels is None else _described(self.levels),
            "fusion_bytes": self.fusion_bytes,
        }


@dataclasses.dataclass(frozen=True)
class Offered:
    """The parts of which settings may consist. A file only names them, and nothing else is used."""

    exchanges: tuple[Exchange, ...]
    reductions: tuple[Reduction, ...]
    levels: tuple[Levels, ...]

    def setting(self, fields: Any) -> Setting:
        """Returns the setting that `Setting.to_fields` wrote; raises ValueError for other input."""
        given: _Fields = untrusted.typed(fields, _Fields, "setting")
        exchange = _find(given.exchange, "exchange", {e.shorthand: e for e in self.exchanges})
        reduction = _find(given.reduction, "reduction", {r.shorthand: r for r in self.reductions})
        levels = _find(given.levels, "levels", {_described(x): x for x in self.levels})
        fusion_bytes = untrusted.whole(given.fusion_bytes, "fusion_bytes", 1, 1 << 40)
        if exchange is None:
            return Setting()
        known = [f.name for f in dataclasses.fields(exchange)]
        if not set(given.options) <= set(known):
            raise ValueError(f"options={untrusted.shown(given.options)} must be among {known}")
        whole = {k: untrusted.whole(v, k) for k, v in given.options.items()}
        return Setting(dataclasses.replace(exchange, **whole), reduction, levels, fusion_bytes)


class _Fields(NamedTuple):
    exchange: str | None
    options: dict[str, Any]
    reduction: str | None
    levels: str | None
    fusion_bytes: int


def _find(value: str | None, name: str, known: dict[str, Any]) -> Any:
    if value is not None and value not in known:
        raise ValueError(f"{name}={untrusted.shown(value)} is not one of {list(known)}")
    return None if value is None else known[value]


def _options(exchange: Exchange) -> dict[str, Any]:
    """Returns the options of an exchange that are set."""
    fields: Sequence[Any] = dataclasses.fields(exchange)  # type: ignore[arg-type]
    values = {f.name: getattr(exchange, f.name) for f in fields}
    return {k: v for k, v in values.items() if v is not None}


def _described(levels: Levels) -> str:
    inner = levels.inner if levels.groups is None else [list(g) for g in levels.groups]
    compressed = "" if levels.compressor is None else f", {levels.compressor}"
    return f"levels {inner}{compressed}"
