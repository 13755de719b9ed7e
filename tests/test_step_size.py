"""`restore_step_size`: along the exact steps, steps are as long as without compression."""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import cgx_jax
from cgx_jax import Adaptive, Cast, ErrorFeedback, Identity, Quantize, Rule, Rules, SecondMoment
from cgx_jax.kernels.reference import NORMAL_ERROR, NORMAL_RANGE
from cgx_jax.policies import LeastError, Uniform
from cgx_jax.reductions import GatherSum, Levels, ScatterGather, Tree
from cgx_jax.transforms import restore_step_size
from cgx_jax.transforms.precondition import PERIOD, WARMUP
from optax_steps import run

WORLD = 4
B1, B2, EPS = 0.9, 0.999, 1e-8
ROTATED, MOMENT = Quantize(4, rotation=True), SecondMoment()
# Optax divides by an integer count.
promotes = functools.partial(jax.numpy_dtype_promotion, "standard")


def mesh(world=WORLD):
    return Mesh(np.array(jax.devices()[:world]), ("data",))


def sync(policy=ROTATED, *, world=WORLD, precondition=MOMENT, memory=None, reduction=None):
    return cgx_jax.sync_gradients(
        "data",
        policy,
        precondition=precondition,
        memory=memory,
        mesh=mesh(world),
        exchange="xla",
        reduction=reduction,
    )


def trained(tx, grads, **options):
    with promotes():
        return run(tx, mesh(jax.tree.leaves(grads)[0].shape[1]), grads, **options)


@pytest.mark.parametrize("bits", range(1, 9))
def test_the_error_in_the_table_is_that_of_normal_values(bits):
    levels = np.linspace(-1, 1, 2**bits) * float(NORMAL_RANGE[bits])
    edges = [-math.inf, *(levels[1:] + levels[:-1]) / 2, math.inf]

    def density(x):
        return math.exp(-x * x / 2) / math.sqrt(2 * math.pi)

    ends = np.array([(math.erf(x / math.sqrt(2)), density(x)) for x in edges])
    share, first = np.diff(ends[:, 0]) / 2, -np.diff(ends[:, 1])
    error = 1 - 2 * levels @ first + np.square(levels) @ share
    np.testing.assert_allclose(error, NORMAL_ERROR[bits], rtol=5e-4)
    np.testing.assert_allclose(1 - levels @ first, NORMAL_ERROR[bits], rtol=1e-3)  # and the loss
    if bits <= 4:  # the range of wider codes ends past the largest of 512 values
        x = np.random.default_rng(bits).normal(size=(200, 512)).astype(np.float32)
        code = Quantize(bits, rotation=True)
        decoded = code.decode(code.encode(x), x.shape, x.dtype)
        assert code.known_error(x.size) == NORMAL_ERROR[bits]
        found = np.square(decoded - x).sum() / np.square(x).sum()
        np.testing.assert_allclose(found, NORMAL_ERROR[bits], rtol=0.03)


@pytest.mark.parametrize(
    ("code", "size", "known"),
    [
        (Quantize(4, rotation=True), 4096, True),
        (Quantize(4, 128, rotation=True), 4100, True),
        (Quantize(4, rotation=True), 64, True),  # one short bucket that is one block
        (Quantize(4, rotation=True), 96, False),
        (Quantize(4, 1024, rotation=True), 4096, False),
        (Quantize(4, rounding="stochastic", rotation=True), 4096, False),
        (Quantize(4), 4096, False),
        (Quantize(4, rotation=True), 0, False),
    ],
    ids=str,
)
def test_the_error_is_known_of_clipped_buckets_alone(code, size, known):
    assert (code.known_error(size) is not None) == known


# --- the factor, on gradients whose exact means are known.

STEPS, SHAPE = 200, (48, 96)


def signals(rng, noise, signal=1.0, rows=1.0, ranks=WORLD):
    """Gradients [steps, ranks, ...]: a fixed mean, drawn once, plus new noise in every step."""
    fixed = signal * rng.normal(size=SHAPE)
    drawn = noise(size=(STEPS, ranks, *SHAPE)) + fixed
    return np.broadcast_to(rows * drawn, (STEPS, WORLD, *SHAPE)).astype(np.float32)


def gradients():
    rng = np.random.default_rng(0)
    sizes = 10 ** rng.uniform(-0.5, 0.5, (SHAPE[0], 1))
    normal = rng.normal
    return {
        "Gaussian": signals(rng, normal, 0),
        "Laplace": signals(rng, rng.laplace, 0),
        "rows": signals(rng, normal, 0, sizes),
        "wide rows": signals(rng, normal, 0, sizes**2),
        "half agree": signals(rng, normal, 0.5),
        "agree": signals(rng, normal, 0.5, ranks=1),
        "persist": signals(rng, functools.partial(normal, scale=0.3)),
    }


# How far the ratio to exact may be off. Ranks that agree round alike, which loses less. The large
# values of a leaf dominate its factor.
OFF = {"half agree": (0.006, 0.016), "agree": (0.007, 0.02), "wide rows": (0.03, 0.065)}


@functools.cache
def exact_steps(clip):
    return np_steps(trained(chain(Identity(), clip), varied(clip))[0])


def varied(clip):
    """Returns the gradients; with `clip`, their norms differ from step to step."""
    sizes = 10.0 ** np.random.default_rng(1).uniform(-1, 1, (STEPS, 1, 1, 1)) if clip else 1.0
    return jax.tree.map(lambda g: (sizes * g).astype(np.float32), gradients())


def chain(policy, clip, reduction=None):
    parts = [optax.clip_by_global_norm(1.0)] if clip else []
    return optax.chain(sync(policy, reduction=reduction), *parts, optax.scale_by_adam(B1, B2, EPS))


def np_steps(results):
    return {
        k: np.stack([r[k] for r in results[STEPS // 4 :]]).astype(np.float64) for k in results[0]
    }


def plain_steps(states):
    """Returns the updates without factors, computed from Adam's states."""
    adams = [(t + 1, s[-1]) for t, s in enumerate(states[1:])]
    return np_steps(
        [
            {
                k: (np.asarray(a.mu[k]) / (1 - B1**t))
                / (np.sqrt(np.asarray(a.nu[k]) / (1 - B2**t)) + EPS)
                for k in a.mu
            }
            for t, a in adams
        ]
    )


def along(found, exact):
    """Returns, by leaf, how long steps are along the exact ones."""
    return {k: (found[k] * exact[k]).sum() / np.square(exact[k]).sum() for k in exact}


@pytest.mark.parametrize(
    ("bits", "clip"),
    [
        (4, True),
        *(pytest.param(*x, marks=pytest.mark.slow) for x in [(3, True), (4, False), (3, False)]),
    ],
)
@pytest.mark.slow
def test_steps_are_as_long_along_exact_ones_as_these(bits, clip):
    tx = restore_step_size(chain(Quantize(bits, rotation=True), clip))
    results, states = trained(tx, varied(clip))
    exact, restored, plain = exact_steps(clip), np_steps(results), plain_steps(states)
    without, found = along(plain, exact), along(restored, exact)
    for k, ratio in found.items():
        off = OFF.get(k, (0.006, 0.01))[bits == 3]
        assert abs(ratio - 1) < off, (k, without[k], ratio)
        assert without[k] < 1 - 0.4 * NORMAL_ERROR[bits], (k, without[k])
    # The loss of independent ranks is known: one share per encoding; that of the first phase
    # counts (W - 1) / W times.
    error = NORMAL_ERROR[bits]
    expected = math.sqrt((1 - error) * (1 - error * (WORLD - 1) / WORLD))
    assert abs(without["Gaussian"] - expected) < 0.002
    # Where gradients persist, the errors of steps average out, and the updates' sizes match.
    sizes = [np.abs(x["persist"]).sum() for x in (plain, restored, exact)]
    assert sizes[0] < (1 - 1.5 * error) * sizes[2]
    assert abs(sizes[1] / sizes[2] - 1) < (0.003, 0.016)[bits == 3]


# The values that an owner adds up include codes of few levels, so the sum is not normal.
OFF_BY = {3: 0.015, 4: 0.005}
KNOWN = pytest.mark.parametrize(
    "reduction", [ScatterGather(), GatherSum()], ids=lambda r: r.shorthand
)


@pytest.mark.parametrize("bits", OFF_BY)
@pytest.mark.parametrize("world", [3, 4])
@KNOWN
def test_a_mean_keeps_the_stated_share_of_what_ranks_have(reduction, world, bits):
    code, x = Quantize(bits, rotation=True), normal_rows(world)
    mean = mean_of(x, code, mesh(world), "data", reduction=reduction)
    check_kept(mean, x, reduction.kept(NORMAL_ERROR[bits], world), OFF_BY[bits])


def test_a_mean_over_levels_keeps_what_the_reduction_across_keeps():
    x, two = normal_rows(8), Mesh(np.array(jax.devices()).reshape(4, 2), ("node", "local"))
    code = Quantize(3, rotation=True)
    mean = mean_of(x, code, two, ("node", "local"), levels=Levels("local"))
    check_kept(mean, x, ScatterGather().kept(NORMAL_ERROR[3], 4), OFF_BY[3])


def normal_rows(world):
    return np.random.default_rng(world).normal(size=(world, 512 * 96)).astype(np.float32)


def mean_of(x, code, mesh, axes, **options):
    f = jax.shard_map(
        lambda v: cgx_jax.pmean_compressed(v[0], axes, code, exchange="xla", **options),
        mesh=mesh,
        in_specs=P(axes),
        out_specs=P(),
    )
    return np.asarray(jax.jit(f)(x), np.float64)


def check_kept(mean, x, kept, off_by):
    exact = x.mean(0, dtype=np.float64)
    square = np.square(exact).sum()
    np.testing.assert_allclose((mean * exact).sum() / square, kept, rtol=off_by)
    np.testing.assert_allclose(np.square(mean).sum() / square, kept, rtol=off_by)


@KNOWN
@pytest.mark.slow
def test_the_noise_of_rows_and_columns_is_that_which_is_seen(reduction):
    rng = np.random.default_rng(0)
    sizes = 10 ** rng.uniform(-0.5, 0.5, (64, 1)) * 10 ** rng.uniform(-0.3, 0.3, 128)
    grads = {"w": (sizes * rng.normal(size=(120, WORLD, 64, 128))).astype(np.float32)}
    code = Quantize(3, rotation=True)
    _, states = trained(restore_step_size(chain(code, False, reduction)), grads)
    results, _ = run(sync(code, reduction=reduction), mesh(), grads)
    sent, kept = np.stack([r["w"] for r in results]), reduction.kept(NORMAL_ERROR[3], WORLD)
    seen = np.square(sent - kept * grads["w"].mean(1))[40:] / np.square(sent[40:]).mean()
    moments = states[-1][0].moments
    for axis, found in ((2, moments.noise_rows["w"]), (1, moments.noise_columns["w"])):
        expected = seen.mean((0, axis))
        np.testing.assert_allclose(np.mean(found), expected.mean(), rtol=0.1)
        assert np.corrcoef(found, expected)[0, 1] > 0.98


def test_noise_is_averaged_in_every_step_at_first_and_seldom_later():
    rng = np.random.default_rng(0)
    grads = {"w": rng.normal(size=(WARMUP + PERIOD + 4, WORLD, 32, 32)).astype(np.float32)}
    _, states = trained(restore_step_size(chain(ROTATED, False)), grads)
    kept = [np.asarray(s[0].moments.noise_rows["w"]) for s in states]
    moved = [t for t, (a, b) in enumerate(itertools.pairwise(kept)) if (a != b).any()]
    assert moved == [*range(WARMUP), *range(WARMUP, len(grads["w"]), PERIOD)]
    # If gradients stay similar, each later step counts less than the one before.
    changes = [np.abs(b - a).mean() for a, b in itertools.pairwise(kept)]
    assert np.mean(changes[20:32]) < 0.5 * np.mean(changes[1:4])


def test_every_rank_computes_the_same_factors():
    tx = restore_step_size(chain(Quantize(3, rotation=True), True))
    grads = {"w": gradients()["rows"][:6]}
    state = tx.init({"w": jnp.zeros(SHAPE)})

    def step(grads, state):
        updates, state = tx.update(jax.tree.map(lambda x: x[0], grads), state)
        return jax.tree.map(lambda x: x[None], updates), state

    f = jax.jit(
        jax.shard_map(
            step,
            mesh=mesh(),
            in_specs=(P("data"), P()),
            out_specs=(P("data"), P()),
            check_vma=False,
        )
    )
    with promotes():
        for t in range(6):
            updates, state = f(jax.tree.map(lambda x, t=t: x[t], grads), state)
    for x in (updates["w"], *jax.tree.leaves(state)):
        for shard in x.addressable_shards:
            rank = shard.data if x is not updates["w"] else shard.data[0]
            np.testing.assert_array_equal(rank, x if x is not updates["w"] else updates["w"][0])
    assert float(jnp.mean(state[0].moments.noise_rows["w"])) > 0


EXACT = Rules(
    [Rule(Identity(), path="exact"), Rule(Quantize(4), path="plain")],
    ROTATED,
    exact=[Rule(Identity(), path="number")],
)


def mixed(steps=4, dtype=np.float32, world=WORLD):
    rng = np.random.default_rng(2)
    shapes = {"exact": (32, 64), "plain": (32, 64), "rotated": (32, 64), "number": ()}
    return {k: rng.normal(size=(steps, world, *s)).astype(dtype) for k, s in shapes.items()}


@pytest.mark.parametrize("dtype", [np.float32, pytest.param(jnp.bfloat16, marks=pytest.mark.slow)])
def test_leaves_without_a_factor_keep_every_bit(dtype):
    grads = mixed(dtype=dtype)
    expected, _ = trained(chain(EXACT, False), grads)
    results, _ = trained(restore_step_size(chain(EXACT, False)), grads)
    for mine, other in zip(results, expected, strict=True):
        for k in ("exact", "plain", "number"):
            np.testing.assert_array_equal(mine[k], other[k])
        if dtype == np.float32:
            assert (mine["rotated"] != other["rotated"]).any()


def test_a_world_of_one_is_exact_and_keeps_every_bit():
    grads = {"rotated": mixed(world=1)["rotated"]}
    tx = optax.chain(sync(world=1), optax.scale_by_adam())
    expected, _ = trained(tx, grads)
    results, _ = trained(restore_step_size(tx), grads)
    for mine, other in zip(results, expected, strict=True):
        jax.tree.map(np.testing.assert_array_equal, mine, other)


# --- the rest of Optax and JAX.

OPTIMIZERS = {
    "adamw": lambda: optax.adamw(1e-2),
    "injected": lambda: optax.inject_hyperparams(optax.adam)(learning_rate=1e-2),
    "nadam": lambda: optax.nadam(1e-2),
    "radam": lambda: optax.radam(1e-2),
}
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("nadam", "radam")]


@pytest.mark.parametrize("name", ["adamw", "injected", *SLOW])
@pytest.mark.slow
def test_it_holds_what_keeps_adams_moments(name):
    grads = {"rotated": mixed(6)["rotated"]}
    tx = optax.chain(sync(), OPTIMIZERS[name]())
    expected, _ = trained(tx, grads)
    results, _ = trained(restore_step_size(tx), grads)
    ratios = [
        np.median(a["rotated"] / b["rotated"])
        for a, b in zip(results[3:], expected[3:], strict=True)
    ]
    assert all(1.005 < r < 1.1 for r in ratios), ratios


@pytest.mark.slow
def test_multi_steps_around_it_takes_a_step_in_k():
    grads = {"rotated": mixed(6)["rotated"]}
    mean = {"rotated": grads["rotated"].reshape(3, 2, *grads["rotated"].shape[1:]).mean(1)}
    inner = restore_step_size(optax.chain(sync(), optax.adam(1e-2)))
    results, _ = trained(
        optax.MultiSteps(inner, 2).gradient_transformation(), grads, check_vma=False
    )
    expected, _ = trained(inner, mean)
    for t, result in enumerate(results):
        if t % 2 == 0:
            assert not result["rotated"].any()
        else:
            np.testing.assert_allclose(
                result["rotated"], expected[t // 2]["rotated"], rtol=1e-3, atol=1e-5
            )


@pytest.mark.slow
def test_a_donating_jitted_loop_keeps_the_states_structure_and_compiles_once():
    tx = restore_step_size(chain(ROTATED, True))
    params = {"w": jnp.ones(SHAPE), "bias": jnp.ones(SHAPE[1])}
    state = tx.init(params)
    specs = cgx_jax.state_specs(state, "data")
    traced = []

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    @functools.partial(
        jax.shard_map, mesh=mesh(), in_specs=(P(), specs, P("data")), out_specs=(P(), specs)
    )
    def step(params, state, x):
        traced.append(None)
        varying = jax.tree.map(lambda p: jax.lax.pcast(p, "data", to="varying"), params)
        grads = jax.grad(lambda p: jnp.square(x @ p["w"].T).mean() + p["bias"].sum())(varying)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    like = jax.tree.map(jnp.shape, state)
    with promotes():
        for t in range(4):
            x = np.random.default_rng(t).normal(size=(WORLD, SHAPE[1])).astype(np.float32)
            params, state = step(params, state, x)
    assert len(traced) == 2  # what the first step returns is replicated, as all that follows
    assert jax.tree.map(jnp.shape, state) == like
    assert all(np.isfinite(p).all() for p in jax.tree.leaves(params))


@pytest.mark.slow
def test_a_step_that_is_not_finite_leaves_the_noise_as_it_was():
    grads = mixed(5)
    grads["rotated"][2, 1, 0, 0] = np.nan
    tx = restore_step_size(optax.chain(sync(), optax.apply_if_finite(optax.adam(1e-2), 5)))
    _, states = trained(tx, grads)
    before, after = (s[0].moments for s in states[2:4])
    jax.tree.map(np.testing.assert_array_equal, before, after)


@pytest.mark.usefixtures("no_cache")
@pytest.mark.slow
def test_noise_follows_the_bits_that_an_adaptive_policy_chooses():
    policy = Adaptive(
        LeastError(2.2),
        base=Uniform(ROTATED),
        candidates=[Quantize(b, rotation=True) for b in (2, 3, 4)],
        warmup=3,
        every=100,
        sample_every=1,
    )
    grads = {k: mixed(12)[k] for k in ("exact", "rotated")}
    tx = restore_step_size(chain(policy, False))
    _, states = trained(tx, grads, compiler=policy.jit)
    assert {r.bits for r in policy.history} == {(2, 2)}
    shares = [float(jnp.mean(s[0].moments.noise_rows["rotated"])) for s in states[1:]]
    assert max(shares[:6]) < 0.022 < 0.08 < shares[-1]


NO_SYNC = optax.chain(optax.scale_by_adam())
REFUSED = {
    "no sync_gradients": (lambda: NO_SYNC, r"has no state of sync_gradients, but must have one"),
    "two of them": (
        lambda: optax.chain(sync(), sync(), optax.adam(0.1)),
        r"has 2 states of sync_gradients",
    ),
    "no Adam": (lambda: optax.chain(sync(), optax.sgd(0.1)), r"has no state of Adam"),
    "two Adams": (
        lambda: optax.chain(sync(), optax.adam(0.1), optax.adam(0.1)),
        r"has 2 states of Adam",
    ),
    "no SecondMoment": (
        lambda: optax.chain(sync(precondition=None), optax.adam(0.1)),
        r"has no precondition, .* pass precondition=cgx_jax.SecondMoment\(\)",
    ),
    "MultiSteps between": (
        lambda: optax.chain(sync(), optax.MultiSteps(optax.adam(0.1), 2).gradient_transformation()),
        r"optax.MultiSteps after sync_gradients averages several means",
    ),
    "some leaves alone": (
        lambda: optax.chain(sync(), optax.masked(optax.adam(0.1), {"a": True, "b": False})),
        r"Adam's moments cover other leaves",
    ),
    "LAMB": (lambda: optax.chain(sync(), optax.lamb(0.1)), r"scale_by_trust_ratio scales a step"),
    "Adamax": (lambda: optax.chain(sync(), optax.adamax(0.1)), r"scale_by_adamax keeps the larg"),
    "Yogi": (lambda: optax.chain(sync(), optax.yogi(0.1)), r"scale_by_yogi keeps no mean square"),
    "injected LAMB": (
        lambda: optax.chain(sync(), optax.inject_hyperparams(optax.lamb)(learning_rate=0.1)),
        r"lamb scales a step by the norm",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_optimizers_that_cannot_work_are_refused_by_init(name):
    make, message = REFUSED[name]
    params = {"a": jnp.zeros((32, 32)), "b": jnp.zeros((32, 32))}
    with pytest.raises(ValueError, match=f"^restore_step_size: .*{message}"):
        restore_step_size(make()).init(params)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"policy": Quantize(4)}, r"the plan has .*Quantize\(bits=4, .*rotated codes that round"),
        ({"policy": Cast(jnp.bfloat16)}, r"the plan has .*Cast"),
        ({"policy": Identity()}, r"the plan has .*Identity"),
        ({"memory": ErrorFeedback()}, r"ErrorFeedback\(.* sends in later steps"),
        ({"reduction": "ring"}, "the reduction 'ring' encodes sums that are already rounded"),
        ({"reduction": Tree()}, "the reduction 'tree' encodes sums that are already rounded"),
    ],
    ids=str,
)
def test_reductions_of_which_no_leaf_has_a_factor_are_refused_while_tracing(options, message):
    tx = restore_step_size(optax.chain(sync(**options), optax.adam(0.1)))
    with pytest.raises(ValueError, match=f"^restore_step_size: .*{message}"):
        trained(tx, {"w": np.ones((1, WORLD, 32, 64), np.float32)})


def test_the_state_of_another_optimizer_is_refused_while_tracing():
    tx = restore_step_size(optax.chain(sync(), optax.adam(0.1)))
    other = optax.chain(sync(precondition=None), optax.adam(0.1))
    with pytest.raises(ValueError, match=r"^restore_step_size: .*no precondition"):
        trained(
            optax.GradientTransformation(other.init, tx.update),
            {"w": np.ones((1, WORLD, 32, 64), np.float32)},
        )


def test_what_is_no_transformation_is_refused():
    with pytest.raises(TypeError, match=r"^restore_step_size: .*is not an Optax transformation"):
        restore_step_size(optax.adam)
