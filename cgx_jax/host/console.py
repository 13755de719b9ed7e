"""Tables as plain text, and progress bars, which rich draws where it is installed."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, NamedTuple


class Column(NamedTuple):
    """A column of a table, at least `width` wide; None is the width of its longest text."""

    heading: str
    width: int | None = None
    right: bool = False


def table_lines(
    columns: Sequence[Column], rows: Sequence[Sequence[str]], *, head: bool = True, gap: str = " "
) -> list[str]:
    """Returns a table as plain text, one line per row; `head` adds the headings."""
    table = [[column.heading for column in columns]] * head + [list(row) for row in rows]
    lines = [""] * len(table)
    for i, column in enumerate(columns):
        texts = [row[i] for row in table]
        width = max(map(len, texts), default=0) if column.width is None else column.width
        for j, text in enumerate(texts):
            padded = text.rjust(width) if column.right else text.ljust(width)
            lines[j] += gap * (i > 0) + padded
    return lines


class Progress:
    """Shows the steps of the command `name`, `total` in all, on stderr inside a `with` block.

    They are a bar in a terminal with rich, and lines elsewhere. Nothing is printed unless `shown`.
    """

    def __init__(self, name: str, total: int, shown: bool) -> None:
        self.name, self.total, self.shown = name, total, shown
        self._bar = _rich_bar(name, total) if shown and sys.stderr and sys.stderr.isatty() else None

    def __enter__(self) -> Progress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *raised: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def step(self, done: int, what: str, *, last: bool = False) -> None:
        """Shows `done` steps as made and `what` as next; `last` ends the bar but keeps it."""
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=done, what=what, refresh=True)
            if last:
                self._bar.stop()
        elif self.shown:
            print(f"{self.name} {done}/{self.total} {what}", file=sys.stderr, flush=True)


def _rich_bar(name: str, total: int) -> Any:
    try:
        from rich import console, progress
    except ImportError:
        return None
    terminal = console.Console(file=sys.stderr)
    if not terminal.is_interactive:  # it cannot move its cursor
        return None
    bar = progress.Progress(
        progress.TextColumn("{task.description}", markup=False),
        progress.BarColumn(bar_width=24),
        progress.MofNCompleteColumn(),
        progress.TextColumn("{task.fields[what]}", markup=False),
        console=terminal,
        auto_refresh=False,  # a redrawing thread would take time from what is measured
        redirect_stdout=sys.stdout.isatty(),  # text for a pipe must not go to the terminal
    )
    bar.add_task(name, total=total, what="")
    return bar
