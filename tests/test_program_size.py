"""How a training step's program grows with the number of leaves: its text takes time to compile."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import cgx_jax
from cgx_jax import ErrorFeedback, Quantize, SecondMoment
from cgx_jax.transforms import MomentumCorrection

SHAPES = [(64, 64), (64,), (128, 64), (32, 128), (64, 192)]
FEW, MANY = 10, 40

# By options: the most lines that a leaf may add, as a multiple of those under lax.pmean and Adam.
OPTIONS = {
    "plain": ({}, 1.0),
    "feedback": ({"memory": ErrorFeedback()}, 1.3),
    "momentum": ({"memory": MomentumCorrection()}, 1.7),
    "units": ({"precondition": SecondMoment()}, 1.6),
    "units and feedback": ({"precondition": SecondMoment(), "memory": ErrorFeedback()}, 2.0),
}


@pytest.fixture(scope="module")
def mesh():
    return Mesh(np.array(jax.devices()[:4]), ("data",))


def lines_per_leaf(reduction, mesh):
    few, many = (lines(reduction, mesh, count) for count in (FEW, MANY))
    return (many - few) / (MANY - FEW)


def lines(reduction, mesh, count):
    params = {
        f"leaf{i}": jax.ShapeDtypeStruct(SHAPES[i % len(SHAPES)], jnp.float32) for i in range(count)
    }
    tx = optax.chain(reduction, optax.adam(1e-3))
    state = jax.eval_shape(tx.init, params)
    specs = cgx_jax.state_specs(state, "data")

    def step(params, state, x):
        def loss(params):
            return sum((jnp.sin(p) * x[0]).sum() for p in jax.tree.leaves(params))

        grads = jax.grad(loss)(jax.tree.map(lambda p: lax.pcast(p, "data", to="varying"), params))
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    mapped = jax.shard_map(
        step, mesh=mesh, in_specs=(P(), specs, P("data")), out_specs=(P(), specs)
    )
    x = jax.ShapeDtypeStruct((4,), jnp.float32)
    return len(jax.jit(mapped).lower(params, state, x).as_text().splitlines())


@pytest.mark.parametrize("name", OPTIONS)
def test_a_leaf_adds_little_to_the_program(name, mesh):
    options, most = OPTIONS[name]
    reduction = cgx_jax.sync_gradients(
        "data", Quantize(4, rotation=True), mesh=mesh, exchange="xla", **options
    )
    exact = optax.stateless(lambda grads, _: lax.pmean(grads, "data"))
    with jax.numpy_dtype_promotion("standard"):  # optax divides by an integer
        assert lines_per_leaf(reduction, mesh) <= most * lines_per_leaf(exact, mesh)
