"""The purpose of rotation and correlated rounding: less error in the same bytes, still unbiased."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import cgx_jax
from cgx_jax import Quantize
from cgx_jax.kernels import primitives
from cgx_jax.kernels.primitives import Sent
from cgx_jax.kernels.wire import Layout
from cgx_jax.policies.statistics import squared_errors

# Mean square errors of the best even levels for a normal distribution (Max, 1960), by width.
NORMAL_ERROR = {1: 0.3634, 2: 0.1188, 3: 0.03744, 4: 0.01154, 5: 0.003495, 6: 0.001040}


def heavy_tailed(size, seed=0):
    """Values as gradients have them: most are small, a few are large."""
    rng = np.random.default_rng(seed)
    return (rng.standard_normal(size) * np.exp(1.5 * rng.standard_normal(size))).astype(np.float32)


@functools.partial(jax.jit, static_argnums=1)
def coded(x, compressor, key=None):
    return compressor.decode(compressor.encode(x, key=key), x.shape, x.dtype)


def sent(x, compressor, key=None):
    return np.asarray(coded(x, compressor, key))


def relative(error, x):
    return float(np.square(np.float64(error)).sum() / np.square(np.float64(x)).sum())


@pytest.mark.parametrize("bits", NORMAL_ERROR)
def test_a_rotated_bucket_errs_as_normal_values_do_whatever_it_holds(bits):
    for x in (heavy_tailed(512 * 200), np.random.default_rng(1).uniform(-1, 1, 512 * 200)):
        x = x.astype(np.float32)
        assert relative(sent(x, Quantize(bits, rotation=True)) - x, x) < 1.1 * NORMAL_ERROR[bits]


DTYPES = {"f32": jnp.float32, "bf16": jnp.bfloat16, "f16": jnp.float16}


def largest_rows(dtype, fractions=(1.0, 0.999, 0.92, 0.5, 0.13, 1e-2, 1e-3, 1e-9, 1e-38, 1e-42)):
    """Buckets [n, 512] of many shapes, each scaled to these fractions of the largest number."""
    rng = np.random.default_rng(0)
    spikes = np.zeros((3, 512))
    spikes[0, 7], spikes[1, 9:11], spikes[2, ::32] = 1, (1, -1), 1
    shapes = np.concatenate([
        spikes, np.ones((1, 512)), np.linspace(-1, 1, 512)[None], np.linspace(0.8, 1, 512)[None],
        rng.uniform(-1, 1, (2, 512)), rng.uniform(0.9, 1, (1, 512)), rng.standard_normal((2, 512)),
        rng.standard_cauchy((1, 512)), rng.choice([-1, 1], (2, 512)),
    ])  # fmt: skip
    shapes /= np.abs(shapes).max(axis=1, keepdims=True)
    most = float(jnp.finfo(dtype).max)
    return jnp.asarray(np.concatenate([shapes * (most * f) for f in fractions]), dtype)


def check_bound(dtype, compressor):
    """Checks that every decoded value is within the stated bound, or the bound is infinite."""
    x = largest_rows(dtype)

    @jax.jit
    def both(x):
        y = compressor.decode(compressor.encode(x, key=jax.random.key(0)), x.shape, x.dtype)
        return y, compressor.error_bound(x)

    y, bound = (np.asarray(a, np.float64) for a in both(x))
    with np.errstate(invalid="ignore"):
        held = np.abs(y - np.asarray(x, np.float64)) <= bound
    assert (held | np.isinf(bound)).all()
    assert not np.isnan(bound).any()
    return np.asarray(x, np.float64), bound


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("rotation", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", [1, 5])
def test_the_bound_holds_up_to_the_largest_value_or_is_infinite(bits, dtype, rotation, rounding):
    x, bound = check_bound(DTYPES[dtype], Quantize(bits, 512, rounding, rotation))
    far = np.abs(x).max(axis=1) < float(jnp.finfo(DTYPES[dtype]).max) * 1e-4
    assert np.isfinite(bound[far]).all()  # and informative if there is room


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize(("bits", "bucket_size"), [(2, 512), (3, 96), (8, 128)])
def test_the_bound_holds_of_values_whose_squares_are_too_small_for_fp32(
    bits, bucket_size, rounding
):
    c = Quantize(bits, bucket_size, rounding, rotation=True)
    signs = np.random.default_rng(0).choice([-1, 1], 40 * 512)
    for scale in (1.2e-38, 4.7e-38, 1e-35):
        x = (signs * scale).astype(np.float32)
        off = np.abs(np.float64(sent(x, c, jax.random.key(1))) - np.float64(x))
        assert (off <= np.float64(jax.jit(c.error_bound)(x))).all()


@pytest.mark.parametrize("value", [3.0, -1e-20, np.finfo(np.float32).max])
def test_a_value_that_is_alone_in_its_bucket_is_as_exact_as_bf16(value):
    x = np.zeros(512, np.float32)
    x[77] = value
    y = sent(x, Quantize(2, rotation=True))
    np.testing.assert_allclose(y, x, rtol=2.0**-6, atol=abs(value) * 2.0**-7)
    assert not np.delete(y, range(64, 96)).any()  # whole segments of zeros


@pytest.mark.parametrize("rounding", ["stochastic", "correlated"])
@pytest.mark.parametrize("rotation", [False, True])
def test_stochastic_rounding_of_rotated_values_is_unbiased(rounding, rotation):
    c, x = Quantize(2, 64, rounding, rotation), heavy_tailed(256)
    runs = 4000
    keys = jax.random.split(jax.random.key(0), runs)
    every = np.asarray(jax.vmap(lambda k: coded(x, c, k))(keys))
    mean, deviation = every.mean(0, dtype=np.float64), every.std(0, dtype=np.float64)
    assert (np.abs(mean - x) <= 6 * deviation / np.sqrt(runs) + 1e-5).all()


def means(compressor, x, mesh, keys):
    """Returns the mean over ranks of x[world, n], for every key."""

    def mean(own, keys):
        def one(key):
            return cgx_jax.pmean_compressed(own[0], "data", compressor, key=key, exchange="xla")

        return jax.lax.map(one, keys)

    f = jax.shard_map(mean, mesh=mesh, in_specs=(P("data"), P()), out_specs=P())
    return np.asarray(jax.jit(f)(x, keys))


@pytest.mark.parametrize("rotation", [False, True])
@pytest.mark.quick("True")
def test_correlated_rounding_errs_less_in_the_mean_and_is_unbiased(mesh, rotation):
    """The second phase has one encoder and errs as before, so a quarter of the error can go."""
    world = mesh.shape["data"]
    x = np.random.default_rng(0).standard_normal((world, 2048)).astype(np.float32)
    keys = jax.random.split(jax.random.key(1), 40)
    exact = x.mean(0, dtype=np.float64)
    error = {}
    for rounding in ("stochastic", "correlated"):
        found = means(Quantize(3, 512, rounding, rotation), x, mesh, keys)
        error[rounding] = np.square(found - exact).sum(axis=1).mean()
        off = found.mean(0, dtype=np.float64) - exact
        assert np.square(off).sum() < 2 * error[rounding] / len(keys)
    assert error["correlated"] < 0.87 * error["stochastic"]


@pytest.mark.parametrize("rotation", [False, True])
def test_ranks_that_agree_round_up_as_often_as_they_should(rotation):
    """Their sum then has about the error of one rounding, for any number of ranks."""
    world, x = 8, jnp.asarray(heavy_tailed(512))
    c = Quantize(2, 512, "correlated", rotation)
    layout = Layout((c.slot(512),), world)  # one record, in one chunk

    def decoded(rank):
        payload = primitives.encode(Sent(np.uint32([3, 5]), [x], rank=rank), layout)[0]
        return primitives.decode(payload, layout, [x])[0]

    peers = [r for r in range(world) if layout.begins[r] == layout.begins[r + 1]]
    assert len(peers) == world - 1
    every = np.stack([decoded(r) for r in peers])
    one = np.square(every - x).sum(axis=1).mean()
    together = np.square(every.sum(0) - len(peers) * np.asarray(x)).sum()
    assert together < 3 * one  # independent errors would add up to 7 times that


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize(("size", "tolerance"), [(512 * 40, 0.15), (512, 0.3), (300, 0.7)])
@pytest.mark.quick("512-0.3-stochastic")
def test_statistics_measure_rotated_candidates(size, tolerance, rounding):
    """Statistics use other signs, and treat a partly filled bucket as if it were full."""
    x = heavy_tailed(size)
    candidates = [Quantize(b, 512, rounding, rotation=True) for b in (2, 4)]
    padded = np.pad(x, (0, -size % 512), mode="edge").reshape(-1, 512)
    filled = np.minimum(512, size - 512 * np.arange(len(padded)))
    errors = jax.jit(lambda rows: squared_errors(rows, filled, candidates))
    found = np.asarray(errors(padded)).sum(0)
    for c, got in zip(candidates, found, strict=True):
        real = [np.square(sent(x, c, k) - x).sum() for k in jax.random.split(jax.random.key(0), 4)]
        np.testing.assert_allclose(got, np.mean(real), rtol=tolerance)
