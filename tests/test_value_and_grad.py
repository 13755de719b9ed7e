"""value_and_grad: what it differentiates and splits, and what it refuses."""

import functools
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
from cgx_jax import ErrorFeedback, Quantize
from plain_jit_case import auto_mesh, check_close, exact_case, loss_fn, params_and_batch, vag

Q8 = Quantize(8)


@pytest.fixture(scope="module")
def case():
    return exact_case()


@pytest.mark.parametrize("jit", [True, False])
def test_value_and_grad_of_a_bare_tree(jit):
    params, x, y = params_and_batch()
    f = cgx_jax.value_and_grad(loss_fn, "data", Q8, mesh=auto_mesh(), exchange="xla")
    loss, grads = (jax.jit(f) if jit else f)(params, x, y)
    want = jax.value_and_grad(loss_fn)(params, x, y)
    np.testing.assert_allclose(loss, want[0], rtol=1e-5)
    check_close(grads, want[1])


def test_value_and_grad_of_linen_parameters():
    _, x, y = params_and_batch()
    model = nn.Dense(32)
    params = model.init(jax.random.key(0), x)
    loss = lambda p, x, y: jnp.mean((model.apply(p, x) - y) ** 2)  # noqa: E731
    f = jax.jit(cgx_jax.value_and_grad(loss, "data", Q8, mesh=auto_mesh(), exchange="xla"))
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
    f = cgx_jax.value_and_grad(net_loss, "data", Q8, mesh=auto_mesh(), exchange="xla")
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
        step_grads = cgx_jax.value_and_grad(net_loss, "data", Q8, mesh=mesh, exchange="xla")

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
    assert not re.search(r" float32\[32,64\]\S* all-gather\(", text)


def test_specs_of_a_bare_tree_are_needed_under_jit_and_read_from_arrays_outside():
    params, x, y = params_and_batch()
    mesh = auto_mesh((4, 2), ("data", "model"))
    f = cgx_jax.value_and_grad(loss_fn, "data", Q8, mesh=mesh, exchange="xla")
    specs = {"a": {"w": P(None, "model"), "b": P("model")}, "c": {"w": P("model", None)}}
    params = jax.tree.map(lambda p, s: jax.device_put(p, NamedSharding(mesh, s)), params, specs)
    with pytest.raises(ValueError, match="specs="):
        jax.jit(f)(params, x, y)
    given = cgx_jax.value_and_grad(loss_fn, "data", Q8, mesh=mesh, exchange="xla", specs=specs)
    want = jax.grad(loss_fn)(params, x, y)
    for run in (f, jax.jit(given)):
        _, grads = run(params, x, y)
        check_close(grads, want)
        assert grads["a"]["w"].sharding.spec == P(None, "model")


def closed_over(params, x, y):
    return vag(lambda p: loss_fn(p, x, y))(params)


def by_partial(params, x, y):
    return vag(functools.partial(loss_fn, x=x, y=y))(params)


def through_two_functions(params, x, y):
    inner = lambda p: loss_fn(p, x, y)  # noqa: E731
    return vag(lambda p: inner(p))(params)


def by_keyword(params, x, y):
    return vag(lambda p, x, *, target, scale, train: scale * loss_fn(p, x, target))(
        params, x, target=y, scale=jnp.float32(1), train=True
    )


def second_argument(params, x, y):
    return vag(lambda x, p, y: loss_fn(p, x, y), argnums=1)(x, params, y)


def over_two_axes(params, x, y):
    mesh = auto_mesh((2, 4), ("data", "fsdp"))
    return cgx_jax.value_and_grad(loss_fn, ("data", "fsdp"), Q8, mesh=mesh, exchange="xla")(
        params, x, y
    )


def with_a_teacher(params, x, y):
    def loss(p, teacher, x, y):
        return loss_fn(p, x, y) + lax.stop_gradient(loss_fn(teacher, x, y) * 0)

    return vag(loss)(params, params, x, y)


CALLS = [
    closed_over,
    by_partial,
    through_two_functions,
    by_keyword,
    second_argument,
    over_two_axes,
    with_a_teacher,
]


@pytest.mark.parametrize("call", CALLS, ids=lambda f: f.__name__)
def test_arguments_and_closures_are_split_as_they_should_be(case, call):
    params, x, y, want = case
    compiled = jax.jit(call).lower(params, x, y).compile()
    got = compiled(params, x, y)
    np.testing.assert_allclose(got[0], want[0], rtol=1e-5)
    check_close(got[1], want[1])
    # Something was compressed, and nobody computed more than its own part of the batch.
    text = compiled.as_text()
    assert re.search(r" u8\[[\d,]+\]\S* all-to-all\(", text)
    assert "f32[8,64]" in text
    assert "f32[64,64]" not in text


def test_shardings_of_concrete_arguments_give_mesh_and_split(case):
    params, x, y, want = case
    x, y = jax.device_put((x, y), NamedSharding(auto_mesh(), P("data")))
    check_close(vag(mesh=None)(params, x, y), want)
    check_close(
        vag(lambda p: loss_fn(p, x, y), mesh=None, in_specs={})(
            jax.device_put(params, NamedSharding(auto_mesh(), P()))
        ),
        want,
    )


def test_the_mesh_that_is_set_is_taken(case):
    params, x, y, want = case
    with jax.set_mesh(auto_mesh()):
        check_close(jax.jit(vag(mesh=None))(params, x, y), want)
        f = vag(mesh=None, memory=ErrorFeedback())
        (value, _), state = f.apply(f.init(params), params, x, y)
        np.testing.assert_allclose(value, want[0], rtol=1e-5)
        assert state.memory[0]["a"]["w"].sharding.spec == P("data")


@pytest.mark.parametrize("split", [True, False])
def test_explicit_meshes(case, split):
    params, x, y, want = case
    with jax.set_mesh(jax.make_mesh((8,), ("data",), axis_types=(AxisType.Explicit,))):
        if split:
            x, y = jax.device_put((x, y), P("data"))
        check_close(jax.jit(vag(mesh=None))(params, x, y), want)


def test_several_differentiated_arguments(case):
    params, x, y, want = case
    f = vag(lambda a, x, c, y: loss_fn(a | c, x, y), argnums=(0, 2))
    loss, grads = f({"a": params["a"]}, x, {"c": params["c"]}, y)
    check_close((loss, grads[0]["a"], grads[1]["c"]), (want[0], want[1]["a"], want[1]["c"]))


GLOBAL = jnp.ones((64, 32))
REFUSED = {
    "sharded parameters": (
        lambda p, x, y: vag()(jax.device_put(p, NamedSharding(auto_mesh(), P("data"))), x, y),
        r"p\['a'\]\['b'\] .* sharded over the data axis 'data'.*replicated",
    ),
    "no mesh": (lambda p, x, y: vag(mesh=None)(p, x, y), r"no mesh .*'data'.*jax.set_mesh"),
    "wrong axis": (
        lambda p, x, y: cgx_jax.value_and_grad(loss_fn, ("data", "rows"), mesh=auto_mesh()),
        r"'rows' is not in the mesh; it has \('data',\)",
    ),
    "a table": (
        lambda p, x, y: vag(lambda p, x, y, t: loss_fn(p, x, y))(p, x, y, jnp.ones(7)),
        r"t float32\[7\] is neither .* batch's 64\..*in_specs=\{'t': P\('data'\)\}",
    ),
    "first argument ambiguous": (
        lambda p, x, y: vag(lambda p, b: loss_fn(p, *b))(p, (x, y[:32])),
        r"ambiguous.*b\[0\] float32\[64,32\], b\[1\] float32\[32,32\].*in_specs",
    ),
    "indivisible": (lambda p, x, y: vag()(p, x[:60], y[:60]), r"\[60,32\].*multiple of the 8"),
    "nothing split": (lambda p, x, y: vag(lambda p: p["a"]["w"].mean())(p), r"8 times the work"),
    "a global": (
        lambda p, x, y: vag(lambda p, y: loss_fn(p, GLOBAL[: len(y)], y) + GLOBAL.mean())(p, y),
        r"float32\[64,32\] that is neither an argument.*Pass it as an argument",
    ),
    "unknown in_specs": (
        lambda p, x, y: vag(in_specs={"z": P()})(p, x, y), r"in_specs has \['z'\].*\['x', 'y'\]"
    ),
    "memory without a state": (
        lambda p, x, y: vag(memory=ErrorFeedback())(p, x, y),
        r"ErrorFeedback\(decay=1.0.*\) keeps a state.*f.init\(params\)",
    ),
    "stochastic without a state": (
        lambda p, x, y: vag(policy=Quantize(4, rounding="stochastic"))(p, x, y),
        r"rounds at random.*f.apply",
    ),
    "raw key or two examples": (
        lambda p, x, y: vag(lambda p, x, k: x.mean(), mesh=auto_mesh((2,)))(
            p, x[:2], jax.random.PRNGKey(0)
        ),
        r"k uint32\[2\] is either a raw key or a batch of two",
    ),
    "argnums": (lambda p, x, y: vag(argnums=3)(p, x, y), r"argnums \[3\].* has 3"),
}  # fmt: skip


@pytest.mark.parametrize(("call", "message"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_known_is_refused_with_the_remedy(case, call, message):
    with pytest.raises(ValueError, match=f"^value_and_grad: .*{message}"):
        call(*case[:3])


@pytest.mark.parametrize("jit", [pytest.param(True, marks=pytest.mark.slow), False])
def test_equinox_modules_are_differentiated_by_their_arrays(case, jit):
    eqx = pytest.importorskip("equinox")
    _, x, y, _ = case
    model = eqx.nn.MLP(32, 32, 64, 1, jax.nn.gelu, key=jax.random.key(0))

    def loss(model, x, y):
        return jnp.mean((jax.vmap(model)(x) - y) ** 2)

    f = vag(loss)
    got = (eqx.filter_jit(f) if jit else f)(model, x, y)
    want = eqx.filter_value_and_grad(loss)(model, x, y)
    assert jax.tree.structure(got) == jax.tree.structure(want)
    check_close(got, want)


def test_losses_with_equal_arguments_share_nothing(case):
    params, x, y, want = case
    check_close(vag()(params, x, y)[0], want[0])
    check_close(vag(lambda p, x, y: 3 * loss_fn(p, x, y))(params, x, y)[0], 3 * want[0])


def test_a_closure_keeps_what_it_shares_with_others(case):
    params, x, y, _ = case
    calls, other = 0, []

    def count():
        nonlocal calls
        calls += 1
        other.append(recursive)

    def recursive(p, depth):
        count()
        return loss_fn(p, x, y) if depth == 0 else recursive(p, depth - 1)

    f = vag(lambda p: recursive(p, 2))
    np.testing.assert_allclose(f(params)[0], loss_fn(params, x, y), rtol=1e-5)
    assert calls >= 3
    assert all(function is recursive for function in other)


def test_an_eager_closure_is_read_anew_in_every_call(case):
    params, x, y, _ = case
    factor = 1.0

    def loss(p):
        return factor * loss_fn(p, x, y)

    f = vag(loss)
    first = f(params)[0]
    factor, x = 2.0, x[::-1]
    np.testing.assert_allclose(f(params)[0], loss(params), rtol=1e-5)
    assert f(params)[0] > 1.5 * first
