"""`python -m cgx_jax report`: shows what an adaptive policy did in a run, as text and a chart."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from cgx_jax.commands.report_choices import choices
from cgx_jax.commands.run_file import Run
from cgx_jax.console import Column, print_table

EXPLANATION = """\
Reads the logs of one or more runs (cgx_jax.Adaptive(log=FILE)). Prints the last plan, leaf by leaf,
beside what uniform widths and each solver would give for the same statistics.
--png draws the widths of all leaves over time, squared error against bytes, and the curve of every
scalar that policy.record() noted.
"""


def run(paths: Sequence[Path], png: Path | None) -> None:
    """Prints and draws what the logs hold; raises ValueError for a file that is not a log."""
    runs = [Run.read(path) for path in paths]
    for one in runs:
        _print(one)
    if png is not None:
        from cgx_jax.commands import report_chart  # matplotlib is an extra

        report_chart.draw(runs, png)
        print(f"drawn in {png}")


def _print(one: Run) -> None:
    outcomes = [r.outcome for r, _ in one.refreshes]
    print(
        f"{one.name}: {len(one.menu.paths)} adaptive leaves, {len(outcomes)} looks at their "
        f"statistics, {outcomes.count('changed')} plan changes"
    )
    for plan in one.plans:
        print(
            f"  step {plan.step}: compiled in {plan.compile_seconds:.1f} s, a rank sends "
            f"{plan.wire_bytes:,} bytes per step"
        )
    for refresh, _ in one.refreshes:
        if refresh.nonfinite:
            print(f"  step {refresh.step}: not finite: {', '.join(refresh.nonfinite)}")
    if one.measured() is None:
        print("  no statistics yet, or none that a solver can use")
        return
    last = one.refreshes[-1][0]
    width = max(map(len, one.menu.paths), default=4)
    error = Column("relative error", 0)
    leaves = zip(one.menu.paths, one.menu.sizes, last.bits, last.relative, strict=True)
    print_table(
        (Column("leaf", width), Column("values", 10), Column("bits", 4, right=True), error),
        [(path, f"{n:,}", f"{bits}", f"{lost:.4f}") for path, n, bits, lost in leaves],
        gap="  ",
        indent="  ",
    )
    compared = choices(one)
    width = max(20, *(len(choice.name) for choice in compared))
    print_table(
        (Column("choice", width), Column("bits per value", 12, right=True), error),
        [(choice.name, f"{choice.bits:.3f}", f"{choice.error:.4f}") for choice in compared],
        gap="  ",
        indent="  ",
    )
