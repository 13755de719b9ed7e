"""Preconditioned compression: errors scale with each value's size, and nothing else changes."""

import functools
import itertools

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import cgx_jax
from cgx_jax import Cast, ErrorFeedback, Identity, Plan, Quantize, Rule, Rules, SecondMoment
from cgx_jax.transforms.precondition import PERIOD, WARMUP, squares_of
from optax_steps import run
from reducing import pmean_with_residual
from worlds import first, ranks, sharded

pytestmark = pytest.mark.usefixtures("unoptimized")

WORLD = 3
MESH = ranks(WORLD)


def rules(compressor):
    return Rules((), compressor, exact=[Rule(Identity(), path="bias")])


def gradients(steps, seed=0, dtype=np.float32):
    """Gradients of every rank and step; sizes differ by rows and columns, and stay constant."""
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


@functools.cache
def transformation(compressor, precondition, memory=None):
    how = {"memory": memory, "precondition": precondition, "mesh": MESH, "exchange": "xla"}
    return cgx_jax.sync_gradients("data", rules(compressor), **how), MESH


class Oracle:
    """Units of a leaf in NumPy, fp64, updated in every step."""

    def __init__(self, precondition, shape):
        self.precondition, self.shape = precondition, shape
        self.steps = []  # shares of rows and columns, and the mean square

    def weights(self):
        """Returns Adam's weights: a step counts by its mean square, with decay."""
        ages = np.arange(len(self.steps))[::-1]
        return np.array([step[2] for step in self.steps]) * self.precondition.decay**ages

    def shrunk(self, kind):
        seen, weights = np.stack([step[kind] for step in self.steps]), self.weights()
        average = np.average(seen, 0, weights)
        if len(seen) < 2:
            return np.ones_like(average)
        count = weights.sum() ** 2 / np.square(weights).sum()
        single_steps = np.average(np.square(seen).mean(1), 0, weights)
        noise = (single_steps - np.square(average).mean()) / (count - 1) * (1 + 2 / (count - 1))
        kept = np.clip(1 - noise / np.square(average - 1).mean(), 0, 1)
        return 1 + kept * (average - 1)

    def matrix(self):
        return np.prod(self.shape[:-1], dtype=int), self.shape[-1]

    def units(self):
        """Returns what each value is divided by; the smallest unit is 1."""
        if not self.steps:
            return np.ones(self.shape)
        floor = self.precondition.floor**2
        square = np.outer(*(self.shrunk(kind) + floor for kind in (0, 1)))
        unit = np.sqrt(square).reshape(self.shape)
        return unit / unit.min()

    def update(self, mean):
        square = np.square(mean.astype(np.float64))
        share = square / square.mean()
        matrix = share.reshape(self.matrix())
        self.steps.append((matrix.mean(1), matrix.mean(0), square.mean()))


@pytest.mark.parametrize("compressor", [Quantize(4), Cast(jnp.bfloat16)], ids=str)
@pytest.mark.quick("Quantize*")
@pytest.mark.usefixtures("optimized")
def test_a_step_is_the_mean_compressed_in_units_from_the_steps_before(compressor):
    grads, precondition = gradients(5), SecondMoment(0.99, 0.03)
    results, _ = run(*transformation(compressor, precondition), grads)
    oracles = {k: Oracle(precondition, grads[k].shape[2:]) for k in ("w", "v")}

    def mean(tree):
        return cgx_jax.pmean_compressed(first(tree), "data", rules(compressor), exchange="xla")

    plain = sharded(mean, MESH, P("data"))
    for t, result in enumerate(results):
        units = {k: oracle.units() for k, oracle in oracles.items()}
        assert t < 2 or all(u.max() > 3 for u in units.values())
        divided = {k: (grads[k][t] / units.get(k, 1)).astype(np.float32) for k in grads}
        expected = plain(divided)
        np.testing.assert_array_equal(result["bias"], expected["bias"])
        for k, unit in units.items():
            found = result[k] / unit
            # A value halfway between two levels may round to either; such values are few.
            near = np.isclose(found, expected[k], rtol=1e-4, atol=2e-6 * np.abs(found).max())
            assert near.mean() > 0.995, (t, k)
            oracles[k].update(result[k])


@pytest.mark.usefixtures("optimized")
def test_gradients_of_another_size_take_the_same_codes():
    grads = gradients(3)
    tx = transformation(Quantize(4), SecondMoment())
    results, _ = run(*tx, grads)
    for exponent in (-20, 16):
        scaled = jax.tree.map(lambda g, e=exponent: np.float32(2.0**e) * g, grads)
        for mine, other in zip(results, run(*tx, scaled)[0], strict=True):
            for k, a in mine.items():
                np.testing.assert_array_equal(np.ldexp(a, exponent), other[k])


def test_feedback_loses_nothing_in_other_units_either():
    grads = gradients(12, dtype=jnp.bfloat16)
    tx, mesh = transformation(Quantize(3), SecondMoment(), ErrorFeedback())
    results, states = run(tx, mesh, grads)
    (memory,) = states[-1].memory
    for k, g in grads.items():
        given = g.astype(np.float64).mean(1).sum(0)
        seen = np.sum([r[k].astype(np.float64) for r in results], axis=0)
        kept = np.asarray(memory[k], np.float64).mean(0)
        size = np.abs(g.astype(np.float64)).max((0, 1))  # of each value: rounding is in proportion
        reach = size + np.abs(seen - given) + np.abs(np.asarray(memory[k], np.float64)).max(0)
        exact = k == "bias"  # the sum of an exact leaf is rounded to its dtype
        bound = 12 * 8 * float(jnp.finfo(jnp.bfloat16 if exact else np.float32).eps) * reach
        assert (np.abs(seen + kept - given) <= bound).all(), k
        assert exact or kept.any()


def test_a_number_among_the_parameters_has_moments_too():
    w = gradients(2)["w"]
    tx, mesh = transformation(Quantize(4), SecondMoment(), ErrorFeedback())

    def steps(w):
        state, means = tx.init({"w": w[0, 0], "number": 2.0}), []
        for x in w:
            mean, state = tx.update({"w": x[0], "number": 2.0}, state)
            means.append(mean["number"])
        return means

    assert sharded(steps, mesh, P(None, "data"), check_vma=False)(w) == [2, 2]
    whole = tx.init({"w": np.zeros(w.shape[2:], np.float32), "number": 2.0})
    assert whole.memory[0]["number"].shape == (WORLD,)


def test_squares_that_overflow_and_values_that_vanish_leave_a_leaf_that_can_be_divided():
    for size in (1e30, 1e-30, 0):
        grads = jax.tree.map(lambda g, s=size: (g * s).astype(np.float32), gradients(3))
        results, states = run(*transformation(Quantize(4), SecondMoment()), grads)
        for x in jax.tree.leaves((results, states[-1].moments)):
            assert np.isfinite(x).all()
        error = np.abs(results[2]["w"] - grads["w"][2].mean(0)).max()
        assert error <= 0.2 * np.abs(grads["w"][2]).max()


@pytest.mark.usefixtures("no_cache")
def test_an_adaptive_policy_measures_errors_in_the_same_units():
    policy = cgx_jax.Adaptive(base=rules(Quantize(4)), warmup=100, sample_every=1)
    precondition = SecondMoment()
    how = {"precondition": precondition, "mesh": MESH, "exchange": "xla"}
    tx, grads = cgx_jax.sync_gradients("data", policy, **how), gradients(4)
    results, states = run(tx, MESH, grads, compiler=policy.jit)
    oracle = Oracle(precondition, grads["w"].shape[2:])
    for result in results[:3]:
        oracle.update(result["w"])
    units = oracle.units()
    ages = precondition.decay ** np.arange(3)[::-1]
    mean_square = oracle.weights().sum() / ages.sum()
    size = np.sqrt(mean_square / np.square(units).mean())
    expected = np.square(grads["w"][3] / (units * size)).sum() / WORLD
    before, last = (s.statistics.square[1] for s in states[-2:])
    found = last - policy.decay * before
    np.testing.assert_allclose(found, expected, rtol=1e-3)  # five runs are all of this leaf


def normals(rng, steps, draws):
    return rng.normal(size=(draws, steps, WORLD, 64, 64)).astype(np.float32)


def sized(rng, *shape):
    return (10 ** rng.uniform(-1, 1, shape)).astype(np.float32)


DISTRIBUTIONS = {
    "normal": normals,
    "cubes of normals": lambda *a: normals(*a) ** 3,
    "Student's t": lambda rng, steps, draws: rng.standard_t(
        2.5, (draws, steps, WORLD, 64, 64)
    ).astype(np.float32),
    "ranks that agree": lambda *a: (x := normals(*a))[:, :, :1] + np.float32(0.3) * x,
    "rows in one step of ten": lambda rng, steps, draws: (
        normals(rng, steps, draws) * (rng.uniform(size=(draws, steps, 1, 64, 1)) < 0.1)
    ),
    "rows and columns": lambda rng, *a: normals(rng, *a) * sized(rng, 64, 1) * sized(rng, 64),
    "values": lambda rng, *a: normals(rng, *a) * sized(rng, 64, 64),
}
# If sizes differ permanently: the largest error relative to no units, once the sizes are known.
GAINS = {"rows and columns": 0.9}


@pytest.mark.parametrize("rotation", [False, True], ids=["plain", "rotated"])
@pytest.mark.parametrize("name", DISTRIBUTIONS)
@pytest.mark.quick("rows and columns-plain")
def test_no_step_errs_more_than_without_it(name, rotation):
    draws, steps = 8, 12
    grads = DISTRIBUTIONS[name](np.random.default_rng(1), steps, draws)
    grads /= np.linalg.norm(grads, axis=(3, 4), keepdims=True)  # clipped
    plan = Plan.build({"w": grads[0, 0, 0]}, Quantize(4, rotation=rotation))

    def errors(precondition, grads):
        shape = grads.shape[2:]

        def step(state, now):
            t, rank_gradients = now
            units = precondition and precondition.units(state, [shape], [0])

            def reduce(x):
                how = {"units": units, "exchange": "xla", "residual": False}
                return pmean_with_residual("test", {"w": x}, "data", plan, **how)[0]["w"]

            mean = jax.vmap(reduce, axis_name="data")(rank_gradients)[0]
            exact = rank_gradients.mean(0)
            if precondition is not None:
                state = precondition.update(state, [shape], squares_of({0: mean}), t)
            return state, jnp.linalg.norm(mean - exact) / jnp.linalg.norm(exact)

        state = None if precondition is None else precondition.init(grads[0, 0])
        return jax.lax.scan(step, state, (jnp.arange(steps), grads))[1]

    def of_each_step(precondition):
        run = jax.jit(jax.vmap(functools.partial(errors, precondition)))
        return np.asarray(run(grads))

    # Errors of plain buckets depend on few extremes, so the ratio of one draw says little.
    ratio = np.exp(np.log(of_each_step(SecondMoment()) / of_each_step(None)).mean(0))
    assert (ratio < (1.02 if rotation else 1.1)).all(), ratio
    assert ratio.mean() < 1.01
    assert ratio[4:].mean() < GAINS.get(name, 1.01)


def test_units_are_updated_in_every_step_at_first_and_seldom_later():
    _, states = run(*transformation(Quantize(4), SecondMoment()), gradients(2 * PERIOD + 4))
    weights = [float(s.moments.weights[s.moments.lines["w"], 0]) for s in states]
    moved = [t for t, (a, b) in enumerate(itertools.pairwise(weights)) if a != b]
    assert moved == [*range(WARMUP), *range(WARMUP, len(weights) - 1, PERIOD)]


def test_moments_are_as_small_as_rows_and_columns_and_few():
    params = {f"w{i}": jnp.zeros((3, 4 + i, 50)) for i in range(4)} | {"long": jnp.zeros((300, 9))}
    params |= {"vector": jnp.zeros(7), "scalar": jnp.zeros(()), "empty": jnp.zeros((0, 3))}
    moments = cgx_jax.sync_gradients("data", precondition=SecondMoment()).init(params).moments
    # Two vectors a leaf, each in lines of its own, or up to a multiple of 16.
    assert moments.shares.shape == (4 * (1 + 2) + (10 + 1) + 3 * (1 + 1), 32)
    assert moments.factors.shape == (2, (16 + 16 + 32 + 32) + 4 * 64 + (304 + 16) + 3 * (16 + 16))
    assert moments.weights.shape == (len(params), 3)
    assert moments.lines == {name: i for i, name in enumerate(sorted(params))}


UNITS = SecondMoment()
CHANGED = {  # what a state says that other options have made
    r"holds no moments, but precondition=SecondMoment\(.*init": ((None,), (UNITS,)),
    r"holds moments, but precondition=None": ((UNITS,), (None,)),
    r"holds 0 arrays per leaf, but memory=ErrorFeedback\(.*init": (
        (None,),
        (None, ErrorFeedback()),
    ),
}


@pytest.mark.parametrize("message", CHANGED)
def test_a_state_of_other_options_is_refused(message):
    (other, _), (tx, mesh) = (transformation(Quantize(4), *given) for given in CHANGED[message])
    with pytest.raises(ValueError, match=message):
        run(optax.GradientTransformation(other.init, tx.update), mesh, gradients(1))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"decay": 1.0}, r"decay=1.0 is outside \(0, 1\); use the optimizer's own"),
        ({"decay": 0}, r"decay=0 is outside"),
        ({"floor": 0}, r"floor=0 is outside \(0, 1\]; 0.1 is the default"),
        ({"floor": float("nan")}, r"floor=nan is outside"),
    ],
)
def test_wrong_preconditions_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        SecondMoment(**arguments)
