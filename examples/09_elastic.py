"""Continues training when a worker is lost: 4 processes, one is killed, 3 go on, and one rejoins.

A supervisor starts the workers. When one dies, the others cannot finish their collectives, so the
supervisor ends them too and starts as many new ones as are left. They read the last checkpoint, and
`resize_state` converts the state of the reduction to the new number of ranks. A worker that joins
waits for the next checkpoint. The batch stays the same for any number of workers. On a cluster the
launcher takes the supervisor's place; the workers need no change.

    python 09_elastic.py                                       # 4 bits in every step
    python 09_elastic.py --steps 240 --round 10 --rate 10mbit  # DiLoCo over slow links (Linux)

With `--round 10` the workers train alone for 10 steps, and then send how far they have moved, in 4
bits. Each round ends with a checkpoint, so a loss costs at most the steps of one round. Each worker
saves its own optimizer's state itself: over slow links it is too large to send.

Expected, in about two minutes on 2 cores: the loss falls from about 6.1 to below 3.3 nats per byte
through both changes. `demo/elastic.png` shows it. The last lines are

    worker 3 of 4 killed after step 31; 3 workers went on from step 30
    4 workers went on from step 60
    ranks hold the same parameters at every checkpoint: True
    ok
"""

import argparse
import sys

import jax
import numpy as np
import optax
from flax import nnx
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import cgx_jax
import checkpoints
import corpus
import supervisor
from cgx_jax.transforms import diloco, local_params
from model import Transformer, next_byte_loss
from training import adamw

BATCH, LENGTH = 24, 32  # windows per step over all workers, and bytes per window
SAVE_EVERY = 10  # steps


def work(given: argparse.Namespace) -> int:
    """Continues training from the last checkpoint in the folder; returns the exit code."""
    rank, world, steps = given.rank, given.world, given.steps
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 1)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(given.coordinator, world, rank)
    mesh = jax.make_mesh((world,), ("data",))
    graphdef, params = nnx.split(Transformer(32, 1, LENGTH, nnx.Rngs(0)))
    q4 = cgx_jax.Quantize(4)
    options = {"memory": cgx_jax.ErrorFeedback(), "mesh": mesh, "exchange": "xla"}
    if given.round:
        optimizer = diloco(adamw(steps), "data", q4, every=given.round, **options)
    else:
        optimizer = optax.chain(cgx_jax.sync_gradients("data", q4, **options), adamw(steps))
    begin, bits, state = checkpoints.restored(given.folder, (params, optimizer.init(params)), world)
    specs = cgx_jax.state_specs(state, "data")

    def train(state, tokens):
        params, opt_state = state
        if given.round:
            here = local_params(params, opt_state)
        else:
            here = jax.tree.map(lambda x: jax.lax.pcast(x, "data", to="varying"), params)
        loss, grads = jax.value_and_grad(
            lambda params: next_byte_loss(nnx.merge(graphdef, params), tokens)
        )(here)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss[None]

    step = jax.jit(
        jax.shard_map(train, mesh=mesh, in_specs=(specs, P("data")), out_specs=(specs, P("data"))),
        donate_argnums=0,
    )
    state = jax.tree.map(checkpoints.placed, state, cgx_jax.state_shardings(state, "data", mesh))
    if bits not in (None, checkpoints.shared_bits(state)):
        return supervisor.DIVERGED
    text, _ = corpus.load()
    for number in range(begin, steps):
        batch = corpus.windows(text, 1, BATCH, LENGTH, seed=number)[0]
        tokens = checkpoints.placed(batch, NamedSharding(mesh, P("data")))
        state, losses = step(state, tokens)
        if rank == 0:
            # Its own loss: a mean over the workers would send something in every step.
            loss = float(checkpoints.own(losses)[0])
            supervisor.log(given.folder, step=number, loss=loss, world=world)
        if (number + 1) % (given.round or SAVE_EVERY) and number + 1 < steps:
            continue
        if not checkpoints.save(given.folder, number + 1, state):
            return supervisor.DIVERGED
        joins = np.array(supervisor.join_is_asked(given.folder, number + 1))
        if multihost_utils.broadcast_one_to_all(joins) and number + 1 < steps:
            return supervisor.JOINED
    return 0


if __name__ == "__main__":
    sys.exit(supervisor.main(work, __doc__))
