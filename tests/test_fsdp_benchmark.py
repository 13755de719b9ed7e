"""The benchmark of sharded training, in its smallest configuration."""

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

import scripts


@pytest.fixture
def benchmark():
    return scripts.load("benchmarks/fsdp.py")


@pytest.mark.slow
def test_all_ways_start_from_the_same_weights_and_batches(benchmark):
    """First losses differ only by the effect of rounding the weights."""
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))
    with jax.numpy_dtype_promotion("standard"):
        finals = benchmark.final_losses(mesh, seeds=1, steps=1)
    assert finals.keys() == benchmark.WAYS.keys()
    exact = finals["exact"]
    assert 5 < exact[0] < 8  # log(256) is 5.5
    for way, losses in finals.items():
        np.testing.assert_allclose(losses, exact, rtol=0.01)
        assert (losses == exact) == (way == "exact")
