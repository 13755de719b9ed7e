"""Each example, started as a user starts it, does what its docstring says."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cgx_jax.commands import rig

EXAMPLES = Path(__file__).parents[1] / "examples"
PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
NO_LINK = rig.missing()
TINY_MODEL = ("--steps", "6", "--width", "32", "--layers", "1", "--batch", "8")


def run(name: str, *arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    # An example chooses its own devices: this process's flags must not reach it.
    environment = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}
    return subprocess.run(
        [sys.executable, EXAMPLES / name, *arguments],
        env=environment,
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


# An example, its arguments, and what it prints.
EXAMPLES_THAT_PRINT = [
    ("01_all_reduce.py", "", "7.8 times fewer"),
    ("03_pmap.py", "--steps 8", "ranks hold the same parameters: True"),
    ("04_jit.py", "--steps 8", "step   7  loss"),
    ("05_multiprocess.py", "--steps 8", "ranks hold the same parameters: True"),
    ("06_linen_hook.py", "--steps 20", "step  19  loss"),
    ("07_mpi.py", "--steps 8", "ranks hold the same parameters: True"),
    ("08_adaptive.py", "--steps 12", "are the same, bit for bit: True"),
    ("09_linen_train_state.py", "--steps 20", "12.0 times fewer"),
    ("10_equinox.py", "--steps 20", "the ranks' memories differ: True"),
    ("11_fsdp.py", "--steps 12", "5.0 times fewer"),
    ("12_images.py", "", "bits per value: 2."),
    ("13_embeddings.py", "", "12.8 times fewer"),
    ("14_elastic.py", "--steps 60", "ranks hold the same parameters at every checkpoint: True"),
    ("14_elastic.py", "--steps 240 --round 10 --rate 10mbit", "the first host sent 0."),
    ("15_critical_phases.py", "--steps 64", "Accordion: "),
    ("16_slow_link.py", "--steps 20", "10 Mbit/s"),
    ("17_elastic_gpu.py", "--steps 60", "ranks hold the same state at every snapshot: True"),
    ("17_elastic_gpu.py", "--steps 60 --lose 0", "in the same processes: False"),
]
NEEDS = {"07_mpi.py": "mpi4py", "10_equinox.py": "equinox", "12_images.py": "sklearn"}


@pytest.mark.parametrize(("name", "arguments", "expected"), EXAMPLES_THAT_PRINT)
@pytest.mark.quick("01_*")
def test_example_verifies_itself(name, arguments, expected, tmp_path):
    if name in NEEDS and not importlib.util.find_spec(NEEDS[name]):
        pytest.skip(f"no {NEEDS[name]}: `pip install cgx-jax[test]` installs it")
    if (name == "16_slow_link.py" or "--rate" in arguments) and NO_LINK:
        pytest.skip(NO_LINK)
    result = run(name, *arguments.split(), cwd=tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    assert expected in result.stdout
    assert result.stdout.splitlines()[-1] == "ok"
    assert all(x.read_bytes().startswith(PNG_SIGNATURE) for x in tmp_path.rglob("*.png"))


@pytest.mark.slow
def test_language_model_reports_both_runs_and_draws_them(tmp_path):
    # 8 bits: so small a model is still on the steep part of its curve after 6 steps, where 4 bits
    # cost it 2 to 5 %. The 4-bit claim is the full example's own check.
    out = tmp_path / "new" / "folder"
    result = run("02_language_model.py", *TINY_MODEL, "--bits", "8", "--out", str(out))
    assert result.returncode == 0, result.stdout + result.stderr
    rows = [line.split()[0] for line in result.stdout.splitlines() if " MB " in line]
    assert rows == ["exact", "8-bit"]
    chart = (out / "language_model.png").read_bytes()
    assert chart.startswith(PNG_SIGNATURE)
    assert len(chart) > 10_000


@pytest.mark.slow
def test_language_model_fails_when_compression_costs_too_much(tmp_path):
    result = run("02_language_model.py", *TINY_MODEL, "--bits", "1", "--out", str(tmp_path))
    assert result.returncode == 1, result.stdout + result.stderr
    assert result.stdout.splitlines()[-1].startswith("FAILED: held-out loss +")
