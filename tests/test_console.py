"""Tables and bars: rich's in a terminal, the same plain text everywhere else."""

import contextlib
import io
import re
import sys
import threading

import pytest

from cgx_jax.commands import bench, compare, doctor
from cgx_jax.console import Column, Progress, print_table, table_lines

COLUMNS = (Column("name", 8, style="bold"), Column("bits", right=True), Column("remedy", 0))
ROWS = [("MPI", "4", "pip install cgx-jax[mpi]"), ("a longer name", "16", "")]
TABLE = "\n".join(
    [
        "name     bits remedy",
        "MPI         4 pip install cgx-jax[mpi]",
        "a longer name   16 ",
        "",
    ]
)
STEPS = "\n".join(
    [
        "tune [........................] tuning [mpi]        ",
        "tune [############............] measuring 4 kB      ",
        "tune [########################] done                ",
        "",
    ]
)
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
def of_40_columns(monkeypatch):
    for name in ("FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "40")


@pytest.fixture(params=["rich is not installed", "the cursor cannot move"])
def plain(request, of_40_columns, monkeypatch):
    if request.param == "the cursor cannot move":
        monkeypatch.setenv("TERM", "dumb")
    else:
        monkeypatch.setitem(sys.modules, "rich.console", None)


def show_bar():
    with Progress("tune", 2, shown=True) as bar:
        bar.step(0, "tuning [mpi]")
        bar.step(1, "measuring 4 kB")
        bar.step(2, "done", last=True)


def words(text):
    """Returns the text without escape sequences."""
    return ESCAPES.sub("", text)


# --- tables.


@pytest.mark.parametrize("variable", ["FORCE_COLOR", "TTY_COMPATIBLE"])
def test_a_pipe_receives_plain_text(variable, monkeypatch, capsys):
    monkeypatch.setenv(variable, "1")
    print_table(COLUMNS, ROWS)
    assert capsys.readouterr().out == TABLE
    print_table(COLUMNS, ROWS, head=False, gap="  ", indent="  ")
    assert capsys.readouterr().out.splitlines()[0] == "  MPI        4  pip install cgx-jax[mpi]"


@pytest.mark.usefixtures("plain")
def test_without_rich_a_terminal_receives_what_a_pipe_does():
    with terminal() as screen:
        print_table(COLUMNS, ROWS)
    assert screen.getvalue() == TABLE


def test_rich_draws_a_table_in_a_terminal():
    with terminal() as screen:
        print_table(COLUMNS, ROWS)
    assert "\x1b[1m" in screen.getvalue()
    head, rule, *lines = words(screen.getvalue()).splitlines()
    assert head.split() == ["name", "bits", "remedy"]
    assert set(rule) == {"─"}
    assert [line.split() for line in lines] == [" ".join(row).split() for row in ROWS]


def test_rich_cuts_and_wraps_nothing():
    long = ["x" * 70, "y" * 70]
    with terminal() as screen:
        print_table([Column("", 0), Column("", 0)], [long], head=False)
    assert words(screen.getvalue()) == " ".join(long) + "\n"


def test_rows_that_continue_a_table_stand_below_its_columns():
    columns = [Column("a long heading", 3), Column("next", 0)]
    with terminal() as screen:
        print_table(columns, [("1", "here")])
        print_table(columns, [("2", "here")], head=False)
    *_, first, second = words(screen.getvalue()).splitlines()
    assert first.index("here") == second.index("here")


def test_columns_of_no_width_fit_their_longest_text():
    columns = [Column("leaf"), Column("bits", right=True)]
    assert table_lines(columns, [("kernel", "4"), ("b", "128.25")], gap="  ") == [
        "leaf      bits",
        "kernel       4",
        "b       128.25",
    ]
    assert table_lines(columns, []) == ["leaf bits"]
    assert table_lines(columns, [], head=False) == []


QUARTILES = {"seconds": [0.001, 0.00125, 0.0015], "ratio": [0.9, 1.0, 1.125]}


def test_bench_prints_for_programs_too(capsys):
    row = {"bytes": 64_000, "method": "xla", "bits": 4, "wrong": 0, **QUARTILES}
    row |= {"algbw_gbit": 12.345, "busbw_gbit": 18.5}
    bench.print_rows([row], header=True)
    bench.print_rows([row], header=False)
    head = "      bytes method bits median ms   algbw   busbw Gbit/s  ratio (quartiles)  #wrong"
    line = "     64,000    xla    4     1.250   12.35   18.50         1.00 (0.90-1.12)        0"
    assert capsys.readouterr().out.splitlines() == [head, line, line]


def test_compare_prints_for_programs_too(capsys):
    compare.print_rows([{"method": "4bit", "sent_bytes": 4125, "error": 0.125, **QUARTILES}])
    assert capsys.readouterr().out.splitlines() == [
        "method       median ms (quartiles)      ratio (quartiles)         sent error",
        "4bit         1.25 (1.00-1.50)           1.00 (0.90-1.12)       4.12 kB 0.1250",
    ]


def test_doctor_shows_every_remedy_in_a_terminal(monkeypatch):
    finding = doctor.Finding("MPI", "mpi4py is not installed", "pip install cgx-jax[mpi]")
    for part in ("_versions", "_devices", "_memory", "_mpi", "_nvidia", "_optional"):
        monkeypatch.setattr(doctor, part, lambda: [finding])
    monkeypatch.setattr(doctor, "_package", lambda good: [])
    with terminal() as screen:
        doctor.run()
    lines = words(screen.getvalue()).splitlines()
    assert lines[:2] == [
        "MPI                mpi4py is not installed",
        "                   -> pip install cgx-jax[mpi]",
    ]


# --- bars.


def test_a_bar_in_a_file_is_a_line_per_step(capsys):
    show_bar()
    assert capsys.readouterr() == ("", STEPS)


@pytest.mark.usefixtures("plain")
def test_without_rich_a_terminal_redraws_a_line():
    with terminal() as screen:
        show_bar()
    first, second, last = STEPS.splitlines()
    assert screen.getvalue() == f"\r{first}\r{second}\r{last}\n"


def test_rich_draws_a_bar_in_a_terminal():
    with terminal() as screen:
        show_bar()
    text = words(screen.getvalue())
    assert "━" in text
    for step in ("0/2 tuning [mpi]", "1/2 measuring 4 kB", "2/2 done"):
        assert step in text
    assert text.endswith("2/2 done\n")


def test_text_after_the_last_step_stands_below_the_bar():
    with terminal() as screen, Progress("tune", 1, shown=True) as bar:
        bar.step(1, "done", last=True)
        print("a size is left out", file=sys.stderr)
    assert words(screen.getvalue()).endswith("1/1 done\na size is left out\n")


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


def test_other_processes_show_no_bar():
    with terminal() as screen, Progress("tune", 1, shown=False) as bar:
        bar.step(1, "done", last=True)
    assert screen.getvalue() == ""


def test_no_thread_redraws_a_bar(monkeypatch):
    """A thread would take time from what is measured."""
    started = []
    monkeypatch.setattr(threading.Thread, "start", started.append)
    with terminal():
        show_bar()
    assert started == []
