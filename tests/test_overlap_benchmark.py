"""The steps that benchmarks/overlap.py compares compute the same update."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import scripts
from cgx_jax import Identity
from worlds import assert_same_bits

nnx = pytest.importorskip("flax.nnx", reason="no flax: pip install flax runs this")

SIZES = {"small": 1 << 14, "whole": 1 << 22}
FEATURES = 64  # a kernel has 16 KiB: one of the small buffers


@pytest.fixture(scope="module")
def benchmark():
    return scripts.load("benchmarks/overlap.py")


class Layers(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List(nnx.Linear(FEATURES, FEATURES, rngs=rngs) for _ in range(2))

    def __call__(self, x):
        for layer in self.layers:
            x = jnp.tanh(layer(x))
        return x


def task(benchmark):
    """Two dense layers under plain SGD with rate 1, so an update is the gradient."""
    return benchmark.Task(
        build=Layers,
        batches=lambda steps, seed: (),
        held_out=lambda: (),
        loss=lambda model, x: jnp.square(model(x)).mean(),
        metrics=lambda model, x: {},
        optimizer=lambda steps: optax.sgd(1.0),
        steps=1,
    )


def test_without_a_code_all_ways_compute_the_same_bits(benchmark):
    made = benchmark.trainers(task(benchmark), Identity(), "xla", SIZES)
    assert list(made) == [benchmark.PMEAN, benchmark.AFTER, "small", benchmark.COMPUTE]
    x = np.random.default_rng(0).normal(size=(64, FEATURES)).astype(np.float32)
    found = {}
    for name, trainer in made.items():
        _, params = trainer.task.initial(0)
        new, *_ = trainer.step(jax.tree.map(jnp.copy, params), trainer.tx.init(params), (x,))
        found[name] = jax.tree.map(lambda n, p: np.asarray(n) - np.asarray(p), new, params)
    for name in (benchmark.AFTER, "small"):
        assert_same_bits(found[name], found[benchmark.PMEAN])
