"""A training loop that only reduces given gradients under an adaptive policy."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import cgx_jax
from cgx_jax import Adaptive, Quantize
from worlds import RANKS, first, placed, ranks, with_state

WORLD = 4
MESH = ranks(WORLD)
LIKE = {
    "bias": jnp.zeros(64),
    "big": jnp.zeros((128, 128)),
    "small": jnp.zeros((32, 64)),
    "table": jnp.zeros((64, 64)),
}
SCALE = {"bias": 1.0, "big": 0.01, "small": 10.0, "table": 1.0}


def gradients(seed, scale=SCALE):
    rng = np.random.default_rng(seed)
    return {
        k: (scale[k] * rng.normal(size=(WORLD, *x.shape))).astype(np.float32)
        for k, x in LIKE.items()
    }


class Training:
    """A step that only reduces given gradients under a policy."""

    def __init__(self, policy, memory=None, like=LIKE):
        self.policy = policy
        self.tx = optax.chain(
            cgx_jax.sync_gradients("data", policy, memory=memory, mesh=MESH, exchange="xla"),
            optax.sgd(1.0),
        )
        # As later steps get it, so that the step is compiled once for each plan.
        self.state = self.placed(self.tx.init(like))
        self.step = policy.jit(self.sharded(), donate_argnums=(1,))

    def placed(self, state):
        return placed(state, MESH)

    def sharded(self):
        return with_state(
            lambda grads, state: self.tx.update(first(grads), state), MESH, self.state, RANKS
        )

    def run(self, steps, scale=SCALE, grads=None):
        out = []
        for t in range(steps):
            result, self.state = self.step(
                gradients(t, scale) if grads is None else grads, self.state
            )
            out.append(jax.tree.map(np.asarray, result))
        return out


def adaptive(**options):
    options = {"warmup": 4, "every": 8, "sample_every": 2, "candidates": WIDTHS, **options}
    return Adaptive(**options)


WIDTHS = tuple(Quantize(b, 64) for b in range(2, 9))
