"""Tables are plain text; bars are rich's in a terminal, and lines everywhere else."""

import contextlib
import io
import os
import re
import sys
import threading
from unittest import mock

import pytest

from cgx_jax.host.console import Column, Progress, table_lines

STEPS = "tune 0/2 tuning [mpi]\ntune 1/2 measuring 4 kB\ntune 2/2 done\n"
ESCAPES = re.compile(r"\x1b\[[?\d;]*[a-zA-Z]")


class Terminal(io.StringIO):
    def isatty(self):
        return True


@contextlib.contextmanager
def terminal():
    """stdout and stderr, as one terminal."""
    both = Terminal()
    with contextlib.redirect_stdout(both), contextlib.redirect_stderr(both):
        yield both


@pytest.fixture(autouse=True)
def of_40_columns():
    with mock.patch.dict(os.environ, TERM="xterm-256color", COLUMNS="40"):
        for name in ("FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
            os.environ.pop(name, None)
        yield


def show_bar(shown=True):
    with Progress("tune", 2, shown) as bar:
        bar.step(0, "tuning [mpi]")
        bar.step(1, "measuring 4 kB")
        bar.step(2, "done", last=True)
        print("a size is left out", file=sys.stderr)


def test_columns_of_no_width_fit_their_longest_text():
    columns = [Column("leaf"), Column("bits", right=True)]
    assert table_lines(columns, [("kernel", "4"), ("b", "128.25")], gap="  ") == [
        "leaf      bits",
        "kernel       4",
        "b       128.25",
    ]
    assert table_lines(columns, []) == ["leaf bits"]
    assert table_lines(columns, [], head=False) == []


@pytest.mark.parametrize("place", ["a pipe", "no rich", "no cursor"])
def test_a_bar_elsewhere_is_a_line_per_step(place, monkeypatch, capsys):
    if place == "no rich":
        monkeypatch.setitem(sys.modules, "rich", None)
    os.environ["TERM" if place == "no cursor" else "FORCE_COLOR"] = "dumb"
    with contextlib.nullcontext() if place == "a pipe" else terminal() as screen:
        show_bar()
    said = capsys.readouterr().err if screen is None else screen.getvalue()
    assert said == STEPS + "a size is left out\n"


def test_rich_draws_a_bar_in_a_terminal_without_a_thread(monkeypatch):
    """A thread would take time from what is measured."""
    started = []
    monkeypatch.setattr(threading.Thread, "start", started.append)
    with terminal() as screen:
        show_bar(shown=False)  # as on other processes
        assert screen.getvalue() == "a size is left out\n"
        show_bar()
    text = ESCAPES.sub("", screen.getvalue())
    assert "━" in text
    for step in ("0/2 tuning [mpi]", "1/2 measuring 4 kB", "2/2 done"):
        assert step in text
    assert text.endswith("2/2 done\na size is left out\n")
    assert started == []


def test_output_for_a_pipe_does_not_go_to_the_terminal_of_the_bar():
    pipe = io.StringIO()
    with (
        terminal() as screen,
        contextlib.redirect_stdout(pipe),
        Progress("compare", 1, shown=True) as bar,
    ):
        bar.step(0, "compiling exact")
        print("a line of the user's step")
    assert pipe.getvalue() == "a line of the user's step\n"
    assert "a line" not in screen.getvalue()


def test_an_error_leaves_the_terminal_as_it_was():
    def fail():
        with Progress("tune", 1, shown=True) as bar:
            bar.step(0, "measuring 4 kB")
            raise ValueError("of the user")

    with terminal() as screen:
        with pytest.raises(ValueError, match="of the user"):
            fail()
        assert sys.stdout is sys.stderr is screen
    assert screen.getvalue().endswith("\x1b[?25h")  # the cursor is shown
