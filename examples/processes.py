"""The training run, and its check, for the examples with several processes."""

import jax
import numpy as np
import optax
from flax import nnx
from jax.experimental import multihost_utils

import cgx_jax
import corpus
from model import Transformer
from training import adamw, data_parallel_step, train

LENGTH = 64


def train_and_compare(steps: int, exchange: str) -> int:
    """Trains with 4-bit gradients, one process per rank; returns the exit code.

    The code is 0 if the loss falls and all ranks hold the same parameters, otherwise 1.
    `jax.distributed` must be initialized. Only process 0 prints.
    """
    world = jax.device_count()
    mesh = jax.make_mesh((world,), ("data",))
    text, _ = corpus.load()
    batches = corpus.windows(text, steps, 8 * world, LENGTH, seed=0)
    graphdef, params = nnx.split(Transformer(64, 2, LENGTH, nnx.Rngs(0)))
    mean = cgx_jax.sync_gradients("data", cgx_jax.Quantize(bits=4), exchange=exchange)
    optimizer = optax.chain(mean, adamw(steps))
    step = data_parallel_step(graphdef, optimizer, mesh)
    trained, losses, seconds = train(step, params, optimizer.init(params), batches, mesh)

    local = np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(jax.device_get(trained))])
    everyone = multihost_utils.process_allgather(local)
    same = bool((everyone == everyone[:1]).all())
    passed = same and losses[-1] < 0.9 * losses[0]
    if jax.process_index() == 0:
        for i in sorted({*range(0, steps, 10), steps - 1}):
            print(f"step {i:3d}  loss {losses[i]:.3f}")
        print(f"step time {seconds * 1e3:.0f} ms")
        print(f"ranks hold the same parameters: {same}")
        print(
            "ok" if passed else "FAILED: expected equal parameters and a falling loss", flush=True
        )
    return 0 if passed else 1
