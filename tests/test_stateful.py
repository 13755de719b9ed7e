"""What the protocol of a compressor allows and reductions do not keep, or must fill up."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import cgx_jax
from cgx_jax import Cast, Plan, Rules
from cgx_jax.compressors import PayloadCompressor


@dataclasses.dataclass(frozen=True)
class Delta(Cast):
    """Sends the difference to what it sent before: has state."""

    def init(self, shape, dtype):
        return (jnp.zeros(shape, dtype),)

    def encode(self, x, state=(), *, key=None):
        payload, _ = super().encode(x - state[0])
        return payload, (x,)


@dataclasses.dataclass(frozen=True)
class ThreeBits(PayloadCompressor):
    """Whole numbers from -4 to 3 in three bits: payloads are no whole bytes for most sizes."""

    @property
    def unbiased(self):
        return False

    def supports(self, dtype):
        return dtype in (jnp.float32, jnp.bfloat16)

    def wire_bits(self, shape, dtype=jnp.float32):
        # What depends on the dtype must not differ between the phases.
        assert np.dtype(dtype).itemsize in (2, 4)
        return 3 * int(np.prod(shape))

    def error_bound(self, x):
        return jnp.full(jnp.shape(x), 0.5, jnp.float32)

    def encode(self, x, state=(), *, key=None):
        assert x.dtype == jnp.float32
        codes = jnp.clip(jnp.round(jnp.ravel(x)) + 4, 0, 7).astype(jnp.uint8)
        bits = jnp.unpackbits(codes[:, None], axis=1)[:, 5:]
        return jnp.packbits(bits.ravel()), state

    def decode(self, payload, shape, dtype):
        size = int(np.prod(shape))
        bits = jnp.unpackbits(payload)[: 3 * size].reshape(size, 3)
        codes = jnp.packbits(jnp.pad(bits, ((0, 0), (5, 0))), axis=1)[:, 0]
        return (codes.astype(jnp.float32) - 4).reshape(shape).astype(dtype)


DELTA = Delta(jnp.bfloat16)
TREE = {"a": {"kernel": jnp.ones((8, 64, 64))}, "bias": jnp.ones((8, 64))}
LOCAL = {"a": {"kernel": jnp.ones((64, 64))}, "bias": jnp.ones(64)}


def sync(t):
    tx = cgx_jax.sync_gradients("data", DELTA)
    return tx.update(t, tx.init(t))[0]


def hook(t):
    loss = lambda p: sum(  # noqa: E731
        x.sum() for x in jax.tree.leaves(cgx_jax.reduce_in_backward(p, "data", DELTA))
    )
    return jax.grad(loss)(t)


CALLS = {
    "psum_compressed": lambda t: cgx_jax.psum_compressed(t, "data", DELTA),
    "pmean_compressed": lambda t: cgx_jax.pmean_compressed(t, "data", Plan.build(t, DELTA)),
    "psum_scatter_compressed": lambda t: cgx_jax.psum_scatter_compressed(
        t, "data", DELTA, tiled=True
    ),
    "all_gather_compressed": lambda t: cgx_jax.all_gather_compressed(t, "data", DELTA),
    "sync_gradients": sync,
    "reduce_in_backward": hook,
}


@pytest.mark.parametrize("name", CALLS)
def test_a_compressor_with_state_is_refused_while_tracing_by(name, mesh):
    call = lambda t: CALLS[name](jax.tree.map(lambda x: x[0], t))  # noqa: E731
    f = jax.shard_map(call, mesh=mesh, in_specs=P("data"), out_specs=P("data"), check_vma=False)
    pattern = f"^{name}: {re.escape(str(DELTA))} of leaf 'a/kernel' has state .*use a compressor"
    with pytest.raises(ValueError, match=pattern):
        jax.eval_shape(f, TREE)


def test_a_compressor_with_state_is_refused_by_value_and_grad(mesh):
    loss = lambda p, x: (p["a"]["kernel"] @ x.T).mean() + p["bias"].sum()  # noqa: E731
    f = cgx_jax.value_and_grad(loss, "data", DELTA, mesh=mesh)
    with pytest.raises(ValueError, match="has state"):
        jax.eval_shape(f, LOCAL, jnp.ones((8, 64)))


def test_payloads_that_are_no_whole_bytes_are_filled_up(mesh):
    rng = np.random.default_rng(0)
    # Of 8 ranks' runs one has 126 values, 378 bits; the other 375 values.
    x = [
        jnp.asarray(rng.integers(-1, 2, (8, n)), t)
        for n, t in ((1003, "float32"), (3000, "bfloat16"))
    ]
    policy = Rules([], ThreeBits(), exact=())
    reduce = lambda v: cgx_jax.pmean_compressed(v, "data", policy)  # noqa: E731
    f = jax.shard_map(reduce, mesh=mesh, in_specs=P("data"), out_specs=P())
    for got, v in zip(jax.jit(f)(x), x, strict=True):
        want = np.asarray(v, np.float32).mean(0)
        assert np.abs(np.asarray(got[0], np.float32) - want).max() <= 0.5
        assert ThreeBits().payload_bytes(v[0].size) == -(-3 * v[0].size // 8)
