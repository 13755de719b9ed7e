"""A small decoder-only transformer over bytes, in Flax NNX."""

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from corpus import VOCABULARY

HEAD_WIDTH = 32


class Attention(nnx.Module):
    """Causal self-attention, f32[batch, length, width] to the same shape."""

    def __init__(self, width: int, rngs: nnx.Rngs):
        self.heads = width // HEAD_WIDTH
        self.qkv = nnx.Linear(width, 3 * width, use_bias=False, rngs=rngs)
        self.out = nnx.Linear(width, width, use_bias=False, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        heads = self.qkv(x).reshape(*x.shape[:2], 3, self.heads, HEAD_WIDTH)
        query, key, value = jnp.moveaxis(heads, 2, 0)
        mixed = jax.nn.dot_product_attention(query, key, value, is_causal=True)
        return self.out(mixed.reshape(x.shape))


class Block(nnx.Module):
    """Attention, then a two-layer perceptron, each behind a layer norm and a residual."""

    def __init__(self, width: int, rngs: nnx.Rngs):
        self.norm1 = nnx.LayerNorm(width, rngs=rngs)
        self.attention = Attention(width, rngs)
        self.norm2 = nnx.LayerNorm(width, rngs=rngs)
        self.up = nnx.Linear(width, 4 * width, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(self.norm1(x))
        return x + self.down(nnx.gelu(self.up(self.norm2(x))))


class Transformer(nnx.Module):
    """Maps bytes i32[batch, length] to logits f32[batch, length, 256] of the byte after each."""

    def __init__(self, width: int, layers: int, length: int, rngs: nnx.Rngs):
        self.byte = nnx.Embed(VOCABULARY, width, rngs=rngs)
        self.position = nnx.Embed(length, width, rngs=rngs)
        self.blocks = nnx.List(Block(width, rngs) for _ in range(layers))
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.logits = nnx.Linear(width, VOCABULARY, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.byte(tokens) + self.position(jnp.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.logits(self.norm(x))


def next_byte_loss(model: Transformer, tokens: jax.Array) -> jax.Array:
    """Mean cross-entropy in nats per byte, over windows i32[batch, length + 1]."""
    logits = model(tokens[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()
