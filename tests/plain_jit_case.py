"""A small regression that the tests of value_and_grad share."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType

import cgx_jax
from cgx_jax import Quantize


def auto_mesh(shape=(8,), names=("data",)):
    return jax.make_mesh(shape, names, axis_types=(AxisType.Auto,) * len(shape))


def params_and_batch():
    rng = np.random.default_rng(0)
    params = {
        "a": {"w": rng.normal(size=(32, 64)).astype(np.float32), "b": np.zeros(64, np.float32)},
        "c": {"w": rng.normal(size=(64, 32)).astype(np.float32) / 8},
    }
    batch = rng.normal(size=(64, 32)).astype(np.float32), rng.normal(size=(64, 32))
    return jax.tree.map(jnp.asarray, params), jnp.asarray(batch[0]), jnp.float32(batch[1])


def loss_fn(p, x, y):
    return jnp.mean((jnp.tanh(x @ p["a"]["w"] + p["a"]["b"]) @ p["c"]["w"] - y) ** 2)


def check_close(got, want, relative=0.02):
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(g, w, atol=relative * np.abs(w).max() + 1e-7)


def vag(loss_fn=loss_fn, policy=None, **options):
    """value_and_grad at 8 bits over eight ranks, compressed whatever it costs."""
    options.setdefault("mesh", auto_mesh())
    return cgx_jax.value_and_grad(loss_fn, "data", policy or Quantize(8), exchange="xla", **options)


@functools.cache
def exact_case():
    """(params, x, y, the loss and gradients that jax.value_and_grad gives)."""
    params, x, y = params_and_batch()
    return params, x, y, jax.value_and_grad(loss_fn)(params, x, y)
