"""value_and_grad with a state: memory, preconditioning, randomness, adaptive policies."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import cgx_jax
from cgx_jax import ErrorFeedback, Quantize, SecondMoment
from plain_jit_case import auto_mesh, check_close, loss_fn, vag
from worlds import with_state

pytestmark = pytest.mark.usefixtures("unoptimized")


@pytest.mark.parametrize(
    ("policy", "options"),
    [
        (Quantize(4), {"memory": ErrorFeedback()}),
        (Quantize(4), {"memory": ErrorFeedback(), "precondition": SecondMoment()}),
        (Quantize(4, rounding="stochastic"), {"seed": 3}),
    ],
    ids=["memory", "preconditioned memory", "stochastic"],
)
@pytest.mark.quick("memory")
def test_a_state_goes_through_steps_as_sync_gradients_keeps_it(case, policy, options):
    params, x, y, _ = case
    mesh = auto_mesh()
    f = vag(policy=policy, **options)
    step = jax.jit(f.apply, donate_argnums=0)
    state = f.init(params)
    placed = cgx_jax.state_shardings(state, "data", mesh)
    tx = cgx_jax.sync_gradients("data", policy, mesh=mesh, exchange="xla", **options)
    by_hand = lambda p, x, y, state: tx.update(jax.grad(loss_fn)(p, x, y), state)  # noqa: E731
    split = P(), P("data"), P("data")
    by_hand = jax.jit(with_state(by_hand, mesh, state, *split, check_vma=False))
    other = tx.init(params)
    for t in range(3):
        (_, grads), state = step(state, params, jnp.roll(x, t, 0), y)
        want, other = by_hand(params, jnp.roll(x, t, 0), y, other)
        check_close(grads, want, 0.05)
    assert int(state.step) == 3
    for array, at in zip(jax.tree.leaves(state), jax.tree.leaves(placed), strict=True):
        assert array.sharding.is_equivalent_to(at, array.ndim)


@pytest.mark.usefixtures("optimized")
def test_a_loss_may_be_made_inside_the_step(case):
    params, x, y, _ = case
    options = {"memory": ErrorFeedback(), "mesh": auto_mesh(), "exchange": "xla"}
    outside = cgx_jax.value_and_grad(None, "data", Quantize(4), **options)
    state = outside.init(params)

    @jax.jit
    def step(state, params, x, y):
        own = lambda p, x, y: loss_fn(p, x, y)  # noqa: E731
        f = cgx_jax.value_and_grad(own, "data", Quantize(4), **options)
        return f.apply(state, params, x, y)

    f = vag(memory=ErrorFeedback(), policy=Quantize(4))
    got, want = step(state, params, x, y), jax.jit(f.apply)(f.init(params), params, x, y)
    jax.tree.map(np.testing.assert_array_equal, got, want)
    with pytest.raises(TypeError, match="value_and_grad: the loss is None, which is for `init`"):
        outside.apply(state, params, x, y)


@pytest.mark.usefixtures("no_cache")
def test_an_adaptive_policy_changes_its_plan(case):
    params, x, y, want = case
    how = {"warmup": 2, "every": 3, "sample_every": 1, "candidates": [Quantize(2), Quantize(8)]}
    policy = cgx_jax.Adaptive(cgx_jax.policies.LeastError(bits_per_value=4), **how)
    f = vag(policy=policy)
    step, state = policy.jit(f.apply, donate_argnums=0), f.init(params)
    with pytest.raises(ValueError, match=r"Adaptive.*keeps a state"):
        f(params, x, y)
    with pytest.raises(ValueError, match=r"policy.jit\(step\)"):
        f.apply(state, params, x, y)
    for _ in range(9):
        (loss, _), state = step(state, params, x, y)
    np.testing.assert_allclose(loss, want[0], rtol=1e-5)
    assert len(policy.history) >= 2


def test_a_restored_state_is_placed_on_an_explicit_mesh(case):
    params, x, y, _ = case
    with jax.set_mesh(jax.make_mesh((8,), ("data",), axis_types=(AxisType.Explicit,))):
        f = vag(mesh=None, memory=ErrorFeedback())
        batch = jax.device_put((x, y), P("data"))
        _, state = jax.jit(f.apply)(f.init(params), params, *batch)
        got, want = (jax.jit(f.apply)(s, params, *batch) for s in (jax.device_get(state), state))
    jax.tree.map(np.testing.assert_array_equal, got, want)


def test_memory_of_a_module_that_can_be_called_lies_with_its_shards():
    mesh = auto_mesh((4, 2), ("data", "model"))
    model = eqx.filter(eqx.nn.MLP(64, 64, 64, 1, key=jax.random.key(0)), eqx.is_array)
    place = lambda x: jax.device_put(x, NamedSharding(mesh, P("model")))  # noqa: E731
    f = vag(None, Quantize(4), mesh=mesh, memory=ErrorFeedback())
    state = f.init(jax.tree.map(place, model))
    assert state.memory[0].layers[0].weight.sharding.spec == P("data", "model")
