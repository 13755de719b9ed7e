"""The fused reductions between MPI ranks: the bytes of the xla exchange, and what they refuse."""

import ctypes
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import cgx_jax
from cgx_jax import Quantize
from cgx_jax.axes import Axes
from cgx_jax.exchanges import Mpi, mpi_rows
from cgx_jax.kernels import native
from mpi_programs import labels, labels_of_two, program
from processes import ENVIRONMENT, MPIEXEC, needs_mpi

pytest.importorskip("cgx_jax._native", reason="the native module is not built")
WORKER = pathlib.Path(__file__).with_name("mpi_worker.py")


def run(world, *scenario, code=0, kept=False):
    """Runs a scenario; returns the output of all ranks. `code` is their exit code (None: any).

    mpiexec ends all ranks when one dies. With `kept`, a shell outlives each rank to prevent this,
    unless the rank ends with 3.
    """
    command = [sys.executable, str(WORKER), *scenario]
    if kept:
        command = ["sh", "-c", f"{shlex.join(command)}; [ $? = 3 ] || sleep 60"]
    done = subprocess.run(
        [MPIEXEC, "-n", str(world), *command],
        env=ENVIRONMENT | {"FI_PROVIDER": "tcp"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert code in (None, done.returncode), done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def of_rank(output, rank):
    return [line for line in output.splitlines() if line.startswith(f"[{rank}]")]


@needs_mpi
@pytest.mark.slow
@pytest.mark.parametrize("reduction", ["scatter_gather", "gather_sum"])
def test_the_bytes_are_those_of_the_xla_exchange_under_every_transformation(reduction):
    assert run(4, "agreement", reduction).count("ok") == 4


# Each does what its function in mpi_worker.py says.
SCENARIOS = "misuse", "rows", "kinds", "watched", "chosen", "explicit", "started", "unawaited"


@needs_mpi
@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_scenarios_end_well_one_after_the_other_in_the_same_processes(world):
    """Of these, `misuse` tries programs that no call can serve: all ranks refuse them."""
    output = run(world, *SCENARIOS, code=None)
    ended = [name for name in SCENARIOS if output.count(f"{name}: ok") == world]
    assert ended == [*SCENARIOS], output[-3000:]
    assert "failed" not in output
    for rank in range(world):
        twins, twin_rows, permuted, groups, ok = of_rank(output, rank)[:5]
        assert "calls that function more than once" in twins
        assert "calls that function more than once" in twin_rows
        assert "build the mesh from jax.devices() in their order" in permuted
        assert f"size of groups is 3, must be a positive multiple of world, {world}" in groups
        assert ok.endswith("misuse: ok")


@pytest.mark.slow
@needs_mpi
def test_50_calls_started_in_any_order_neither_wait_forever_nor_mix():
    assert run(3, "many").count("ok") == 3


@needs_mpi
@pytest.mark.parametrize(("when", "call"), [("in", "psum_compressed"), ("between", "diloco")])
@pytest.mark.quick("between-diloco")
def test_a_killed_rank_ends_the_call_of_the_others_with_the_exchange_and_the_axis(when, call):
    output = run(3, "killed", when, kept=True, code=None)
    survivors = [of_rank(output, rank) for rank in (0, 1)]
    for first, again in survivors:
        assert f"{call}(exchange='mpi') over axis 'data'" in first
        assert "an earlier call has failed" in again
    # One survivor may wait for the other one, which waits for the dead rank.
    assert any("rank 2" in first or "failed with code" in first for first, _ in survivors)


@needs_mpi
@pytest.mark.parametrize("what", ["widths", "reductions"])
@pytest.mark.quick("widths")
def test_ranks_that_disagree_are_told_before_anything_is_sent(what):
    output = run(2, "disagreement", what, code=3)
    for rank in (0, 1):
        (line,) = of_rank(output, rank)
        assert re.search("is in another (call|program)", line)
        assert "no gradient was sent" in line


@needs_mpi
@pytest.mark.parametrize("differ", ["lines", "paths", "constants"])
@pytest.mark.quick("lines")
def test_programs_in_another_order_are_told_apart_before_anything_is_sent(differ):
    output = run(2, "orders", differ, code=3)
    for rank in (0, 1):
        (line,) = of_rank(output, rank)
        assert "is in another program (jit" in line
        assert "mpi_worker.py:" in line
        assert "no gradient was sent" in line


@needs_mpi
@pytest.mark.parametrize(
    ("when", "says"),
    [
        ("first", "rank 2 has ended without a first call"),
        ("before", "rank 2 has ended without coming to this call"),
        ("in", "rank 2 has failed (the process ended with calls in flight)"),
    ],
)
@pytest.mark.slow
def test_a_rank_that_raises_ends_the_calls_of_the_others_long_before_the_timeout(when, says):
    output = run(3, "raises", when, code=None, kept=True)
    for rank in (0, 1):
        (line,) = of_rank(output, rank)
        assert says in line


@pytest.mark.slow
@needs_mpi
def test_ranks_hold_the_same_subnormal_values():
    assert run(3, "subnormal").count("ok") == 3


@pytest.mark.slow
@needs_mpi
def test_engines_follow_one_another():
    assert run(2, "followed").count("ok") == 2


@pytest.mark.slow
@needs_mpi
def test_tuning_measures_the_fused_call_and_every_rank_follows():
    assert run(2, "tuned").count("ok") == 2


REFUSALS = {
    "alone": "this is rank 0 of 2 in MPI but process 0 of 1 in JAX",
    "two_devices": "this process has 2 devices, but it must have 1",
    "no_threads": "but this exchange needs MPI_THREAD_MULTIPLE",
}


@needs_mpi
@pytest.mark.parametrize("option", REFUSALS)
@pytest.mark.quick("alone")
def test_a_world_that_does_not_fit_is_refused_while_tracing(option):
    line = of_rank(run(2, "refused", option), 0)[0]
    assert "ValueError: psum_compressed: exchange='mpi' does not work here" in line
    assert REFUSALS[option] in line


@pytest.mark.slow
@needs_mpi
def test_ranks_with_rows_of_other_sizes_are_told_before_anything_is_sent():
    output = run(2, "other_rows", code=3)
    for rank in (0, 1):
        (line,) = of_rank(output, rank)
        assert "here(exchange='mpi') over axis 'data': rank" in line
        assert re.search("is in another (call|program)", line)


@pytest.mark.parametrize(
    ("move", "operand", "says"),
    [
        (mpi_rows.scatter, np.zeros((7, 5), np.uint8), r"uint8\[7, 5\], not \[8, n\]"),
        (mpi_rows.scatter, np.zeros(8, np.int8), r"int8\[8\], not \[8, n\]"),
        (mpi_rows.gather, np.zeros((8, 5), np.uint8), r"uint8\[8, 5\], not \[n\]"),
    ],
)
def test_rows_of_another_shape_or_dtype_are_refused(mesh, move, operand, says):
    f = lambda x: move("here", operand, Axes.resolve("here", "data", None))  # noqa: E731
    with pytest.raises(ValueError, match=f"here: the operand is {says}"):
        jax.eval_shape(
            jax.shard_map(f, mesh=mesh, in_specs=P("data"), out_specs=P("data")), np.zeros(8)
        )


PROGRAMS = {
    "a leaf's path": {"paths": "ac"},
    "the number of leaves": {"paths": "abc"},
    "shapes with as many values": {"shape": (32, 128)},
    "a dtype": {"dtype": jnp.bfloat16},
    "a compressor": {"code": Quantize(8)},
    "rounding": {"code": Quantize(4, rotation=True)},
    "a reduction": {"reduction": "gather_sum"},
    "groups": {"axis_index_groups": [[0, 1, 2, 3], [4, 5, 6, 7]]},
    "a constant before the call": {"before": 2.0},
    "a constant after the call": {"after": 2.0},
}


@pytest.mark.parametrize("what", PROGRAMS)
def test_programs_of_one_factory_are_told_apart_by(what, mesh):
    step, tree = program()
    first = labels(step, tree, mesh=mesh)
    assert first
    assert "mpi_programs.py:" in first[0]
    assert first == labels(program()[0], tree, mesh=mesh)  # the same program, made again
    other, operands = program(**PROGRAMS[what])
    assert not {*first} & {*labels(other, operands, mesh=mesh)}


def test_programs_that_differ_in_inner_functions_or_order_are_told_apart(mesh):
    def make(inner):
        def step(x):
            reduce = lambda v: cgx_jax.psum_compressed(v, "data", exchange="mpi")  # noqa: E731
            return jax.lax.scan(lambda c, v: (inner(c) + reduce(v), None), x[0], x)[0]

        return labels(step, np.zeros((8, 64), np.float32), mesh=mesh)

    variants = [
        lambda c: c, jnp.sin, jax.jit(jnp.sin), jax.checkpoint(lambda c: jnp.cos(c)),
        lambda c: jax.lax.cond(c[0] > 0, jnp.sin, jnp.cos, c),
        lambda c: jax.lax.cond(c[0] > 0, jnp.cos, jnp.sin, c),
        lambda c: jnp.sin(c) + jnp.cos(c), lambda c: jnp.cos(c) + jnp.sin(c),
    ]  # fmt: skip
    found = [make(inner)[0] for inner in variants]
    assert len({*found}) == len(variants)

    def printing(c):
        jax.debug.print("on this rank only {}", c[0] + 1)
        return jnp.sin(c)

    assert make(printing)[0] == found[1]


def test_every_process_gives_a_program_the_same_label(mesh):
    """Addresses and the order of sets differ; callbacks may too."""
    source = """
import jax, numpy as np
import mpi_programs
mesh = jax.sharding.Mesh(np.array(jax.devices()), ("data",))
print(mpi_programs.labels_of_two(mesh, prints=True))
"""
    there = subprocess.run(
        [sys.executable, "-c", source],
        cwd=WORKER.parent,
        env=os.environ | {"PYTHONHASHSEED": "1"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert there == f"{labels_of_two(mesh, prints=False)}\n"


def reduce_by_mpi(mesh):
    f = lambda x: cgx_jax.psum_compressed(x[0], "data", exchange="mpi")  # noqa: E731
    mapped = jax.shard_map(f, mesh=mesh, in_specs=P("data"), out_specs=P())
    jax.eval_shape(mapped, np.zeros((8, 99), np.float32))


def test_without_mpi_the_call_says_what_is_missing(mesh, monkeypatch):
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(ValueError, match="pip install mpi4py mpich"):
        reduce_by_mpi(mesh)
    assert not Mpi().usable()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"timeout": 0}, r"timeout=0 must be in \[0.001, 1e\+09\]"),
        ({"window": 1}, r"window=1 must be in \[2, 1024\]"),
        ({"segment_bytes": 10}, r"segment_bytes=10 must be in \[64, "),
        ({"threads": 0}, r"threads=0 must be in \[1, 1024\]"),
    ],
)
def test_impossible_settings_are_refused(changes, says):
    with pytest.raises(ValueError, match=says):
        Mpi(**changes)


FAKE_MPI = "int MPI_Isend(void) { return 0; }"


@pytest.mark.skipif(
    sys.platform != "linux" or shutil.which("cc") is None,
    reason="lists loaded objects as Linux does, and needs a C compiler",
)
def test_two_mpi_libraries_in_one_process_are_told_apart(tmp_path):
    before = native.module().mpi_libraries()
    for name in ("libmpi.so.40", "libmpi_abi.so", "libother.so"):
        (tmp_path / "mpi.c").write_text(FAKE_MPI)
        target = tmp_path / name
        subprocess.run(["cc", "-shared", "-fPIC", tmp_path / "mpi.c", "-o", target], check=True)
        ctypes.CDLL(str(target))
    found = native.module().mpi_libraries()
    assert [pathlib.Path(f).name for f in found if f not in before] == [
        "libmpi.so.40",
        "libmpi_abi.so",
    ]
