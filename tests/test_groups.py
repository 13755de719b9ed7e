"""`axis_index_groups` against `jax.lax`'s, and axes that `jax.lax` refuses."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import worlds
from cgx_jax import Cast, Identity, Quantize, pmean_compressed, psum_compressed
from cgx_jax import all_gather_compressed as gather
from cgx_jax import psum_scatter_compressed as scatter

pytestmark = [pytest.mark.oldest, pytest.mark.usefixtures("unoptimized")]

GROUPS = [[0, 3, 5, 6], [7, 1, 4, 2]]
ALONE = [[i] for i in range(8)]
# What 8 bits may lose in buckets of 512 values in [-1, 1]: for four ranks, plus once for the sum.
TOLERANCE = {"identity": 1e-5, "cast": 0.05, "quantize": 0.06, "stochastic": 0.12}
COMPRESSORS = {
    "identity": Identity(),
    "cast": Cast(jnp.bfloat16),
    "quantize": Quantize(8),
    "stochastic": Quantize(8, rounding="stochastic"),
}


def both(ours, theirs, **options):
    return tuple(functools.partial(f, **options) for f in (ours, theirs))


NAMESAKES = {
    "psum": (psum_compressed, lax.psum),
    "pmean": (pmean_compressed, lax.pmean),
    "scatter tiled": both(scatter, lax.psum_scatter, scatter_dimension=1, tiled=True),
    "gather": both(gather, lax.all_gather, axis=1),
    "gather tiled": both(gather, lax.all_gather, tiled=True),
}


def values(*shape):
    return np.random.default_rng(0).uniform(-1, 1, shape).astype(np.float32)


def sharded(f, mesh, check_vma):
    return worlds.sharded(f, mesh, worlds.RANKS, worlds.RANKS, check_vma=check_vma)


@pytest.mark.parametrize("check_vma", [False, True])
@pytest.mark.parametrize("groups", [GROUPS, ALONE], ids=["fours", "alone"])
@pytest.mark.parametrize("name", ["scatter tiled", "gather", "gather tiled"])
def test_halves_of_groups_are_those_of_lax(name, groups, check_vma, mesh):
    ours, theirs = NAMESAKES[name]
    x, key = values(8, 64, 48), jax.random.key(0)
    lax_of = lambda v: theirs(v, "data", axis_index_groups=groups)  # noqa: E731
    want = sharded(lax_of, mesh, check_vma)(x)
    for kind, compressor in COMPRESSORS.items():
        how = {"axis_index_groups": groups, "key": key, "exchange": "xla"}
        own = functools.partial(ours, axis_name="data", compressor=compressor, **how)
        got = sharded(own, mesh, check_vma)(x)
        np.testing.assert_allclose(got, want, atol=TOLERANCE[kind])


def test_halves_of_groups_take_a_dimension_of_the_groups_size(mesh):
    x = values(8 * 4, 600)
    how = {"axis_index_groups": GROUPS}
    ours = lambda v: scatter(v, "data", Quantize(8), exchange="xla", **how)  # noqa: E731
    theirs = lambda v: lax.psum_scatter(v, "data", **how)  # noqa: E731
    got, want = (sharded(f, mesh, False)(x) for f in (ours, theirs))
    np.testing.assert_allclose(got, want, atol=0.06)
    says = r"dimension 0 of \[8, 600\] has length 8, which must be 4"
    with pytest.raises(ValueError, match=says):
        jax.eval_shape(sharded(ours, mesh, False), values(64, 600))


@pytest.mark.parametrize("check_vma", [False, True])
@pytest.mark.parametrize("name", ["scatter tiled", "gather tiled"])
def test_derivatives_of_halves_of_groups_are_those_of_lax(name, check_vma, mesh):
    ours, theirs = NAMESAKES[name]
    x = values(8, 64, 48)

    def gradient(f):
        def loss(v):
            y = f(v)
            return (y * jnp.cos(jnp.arange(y.size, dtype=jnp.float32)).reshape(y.shape)).sum()

        return sharded(jax.grad(loss), mesh, check_vma)(x)

    how = {"axis_index_groups": GROUPS, "exchange": "xla"}
    got = gradient(lambda v: ours(v, "data", Quantize(4), **how))
    want = gradient(lambda v: theirs(v, "data", axis_index_groups=GROUPS))
    np.testing.assert_allclose(got, want, rtol=1e-6)


@pytest.mark.parametrize("compressor", COMPRESSORS.values(), ids=COMPRESSORS)
@pytest.mark.parametrize("name", NAMESAKES)
def test_groups_over_axes_of_vmap_are_refused_as_in_lax(name, compressor):
    ours, theirs = NAMESAKES[name]
    groups, key = [[0, 1, 2, 3], [4, 5, 6, 7]], jax.random.key(0)

    def of_two(f):
        return jax.vmap(jax.vmap(lambda v: f(v, ("b", "a")), axis_name="a"), axis_name="b")

    def of_one(f):
        return jax.vmap(lambda v: f(v, "a"), axis_name="a")

    compressed = lambda v, n: ours(v, n, compressor, axis_index_groups=groups, key=key)  # noqa: E731
    exact = lambda v, n: theirs(v, n, axis_index_groups=groups)  # noqa: E731
    for vmapped, x in ((of_two, values(2, 4, 8, 64)), (of_one, values(8, 8, 64))):
        with pytest.raises((NotImplementedError, ValueError)):
            jax.eval_shape(vmapped(exact), x)
        with pytest.raises(ValueError, match=r"compressed: axis_index_groups=.* an axis of vmap"):
            jax.eval_shape(vmapped(compressed), x)


@pytest.mark.parametrize("axes", [("b", "a"), ("a", "b")])
def test_without_groups_axes_of_vmap_reduce_over_all(axes):
    x = values(2, 4, 8, 64)
    reduce = lambda v: pmean_compressed(v, axes, Quantize(8), exchange="xla")  # noqa: E731
    got = jax.jit(jax.vmap(jax.vmap(reduce, axis_name="a"), axis_name="b"))(x)
    np.testing.assert_allclose(got, np.broadcast_to(x.mean((0, 1)), x.shape), atol=0.02)


def test_axes_of_vmap_and_of_a_mesh_together_are_refused_under_check_vma(mesh):
    def f(v):
        reduce = lambda u: psum_compressed(u, ("data", "a"), Quantize(8), exchange="xla")  # noqa: E731
        return jax.vmap(reduce, axis_name="a")(v)

    x = values(16, 600)
    with pytest.raises(ValueError, match=r"psum_compressed: .* mixes axes of vmap and of a mesh"):
        jax.eval_shape(sharded(f, mesh, True), x)
    got = sharded(f, mesh, False)(x)
    np.testing.assert_allclose(got, np.broadcast_to(x.sum(0), x.shape), atol=0.2)


@pytest.mark.parametrize("dtype", [bool, np.int32, np.float16, np.complex64])
@pytest.mark.parametrize("name", ["psum", "pmean"])
@pytest.mark.usefixtures("optimized")
def test_exact_leaves_of_groups_are_those_of_lax_with_and_without_check_vma(name, dtype, mesh):
    ours, theirs = NAMESAKES[name]
    x = np.random.default_rng(0).integers(0, 3, (8, 40)).astype(dtype)
    want = sharded(lambda v: theirs(v, "data", axis_index_groups=GROUPS), mesh, False)(x)
    for check_vma in (False, True):
        reduce = lambda v: ours(v, "data", Identity(), axis_index_groups=GROUPS)  # noqa: E731
        got = sharded(reduce, mesh, check_vma)(x)
        assert got.dtype == want.dtype
        np.testing.assert_array_equal(got, want)
