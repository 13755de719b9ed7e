"""A bar on stderr: redrawn in a terminal, a line a step elsewhere."""

from __future__ import annotations

import sys

WIDTH = 24


class Progress:
    """The bar of the command `name`, `total` steps long; one that is not `shown` prints nothing."""

    def __init__(self, name: str, total: int, shown: bool) -> None:
        self.name, self.total, self.shown = name, total, shown

    def step(self, done: int, what: str, *, last: bool = False) -> None:
        """`done` steps are made, and `what` is next; `last` leaves the bar as it is."""
        filled = WIDTH * done // self.total
        bar = "#" * filled + "." * (WIDTH - filled)
        redraw = sys.stderr.isatty() and not last
        self.say(f"\r{self.name} [{bar}] {what:<20}", end="" if redraw else "\n")

    def say(self, text: str, end: str = "\n") -> None:
        """Prints `text` below the bar."""
        if self.shown:
            print(text if sys.stderr.isatty() else text.lstrip("\r"), end=end, file=sys.stderr)
            sys.stderr.flush()
