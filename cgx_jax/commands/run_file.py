"""Reads what `cgx_jax.Adaptive(log=FILE)` wrote; raises ValueError for any other file."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from cgx_jax import untrusted
from cgx_jax.exchanges.profile import Codec
from cgx_jax.policies import run_log
from cgx_jax.policies.decide import Refresh
from cgx_jax.policies.menu import Candidate, Menu

MOST_LEAVES = 1_000_000
MOST_BITS = 64  # limit of a width
LARGEST = 1e60  # limit of an average: sums are kept in fp32
OUTCOMES = ("changed", "kept", "bounded", "unusable")


class Traced(NamedTuple):
    """A plan compiled after `step` steps: its widths and the bytes sent per rank and step."""

    step: int
    bits: tuple[int, ...]
    wire_bytes: int
    compile_seconds: float


@dataclasses.dataclass(frozen=True)
class Run:
    """A run's log: leaves with candidates, refreshes with averages, plans and scalars."""

    name: str
    menu: Menu
    refreshes: tuple[tuple[Refresh, dict[str, np.ndarray]], ...]
    plans: tuple[Traced, ...]
    scalars: dict[str, np.ndarray]  # name -> [count, 2]: step, value

    @classmethod
    def read(cls, path: Path) -> Run:
        """Reads the run logged at `path`; raises ValueError for a file that is not a log."""
        reader = _Reader()
        for number, line in enumerate(untrusted.lines(path), 1):
            try:
                reader.add(untrusted.loads(line))
            except (TypeError, ValueError) as error:
                raise ValueError(
                    f"report: line {number} of {path} is not from a run's log ({error}); pass the "
                    "file that cgx_jax.Adaptive(log=...) wrote."
                ) from None
        if reader.menu is None:
            raise ValueError(f"report: {path} is empty: the run has not taken its first step.")
        curves = {name: np.array(points, float) for name, points in reader.scalars.items()}
        return cls(path.stem, reader.menu, tuple(reader.refreshes), tuple(reader.plans), curves)

    def measured(self) -> tuple[Refresh, dict[str, np.ndarray]] | None:
        """Returns the last refresh whose statistics a solver could use, or None."""
        usable = [r for r in self.refreshes if r[0].outcome != "unusable"]
        return usable[-1] if usable else None


class _Reader:
    """Collects the entries of a log."""

    def __init__(self) -> None:
        self.menu: Menu | None = None
        self.refreshes: list[tuple[Refresh, dict[str, np.ndarray]]] = []
        self.plans: list[Traced] = []
        self.scalars: dict[str, list[tuple[int, float]]] = {}

    def add(self, entry: Any) -> None:
        """Adds an entry; raises ValueError or TypeError for one that no log holds."""
        kind = untrusted.field(entry, "kind")
        if kind == "run":
            self.menu = _menu(entry, self.menu)
        elif self.menu is None:
            raise ValueError("no entry of kind 'run' comes before it")
        elif kind == "refresh":
            self.refreshes.append(_refresh(entry, self.menu))
        elif kind == "plan":
            self.plans.append(_plan(entry, self.menu))
        elif kind == "scalars":
            step = _step(entry)
            for name, value in entry.items():
                if name not in ("kind", "step"):
                    point = step, untrusted.number(value, name)
                    self.scalars.setdefault(name, []).append(point)
        else:
            raise ValueError(f"its kind, {untrusted.shown(kind)}, is unknown")


def _menu(entry: dict[str, Any], before: Menu | None) -> Menu:
    schema = untrusted.field(entry, "schema")
    if schema != run_log.SCHEMA:
        raise ValueError(
            f"its schema is {untrusted.shown(schema)}, but this version reads {run_log.SCHEMA}"
        )
    paths = untrusted.items(untrusted.field(entry, "paths"), "paths")
    if len(paths) > MOST_LEAVES:
        raise ValueError(f"{len(paths)} leaves exceed the limit of {MOST_LEAVES}")
    sizes = untrusted.items(untrusted.field(entry, "sizes"), "sizes", len(paths))
    candidates = untrusted.items(untrusted.field(entry, "candidates"), "candidates")
    menu = Menu(
        tuple(untrusted.text(p, "a path") for p in paths),
        _counts(sizes, "a size"),
        tuple(_candidate(c, len(paths)) for c in candidates),
    )
    bits = [c.bits for c in menu.candidates]
    if not bits or bits != sorted(bits):
        raise ValueError(f"the candidates' widths {bits} are not in ascending order")
    if before is not None and menu != before:
        raise ValueError("it begins a run with other leaves; give each run its own log")
    return menu


def _candidate(entry: Any, leaves: int) -> Candidate:
    work = untrusted.items(untrusted.field(entry, "work"), "work")
    if not all(w in Codec._fields for w in work):
        raise ValueError(f"work={untrusted.shown(work)} is not a list of {Codec._fields}")
    return Candidate(
        untrusted.text(untrusted.field(entry, "name"), "a candidate's name"),
        untrusted.whole(untrusted.field(entry, "bits"), "bits", 1, MOST_BITS),
        tuple(work),
        _counts(untrusted.items(untrusted.field(entry, "nbytes"), "nbytes", leaves), "nbytes"),
    )


def _counts(values: Any, what: str) -> tuple[int, ...]:
    counts = tuple(untrusted.whole(n, what, 1) for n in values)
    untrusted.whole(sum(counts), f"the sum of {what}")
    return counts


def _refresh(entry: dict[str, Any], menu: Menu) -> tuple[Refresh, dict[str, np.ndarray]]:
    leaves = len(menu.paths)
    outcome = untrusted.field(entry, "outcome")
    if outcome not in OUTCOMES:
        raise ValueError(f"outcome={untrusted.shown(outcome)} is not one of {OUTCOMES}")
    averages = untrusted.field(entry, "averages")
    rows = untrusted.items(untrusted.field(averages, "error"), "error", leaves)
    error = _numbers(
        [x for row in rows for x in untrusted.items(row, "error", len(menu.candidates))], "error"
    ).reshape(leaves, len(menu.candidates))
    square = _numbers(
        untrusted.items(untrusted.field(averages, "square"), "square", leaves), "square"
    )
    total = untrusted.number(untrusted.field(entry, "error"), "error")
    if outcome != "unusable":
        known = np.concatenate([error.ravel(), square, [total]])
        if not ((known >= 0) & (known < LARGEST)).all() or not square.any():
            raise ValueError(
                f"averages of outcome {outcome!r} are outside [0, {LARGEST:g}), or all 0"
            )
    refresh = Refresh(
        _step(entry),
        outcome,
        _bits(entry, leaves),
        untrusted.whole(untrusted.field(entry, "nbytes"), "nbytes"),
        total,
        tuple(
            untrusted.number(x, "relative")
            for x in untrusted.items(untrusted.field(entry, "relative"), "relative", leaves)
        ),
        _texts(entry, "unusable"),
        _texts(entry, "nonfinite"),
    )
    return refresh, {"error": error, "square": square}


def _plan(entry: dict[str, Any], menu: Menu) -> Traced:
    return Traced(
        _step(entry),
        _bits(entry, len(menu.paths)),
        untrusted.whole(untrusted.field(entry, "wire_bytes"), "wire_bytes"),
        untrusted.number(untrusted.field(entry, "compile_seconds"), "compile_seconds"),
    )


def _step(entry: dict[str, Any]) -> int:
    return untrusted.whole(untrusted.field(entry, "step"), "step")


def _bits(entry: dict[str, Any], leaves: int) -> tuple[int, ...]:
    bits = untrusted.items(untrusted.field(entry, "bits"), "bits", leaves)
    return tuple(untrusted.whole(b, "bits", 1, MOST_BITS) for b in bits)


def _texts(entry: dict[str, Any], name: str) -> tuple[str, ...]:
    values = untrusted.items(untrusted.field(entry, name), name)
    return tuple(untrusted.text(value, name) for value in values)


def _numbers(values: Any, what: str) -> np.ndarray:
    return np.array([untrusted.number(x, what) for x in values], float)
