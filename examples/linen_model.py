"""The model of the Flax Linen examples: predicts the next byte from the bytes before it."""

import flax.linen as nn
import jax

import corpus

CONTEXT = 8


class NextByte(nn.Module):
    """Maps the last 8 bytes, i32[batch, 8], to logits f32[batch, 256] of the next byte."""

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = nn.Embed(corpus.VOCABULARY, 32)(tokens).reshape(tokens.shape[0], -1)
        x = nn.gelu(nn.Dense(256)(x))
        return nn.Dense(corpus.VOCABULARY)(x)
