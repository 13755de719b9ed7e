"""`report` on the log of a training: what it prints, what it draws, what it refuses."""

import itertools
import json

import numpy as np
import pytest

from adaptive_training import WIDTHS, Training
from cgx_jax import Adaptive
from cgx_jax.commands import report_choices, run_file
from test_cli import PNG_SIGNATURE, run

# The collectives of statistics and gradients do not wait for each other: see `no_cache`.
pytestmark = pytest.mark.usefixtures("no_cache")


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    path = tmp_path_factory.mktemp("runs") / "new" / "one.jsonl"
    policy = Adaptive(candidates=WIDTHS, warmup=4, every=8, sample_every=2, log=path)
    training = Training(policy)
    for t in range(26):
        training.run(1)
        policy.record(loss=2 - t / 26)
    return path


def test_a_log_holds_the_leaves_every_look_and_the_recorded_numbers(log):
    one = run_file.Run.read(log)
    assert one.menu.paths == ("big", "small", "table")
    assert [r.outcome for r, _ in one.refreshes] == ["changed", "kept", "kept"]
    assert [p.step for p in one.plans] == [0, one.refreshes[0][0].step]
    assert [p.bits for p in one.plans] == [(4, 4, 4), one.refreshes[0][0].bits]
    assert one.plans[0].wire_bytes > one.plans[1].wire_bytes > 0
    assert one.scalars["loss"].shape == (26, 2)
    assert one.scalars["loss"][0].tolist() == [1, 2]
    assert one.refreshes[0][1]["error"].shape == (3, len(WIDTHS))


def test_the_front_is_no_worse_than_any_choice_of_as_many_bytes(log):
    one = run_file.Run.read(log)
    front = report_choices.front(one)
    assert all(a.error >= b.error for a, b in itertools.pairwise(front))
    named = {c.name.split("(")[0]: c for c in report_choices.choices(one)}
    assert {"uniform 2", "uniform 8", "Linear", "KMeans", "LeastBytes", "this run"} == {
        n for n in named if n in ("uniform 2", "uniform 8") or not n.startswith("uniform")
    }
    for choice in named.values():
        allowed = [c for c in front if c.bits <= choice.bits]
        at_least = allowed[-1].error if allowed else np.inf
        beyond = [c.error for c in front if c.bits >= choice.bits]
        assert choice.error >= min(beyond, default=0) * (1 - 1e-9), (choice, at_least)
    assert named["LeastBytes"].bits <= named["uniform 4"].bits
    assert named["LeastBytes"].error <= named["uniform 4"].error
    assert named["this run"].bits == pytest.approx(named["LeastBytes"].bits, rel=0.05)


def test_report_prints_the_plan_and_draws_it(log, tmp_path):
    png = tmp_path / "new" / "report.png"
    code, out, error = run("report", log, log, "--png", png)
    assert code == 0, error
    assert out.count("3 adaptive leaves, 3 looks at their statistics, 1 plan changes") == 2
    assert out.count("bytes per step") == 4
    for word in ("big", "uniform 4", "LeastBytes", "this run", f"drawn in {png}"):
        assert word in out
    assert png.read_bytes().startswith(PNG_SIGNATURE)


def test_a_run_without_statistics_is_said_to_have_none(tmp_path):
    path = tmp_path / "young.jsonl"
    Training(Adaptive(log=path))
    code, out, error = run("report", path, "--png", tmp_path / "young.png")
    assert code == 0, error
    assert "no statistics yet" in out


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty: the run has not taken its first step"),
        ("step,loss\n", "line 1 of .* is not from a run's log"),
        ('{"kind": "run", "schema": 99}', "schema is 99, but this version reads 2"),
        ('{"loss": 1}', "line 1 of .* is not from a run's log"),
    ],
)
def test_a_file_that_is_no_log_is_refused(tmp_path, text, message):
    path = tmp_path / "x.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        run_file.Run.read(path)


def test_a_missing_file_ends_with_its_name():
    code, _, error = run("report", "nowhere.jsonl")
    assert code == 2
    assert "nowhere.jsonl" in error


def test_a_log_says_the_widths_it_chose_from(log):
    first = json.loads(log.read_text().splitlines()[0])
    named = [f"Quantize(bits={w.bits}, bucket_size={w.bucket_size})" for w in WIDTHS]
    assert [c["name"] for c in first["candidates"]] == named
    assert [c["bits"] for c in first["candidates"]] == [w.bits for w in WIDTHS]
    sizes = first["sizes"]
    nbytes = [[w.payload_bytes(n) for n in sizes] for w in WIDTHS]
    assert [c["nbytes"] for c in first["candidates"]] == nbytes
