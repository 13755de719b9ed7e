"""Every public call works if jax_numpy_rank_promotion="raise" forbids silent broadcasting."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import cgx_jax
from cases import CHUNKED, FEW, every
from cgx_jax import Quantize
from cgx_jax.kernels import chunk, reference
from cgx_jax.kernels.wire import Layout, Slot
from cgx_jax.transforms import MomentumCorrection
from worlds import RANKS, first, on_ranks, with_state

KEY = jax.random.key(0)
TREE = {"kernel": np.ones((8, 40, 64), np.float32), "bias": np.ones((8, 64), np.float32)}


def traced(f, mesh, tree=TREE):
    with jax.numpy_rank_promotion("raise"):
        jax.eval_shape(on_ranks(f, mesh, check_vma=False), tree)


@pytest.mark.parametrize("name", every(CHUNKED, quick=FEW))
def test_collectives_need_no_rank_promotion(name, mesh):
    compressor = CHUNKED[name]
    whole = {"kernel": np.ones((8, 40, 64), np.float32)}
    for call in (
        cgx_jax.psum_compressed,
        cgx_jax.pmean_compressed,
        functools.partial(cgx_jax.psum_scatter_compressed, tiled=True),
        cgx_jax.all_gather_compressed,
    ):
        reduce = functools.partial(call, axis_name="data", key=KEY, exchange="xla")
        traced(lambda t, f=reduce: f(t, compressor=compressor), mesh, tree=whole)

    def loss(t):
        p = cgx_jax.reduce_in_backward(t, "data", compressor, key=KEY, exchange="xla")
        return sum(jnp.square(x).sum() for x in jax.tree.leaves(p))

    traced(jax.grad(loss), mesh)
    with jax.numpy_rank_promotion("raise"):
        jax.eval_shape(compressor.error_bound, jnp.ones((7, 100)))
        jax.eval_shape(jax.vmap(lambda x: compressor.encode(x, key=KEY)), jnp.ones((3, 100)))


STATES = {
    "nothing": {},
    "both": {"memory": MomentumCorrection(), "precondition": cgx_jax.SecondMoment()},
}


@pytest.mark.parametrize("name", STATES)
def test_sync_gradients_needs_no_rank_promotion(name, mesh):
    sync = cgx_jax.sync_gradients("data", Quantize(4), exchange="xla", **STATES[name])
    tx = optax.chain(sync, optax.sgd(0.5))
    traced(lambda t: tx.update(t, tx.init(t))[0], mesh)


@pytest.mark.usefixtures("no_cache")
def test_adaptive_needs_no_rank_promotion(mesh):
    policy = cgx_jax.Adaptive(candidates=[Quantize(2), Quantize(4, rotation=True)])
    tx = cgx_jax.sync_gradients("data", policy, exchange="xla")
    state = tx.init(first(TREE))
    step = policy.jit(with_state(lambda t, s: tx.update(first(t), s), mesh, state, RANKS))
    with jax.numpy_rank_promotion("raise"):
        step(TREE, state)


def test_value_and_grad_needs_no_rank_promotion(mesh):
    def loss(p, x):
        return jnp.square(x @ p["kernel"]).mean()

    step = cgx_jax.value_and_grad(loss, "data", Quantize(4), mesh=mesh, exchange="xla")
    with jax.numpy_rank_promotion("raise"):
        jax.eval_shape(
            step, {"kernel": np.ones((40, 64), np.float32)}, np.ones((16, 40), np.float32)
        )


@pytest.mark.parametrize("rotation", [False, True])
@pytest.mark.parametrize("rounding", ["nearest", "correlated"])
def test_the_fallback_needs_no_rank_promotion(rounding, rotation):
    layout = Layout(
        tuple(Slot(n, 3, 64, rounding, i, rotation) for i, n in enumerate((200, 64))), 2
    )
    x = [jnp.ones(200), jnp.ones(64)]
    key, rank = np.uint32([1, 2]), jnp.int32(1)
    with jax.numpy_rank_promotion("raise"):
        rows, *lost = jax.eval_shape(
            functools.partial(reference.encode, layout=layout, residual=True), key, rank, *x
        )
        reduce = functools.partial(chunk.reduce, layout=layout, divisor=2.0)
        jax.eval_shape(reduce, key, rank, rows, *x, *lost)
        decode = functools.partial(reference.decode, layout=layout, dtypes=[np.float32] * 2)
        jax.eval_shape(decode, rows)
        one = Layout(layout.slots, 1)
        sent = jnp.zeros((3, one.total_bytes), jnp.uint8)
        jax.eval_shape(
            functools.partial(reference.accumulate, layout=one, divisor=2.0), rank, sent, *x
        )
