"""Tables and progress bars: drawn by rich in a terminal, plain text elsewhere.

rich is an optional dependency. It is imported only to draw in a terminal, so the text in a file or
a pipe is the same with and without it. Plain text is printed without rich, and in a terminal that
cannot move its cursor.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, NamedTuple, TextIO

_BAR_WIDTH = 24
_NO_LIMIT = 10_000  # characters per line: a terminal wraps long lines, but rich would cut cells


class Column(NamedTuple):
    """A column of a table.

    In plain text it is at least `width` characters wide. If `width` is None, it is as wide as its
    longest text. rich writes its cells in `style`.
    """

    heading: str
    width: int | None = None
    right: bool = False
    style: str = ""


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


def print_table(
    columns: Sequence[Column],
    rows: Sequence[Sequence[str]],
    *,
    head: bool = True,
    gap: str = " ",
    indent: str = "",
) -> None:
    """Prints a table on stdout; without `head`, its rows continue the table printed before."""
    console = _rich_console(sys.stdout, width=_NO_LIMIT)
    if console is None:
        lines = table_lines(columns, rows, head=head, gap=gap)
    else:
        lines = _rich_lines(console, columns, rows, head=head, gap=gap)
    for line in lines:
        print(indent + line, flush=True)


class Progress:
    """A progress bar of `total` steps for the command `name`, on stderr inside a `with` block.

    In a terminal without rich, one line is redrawn. Without a terminal, each step prints a line.
    Nothing is printed unless `shown` is True.
    """

    def __init__(self, name: str, total: int, shown: bool) -> None:
        self.name, self.total, self.shown = name, total, shown
        self._bar = _rich_bar(name, total) if shown else None

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
            filled = _BAR_WIDTH * done // self.total
            bar = "#" * filled + "." * (_BAR_WIDTH - filled)
            terminal = sys.stderr.isatty()
            start, end = "\r" * terminal, "" if terminal and not last else "\n"
            line = f"{start}{self.name} [{bar}] {what:<20}"
            print(line, end=end, file=sys.stderr, flush=True)


def _rich_console(stream: TextIO, **options: Any) -> Any:
    """Returns a rich console on `stream`, or None if plain text has to be printed."""
    if not stream.isatty():
        return None
    try:
        from rich.console import Console
    except ImportError:
        return None
    console = Console(file=stream, **options)
    return console if console.is_interactive else None


def _rich_lines(
    console: Any,
    columns: Sequence[Column],
    rows: Sequence[Sequence[str]],
    *,
    head: bool,
    gap: str,
) -> list[str]:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    # The box itself puts one space between columns.
    padding = (0, len(gap) - 1, 0, 0)
    table = Table(
        box=box.SIMPLE_HEAD, show_header=head, show_edge=False, pad_edge=False, padding=padding
    )
    for column in columns:
        # Rows that continue a table have no headings, so the headings' widths are set here.
        width = max(column.width or 0, len(column.heading))
        side = "right" if column.right else "left"
        table.add_column(
            Text(column.heading), justify=side, style=column.style, min_width=width, no_wrap=True
        )
    for row in rows:
        table.add_row(*map(Text, row))  # in a plain str, rich would take "[mpi]" for markup
    with console.capture() as capture:
        console.print(table)
    # In a narrow terminal, the padding of a short last cell would wrap onto an extra line.
    return [line.rstrip() for line in capture.get().rstrip("\n").split("\n")]


def _rich_bar(name: str, total: int) -> Any:
    console = _rich_console(sys.stderr)
    if console is None:
        return None
    from rich import progress

    bar = progress.Progress(
        progress.TextColumn("{task.description}", markup=False),
        progress.BarColumn(bar_width=_BAR_WIDTH),
        progress.MofNCompleteColumn(),
        progress.TextColumn("{task.fields[what]}", markup=False),
        console=console,
        auto_refresh=False,  # a redrawing thread would take time from what is measured
        redirect_stdout=sys.stdout.isatty(),  # text for a pipe must not go to the terminal
    )
    bar.add_task(name, total=total, what="")
    return bar
