"""Steps of a gradient transformation on every rank, each with its own gradients."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import cgx_jax

_COMPILED = {}


def run(tx, mesh, grads, state=None, check_vma=True, compiler=jax.jit):
    """Returns two lists: every step's result, and the states before the first and after each step.

    `grads` are leaves [steps, ranks, ...]. If `state` is None, `tx.init` makes it. The step of a
    transformation is compiled once, whatever the number of runs.
    """
    like = jax.tree.map(lambda g: jnp.zeros(g.shape[2:], g.dtype), grads)
    if state is None:
        state = tx.init(like)
        # As later steps get it, so that the step is compiled once.
        state = jax.device_put(state, cgx_jax.state_shardings(state, "data", mesh))
    key = tx, mesh, check_vma, jax.tree.structure((grads, state))
    if compiler is not jax.jit or key not in _COMPILED:
        specs = cgx_jax.state_specs(state, "data")
        mapped = jax.shard_map(
            lambda g, s, like: tx.update(jax.tree.map(lambda x: x[0], g), s, like),
            mesh=mesh,
            in_specs=(P("data"), specs, P()),
            out_specs=(P(), specs),
            check_vma=check_vma,
        )
        _COMPILED[key] = compiler(mapped)
    results, states = [], [state]
    for t in range(len(jax.tree.leaves(grads)[0])):
        result, state = _COMPILED[key](jax.tree.map(lambda x, t=t: x[t], grads), state, like)
        results.append(jax.tree.map(np.asarray, result))
        states.append(state)
    return results, states
