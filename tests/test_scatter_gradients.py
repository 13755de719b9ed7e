"""scatter_gradients: shards of the mean; memories, units and their state under sharded training."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import cgx_jax
from cgx_jax import ErrorFeedback, Identity, Quantize, Rules, SecondMoment
from cgx_jax.compressors import QSGD, SharedTernGrad, SignSGD, Threshold, TopK
from cgx_jax.policies import Stages
from cgx_jax.transforms import MomentumCorrection
from cgx_jax.transforms.precondition import squares_of
from hlo import before, entry_of, named
from worlds import RANKS, first, normal, placed, ranks, sharded, stepper

pytestmark = pytest.mark.usefixtures("unoptimized")

WORLD = 4
MESH = ranks(WORLD)
SHAPES = {"bias": (40,), "kernel": (24, 60), "stack": (8, 12, 30)}
FIRST = dict.fromkeys(SHAPES, 0)
CUT = {"bias": 0, "kernel": 1, "stack": 1}  # along the columns, and between rows
cuts = pytest.mark.parametrize("cut", [FIRST, CUT], ids=["first", "several"])
Q3 = Rules((), Quantize(3, 64), exact=())


def gradients(steps, scale=None, seed=0):
    """Leaves [steps, ranks, ...]."""
    rng = np.random.default_rng(seed)
    draw = lambda s: rng.standard_normal((steps, WORLD, *s)).astype(np.float32)  # noqa: E731
    out = {name: draw(shape) for name, shape in SHAPES.items()}
    if scale is not None:
        out["kernel"] = out["kernel"] * scale
    return out


def zeros():
    return {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}


def specs_of(cut):
    return {name: P(*[None] * d, "data") for name, d in cut.items()}


def run(tx, grads, state=None, cut=FIRST):
    """Returns every step's whole mean, joined from all ranks' shards, and the states."""
    state = placed(tx.init(zeros()) if state is None else state, MESH)
    f = stepper(tx, MESH, state, out={name: specs_of(cut)[name] for name in grads})
    means, states = [], [state]
    for t in range(len(next(iter(grads.values())))):
        mean, state = f(jax.tree.map(lambda x, t=t: x[t], grads), state)
        means.append(jax.tree.map(np.asarray, mean))
        states.append(state)
    return means, states


def scatter(policy, **options):
    return cgx_jax.scatter_gradients("data", policy, mesh=MESH, exchange="xla", **options)


def test_shards_of_votes_are_those_of_an_all_reduce():
    grads, policy = gradients(1), Rules((), SignSGD(), exact=())
    means, _ = run(scatter(policy), grads)
    for name, x in grads.items():
        np.testing.assert_array_equal(means[0][name], np.sign(np.sign(x[0]).sum(0)))


@pytest.mark.parametrize("given", [CUT, CUT.get], ids=["a tree", "a function"])
def test_exact_shards_make_up_the_mean(given):
    grads = gradients(2)
    means, _ = run(scatter(Identity(), dimensions=given), grads, cut=CUT)
    for t, mean in enumerate(means):
        for name, x in grads.items():
            np.testing.assert_allclose(mean[name], x[t].mean(0), atol=1e-6)


@pytest.mark.parametrize("policy", [Identity(), Rules((), Quantize(8, 64), exact=())], ids=str)
@pytest.mark.parametrize(
    ("world", "check_vma"), [(1, True), (3, False), pytest.param(8, True, marks=pytest.mark.slow)]
)
def test_it_is_the_mean_over_any_number_of_ranks(world, check_vma, policy):
    """With all state it can keep, with and without check_vma; 3 ranks are no power of two."""
    devices = ranks(world)
    options = {"memory": ErrorFeedback(), "precondition": SecondMoment(), "exchange": "xla"}
    tx = cgx_jax.scatter_gradients("data", policy, mesh=devices, **options)
    x = normal(world, 24, 60, seed=world)
    state = placed(tx.init({"w": jnp.zeros(x.shape[1:])}), devices)
    step = stepper(tx, devices, state, out=RANKS, check_vma=check_vma)
    got = []
    for _ in range(3):
        mean, state = step({"w": x}, state)
        got.append(mean["w"])
    # 255 intervals in a range of less than 8: rounding loses half of one, and feedback as much.
    limit = 1e-6 if world == 1 or policy == Identity() else 2 * 8 / 255
    assert np.abs(np.array(got) - x.mean(0)).max() <= limit


@pytest.mark.parametrize("options", [{}, {"precondition": SecondMoment()}], ids=["plain", "units"])
def test_sums_that_float16_cannot_hold_have_a_mean(options):
    """Four ranks have values of up to 60,000 each; float16 ends at 65,504."""
    tx = scatter(Rules((), Quantize(8, 64), exact=()), **options)
    x = np.random.default_rng(0).uniform(2e4, 6e4, (1, WORLD, 24, 60)).astype(np.float16)
    like = {"kernel": jnp.zeros((24, 60), jnp.float16)}
    means, _ = run(tx, {"kernel": x}, tx.init(like))
    got, exact = means[0]["kernel"], x[0].astype(np.float64).mean(0)
    assert got.dtype == np.float16
    assert np.abs(got - exact).max() <= 4e4 / 255  # rounding loses half of this


def test_what_a_bfloat16_mean_rounds_away_is_kept():
    tx = scatter(Rules((), Quantize(3, 64), exact=()), memory=ErrorFeedback())
    x = normal(1, WORLD, 24, 60, dtype=jnp.bfloat16)
    like = {"kernel": jnp.zeros((24, 60), jnp.bfloat16)}
    means, states = run(tx, {"kernel": x}, tx.init(like))
    seen, kept, given = (
        np.asarray(v, np.float64) for v in (means[0]["kernel"], states[1].memory[0]["kernel"], x[0])
    )
    assert np.abs(seen + kept.mean(0) - given.mean(0)).max() < 1e-6


@pytest.mark.parametrize("policy", [Q3, Rules((), QSGD(7, 64), exact=()), TopK(0.1)], ids=str)
@pytest.mark.parametrize(
    "memory",
    [ErrorFeedback(), pytest.param(MomentumCorrection(0.9), marks=pytest.mark.slow)],
    ids=str,
)
@pytest.mark.parametrize(
    ("cut", "precondition"),
    [(FIRST, None), (CUT, None), (CUT, SecondMoment())],
    ids=["first", "several", "in units"],
)
@pytest.mark.quick("first-*Feedback*Quantize*", "several-*Feedback*TopK*", "in*Feedback*Quantize*")
def test_what_was_seen_and_what_is_kept_is_what_was_given(policy, memory, cut, precondition):
    grads = gradients(4)
    tx = scatter(policy, memory=memory, dimensions=cut, precondition=precondition)
    means, states = run(tx, grads, cut=cut)
    lossy = 0
    for name, x in grads.items():
        given = x.astype(np.float64)
        if isinstance(memory, MomentumCorrection):
            velocities = [np.asarray(s.memory[1][name], np.float64) for s in states[:-1]]
            given = given + 0.9 * np.array(velocities)
        kept = np.asarray(states[-1].memory[0][name], np.float64)
        seen = sum(mean[name].astype(np.float64) for mean in means)
        np.testing.assert_allclose(seen + kept.mean(0), given.mean(1).sum(0), atol=2e-5)
        scaled = isinstance(getattr(policy, "default", None), QSGD)
        for rank, own in enumerate(np.split(kept, WORLD, axis=1 + cut[name])):
            # A rank adds up its own part exactly; the factor of an unbiased code scales the sum.
            assert own[rank].any() == scaled
        lossy += np.abs(kept).max() > 1e-3
    assert lossy >= 1


@pytest.mark.usefixtures("optimized")
def test_stages_follow_one_another():
    grads = gradients(3)
    staged, _ = run(scatter(Stages((Identity(), Q3), (2,))), grads)
    alone, _ = run(scatter(Q3), grads)
    for name, x in grads.items():
        for t in (0, 1):
            np.testing.assert_allclose(staged[t][name], x[t].mean(0), atol=1e-6)
        np.testing.assert_array_equal(staged[2][name], alone[2][name])


def test_values_without_room_are_counted():
    """Three values of each row of a leaf may travel, and far more are above the threshold."""
    codes = Threshold(1e-3, capacity=3)
    tx = scatter(Rules((), codes, exact=()), memory=ErrorFeedback())
    _, states = run(
        tx, {"kernel": gradients(1)["kernel"]}, tx.init({"kernel": jnp.zeros((24, 60))})
    )
    assert (np.asarray(states[-1].overflow["kernel"]) > 0).all()


def test_a_state_goes_on_where_leaves_are_cut_elsewhere():
    """It knows whole leaves only, so nothing is lost."""
    grads, memory = gradients(4), ErrorFeedback()
    halves = [{name: x[part] for name, x in grads.items()} for part in (np.s_[:2], np.s_[2:])]
    means, states = run(scatter(Q3, memory=memory), halves[0])
    more, states = run(scatter(Q3, memory=memory, dimensions=CUT), halves[1], states[-1], cut=CUT)
    for name, x in grads.items():
        kept = np.asarray(states[-1].memory[0][name], np.float64).mean(0)
        seen = sum(mean[name].astype(np.float64) for mean in means + more)
        np.testing.assert_allclose(seen + kept, x.astype(np.float64).mean(1).sum(0), atol=2e-5)


SCALE = np.float32(10.0) ** np.random.default_rng(5).uniform(-2, 1, (24, 1)).astype(np.float32)


@cuts
def test_the_moments_are_those_of_the_whole_mean(cut):
    """The ranks make the same state from shards that `SecondMoment` makes from the whole mean."""
    grads, moment = gradients(5, SCALE), SecondMoment()
    means, states = run(scatter(Q3, precondition=moment, dimensions=cut), grads, cut=cut)
    state, shapes = moment.init(zeros()), [SHAPES[name] for name in sorted(SHAPES)]

    @jax.jit
    def update(state, mean, t):
        squares = squares_of(dict(enumerate(jax.tree.leaves(mean))))
        return moment.update(state, shapes, squares, t)

    for t, mean in enumerate(means):
        state = update(state, mean, jnp.int32(t))
    jax.tree.map(
        lambda got, want: np.testing.assert_allclose(got, want, rtol=2e-4, atol=1e-6),
        states[-1].moments,
        state,
    )


def test_units_cost_one_small_sum_in_the_steps_that_update_them():
    tx = scatter(Q3, precondition=SecondMoment())
    state = tx.init(zeros())
    lowered = stepper(tx, MESH, state, out=RANKS).lower(first(gradients(1)), state)
    hlo = lowered.as_text("hlo")
    sums = [line for line in hlo.splitlines() if " all-reduce(" in line]
    # A leaf's rows and columns: its last dimension has the columns; a vector has one row.
    sizes = 40 + 1 + 24 + 60 + 96 + 30
    assert len(sums) == 2  # the other says whether all is finite
    assert sum(f"f32[{sizes}]" in line for line in sums) == 1
    assert sum("s32[]" in line for line in sums) == 1
    assert hlo.count(" all-to-all(") == 1
    # In a branch, the sum waits for the others: on CPUs, XLA would run them side by side.
    entry = entry_of(lowered.compile().as_text())
    (branch,) = named(entry, "conditional")
    others = named(entry, "all-reduce", "all-to-all")
    assert len(others) == 2
    assert others <= before(entry, branch)


def test_a_step_that_is_not_finite_on_one_rank_changes_no_state():
    grads = gradients(3)
    grads["kernel"][1, 2, 0, 0] = np.nan  # only in the shard of rank 0
    options = {"memory": ErrorFeedback(), "precondition": SecondMoment()}
    means, states = run(scatter(Q3, **options), grads)
    assert np.isnan(means[1]["kernel"]).any()
    before, after = (jax.tree.leaves((s.memory, s.moments)) for s in states[1:3])
    for a, b in zip(before, after, strict=True):
        np.testing.assert_array_equal(a, b)
    assert np.isfinite(means[2]["kernel"]).all()


@cuts
def test_shards_inside_and_whole_leaves_outside_begin_alike(cut):
    tx = scatter(Q3, memory=ErrorFeedback(), precondition=SecondMoment(), dimensions=cut)
    outside = tx.init(zeros())
    specs = cgx_jax.state_specs(outside, "data")
    inside = sharded(tx.init, MESH, (specs_of(cut),), specs)(zeros())
    assert jax.tree.map(jnp.shape, inside) == jax.tree.map(jnp.shape, outside)
    assert inside.memory[0]["kernel"].sharding.spec == P("data")
    assert outside.memory[0]["kernel"].shape == (WORLD, 24, 60)


@cuts
def test_each_value_has_its_own_unit_wherever_its_leaf_is_cut(cut):
    """Rows differ by orders of magnitude: without units, a code loses the small ones."""
    grads, losses = gradients(8, SCALE), {}
    for precondition in (None, SecondMoment()):
        tx = scatter(Q3, precondition=precondition, dimensions=cut)
        means, _ = run(tx, grads, cut=cut)
        errors = (means[-1]["kernel"] - grads["kernel"][-1].mean(0)) / SCALE
        losses[precondition] = np.sqrt(np.square(errors).mean())
    assert losses[SecondMoment()] < 0.5 * losses[None]


FED = {"memory": ErrorFeedback()}
WRONG = [
    (lambda: run(scatter(SignSGD(), **FED), gradients(1)), "SignSGD.* would grow without bound"),
    (lambda: run(scatter(SharedTernGrad()), gradients(1)),
     "SharedTernGrad.* sends numbers that the ranks sum"),
    (lambda: optax.apply_if_finite(scatter(Q3), 5).init(zeros()),
     r"optax.apply_if_finite .*lax.pmin"),
    (lambda: run(scatter(Q3, **FED), gradients(1), scatter(Q3).init(zeros())),
     "the state holds 0 arrays per leaf"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "message"), WRONG)
def test_what_cannot_work_is_refused(make, message):
    with pytest.raises(ValueError, match=rf"^scatter_gradients: .*{message}"):
        make()


@pytest.mark.parametrize("options", [FED, {"precondition": SecondMoment()}])
def test_a_state_made_of_shards_for_whole_leaves_is_refused(options):
    tx = scatter(Q3, **options)
    shards = {n: np.zeros((s[0] // WORLD, *s[1:]), np.float32) for n, s in SHAPES.items()}
    says = r"^scatter_gradients: the state .*made for .*shape.* Give "
    with pytest.raises(ValueError, match=says):
        run(tx, gradients(1), tx.init(shards))


@pytest.mark.parametrize(
    ("dimensions", "error", "message"),
    [
        (2, ValueError, r"leaf 'bias': dimension 2 is out of range; the operand is \[40\]"),
        (CUT | {"stack": 2}, ValueError, r"leaf 'stack': dimension 2 .* 30, .*along another"),
        ({"bias": 0, "kernel": 1}, ValueError, "dimensions .* no int for leaf 'stack'. Pass"),
        (CUT | {"other": 0}, ValueError, "dimensions .* an int for 'other', which is no leaf"),
        (CUT | {"kernel": 0.5}, TypeError, "leaf 'kernel': dimensions=0.5 is not an int"),
        (lambda path: None, TypeError, "leaf 'bias': dimensions=None is not an int"),
    ],
    ids=["beyond", "not divided", "missing", "unknown", "float", "none"],
)
def test_dimensions_that_do_not_fit_are_refused(dimensions, error, message):
    tx = scatter(Q3, dimensions=dimensions)
    with pytest.raises(error, match=f"^scatter_gradients: {message}"):
        run(tx, gradients(1), scatter(Q3).init(zeros()))


def test_a_tree_without_leaves_comes_back():
    tx = scatter(Q3, memory=ErrorFeedback(), precondition=SecondMoment())
    state = tx.init({})
    assert stepper(tx, MESH, state)({}, state)[1].step == 1
