"""The script for a machine with a GPU: its limits hold and what it calls exists. Needs no GPU."""

import os
import pathlib
import re
import subprocess
import time

import pytest

ROOT = pathlib.Path(__file__).parents[1]
GPU = ROOT / "tests" / "gpu"
CAPTURED = {"capture_output": True, "text": True, "check": False}


def shell(script: str, folder: pathlib.Path, deadline: int = 60) -> list[str]:
    """The lines that a script prints, with `step` at hand."""
    prelude = f"deadline={deadline} patience=1 work={folder} failed=0; . {GPU / 'steps.sh'}\n"
    done = subprocess.run(["bash", "-uc", prelude + script], **CAPTURED)
    assert not done.stderr
    return done.stdout.splitlines()


def test_step_that_hangs_is_cut_off_with_all_its_processes(tmp_path):
    process, verdict, after, failed = shell(
        "step hangs 1 bash -c 'sleep 600 & echo $!; wait'; step next 5 true; echo $failed", tmp_path
    )
    assert verdict.startswith("=== hangs: FAILED, code 124 (")
    assert after.startswith("=== next: passed (")
    assert failed == "1"
    give_up = time.monotonic() + 20
    while subprocess.run(["ps", "-o", "stat=", "-p", process], **CAPTURED).stdout[:1] not in "Z":
        assert time.monotonic() < give_up, f"process {process} lives on"
        time.sleep(0.05)


def test_step_that_may_outlast_the_deadline_does_not_start(tmp_path):
    late, short, failed = shell(
        f"step late 8 touch {tmp_path}/ran; step short 2 true; echo $failed", tmp_path, deadline=7
    )
    assert late.startswith("=== late: left out, it may take 8 s, and ")
    assert not (tmp_path / "ran").exists()
    assert short.startswith("=== short: passed (")
    assert failed == "0"


def test_steps_that_are_not_asked_for_do_not_run(tmp_path):
    lines = shell("STEPS='^b|d$'; for n in abc bc bad cad; do step $n 5 true; done", tmp_path)
    assert [line.split(":")[0] for line in lines] == ["=== bc", "=== bad", "=== cad"]


@pytest.mark.parametrize(("code", "deadline"), [(0, 580), (3, 580), (3, 0)])
def test_every_step_has_its_turn_and_the_exit_code_says_whether_one_failed(
    tmp_path, code, deadline
):
    for name in ("python", "kernel_bench", "virtual_ranks", "virtual_peers"):
        (tmp_path / name).write_text(f"#!/bin/sh\nexit {code}\n")
        (tmp_path / name).chmod(0o755)
    settings = {"PREBUILT": tmp_path, "PYTHON": tmp_path / "python", "DEADLINE": deadline}
    done = subprocess.run(
        [GPU / "run.sh", tmp_path / "out"],
        env={"PATH": "/usr/bin:/bin"} | {k: str(v) for k, v in settings.items()},
        **CAPTURED,
    )
    steps = dict(re.findall(r"^=== (\w+): (\w+)", done.stdout, re.MULTILINE))
    names = {
        *("kernels", "virtual_8", "virtual_peers_8", "nccl_2", "nccl_4_sizes"),
        *("reductions", "tuned_5", "training", "codec"),
    }
    assert names <= steps.keys()
    verdict = "left" if deadline == 0 else "FAILED" if code else "passed"
    assert {steps[name] for name in names} == {verdict}
    assert done.returncode == (verdict == "FAILED")
    assert len(os.listdir(tmp_path / "out")) <= 8


def test_prebuild_sets_options_that_the_build_has():
    script = (GPU / "prebuild.sh").read_text()
    build = (ROOT / "CMakeLists.txt").read_text()
    options = set(re.findall(r"^(?:option|set)\((CGX_\w+)", build, re.MULTILINE))
    given = set(re.findall(r"CGX_\w+", script))
    assert given == {"CGX_BUILD_MODULE", "CGX_BUILD_GPU_TESTS"}
    assert given <= options
    programs = re.search(r"for program in (.*); do", script)[1].split()
    built = re.search(r"foreach\(program (.*)\)", (ROOT / "cmake" / "cuda.cmake").read_text())
    assert programs == built[1].split()
    assert '"cgx.native"' in (ROOT / "pyproject.toml").read_text()
