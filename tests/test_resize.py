"""A state for another number of ranks owes the optimizer what the old one owed."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import cgx_jax
from cgx_jax import ErrorFeedback, Identity, Quantize, Rules, SecondMoment, resize_state
from cgx_jax.compressors import DGC, PowerSGD, Signum, TopK
from cgx_jax.transforms import MomentumCorrection, diloco, local_steps
from worlds import RANKS, normal, placed, ranks, with_state

pytestmark = pytest.mark.usefixtures("unoptimized")

SHAPE = (24, 40)
EXCHANGE = {"exchange": "xla"}


def sync(world, compressor=None, memory=None, **options):
    policy = Rules((), compressor or Quantize(2), exact=())
    options |= {"memory": memory, "mesh": ranks(world)}
    return cgx_jax.sync_gradients("data", policy, **options, **EXCHANGE)


def stepper(tx, world, state):
    def step(grads, state):
        updates, state = tx.update({"w": grads[0]}, state, {"w": jnp.zeros(SHAPE)})
        return updates["w"], state

    return jax.jit(with_state(step, ranks(world), state, RANKS))


def on_host(tree):
    return jax.tree.map(np.asarray, tree)


def resized(state, world):
    """Returns the state resized to `world` ranks and placed on their mesh."""
    return placed(resize_state(state, world), ranks(world))


def owed(state):
    """Returns what the optimizer has not received yet: an update is a mean, so the residuals'."""
    residuals = np.asarray(state.memory[0]["w"], np.float64)
    return residuals.sum(0) / len(residuals)


@pytest.mark.parametrize(
    "worlds", [(4, 3, 4), pytest.param((2, 8, 3), marks=pytest.mark.slow)], ids=str
)
def test_the_update_that_is_owed_stays_when_ranks_leave_and_join(worlds):
    state, seen, means = sync(worlds[0], memory=ErrorFeedback()).init({"w": jnp.zeros(SHAPE)}), 0, 0
    for phase, world in enumerate(worlds):
        tx = sync(world, memory=ErrorFeedback())
        if phase:
            before, state = owed(state), resized(state, world)
            np.testing.assert_allclose(owed(state), before, atol=1e-6)
        step = stepper(tx, world, state)
        for i in range(3):
            grads = normal(world, *SHAPE, seed=10 * phase + i)
            update, state = step(grads, state)
            means = means + grads.mean(0, np.float64)
            seen = seen + np.asarray(update, np.float64)
        state = on_host(state)
    assert np.abs(means - seen).max() > 0.1  # something is owed
    np.testing.assert_allclose(means - seen, owed(state), atol=1e-5)


def local(world):
    return local_steps(optax.adam(0.1), "data", Quantize(2), every=2, mesh=ranks(world), **EXCHANGE)


def trained(worlds, steps, every):
    """Trains with `diloco` for some steps with each number of workers, all on the same gradients.

    Returns the updates, the states before each change, and those after it.
    """
    updates, before, after, state = [], [], [], None
    for phase, world in enumerate(worlds):
        policy = Rules((), Identity(), exact=())
        tx = diloco(optax.adam(0.1), "data", policy, every=every, mesh=ranks(world), **EXCHANGE)
        if state is None:
            state = placed(tx.init({"w": jnp.zeros(SHAPE)}), ranks(world))
        else:
            before.append(state)
            state = resized(state, world)
            after.append(on_host(state))
        with jax.numpy_dtype_promotion("standard"):  # Adam's count needs it
            step = stepper(tx, world, state)
            for i in range(steps):
                grads = np.broadcast_to(normal(*SHAPE, seed=steps * phase + i), (world, *SHAPE))
                update, state = step(grads, state)
                updates.append(np.asarray(update))
        state = on_host(state)
    return updates, before, after


@pytest.mark.parametrize("steps", [4, pytest.param(3, marks=pytest.mark.slow)])
def test_training_with_diloco_is_the_same_when_workers_leave_and_join(steps):
    every = 2
    updates, before, after = trained((4, 3, 4), steps, every)
    expected, *_ = trained((4, 4, 4), steps, every)
    for i, (update, other) in enumerate(zip(updates, expected, strict=True), 1):
        np.testing.assert_allclose(update, other, atol=1e-6)
        assert update.any() == (i % every == 0)  # a worker that is lost loses the steps in between
    for old, new in zip(before, after, strict=True):
        specs = cgx_jax.state_specs(old, "data")
        shared = [i for i, spec in enumerate(jax.tree.leaves(specs)) if spec == P()]
        assert len(shared) > 2
        for i in shared:
            np.testing.assert_array_equal(jax.tree.leaves(new)[i], jax.tree.leaves(old)[i])
        assert steps % every or not old.moved["w"].any()  # nothing of an ended round is lost


# Transformations by world size, with state of each rank and state that all ranks share.
STATES = {
    "velocities": lambda world: sync(world, TopK(0.1), MomentumCorrection()),
    "codes": lambda world: sync(world, Signum()),
    "shared codes": lambda world: sync(world, PowerSGD(2), ErrorFeedback()),
    "rooms": lambda world: sync(world, DGC(0.1), ErrorFeedback()),
    "moments": lambda world: sync(world, None, ErrorFeedback(), precondition=SecondMoment()),
    "local": local,
}


@pytest.mark.parametrize("name", STATES)
@pytest.mark.quick("velocities", "local")
def test_all_that_belongs_to_a_rank_keeps_its_mean_and_the_rest_stays(name):
    def chain(world):
        return optax.chain(STATES[name](world), optax.trace(0.9))

    state = chain(4).init({"w": jnp.zeros(SHAPE)})
    specs = cgx_jax.state_specs(state, "data")
    with jax.numpy_dtype_promotion("standard"):  # Adam's count needs it
        _, state = stepper(chain(4), 4, state)(normal(4, *SHAPE), state)
        new = resized(state, 3)
        update, _ = stepper(chain(3), 3, new)(normal(3, *SHAPE), new)
    assert np.isfinite(update).all()
    split = 0
    counts = [x.overflow for x in (state[0], new[0]) if hasattr(x, "overflow")]
    for old, after, spec in zip(*map(jax.tree.leaves, (state, new, specs)), strict=True):
        if spec == P():
            np.testing.assert_array_equal(after, old)
            continue
        split += 1
        assert (after.shape, after.dtype) == ((3, *old.shape[1:]), old.dtype)
        if not any(old is count for count in jax.tree.leaves(counts)):
            np.testing.assert_allclose(jnp.mean(after, 0), jnp.mean(old, 0), atol=1e-6)
    assert split > 0


@pytest.mark.slow
def test_orbax_restores_what_another_number_of_ranks_has_saved(tmp_path):
    import orbax.checkpoint as ocp

    params = {"w": jnp.zeros(SHAPE)}
    state = sync(4, memory=ErrorFeedback()).init(params)
    _, state = stepper(sync(4, memory=ErrorFeedback()), 4, state)(normal(4, *SHAPE), state)
    tx = sync(3, memory=ErrorFeedback())
    whole = NamedSharding(ranks(3), P())
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state)
        checkpointer.wait_until_finished()
        saved = resize_state(jax.eval_shape(tx.init, params), 4)
        target = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole), saved
        )
        restored = checkpointer.restore(tmp_path / "state", target)
    new = resized(restored, 3)
    np.testing.assert_allclose(owed(new), owed(state), atol=1e-6)
    stepper(tx, 3, new)(normal(3, *SHAPE), new)


def test_half_precision_rows_are_averaged_in_fp32():
    tx = sync(4, memory=ErrorFeedback())
    state = tx.init({"w": jnp.zeros(SHAPE, jnp.float16)})
    large = jnp.full((4, *SHAPE), 60000, jnp.float16)
    state = state._replace(memory=({"w": large},))
    np.testing.assert_array_equal(resize_state(state, 3).memory[0]["w"], large[:3])


def test_equal_rows_stay_and_means_of_finite_rows_are_finite():
    tx = local_steps(optax.inject_hyperparams(optax.adamw)(0.01), "data", every=2, mesh=ranks(7))
    state = tx.init({"w": jnp.zeros(SHAPE)})
    rates = state.optimizer.hyperparams
    jax.tree.map(
        lambda new, old: np.testing.assert_array_equal(new, old[:3]),
        resize_state(state, 3).optimizer.hyperparams,
        rates,
    )
    state = sync(4, memory=ErrorFeedback()).init({"w": jnp.zeros(SHAPE)})
    large = state._replace(step=3, memory=({"w": jnp.full((4, *SHAPE), 2e38)},))
    np.testing.assert_array_equal(resize_state(large, 2).memory[0]["w"], large.memory[0]["w"][:2])


def test_workers_of_several_ranks_are_resized_and_what_is_shared_stays():
    mesh = jax.make_mesh((2, 4), ("pod", "data"))
    inner = cgx_jax.sync_gradients("data", Quantize(8), memory=ErrorFeedback(), mesh=mesh)
    tx = diloco(optax.chain(inner, optax.sgd(0.1)), "pod", every=2, mesh=mesh)
    state = tx.init({"w": jnp.zeros(SHAPE)})
    fewer = resize_state(state, 1)
    assert fewer.moved["w"].shape == (1, *SHAPE)
    shapes = functools.partial(jax.tree.map, lambda x: x.shape)
    assert shapes(fewer.fragments[0].outer) == shapes(state.fragments[0].outer)
    assert fewer.step.shape == ()


def of_two_worlds():
    a, b = (sync(n, memory=ErrorFeedback()).init({"w": jnp.zeros(SHAPE)}) for n in (2, 4))
    return {"a": a, "b": b}


def differing():
    state = local(2).init({"w": jnp.zeros(SHAPE)})
    (adam, *rest) = state.optimizer
    return state._replace(optimizer=(adam._replace(count=jnp.arange(2)), *rest))


@pytest.mark.parametrize(
    ("make", "world", "says"),
    [
        (of_two_worlds, 0, "world=0 must be at least 1"),
        (of_two_worlds, 3, r"rows for \[2, 4\] ranks"),
        (differing, 3, "differ between ranks, and integers have no mean"),
        (lambda: {"w": jnp.zeros(3)}, 3, "no state of sync_gradients or diloco"),
    ],
    ids=["world", "rows", "integers", "none"],
)
def test_what_cannot_be_resized_is_refused(make, world, says):
    with pytest.raises(ValueError, match=f"^resize_state: .*{says}"):
        resize_state(make(), world)


def test_a_traced_state_is_refused():
    state = local(2).init({"w": jnp.zeros(SHAPE)})
    with pytest.raises(ValueError, match=r"^resize_state: the state is traced.*; make this call"):
        jax.jit(lambda state: resize_state(state, 3))(state)


def test_a_state_of_pmap_is_resized_whole():
    fed = cgx_jax.sync_gradients("i", Quantize(2), memory=ErrorFeedback())
    tx = optax.chain(fed, optax.sgd(0.1, 0.9))
    step = jax.pmap(lambda g, s: tx.update(g, s)[1], axis_name="i")
    init = jax.pmap(tx.init, axis_name="i")
    grads = {"w": normal(3, 64, 64)}
    state = step(grads, init(grads))
    fewer = resize_state(state, 2)
    like = jax.eval_shape(init, {"w": jnp.zeros((2, 64, 64))})
    shapes = functools.partial(jax.tree.map, lambda x: x.shape)
    assert shapes(fewer) == shapes(like)
    owed = np.asarray(state[0].memory[0]["w"]).mean(0)
    np.testing.assert_allclose(fewer[0].memory[0]["w"][1], owed, rtol=1e-6)
    assert resize_state({"state": state, "epoch": 3}, 2)["epoch"] == 3
    one = jax.tree.map(lambda x: x[0], on_host(state))  # as flax.jax_utils.unreplicate
    assert cgx_jax.transforms.metrics(one) == {"cgx/skipped": 0}
    np.testing.assert_array_equal(fewer[1][0].trace["w"][1], state[1][0].trace["w"][0])
