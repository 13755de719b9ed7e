"""`python -m cgx_jax compare`: what it measures, recommends and refuses."""

import dataclasses
import json
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import cgx_jax
from cgx_jax.commands import compare
from cgx_jax.commands.trial import METHODS, Method, Trial
from cgx_jax.tuning.link_timer import LinkTimer
from processes import MPIEXEC, finish, launched, needs_mpi, start
from worlds import normal, on_ranks

pytestmark = pytest.mark.usefixtures("unoptimized")

PARAMS = {"w": jnp.ones((64, 64)), "b": jnp.ones(64)}


def gradients(world):
    return normal(world, 64, 65)


def training(mesh):
    """Returns a user's function: SGD whose gradients are the batch itself."""

    def build(sync):
        tx = optax.chain(sync("data", mesh=mesh), optax.sgd(0.1))

        def step(params, state, x):
            grads = {"w": x[0, :, :64], "b": x[0, :, 64]}
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state, 0.0

        state = tx.init(PARAMS)
        specs = cgx_jax.state_specs(state, "data")
        mapped = jax.shard_map(
            step, mesh=mesh, in_specs=(P(), specs, P("data")), out_specs=(P(), specs, P())
        )
        batches = [(gradients(mesh.shape["data"]),)]
        params = jax.device_put(PARAMS, NamedSharding(mesh, P()))
        return jax.jit(mapped, donate_argnums=(0, 1)), (params, state), batches

    return build


def test_bytes_and_error_are_those_of_the_step(mesh):
    links = LinkTimer("compare", mesh, "data")
    names = ["exact", "4bit", "topk"]
    rows, _ = compare.measure(training(mesh), links, names, 2, "xla")
    assert [row["method"] for row in rows] == names
    for row in rows:
        plan = cgx_jax.Plan.build(PARAMS, METHODS[row["method"]].compressor)
        assert row["sent_bytes"] == plan.wire_bytes(8)
        assert all(s > 0 for s in row["seconds"])
    # The gradients stay the same, so without feedback every step has the error of one step.
    x = gradients(8)[..., :64]
    mean = lambda x: cgx_jax.pmean_compressed(x, "data", cgx_jax.Quantize(4), exchange="xla")  # noqa: E731
    means = on_ranks(mean, mesh, out=P())(x)
    exact = gradients(8).mean(0)
    lost = np.linalg.norm(means - exact[:, :64]) / np.linalg.norm(exact)
    assert [row["error"] for row in rows[:2]] == pytest.approx([0, lost], abs=1e-6)
    assert rows[2]["error"] > 0.5


def test_diloco_is_listed_at_its_mean_over_a_round(mesh):
    links = LinkTimer("compare", mesh, "data")
    names = ["exact", "alone", "4bit", "4bit-rotated"]
    rows, rounds = compare.measure(training(mesh), links, names, 2, "xla")
    assert (rows[1]["sent_bytes"], rows[1]["error"]) == (0, None)
    assert [row["method"] for row in rounds] == [
        f"{name}/{every}" for name in ("exact", "4bit-rotated") for every in (8, 32, 100)
    ]
    for row, of in zip(rounds, [rows[0]] * 3 + [rows[3]] * 3, strict=True):
        every = int(row["method"].split("/")[1])
        assert row["sent_bytes"] * every == pytest.approx(of["sent_bytes"])
    # In every step 9 s, 1 s, 5 s and 3 s.
    rounds = compare.diloco(rows, np.array([[9.0, 1.0, 5.0, 3.0]] * 4))
    found = {row["method"]: (row["seconds"][1], row["ratio"][1]) for row in rounds}
    assert found["exact/8"] == pytest.approx((2, 4.5))
    assert found["4bit-rotated/100"] == pytest.approx((1.02, 9 / 1.02))
    assert compare.diloco([rows[0], rows[3]], np.ones((4, 2))) == []  # the step alone did not run


def test_a_step_alone_sends_nothing(mesh):
    step, state, batches = training(mesh)(Trial(METHODS["alone"], "xla").sync)
    assert "all_reduce" not in step.lower(*state, *batches[0]).as_text()


def row(method, low, ratio, high, error):
    """Returns the part of a row of `measure` that the recommendation reads."""
    write = METHODS[method].write
    return {"method": method, "write": write, "ratio": [low, ratio, high], "error": error}


RECOMMENDED = {
    "nothing clears exact": ([row("8bit", 0.9, 1.3, 1.5, 0.01)], ["Keep lax.pmean"]),
    "the fastest that learns like exact": (
        [row("bf16", 1.1, 1.2, 1.3, 0.0), row("8bit", 1.6, 1.7, 1.8, 0.01)],
        ["Write Quantize(8): a step is 1.70 (1.60-1.80) times"],
    ),
    "of those not told apart, the least error": (
        [row("bf16", 1.4, 1.6, 1.7, 0.0), row("8bit", 1.6, 1.7, 1.8, 0.01)],
        ["Write Cast(jnp.bfloat16)"],
    ),
    "what learns worse comes second, where it is faster": (
        [row("8bit", 1.6, 1.7, 1.8, 0.01), row("topk", 1.9, 2.0, 2.1, 0.9)],
        ["Write Quantize(8)", "Faster still: TopK(0.01), memory=ErrorFeedback()"],
    ),
    "and not where no quartile shows it": (
        [row("8bit", 1.6, 1.7, 1.8, 0.01), row("topk", 1.7, 2.0, 2.1, 0.9)],
        ["Write Quantize(8)"],
    ),
    "a step that reduces nothing is no method": (
        [row("alone", 2.0, 2.1, 2.2, 0.0)],
        ["Keep lax.pmean"],
    ),
    "only what learns worse is faster": (
        [row("8bit", 0.6, 0.7, 0.8, 0.01), row("topk", 1.9, 2.0, 2.1, 0.9)],
        ["Faster: TopK(0.01)"],
    ),
}


@pytest.mark.parametrize("name", RECOMMENDED)
def test_a_recommendation_claims_what_quartiles_clear(name):
    rows, expected = RECOMMENDED[name]
    lines = compare.recommendation([row("exact", 1.0, 1.0, 1.0, 0.0), *rows])
    assert len(lines) == len(expected)
    for line, beginning in zip(lines, expected, strict=True):
        assert line.startswith(beginning)


def test_targets_that_are_not_there_are_refused():
    with pytest.raises(compare.Refused, match=r"no module 'nowhere' for 'nowhere:f'; run"):
        compare.function_of("nowhere:f")
    with pytest.raises(compare.Refused, match=r"json has no function 'compare'; it has .*dumps"):
        compare.function_of("json")
    for target in ("", ".train", ":f"):
        with pytest.raises(compare.Refused, match="does not name a module"):
            compare.function_of(target)
    assert compare.function_of("json:dumps") is json.dumps


def test_an_installed_command_finds_the_modules_of_its_folder(tmp_path, monkeypatch):
    (tmp_path / "users_step.py").write_text("def compare(sync): ...")
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(tmp_path)
    assert compare.function_of("users_step").__module__ == "users_step"


RETURNED = {
    "two things": (lambda sync: (len, ()), "returned tuple of 2; return three things"),
    "no step": (lambda sync: (1, (0,), [()]), "the step is int"),
    "a state that is no tuple": (lambda sync: (len, [0], [()]), "the state is list of 1"),
    "no batch": (lambda sync: (len, (0,), []), "the batches are list of 0"),
    "batches that are no tuples": (lambda sync: (len, (0,), [0]), "the batches are list of 1"),
    "sync not called": (lambda sync: (len, (0,), [()]), "did not call sync"),
    "sync not used": (lambda sync: (lambda s: (s,), (sync("data") and 0,), [()]), "first in the"),
    "another state": (lambda sync: (lambda s: 1.0, ((sync("data") and 0, 0),), [()]), "begin with"),
}


@pytest.mark.parametrize("name", RETURNED)
def test_what_the_function_returns_is_checked(name, mesh):
    build, message = RETURNED[name]
    with pytest.raises(compare.Refused, match=message):
        compare.measure(build, LinkTimer("compare", mesh, "data"), ["exact"], 1, "xla")


@pytest.mark.parametrize("name", [name for name in METHODS if name not in ("exact", "alone")])
def test_what_is_recommended_is_what_was_timed(name):
    method = METHODS[name]
    names = vars(cgx_jax) | vars(cgx_jax.compressors) | {"jnp": jnp}
    names["timed"] = lambda compressor, **options: Method("", compressor, **options)
    written = eval(f"timed({method.write})", names)
    assert written == dataclasses.replace(method, write="", close=False)


def test_sums_of_numbers_go_by_xla():
    assert Trial(METHODS["powersgd"], "mpi").exchange == "xla"
    assert Trial(METHODS["4bit"], "mpi").exchange == "mpi"


def test_what_is_recommended_names_the_exchange_that_was_timed():
    assert Trial(METHODS["4bit"], "xla").write == 'Quantize(4), exchange="xla"'
    assert Trial(METHODS["4bit"], "auto").write == "Quantize(4)"
    assert Trial(METHODS["exact"], "xla").write == "lax.pmean"


USERS_MODULE = """
import jax, jax.numpy as jnp, numpy as np, optax
from jax.sharding import Mesh, PartitionSpec as P
import cgx_jax

def build(sync):
    mesh = Mesh(np.array(jax.devices()), ("data",))
    tx = optax.chain(sync("data", mesh=mesh), optax.sgd(0.1))

    def step(params, state):
        grads = params * (1 + jax.lax.axis_index("data"))
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    params = jax.jit(lambda: jnp.ones((64, 64)))()
    state = jax.jit(tx.init)(params)
    specs = cgx_jax.state_specs(state, "data")
    step = jax.shard_map(
        step, mesh=mesh, in_specs=(P(), specs), out_specs=(P(), specs), check_vma=False
    )
    return jax.jit(step), (params, state), [()]
"""


@pytest.mark.slow
def test_two_processes_compare_a_users_step(tmp_path):
    (tmp_path / "users.py").write_text(USERS_MODULE)
    png, numbers = tmp_path / "new" / "c.png", tmp_path / "c.json"
    asked = ["compare", "users:build", "--distributed", "--methods", "alone,4bit", "--steps", "2"]
    ranks = launched(*asked, "--json", numbers, "--png", png, PYTHONPATH=str(tmp_path))
    (code, first, error), (_, second, _) = map(finish, ranks)
    assert code == 0, error
    printed, by_second = (
        [line.split()[0] for line in out.splitlines() if not line.startswith("[Gloo]")]
        for out in (first, second)
    )
    assert printed[:5] == ["method", "exact", "alone", "4bit", "DiLoCo,"]
    assert printed[5:8] == ["exact/8", "exact/32", "exact/100"]
    assert by_second == []
    assert re.search(r"compare (\d+)/\1 done", error)
    found = json.loads(numbers.read_text())
    rows = found["rows"]
    plan = cgx_jax.Plan.build({"x": jnp.ones((64, 64))}, cgx_jax.Quantize(4))
    assert [row["sent_bytes"] for row in rows[1:]] == [0, plan.wire_bytes(2)]
    assert [row["method"] for row in found["diloco"]] == printed[5:8]
    assert png.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


@pytest.mark.parametrize("error", ["BrokenPipeError(32, 'gone')", "FileNotFoundError('data.npz')"])
def test_an_error_of_the_users_step_is_shown_with_its_line(error, tmp_path):
    (tmp_path / "users.py").write_text(f"def compare(sync):\n    raise {error}\n")
    (ranks,) = [start([sys.executable, "-m", "cgx_jax", "compare", "users", "--devices", "2"],
                      PYTHONPATH=str(tmp_path))]  # fmt: skip
    code, _, said = finish(ranks)
    assert code == 1
    assert re.search(rf'users.py", line 2.*{error.partition("(")[0]}', said, re.DOTALL)


@needs_mpi
@pytest.mark.slow
def test_ranks_of_mpi_compare_a_users_step(tmp_path):
    (tmp_path / "users.py").write_text(USERS_MODULE)
    command = [MPIEXEC, "-n", "2", sys.executable, "-m", "cgx_jax", "compare", "users:build"]
    command += ["--distributed", "mpi4py", "--exchange", "mpi", "--methods", "4bit", "--steps", "2"]
    environment = {"FI_PROVIDER": "tcp", "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(tmp_path)}
    code, out, error = finish(start(command, **environment))
    assert code == 0, error
    assert "\n4bit " in out
