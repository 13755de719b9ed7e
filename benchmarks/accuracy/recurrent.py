"""Recurrent language models on English text that ships in packages: by the byte and by the word.

A word's embedding row has a gradient only in steps whose batch contains the word. For most words
these steps are rare. The texts are technical English: the topics of Python's own help, and the
docstrings of NumPy and SciPy, which come with JAX.
"""

import collections
import inspect
import re
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

VOCABULARY = 2048  # the most frequent words of the training text; all others are word 0
HELD_OUT = 0.1  # of the text, at its end
_WORD = re.compile(rb"\w+|[^\w\s]")
_MADE_AT_IMPORT = re.compile("may vary|by position is deprecated")  # differ between processes


class Recurrent(nnx.Module):
    """One LSTM: maps tokens i32[batch, length] to logits f32[batch, length, vocabulary]."""

    def __init__(self, vocabulary: int, width: int, hidden: int, rngs: nnx.Rngs):
        self.token = nnx.Embed(vocabulary, width, rngs=rngs)
        self.input = nnx.Linear(width, 4 * hidden, rngs=rngs)
        self.recurrent = nnx.Linear(hidden, 4 * hidden, use_bias=False, rngs=rngs)
        self.logits = nnx.Linear(hidden, vocabulary, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        inputs = self.input(self.token(tokens)).swapaxes(0, 1)
        matrix = self.recurrent.kernel[...]

        def step(carry: tuple[jax.Array, jax.Array], x: jax.Array) -> tuple[Any, jax.Array]:
            hidden, cell = carry
            entry, forget, out, new = jnp.split(x + hidden @ matrix, 4, axis=-1)
            cell = nnx.sigmoid(forget + 1) * cell + nnx.sigmoid(entry) * jnp.tanh(new)
            hidden = nnx.sigmoid(out) * jnp.tanh(cell)
            return (hidden, cell), hidden

        # Zeros computed from the inputs, so that they vary over the mesh as the inputs do.
        zeros = 0 * inputs[0, :, : matrix.shape[0]]
        _, hidden = jax.lax.scan(step, (zeros, zeros), inputs, unroll=4)
        return self.logits(hidden.swapaxes(0, 1))


def next_token_loss(model: nnx.Module, tokens: jax.Array) -> jax.Array:
    """Mean cross-entropy in nats per token of i32[batch, length + 1], without each first token."""
    logits = model(tokens[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


@cache
def help_bytes() -> tuple[np.ndarray, np.ndarray]:
    """(training, held-out) topics of Python's help, u8[bytes]."""
    from pydoc_data.topics import topics

    text = "\n".join(topics[name] for name in sorted(topics)).encode()
    return _split(np.frombuffer(text, np.uint8))


@cache
def docstring_words() -> tuple[np.ndarray, np.ndarray]:
    """(training, held-out) words of NumPy's and SciPy's docstrings, i32[words]."""
    import scipy.linalg
    import scipy.signal
    import scipy.stats

    modules = (np, scipy.linalg, scipy.signal, scipy.stats)
    texts = {
        inspect.cleandoc(doc)
        for module in modules
        for name in dir(module)
        if isinstance(doc := getattr(getattr(module, name), "__doc__", None), str)
    }
    lines = "\n".join(sorted(texts)).splitlines()
    kept = "\n".join(line for line in lines if not _MADE_AT_IMPORT.search(line))
    words = _WORD.findall(kept.encode())
    training, held_out = _split(np.array(words, object))
    frequent = collections.Counter(training).most_common(VOCABULARY - 1)
    number = {word: i for i, (word, _) in enumerate(frequent, start=1)}
    first, second = (
        np.array([number.get(word, 0) for word in part], np.int32) for part in (training, held_out)
    )
    return first, second


def _split(text: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    cut = int(len(text) * (1 - HELD_OUT))
    return text[:cut], text[cut:]
