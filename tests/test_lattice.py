"""Rounding to a shifted lattice: half a step at most, without bias, in the bytes of `Quantize`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import cgx_jax
from cgx_jax import Quantize
from cgx_jax.compressors import ShiftedLattice

KEY = jax.random.key(5)
BUCKET = 64


def values(n, seed=0):
    return np.random.default_rng(seed).standard_normal(n).astype(np.float32)


def steps(x, bits):
    """Returns each value's step: its bucket's range divided by the number of intervals."""
    rows = [x[i : i + BUCKET] for i in range(0, len(x), BUCKET)]
    return np.concatenate([np.full(len(r), np.ptp(r) / (2**bits - 1)) for r in rows])


@pytest.mark.parametrize("bits", [1, 8])
def test_errors_are_uniform_in_a_step_for_every_value(bits):
    """Over 4,000 draws: no bias, and the variance of a uniform error, also for the extremes."""
    draws, c, x = 4000, ShiftedLattice(bits, BUCKET), values(150)
    one = lambda k: c.approximate(jnp.asarray(x), key=k)  # noqa: E731
    back = np.asarray(jax.jit(jax.vmap(one))(jax.random.split(KEY, draws)))
    errors = (back.astype(np.float64) - x) / steps(x, bits)
    assert np.abs(errors).max() <= 0.5 + 1e-4
    assert np.abs(errors.mean(0)).max() < 5 / np.sqrt(12 * draws)
    # Each bucket has a shift of its own.
    assert abs(np.corrcoef(errors[:, 0], errors[:, BUCKET])[0, 1]) < 5 / np.sqrt(draws)
    # The square of a uniform error has the mean 1 / 12 and the deviation 1 / sqrt(180).
    assert np.abs(np.square(errors).mean(0) - 1 / 12).max() < 5 / np.sqrt(180 * draws)


def test_quantize_decodes_the_payload():
    shifted, nearest = ShiftedLattice(4, BUCKET), Quantize(4, BUCKET)

    @jax.jit
    def decoded(x):
        payload = shifted.encode(x, key=KEY)
        assert payload.size == nearest.payload_bytes(150)
        return [c.decode(payload, x.shape, x.dtype) for c in (nearest, shifted)]

    np.testing.assert_array_equal(*decoded(values(150)))


def test_ranks_share_the_shifts_of_a_gather(mesh):
    """Equal shards come back equal, and another key gives another lattice."""
    x = np.tile(values(256), (8, 1))

    @jax.jit
    def gathered(key):
        f = lambda v: cgx_jax.all_gather_compressed(  # noqa: E731
            v[0], "data", ShiftedLattice(4), key=key, exchange="xla"
        )[None]
        return jax.shard_map(f, mesh=mesh, in_specs=P("data"), out_specs=P("data"))(x)[0]

    first, second = (np.asarray(gathered(jax.random.key(i))) for i in range(2))
    assert (first == first[0]).all()
    assert (first != second).mean() > 0.9
