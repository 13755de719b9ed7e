"""The backward-pass hook and value_and_grad, with NNX, Linen and bare trees."""

import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import cgx_jax
from cgx_jax import Identity, Plan, Quantize

Q8 = Quantize(8)


def auto_mesh(shape=(8,), names=("data",)):
    return jax.make_mesh(shape, names, axis_types=(AxisType.Auto,) * len(shape))


def params_and_batch():
    rng = np.random.default_rng(0)
    params = {
        "a": {"w": rng.normal(size=(32, 64)).astype(np.float32), "b": np.zeros(64, np.float32)},
        "c": {"w": rng.normal(size=(64, 32)).astype(np.float32) / 8},
    }
    batch = rng.normal(size=(64, 32)).astype(np.float32), rng.normal(size=(64, 32))
    return jax.tree.map(jnp.asarray, params), jnp.asarray(batch[0]), jnp.float32(batch[1])


def loss_fn(p, x, y):
    return jnp.mean((jnp.tanh(x @ p["a"]["w"] + p["a"]["b"]) @ p["c"]["w"] - y) ** 2)


def check_close(got, want, relative=0.02):
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(g, w, atol=relative * np.abs(w).max() + 1e-7)


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("compressor", [Q8, Identity()], ids=str)
def test_hook_gives_the_summed_gradient(check_vma, compressor):
    params, x, y = params_and_batch()

    def step(p, x, y):
        def loss(p):
            return loss_fn(cgx_jax.reduce_in_backward(p, "data", compressor), x, y) / 8

        return jax.grad(loss)(p)

    f = jax.shard_map(
        step,
        mesh=auto_mesh(),
        in_specs=(P(), P("data"), P("data")),
        out_specs=P(),
        check_vma=check_vma,
    )
    check_close(jax.jit(f)(params, x, y), jax.grad(loss_fn)(params, x, y))


def test_hook_reduces_each_buffer_by_itself_in_the_backward_pass():
    params, x, y = params_and_batch()
    plan = Plan.build(params, Q8, fusion_bytes=1)

    def step(p, x, y):
        return jax.grad(lambda p: loss_fn(cgx_jax.reduce_in_backward(p, "data", plan), x, y))(p)

    f = jax.shard_map(step, mesh=auto_mesh(), in_specs=(P(), P("data"), P("data")), out_specs=P())
    text = jax.jit(f).lower(params, x, y).compile().as_text()
    assert len(re.findall(r" all-to-all\(", text)) == len(plan.buffers) == 2


def test_hook_takes_a_key_and_typed_parameters_that_vary():
    params, x, y = params_and_batch()
    stochastic = Quantize(8, rounding="stochastic")

    def step(p, x, y, key):
        p = jax.tree.map(lambda v: lax.pcast(v, "data", to="varying"), p)
        hook = lambda p: cgx_jax.reduce_in_backward(p, "data", stochastic, key=key)  # noqa: E731
        grads = jax.grad(lambda p: loss_fn(hook(p), x, y) / 8)(p)
        return jax.tree.map(lambda g: g[None], grads)

    f = jax.shard_map(
        step, mesh=auto_mesh(), in_specs=(P(), P("data"), P("data"), P()), out_specs=P("data")
    )
    grads = jax.jit(f)(params, x, y, jax.random.key(0))
    for g in jax.tree.leaves(grads):
        assert (np.asarray(g) == np.asarray(g)[:1]).all()
    check_close(jax.tree.map(lambda g: g[3], grads), jax.grad(loss_fn)(params, x, y))


@pytest.mark.parametrize("jit", [True, False])
def test_value_and_grad_of_a_bare_tree(jit):
    params, x, y = params_and_batch()
    f = cgx_jax.value_and_grad(loss_fn, auto_mesh(), "data", Q8)
    loss, grads = (jax.jit(f) if jit else f)(params, x, y)
    want = jax.value_and_grad(loss_fn)(params, x, y)
    np.testing.assert_allclose(loss, want[0], rtol=1e-5)
    check_close(grads, want[1])


def test_value_and_grad_averages_float_outputs_and_takes_a_key():
    params, x, y = params_and_batch()

    def with_aux(p, x, y):
        return loss_fn(p, x, y), {"mean": x.mean()}

    stochastic = Quantize(8, rounding="stochastic")
    f = cgx_jax.value_and_grad(with_aux, auto_mesh(), "data", stochastic, has_aux=True)
    (_, aux), grads = f(params, x, y, key=jax.random.key(1))
    np.testing.assert_allclose(aux["mean"], x.mean(), rtol=1e-4, atol=1e-6)
    check_close(grads, jax.grad(loss_fn)(params, x, y))


def test_value_and_grad_of_linen_parameters():
    _, x, y = params_and_batch()
    model = nn.Dense(32)
    params = model.init(jax.random.key(0), x)
    loss = lambda p, x, y: jnp.mean((model.apply(p, x) - y) ** 2)  # noqa: E731
    f = jax.jit(cgx_jax.value_and_grad(loss, auto_mesh(), "data", Q8))
    check_close(f(params, x, y)[1], jax.grad(loss)(params, x, y))


class Net(nnx.Module):
    def __init__(self, rngs, model_axis=None):
        def init(*names):
            plain = nnx.initializers.lecun_normal()
            return nnx.with_partitioning(plain, names) if model_axis else plain

        self.a = nnx.Linear(32, 64, rngs=rngs, kernel_init=init(None, model_axis))
        self.norm = nnx.BatchNorm(64, rngs=rngs)
        self.b = nnx.Linear(64, 32, rngs=rngs, kernel_init=init(model_axis, None))

    def __call__(self, x):
        return self.b(nnx.gelu(self.norm(self.a(x))))


def net_loss(model, x, y):
    return jnp.mean((model(x) - y) ** 2)


def test_value_and_grad_of_an_nnx_module_updates_its_statistics():
    _, x, y = params_and_batch()
    model = Net(nnx.Rngs(0))
    f = cgx_jax.value_and_grad(net_loss, auto_mesh(), "data", Q8)
    loss, grads = f(model, x, y)
    assert np.isfinite(loss)
    assert jax.tree.structure(grads) == jax.tree.structure(nnx.state(model, nnx.Param))
    hidden = Net(nnx.Rngs(0)).a(x)
    want = 0.01 * np.asarray(hidden).mean(0)
    np.testing.assert_allclose(model.norm.mean[...], want, rtol=1e-3, atol=1e-5)


def test_data_and_model_mesh_keeps_model_shards_sharded():
    _, x, y = params_and_batch()
    mesh = auto_mesh((4, 2), ("data", "model"))
    with jax.set_mesh(mesh):

        @nnx.jit
        def create():
            model = Net(nnx.Rngs(0), "model")
            state = nnx.state(model)
            nnx.update(model, lax.with_sharding_constraint(state, nnx.get_partition_spec(state)))
            return model

        model = create()
        optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
        step_grads = cgx_jax.value_and_grad(net_loss, mesh, "data", Q8)

        @nnx.jit
        def step(model, optimizer, x, y):
            loss, grads = step_grads(model, x, y)
            optimizer.update(model, grads)
            return loss

        split = NamedSharding(mesh, P("data"))
        x, y = jax.device_put(x, split), jax.device_put(y, split)
        losses = [float(step(model, optimizer, x, y)) for _ in range(5)]
        text = step.lower(model, optimizer, x, y).compile().as_text()
    assert losses[-1] < losses[0]
    assert model.a.kernel[...].sharding.spec == P(None, "model")
    # The payload of half a kernel each: no rank ever holds a whole model-sharded gradient.
    assert re.search(r" u8\[[\d,]+\]\S* all-to-all\(", text)
    assert not re.search(r" f32\[32,64\]\S* all-gather\(", text)


def test_specs_of_a_bare_tree_are_needed_under_jit_and_read_from_arrays_outside():
    params, x, y = params_and_batch()
    mesh = auto_mesh((4, 2), ("data", "model"))
    f = cgx_jax.value_and_grad(loss_fn, mesh, "data", Q8)
    specs = {"a": {"w": P(None, "model"), "b": P("model")}, "c": {"w": P("model", None)}}
    params = jax.tree.map(lambda p, s: jax.device_put(p, NamedSharding(mesh, s)), params, specs)
    with pytest.raises(ValueError, match="specs="):
        jax.jit(f)(params, x, y)
    given = cgx_jax.value_and_grad(loss_fn, mesh, "data", Q8, specs=specs)
    want = jax.grad(loss_fn)(params, x, y)
    for run in (f, jax.jit(given)):
        _, grads = run(params, x, y)
        check_close(grads, want)
        assert grads["a"]["w"].sharding.spec == P(None, "model")


def test_wrong_axis_and_batch_are_refused():
    params, x, y = params_and_batch()
    with pytest.raises(ValueError, match=r"'rows' is not in the mesh.*data"):
        cgx_jax.value_and_grad(loss_fn, auto_mesh(), "rows")
    with pytest.raises(ValueError, match=r"\[63, 32\].*multiple of the 8"):
        cgx_jax.value_and_grad(loss_fn, auto_mesh(), "data")(params, x[:63], y[:63])
