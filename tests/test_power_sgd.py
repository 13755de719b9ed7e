"""Low-rank codes against Gram-Schmidt in fp64, and what holds at the edges of fp32."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import cgx_jax
from cgx_jax import ErrorFeedback, Plan, Rule, Rules, SecondMoment
from cgx_jax.compressors import PowerSGD, base
from cgx_jax.route.route import Options, route
from cgx_jax.route.run import Inputs
from cgx_jax.route.run import run as run_route
from hlo import collectives
from worlds import RANKS, normal, on_ranks, placed, ranks, sharded, stacked, stepper

MATRIX = (40, 60)


def low_rank(rank, *shape, seed=0):
    """Returns fp32 matrices with `rank` singular values of 1."""
    rng = np.random.default_rng(seed)
    sides = (int(np.prod(shape[:-1])), shape[-1])
    left, right = (np.linalg.qr(rng.normal(size=(n, rank)))[0] for n in sides)
    return (left @ right.T).reshape(shape).astype(np.float32)


def step_of(compressor, world, *, dtype=np.float32):
    """Returns a compiled step (f[world, ...], state) -> all ranks' (total, residual, state)."""

    def of_rank(x, state):
        plan = Plan.build(x[0], Rules((), compressor, exact=()))
        options = Options.resolve("test", "data", exchange="xla")
        made = run_route(route(options, plan), Inputs([x[0]], None, residual=True, states=[state]))
        return stacked((made.values[0], made.residuals[0], made.states[0]))

    run = sharded(of_rank, ranks(world), (RANKS, P()), RANKS, check_vma=False)

    def step(x, state):
        given = x.astype(dtype), jax.tree.map(np.asarray, state)
        total, lost, states = jax.tree.map(np.asarray, run(*given))
        for rows in (total, *jax.tree.leaves(states)):
            assert all(row.tobytes() == rows[0].tobytes() for row in rows), "ranks differ"
        return total[0], lost, jax.tree.map(lambda s: s[0], states)

    return step


@functools.partial(jax.jit, static_argnums=0)
def alone(compressor, x, state):
    """Takes a step of one rank; returns its total, its own part and the new state."""
    return base.alone(compressor.rounds(x, state, key=None, world=1))


@functools.partial(jax.jit, static_argnums=0)
def bound_of(compressor, x):
    return compressor.error_bound(x)


def steps_alone(compressor, gradients):
    state = compressor.init(gradients[0].shape, jnp.float32)
    for x in gradients:
        end = alone(compressor, x, state)
        state = end.state
    return end


def oracle(total, right):
    """Returns (P Pᵀ M, new Qᵀ) for the ranks' sum M and Qᵀ, by Gram-Schmidt in fp64."""
    left = np.array(total @ right.T)
    for i in range(left.shape[1]):
        for _ in range(2):
            left[:, i] -= left[:, :i] @ (left[:, :i].T @ left[:, i])
        left[:, i] /= np.linalg.norm(left[:, i])
    return left @ (left.T @ total), left.T @ total


@pytest.mark.usefixtures("unoptimized")
@pytest.mark.parametrize("world", [2, 3, 8])
@pytest.mark.parametrize("shape", [MATRIX, (3, 3, 8, 20), (90, 12)], ids=str)
@pytest.mark.quick("(3, 3, 8, 20)-3")
def test_every_step_is_that_of_the_oracle(shape, world):
    compressor = PowerSGD(3)
    step, state = step_of(compressor, world), compressor.init(shape, jnp.float32)
    right = np.asarray(state, np.float64)
    for i in range(4):
        x = normal(world, *shape, seed=i)
        total, lost, state = step(x, state)
        exact = x.astype(np.float64).sum(0)
        want, right = oracle(exact.reshape(-1, shape[-1]), right)
        np.testing.assert_allclose(total, want.reshape(shape), atol=2e-4)
        np.testing.assert_allclose(state, right, atol=1e-3)
        np.testing.assert_allclose(lost.astype(np.float64).sum(0), exact - total, atol=1e-4)
        for own, residual in zip(x, lost, strict=True):
            assert 0 < np.linalg.norm(residual) <= np.linalg.norm(own)
        right = np.asarray(state, np.float64)


@pytest.mark.parametrize("scale", [1e30, 1.0, 1e-30])
@pytest.mark.parametrize("rank", [1, 3, 4])
def test_a_matrix_of_no_higher_rank_is_exact_after_one_step(rank, scale):
    x = np.float32(scale) * low_rank(rank, 80, 50)
    end = steps_alone(PowerSGD(4), [x, x])
    for got in (end.total, end.own):
        np.testing.assert_allclose(np.asarray(got) / scale, x / scale, atol=2e-6)


def test_small_singular_values_are_kept_beside_large_ones():
    left, right = (np.linalg.qr(normal(n, 4, seed=n).astype(np.float64))[0] for n in (80, 50))
    x = ((left * [1, 1e-2, 1e-4, 1e-5]) @ right.T).astype(np.float32)
    end = steps_alone(PowerSGD(4), [x] * 10)
    np.testing.assert_allclose(end.total, x, atol=1e-6)


@pytest.mark.usefixtures("unoptimized")
def test_on_gradients_that_stay_it_finds_the_best_approximation():
    x = normal(*MATRIX)
    end = steps_alone(PowerSGD(4), [x] * 100)
    values = np.linalg.svd(x)[1]
    lost = np.linalg.norm(np.asarray(end.total) - x)
    assert lost == pytest.approx(np.linalg.norm(values[4:]), rel=2e-3)
    found = np.sort(np.linalg.norm(np.asarray(end.state), axis=1))[::-1]
    np.testing.assert_allclose(found, values[:4], rtol=0.02)


def test_a_column_that_died_comes_back():
    """On a gradient of rank 1 all columns except one vanish; then the gradient has rank 4."""
    x = low_rank(4, 80, 50)
    compressor = PowerSGD(4)
    state = steps_alone(compressor, [low_rank(1, 80, 50, seed=1)] * 3).state
    assert (np.abs(np.asarray(state)).max(axis=1) == 0).sum() == 3
    for _ in range(2):
        end = alone(compressor, x, state)
        state = end.state
    np.testing.assert_allclose(end.total, x, atol=2e-6)


EDGES = {
    "zeros": np.zeros(MATRIX),
    "all equal": np.full(MATRIX, 3.5),
    "one value": np.eye(*MATRIX) * (np.arange(MATRIX[0]) == 7)[:, None],
    "huge": normal(*MATRIX) * 1e30,
    "tiny": normal(*MATRIX) * 1e-30,
    "subnormal": np.full(MATRIX, 1e-40),
    "huge and tiny": normal(*MATRIX) * np.where(np.arange(MATRIX[1]) % 2, 1e18, 1e-18),
}


@pytest.mark.parametrize("name", EDGES)
def test_values_at_the_edges_keep_the_bound(name):
    x = EDGES[name].astype(np.float32)
    compressor = PowerSGD(4)
    for steps in (1, 3):
        end = steps_alone(compressor, [x] * steps)
        lost = np.abs(np.asarray(end.total, np.float64) - x)
        assert (lost <= np.asarray(bound_of(compressor, x), np.float64)).all()
        assert np.isfinite(end.state).all()
    if np.linalg.matrix_rank(x) <= 1:
        np.testing.assert_allclose(end.total, x, rtol=1e-5, atol=1e-37)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_value_that_is_not_finite_is_seen_and_its_state_mends(value):
    x = normal(*MATRIX)
    bad = x.copy()
    bad[3, 5] = value
    compressor = PowerSGD(4)
    end = alone(compressor, bad, compressor.init(MATRIX, jnp.float32))
    assert np.isnan(end.total).all()
    assert np.isinf(bound_of(compressor, bad)).all()
    # sync_gradients would keep the old state; without it, the next step starts afresh.
    after = alone(compressor, x, end.state)
    fresh = alone(compressor, x, compressor.init(MATRIX, jnp.float32))
    np.testing.assert_allclose(after.total, fresh.total, atol=1e-5)


@pytest.mark.parametrize("shape", [(), (300,), (0, 5), (1, 50), (8, 8), (2, 2, 3)], ids=str)
@pytest.mark.quick("()", "(0, 5)", "(8, 8)")
def test_leaves_that_would_not_shrink_are_sent_exactly(shape):
    compressor = PowerSGD(4)
    assert compressor.init(shape, jnp.float32) == ()
    assert not compressor.has_state(shape, jnp.float32)
    assert compressor.wire_bits(shape) == 32 * int(np.prod(shape))
    x = normal(2, *shape)
    total, lost, _ = step_of(compressor, 2)(x, ())
    np.testing.assert_array_equal(total, x[0] + x[1])
    np.testing.assert_array_equal(lost, np.zeros_like(x))
    np.testing.assert_allclose(compressor.error_bound(x[0]), np.abs(x[0]) * 2.0**-23)


@pytest.mark.parametrize(
    ("rank", "shape", "sides"),
    [
        (2, (3, 3, 64, 128), (576, 128)),
        (1, (3, 3), (3, 3)),
    ],
)
def test_the_code_is_two_factors_of_the_matrix_with_the_last_dimension_as_columns(
    rank, shape, sides
):
    compressor = PowerSGD(rank)
    assert compressor.wire_bits(shape) == 32 * rank * sum(sides)
    assert compressor.payload_bytes(shape) == 4 * rank * sum(sides)
    assert compressor.init(shape, jnp.float32).shape == (rank, sides[1])

    def sent(x, state):
        running = compressor.rounds(x, state, key=None, world=1)
        first = next(running)
        function, rows = running.send(first)
        return first, running.send(function(rows))

    arrays = jax.eval_shape(sent, jnp.ones(shape), compressor.init(shape, jnp.float32))
    sizes = [a.size * a.dtype.itemsize for a in jax.tree.leaves(arrays)]
    assert sum(sizes) == compressor.payload_bytes(shape)


def test_the_first_state_depends_on_the_shape_alone():
    one, other = (PowerSGD(4).init((30, 500), jnp.dtype(t)) for t in ("float32", "bfloat16"))
    np.testing.assert_array_equal(one, other)
    values = np.asarray(one)
    assert abs(values.mean()) < 0.1
    assert abs(values.std() - 1) < 0.1
    assert np.abs(np.corrcoef(values) - np.eye(4)).max() < 0.2


@pytest.mark.usefixtures("unoptimized")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.quick("bfloat16")
def test_leaves_of_16_bits_are_summed_in_fp32(dtype):
    compressor = PowerSGD(2)
    x = normal(2, *MATRIX).astype(jnp.dtype(dtype)).astype(np.float32)
    step, state = step_of(compressor, 2, dtype=jnp.dtype(dtype)), compressor.init(MATRIX, dtype)
    total, _, after = step(x, state)
    want, right = oracle(x.astype(np.float64).sum(0), np.asarray(state, np.float64))
    assert total.dtype == jnp.dtype(dtype)
    assert after.dtype == np.float32
    np.testing.assert_allclose(after, right, atol=1e-4)
    eps = float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(total.astype(np.float64), want, rtol=eps, atol=1e-4)


def test_a_number_of_values_is_no_matrix():
    assert PowerSGD(1).wire_bits(1000) == 32_000


def test_what_would_leave_float16_has_no_bound():
    x = jnp.full(MATRIX, 60_000, jnp.float16)
    assert np.isinf(bound_of(PowerSGD(1), x)).all()
    assert np.isfinite(bound_of(PowerSGD(1), x / 1000)).all()


@pytest.mark.usefixtures("unoptimized")
def test_a_batch_gives_what_single_calls_do():
    x = normal(3, *MATRIX)
    one = jax.jit(PowerSGD(2).approximate)
    np.testing.assert_allclose(jax.vmap(one)(x), np.stack([one(v) for v in x]), atol=1e-5)


def compiled_sum(tree, compressor, mesh):
    """Returns a sum's compiled program and the states that it takes."""
    plan = Plan.build([x[0] for x in tree], Rules((), compressor, exact=()))
    states = [compressor.init(x.shape[1:], x.dtype) for x in tree]

    def of_rank(xs, states):
        options = Options.resolve("test", "data", exchange="xla")
        inputs = Inputs([x[0] for x in xs], None, states=states)
        return run_route(route(options, plan), inputs).values

    return sharded(of_rank, mesh, (RANKS, P())).lower(tree, states).compile(), states


@pytest.mark.usefixtures("unoptimized")
def test_a_step_is_two_collectives_of_the_stated_bytes_and_a_loop_per_shape(mesh):
    """Exact leaves travel in the first round. A loop takes a third of a second to compile."""
    shapes = (MATRIX, MATRIX, (30, 50), (3, 3))
    tree, compressor = [normal(8, *shape, seed=i) for i, shape in enumerate(shapes)], PowerSGD(2)
    step, states = compiled_sum(tree, compressor, mesh)
    text = step.as_text()
    assert len(re.findall(r" while\(", text)) == 2
    found = collectives(text)
    sizes = [2 * (40 + 40 + 30) + 9, 2 * (60 + 60 + 50)]
    assert {(c.op, c.dtype) for c in found} == {("all-reduce", "f32")}
    assert sorted(c.nbytes for c in found) == sorted(4 * n for n in sizes)
    assert 4 * sum(sizes) == sum(compressor.payload_bytes(shape) for shape in shapes)
    for x, right, total in list(zip(tree, states, step(tree, states), strict=True))[:3]:
        want = oracle(x.sum(0).astype(np.float64), np.asarray(right, np.float64))[0]
        np.testing.assert_allclose(total, want, atol=2e-4)


@pytest.mark.usefixtures("unoptimized")
def test_feedback_in_units_closes_the_account():
    """In every step, received plus remembered values add up to the given ones."""
    mesh = ranks(2)
    how = {"memory": ErrorFeedback(), "precondition": SecondMoment(), "mesh": mesh}
    tx = cgx_jax.sync_gradients("data", PowerSGD(2), exchange="xla", **how)
    state = placed(tx.init(jnp.zeros(MATRIX)), mesh)
    step = stepper(tx, mesh, state)
    given, received = np.zeros(MATRIX), np.zeros(MATRIX)
    for i in range(6):
        grads = normal(2, *MATRIX, seed=i)
        mean, state = step(grads, state)
        given += grads.astype(np.float64).mean(0)
        received += np.asarray(mean)
    kept = np.asarray(state.memory[0], np.float64).mean(0)
    np.testing.assert_allclose(received + kept, given, atol=1e-4)
    assert np.abs(received - given).max() > 0.01


def test_each_leaf_has_the_rank_of_its_rule():
    policy = Rules([Rule(PowerSGD(1), path="conv")], PowerSGD(3))
    params = {"conv": jnp.zeros((3, 3, 8, 16)), "dense": jnp.zeros(MATRIX), "bias": jnp.zeros(60)}
    state = jax.eval_shape(cgx_jax.sync_gradients("data", policy, exchange="xla").init, params)
    assert {k: np.shape(s) for k, s in state.codes.shared[0].items()} == {
        "conv": (1, 16),
        "dense": (3, 60),
        "bias": (0,),
    }


@pytest.mark.slow
def test_policies_are_told_what_each_rank_loses():
    """The squared errors of several candidates are those of each candidate's first step."""
    x = low_rank(3, *MATRIX) + 0.01 * normal(*MATRIX)
    candidates = [PowerSGD(1), PowerSGD(3)]
    got = PowerSGD.squared_errors(candidates, jnp.asarray(x)[None], np.array([x.size]))
    want = [np.square(np.asarray(c.approximate(jnp.asarray(x))) - x).sum() for c in candidates]
    np.testing.assert_allclose(got, [want], rtol=1e-4)
    assert got[0, 1] < 0.5 * got[0, 0]


@pytest.mark.parametrize(
    ("rank", "error", "says"),
    [
        (0, ValueError, "PowerSGD: rank=0 must be at least 1"),
        (-3, ValueError, "PowerSGD: rank=-3 must be at least 1"),
        (1.5, TypeError, r"PowerSGD: rank=1.5 is not an integer; pass a Python int"),
    ],
)
def test_a_wrong_rank_is_refused(rank, error, says):
    with pytest.raises(error, match=says):
        PowerSGD(rank)


def test_a_call_that_keeps_nothing_refuses_matrices_and_takes_vectors(mesh):
    policy = Rules((), PowerSGD(), exact=())
    call = lambda x: cgx_jax.psum_compressed(x, "data", policy, exchange="xla")  # noqa: E731
    f = on_ranks(call, mesh, out=P())
    with pytest.raises(ValueError, match=r"^psum_compressed: PowerSGD\(rank=4\).*sync_gradients"):
        jax.eval_shape(f, jnp.ones((8, *MATRIX)))
    np.testing.assert_array_equal(f(jnp.ones((8, 60))), np.full(60, 8.0))
