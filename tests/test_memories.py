"""Memories around every compressor: accounts balance; unbounded ones are refused or scaled."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import cgx_jax
import optax_steps
from cases import LOSSY
from cgx_jax import ErrorFeedback, Quantize, Rules, SecondMoment
from cgx_jax.compressors import (
    DGC,
    INCEPTIONN,
    BlockTopK,
    QSparse,
    RandomK,
    ScaledSign,
    Threshold,
    TopK,
)
from cgx_jax.transforms import MomentumCorrection, diloco, metrics
from worlds import first, normal, ranks, with_state

pytestmark = pytest.mark.usefixtures("unoptimized")

WORLD = 3
MEMORIES = {"feedback": ErrorFeedback(), "momentum": MomentumCorrection(0.9)}
KEPT = {n: c.compressor for n, c in LOSSY.items() if c.compressor.feedback_scale is not None}
REFUSED = {n: c.compressor for n, c in LOSSY.items() if n not in KEPT} | {
    "one bit to nearest": Quantize(1),
    "random k of a number, unbiased": RandomK(5, scaled=True),
}
FEW = INCEPTIONN((0.01, 0.02, 0.01))
QUICK = {("feedback", "qsgd"), ("momentum", "random k, unbiased")}


def every_pair():
    pairs = [(m, n) for m in MEMORIES for n in KEPT]
    return [pytest.param(*p, marks=() if p in QUICK else pytest.mark.slow) for p in pairs]


def sync(compressor, memory, world=WORLD, **options):
    policy = Rules((), compressor, exact=())
    return cgx_jax.sync_gradients(
        "data", policy, memory=memory, mesh=ranks(world), exchange="xla", **options
    )


def run(compressor, memory, grads, **options):
    """Returns means fp64[steps, ...], and the memories before the first and after each step."""
    world = grads.shape[1]
    tx = sync(compressor, memory, world, **options)
    means, states = optax_steps.run(tx, ranks(world), {"w": grads})
    kept = [
        [np.asarray(x["w"], np.float64) for x in getattr(s.memory, "trees", s.memory)]
        for s in states
    ]
    return np.array([m["w"] for m in means], np.float64), kept


@pytest.mark.parametrize(("memory", "name"), every_pair())
def test_what_was_seen_and_what_is_kept_is_what_was_given(memory, name):
    """Up to the rounding of fp32: a few ulps of the largest sum per step."""
    grads = normal(4, WORLD, 30, 50)
    seen, kept = run(KEPT[name], MEMORIES[memory], grads)
    given = grads.astype(np.float64)
    if memory == "momentum":  # each rank's velocity, from the one that the last step left
        given = given + 0.9 * np.array([m[1] for m in kept[:-1]])
    residual = kept[-1][0]
    largest = WORLD * max(np.abs(given).sum(0).max(), np.abs(residual).max())
    np.testing.assert_allclose(
        seen.sum(0) + residual.mean(0), given.mean(1).sum(0), atol=8 * 2.0**-24 * largest
    )
    assert residual.any()


@pytest.mark.parametrize(
    "name", ["random k", *(pytest.param(n, marks=pytest.mark.slow) for n in KEPT)]
)
def test_a_nan_does_not_stay_in_a_memory(name):
    """Whether it is sent, so that the step is skipped, or left behind."""
    grads = normal(3, WORLD, 30, 50)
    grads[1, 0, 3, 4] = np.nan
    means, kept = run(KEPT[name], ErrorFeedback(), grads)
    assert np.isfinite(kept[3][0]).all()
    assert np.isfinite(means[2]).all()
    if np.isnan(means[1]).any():
        np.testing.assert_array_equal(kept[1][0], kept[2][0])


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("compressor", [Quantize(2), TopK(64)], ids=str)
def test_narrow_gradients_lose_nothing_either(compressor, dtype):
    """Neither what is too small for the dtype's sums, nor what a mean or a residual rounds away."""
    grads = normal(6, WORLD, 30, 50)
    grads[:, :, 10:] /= 256
    grads = np.asarray(jnp.asarray(grads, dtype))
    seen, kept = run(compressor, ErrorFeedback(), grads)
    balance = seen.sum(0) + kept[-1][0].mean(0) - grads.astype(np.float64).mean(1).sum(0)
    assert np.abs(balance).max() < 1e-5
    assert jnp.finfo(dtype).eps > 1e-4


def test_a_velocity_of_narrow_gradients_does_not_stall():
    grads = np.asarray(jnp.full((60, WORLD, 30, 50), 0.01, jnp.bfloat16))
    _, kept = run(Quantize(8), MomentumCorrection(0.9), grads)
    exact = np.float64(grads[0, 0, 0, 0]) * (1 - 0.9**60) / (1 - 0.9)
    np.testing.assert_allclose(kept[-1][1], exact, rtol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize("name", KEPT)
def test_a_memory_of_gradients_that_stay_does_not_grow(memory, name):
    grads = np.repeat(normal(1, WORLD, 30, 50), 240, 0)
    _, kept = run(KEPT[name], MEMORIES[memory], grads)
    size = np.array([np.linalg.norm(m[0]) for m in kept])
    assert size[160:].max() < 1.5 * size[80:160].max()


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("memory", MEMORIES)
def test_a_memory_that_would_grow_is_refused(memory, name):
    tx = sync(REFUSED[name], MEMORIES[memory])
    with pytest.raises(ValueError, match=r"^sync_gradients: .* of leaf 'w' can exceed its input"):
        optax_steps.run(tx, ranks(WORLD), {"w": normal(1, WORLD, 30, 50)})


# --- momentum.


@pytest.mark.parametrize(
    "compressor", [TopK(0.1), pytest.param(DGC(0.1), marks=pytest.mark.slow)], ids=str
)
def test_a_value_that_has_arrived_starts_with_a_new_velocity(compressor):
    """DGC's masking: u and v become 0 where a value is sent, as in the paper's algorithm."""
    grads = normal(6, WORLD, 30, 50)
    means, kept = run(compressor, MomentumCorrection(0.9), grads)
    u = v = np.zeros((WORLD, 30, 50))
    for t in range(6):
        u = 0.9 * u + grads[t]
        v = v + u
        sent = kept[t + 1][0] == 0
        assert sent.sum(axis=(1, 2)).max() <= 150
        if isinstance(compressor, TopK):
            for rank in range(WORLD):
                np.testing.assert_array_equal(
                    np.sort(np.abs(v[rank][sent[rank]])), np.sort(np.abs(v[rank]), None)[-150:]
                )
        np.testing.assert_allclose(means[t], np.where(sent, v, 0).mean(0), atol=1e-5)
        u, v = np.where(sent, 0, u), np.where(sent, 0, v)
        np.testing.assert_allclose(kept[t + 1][0], v, atol=1e-5)
        np.testing.assert_allclose(kept[t + 1][1], u, atol=1e-5)
        u, v = kept[t + 1][1], kept[t + 1][0]


def test_a_value_has_arrived_whatever_the_scale_of_feedback():
    """A random code counts for less than half of what it sends; that masks velocities as well."""
    grads = normal(1, WORLD, 30, 50)
    code = QSparse(0.1)
    assert code.feedback_scale < 0.5
    _, kept = run(code, MomentumCorrection(0.9), grads)
    masked = (kept[1][1] == 0).sum(axis=(1, 2))
    assert (masked > 5).all()  # fewer than the 150 that are sent, most of which round to 0


def test_an_owner_s_velocity_goes_on_where_the_sum_was_not_sent():
    grads = normal(3, WORLD, 30, 50)
    means, kept = run(BlockTopK(5, 50), MomentumCorrection(0.9), grads)
    for t in range(3):
        before, after = kept[t][1], kept[t + 1][1]
        velocity = 0.9 * before + grads[t]
        masked = after == 0
        assert masked.any()
        assert not (masked & (means[t] == 0)).any()
        np.testing.assert_allclose(after, np.where(masked, 0, velocity), atol=1e-6)


def test_a_code_of_every_value_masks_no_velocity():
    grads = normal(3, WORLD, 30, 50)
    _, kept = run(Quantize(4), MomentumCorrection(0.9), grads)
    u = 0
    for t in range(3):
        u = 0.9 * u + grads[t].astype(np.float64)
    np.testing.assert_allclose(kept[-1][1], u, atol=1e-5)


# --- a schedule of the learning rate.


def signs(p):
    return np.mean(np.abs(p)) * np.where(p >= 0, 1.0, -1.0)


def rates(step):
    return jnp.where(step < 2, 0.5, jnp.where(step == 2, 0.0, 0.01))


@pytest.mark.parametrize("momentum", [None, 0.9])
@pytest.mark.quick("0.9")
def test_feedback_by_rates_is_the_paper_s_ef_sgd_under_a_schedule(momentum):
    """p = rate * g + e, x -= mean C(p), e = p - C(p): Karimireddy et al., algorithm 2."""
    grads = normal(6, WORLD, 40, 50)
    memory = ErrorFeedback(learning_rate=rates)
    if momentum is not None:
        memory = MomentumCorrection(momentum, learning_rate=rates)
    tx = optax.chain(
        sync(ScaledSign(2000), memory, reduction="gather_sum"), optax.scale_by_learning_rate(rates)
    )
    steps, states = optax_steps.run(tx, ranks(WORLD), {"w": grads})
    e = velocity = np.zeros((WORLD, 40, 50))
    for t, step in enumerate(steps):
        rate = float(rates(t))
        velocity = (momentum or 0) * velocity + grads[t]
        p = rate * velocity + e
        sent = np.array([signs(x) for x in p]) if rate else np.zeros_like(p)
        e = p - sent
        np.testing.assert_allclose(step["w"], -sent.mean(0), atol=1e-6)
        np.testing.assert_allclose(states[t + 1][0].memory.trees[0]["w"], e, atol=1e-5)


@pytest.mark.parametrize("before", [None, rates], ids=["gradients", "rates"])
@pytest.mark.parametrize("kind", [ErrorFeedback, MomentumCorrection])
def test_residuals_times_rates_are_not_taken_for_others(kind, before):
    """Both are arrays like the parameters."""
    after = None if before else rates
    state = sync(Quantize(4), kind(learning_rate=before)).init({"w": normal(40, 50)})
    tx = sync(Quantize(4), kind(learning_rate=after))
    f = with_state(lambda g, s: tx.update(first(g), s), ranks(WORLD), state, P("data"))
    says = f"residuals of gradients.* {kind.__name__} has (a|no) learning_rate"
    with pytest.raises(ValueError, match=says):
        jax.eval_shape(f, {"w": normal(WORLD, 40, 50)}, state)


@pytest.mark.parametrize("kind", [ErrorFeedback, MomentumCorrection])
def test_a_rate_that_is_no_schedule_is_refused(kind):
    says = f"{kind.__name__}: learning_rate=0.1 is not a schedule; "
    with pytest.raises(TypeError, match=says):
        kind(learning_rate=0.1)


# --- what found no room.


@pytest.mark.parametrize(
    "compressor",
    [Threshold(0.5, 20), *(pytest.param(c, marks=pytest.mark.slow) for c in (DGC(20), FEW))],
    ids=str,
)
def test_what_found_no_room_is_counted_and_waits(compressor):
    grads = normal(2, WORLD, 30, 50)
    tx = sync(compressor, ErrorFeedback())
    _, states = optax_steps.run(tx, ranks(WORLD), {"w": grads})
    kept = np.zeros((WORLD, 30, 50))
    for t, state in enumerate(states[1:]):
        sent = kept + grads[t]
        kept = np.asarray(state.memory[0]["w"], np.float64)
        arrived = 2 * np.abs(kept) < np.abs(sent)
        if isinstance(compressor, DGC):
            least = [np.abs(x)[a].min() for x, a in zip(sent, arrived, strict=True)]
            wanted = np.abs(sent) >= np.array(least)[:, None, None]
        else:
            wanted = np.abs(sent) > (0.5 if isinstance(compressor, Threshold) else 2.0**-10)
        counts = (wanted & ~arrived).sum(axis=(1, 2))
        np.testing.assert_array_equal(state.overflow["w"], counts)
        assert metrics((state, optax.EmptyState())) == {
            "cgx/skipped": 0,
            "cgx/overflow": counts.sum(),
            "cgx/overflow/w": counts.sum(),
        }
        assert isinstance(compressor, DGC) or counts.min() > 100


def test_nothing_is_counted_where_there_is_room_for_all():
    state = sync(TopK(0.1), ErrorFeedback()).init({"w": jnp.zeros((30, 50))})
    assert state.overflow == ()
    assert metrics(state) == {"cgx/skipped": 0}
    assert sync(Threshold(0.5), None).init({"w": jnp.zeros((30, 50))}).overflow == ()


def test_counts_of_a_traced_state_are_refused():
    state = sync(Threshold(0.5), ErrorFeedback()).init({"w": jnp.zeros((30, 50))})
    says = r"^metrics: the state is traced.*; make this call outside"
    with pytest.raises(ValueError, match=says):
        jax.jit(metrics)(state)


TRANSFORMATIONS = {
    "momentum": lambda: sync(Quantize(4), MomentumCorrection(0.9)),
    "feedback in units": lambda: sync(Quantize(4), ErrorFeedback(), precondition=SecondMoment()),
    "diloco": lambda: diloco(
        optax.sgd(0.1, 0.9), "data", Quantize(4), every=8, mesh=ranks(WORLD), exchange="xla"
    ),
}


@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_new_state_is_written_over_the_old(name):
    """A step that may reuse the memory of its state copies none of it outside of branches."""
    tx, shape = TRANSFORMATIONS[name](), (33, 65)  # a shape that nothing else has
    params = {"w": jnp.ones(shape)}
    state = tx.init(params)
    specs = cgx_jax.state_specs(state, "data")

    def loss(params, x):
        return jnp.square(x @ params["w"]).mean()

    def step(params, state, x):
        own = jax.tree.map(lambda p: jax.lax.pcast(p, "data", to="varying"), params)
        updates, state = tx.update(jax.grad(loss)(own, x), state, params)
        return optax.apply_updates(params, updates), state

    at = P(), specs
    ranked = jax.shard_map(step, mesh=ranks(WORLD), in_specs=(*at, P("data")), out_specs=at)
    program = jax.jit(ranked, donate_argnums=(0, 1)).lower(params, state, jnp.ones((6, 33)))
    _, entry = program.compile().as_text().split("\nENTRY ")
    copies = [line for line in entry.splitlines() if " copy(" in line and "33,65]" in line]
    assert not copies, copies
