"""Trains the language model under jax.pmap with 4-bit gradients on 8 ranks.

Expected: the loss falls from about 6.1 to below 3.3 nats per byte, and the last lines are

    ranks hold the same parameters: True
    ok
"""

import argparse
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import cgx_jax
import corpus
from model import Transformer, next_byte_loss
from training import adamw

WORLD = 8
LENGTH = 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    steps = parser.parse_args().steps
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", WORLD)

    text, _ = corpus.load()
    batches = corpus.windows(text, steps, 2 * WORLD, LENGTH, seed=0)
    graphdef, params = nnx.split(Transformer(64, 2, LENGTH, nnx.Rngs(0)))
    optimizer = adamw(steps)

    @partial(jax.pmap, axis_name="data")
    def step(params, opt_state, tokens):
        loss, grads = jax.value_and_grad(
            lambda params: next_byte_loss(nnx.merge(graphdef, params), tokens)
        )(params)
        grads = cgx_jax.pmean_compressed(
            grads,
            "data",
            cgx_jax.Quantize(bits=4),
            exchange="xla",  # "auto" sums a model this small exactly
        )
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, jax.lax.pmean(loss, "data")

    # pmap takes one copy of the state per rank, along a leading axis.
    state = params, optimizer.init(params)
    copies = jax.tree.map(lambda x: jnp.broadcast_to(x, (WORLD, *x.shape)), state)
    losses = []
    for i, batch in enumerate(batches):
        *copies, loss = step(*copies, batch.reshape(WORLD, -1, LENGTH + 1))
        losses.append(float(loss[0]))
        if i % 10 == 0 or i == steps - 1:
            print(f"step {i:3d}  loss {losses[-1]:.3f}")

    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(copies[0])]
    same = all((leaf == leaf[:1]).all() for leaf in leaves)
    print(f"ranks hold the same parameters: {same}")
    if not (same and losses[-1] < 0.9 * losses[0]):
        raise SystemExit("FAILED: expected equal parameters and a falling loss")
    print("ok")


if __name__ == "__main__":
    main()
