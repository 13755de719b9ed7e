"""Trains an Equinox model on 8 ranks at 2 bits, with a momentum that each rank keeps for itself.

MomentumCorrection takes the place of the optimizer's momentum. Each rank sends its velocity, plus
what compression lost of earlier velocities. The optimizer that follows is plain SGD.

Expected: the loss falls from about 5.6 to below 3.0 nats per byte, and the last lines are

    the ranks' memories differ: True
    ok
"""

import argparse
from functools import partial

import equinox as eqx
import jax
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import cgx_jax
import corpus

WORLD = 8
CONTEXT = 8
WIDTH = 32


class NextByte(eqx.Module):
    """Maps the last 8 bytes, i32[8], to logits f32[256] of the next byte."""

    byte: eqx.nn.Embedding
    mlp: eqx.nn.MLP

    def __init__(self, key: jax.Array):
        keys = jax.random.split(key)
        self.byte = eqx.nn.Embedding(corpus.VOCABULARY, WIDTH, key=keys[0])
        self.mlp = eqx.nn.MLP(CONTEXT * WIDTH, corpus.VOCABULARY, 256, 1, jax.nn.gelu, key=keys[1])

    def __call__(self, tokens: jax.Array) -> jax.Array:
        return self.mlp(jax.vmap(self.byte)(tokens).ravel())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    steps = parser.parse_args().steps
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", WORLD)
    mesh = jax.make_mesh((WORLD,), ("data",))

    text, _ = corpus.load()
    batches = corpus.windows(text, steps, 64 * WORLD, CONTEXT, seed=0)
    # Activation functions are leaves of an Equinox model too; only its arrays are trained.
    params, static = eqx.partition(NextByte(jax.random.key(0)), eqx.is_inexact_array)
    memory = cgx_jax.transforms.MomentumCorrection(0.9)
    optimizer = optax.chain(
        cgx_jax.sync_gradients(
            "data",
            cgx_jax.Quantize(bits=2),
            memory=memory,
            mesh=mesh,
            exchange="xla",  # "auto" sums a model this small exactly
        ),
        optax.clip_by_global_norm(1.0),
        optax.sgd(0.3),
    )
    state = params, optimizer.init(params)
    specs = cgx_jax.state_specs(state, "data")

    def loss_fn(params, tokens):
        logits = jax.vmap(eqx.combine(params, static))(tokens[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, -1]).mean()

    @partial(jax.jit, donate_argnums=0)
    @partial(jax.shard_map, mesh=mesh, in_specs=(specs, P("data")), out_specs=(specs, P()))
    def step(state, tokens):
        params, opt_state = state
        varying = jax.tree.map(lambda x: jax.lax.pcast(x, "data", to="varying"), params)
        loss, grads = jax.value_and_grad(loss_fn)(varying, tokens)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return (eqx.apply_updates(params, updates), opt_state), jax.lax.pmean(loss, "data")

    losses = []
    for i, batch in enumerate(batches):
        state, loss = step(state, jax.device_put(batch, NamedSharding(mesh, P("data"))))
        losses.append(float(loss))
        if i % 10 == 0 or i == steps - 1:
            print(f"step {i:3d}  loss {losses[-1]:.3f}")

    _, (synchronized, *_) = state
    velocity = np.asarray(synchronized.memory[1].byte.weight)
    differ = bool((velocity[0] != velocity[1]).any())
    print(f"the ranks' memories differ: {differ}")
    if not (differ and losses[-1] < 0.9 * losses[0]):
        raise SystemExit("FAILED: expected a memory per rank and a falling loss")
    print("ok")


if __name__ == "__main__":
    main()
