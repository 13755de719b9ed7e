"""Nonfinite values are reported by leaf, rank, step and place, and all ranks skip the step."""

import functools
import sys

import jax
import numpy as np
import pytest

import cgx_jax
from cgx_jax import ErrorFeedback, Identity, Quantize, Rule, Rules, SecondMoment, transforms
from cgx_jax.compressors import SignSGD
from cgx_jax.kernels.nonfinite import all_finite, count_nonfinite
from cgx_jax.reductions import Levels
from processes import finish, start
from worlds import first, on_ranks, placed, sharded, stepper

pytestmark = pytest.mark.usefixtures("unoptimized")

EXACT_BIAS = (Rule(Identity(), path="bias"),)
RULES = Rules((), Quantize(4, 64), exact=EXACT_BIAS)


def gradients():
    rng = np.random.default_rng(0)
    return {
        "bias": rng.normal(size=(8, 5)).astype(np.float32),
        "kernel": rng.normal(size=(8, 16, 40)).astype(np.float32),
    }


def spoilt():
    """Returns gradients in which rank 3 has two NaNs and rank 6 an infinity."""
    tree = gradients()
    tree["kernel"][3, 7, 1] = tree["kernel"][3, 9, 0] = np.nan
    tree["bias"][6, 2] = np.inf
    return tree


IN = [
    "in 'bias' float32[5]: rank 6 has 1 of 5, the first at [2]",
    "out 'bias' float32[5]: every rank has 1 of 5, the first at [2]",
    "in 'kernel' float32[16, 40]: rank 3 has 2 of 640, the first at [7, 1], bucket 4 of 64 values",
    "out 'kernel' float32[16, 40]: every rank has 128 of 640, the first at [6, 16], "
    "bucket 4 of 64 values",
]


def psum(tree, rules=RULES, **options):
    return cgx_jax.psum_compressed(tree, "data", rules, exchange="xla", **options)


def hook(tree):
    def loss(p):
        p = cgx_jax.reduce_in_backward(p, "data", RULES, exchange="xla")
        return sum((x * g).sum() for x, g in zip(p.values(), tree.values(), strict=True))

    return jax.grad(loss)(tree)


def run(f, *args):
    """Runs to the end, so that errors of callbacks come out here."""
    out = jax.block_until_ready(f(*args))
    jax.effects_barrier()
    return out


def reports(caplog):
    return [r.getMessage() for r in caplog.records if r.name == "cgx_jax.debug.report"]


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.quick("True")
def test_leaf_rank_place_and_count_are_named_once(mesh, caplog, check_vma):
    with cgx_jax.debug_nonfinite("log"):
        f = on_ranks(psum, mesh, check_vma=check_vma)
        run(f, gradients())
        assert reports(caplog) == []
        got = run(f, spoilt())
    (text,) = reports(caplog)
    head, *lines, remedy = text.splitlines()
    assert head == "psum_compressed over axis data: values are not finite."
    assert [line.strip() for line in lines] == IN
    assert 'the data of the ranks in the "in" lines' in remedy
    want = run(on_ranks(psum, mesh, check_vma=check_vma), spoilt())
    jax.tree.map(np.testing.assert_array_equal, got, want)


def test_raising_ends_the_step_with_the_report_and_no_other_step(mesh):
    with cgx_jax.debug_nonfinite():
        f = on_ranks(psum, mesh)
        says = r"FloatingPointError: psum_compressed .*(?s:.)*rank 6 has"
        with pytest.raises(jax.errors.JaxRuntimeError, match=says):
            run(f, spoilt())
        assert np.isfinite(run(f, gradients())["kernel"]).all()


def test_the_program_needs_no_host_callback(mesh):
    """JAX starts programs with a host callback by a slower path."""
    with cgx_jax.debug_nonfinite():
        text = on_ranks(psum, mesh).lower(gradients()).as_text()
    assert text.count("@cgx_report(") == 1
    assert "callback" not in text


WITHOUT_NATIVE = """
import sys, warnings
sys.modules["cgx_jax._native"] = None
warnings.simplefilter("ignore")
import jax, numpy as np, cgx_jax
from cgx_jax.kernels import native
assert native.module() is None
bad = np.ones((2, 600), np.float32)
bad[1, 5] = np.nan
for action in ("log", "raise"):
    with cgx_jax.debug_nonfinite(action):
        f = jax.pmap(lambda x: cgx_jax.psum_compressed(x, "data"), axis_name="data")
        jax.block_until_ready(f(np.ones((2, 600), np.float32)))
        jax.block_until_ready(f(bad))
        jax.effects_barrier()
"""


def test_without_native_kernels_a_host_callback_reports():
    flags = "--xla_force_host_platform_device_count=2"
    _, _, error = finish(start([sys.executable, "-c", WITHOUT_NATIVE], XLA_FLAGS=flags))
    logged, _, raised = error.partition("Traceback")
    line = "in '' float32[600]: rank 1 has 1 of 600, the first at [5]"
    assert logged.count(line) == 1, error
    assert line in raised
    assert "FloatingPointError: psum_compressed over axis data" in raised


def test_overflow_of_the_sum_alone_is_told_from_what_went_in(mesh, caplog):
    big = {"kernel": np.full((8, 16, 40), 3e38, np.float32)}
    with cgx_jax.debug_nonfinite("log"):
        run(on_ranks(psum, mesh), big)
    (text,) = reports(caplog)
    assert "  in " not in text
    assert "out 'kernel' float32[16, 40]: every rank has 640 of 640" in text
    assert "reduce them in a wider dtype" in text


def test_a_code_that_cannot_carry_nan_is_no_hiding_place(mesh, caplog):
    signs = functools.partial(psum, rules=Rules((), SignSGD(), exact=EXACT_BIAS))
    tree = spoilt()
    tree["bias"][:] = 0
    with cgx_jax.debug_nonfinite("log"):
        got = run(on_ranks(signs, mesh), tree)
    assert np.isfinite(got["kernel"]).all()
    assert "in 'kernel' float32[16, 40]: rank 3 has 2 of 640" in reports(caplog)[0]


@pytest.mark.parametrize("check_vma", [True, False])
def test_ranks_of_a_mesh_with_more_axes_have_coordinates_and_skip_together(
    mesh_2d, caplog, check_vma
):
    """The leaves of one model shard are bad; those of the other are not, and are skipped too."""
    tree = {"kernel": np.ones((8, 16, 40), np.float32)}
    tree["kernel"][5, 3, 3] = np.nan  # data 2, model 1
    f = on_ranks(psum, mesh_2d, check_vma=check_vma)
    with cgx_jax.debug_nonfinite("skip"):
        assert not run(f, tree)["kernel"].any()
    (text,) = reports(caplog)
    assert text.startswith("psum_compressed over axis data: ")
    assert "in 'kernel' float32[16, 40]: rank (data 2, model 1) has 1 of 640" in text
    assert "out 'kernel' float32[16, 40]: ranks (data 0, model 1), (data 1, model 1)" in text


@pytest.mark.parametrize(
    "options",
    [{"reduction": "ring"}, {"levels": Levels(groups=((0, 1, 2, 3), (4, 5, 6, 7)))}],
    ids=["ring", "levels"],
)
def test_no_bucket_is_named_where_those_of_shares_begin_elsewhere(mesh, caplog, options):
    with cgx_jax.debug_nonfinite("log"):
        run(on_ranks(functools.partial(psum, **options), mesh), spoilt())
    (text,) = reports(caplog)
    assert "in 'kernel' float32[16, 40]: rank 3 has 2 of 640, the first at [7, 1]\n" in text


@pytest.mark.parametrize("action", ["raise", "skip"])
def test_python_numbers_stay_python_numbers(mesh, action):
    def f(tree):
        out = psum(tree | {"n": 2})
        return out["kernel"] / len(range(out["n"]))

    with cgx_jax.debug_nonfinite(action):
        run(on_ranks(f, mesh), {"kernel": gradients()["kernel"]})
    with cgx_jax.debug_nonfinite("skip"):
        bad = on_ranks(lambda x: psum({"x": x, "n": float("nan")})["n"] * x, mesh)
        assert not np.asarray(run(bad, gradients()["kernel"])).any()


def test_axes_that_are_left_to_xla_are_refused(mesh_2d):
    f = sharded(psum, mesh_2d, jax.P("data"), axis_names={"data"})
    says = r"^psum_compressed: debug_nonfinite .* shards over axis 'model'; make all axes.*specs="
    with cgx_jax.debug_nonfinite(), pytest.raises(ValueError, match=says):
        f(gradients()["kernel"])


TRANSFORMED = {
    "pmap": jax.pmap(psum, axis_name="data"),
    "vmap": jax.jit(jax.vmap(psum, axis_name="data")),
    "grad": jax.pmap(jax.value_and_grad(lambda t: psum(t)["kernel"].sum()), axis_name="data"),
    "remat": jax.pmap(jax.checkpoint(psum), axis_name="data"),
    "hook": jax.pmap(hook, axis_name="data"),
}


@pytest.mark.parametrize("name", TRANSFORMED)
@pytest.mark.quick("pmap", "hook")
def test_the_mode_works_under(name, caplog):
    with cgx_jax.debug_nonfinite("log"):
        run(TRANSFORMED[name], gradients())
        assert reports(caplog) == []
        run(TRANSFORMED[name], spoilt())
    assert IN[2] in "".join(reports(caplog))


def optimizer(mesh, **options):
    tx = cgx_jax.sync_gradients("data", RULES, mesh=mesh, exchange="xla", **options)
    state = placed(tx.init(first(gradients())), mesh)
    return stepper(tx, mesh, state), state


KEPT = {
    "nothing": {},
    "memory": {"memory": ErrorFeedback()},
    "moments": {"precondition": SecondMoment()},
}


@pytest.mark.parametrize("options", KEPT.values(), ids=KEPT)
@pytest.mark.quick("memory")
def test_a_skipped_step_is_zero_leaves_the_state_and_counts(mesh, caplog, options):
    with cgx_jax.debug_nonfinite("skip"):
        step, state = optimizer(mesh, **options)
        _, state = run(step, gradients(), state)
        mean, after = run(step, spoilt(), state)
    assert "sync_gradients over axis data, step 1: values" in reports(caplog)[0]
    assert not any(x.any() for x in jax.tree.leaves(mean))
    assert transforms.metrics(state)["cgx/skipped"] == 0
    assert transforms.metrics(after)["cgx/skipped"] == 1
    # All of the state, except the numbers of steps.
    unchanged = lambda s: jax.tree.leaves(s._replace(step=0, skipped=0))  # noqa: E731
    for x, y in zip(unchanged(after), unchanged(state), strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize(
    ("compressor", "searches", "agreed"), [(Quantize(4), 1, 0), (SignSGD(), 2, 1)], ids=str
)
def test_operands_are_searched_beforehand_only_where_the_results_may_not_tell(
    mesh, compressor, searches, agreed
):
    f = on_ranks(functools.partial(psum, rules=Rules((), compressor, exact=EXACT_BIAS)), mesh)
    plain = f.lower(gradients()).as_text()
    with cgx_jax.debug_nonfinite():
        watched = f.lower(gradients()).as_text()
    # A report, which comes last, searches the operands too.
    added = {"@cgx_find_nonfinite(": searches + 1, "all_reduce": agreed}
    assert {op: watched.count(op) - plain.count(op) for op in added} == added
    assert watched.rpartition("stablehlo.case")[2].count("@cgx_find_nonfinite(") == 1


@pytest.mark.parametrize("batched", [False, True])
def test_counts_and_places_are_those_of_numpy(batched):
    rng = np.random.default_rng(0)
    dtypes = ("float32", "complex64", "bfloat16", "float16", "float8_e5m2", "float32")
    shapes = ((), (1,), (33,), (640,), (5, 7), (70_000,))
    arrays = []  # the first row of each is finite
    for dtype, shape in zip(dtypes, shapes, strict=True):
        x = rng.standard_normal((4, *shape)).astype(np.float32)
        spoilt = rng.random(x.shape) < 0.1 * np.arange(4).reshape(4, *(1 for _ in shape))
        x = np.where(spoilt, rng.choice([np.nan, np.inf, -np.inf], x.shape), x)
        arrays.append(jax.numpy.asarray(x, dtype))
    count = jax.jit(lambda *row: count_nonfinite(row))
    rows = [[x[i] for x in arrays] for i in range(4)]
    got = jax.jit(jax.vmap(count))(*arrays) if batched else [count(*row) for row in rows]
    bad = [[~np.isfinite(np.asarray(x, np.complex64)).ravel() for x in row] for row in rows]
    want = [[(x.sum(), x.argmax()) for x in row] for row in bad]
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "complex64"])
@pytest.mark.parametrize("n", [1, 3, 8, 17, 33, 20_000])
def test_one_value_is_found_wherever_it_is(dtype, n):
    search = jax.jit(lambda x: all_finite([x]))
    finite = np.full(n, -jax.numpy.finfo(dtype).max, dtype)
    assert search(finite)
    for place in range(0, n, 1 + n // 40):
        for bad in (np.nan, -np.nan, np.inf, -np.inf):
            x = finite.copy()
            x[place] = bad
            assert not search(x), (place, bad)


def test_groups_decide_together(mesh, caplog):
    """Only the group of rank 3 has a result that is not finite."""
    groups = [[0, 1], [2, 3], [4, 5], [6, 7]]
    f = on_ranks(functools.partial(psum, axis_index_groups=groups), mesh)
    with cgx_jax.debug_nonfinite("skip"):
        assert not run(f, {"kernel": spoilt()["kernel"]})["kernel"].any()
    (text,) = reports(caplog)
    assert "out 'kernel' float32[16, 40]: ranks 2, 3 have 128 of 640" in text


def test_outside_of_the_mode_the_program_is_what_it_was(mesh):
    f = on_ranks(psum, mesh)
    before = f.lower(gradients()).as_text()
    with cgx_jax.debug_nonfinite():
        watched = f.lower(gradients()).as_text()
    assert "cgx_find_nonfinite" in watched
    assert "cgx_find_nonfinite" not in before
    assert f.lower(gradients()).as_text() == before


PARTS = {
    "reduce_in_backward": hook,
    "psum_scatter_compressed": lambda t: cgx_jax.psum_scatter_compressed(t, "data", tiled=True),
    "all_gather_compressed": lambda t: cgx_jax.all_gather_compressed(t, "data"),
}


@pytest.mark.parametrize(
    ("name", "options", "row", "out"),
    [
        ("psum_scatter_compressed", {"tiled": True}, 1, "rank 0 has 1 of 80, the first at [1, 0]"),
        ("all_gather_compressed", {}, 3, "every rank has 1 of 5120, the first at [2, 3, 0]"),
    ],
)
def test_halves_are_watched_with_the_shapes_of_their_results(mesh, caplog, name, options, row, out):
    tree = {"kernel": gradients()["kernel"]}
    tree["kernel"][2, row, 0] = np.nan
    call = functools.partial(getattr(cgx_jax, name), compressor=Identity(), **options)
    with cgx_jax.debug_nonfinite("log"):
        run(on_ranks(lambda t: call(t, "data"), mesh), tree)
    (text,) = reports(caplog)
    assert text.startswith(f"{name} over axis data: values are not finite.")
    assert "in 'kernel' float32[16, 40]: rank 2 has 1 of 640" in text
    assert out in text


@pytest.mark.parametrize("name", PARTS)
def test_a_part_of_a_step_is_not_skipped(mesh, name):
    with (
        cgx_jax.debug_nonfinite("skip"),
        pytest.raises(ValueError, match=rf"^{name}: .* cannot skip part of a step"),
    ):
        jax.eval_shape(on_ranks(PARTS[name], mesh, check_vma=False), gradients())


def test_an_action_that_is_none_is_refused():
    says = "action='ignore' must be one of"
    with pytest.raises(ValueError, match=says), cgx_jax.debug_nonfinite("ignore"):
        pass
