"""The backward-pass hook: its gradients, trees of any paths, and what is hooked twice."""

import functools
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from cgx_jax import Identity, Plan, Quantize, reduce_in_backward
from plain_jit_case import check_close, loss_fn, params_and_batch

pytestmark = [pytest.mark.oldest, pytest.mark.usefixtures("unoptimized")]


def over(mesh, f, **options):
    """Returns f(parameters, every rank's part), summed by the ranks."""
    specs = {"in_specs": (P(), P("data")), "out_specs": P()} | options
    return jax.shard_map(f, mesh=mesh, **specs)


class Layer(NamedTuple):
    weight: Any
    bias: Any
    after: Any


@pytest.mark.parametrize(
    "params",
    [
        [np.full((33, 70), i, np.float32) for i in range(11)],
        Layer(*(np.full(s, 1, np.float32) for s in ((64, 64), (64,), (40, 40)))),
        {"a": {"b": np.ones((40, 40), np.float32)}, "a/b": np.ones((50, 50), np.float32)},
    ],
    ids=["eleven layers", "fields not in alphabetical order", "two leaves of one path"],
)
def test_hook_takes_leaves_whose_paths_are_in_any_order(params, mesh):
    scale = [float(i + 1) for i in range(len(jax.tree.leaves(params)))]

    def loss(p, x):
        p = reduce_in_backward(p, "data", Quantize(8), exchange="xla")
        leaves = jax.tree.leaves(p)
        return sum(
            s * jnp.vdot(v, jnp.full(v.shape, x[0])) for s, v in zip(scale, leaves, strict=True)
        )

    grad = over(mesh, jax.grad(loss), check_vma=False)
    got = jax.jit(grad)(params, np.arange(8, dtype=np.float32))
    for s, g, v in zip(scale, jax.tree.leaves(got), jax.tree.leaves(params), strict=True):
        np.testing.assert_allclose(g, np.full(v.shape, 28 * s), rtol=1e-6)


def test_hook_returns_what_has_no_gradient_as_it_is(mesh):
    tree = {"w": jnp.ones((40, 40)), "count": jnp.int32(2), "key": jax.random.key(3)}
    hook = functools.partial(reduce_in_backward, axis_name="data", compressor=Quantize(8))
    got = jax.jit(over(mesh, lambda p, _: hook(p), check_vma=False))(tree, jnp.zeros(8))
    assert jax.tree.all(jax.tree.map(lambda x, y: (x == y).all(), got, tree))


def test_an_override_holds_for_all_leaves_of_its_path():
    tree = {"a": {"b": np.ones((40, 40), np.float32)}, "a/b": np.ones((50, 50), np.float32)}
    plan = Plan.build(tree, Quantize(8), overrides={"a/b": Quantize(2)})
    assert plan.compressors == (Quantize(2),) * 2


def test_exact_leaves_share_a_collective_of_up_to_64_kib():
    """Eleven vectors of 1 KiB and a matrix of 48 KiB share one; another 32 KiB do not fit."""
    params = {f"bias {i:2}": np.ones(256, np.float32) for i in range(11)}
    params |= {"w": np.ones((96, 128), np.float32), "x": np.ones((64, 128), np.float32)}
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))

    def loss(p, x):
        p = reduce_in_backward(p, "data", Identity())
        return sum(x[0] * (i + 1) * v.sum() for i, v in enumerate(jax.tree.leaves(p)))

    grad = jax.jit(over(mesh, jax.grad(loss), check_vma=False))
    x = np.array([1.0, 2.0], np.float32)
    assert grad.lower(params, x).as_text().count('"stablehlo.all_reduce"') == 2
    for i, g in enumerate(jax.tree.leaves(grad(params, x))):
        np.testing.assert_array_equal(g, np.full(g.shape, 3.0 * (i + 1)))


PARAMS = {"w": np.full((3, 40, 40), 0.1, np.float32), "b": np.ones(40, np.float32)}


def hook(p, axis="data"):
    return reduce_in_backward(p, axis, Quantize(8), exchange="xla")


def loss(p, x):
    return sum(jnp.sum(jnp.tanh(v * x)) for v in jax.tree.leaves(p))


def through_layers(p, x):
    """Layers that a scan hooks one by one."""
    first = x * jnp.ones((40, 40))
    return jax.lax.scan(lambda c, w: (jnp.tanh(c * hook(w)), None), first, p["w"])[0].sum()


def twice(p):
    return jax.tree.map(lambda v: v * 2, p)


def repeated(p, x):
    q = hook(p)
    step = lambda c, _: (c + loss(hook(q), x), None)  # noqa: E731
    return jax.lax.scan(step, 0 * x, None, length=2)[0]


HOOKED_TWICE = {
    "directly": lambda p, x: loss(hook(hook(p)), x),
    "after arithmetic": lambda p, x: loss(hook(twice(hook(p))), x),
    "one leaf": lambda p, x: loss(hook({"w": hook(p["w"]), "b": p["b"]}), x),
    "vmap": lambda p, x: loss(jax.vmap(hook)(hook(p["w"])), x),
    "the outer in jit": lambda p, x: loss(hook(jax.jit(hook)(p)), x),
    "both in jit": lambda p, x: jax.jit(lambda q: loss(hook(hook(q)), x))(p),
    "custom rules": lambda p, x: loss(hook(jax.tree.map(jax.nn.relu, hook(p))), x),
    # visible only while the gradient is traced
    "jit": lambda p, x: jax.jit(lambda q: loss(hook(q), x))(hook(p)),
    "remat": lambda p, x: jax.checkpoint(lambda q: loss(hook(q), x))(hook(p)),
    "scanned": lambda p, x: through_layers(hook(p), x),
    "constants of a scan": repeated,
    "cond": lambda p, x: jax.lax.cond(
        x > 1, lambda q: loss(hook(q), x), lambda q: 0 * loss(q, x), hook(p)
    ),
}
EAGER_TOO = ("after arithmetic", "the outer in jit")
HOOKED_ONCE = {
    "once": lambda p, x: loss(hook(p), x),
    "in two losses": lambda p, x: loss(hook(p), x) + 2 * loss(hook(p), x),
    "in parts": lambda p, x: loss(hook({"w": p["w"]}), x) * loss(hook({"b": p["b"]}), x),
    "beside layers of a scan": lambda p, x: through_layers(p, x * loss(hook(p["b"]), x)),
    "in remat": lambda p, x: jax.checkpoint(lambda q: loss(hook(q), x))(p),
    "activations between": lambda p, x: loss(hook(p["b"]), x * loss(hook(p["w"]), x)),
    "stopped before": lambda p, x: loss(hook(jax.tree.map(jax.lax.stop_gradient, hook(p))), x),
}


POINTS = np.linspace(0.1, 0.8, 8, dtype=np.float32)


def of_all_ranks():
    """The gradient of "b", without hooks."""
    return jax.jit(jax.vmap(jax.grad(loss), (None, 0)))(PARAMS, POINTS)["b"].sum(0)


def gradient(f, mesh, *, check_vma, compiled=True):
    g = over(mesh, lambda p, x: jax.grad(f)(p, x[0]), check_vma=check_vma)
    return (jax.jit(g) if compiled else g)(PARAMS, POINTS)


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("name", HOOKED_TWICE)
def test_parameters_that_are_hooked_already_are_refused(name, check_vma, mesh):
    says = (
        "reduce_in_backward: .*summed over axis 'data' already.*multiplied by the number of ranks"
    )
    for compiled in (True, False) if name in EAGER_TOO else (True,):
        with pytest.raises(ValueError, match=says):
            gradient(HOOKED_TWICE[name], mesh, check_vma=check_vma, compiled=compiled)


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("name", HOOKED_ONCE)
@pytest.mark.quick(
    "once-True", "in parts-True", "beside layers of a scan-True", "stopped before-True"
)
def test_parameters_that_are_hooked_once_on_each_path_are_not_refused(name, compiled, mesh):
    got = gradient(HOOKED_ONCE[name], mesh, check_vma=False, compiled=compiled)
    if name == "once":
        np.testing.assert_allclose(got["b"], of_all_ranks(), rtol=1e-5)


@pytest.mark.parametrize("check_vma", [True, False])
def test_a_hessian_times_a_vector_is_a_sum_in_forward_mode_and_refused_in_reverse(check_vma, mesh):
    p, v = PARAMS["b"], np.linspace(-1, 1, 40, dtype=np.float32)
    forward = lambda f, x: jax.jvp(jax.grad(lambda p: f(p, x)), (p,), (v,))[1]  # noqa: E731
    reverse = lambda f, x: jax.grad(lambda p: jax.grad(f)(p, x) @ v)(p)  # noqa: E731

    def on_ranks(product):
        hooked = lambda p, x: loss(reduce_in_backward(p, "data", Identity()), x)  # noqa: E731
        f = lambda x: product(hooked, x[0])  # noqa: E731
        return jax.jit(over(mesh, f, in_specs=P("data"), check_vma=check_vma))(POINTS)

    want = sum(forward(loss, x) for x in POINTS)
    np.testing.assert_allclose(on_ranks(forward), want, rtol=1e-5, atol=1e-5)
    says = r"^reduce_in_backward: the operand is differentiated twice in reverse mode.*jax\.jvp"
    with pytest.raises(ValueError, match=says):
        on_ranks(reverse)


def test_a_cast_inside_the_differentiated_function_is_refused(mesh):
    """Its gradient is another sum over the ranks."""
    inside = lambda p, x: loss(hook(jax.lax.pcast(p, "data", to="varying")), x)  # noqa: E731
    with pytest.raises(ValueError, match="pcast makes them vary inside"):
        gradient(inside, mesh, check_vma=True)


def test_hooks_over_two_axes_add_up_over_both(mesh_2d):
    f = lambda p, x: loss(hook(hook(p), "model"), x)  # noqa: E731
    of_rank = lambda p, x: jax.grad(f)(p, x[0, 0])  # noqa: E731
    g = over(mesh_2d, of_rank, in_specs=(P(), P("data", "model")), check_vma=False)
    got = jax.jit(g)(PARAMS, POINTS.reshape(4, 2))["b"]
    np.testing.assert_allclose(got, of_all_ranks(), rtol=1e-5)


# --- on a model


def test_hook_reduces_each_buffer_by_itself_in_the_backward_pass(mesh):
    params, *batch = params_and_batch()
    plan = Plan.build(params, Quantize(8), fusion_bytes=1)

    def loss(p, batch):
        return loss_fn(reduce_in_backward(p, "data", plan, exchange="xla"), *batch)

    text = jax.jit(over(mesh, jax.grad(loss))).lower(params, batch).compile().as_text()
    assert len(re.findall(r" all-to-all\(", text)) == len(plan.buffers) == 2


def test_hook_takes_a_key_and_typed_parameters_that_vary(mesh):
    params, x, y = params_and_batch()
    code = Quantize(8, rounding="stochastic")

    def step(p, batch, key):
        def loss(p):
            p = reduce_in_backward(p, "data", code, key=key, exchange="xla")
            return loss_fn(p, *batch) / 8

        p = jax.tree.map(lambda v: lax.pcast(v, "data", to="varying"), p)
        return jax.tree.map(lambda g: g[None], jax.grad(loss)(p))

    f = over(mesh, step, in_specs=(P(), P("data"), P()), out_specs=P("data"))
    grads = jax.jit(f)(params, (x, y), jax.random.key(0))
    for g in jax.tree.leaves(grads):
        assert (np.asarray(g) == np.asarray(g)[:1]).all()
    check_close(jax.tree.map(lambda g: g[3], grads), jax.grad(loss_fn)(params, x, y))
