"""Tuning, and how calls follow its profile: what is compiled and shown, and what decides."""

import dataclasses
import logging
import re
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import cgx_jax
from cgx_jax import Cast, Plan, Quantize, plan_table, tune
from cgx_jax.axes import Axes
from cgx_jax.choice import Auto, Profile, auto
from cgx_jax.choice.profile import Codec
from cgx_jax.compressors import SignSGD, TopK
from cgx_jax.reductions import ScatterGather
from cgx_jax.route.route import Options, route
from cgx_jax.tuning import sweep
from cgx_jax.tuning.link_timer import LinkTimer
from processes import finish, free_port, start
from profiles import with_crossing
from worlds import normal, on_ranks, ranks, sharded, stepper

SMALL, LARGE = (16, 128), (64, 1024)  # 8 KiB and 256 KiB
COLLECTIVE = re.compile(r"= \(?(\w+)\[.*? (all-to-all|all-gather|all-reduce)")


def compiled(mesh, shape, **options):
    """Returns the dtypes of the collectives in the compiled reduction of f32[shape]."""
    f = on_ranks(lambda x: cgx_jax.pmean_compressed(x, "data", **options), mesh, out=P())
    x = {"w": jax.ShapeDtypeStruct((8, *shape), np.float32)}
    return {dtype for dtype, _ in COLLECTIVE.findall(f.lower(x).compile().as_text())}


def test_compiled_collectives_follow_the_profile(mesh, following):
    assert compiled(mesh, LARGE) == {"f32"}
    following(with_crossing())
    assert compiled(mesh, SMALL) == {"f32"}
    assert compiled(mesh, LARGE) == {"u8"}
    assert compiled(mesh, SMALL, exchange="xla") == {"u8"}


@pytest.mark.parametrize(("precondition", "sent"), [(None, "u8"), (cgx_jax.SecondMoment(), "f32")])
def test_units_are_priced_where_a_reduction_is_traced(mesh, following, precondition, sent):
    following(with_crossing(codec=Codec(1e-9, 1e-9, 1e-9, 1e-6)))
    tx = cgx_jax.sync_gradients("data", Quantize(4), precondition=precondition, mesh=mesh)
    state = jax.eval_shape(tx.init, {"w": np.zeros(LARGE, np.float32)})
    x = {"w": jax.ShapeDtypeStruct((8, *LARGE), np.float32)}
    text = stepper(tx, mesh, state).lower(x, state).compile().as_text()
    assert {dtype for dtype, _ in COLLECTIVE.findall(text)} == {sent}


KEYED = Quantize(4, rounding="stochastic")
PAIRS = {
    "psum": (lax.psum, cgx_jax.psum_compressed),
    "pmean": (lax.pmean, cgx_jax.pmean_compressed),
}


@pytest.mark.parametrize("compressor", [Quantize(4), KEYED, Quantize(2, rotation=True)], ids=str)
@pytest.mark.parametrize("name", PAIRS)
def test_without_a_profile_a_small_tree_is_the_very_program_of_lax(mesh, name, compressor):
    exact, ours = PAIRS[name]
    tree = {"a": jax.ShapeDtypeStruct((8, *SMALL), np.float32)}

    def program(reduce):
        return on_ranks(reduce, mesh, out=P()).lower(tree).as_text()

    key = jax.random.key(0)
    want = program(lambda t: exact(t, "data"))
    assert program(lambda t: ours(t, "data", compressor, key=key)) == want
    assert program(lambda t: ours(t, "data", compressor, key=key, exchange="xla")) != want


def test_without_a_profile_the_size_of_a_buffer_counts_and_not_a_leafs(mesh):
    leaf = np.zeros((128, 256), np.float32)  # 131 kB
    trees = [{str(i): leaf for i in range(n)} for n in (3, 30)]
    few, many = map(Plan.build, trees)
    apart = Plan.build(trees[1], fusion_bytes=leaf.nbytes)

    def methods(plan):
        found = route(Options("test", Axes((), None, 8), Auto()), plan).ways.values()
        return {"psum" if way is None else way.exchange.shorthand for way in found}

    assert methods(few) == {"psum"}
    assert methods(many) == {"xla"}
    assert methods(apart) == {"psum"}
    assert plan_table(few, 8).splitlines()[2].endswith("psum")
    assert plan_table(many, 8).splitlines()[2].endswith("xla")


def test_without_a_profile_feedback_of_a_small_tree_keeps_nothing(mesh):
    tx = cgx_jax.sync_gradients("data", Quantize(2), memory=cgx_jax.ErrorFeedback(), mesh=mesh)
    x = normal(8, *SMALL)
    state = tx.init({"w": x[0]})
    mean, state = stepper(tx, mesh, state)({"w": x}, state)
    np.testing.assert_allclose(mean["w"], x.mean(0), atol=1e-6)
    assert not any(np.asarray(m).any() for m in jax.tree.leaves(state.memory))


def test_functions_compiled_before_are_traced_anew(mesh, following):
    x = normal(8, *LARGE)
    f = on_ranks(lambda v: cgx_jax.psum_compressed(v, "data", Quantize(1)), mesh, out=P())
    np.testing.assert_allclose(f(x), x.sum(0), atol=1e-5)
    following(with_crossing())
    assert np.abs(f(x) - x.sum(0)).max() > 0.1


def test_gradients_of_the_hook_follow_the_profile(mesh, following):
    following(with_crossing())

    @jax.grad
    def grads(p, x):
        p = cgx_jax.reduce_in_backward(p, "data", fusion)
        return sum(jnp.sum(v * x[0, 0]) for v in p.values())

    params = {"small": jnp.ones(SMALL), "large": jnp.ones(LARGE)}
    fusion = Plan.build(params, Quantize(4), fusion_bytes=LARGE[0] * LARGE[1] * 4)
    x = np.arange(8, dtype=np.float32).reshape(8, 1)
    f = sharded(grads, mesh, (P(), P("data")), check_vma=False).lower(params, x).compile()
    assert {"u8", "f32"} <= {dtype for dtype, _ in COLLECTIVE.findall(f.as_text())}
    np.testing.assert_allclose(f(params, x)["small"], np.full(SMALL, 28))


def test_the_summary_shows_the_method_of_each_leaf(following):
    tree = {"large": np.zeros(LARGE, np.float32), "small": np.zeros(SMALL, np.float32)}
    tree["vector"] = np.zeros(5000, np.float32)
    plan = Plan.build(tree, Quantize(4), fusion_bytes=LARGE[0] * LARGE[1] * 4)

    def shown(world):
        return {line.split()[0]: line.split()[-1] for line in plan_table(plan, world).splitlines()}

    assert shown(8).items() >= {"large": "psum", "small": "psum", "vector": "psum"}.items()
    assert shown(1).items() >= {"large": "psum", "small": "psum"}.items()
    following(with_crossing())
    assert shown(8).items() >= {"large": "xla", "small": "psum", "vector": "psum"}.items()
    (small,) = [line for line in plan_table(plan, 8).splitlines() if line.startswith("small")]
    assert "8,192" in small  # sent as it is
    assert "method" not in plan_table(plan)


def test_small_buffers_go_by_gather_sum_where_a_profile_measured_it(following):
    """Unless the call names another reduction, the code forbids it, or the buffer is larger."""
    slow = with_crossing(world=2)
    once = [("xla/gather_sum", 4.125, 4096 * 4**i, 1e-6) for i in range(2)]
    following(dataclasses.replace(slow, rows=(*slow.rows, *once)))

    def way(nbytes, compressor=Quantize(4), reduction=None):  # noqa: B008
        plan = Plan.build(np.zeros(nbytes // 4, np.float32), compressor)
        options = Options("test", Axes((), None, 2), Auto(), reduction)
        (found,) = route(options, plan).ways.values()
        return found and (found.reduction.shorthand, found.exchange.shorthand)

    assert way(4096) == way(16384) == ("gather_sum", "xla")
    assert way(16384, reduction=ScatterGather()) is None
    assert way(16384, SignSGD()) is None
    assert way(65536) is None
    assert way(262144) == ("scatter_gather", "xla")
    table = plan_table(Plan.build(np.zeros(4096, np.float32), Quantize(4)), 2)
    assert table.splitlines()[2].endswith("xla/gather_sum")


@pytest.mark.parametrize(
    ("code", "exchange"), [(Quantize(4), "mpi"), (Cast(jnp.bfloat16), "xla"), (TopK(0.1), "xla")]
)
def test_only_codes_that_gather_in_one_call_follow_what_was_measured_of_it(
    following, every_exchange, code, exchange
):
    slow = with_crossing(world=2)
    seconds = {"xla/gather_sum": 2e-6, "mpi/gather_sum": 1e-6}
    rows = [(method, code_bits, 16384, s) for method, s in seconds.items() for code_bits in (4, 16)]
    following(dataclasses.replace(slow, rows=(*slow.rows, *rows)))
    plan = Plan.build(np.zeros(4096, np.float32), code)
    (found,) = route(Options("test", Axes((), None, 2), Auto()), plan).ways.values()
    assert (found.reduction.shorthand, found.exchange.shorthand) == ("gather_sum", exchange)


def test_a_profile_of_another_world_size_is_refused(mesh, following):
    following(with_crossing(world=4))
    message = r"has 8 ranks.*measured on 4 .*'data'.*tune .*exchange=.*use_profile\(None\)"
    with pytest.raises(ValueError, match="pmean_compressed: this call " + message):
        compiled(mesh, LARGE)
    with pytest.raises(ValueError, match="plan_table: this call " + message):
        plan_table(Plan.build(np.zeros(LARGE, np.float32)), 8)
    assert compiled(mesh, LARGE, exchange="xla") == {"u8"}


def test_a_wrong_call_is_refused_even_where_the_profile_says_psum(mesh, following):
    following(with_crossing())
    with pytest.raises(ValueError, match="key is None"):
        compiled(mesh, SMALL, compressor=Quantize(4, rounding="stochastic"))


@pytest.fixture
def few_rounds(monkeypatch):
    """Shortens `tune`: few rounds, and gather_sum only up to 4 KiB."""
    few = {"ONE_SHOT_BYTES": 4096, "ROUNDS": range(3, 6), "CODEC_ROUNDS": 3}
    for name, value in few.items():
        monkeypatch.setattr(sweep, name, value)


def test_tuning_measures_writes_and_follows(mesh, following, tmp_path, capsys, few_rounds):
    path = tmp_path / "new" / "profile.json"
    sizes = [8192, 4096]
    # Enough time that even a busy machine skips no size.
    profile = tune(mesh, "data", path=path, bits=(4, 8), sizes=sizes, budget_seconds=3600)
    assert Profile.from_json(path.read_text()) == profile
    assert auto.active() == profile
    want = {("psum", 32), ("xla", 4.125), ("xla", 8.125)}
    once = {("xla/gather_sum", bits, 4096) for bits in (4.125, 8.125)}
    assert {row[:3] for row in profile.rows} == {(*m, s) for m in want for s in sizes} | once
    assert (profile.world, profile.axis) == (8, "data")
    assert all(1e-12 < seconds < 1e-3 for seconds in profile.codec)
    largest = max(row for row in profile.rows if row.method == "psum")
    assert profile.algbw == largest.bytes / largest.seconds
    assert "measuring 4.1 kB" in capsys.readouterr().err


def test_functions_take_turns_in_an_order_that_changes(mesh):
    links = LinkTimer("here", mesh, mesh.axis_names[0])
    calls = []

    def function(i):
        def call(x):
            calls.append(i)
            time.sleep(0.02 * (i == 2))
            return x

        return call

    samples = links.seconds([function(i) for i in range(3)], links.token, 12)
    rounds = np.reshape(calls, (12, 3))
    assert (np.sort(rounds) == range(3)).all()
    assert {tuple(row).index(2) for row in rounds} == {0, 1, 2}
    assert (samples[:, 2] >= 0.02).all()
    assert samples.shape == (12, 3)


def test_between_two_ranks_gather_sum_is_measured_at_every_size(following, few_rounds):
    profile = tune(ranks(2), "data", bits=(4,), sizes=[8192, 4096], budget_seconds=3600)
    assert {r.bytes for r in profile.rows if r.method == "xla/gather_sum"} == {4096, 8192}


def test_sizes_beyond_the_budget_are_left_out_and_said_to_be(
    mesh, following, capsys, caplog, few_rounds
):
    profile = tune(mesh, "data", bits=(4,), sizes=(4096, 16384), budget_seconds=1e-3)
    assert {row.bytes for row in profile.rows} == {4096}
    assert "tune 1/2 stopped: 1 of 2 sizes\n" in capsys.readouterr().err
    ((level, text),) = [r[1:] for r in caplog.record_tuples if r[0] == "cgx_jax.tuning.sweep"]
    assert level == logging.WARNING
    assert "16.4 kB and larger are left out" in text
    assert re.search(r"budget_seconds=[1-9]\d* is enough for it", text)
    tune(mesh, "data", bits=(4,), sizes=(4096,), budget_seconds=1e-3)
    assert capsys.readouterr().err.endswith("tune 1/1 done\n")


def test_an_axis_of_a_mesh_with_more_is_tuned_by_itself(mesh_2d, following, few_rounds):
    assert tune(mesh_2d, "data", bits=(4,), sizes=(4096,)).world == 4


ONE, ALL = ranks(1), ranks(8)
BAD = {
    "unknown axis": ("'nodata' is not in the mesh.*data", ALL, {"axis_name": "nodata"}),
    "one rank": ("1 rank.*2 devices.*jax_num_cpu_devices", ONE, {}),
    "no sizes": (r"sizes=\[\]", ALL, {"sizes": ()}),
    "a tiny size": (r"sizes=\[3\].*4 bytes", ALL, {"sizes": (3,)}),
    "no bits": (r"bits=\[\]", ALL, {"bits": ()}),
    "9 bits": ("bits=9 is outside", ALL, {"bits": (9,)}),
    "no time": ("budget_seconds=0 ", ALL, {"budget_seconds": 0}),
}


@pytest.mark.parametrize("name", BAD)
def test_wrong_calls_are_refused_before_anything_is_measured(name):
    message, on, options = BAD[name]
    with pytest.raises(ValueError, match=message):
        tune(on, **({"axis_name": "data"} | options))


PROGRAM = """
import sys
import jax
rank, port, good, bad = int(sys.argv[1]), *sys.argv[2:]
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(f"localhost:{port}", 2, rank, local_device_ids=[0])
import numpy as np
from jax.sharding import Mesh
import cgx_jax
from cgx_jax.axes import Axes
from cgx_jax.route.route import Options, route
from cgx_jax.choice import Auto

plan = cgx_jax.Plan.build([np.zeros((16, 128), np.float32), np.zeros((64, 1024), np.float32)],
                          fusion_bytes=262144)
found = lambda: route(Options("test", Axes((), None, 2), Auto()), plan).ways.values()
methods = lambda: ["psum" if way is None else way.exchange.shorthand for way in found()]
assert methods() == ["psum", "psum"]  # small, and nothing was measured
cgx_jax.use_profile(good if rank == 0 else None)
assert methods() == ["psum", "xla"]
cgx_jax.use_profile(None if rank == 0 else good)
assert methods() == ["psum", "psum"]
for wrong in (bad, "missing.json"):
    try:
        cgx_jax.use_profile(wrong if rank == 0 else good)
    except ValueError as error:
        assert "process 0 has no profile" in str(error), error
    else:
        raise AssertionError("taken")
mesh = Mesh(np.array(jax.devices()), ("data",))
tuned = cgx_jax.tune(mesh, "data", bits=(4,), sizes=(4096,), budget_seconds=20,
                     path=f"{good}.{rank}")
print("profile", tuned.to_json())
"""


@pytest.mark.slow
def test_process_0_decides_for_all(tmp_path):
    good, bad = tmp_path / "good.json", tmp_path / "bad.json"
    good.write_text(with_crossing(world=2, processes=2).to_json())
    bad.write_text(good.read_text().replace("schema", "scheme"))
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM]
    port = free_port()
    ranks = [start([*command, *map(str, (rank, port, good, bad))]) for rank in range(2)]
    (_, first, first_errors), (_, second, second_errors) = map(finish, ranks)
    assert "profile {" in first, first_errors
    # gloo says on stdout that it is connected
    tuned = first[first.index("profile {") :]
    assert second.endswith(tuned), second_errors
    assert tuned.removeprefix("profile ").strip() == (tmp_path / "good.json.0").read_text().strip()
    assert not (tmp_path / "good.json.1").exists()
    assert "measuring" in first_errors
    assert "measuring" not in second_errors
