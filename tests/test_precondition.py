"""Preconditioned compression: errors in units of each value's size, nothing else changed."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import cgx_jax
from cgx_jax import Cast, ErrorFeedback, Identity, Quantize, Rule, Rules, SecondMoment
from optax_steps import run

WORLD = 3
EXACT_BIAS = [Rule(Identity(), path="bias")]


def gradients(steps, seed=0, dtype=np.float32):
    """Of every rank and step; sizes of values differ by rows and columns, and stay."""
    rng = np.random.default_rng(seed)
    sizes = {
        "w": 10.0 ** rng.uniform(-1, 1, (40, 1)) * 10.0 ** rng.uniform(-1, 0, 64),
        "v": 10.0 ** rng.uniform(-1, 1, (3, 5, 2, 1)) * 10.0 ** rng.uniform(-1, 0, 77),
        "bias": np.ones(30),
    }
    return {
        k: (size * rng.normal(size=(steps, WORLD, *size.shape))).astype(dtype)
        for k, size in sizes.items()
    }


def transformation(compressor, precondition, memory=None):
    mesh = Mesh(np.array(jax.devices()[:WORLD]), ("data",))
    policy = Rules((), compressor, exact=EXACT_BIAS)
    tx = cgx_jax.sync_gradients("data", policy, memory=memory, precondition=precondition, mesh=mesh)
    return tx, mesh


def oracle(square, precondition, shape):
    """(divisors, unit) of a mean of squares in NumPy; fp64, so that it is right to fp32."""
    if precondition.factored:
        rows = square.reshape(-1, shape[-1])
        square = np.outer(rows.mean(1), rows.mean(0)).reshape(shape) / max(rows.mean(), 1e-300)
    unit = precondition.floor * np.sqrt(square.mean())
    unit = unit if unit > 0 else 1.0
    return 1 + np.sqrt(square) / unit, unit


@pytest.mark.parametrize("precondition", [SecondMoment(), SecondMoment(0.9, 0.1, factored=True)])
@pytest.mark.parametrize("compressor", [Quantize(4), Cast(jnp.bfloat16)], ids=str)
def test_a_step_is_the_mean_compressed_over_divisors_from_the_steps_before(
    compressor, precondition
):
    grads = gradients(4)
    results, _ = run(*transformation(compressor, precondition), grads)
    _, mesh = transformation(compressor, None)
    square = {k: np.zeros(g.shape[2:]) for k, g in grads.items()}

    def mean(tree):
        policy = Rules((), compressor, exact=EXACT_BIAS)
        return cgx_jax.pmean_compressed(jax.tree.map(lambda x: x[0], tree), "data", policy)

    plain = jax.jit(jax.shard_map(mean, mesh=mesh, in_specs=P("data"), out_specs=P()))
    for t, result in enumerate(results):
        divisors = {k: oracle(square[k], precondition, square[k].shape)[0] for k in ("w", "v")}
        divided = {k: (grads[k][t] / divisors.get(k, 1)).astype(np.float32) for k in grads}
        expected = plain(divided)
        np.testing.assert_array_equal(result["bias"], expected["bias"])
        for k, divisor in divisors.items():
            found = result[k] / divisor
            # A value that lies between two levels may fall to either; few do.
            near = np.isclose(found, expected[k], rtol=2e-5, atol=1e-6 * np.abs(found).max())
            assert near.mean() > 0.999, (t, k)
            mine = precondition.decay * square[k] + (1 - precondition.decay) * result[k] ** 2.0
            square[k] = mine


def small_to_large(results, grads):
    """Relative errors of the quarter of smallest values over those of the largest, by leaf."""
    ratios = []
    for k in ("w", "v"):
        means = grads[k].mean(1)
        size = np.sqrt(np.square(means).mean(0)).ravel()
        wrong = (np.stack([r[k] for r in results]) - means)[len(means) // 2 :]
        error = np.sqrt(np.square(wrong).mean(0)).ravel() / size
        small, *_, large = np.array_split(error[np.argsort(size)], 4)
        ratios.append(np.median(small) / np.median(large))
    return np.array(ratios)


@pytest.mark.parametrize("compressor", [Quantize(4), Quantize(3, rotation=True)], ids=str)
@pytest.mark.parametrize("factored", [False, True])
def test_small_values_lose_no_larger_a_share_than_large_ones(compressor, factored):
    grads = gradients(40)
    precondition = SecondMoment(0.9, 1e-3, factored)
    results, _ = run(*transformation(compressor, precondition), grads)
    assert (small_to_large(results, grads) < 2).all()
    results, _ = run(*transformation(compressor, None), grads)
    assert (small_to_large(results, grads) > 20).all()


@pytest.mark.parametrize("factored", [False, True])
def test_gradients_of_another_size_take_the_same_codes(factored):
    grads = gradients(3)
    tx = transformation(Quantize(4), SecondMoment(factored=factored))
    results, _ = run(*tx, grads)
    for exponent in (-20, 16):
        scaled = jax.tree.map(lambda g, e=exponent: np.float32(2.0**e) * g, grads)
        for mine, other in zip(results, run(*tx, scaled)[0], strict=True):
            jax.tree.map(
                lambda a, b, e=exponent: np.testing.assert_array_equal(np.ldexp(a, e), b),
                mine,
                other,
            )


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
def test_feedback_loses_nothing_in_other_units_either(dtype):
    grads = gradients(12, dtype=dtype)
    tx, mesh = transformation(Quantize(3), SecondMoment(), ErrorFeedback())
    results, states = run(tx, mesh, grads)
    (memory,) = states[-1].memory
    for k, g in grads.items():
        given = g.astype(np.float64).mean(1).sum(0)
        seen = np.sum([r[k].astype(np.float64) for r in results], axis=0)
        kept = np.asarray(memory[k], np.float64).mean(0)
        size = np.abs(g.astype(np.float64)).max((0, 1))  # of each value: rounding is in proportion
        reach = size + np.abs(seen - given) + np.abs(np.asarray(memory[k], np.float64)).max(0)
        bound = 12 * 8 * float(jnp.finfo(dtype).eps) * reach
        assert (np.abs(seen + kept - given) <= bound).all(), k
        assert k == "bias" or kept.any()


def test_world_of_one_and_the_first_step_are_as_without_it():
    grads = gradients(2)
    results, states = run(*transformation(Quantize(2), SecondMoment()), grads)
    plain, _ = run(*transformation(Quantize(2), None), grads)
    jax.tree.map(np.testing.assert_array_equal, results[0], plain[0])
    assert (results[1]["w"] != plain[1]["w"]).any()
    assert jax.tree.map(jnp.shape, states[-1].moments) == (
        {"w": (40, 64), "v": (3, 5, 2, 77), "bias": (30,)},
    )
    alone = jax.tree.map(lambda g: g[:, :1], grads)
    tx = cgx_jax.sync_gradients("data", Quantize(2), precondition=SecondMoment())
    results, _ = run(tx, Mesh(np.array(jax.devices()[:1]), ("data",)), alone)
    for t in range(2):
        jax.tree.map(lambda r, g, t=t: np.testing.assert_array_equal(r, g[t, 0]), results[t], alone)


@pytest.mark.parametrize("factored", [False, True])
def test_a_step_that_is_not_finite_never_happened(factored):
    grads = gradients(3)
    grads["w"][1, 2, 0, 0] = np.nan
    tx, mesh = transformation(Quantize(4), SecondMoment(factored=factored), ErrorFeedback())
    results, (_, first, second, third) = run(tx, mesh, grads)
    assert np.isnan(results[1]["w"]).any()
    for part in ("memory", "moments"):
        jax.tree.map(np.testing.assert_array_equal, getattr(first, part), getattr(second, part))
    without = jax.tree.map(lambda g: g[[0, 2]], grads)
    expected, (*_, last) = run(tx, mesh, without)
    jax.tree.map(np.testing.assert_array_equal, results[2], expected[1])
    jax.tree.map(np.testing.assert_array_equal, third.moments, last.moments)


def test_squares_that_overflow_and_values_that_vanish_leave_a_leaf_that_can_be_divided():
    for size in (1e30, 1e-30, 0):
        grads = jax.tree.map(lambda g, s=size: (g * s).astype(np.float32), gradients(3))
        results, states = run(*transformation(Quantize(4), SecondMoment()), grads)
        for x in jax.tree.leaves((results, states[-1].moments)):
            assert np.isfinite(x).all()
        error = np.abs(results[2]["w"] - grads["w"][2].mean(0)).max()
        assert error <= 0.2 * np.abs(grads["w"][2]).max()


def test_float16_does_not_overflow_where_a_value_grows():
    grads = gradients(2, dtype=np.float16)
    grads["w"][1, :, 0, 0] = 6e4  # thousands of times what the leaf's values were
    results, _ = run(*transformation(Quantize(8), SecondMoment()), grads)
    assert np.isfinite(results[1]["w"]).all()
    assert abs(float(results[1]["w"][0, 0]) - 6e4) < 1e3


def test_an_adaptive_policy_measures_errors_in_the_same_units():
    policy = cgx_jax.Adaptive(
        base=Rules((), Quantize(4), exact=EXACT_BIAS), warmup=100, sample_every=1
    )
    precondition = SecondMoment(decay=0.0)
    mesh = Mesh(np.array(jax.devices()[:WORLD]), ("data",))
    tx = cgx_jax.sync_gradients("data", policy, precondition=precondition, mesh=mesh)
    grads = gradients(2)
    (first, _), (_, after, last) = run(tx, mesh, grads, compiler=policy.jit)
    square = np.square(np.asarray(first["w"], np.float64))
    divisors, unit = oracle(square, precondition, square.shape)
    expected = np.square(grads["w"][1] / (divisors * unit)).sum() / WORLD
    found = last.statistics.square[1] - policy.decay * after.statistics.square[1]
    np.testing.assert_allclose(found, expected, rtol=1e-4)  # five runs are all of this leaf


@pytest.mark.parametrize(
    ("wrap", "factored"),
    [
        ("chain", False),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [("chain", True), ("multi_steps", False), ("apply_if_finite", True)]
        ),
    ],
)
def test_it_composes_with_optax_and_adam_comes_near_its_exact_steps(wrap, factored):
    grads = gradients(24)
    mesh = Mesh(np.array(jax.devices()[:WORLD]), ("data",))

    def make(precondition, compressor):
        policy = Rules((), compressor, exact=EXACT_BIAS)
        sync = cgx_jax.sync_gradients("data", policy, precondition=precondition, mesh=mesh)
        tx = optax.chain(sync, optax.scale_by_adam())
        if wrap == "multi_steps":
            return optax.MultiSteps(tx, 2).gradient_transformation()
        return optax.apply_if_finite(tx, 3) if wrap == "apply_if_finite" else tx

    def steps(*args):
        with jax.numpy_dtype_promotion("standard"):  # optax divides by an integer
            # The wrappers' branches return gradients and their mean, which are of two types.
            results, _ = run(make(*args), mesh, grads, check_vma=wrap == "chain")
        return np.stack([r["w"] for r in results[12:]])

    exact = steps(None, Identity())
    with_it, without = (
        np.linalg.norm(steps(precondition, Quantize(4)) - exact)
        for precondition in (SecondMoment(0.9, 1e-3, factored), None)
    )
    assert with_it < 2 / 3 * without


def test_factored_moments_are_as_small_as_rows_and_columns():
    params = {"w": jnp.zeros((3, 4, 50)), "vector": jnp.zeros(7), "scalar": jnp.zeros(())}
    tx = cgx_jax.sync_gradients("data", precondition=SecondMoment(factored=True))
    rows, columns = jax.tree.map(jnp.shape, tx.init(params).moments)
    assert rows == {"w": (12,), "vector": (7,), "scalar": (1,)}
    assert columns == {"w": (50,), "vector": (1,), "scalar": (1,)}


@pytest.mark.parametrize(
    ("theirs", "mine", "message"),
    [
        ({}, {"precondition": SecondMoment()}, r"holds 0 arrays a leaf where SecondMoment\(.* 1;"),
        ({"precondition": SecondMoment(factored=True)}, {"precondition": SecondMoment()}, "2 arr"),
        ({"precondition": SecondMoment()}, {}, r"holds 1 arrays a leaf where None keeps 0"),
        ({}, {"memory": ErrorFeedback()}, r"holds 0 arrays a leaf where ErrorFeedback\(.*init"),
    ],
)
def test_a_state_of_other_options_is_refused(theirs, mine, message):
    tx, mesh = transformation(Quantize(4), mine.get("precondition"), mine.get("memory"))
    other, _ = transformation(Quantize(4), theirs.get("precondition"), theirs.get("memory"))
    with pytest.raises(ValueError, match=message):
        run(optax.GradientTransformation(other.init, tx.update), mesh, gradients(1))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"decay": 1.0}, r"decay=1.0 is outside \[0, 1\); use the optimizer's own"),
        ({"decay": -0.1}, r"decay=-0.1 is outside"),
        ({"floor": 0}, r"floor=0 must be a positive number; 0.03"),
        ({"floor": float("nan")}, r"floor=nan must be"),
    ],
)
def test_wrong_preconditions_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        SecondMoment(**arguments)
