"""Steps of a gradient transformation on every rank, each with its own gradients."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import cgx_jax


def run(tx, mesh, grads, state=None, check_vma=True, compiler=jax.jit):
    """Returns two lists: every step's result, and the states before the first and after each step.

    `grads` are leaves [steps, ranks, ...]. If `state` is None, `tx.init` makes it.
    """
    like = jax.tree.map(lambda g: jnp.zeros(g.shape[2:], g.dtype), grads)
    if state is None:
        state = tx.init(like)
    specs = cgx_jax.state_specs(state, "data")

    def step(grads, state):
        return tx.update(jax.tree.map(lambda x: x[0], grads), state, like)

    f = compiler(
        jax.shard_map(
            step,
            mesh=mesh,
            in_specs=(P("data"), specs),
            out_specs=(P(), specs),
            check_vma=check_vma,
        )
    )
    results, states = [], [state]
    for t in range(len(jax.tree.leaves(grads)[0])):
        result, state = f(jax.tree.map(lambda x, t=t: x[t], grads), state)
        results.append(jax.tree.map(np.asarray, result))
        states.append(state)
    return results, states
