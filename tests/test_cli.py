"""`python -m cgx_jax`, as a user starts it: on simulated devices, and as one of two processes."""

import json
import sys

import numpy as np
import pytest

import cgx_jax
from cgx_jax import Quantize, __main__
from cgx_jax.choice import Profile
from cgx_jax.commands import charts, doctor, rig
from processes import command_line, finish, launched, start

NO_LINK = rig.missing()


def run(*arguments):
    return finish(command_line(*arguments))


def test_doctor_names_what_is_there_and_what_mends_the_rest():
    code, out, error = run("doctor", "--devices", 3)
    assert code == 0, error
    found = {line[:18].strip(): line[18:].strip() for line in out.splitlines() if line[0] != " "}
    for name in ("python", "jax", "jaxlib", "numpy", "cgx_jax", "processor", "CUDA", "NCCL", "MPI"):
        assert found[name], name
    assert found["wire format"] == "2"
    assert found["devices"] == "3 (cpu) in 1 processes"
    assert "within the error bound" in found["self-test"]
    if "not installed" in found["MPI"]:
        assert "-> pip install mpi4py mpich" in out


def test_a_full_disk_is_said_in_a_line():
    command = f"{sys.executable} -m cgx_jax doctor --devices 2 > /dev/full"
    code, _, error = finish(start(["sh", "-c", command]))
    assert code == 1
    assert error.splitlines()[-1].startswith("python -m cgx_jax: [Errno 28]")
    assert "Traceback" not in error


@pytest.mark.slow
def test_doctor_prints_the_same_as_json():
    code, out, error = run("doctor", "--devices", 3, "--json")
    assert code == 0, error
    found = json.loads(out)
    for name in ("cgx_jax", "jaxlib", "flax", "optax", "nvcc", "exchanges"):
        assert found[name]["found"], name
    assert found["devices"]["found"] == "3 (cpu) in 1 processes"
    assert "mpiexec" in found["exchanges"]["remedy"]  # this process is not an MPI rank


@pytest.fixture
def ended(monkeypatch):
    """Provides a function that gives this process a command line, and returns its exit code."""

    def with_arguments(*arguments):
        monkeypatch.setattr(sys, "argv", ["python -m cgx_jax", *arguments])
        with pytest.raises(SystemExit) as end:
            __main__.main()
        return end.value.code

    return with_arguments


def test_version(ended, capsys):
    assert ended("--version") == 0
    assert capsys.readouterr() == (f"cgx_jax {cgx_jax.__version__}\n", "")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "No such file"),
        ("{", "profile.json: "),
        (2, "was measured with 2 ranks, and this run has 3"),
    ],
    ids=["missing", "damaged", "of another world"],
)
@pytest.mark.quick("damaged")
def test_a_profile_that_does_not_fit_is_refused_in_a_line(text, message, tmp_path):
    path = tmp_path / "profile.json"
    if isinstance(text, int):
        code, _, error = run("tune", "--devices", text, "--sizes", "4k", "--out", path)
        assert code == 0, error
    elif text is not None:
        path.write_text(text)
    code, _, error = run("bench", "--devices", 3, "--sizes", "4k", "--profile", path)
    assert code == 2
    assert message in error
    assert "Traceback" not in error


def test_doctor_fails_for_kernels_that_give_wrong_values(monkeypatch, capsys):
    monkeypatch.setattr(Quantize, "decode", lambda self, payload, shape, dtype: np.ones(shape))
    assert doctor.run() == 1
    out = capsys.readouterr().out
    assert "failed: decoded values exceed the error bound" in out
    assert "-> in the checkout, pip install --force-reinstall" in out


def test_tune_writes_a_profile_that_bench_follows_and_draws(tmp_path):
    profile, png, numbers = (tmp_path / "new" / name for name in ("p.json", "b.png", "b.json"))
    sweep = ("--devices", 4, "--sizes", "4k,64k")
    code, out, error = run("tune", *sweep, "--bits", 4, "--budget", 3, "--out", profile)
    assert code == 0, error
    assert "4.125" in out
    assert f"use_profile('{profile}')" in out
    assert Profile.from_json(profile.read_text()).world == 4

    code, out, error = run(
        "bench", *sweep, "--reps", 2, "--profile", profile, "--png", png, "--json", numbers
    )
    assert code == 0, error
    lines = [line.split() for line in out.splitlines() if line.lstrip()[0].isdigit()]
    assert [line[:3] for line in lines] == [
        [size, method, bits]
        for size in ("4,000", "64,000")
        for method, bits in (("psum", "32"), ("xla", "4"), ("auto", "4"))
    ]
    assert {line[-1] for line in lines} == {"0"}  # wrong values
    assert png.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert len(json.loads(numbers.read_text())["rows"]) == len(lines)


@pytest.mark.slow
def test_processes_find_each_other_by_their_launcher():
    ranks = launched("bench", "--distributed", "--sizes", "4k", "--bits", "2,4", "--reps", 2)
    (code, first, error), (_, second, _) = map(finish, ranks)
    assert code == 0, error
    methods = [line.split()[1:3] for line in first.splitlines() if "4,000" in line]
    assert methods == [["psum", "32"], ["xla", "2"], ["xla", "4"]]
    assert "4,000" not in second


@pytest.mark.slow
@pytest.mark.skipif(NO_LINK is not None, reason=str(NO_LINK))
def test_bench_measures_between_two_processes_over_a_slow_link(tmp_path):
    file = tmp_path / "bench.json"
    code, text, error = run(
        *("bench", "--link", "100mbit", "--sizes", "4k", "--reps", 3, "--json", file)
    )
    assert code == 0, error
    assert "2 processes, joined by a link of 100mbit" in text
    document = json.loads(file.read_text())
    assert (document["link"], document["world"]) == ("100mbit", 2)
    assert [row["wrong"] for row in document["rows"]] == [0, 0]


REFUSED = {
    "bench --link 100": (
        "rate '100' is not a number followed by kbit, mbit or gbit, from 8kbit to 100gbit"
    ),
    "tune --devices 4 --bits 9": "'9' is not a list of widths",
    "bench --sizes huge": "'huge' is not a list of sizes",
    "bench --sizes inf": "'inf' is not a list of sizes",
    "bench --sizes 1kM": "'1kM' is not a list of sizes",
    "bench --link 0mbit": "rate '0mbit' is not a number",
    "bench --link 900gbit": "rate '900gbit' is not a number",
    "bench --devices 100000": "--devices 100000: pass 1 to 1024",
    "bench --reps 0": "'0' is not an integer of 1 or more",
    "bench --link 1gbit --devices 2": "leave out --devices and --distributed",
    "bench --link 1gbit --distributed": "leave out --devices and --distributed",
    "bench --png chart.xyz": "--png chart.xyz: pass a name that ends in .png",
    "tune --budget nan": "'nan' is not a number of seconds above 0",
    "": "required: command",
}


@pytest.mark.parametrize("arguments", REFUSED)
def test_wrong_options_are_refused(arguments, ended, capsys):
    assert ended(*arguments.split()) == 2
    assert REFUSED[arguments] in capsys.readouterr().err


NOT_MEASURED = {
    "bench --devices 1": "pass --devices 8 to simulate",
    "tune --distributed": "--distributed: JAX does not find the other processes ",
    "tune --distributed slurm": "(KeyError: 'SLURM_JOB_ID'). Start this command",
    "tune --devices 2 --out /dev/null/out": "--out: [Errno",
    "compare job --devices 2 --exchange mpi": "one process per rank instead",
}


@pytest.mark.slow
@pytest.mark.parametrize("arguments", NOT_MEASURED)
def test_what_cannot_be_measured_is_refused_in_a_line(arguments):
    code, _, error = run(*arguments.split())
    assert code == 2
    assert NOT_MEASURED[arguments] in error


@pytest.mark.parametrize(
    ("lower", "expected"),
    [
        ([0.9, 1.1, 1.5], 10.0),
        ([1.1, 1.2, 1.3], 1.0),
        ([1.5, 1.5, 1.0], None),
        ([1.2, 0.62, 1.2], 100.0),
    ],
)
def test_compression_pays_from_where_a_quartile_clears_for_good(lower, expected):
    assert charts.pays_from(np.array([1.0, 10.0, 100.0]), np.array(lower)) == expected
