"""Trees whose paths are unordered or not unique: the backward-pass hook, and plans."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from cgx_jax import Identity, Plan, Quantize, reduce_in_backward


class Layer(NamedTuple):
    weight: Any
    bias: Any
    after: Any


@pytest.mark.parametrize(
    "params",
    [
        [np.full((33, 70), i, np.float32) for i in range(11)],
        Layer(*(np.full(s, 1, np.float32) for s in ((64, 64), (64,), (40, 40)))),
        {"a": {"b": np.ones((40, 40), np.float32)}, "a/b": np.ones((50, 50), np.float32)},
    ],
    ids=["eleven layers", "fields not in alphabetical order", "two leaves of one path"],
)
def test_hook_takes_leaves_whose_paths_are_in_any_order(params, mesh):
    scale = [float(i + 1) for i in range(len(jax.tree.leaves(params)))]

    def loss(p, x):
        p = reduce_in_backward(p, "data", Quantize(8))
        leaves = jax.tree.leaves(p)
        return sum(
            s * jnp.vdot(v, jnp.full(v.shape, x[0])) for s, v in zip(scale, leaves, strict=True)
        )

    grad = jax.shard_map(
        jax.grad(loss), mesh=mesh, in_specs=(P(), P("data")), out_specs=P(), check_vma=False
    )
    got = jax.jit(grad)(params, jnp.arange(8, dtype=jnp.float32))
    for s, g, v in zip(scale, jax.tree.leaves(got), jax.tree.leaves(params), strict=True):
        np.testing.assert_allclose(g, np.full(v.shape, 28 * s), rtol=1e-6)


def test_an_override_holds_for_all_leaves_of_its_path():
    tree = {"a": {"b": np.ones((40, 40), np.float32)}, "a/b": np.ones((50, 50), np.float32)}
    plan = Plan.build(tree, Quantize(8), overrides={"a/b": Quantize(2)})
    assert plan.compressors == (Quantize(2),) * 2


def test_exact_leaves_share_a_collective_of_up_to_64_kib():
    """Eleven vectors of 1 KiB and a matrix of 48 KiB share one; another 32 KiB do not fit."""
    params = {f"bias {i:2}": np.ones(256, np.float32) for i in range(11)}
    params |= {"w": np.ones((96, 128), np.float32), "x": np.ones((64, 128), np.float32)}
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))

    def loss(p, x):
        p = reduce_in_backward(p, "data", Identity())
        return sum(x[0] * (i + 1) * v.sum() for i, v in enumerate(jax.tree.leaves(p)))

    grad = jax.jit(
        jax.shard_map(
            jax.grad(loss), mesh=mesh, in_specs=(P(), P("data")), out_specs=P(), check_vma=False
        )
    )
    x = np.array([1.0, 2.0], np.float32)
    assert grad.lower(params, x).as_text().count('"stablehlo.all_reduce"') == 2
    for i, g in enumerate(jax.tree.leaves(grad(params, x))):
        np.testing.assert_array_equal(g, np.full(g.shape, 3.0 * (i + 1)))
