"""Statistics measured in the step, against NumPy, the kernels and the other ranks."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import worlds
from cgx_jax import Cast, Identity, Quantize
from cgx_jax.axes import Axes
from cgx_jax.compressors import Compressor
from cgx_jax.policies import statistics
from cgx_jax.policies.statistics import Sampler, Statistics, squared_errors
from mean_compressor import Mean

pytestmark = pytest.mark.usefixtures("unoptimized")

TWO = (Quantize(2), Quantize(8))  # quicker to compile, where averages matter and widths do not


def measure(sampler, leaves, steps=1, decay=0.5, world=2):
    """Averages after `steps` observations of leaves [world, ...], and each rank's own state."""
    mesh = worlds.ranks(world)

    def observe(old, leaves):
        axes = Axes.resolve("test", "data", None)
        new = sampler.observe(old, [x[0] for x in leaves], axes, decay)
        every = jax.tree.map(lambda x: jax.lax.pcast(x, "data", to="varying")[None], new)
        return new, every

    observe = worlds.sharded(observe, mesh, (P(), P("data")), (P(), P("data")))
    state = Statistics.zeros(len(leaves), len(sampler.candidates))
    state = jax.device_put(state, NamedSharding(mesh, P()))  # as later steps get it
    for t in range(steps):
        state, ranks = observe(state, [x if steps == 1 else x[t] for x in leaves])
    for x in jax.tree.leaves(ranks):
        np.testing.assert_array_equal(x[0], x[-1])
    return state._asdict() | statistics.mean(state)


@functools.partial(jax.jit, static_argnums=1)
def coded(x, compressor, key):
    return compressor.decode(compressor.encode(x, key=key), x.shape, x.dtype)


def true_error(x, compressor, key=None):
    decoded = coded(x, compressor, key)
    return float(((np.asarray(decoded, np.float64) - np.asarray(x, np.float64)) ** 2).sum())


@pytest.mark.parametrize("size", [1, 40, 511, 512, 513, 4096, 5000])
@pytest.mark.parametrize("compressor", [Quantize(1), Quantize(3, 64), Quantize(8, 96)], ids=str)
@pytest.mark.quick("Quantize(bits=1*-40", "Quantize(bits=3*-513", "Quantize(bits=8*-4096")
def test_error_of_whole_buckets_is_the_kernels(compressor, size):
    x = np.random.default_rng(size).normal(size=size).astype(np.float32)
    bucket = compressor.bucket_size
    cut = size // bucket * bucket or size
    rows = np.pad(x[:cut], (0, -cut % bucket), mode="edge").reshape(-1, bucket)
    filled = np.full(len(rows), min(cut, bucket))
    candidates = [Quantize(5, bucket), compressor]
    got = jax.jit(lambda rows: squared_errors(rows, filled, candidates))(rows)
    np.testing.assert_allclose(
        got[:, 1].sum(), true_error(x[:cut], compressor), rtol=2e-4, atol=1e-10
    )


def test_stochastic_rounding_s_error_is_the_expected_one():
    x = np.random.default_rng(0).normal(size=512).astype(np.float32)
    c = Quantize(3, 512, "stochastic")
    tried = [true_error(x, c, jax.random.key(i)) for i in range(300)]
    deviation = np.std(tried) / np.sqrt(len(tried))
    expected = float(squared_errors(jnp.asarray(x[None]), np.array([512]), [c])[0, 0])
    assert abs(np.mean(tried) - expected) < 4 * deviation


@pytest.mark.parametrize("c", [Quantize(3, 64), Quantize(4, 64, "stochastic")], ids=str)
@pytest.mark.quick("*stochastic*")
def test_encoding_and_decoding_finds_the_error_that_the_arithmetic_gives(c):
    rows = np.random.default_rng(5).normal(size=(50, 128)).astype(np.float32)
    filled = np.repeat([128, 100], 25)
    every = functools.partial(Compressor.squared_errors.__func__, Quantize), Quantize.squared_errors
    measures = (jax.jit(lambda rows, f=f: f([c], rows, filled).sum(0)) for f in every)
    rtol = 0.05 if c.needs_key else 2e-4  # of one draw
    got, expected = (f(rows) for f in measures)
    np.testing.assert_allclose(got, expected, rtol=rtol)


def test_candidates_of_several_kinds_keep_their_order():
    rng = np.random.default_rng(6)
    leaves = [rng.normal(size=(2, 4096)), rng.normal(size=(2, 40, 30)), rng.normal(size=(2, 33))]
    leaves = [x.astype(np.float32) for x in leaves]
    candidates = (Cast(jnp.float8_e5m2), Quantize(2), Mean(), Quantize(4), Identity())
    got = measure(Sampler(candidates, runs=100), leaves)["error"]
    for row, x in zip(got, leaves, strict=True):
        for c, error in zip(candidates, row, strict=True):
            true = np.mean([true_error(own, c) for own in x])
            # `Mean` is measured on all values, because a run of them would not show its error.
            np.testing.assert_allclose(error, true, rtol=1e-4 if c == Mean() else 0.2, atol=1e-10)


def test_candidates_that_code_values_one_by_one_are_measured_on_long_runs():
    x = np.random.default_rng(7).normal(size=(2, 8 * 512)).astype(np.float32)
    c = Cast(jnp.bfloat16)
    got = measure(Sampler((c,), runs=8), [x])
    np.testing.assert_allclose(got["square"][0], np.square(x).sum(1).mean(), rtol=1e-5)
    true = np.mean([true_error(own, c) for own in x])
    np.testing.assert_allclose(got["error"][0], [true], rtol=1e-4)


def test_a_candidate_that_overflows_counts_as_useless_and_strikes_no_leaf():
    x = 1e5 * np.random.default_rng(8).normal(size=(2, 4096)).astype(np.float32)
    got = measure(Sampler((Quantize(4), Cast(jnp.float16)), runs=8), [x])
    assert got["weight"].tolist() == [1]
    assert got["error"][0, 0] < 0.1 * got["square"][0]
    np.testing.assert_allclose(got["error"][0, 1], 1e12 * got["square"][0], rtol=1e-5)


def test_a_sample_of_runs_is_near_the_whole():
    x = np.random.default_rng(2).normal(size=(2, 300, 512)).astype(np.float32)
    few, every = (measure(Sampler(TWO, runs=n), [x]) for n in (8, 300))
    np.testing.assert_allclose(few["error"], every["error"], rtol=0.1)
    np.testing.assert_allclose(few["square"], every["square"], rtol=0.1)


def test_later_samples_count_more():
    x = np.ones((3, 2, 512), np.float32) * np.array([1, 2, 4], np.float32)[:, None, None]
    got = measure(Sampler(TWO, runs=1), [x], steps=3, decay=0.5)
    expected = 512 * (1 * 0.25 + 4 * 0.5 + 16) / 1.75
    np.testing.assert_allclose(got["square"], expected, rtol=1e-6)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.quick("nan")
def test_a_leaf_that_is_not_finite_on_one_rank_keeps_its_averages_and_is_counted(bad):
    rng = np.random.default_rng(3)
    good = rng.normal(size=(3, 2, 4000)).astype(np.float32)
    struck = good.copy()
    struck[1, 1, 3999] = bad  # on one rank, in a bucket that no run holds
    got = measure(Sampler(TWO, runs=2), [good, struck], steps=3, decay=1.0)
    kept = measure(Sampler(TWO, runs=2), [struck[[0, 2]]], steps=2, decay=1.0)
    for name in ("error", "square"):
        np.testing.assert_allclose(got[name][1], kept[name][0], rtol=1e-6)
    assert got["weight"].tolist() == [3, 2]
    assert got["nonfinite"].tolist() == [0, 1]


def test_a_leaf_that_was_never_finite_has_no_averages():
    got = measure(Sampler(TWO, runs=2), [np.full((2, 600), np.nan, np.float32)])
    assert np.isnan(got["error"]).all()
    assert got["nonfinite"] == 1
