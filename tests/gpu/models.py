"""The models of the runs on a GPU: a GPT-2 of 124 M parameters and a ResNet-50, in bf16 on fp32.

Each is a pair: parameters fp32, and loss(params, batch) -> f32[], the mean over a rank's batch.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import lax

Loss = Callable[[Any, Any], jax.Array]

VOCABULARY, CONTEXT = 50_304, 1024  # 50,257 tokens, padded to a multiple of 128
IMAGE, CLASSES = 224, 1000


def gpt2(seed: int, small: bool = False) -> tuple[dict[str, jax.Array], Loss]:
    """Returns GPT-2's parameters, layers stacked, and its loss on tokens i32[batch, length + 1].

    `small` is for a rehearsal. Source: Radford et al., 2019.
    """
    width, layers, heads = (64, 2, 2) if small else (768, 12, 12)
    vocabulary = 512 if small else VOCABULARY
    shapes = {
        "tokens": (vocabulary, width),
        "positions": (CONTEXT, width),
        "qkv": (layers, width, 3 * width),
        "out": (layers, width, width),
        "up": (layers, width, 4 * width),
        "down": (layers, 4 * width, width),
    }
    keys = jax.random.split(jax.random.key(seed), len(shapes))
    deviations = {"out": 0.02 / (2 * layers) ** 0.5, "down": 0.02 / (2 * layers) ** 0.5}
    params = {
        name: deviations.get(name, 0.02) * jax.random.normal(k, shape)
        for k, (name, shape) in zip(keys, shapes.items(), strict=True)
    }
    for name, shape in (("qkv", 3 * width), ("out", width), ("up", 4 * width), ("down", width)):
        params[f"{name}_bias"] = jnp.zeros((layers, shape))
    for name, shape in (("norm1", (layers,)), ("norm2", (layers,)), ("norm", ())):
        params[name] = jnp.ones((*shape, width))
        params[f"{name}_bias"] = jnp.zeros((*shape, width))
    of_all = {"tokens", "positions", "norm", "norm_bias"}

    def loss(params: dict[str, jax.Array], batch: jax.Array) -> jax.Array:
        inputs, targets = batch[:, :-1], batch[:, 1:]
        p = {name: value.astype(jnp.bfloat16) for name, value in params.items()}
        x = p["tokens"][inputs] + p["positions"][: inputs.shape[1]]
        stacked = {name: value for name, value in p.items() if name not in of_all}
        x, _ = lax.scan(lambda x, layer: (block(x, layer, heads), None), x, stacked)
        x = norm(x, p["norm"], p["norm_bias"])
        logits = (x @ p["tokens"].T).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()

    return params, loss


def norm(x: jax.Array, scale: jax.Array, bias: jax.Array) -> jax.Array:
    y = x.astype(jnp.float32)
    y = (y - y.mean(-1, keepdims=True)) * lax.rsqrt(y.var(-1, keepdims=True) + 1e-5)
    return y.astype(x.dtype) * scale + bias


def block(x: jax.Array, p: dict[str, jax.Array], heads: int) -> jax.Array:
    y = norm(x, p["norm1"], p["norm1_bias"]) @ p["qkv"] + p["qkv_bias"]
    query, key, value = jnp.split(y.reshape(*x.shape[:2], 3 * heads, -1), 3, axis=2)
    mixed = attention(query, key, value).reshape(x.shape)
    x = x + mixed @ p["out"] + p["out_bias"]
    y = jax.nn.gelu(norm(x, p["norm2"], p["norm2_bias"]) @ p["up"] + p["up_bias"])
    return x + y @ p["down"] + p["down_bias"]


@functools.cache
def kernel_of_attention() -> str:
    """Returns "cudnn" where that works, and otherwise "xla"."""
    if jax.default_backend() != "gpu":
        return "xla"
    x = jax.ShapeDtypeStruct((2, CONTEXT, 12, 64), jnp.bfloat16)
    call = functools.partial(jax.nn.dot_product_attention, is_causal=True, implementation="cudnn")
    try:
        jax.jit(call).lower(x, x, x).compile()
    except Exception as e:  # of any kind: another version of cuDNN, another GPU
        print(f"attention without cuDNN: {e}", flush=True)
        return "xla"
    return "cudnn"


def attention(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    """Causal attention. Without cuDNN, the backward pass computes it again, to save memory."""
    kernel = kernel_of_attention()
    call = functools.partial(jax.nn.dot_product_attention, is_causal=True, implementation=kernel)
    return (call if kernel == "cudnn" else jax.checkpoint(call))(query, key, value)


class BatchNorm(nnx.Module):
    """Normalizes bf16[..., channels] by the statistics of the rank's batch, as in training."""

    def __init__(self, channels: int):
        self.scale, self.bias = nnx.Param(jnp.ones(channels)), nnx.Param(jnp.zeros(channels))

    def __call__(self, x: jax.Array) -> jax.Array:
        y = x.astype(jnp.float32)
        mean, variance = y.mean((0, 1, 2)), y.var((0, 1, 2))
        y = (y - mean) * lax.rsqrt(variance + 1e-5) * self.scale[...] + self.bias[...]
        return y.astype(x.dtype)


class Bottleneck(nnx.Module):
    def __init__(self, channels: int, features: int, strides: int, rngs: nnx.Rngs):
        conv = functools.partial(nnx.Conv, use_bias=False, dtype=jnp.bfloat16, rngs=rngs)
        self.convs = nnx.List(
            [
                conv(channels, features, (1, 1)),
                conv(features, features, (3, 3), strides=strides),
                conv(features, 4 * features, (1, 1)),
            ]
        )
        self.norms = nnx.List(BatchNorm(n) for n in (features, features, 4 * features))
        self.shortcut = nnx.List()
        if strides > 1 or channels != 4 * features:
            projection = conv(channels, 4 * features, (1, 1), strides=strides)
            self.shortcut = nnx.List([projection, BatchNorm(4 * features)])

    def __call__(self, x: jax.Array) -> jax.Array:
        y = x
        for i, (conv, normalize) in enumerate(zip(self.convs, self.norms, strict=True)):
            y = normalize(conv(y))
            y = nnx.relu(y) if i < 2 else y
        for layer in self.shortcut:
            x = layer(x)
        return nnx.relu(x + y)


class ResNet(nnx.Module):
    """Maps images bf16[batch, 224, 224, 3] to logits f32[batch, 1000]; 25.6 M parameters."""

    def __init__(self, stages: tuple[int, ...], rngs: nnx.Rngs):
        self.stem = nnx.Conv(
            3, 64, (7, 7), strides=2, use_bias=False, dtype=jnp.bfloat16, rngs=rngs
        )
        self.norm = BatchNorm(64)
        blocks, channels = [], 64
        for stage, count in enumerate(stages):
            for i in range(count):
                strides = 2 if stage and not i else 1
                blocks.append(Bottleneck(channels, 64 << stage, strides, rngs))
                channels = 4 * (64 << stage)
        self.blocks = nnx.List(blocks)
        self.logits = nnx.Linear(channels, CLASSES, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = nnx.relu(self.norm(self.stem(x)))
        x = nnx.max_pool(x, (3, 3), strides=(2, 2), padding="SAME")
        for block in self.blocks:
            x = block(x)
        return self.logits(x.astype(jnp.float32).mean((1, 2)))


def resnet50(seed: int, small: bool = False) -> tuple[Any, Loss]:
    """Returns ResNet-50's parameters and its loss on (images, labels).

    `small` is for a rehearsal. Source: He et al., CVPR 2016.
    """
    stages = (1,) if small else (3, 4, 6, 3)
    graph, params = nnx.split(ResNet(stages, nnx.Rngs(seed)))

    def loss(params: Any, batch: tuple[jax.Array, jax.Array]) -> jax.Array:
        images, labels = batch
        logits = nnx.merge(graph, params)(images.astype(jnp.bfloat16))
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    return params, loss


def synthetic(model: str, ranks: int, small: bool = False) -> Any:
    """Returns a batch whose arrays begin with the axis of ranks: 16,384 tokens or 128 images."""
    rng = np.random.default_rng(0)
    if model == "gpt2":
        size = (ranks, 1, 65) if small else (ranks, 16 // ranks, CONTEXT + 1)
        return rng.integers(0, 512, size, dtype=np.int32)
    count, side = (2, 32) if small else (128 // ranks, IMAGE)
    images = rng.standard_normal((ranks, count, side, side, 3), dtype=np.float32)
    return images, rng.integers(0, CLASSES, (ranks, count), dtype=np.int32)
