"""The backward-pass hook."""

import re

import jax
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import cgx_jax
from cgx_jax import Identity, Plan, Quantize
from plain_jit_case import auto_mesh, check_close, loss_fn, params_and_batch

pytestmark = [pytest.mark.oldest, pytest.mark.usefixtures("unoptimized")]

Q8 = Quantize(8)


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("compressor", [Q8, Identity()], ids=str)
def test_hook_gives_the_summed_gradient(check_vma, compressor):
    params, x, y = params_and_batch()

    def step(p, x, y):
        def loss(p):
            p = cgx_jax.reduce_in_backward(p, "data", compressor, exchange="xla")
            return loss_fn(p, x, y) / 8

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
        hook = lambda p: cgx_jax.reduce_in_backward(p, "data", plan, exchange="xla")  # noqa: E731
        return jax.grad(lambda p: loss_fn(hook(p), x, y))(p)

    f = jax.shard_map(step, mesh=auto_mesh(), in_specs=(P(), P("data"), P("data")), out_specs=P())
    text = jax.jit(f).lower(params, x, y).compile().as_text()
    assert len(re.findall(r" all-to-all\(", text)) == len(plan.buffers) == 2


def test_hook_takes_a_key_and_typed_parameters_that_vary():
    params, x, y = params_and_batch()
    stochastic = Quantize(8, rounding="stochastic")

    def step(p, x, y, key):
        p = jax.tree.map(lambda v: lax.pcast(v, "data", to="varying"), p)
        hook = lambda p: cgx_jax.reduce_in_backward(  # noqa: E731
            p, "data", stochastic, key=key, exchange="xla"
        )
        grads = jax.grad(lambda p: loss_fn(hook(p), x, y) / 8)(p)
        return jax.tree.map(lambda g: g[None], grads)

    f = jax.shard_map(
        step, mesh=auto_mesh(), in_specs=(P(), P("data"), P("data"), P()), out_specs=P("data")
    )
    grads = jax.jit(f)(params, x, y, jax.random.key(0))
    for g in jax.tree.leaves(grads):
        assert (np.asarray(g) == np.asarray(g)[:1]).all()
    check_close(jax.tree.map(lambda g: g[3], grads), jax.grad(loss_fn)(params, x, y))
