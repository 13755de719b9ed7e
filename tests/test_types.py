"""A sum has the same shard_map types as its operand: the axes that it is `reduced` over."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from cgx_jax import Cast, Quantize, all_gather_compressed, pmean_compressed, psum_compressed
from cgx_jax import psum_scatter_compressed as scatter

pytestmark = pytest.mark.oldest

STOCHASTIC = Quantize(8, rounding="stochastic")
COMPRESSORS = {"quantize": Quantize(8), "stochastic": STOCHASTIC, "cast": Cast(jnp.bfloat16)}
# Both calls of one name treat the operand's types alike; a mean has the types of the sum.
CALLS = {
    "psum": (psum_compressed, lax.psum, False),
    "pmean": (pmean_compressed, lambda v, n: lax.psum(v, n), False),
    "scatter": (
        lambda *a, **k: scatter(*a, **k, scatter_dimension=1, tiled=True),
        lambda v, n: lax.psum_scatter(v, n, scatter_dimension=1, tiled=True),
        True,
    ),
    "gather": (all_gather_compressed, lax.all_gather, True),
}


@pytest.fixture
def explicit():
    """Four ranks on "x", two on "y", both explicit."""
    mesh = Mesh(
        np.array(jax.devices()).reshape(4, 2), ("x", "y"), axis_types=(AxisType.Explicit,) * 2
    )
    with jax.set_mesh(mesh):
        yield mesh


@pytest.mark.parametrize("compressor", COMPRESSORS.values(), ids=COMPRESSORS)
@pytest.mark.parametrize("name", CALLS)
def test_reduced_axes_of_an_operand_are_those_of_the_result(name, compressor, explicit):
    ours, theirs, varies = CALLS[name]
    spec = P("x", reduced={"y"})
    value = np.random.default_rng(0).normal(size=(4, 2048)).astype(np.float32)
    x = jax.device_put(value, NamedSharding(explicit, spec))
    types, results = [], []
    for call in (
        lambda v: ours(v, "x", compressor, key=jax.random.key(0), exchange="xla"),
        lambda v: theirs(v, "x"),
    ):

        def noting(v, call=call):
            y = call(v)
            types.append(jax.typeof(y).mat)
            return y

        out = P("x" if varies else None, reduced={"y"})
        f = jax.jit(jax.shard_map(noting, in_specs=spec, out_specs=out))
        results.append(np.asarray(f(x)))
    assert types[0] == types[-1]
    assert types[0].reduced == {"y"}
    got, want = results
    np.testing.assert_allclose(got, want / 4 if name == "pmean" else want, atol=0.2)


def test_gradient_through_a_sum_of_a_reduced_operand_is_that_of_lax(explicit):
    spec = P("x", reduced={"y"})
    x = jax.device_put(np.ones((4, 2048), np.float32), NamedSharding(explicit, spec))

    def cotangents(reduce):
        def pulled(v):
            y, pull = jax.vjp(reduce, v)
            ones = lax.pcast(jnp.ones(y.shape, y.dtype), "y", to="varying")
            return lax.psum(pull(lax.pcast(ones, "y", to="unreduced"))[0], "y")

        return jax.jit(jax.shard_map(pulled, in_specs=spec, out_specs=P("x")))(x)

    got = cotangents(lambda v: psum_compressed(v, "x", Quantize(4), exchange="xla"))
    want = cotangents(lambda v: lax.psum(v, "x"))
    np.testing.assert_array_equal(got, want)
