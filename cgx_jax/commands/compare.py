"""`python -m cgx_jax compare`: times a user's own training step by several methods, in turns."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from cgx_jax._types import Json
from cgx_jax.commands.bench import quartiles, spread, write
from cgx_jax.commands.trial import ALONE, ERROR_STEPS, METHODS, Trial
from cgx_jax.host import agreement, installation
from cgx_jax.host.console import Column, Progress, table_lines
from cgx_jax.leaves import same_structure
from cgx_jax.tuning.link_timer import LinkTimer, size_text

EXPLANATION = f"""\
MODULE has a function that builds your training step around the transformation to try:

    def compare(sync):
        tx = optax.chain(sync("data", mesh=mesh), optax.adamw(3e-4))
        ...
        return step, (params, tx.init(params)), [(x, y)]

`sync` takes the place of cgx_jax.sync_gradients, and takes the axis and the mesh. Return the step,
its state and a list of batches, each a tuple. The step is called as step(*state, *batch), and its
results begin with the new state. Compile it as in your training.

Every method trains from the state that the function returns. The methods take turns of one step,
each behind a barrier, and the slowest process's time counts. `ratio` is the time of exact gradients
divided by the method's time in the same turn: the median (and quartiles) over the steps. `sent` is
what a rank sends per step, by the format's arithmetic. `error` is |mean - exact| / |exact| over the
first {ERROR_STEPS} steps, which are not timed. With feedback the error of a step is sent later, so
a large error costs less than it seems. Only a long training shows what a method costs in accuracy:
docs/choosing.md. "{ALONE}" is the step without a reduction: no method is faster.

With "{ALONE}", DiLoCo is listed too, but does not run. METHOD/N is the mean step if METHOD adds its
time and bytes to the step alone once in N steps. DiLoCo's own additions are left out.
"""
DEFAULT_FUNCTION = "compare"
EVERY = 8, 32, 100  # steps of a round of DiLoCo
ROUNDS = "exact", "4bit-rotated"  # how its movements are reduced
_COLUMNS = (
    Column("method", 16),
    Column("median ms (quartiles)", 25),
    Column("ratio (quartiles)", 20),
    Column("sent", 9, right=True),
    Column("error", 0),
)


class Refused(ValueError):
    """Raised if the user's target, or what it returned, cannot be used."""


def run(
    target: str,
    links: LinkTimer,
    names: Sequence[str],
    steps: int,
    *,
    exchange: str,
    json_path: Path | None,
    png_path: Path | None,
) -> None:
    """Measures; on process 0, prints the table and a recommendation and writes the files asked for.

    Raises Refused if the target, or what it returns, cannot be used.
    """
    build = function_of(target)
    rows, rounds = measure(build, links, names, steps, exchange)
    if not links.first:
        return
    print_rows(rows)
    if rounds:
        print("DiLoCo, by arithmetic from these times; it did not run:")
        print_rows(rounds, head=False)
    print(*recommendation(rows), sep="\n")
    if exchange == "auto":
        print('These times are those of exchange="auto" with the profile: call use_profile first.')
    if rounds:
        print(
            "DiLoCo trains in another way, and a few steps do not show what it costs in accuracy: "
            "see docs/measurements/diloco.md."
        )
    machine = installation.facts() | {"exchange": exchange}
    document = {"target": target, "machine": machine, "world": links.world}
    document |= {"rows": rows, "diloco": rounds}
    write("draw_compare", document, json_path, png_path)


def function_of(target: str) -> Callable[..., Any]:
    """Returns the function that MODULE[:FUNCTION] names."""
    module_name, _, name = target.partition(":")
    name = name or DEFAULT_FUNCTION
    if not all(map(str.isidentifier, module_name.split("."))):
        raise Refused(
            f"compare: {target!r} does not name a module; write it as in an import: train for "
            "train.py, or train:FUNCTION."
        )
    if (here := os.getcwd()) not in sys.path:  # an installed command has its own folder there
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # the missing module is one that the user's module imports
        raise Refused(
            f"compare: there is no module {error.name!r} for {target!r}; run the command in the "
            "folder that holds it, and write it as in an import: train for train.py."
        ) from None
    function: Callable[..., Any] | None = getattr(module, name, None)
    if not callable(function):
        there = sorted(n for n, x in vars(module).items() if callable(x) and n[0] != "_")
        raise Refused(
            f"compare: {module_name} has no function {name!r}; it has {', '.join(there) or 'none'}."
            f" Write `def {name}(sync)`, or name another: {module_name}:FUNCTION."
        )
    return function


def measure(
    build: Callable[..., Any], links: LinkTimer, names: Sequence[str], steps: int, exchange: str
) -> tuple[list[Json], list[Json]]:
    """Times `steps` steps of every method in turns.

    Returns one row per method, exact's first, and DiLoCo's, which are computed from them.
    """
    trials, runs = [], []
    samples = np.empty((steps, len(names)))
    with Progress("compare", len(names) + steps, links.first) as progress:
        for done, name in enumerate(names):
            progress.step(done, f"compiling {name}")
            trial = Trial(METHODS[name], exchange)
            running = built(build, trial)
            for _ in range(ERROR_STEPS):
                running()
            if trial.sent_bytes is None:
                raise Refused(
                    "compare: the step did not call the update of sync(...); put it first in the "
                    "optimizer's chain, and use that optimizer in the step."
                )
            trials.append(trial)
            runs.append(running)
        orders = np.random.default_rng(0)  # as in `LinkTimer.seconds`, the same on all ranks
        for i, sample in enumerate(samples):
            progress.step(len(names) + i, f"step {i + 1} of {steps}")
            for j in orders.permutation(len(runs)):
                sample[j] = links.timed(runs[j])
        progress.step(progress.total, "done", last=True)
    seconds = agreement.maximum(samples)
    rows = [
        {
            "method": name,
            "write": trials[j].write,
            "seconds": quartiles(seconds[:, j]),
            "ratio": quartiles(seconds[:, 0] / seconds[:, j]),
            "sent_bytes": trials[j].sent_bytes,
            "error": trials[j].error(runs[j].state),
        }
        for j, name in enumerate(names)
    ]
    return rows, diloco(rows, seconds)


def diloco(rows: Sequence[Json], seconds: np.ndarray) -> list[Json]:
    """Returns DiLoCo's rows: the means over a round, from f64[steps, len(rows)]."""
    by_name = {row["method"]: (row, seconds[:, j]) for j, row in enumerate(rows)}
    if ALONE not in by_name:
        return []
    _, alone = by_name[ALONE]
    found = []
    for name in (name for name in ROUNDS if name in by_name):
        row, reducing = by_name[name]
        for every in EVERY:
            mean = alone + (reducing - alone) / every
            found.append(
                {
                    "method": f"{name}/{every}",
                    "seconds": quartiles(mean),
                    "ratio": quartiles(seconds[:, 0] / mean),
                    "sent_bytes": row["sent_bytes"] / every,
                    "error": None,
                }
            )
    return found


def built(build: Callable[..., Any], trial: Trial) -> _Running:
    """Calls the user's function for one method and checks what it returns."""
    made = build(trial.sync)
    if not isinstance(made, tuple) or len(made) != 3:
        raise Refused(
            f"compare: the function returned {_shown(made)}; return three things: the step, a "
            "tuple with its state, and a list of batches, each a tuple."
        )
    step, state, batches = made
    if not callable(step):
        raise Refused(f"compare: the step is {_shown(step)}; return a function, compiled or not.")
    if not isinstance(state, tuple) or not state:
        raise Refused(
            f"compare: the state is {_shown(state)}; return a tuple of what the step takes before "
            "the batch, such as (params, opt_state)."
        )
    batches = list(batches)
    if not batches or not all(isinstance(batch, tuple) for batch in batches):
        raise Refused(
            f"compare: the batches are {_shown(batches)}; return a list of at least one tuple of "
            "what the step takes after the state, such as [(x, y)]."
        )
    if not trial.made:
        raise Refused(
            "compare: the function did not call sync; put sync(axis_name, mesh=mesh) where "
            "cgx_jax.sync_gradients stands in the optimizer's chain."
        )
    # Copy the state: a step may donate it, and the user's module may still hold a reference to it.
    own = jax.tree.map(lambda x: x.copy() if isinstance(x, jax.Array) else x, state)
    return _Running(step, own, batches)


def _shown(value: object) -> str:
    kind = type(value).__name__
    return f"{kind} of {len(value)}" if isinstance(value, tuple | list | dict) else kind


class _Running:
    """A step with the state from which its next call continues."""

    def __init__(
        self, step: Callable[..., Any], state: tuple[Any, ...], batches: Sequence[tuple[Any, ...]]
    ) -> None:
        self.step, self.state, self.batches = step, state, batches
        self.calls = 0

    def __call__(self) -> None:
        batch = self.batches[self.calls % len(self.batches)]
        self.calls += 1
        results = jax.block_until_ready(self.step(*self.state, *batch))
        if len(self.state) == 1 and same_structure(results, self.state[0]):
            results = (results,)
        new = results[: len(self.state)] if isinstance(results, tuple) else ()
        if not same_structure(new, self.state):
            raise Refused(
                f"compare: the step took a state of {_shown(self.state)} and returned "
                f"{_shown(results)} that does not begin with such a state; return the parts of the "
                "new state first: params, opt_state, loss."
            )
        self.state = new


def print_rows(rows: Sequence[Json], *, head: bool = True) -> None:
    """Prints one line per method."""
    cells = [
        (
            row["method"],
            spread([1e3 * s for s in row["seconds"]]),
            spread(row["ratio"]),
            size_text(row["sent_bytes"]),
            "" if row["error"] is None else f"{row['error']:.4f}",
        )
        for row in rows
    ]
    print(*table_lines(_COLUMNS, cells, head=head), sep="\n", flush=True)


def recommendation(rows: Sequence[Json]) -> list[str]:
    """Returns the recommendation's lines, from the quartiles of `measure`'s rows.

    Ratios of times decide; exact gradients have the ratio 1. A method is faster than another if its
    lower quartile is above the other's upper quartile. Among methods that the quartiles do not
    tell apart, the one with the least error is recommended.
    """
    faster = [row for row in rows if row["ratio"][0] > 1 and row["method"] != ALONE]
    if not faster:
        return [
            "Keep lax.pmean: no method was faster than exact gradients in three of four turns. "
            "Communication is too small a part of this step on this link."
        ]
    close = [row for row in faster if METHODS[row["method"]].close]
    lines = []
    best = _best(close) if close else None
    if best is not None:
        lines.append(
            f"Write {best['write']}: {_said(best)}. It trains closest to exact gradients; "
            "docs/accuracy.md says how close."
        )
    level = best["ratio"][2] if best is not None else 1.0
    if others := [row for row in faster if row not in close and row["ratio"][0] > level]:
        other = _best(others)
        lines.append(
            f"{'Faster still' if best else 'Faster'}: {other['write']}: {_said(other)}. A few "
            "steps do not show what it costs in accuracy: see docs/choosing.md, and train with it "
            "before you rely on it."
        )
    return lines


def _best(rows: Sequence[Json]) -> Json:
    fastest = max(rows, key=lambda row: row["ratio"][1])
    alike = [row for row in rows if row["ratio"][2] >= fastest["ratio"][0]]
    return min(alike, key=lambda row: row["error"])


def _said(row: Json) -> str:
    return f"a step is {spread(row['ratio'])} times as fast as with exact gradients"
