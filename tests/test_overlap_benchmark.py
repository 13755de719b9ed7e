"""The steps that benchmarks/overlap.py compares compute the same update."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import scripts
from cgx_jax import Identity, Quantize
from cgx_jax.commands import bench

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


def updates(benchmark, code):
    """Returns each way's change of the parameters in a step, the batch, and the first trainer."""
    made = benchmark.trainers(task(benchmark), code, "xla", SIZES)
    x = np.random.default_rng(0).normal(size=(64, FEATURES)).astype(np.float32)
    found = {}
    for name, trainer in made.items():
        _, params = trainer.task.initial(0)
        new, *_ = trainer.step(jax.tree.map(jnp.copy, params), trainer.tx.init(params), (x,))
        found[name] = [np.asarray(n) - np.asarray(p) for n, p in leaves_of(new, params)]
    return found, x, made[benchmark.PMEAN]


def leaves_of(*trees):
    return zip(*map(jax.tree.leaves, trees), strict=True)


def test_without_a_code_all_ways_compute_the_same_bits(benchmark):
    found, _, _ = updates(benchmark, Identity())
    assert list(found) == [benchmark.PMEAN, benchmark.AFTER, "small", benchmark.COMPUTE]
    for name in (benchmark.AFTER, "small"):
        for got, want in zip(found[name], found[benchmark.PMEAN], strict=True):
            np.testing.assert_array_equal(got, want, err_msg=name)


@pytest.mark.slow
def test_with_a_code_all_ways_are_within_its_bound(benchmark):
    code = Quantize(4)
    found, x, trainer = updates(benchmark, code)
    assert list(found) == [benchmark.PMEAN, benchmark.AFTER, *SIZES, benchmark.COMPUTE]
    ranks = np.split(x, len(jax.devices()))
    _, params = trainer.task.initial(0)
    grads = [jax.tree.leaves(jax.jit(jax.grad(trainer._loss))(params, (part,))) for part in ranks]
    for i, leaf in enumerate(zip(*grads, strict=True)):
        inputs = np.stack([np.asarray(g).ravel() / len(ranks) for g in leaf])
        for name in (benchmark.AFTER, *SIZES):
            got = found[name][i]
            if got.ndim == 1:  # a bias is exact
                np.testing.assert_array_equal(got, found[benchmark.PMEAN][i], err_msg=name)
            else:
                assert bench.wrong(inputs, code, [-got.ravel()]) == [0], (name, i)
    # Buffers only decide which rank owns a bucket, so equal buffers give equal bits.
    for got, want in zip(found["whole"], found[benchmark.AFTER], strict=True):
        np.testing.assert_array_equal(got, want)
