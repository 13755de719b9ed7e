"""Means in units, for any world, transformation, platform and compressor; residuals add up."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from cgx_jax import Cast, Plan, Quantize
from cgx_jax.exchanges import Xla
from cgx_jax.exchanges.base import Fused
from cgx_jax.kernels import primitives, scaling
from cgx_jax.kernels.primitives import Sent
from cgx_jax.kernels.units import Units
from cgx_jax.kernels.wire import Layout
from reducing import pmean_with_residual
from worlds import sharded

SHAPES = {"matrix": (24, 100), "vector": (1037, 1), "exact": (70,), "narrow": (300, 7)}
CODES = [Quantize(3, 96, rotation=True), Quantize(4, 64, "correlated"), Cast(jnp.bfloat16)]
GIVEN = P("data"), P()  # a tree of each rank, and units
EVERY_CODE = pytest.mark.parametrize("code", CODES, ids=str)


def tree_of(world, dtype=np.float32, seed=0):
    rng = np.random.default_rng(seed)
    return {
        name: (rng.standard_normal((world, *shape)) * 10.0 ** rng.uniform(-3, 3, shape)).astype(
            jnp.dtype(dtype)
        )
        for name, shape in SHAPES.items()
    }


def unit_of(rng, rows, columns, spread=3):
    """Returns units: random powers of ten on the way in, and their inverses on the way out."""
    each = [np.float32(10.0 ** rng.uniform(-spread, spread, n)) for n in (rows, columns)]
    return tuple(np.stack([x, 1 / x]) for x in each)


def units_of_tree(spread=3):
    rng = np.random.default_rng(1)
    units = {
        "exact": unit_of(rng, 70, 1, spread),
        "matrix": unit_of(rng, 24, 100, spread),
        "narrow": None,
        "vector": unit_of(rng, 1, 1037, spread),
    }
    return [units[name] for name in sorted(SHAPES)]


def plan_of(code, tree):
    """Returns a plan with `code` for all leaves except one exact leaf."""
    one = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), tree)
    plan = Plan.build(one, code)
    assert [plan.leaves[i].path for i in plan.exact] == ["exact"]
    return plan


def reduce(mesh, plan, tree, units, *, residual=False, exchange="xla", reduction=None):
    """(mean, residuals of every rank) as one compiled function of all devices."""

    def step(tree, units):
        own = jax.tree.map(lambda x: x[0], tree)
        how = {"residual": residual, "exchange": exchange, "reduction": reduction}
        mean, lost = pmean_with_residual(
            "here", own, "data", plan, units=units, key=jax.random.key(3), **how
        )
        zeros = [jnp.zeros_like(x) for x in jax.tree.leaves(own)]
        lost = [z if e is None else e for z, e in zip(zeros, lost, strict=True)]
        return mean, [e[None] for e in lost]

    return sharded(step, mesh, GIVEN, (P(), P("data")))(tree, units)


multiply = jax.jit(scaling.multiply, static_argnums=2)


def multiplied(tree, units, way):
    leaves, treedef = jax.tree.flatten(tree)
    pairs = zip(leaves, units, strict=True)
    return jax.tree.unflatten(treedef, [multiply(x, u, way) for x, u in pairs])


def close(a, b):
    np.testing.assert_allclose(a, b, rtol=0.01, atol=1e-2 * float(np.abs(b).max()))


@EVERY_CODE
@pytest.mark.quick("world3-Quantize(bits=3*", "world2-Cast*", "world1-Quantize(bits=4*")
def test_a_mean_in_units_is_the_mean_of_what_they_make(mesh_of_each_size, code):
    """For `Quantize` bit for bit: kernels compute what passes around the reduction would.

    For other codes XLA may contract a product and a sum to one rounding, so they are only close.
    """
    kernels = isinstance(code, Quantize)
    same = np.testing.assert_array_equal if kernels else close
    world = mesh_of_each_size.size
    tree, units = tree_of(world), units_of_tree()
    plan = plan_of(code, tree)
    if world == 1:
        mean, _ = reduce(mesh_of_each_size, plan, tree, units)
        jax.tree.map(lambda m, x: np.testing.assert_array_equal(m, x[0]), mean, tree)
        return
    got, lost = reduce(mesh_of_each_size, plan, tree, units, residual=True)
    inner = [None if name == "exact" else u for name, u in zip(sorted(SHAPES), units, strict=True)]
    each = [jax.tree.map(lambda x, r=r: x[r], tree) for r in range(world)]
    each = [multiplied(x, inner, scaling.IN) for x in each]
    stacked = jax.tree.map(lambda *x: np.stack(x), *each)
    mean, rest = reduce(mesh_of_each_size, plan, stacked, [None] * 4, residual=True)
    want = multiplied(mean, inner, scaling.OUT)
    jax.tree.map(same, got, want)
    for e, r, u in zip(lost, rest, inner, strict=True):
        for rank in range(world):
            same(e[rank], multiply(r[rank], u, scaling.OUT))


def test_large_float16_in_extreme_units_does_not_overflow(mesh):
    x = np.full((8, 4096), 6.2e4, np.float16)
    for scale in (1e-25, 1e25):
        unit = np.float32([[scale], [1 / scale]]), np.ones((2, 4096), np.float32)
        for code in (Quantize(4), Quantize(8, 64)):
            plan = Plan.build(jax.ShapeDtypeStruct((4096,), x.dtype), code)
            mean, (lost,) = reduce(mesh, plan, x, [unit], residual=True)
            np.testing.assert_allclose(np.float32(mean), 6.2e4, rtol=2e-3)
            assert jnp.isfinite(lost).all()


def test_units_are_constants_of_the_derivative(mesh):
    tree, units = tree_of(8)["matrix"], [units_of_tree()[1]]
    plan = Plan.build(jax.ShapeDtypeStruct(tree.shape[1:], tree.dtype), Quantize(4))

    def loss(x, units):
        mean, _ = pmean_with_residual(
            "here", x[0], "data", plan, units=units, exchange="xla", residual=False
        )
        return (mean * jnp.cos(jnp.arange(100.0))).sum()

    for argument, spec in enumerate(GIVEN):
        f = sharded(jax.grad(loss, argument), mesh, GIVEN, spec)
        for g in jax.tree.leaves(f(tree, units)):
            want = np.cos(np.arange(100.0)) / 8 if argument == 0 else 0
            np.testing.assert_allclose(g, np.broadcast_to(want, g.shape), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.quick("True")
def test_vmap_is_as_many_calls(mesh, shared):
    """Whether all elements have the same units or each its own."""
    plan = Plan.build(jax.ShapeDtypeStruct((24, 100), jnp.float32), Quantize(4, 96, rotation=True))
    x = np.stack([tree_of(8, seed=s)["matrix"] for s in range(3)], 1)
    each = [unit_of(np.random.default_rng(0 if shared else s), 24, 100) for s in range(3)]
    units = each[0] if shared else jax.tree.map(lambda *u: np.stack(u), *each)

    def one(x, units):
        return pmean_with_residual("here", x, "data", plan, units=[units], exchange="xla")

    def step(x, units):
        mean, lost = jax.vmap(one, (0, None if shared else 0))(x[0], units)
        return mean, lost[0][None]

    means, losses = sharded(step, mesh, GIVEN, (P(), P("data")))(x, units)
    for i, unit in enumerate(each):
        mean, (lost,) = reduce(mesh, plan, x[:, i], [unit], residual=True)
        np.testing.assert_array_equal(means[i], mean)
        np.testing.assert_array_equal(losses[:, i], lost)


@pytest.mark.parametrize("rotation", [False, True])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.quick("bfloat16-True")
def test_units_outside_of_the_call_give_the_bytes_of_units_within(dtype, rotation):
    """This is what a platform does if its kernels do not support units."""
    codes = [Quantize(4, rotation=rotation), Quantize(3, 96), Quantize(2)]
    x = [jnp.asarray(tree_of(1)[name][0], dtype) for name in ("matrix", "vector", "narrow")]
    units = Units.of([units_of_tree()[i] for i in (1, 3, 2)])
    world, rank = 3, jnp.int32(1)
    layout = Layout(
        tuple(c.slot(a.shape, i) for i, (c, a) in enumerate(zip(codes, x, strict=True))), world
    )
    key = np.uint32([1, 2])
    sent = Sent(key, x, units, rank)
    payload, lost = primitives.encode(sent, layout, residual=True)
    rows = payload.at[1].set(0)
    chunk, filled = primitives.reduce(sent, rows, layout, residuals=lost, divisor=3)
    decoded = primitives.decode(payload, layout, x, units=units)

    marked, factors = primitives.with_units(layout, units)
    options = {"layout": marked, "batch": 1}
    encode = jax.jit(
        functools.partial(scaling.encode, primitives.encode_p, residual=True, **options)
    )
    reduce_ = jax.jit(
        functools.partial(scaling.reduce, primitives.reduce_p, divisor=3.0, **options)
    )
    shapes = tuple((a.shape, np.dtype(a.dtype)) for a in x)
    decode = jax.jit(
        functools.partial(scaling.decode, primitives.decode_p, shapes=shapes, **options)
    )
    for got, want in (
        (encode(jnp.asarray(key), rank, *x, *factors), [payload, *lost]),
        (reduce_(jnp.asarray(key), rank, rows, *x, *lost, *factors), [chunk, *filled]),
        (decode(payload, *factors), decoded),
    ):
        for a, b in zip(got, want, strict=True):
            assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def unfused(self, call, sent, factors=()):
    """Computes the fused CUDA call by kernels and XLA's collectives, so that it runs on a CPU."""
    (first, second), leaves = sent.words, sent.leaves
    units = sent.units if factors else None
    marked, expected = primitives.with_units(call.layout.without_units(), units)
    assert marked == call.layout
    assert [x.shape for x in factors] == [x.shape for x in expected]
    layout, axes, rank = call.layout.without_units(), call.axes, call.axes.rank()
    own = Sent(first, leaves, units, rank)
    rows, lost = primitives.encode(own, layout, residual=call.residual)
    rows = Xla().scatter("test", rows, axes)
    own = own._replace(words=second)
    chunk, lost = primitives.reduce(own, rows, layout, divisor=call.divisor, residuals=lost)
    chunks = Xla().gather("test", chunk, axes)
    return Fused(primitives.decode(chunks, layout, leaves, units=units), lost)


@pytest.mark.parametrize("bucket_size", [64, 1024], ids=["inside", "around"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.quick("bfloat16-*")
def test_the_fused_cuda_call_multiplies_by_units(mesh, dtype, bucket_size, fused_on_cpu):
    """Inside of the call for buckets of up to 512 values, and around it for longer ones."""
    fused_on_cpu(unfused)
    code = Quantize(4, bucket_size, "correlated")
    tree = jax.tree.map(lambda x: np.clip(x, -100, 100), tree_of(mesh.size, dtype))
    units = units_of_tree(spread=0.5)
    plan = plan_of(code, tree)
    want = reduce(mesh, plan, tree, units, residual=True)
    got = reduce(mesh, plan, tree, units, residual=True, exchange="nccl")
    jax.tree.map(np.testing.assert_array_equal, got, want)
