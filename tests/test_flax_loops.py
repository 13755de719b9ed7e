"""Training loops in the manner of Flax's plain-jit examples, with the fewest changed lines.

Every loop is a small version of its kind: what the loss closes over, what it returns and what the
step does with that are as users write it. Lines that differ from the exact loop are marked with
"changed", and docstrings say how many there are. Conditions on the compressor belong to the test.
Each loop trains exactly, under `jax.value_and_grad` (or NNX's), and compressed. Losses and metrics
agree within the noise of compression, and within rounding if the compressor is exact.
"""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import cgx_jax
from cgx_jax import Identity, Quantize, Rules
from plain_jit_case import auto_mesh

WORLD = 4
BATCH = 16
STEPS = 4


def compressed(loss_fn, compressor, mesh=None, **options):
    """Returns the changed call; an exact one if `compressor` is None."""
    if compressor is None:
        return jax.value_and_grad(loss_fn, **options)
    return cgx_jax.value_and_grad(
        loss_fn,
        "data",
        Rules((), compressor),
        mesh=mesh or auto_mesh((WORLD,)),
        exchange="xla",
        **options,
    )


def images(step):
    rng = np.random.default_rng(step)
    label = rng.integers(0, 4, BATCH)
    image = rng.normal(size=(BATCH, 8, 8, 1)) + label[:, None, None, None]
    return {"image": jnp.float32(image), "label": jnp.int32(label)}


class Digits(nnx.Module):
    """A convolution, batch norm and dropout, as small as possible."""

    def __init__(self, rngs, axis_name):
        self.conv = nnx.Conv(1, 16, (3, 3), rngs=rngs)
        self.norm = nnx.BatchNorm(16, axis_name=axis_name, rngs=rngs)  # changed
        self.dropout = nnx.Dropout(0.0)
        self.linear = nnx.Linear(16 * 16, 4, rngs=rngs)

    def __call__(self, x, rngs):
        x = nnx.relu(self.norm(self.dropout(self.conv(x), rngs=rngs)))
        return self.linear(nnx.avg_pool(x, (2, 2), strides=(2, 2)).reshape(len(x), -1))


def mnist(compressor):
    """Two changed lines: the call, and the axis of the BatchNorm."""
    model = Digits(nnx.Rngs(0), None if compressor is None else "data")
    optimizer = nnx.Optimizer(model, optax.sgd(0.05, 0.9), wrt=nnx.Param)
    metrics = nnx.MultiMetric(accuracy=nnx.metrics.Accuracy(), loss=nnx.metrics.Average("loss"))
    rngs = nnx.Rngs(0)

    def loss_fn(model, batch, rngs):
        logits = model(batch["image"], rngs)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
        return losses.mean(), logits

    @nnx.jit
    def train_step(model, optimizer, metrics, batch, rngs):
        if compressor is None:
            grad_fn = nnx.value_and_grad(loss_fn, has_aux=True)
        else:
            grad_fn = compressed(loss_fn, compressor, has_aux=True, aux_specs=P("data"))  # changed
        (loss, logits), grads = grad_fn(model, batch, rngs)
        metrics.update(loss=loss, logits=logits, labels=batch["label"])
        optimizer.update(model, grads)
        return loss, logits

    losses = []
    for step in range(STEPS):
        loss, logits = train_step(model, optimizer, metrics, images(step), rngs)
        assert logits.shape == (BATCH, 4)
        losses.append(float(loss))
    found = {k: float(v) for k, v in metrics.compute().items()}
    statistics = {"mean": model.norm.mean[...], "var": model.norm.var[...]}
    assert int(rngs.default.count[...]) == STEPS * (model.dropout.rate > 0)
    return losses, (found, statistics)


def sentences(step):
    """Token ids with padding; the lengths of the ranks' sentences differ much."""
    rng = np.random.default_rng(step)
    tokens = np.cumsum(rng.integers(1, 3, (BATCH, 12)), 1) % 31 + 1
    lengths = np.linspace(2, 12, BATCH).astype(int)
    return {"inputs": jnp.int32(np.where(np.arange(12) < lengths[:, None], tokens, 0))}


class Language(nn.Module):
    """An embedding and two layers, with dropout that the caller switches on or off."""

    dropout: float = 0.0

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(32, 32)(jnp.pad(tokens[:, :-1], ((0, 0), (1, 0))))
        x = nn.Dropout(self.dropout, deterministic=False)(nn.gelu(nn.Dense(64)(x)))
        return nn.Dense(32)(nn.LayerNorm()(x))


def weighted_cross_entropy(logits, targets, weights):
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets) * weights
    return losses.sum(), weights.sum()


def lm1b(compressor):
    """Four changed lines: the loss's arguments and its result, and the call."""
    model = Language()
    params = model.init(
        {"params": jax.random.key(0), "dropout": jax.random.key(1)}, sentences(0)["inputs"]
    )["params"]
    state = TrainState.create(apply_fn=model.apply, params=params, tx=optax.adamw(1e-2))

    mesh = auto_mesh((WORLD, 1, 1), ("data", "fsdp", "tensor"))
    placed = NamedSharding(mesh, P()), NamedSharding(mesh, P("data")), None

    @functools.partial(jax.jit, in_shardings=placed, donate_argnums=0)
    def train_step(state, batch, dropout_rng):
        inputs, positions = (batch.get(k) for k in ("inputs", "inputs_position"))
        assert positions is None
        weights = jnp.where(inputs > 0, 1, 0).astype(jnp.float32)
        dropout_rng = jax.random.fold_in(dropout_rng, state.step)

        def loss_fn(params, inputs, weights, dropout_rng):  # changed
            logits = model.apply({"params": params}, inputs, rngs={"dropout": dropout_rng})
            loss, weight_sum = weighted_cross_entropy(logits, inputs, weights)
            if compressor is None:
                return loss / weight_sum, logits
            return (loss, weight_sum), logits  # changed

        options = {} if compressor is None else {"loss": "ratio", "aux_specs": P("data")}
        grad_fn = compressed(loss_fn, compressor, mesh, has_aux=True, **options)  # changed
        (loss, logits), grads = grad_fn(state.params, inputs, weights, dropout_rng)  # changed
        state = state.apply_gradients(grads=grads)
        total, count = weighted_cross_entropy(logits, inputs, weights)
        return state, loss, {"loss": total, "denominator": count}

    losses, metrics = [], []
    for step in range(STEPS):
        state, loss, found = train_step(state, sentences(step), jax.random.PRNGKey(3))
        losses.append(float(loss))
        metrics.append(found)
    return losses, metrics


class Classifier(nn.Module):
    """A recurrent encoder of token ids and their lengths; one logit per sentence."""

    @nn.compact
    def __call__(self, tokens, lengths):
        x = nn.Embed(32, 32)(tokens)
        carry, _ = nn.RNN(nn.LSTMCell(32), return_carry=True)(x, seq_lengths=lengths)
        return nn.Dense(1)(carry[1])


def sst2(compressor):
    """Four changed lines: recurrent, a dictionary of keys, the state's own apply_fn."""
    model = Classifier()
    ones = jnp.ones((2, 12), jnp.int32)
    params = model.init(jax.random.key(0), ones, jnp.ones(2, jnp.int32))["params"]
    state = TrainState.create(apply_fn=model.apply, params=params, tx=optax.sgd(0.5))

    @jax.jit
    def train_step(state, batch, rngs):
        rngs = {name: jax.random.fold_in(rng, state.step) for name, rng in rngs.items()}

        def loss_fn(params, batch, rngs):  # changed
            logits = state.apply_fn({"params": params}, batch["ids"], batch["length"], rngs=rngs)
            labels = batch["label"]
            if labels.ndim == 1:
                labels = jnp.expand_dims(labels, 1)
            return jnp.mean(optax.sigmoid_binary_cross_entropy(logits, labels)), logits

        options = {} if compressor is None else {"aux_specs": P("data")}
        grad_fn = compressed(loss_fn, compressor, has_aux=True, **options)  # changed
        (loss, logits), grads = grad_fn(state.params, batch, rngs)  # changed
        return state.apply_gradients(grads=grads), loss, logits.sum()

    losses, metrics = [], []
    for step in range(STEPS):
        ids = sentences(step)["inputs"]
        batch = {"ids": ids, "length": (ids > 0).sum(1), "label": jnp.float32(ids[:, 1] > 16)}
        state, loss, metric = train_step(state, batch, {"dropout": jax.random.key(0)})
        losses.append(float(loss))
        metrics.append(metric)
    return losses, metrics


@pytest.mark.slow
@pytest.mark.parametrize("loop", [mnist, lm1b, sst2], ids=lambda f: f.__name__)
def test_a_loop_with_few_changed_lines_trains_as_exactly(loop):
    with jax.numpy_dtype_promotion("standard"):  # as Flax and Optax are written
        losses, metrics = loop(None)
        exactly, same = loop(Identity())
        noisy, near = loop(Quantize(4))
    np.testing.assert_allclose(exactly, losses, rtol=2e-4)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=2e-3, atol=2e-4), same, metrics)
    assert noisy != exactly  # something was compressed
    np.testing.assert_allclose(noisy, losses, rtol=0.05)
    assert losses[-1] < losses[0]
    assert jax.tree.structure(near) == jax.tree.structure(metrics)
