"""A state for another number of ranks owes the optimizer what the old one owed."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import cgx_jax
from cgx_jax import ErrorFeedback, Quantize, Rules, resize_state
from cgx_jax.compressors import Signum, TopK
from cgx_jax.transforms import MomentumCorrection, local_steps

SHAPE = (24, 40)
EVERYTHING = {"exchange": "xla"}


def mesh_of(world):
    return Mesh(np.array(jax.devices()[:world]), ("data",))


def sync(world, compressor=None, memory=None):
    policy = Rules((), compressor or Quantize(2), exact=())
    return cgx_jax.sync_gradients("data", policy, memory=memory, mesh=mesh_of(world), **EVERYTHING)


def stepper(tx, world, state):
    specs = cgx_jax.state_specs(state, "data")

    def step(grads, state):
        updates, state = tx.update({"w": grads[0]}, state, {"w": jnp.zeros(SHAPE)})
        return updates["w"], state

    split = (P("data"), specs)
    return jax.jit(jax.shard_map(step, mesh=mesh_of(world), in_specs=split, out_specs=(P(), specs)))


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def on_host(tree):
    return jax.tree.map(np.asarray, tree)


@pytest.mark.parametrize("worlds", [(4, 3, 4), (2, 8, 3)], ids=str)
def test_nothing_is_lost_when_ranks_leave_and_join(worlds):
    """What the optimizer saw and the gradients' means differ by the mean of the memories."""
    state, seen, means = sync(worlds[0], memory=ErrorFeedback()).init({"w": jnp.zeros(SHAPE)}), 0, 0
    for phase, world in enumerate(worlds):
        tx = sync(world, memory=ErrorFeedback())
        if phase:
            before = np.mean(np.asarray(state.memory[0]["w"]), 0, np.float64)
            resized = resize_state(state, world)
            after = np.mean(np.asarray(resized.memory[0]["w"]), 0, np.float64)
            np.testing.assert_allclose(after, before, atol=1e-6)
            places = cgx_jax.state_shardings(resized, "data", mesh_of(world))
            state = jax.device_put(resized, places)
        step = stepper(tx, world, state)
        for i in range(3):
            grads = normal(world, *SHAPE, seed=10 * phase + i)
            update, state = step(grads, state)
            means = means + grads.mean(0, np.float64)
            seen = seen + np.asarray(update, np.float64)
            state = on_host(state)
    assert np.abs(means - seen).max() > 0.1  # something is owed
    owed = np.mean(state.memory[0]["w"], 0, np.float64)
    np.testing.assert_allclose(means - seen, owed, atol=1e-5)


STATES = {
    "momentum": lambda: sync(4, TopK(0.1), MomentumCorrection()),
    "codes": lambda: sync(4, Signum()),
    "local": lambda: local_steps(
        optax.adam(0.1), "data", Quantize(2), every=2, mesh=mesh_of(4), **EVERYTHING
    ),
}


@pytest.mark.parametrize("name", STATES)
def test_all_that_belongs_to_a_rank_keeps_its_mean(name):
    tx = optax.chain(STATES[name](), optax.trace(0.9))
    state = tx.init({"w": jnp.zeros(SHAPE)})
    specs = jax.tree.leaves(cgx_jax.state_specs(state, "data"))
    with jax.numpy_dtype_promotion("standard"):  # which Adam's count needs
        _, state = stepper(tx, 4, state)(normal(4, *SHAPE), state)
    pairs = zip(jax.tree.leaves(state), jax.tree.leaves(resize_state(state, 3)), specs, strict=True)
    split = 0
    for old, new, spec in pairs:
        if spec == P():
            np.testing.assert_array_equal(new, old)
        else:
            split += 1
            assert (new.shape, new.dtype) == ((3, *old.shape[1:]), old.dtype)
            np.testing.assert_allclose(jnp.mean(new, 0), jnp.mean(old, 0), atol=1e-6)
    assert split > 0


def test_half_precision_rows_are_averaged_in_fp32():
    tx = sync(4, memory=ErrorFeedback())
    state = tx.init({"w": jnp.zeros(SHAPE, jnp.float16)})
    large = jnp.full((4, *SHAPE), 60000, jnp.float16)
    state = state._replace(memory=({"w": large},))
    np.testing.assert_array_equal(resize_state(state, 3).memory[0]["w"], large[:3])


def of_two_worlds():
    a, b = (sync(n, memory=ErrorFeedback()).init({"w": jnp.zeros(SHAPE)}) for n in (2, 4))
    return {"a": a, "b": b}


def differing():
    tx = local_steps(optax.adam(0.1), "data", Quantize(2), every=2, mesh=mesh_of(2), **EVERYTHING)
    state = tx.init({"w": jnp.zeros(SHAPE)})
    (adam, *rest) = state.optimizer
    return state._replace(optimizer=(adam._replace(count=jnp.arange(2)), *rest))


@pytest.mark.parametrize(
    ("make", "world", "says"),
    [
        (of_two_worlds, 0, "world=0 must be 1 or more"),
        (of_two_worlds, 3, r"rows for \[2, 4\] ranks"),
        (differing, 3, "differ between ranks, and integers have no mean"),
        (lambda: {"w": jnp.zeros(3)}, 3, "none of sync_gradients or local_steps"),
    ],
    ids=["world", "rows", "integers", "none"],
)
def test_what_cannot_be_resized_is_refused(make, world, says):
    with pytest.raises(ValueError, match=f"^resize_state: .*{says}"):
        resize_state(make(), world)
