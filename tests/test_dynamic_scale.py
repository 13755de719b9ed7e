"""Flax's DynamicScale with compressed gradients: one line more, u8 on the wire, same scale."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.training.dynamic_scale import DynamicScale
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import cgx_jax
from cgx_jax import Quantize, Rules

pytestmark = pytest.mark.usefixtures("unoptimized")

WORLD = 4
MESH = Mesh(np.array(jax.devices()[:WORLD]), ("batch",))
EVERYTHING = Rules((), Quantize(8), exact=())
OVERFLOWS = {3: [2], 4: [0], 8: [0, 1, 2, 3]}  # step: ranks whose gradients are not finite


def loss_fn(params, x, y):
    """Mean squared error of a network that computes in float16."""
    half = jax.tree.map(lambda p: p.astype(jnp.float16), params)
    out = jnp.tanh(x.astype(jnp.float16) @ half["a"]) @ half["b"] + half["bias"]
    return jnp.mean(jnp.square(out.astype(jnp.float32) - y))


def own_mean(scale, params, batch):
    """What DynamicScale does by itself: an exact mean in fp32."""
    return scale.value_and_grad(loss_fn, axis_name="batch")(params, *batch)


def compressed_mean(scale, params, batch):
    """The recipe: no axis_name, the minimum of all ranks' scales and flags, a compressed mean."""
    scale, finite, loss, grads = scale.value_and_grad(loss_fn)(params, *batch)
    scale, finite = lax.pmin((scale, finite), "batch")
    grads = cgx_jax.pmean_compressed(grads, "batch", EVERYTHING, exchange="xla")
    return scale, finite, loss, grads


def step(mean, scale, params, batch):
    scale, finite, loss, grads = mean(scale, params, batch)
    moved = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
    params = jax.tree.map(functools.partial(jnp.where, finite), moved, params)
    return scale, params, lax.pmean(loss, "batch"), finite


def under_pmap(mean):
    """Every output has a leading axis of ranks."""
    p_step = jax.pmap(functools.partial(step, mean), "batch", devices=jax.devices()[:WORLD])
    rows = NamedSharding(MESH, P("batch"))
    return p_step, lambda x: jax.device_put(np.broadcast_to(x, (WORLD, *np.shape(x))), rows)


def under_shard_map(mean):
    """Outputs that check_vma knows to be the same on all ranks."""

    @jax.jit
    @jax.shard_map(mesh=MESH, in_specs=(P(), P(), P("batch")), out_specs=P())
    def sharded(scale, params, batch):
        def varying(scale, params, batch):
            return mean(
                scale, jax.tree.map(lambda p: lax.pcast(p, "batch", to="varying"), params), batch
            )

        return step(varying, scale, params, jax.tree.map(lambda x: x[0], batch))

    return sharded, lambda x: jax.device_put(np.asarray(x), NamedSharding(MESH, P()))


WAYS = {"pmap": under_pmap, "shard_map": under_shard_map}


def initial():
    rng = np.random.default_rng(0)
    shapes = {"a": (32, 64), "b": (64, 48), "bias": (48,)}
    params = {k: rng.normal(size=s).astype(np.float32) / 8 for k, s in shapes.items()}
    return DynamicScale(growth_interval=2, scale=1024.0), params


def batches(steps):
    rng = np.random.default_rng(1)
    x = rng.normal(size=(steps, WORLD, 16, 32)).astype(np.float32)
    y = np.tanh(x @ rng.normal(size=(32, 48)).astype(np.float32))
    for t, ranks in OVERFLOWS.items():
        if t < steps:
            y[t, ranks] *= 1e7
    return list(zip(x, y, strict=True))


def train(way, mean, steps=12):
    """Scales, flags and losses of every step, [steps, ranks], and the parameters of every rank."""
    f, place = WAYS[way](mean)
    scale, params = jax.tree.map(place, initial())
    seen = []
    for batch in batches(steps):
        scale, params, loss, finite = f(scale, params, batch)
        here = (scale.scale, scale.fin_steps, finite, loss)
        seen.append([np.ravel([s.data for s in x.addressable_shards]) for x in here])
    held = jax.tree.map(
        lambda x: np.stack([np.squeeze(s.data) for s in x.addressable_shards]), params
    )
    return [np.stack(x) for x in zip(*seen, strict=True)], held


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.quick("shard_map")
def test_scale_is_that_of_an_exact_mean_on_every_rank(way):
    (scale, steps, finite, loss), params = train(way, compressed_mean)
    (own_scale, own_steps, own_finite, own_loss), _ = train(way, own_mean)
    skipped = np.array([t in OVERFLOWS for t in range(12)])
    np.testing.assert_array_equal(finite, np.broadcast_to(~skipped[:, None], (12, WORLD)))
    np.testing.assert_array_equal(finite, own_finite)
    np.testing.assert_array_equal(scale, own_scale)
    np.testing.assert_array_equal(steps, own_steps)
    assert len(set(scale[:, 0])) > 2  # it grew and shrank
    np.testing.assert_allclose(loss[~skipped], own_loss[~skipped], rtol=0.02)
    for leaf in jax.tree.leaves(params):
        np.testing.assert_array_equal(leaf, np.broadcast_to(leaf[:1], leaf.shape))


def test_scale_of_a_rank_that_asks_nobody_is_its_own():
    def alone(scale, params, batch):
        *own, grads = scale.value_and_grad(loss_fn)(params, *batch)
        return *own, cgx_jax.pmean_compressed(grads, "batch", EVERYTHING, exchange="xla")

    (scale, *_), _ = train("pmap", alone, 4)
    assert len(set(scale[-1])) == 2


def collectives(way, mean):
    """Returns (dtype, number of values) of each result of the compiled step's collectives."""
    f, place = WAYS[way](mean)
    args = (*jax.tree.map(place, initial()), batches(1)[0])
    text = f.lower(*args).compile().as_text()
    found = re.findall(r"= (\(?.*?) (?:all-to-all|all-gather|all-reduce|reduce-scatter)\(", text)
    shapes = [s for line in found for s in re.findall(r"(\w+)\[([\d,]*)\]", line)]
    return [(kind, int(np.prod([int(n) for n in dims.split(",") if n]))) for kind, dims in shapes]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.quick("shard_map")
def test_wire_carries_bytes_alone_but_for_scalars(way):
    arrays = {kind for kind, size in collectives(way, compressed_mean) if size > 1}
    assert arrays == {"u8"}
    assert "f32" in {kind for kind, size in collectives(way, own_mean) if size > 1}
