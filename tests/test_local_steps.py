"""Local steps against NumPy, and one local step at a time against lax.pmean."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import cgx_jax
from cgx_jax import ErrorFeedback, Identity, Rules
from cgx_jax.compressors import TopK
from cgx_jax.transforms import local_params, local_steps

WORLD, SHAPE = 3, (8, 10)
TARGETS = np.random.default_rng(0).normal(size=(WORLD, *SHAPE)).astype(np.float32)


def mesh():
    return Mesh(np.array(jax.devices()[:WORLD]), ("data",))


def wrapped(compressor, every, optimizer=None, **options):
    return local_steps(
        optax.sgd(0.1, 0.9) if optimizer is None else optimizer,
        "data",
        Rules((), compressor, exact=()),
        every=every,
        mesh=mesh(),
        exchange="xla",
        **options,
    )


def program(tx, check_vma=True):
    """Returns the jitted step of a quadratic with each rank's own target, and its state."""
    params = jax.device_put({"w": jnp.zeros(SHAPE)}, NamedSharding(mesh(), P()))
    state = tx.init(params)
    specs = cgx_jax.state_specs(state, "data")
    state = jax.device_put(state, cgx_jax.state_shardings(state, "data", mesh()))

    def step(params, state, targets):
        here = local_params(params, state)
        grads = jax.tree.map(lambda w: w - targets[0], here)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    f = jax.shard_map(
        step,
        mesh=mesh(),
        in_specs=(P(), specs, P("data")),
        out_specs=(P(), specs),
        check_vma=check_vma,
    )
    return jax.jit(f), params, state


def trained(tx, steps, **options):
    step, params, state = program(tx, **options)
    out = []
    for _ in range(steps):
        params, state = step(params, state, TARGETS)
        out.append(np.asarray(params["w"]))
    return np.array(out), state


def largest(x, k):
    cut = np.sort(np.abs(x), None)[-k]
    return np.where(np.abs(x) >= cut, x, 0)


@pytest.mark.parametrize("check_vma", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("keep", [None, 9])
def test_ranks_train_alone_and_send_what_they_have_moved(keep, check_vma):
    every = 3
    code, memory = (Identity(), None) if keep is None else (TopK(keep), ErrorFeedback())
    got, state = trained(wrapped(code, every, memory=memory), 9, check_vma=check_vma)
    w = np.zeros(SHAPE)
    velocity = np.zeros((WORLD, *SHAPE))
    residual = np.zeros((WORLD, *SHAPE))
    for t in range(9):
        if t % every == 0:
            local = np.repeat(w[None], WORLD, 0)
        velocity = 0.9 * velocity + local - TARGETS
        local = local - 0.1 * velocity
        if t % every == every - 1:
            moved = local - w + residual
            sent = moved if keep is None else np.array([largest(x, keep) for x in moved])
            residual = moved - sent
            w = w + sent.mean(0)
        np.testing.assert_allclose(got[t], w, atol=1e-5)
    if keep is not None:
        np.testing.assert_allclose(state.fragments[0].sync.memory[0]["w"], residual, atol=1e-5)
    assert int(state.fragments[0].sync.step) == 3
    assert not np.asarray(state.moved["w"]).any()


def test_one_step_each_is_the_mean_of_the_gradients():
    got, _ = trained(wrapped(Identity(), 1, optax.sgd(0.1)), 4)
    w = np.zeros(SHAPE)
    for t in range(4):
        w = w - 0.1 * (w - TARGETS).mean(0)
        np.testing.assert_allclose(got[t], w, atol=1e-6)


def test_nothing_is_sent_but_in_a_branch():
    step, params, state = program(wrapped(Identity(), 4))
    text = step.lower(params, state, TARGETS).compile().as_text()
    entry = text[text.index("ENTRY") :]
    assert "all-reduce" in text
    assert "all-reduce" not in entry
    assert "conditional" in entry


def test_a_rank_s_parameters_are_where_it_has_moved_to():
    _, state = trained(wrapped(Identity(), 3), 1)
    np.testing.assert_allclose(state.moved["w"], 0.1 * TARGETS, atol=1e-6)
    assert state.optimizer[0].trace["w"].shape == (WORLD, *SHAPE)


def test_states_are_placed_by_their_shardings():
    _, state = trained(wrapped(TopK(9), 3, memory=ErrorFeedback()), 1)
    shardings = cgx_jax.state_shardings(state, "data", mesh())
    placed = jax.device_put(jax.tree.map(np.asarray, state), shardings)
    jax.tree.map(np.testing.assert_array_equal, placed, state)
    assert placed.moved["w"].sharding.spec == P("data")
    assert placed.step.sharding.spec == P()


@pytest.mark.parametrize(
    ("make", "error", "says"),
    [
        (lambda: wrapped(Identity(), 0), ValueError, "every=0 must be at least 1"),
        (lambda: wrapped(Identity(), 1.5), TypeError, "local_steps: every=1.5 is not an integer"),
        (lambda: local_params({}, ()), ValueError, "holds 0 states of diloco or local_steps"),
        (
            lambda: local_steps(optax.sgd(0.1), "data", every=2).init({"w": jnp.zeros(3)}),
            ValueError,
            r"local_steps: init cannot know .* pass mesh= to local_steps",
        ),
    ],
)
def test_wrong_arguments_are_refused(make, error, says):
    with pytest.raises(error, match=says):
        make()
