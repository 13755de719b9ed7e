"""sync_gradients with Optax's wrappers: inside them, before them, and with what they pass on."""

import functools
import typing

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import cgx_jax
import optax_steps
from cgx_jax import ErrorFeedback, Identity, Quantize, SecondMoment
from cgx_jax.transforms import MomentumCorrection, diloco, scatter_gradients
from worlds import first, normal, on_ranks, ranks, sharded

pytestmark = pytest.mark.usefixtures("unoptimized", "standard_promotion")

WORLD = 4
MESH = ranks(WORLD)
LIKE = {"w": jnp.ones((40, 64)), "bias": jnp.ones(3)}


def gradients(steps, seed=0):
    rng = np.random.default_rng(seed)
    shape = (steps, WORLD)
    return {k: rng.normal(size=(*shape, *x.shape)).astype(np.float32) for k, x in LIKE.items()}


@functools.cache
def sync(policy=None, **options):
    policy = Quantize(4) if policy is None else policy
    return cgx_jax.sync_gradients("data", policy, mesh=MESH, exchange="xla", **options)


KEPT = {"memory": MomentumCorrection(), "precondition": SecondMoment()}


def check_same_on_all_ranks(tree):
    for x in jax.tree.leaves(tree):
        if isinstance(x, jax.Array) and x.sharding.is_fully_replicated:
            first, *others = (np.atleast_1d(s.data) for s in x.addressable_shards)
            assert len(others) == WORLD - 1
            for other in others:
                np.testing.assert_array_equal(first.view(np.uint8), other.view(np.uint8))


def equal(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


def test_what_is_refused_around_diloco_belongs_inside():
    message = (
        r"diloco: .* around it .* Put it around .*: diloco\(optax.apply_if_finite\(optimizer, n"
    )
    tx = diloco(optax.sgd(0.1), "data", Quantize(4), every=2)
    with pytest.raises(ValueError, match=message):
        optax.apply_if_finite(tx, 5).init(LIKE)


def test_apply_if_finite_around_it_is_refused_before_a_rank_can_wait_forever():
    inner = optax.chain(sync(**KEPT), optax.sgd(0.1))
    tx = optax.apply_if_finite(inner, 5)
    message = "sync_gradients: optax.apply_if_finite around it .* Put it after sync_gradients"
    with pytest.raises(ValueError, match=message):
        tx.init(LIKE)
    zero = jnp.zeros((), jnp.int32)
    state = optax.ApplyIfFiniteState(zero, jnp.array(True), zero, inner.init(LIKE))
    with pytest.raises(ValueError, match=message):
        optax_steps.run(tx, MESH, gradients(1), state)
    step = jax.pmap(lambda g: tx.update(g, state), "data", devices=jax.devices()[:WORLD])
    with pytest.raises(ValueError, match=message):
        step(jax.tree.map(lambda g: g[0], gradients(1)))


def test_multi_steps_around_it_is_refused_where_types_cannot_say_what_it_accumulates():
    tx = optax.MultiSteps(optax.chain(sync(**KEPT), optax.sgd(0.1)), 2)
    message = "sync_gradients: optax.MultiSteps around it accumulates .* Put it after"
    with pytest.raises(ValueError, match=message):
        optax_steps.run(tx, MESH, gradients(1))


@pytest.mark.parametrize("make", [cgx_jax.sync_gradients, scatter_gradients])
def test_sam_around_it_is_refused_since_a_rank_would_step_by_its_own_gradients(make):
    inner = optax.chain(make("data", Quantize(8), mesh=MESH, exchange="xla"), optax.sgd(0.1))
    tx = optax.contrib.sam(inner, optax.sgd(0.1), sync_period=2)
    message = f"{make.__name__}: optax.contrib.sam around it .*(Put it after|Leave it out)"
    step = jax.pmap(lambda g: tx.update(g, tx.init(g), g), "data", devices=jax.devices()[:WORLD])
    with pytest.raises(ValueError, match=message):
        step(jax.tree.map(lambda g: g[0], gradients(1)))


def test_sam_whose_optimizer_gets_gradients_of_its_own_may_be_around_it():
    x = normal(WORLD, 8)
    reduce = cgx_jax.sync_gradients("data", Identity(), mesh=MESH, exchange="xla")
    inner = optax.chain(reduce, optax.sgd(1.0))
    tx = optax.contrib.sam(inner, optax.sgd(0.1), opaque_mode=True)

    def step(x):
        gradient = lambda q, i: x * q  # noqa: E731
        params = jnp.ones(8)
        return tx.update(gradient(params, 0), tx.init(params), params, grad_fn=gradient)[0]

    np.testing.assert_allclose(
        on_ranks(step, MESH, out=P())(x), -(x * (1 + 0.1 * x)).mean(0), rtol=1e-6
    )


SKIPS = {
    "not finite": optax.skip_not_finite,
    "large": functools.partial(optax.skip_large_updates, max_squared_norm=1.0),
}


@pytest.mark.parametrize("name", SKIPS)
def test_multi_steps_that_skip_around_it_are_refused_before_a_rank_can_wait_forever(name):
    inner = optax.chain(sync(), optax.sgd(0.1))
    tx = optax.MultiSteps(inner, 2, should_skip_update_fn=SKIPS[name])
    message = "sync_gradients: optax.MultiSteps with should_skip_update_fn .* Put it after"
    with pytest.raises(ValueError, match=message):
        tx.init(LIKE)
    state = optax.MultiSteps(inner, 2).init(LIKE)
    step = jax.pmap(lambda g: tx.update(g, state), "data", devices=jax.devices()[:WORLD])
    with pytest.raises(ValueError, match=message):
        step(jax.tree.map(lambda g: g[0], gradients(1)))


def test_apply_if_finite_after_it_skips_what_one_rank_spoiled_on_all():
    grads = gradients(4)
    grads["w"][2, 1, 0, 0] = np.inf
    tx = optax.chain(sync(**KEPT), optax.apply_if_finite(optax.adam(0.1), 5))
    results, states = optax_steps.run(tx, MESH, grads)
    assert not any(x.any() for x in jax.tree.leaves(results[2]))
    for state in states[1:]:
        check_same_on_all_ranks(state)
    before, after = states[2], states[3]
    assert int(after[1].total_notfinite) == 1
    equal(before[1].inner_state, after[1].inner_state)
    keeps = bool(jax.tree.leaves((before[0].memory, before[0].moments)))
    assert int(after[0].skipped) == keeps  # without kept state nothing is checked
    equal(before[0]._replace(step=3, skipped=after[0].skipped), after[0]._replace(step=3))
    without = jax.tree.map(lambda x: np.delete(x, 2, 0), grads)
    expected, _ = optax_steps.run(tx, MESH, without)
    equal([results[i] for i in (0, 1, 3)], expected)


def test_it_takes_extra_arguments_and_the_chain_after_it_gets_them():
    tx = sync()
    assert isinstance(tx, optax.GradientTransformationExtraArgs)
    grads = gradients(2)
    plateau = optax.contrib.reduce_on_plateau(factor=0.5, patience=1)
    chained = optax.chain(tx, plateau)

    def update(updates, state, params=None):
        return chained.update(updates, state, params, value=jnp.float32(1.0))

    step = optax.GradientTransformationExtraArgs(chained.init, update)
    results, states = optax_steps.run(step, MESH, grads)
    alone, _ = optax_steps.run(tx, MESH, grads)
    equal(results[0], alone[0])
    assert float(states[-1][1].scale) == 0.5
    np.testing.assert_allclose(results[1]["w"], 0.5 * alone[1]["w"], rtol=1e-6)


def test_signature_says_what_it_returns():
    hints = typing.get_type_hints(cgx_jax.sync_gradients, localns={"optax": optax})
    assert hints["return"] is optax.GradientTransformationExtraArgs


INJECTED = {  # a function, its arguments, and what is said
    "mesh": (cgx_jax.sync_gradients, {"axis_name": "data", "mesh": MESH},
             "sync_gradients: mesh=.* is not a jax.sharding.Mesh.* inject the optimizer beside it"),
    "axis_name": (
        cgx_jax.sync_gradients, {"axis_name": 0},
        "sync_gradients: axis_name=.* is an array, not a name.* inject the optimizer beside it"
    ),
    "decay": (lambda x: sync(memory=ErrorFeedback(x)), {"x": 0.5},
              "ErrorFeedback: decay=.* is not a number.* after sync_gradients instead"),
    "momentum": (lambda x: sync(memory=MomentumCorrection(x)), {"x": 0.5},
                 "MomentumCorrection: momentum=.* is not a number.* after sync_gradients instead"),
}  # fmt: skip


@pytest.mark.parametrize(("make", "given", "message"), INJECTED.values(), ids=INJECTED)
def test_what_cannot_be_injected_is_refused(make, given, message):
    with pytest.raises(TypeError, match=message):
        optax.inject_hyperparams(make)(**given).init(LIKE)


OTHER_TYPES = {
    "memory": (ErrorFeedback, "no Memory; pass an instance such as cgx_jax.ErrorFeedback()"),
    "precondition": (SecondMoment, "no SecondMoment; pass an instance"),
    "seed": ("7", "not an integer"),
}


@pytest.mark.parametrize("option", OTHER_TYPES)
@pytest.mark.parametrize("call", ["sync_gradients", "diloco", "value_and_grad"])
def test_options_of_other_types_are_refused(call, option):
    value, message = OTHER_TYPES[option]
    given = {"mesh": MESH, option: value}
    calls = {
        "sync_gradients": lambda: cgx_jax.sync_gradients("data", **given),
        "diloco": lambda: diloco(optax.sgd(0.1), "data", every=2, **given).init(LIKE),
        "value_and_grad": lambda: cgx_jax.value_and_grad(
            lambda p, x: jnp.mean(x * p), "data", **given
        ).init(jnp.ones(4)),
    }
    with pytest.raises(TypeError, match=f"{call}: {option}=.* is {message}"):
        calls[call]()


def test_a_memory_that_was_copied_to_every_rank_is_refused():
    tx = sync(memory=ErrorFeedback())
    state, grads = tx.init(LIKE), jax.tree.map(lambda g: g[0], gradients(1))
    devices = jax.devices()[:WORLD]
    copies = jax.tree.map(lambda x: np.broadcast_to(x, (WORLD, *x.shape)), state)
    with pytest.raises(ValueError, match=r"memory has 4 rows here.* jax.pmap\(tx.init"):
        jax.pmap(tx.update, "data", devices=devices)(grads, copies)
    params = jax.tree.map(lambda x: np.broadcast_to(x, (WORLD, *x.shape)), LIKE)
    own = jax.pmap(tx.init, "data", devices=devices)(params)
    _, after = jax.pmap(tx.update, "data", devices=devices)(grads, own)
    assert after.memory[0]["w"].shape == (WORLD, 1, 40, 64)

    for check_vma in (True, False):
        step = lambda g, s: tx.update(first(g), s)  # noqa: E731
        whole = sharded(step, MESH, (P("data"), P()), check_vma=check_vma)
        with pytest.raises(ValueError, match="Inside shard_map, split the state"):
            jax.eval_shape(whole, grads, state)
