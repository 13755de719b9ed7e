"""Ranks on simulated devices: their meshes, what each of them has, and what each does with it."""

import functools

import jax
import jax.numpy as jnp
import jaxlib.version
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import cgx_jax

RANKS = P("data")
# Older versions of JAX cannot call on a stream of the GPU.
needs_streams = pytest.mark.skipif(
    jaxlib.version.__version_info__ < (0, 11), reason="fused calls on CUDA need jaxlib 0.11"
)
first = functools.partial(jax.tree.map, lambda x: x[0])
stacked = functools.partial(jax.tree.map, lambda x: x[None])


def ranks(world):
    """Returns a mesh of the first devices, on the axis "data"."""
    return Mesh(np.array(jax.devices()[:world]), ("data",))


def normal(*shape, seed=0, dtype=np.float32):
    return np.random.default_rng(seed).normal(size=shape).astype(jnp.dtype(dtype))


def drawn(key, shape, dtype=jnp.float32, **_):
    """An initializer of kernels for Flax that compiles nothing."""
    return jnp.asarray(normal(*shape) / shape[0] ** 0.5, dtype)


def on_ranks(f, mesh, *, out=None, check_vma=True):
    """Returns f of the rows of every rank, compiled.

    Its results are the rows of each rank, or with `out`, such as P(), those of all ranks.
    """
    back = stacked if out is None else lambda tree: tree
    spec = P(mesh.axis_names)
    mapped = jax.shard_map(
        lambda *trees: back(f(*map(first, trees))),
        mesh=mesh,
        in_specs=spec,
        out_specs=spec if out is None else out,
        check_vma=check_vma,
    )
    return jax.jit(mapped)


def sharded(f, mesh, given, out=P(), **options):  # noqa: B008
    """Returns f of what each rank has by the specs `given`, compiled; `out` are its results'."""
    return jax.jit(jax.shard_map(f, mesh=mesh, in_specs=given, out_specs=out, **options))


def with_state(f, mesh, state, *given, out=P(), axis="data", **options):  # noqa: B008
    """Returns f(*given, state) of each rank and its results (out, state), not compiled.

    The state lies as `state_specs` says, and `given` are the specs of what comes before it.
    """
    specs = cgx_jax.state_specs(state, axis)
    return jax.shard_map(f, mesh=mesh, in_specs=(*given, specs), out_specs=(out, specs), **options)


def placed(state, mesh, axis="data"):
    """Returns a state as later steps get it, so that a step is compiled once."""
    return jax.device_put(state, cgx_jax.state_shardings(state, axis, mesh))


def assert_same_bits(got, want):
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b, strict=True), got, want)


def stepper(tx, mesh, state, axis="data", **options):
    """Returns the steps of a gradient transformation by each rank's own gradients, compiled."""
    own = lambda grads, state: tx.update(first(grads), state)  # noqa: E731
    return jax.jit(with_state(own, mesh, state, P(axis), axis=axis, **options))
