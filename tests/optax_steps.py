"""Steps of a gradient transformation on every rank, each with its own gradients."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from worlds import RANKS, first, placed, with_state

_COMPILED = {}


def run(tx, mesh, grads, state=None, check_vma=True, compiler=jax.jit):
    """Returns two lists: every step's result, and the states before the first and after each step.

    `grads` are leaves [steps, ranks, ...]. If `state` is None, `tx.init` makes it. The step of a
    transformation is compiled once, whatever the number of runs.
    """
    like = jax.tree.map(lambda g: jnp.zeros(g.shape[2:], g.dtype), grads)
    if state is None:
        state = placed(tx.init(like), mesh)
    key = tx, mesh, check_vma, jax.tree.structure((grads, state))
    if compiler is not jax.jit or key not in _COMPILED:
        own = lambda g, like, s: tx.update(first(g), s, like)  # noqa: E731
        mapped = with_state(own, mesh, state, RANKS, P(), check_vma=check_vma)
        _COMPILED[key] = compiler(mapped)
    results, states = [], [state]
    for t in range(len(jax.tree.leaves(grads)[0])):
        result, state = _COMPILED[key](jax.tree.map(lambda x, t=t: x[t], grads), like, state)
        results.append(jax.tree.map(np.asarray, result))
        states.append(state)
    return results, states
