"""FSDP by hand, as in seqax: layers are gathered inside a scanned, rematerialized block.

Each weight is sharded along its largest dimension. `test_fsdp` changes a few lines of this text.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

MESH = Mesh(np.array(jax.devices()), ("data",))
VOCABULARY, WIDTH, HIDDEN, LAYERS, LENGTH = 256, 64, 256, 3, 32
SHAPES = {
    "embed": (VOCABULARY, WIDTH),
    "layers": {
        "norms": (2, WIDTH),
        "qkv": (WIDTH, 3 * WIDTH),
        "out": (WIDTH, WIDTH),
        "up": (WIDTH, HIDDEN),
        "down": (HIDDEN, WIDTH),
    },
}
is_shape = lambda x: isinstance(x, tuple)  # noqa: E731
CUT = jax.tree.map(lambda shape: int(np.argmax(shape)), SHAPES, is_leaf=is_shape)
SPECS = {
    "embed": P(*[None] * CUT["embed"], "data"),
    "layers": jax.tree.map(lambda d: P(None, *[None] * d, "data"), CUT["layers"]),
}


def init(seed):
    rng = np.random.default_rng(seed)

    def draw(path, shape):
        stacked = (LAYERS, *shape) if path[0].key == "layers" else shape
        return (rng.normal(size=stacked) / shape[0] ** 0.5).astype(np.float32)

    return jax.tree_util.tree_map_with_path(draw, SHAPES, is_leaf=is_shape)


def gathered(shards, cut):
    gather = functools.partial(lax.all_gather, axis_name="data", tiled=True)
    return jax.tree.map(lambda x, d: gather(x, axis=d), shards, cut)


def normed(x, scale):
    return x * lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6) * (1 + scale)


@jax.checkpoint
def block(x, shards):
    w = gathered(shards, CUT["layers"])
    q, k, v = jnp.split(normed(x, w["norms"][0]) @ w["qkv"], 3, axis=-1)
    scores = jnp.where(jnp.tri(LENGTH, dtype=bool), q @ k.swapaxes(1, 2) / WIDTH**0.5, -1e9)
    x = x + jax.nn.softmax(scores) @ v @ w["out"]
    return x + jax.nn.gelu(normed(x, w["norms"][1]) @ w["up"]) @ w["down"], None


def loss_fn(shards, tokens):
    embed = gathered(shards["embed"], CUT["embed"])
    x, _ = lax.scan(block, embed[tokens[:, :-1]], shards["layers"])
    losses = optax.softmax_cross_entropy_with_integer_labels(x @ embed.T, tokens[:, 1:])
    return lax.pmean(losses.mean(), "data")


tx = optax.adamw(3e-3)
state = jax.eval_shape(tx.init, init(0))
ADAM = optax.tree_utils.tree_map_params(
    tx, lambda _, spec: spec, state, SPECS, transform_non_params=lambda _: P()
)


@functools.partial(jax.jit, donate_argnums=(0, 1))
@functools.partial(
    jax.shard_map, mesh=MESH, in_specs=(SPECS, ADAM, P("data")), out_specs=(SPECS, ADAM, P())
)
def step(shards, state, tokens):
    loss, grads = jax.value_and_grad(loss_fn)(shards, tokens)
    updates, state = tx.update(grads, state, shards)
    return optax.apply_updates(shards, updates), state, loss


def train(tokens):
    """Returns the losses, and the compiled step."""
    shardings = jax.tree.map(functools.partial(NamedSharding, MESH), (SPECS, ADAM))
    shards, state = jax.device_put((init(0), tx.init(init(0))), shardings)
    compiled = step.lower(shards, state, tokens[0]).compile()
    losses = []
    for batch in tokens:
        shards, state, loss = compiled(shards, state, batch)
        losses.append(float(loss))
    return np.array(losses), compiled.as_text()
