"""Properties that the compressor protocol allows, and that reductions must handle themselves."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import cgx_jax
from cgx_jax import Plan, Quantize, Rules, transforms
from cgx_jax.compressors import PayloadCompressor
from cgx_jax.policies import Stages
from toys import Difference, RankOne
from worlds import normal, on_ranks, stepper

pytestmark = pytest.mark.usefixtures("unoptimized")


@dataclasses.dataclass(frozen=True)
class ThreeBits(PayloadCompressor):
    """Integers from -4 to 3 in three bits: for most sizes a payload is not a whole byte count."""

    @property
    def unbiased(self):
        return False

    def supports(self, dtype):
        return dtype in (jnp.float32, jnp.bfloat16)

    def wire_bits(self, shape, dtype=jnp.float32):
        # A size that depends on the dtype must not differ between the phases.
        assert np.dtype(dtype).itemsize in (2, 4)
        return 3 * int(np.prod(shape))

    def error_bound(self, x):
        return jnp.full(jnp.shape(x), 0.5, jnp.float32)

    def encode(self, x, *, key=None):
        assert x.dtype == jnp.float32
        codes = jnp.clip(jnp.round(jnp.ravel(x)) + 4, 0, 7).astype(jnp.uint8)
        bits = jnp.unpackbits(codes[:, None], axis=1)[:, 5:]
        return jnp.packbits(bits.ravel())

    def decode(self, payload, shape, dtype):
        size = int(np.prod(shape))
        bits = jnp.unpackbits(payload)[: 3 * size].reshape(size, 3)
        codes = jnp.packbits(jnp.pad(bits, ((0, 0), (5, 0))), axis=1)[:, 0]
        return (codes.astype(jnp.float32) - 4).reshape(shape).astype(dtype)


DELTA = Difference()
TREE = {"a": {"kernel": jnp.ones((8, 64, 64))}, "bias": jnp.ones((8, 64))}
LOCAL = {"a": {"kernel": jnp.ones((64, 64))}, "bias": jnp.ones(64)}


@jax.grad
def hook(t):
    return sum(x.sum() for x in jax.tree.leaves(cgx_jax.reduce_in_backward(t, "data", DELTA)))


CALLS = {
    "psum_compressed": lambda t: cgx_jax.psum_compressed(t, "data", DELTA),
    "pmean_compressed": lambda t: cgx_jax.pmean_compressed(t, "data", Plan.build(t, DELTA)),
    "psum_scatter_compressed": lambda t: cgx_jax.psum_scatter_compressed(
        t, "data", DELTA, tiled=True
    ),
    "all_gather_compressed": lambda t: cgx_jax.all_gather_compressed(t, "data", DELTA),
    "reduce_in_backward": hook,
}


@pytest.mark.parametrize("name", CALLS)
def test_a_compressor_with_state_is_refused_while_tracing_by(name, mesh):
    f = on_ranks(CALLS[name], mesh, check_vma=False)
    pattern = f"^{name}: {re.escape(str(DELTA))} of leaf 'a/kernel' has state, .*sync_gradients"
    with pytest.raises(ValueError, match=pattern):
        jax.eval_shape(f, TREE)


def test_a_compressor_with_state_is_refused_by_value_and_grad(mesh):
    loss = lambda p, x: (p["a"]["kernel"] @ x.T).mean() + p["bias"].sum()  # noqa: E731
    f = cgx_jax.value_and_grad(loss, "data", DELTA, mesh=mesh)
    with pytest.raises(ValueError, match=r"value_and_grad: .* has state between steps; .*f\.init"):
        jax.eval_shape(f, LOCAL, jnp.ones((8, 64)))


@pytest.mark.parametrize("check_vma", [True, False])
def test_a_state_of_each_rank_is_kept_from_step_to_step(check_vma, mesh):
    """`Difference` sends changes, so the results add up to the mean of the last gradients."""
    tx = cgx_jax.sync_gradients("data", DELTA, mesh=mesh, exchange="xla")
    state = tx.init(LOCAL)
    assert state.codes.own[0]["a"]["kernel"][0].shape == (8, 64, 64)
    assert state.codes.own[0]["bias"] == ()  # exact
    step = stepper(tx, mesh, state, check_vma=check_vma)
    seen = 0.0
    for i in range(4):
        grads = {"a": {"kernel": normal(8, 64, 64, seed=i)}, "bias": normal(8, 64, seed=i)}
        mean, state = step(grads, state)
        seen = seen + np.asarray(mean["a"]["kernel"])
        np.testing.assert_allclose(mean["bias"], grads["bias"].mean(0), atol=1e-6)
    kernel = grads["a"]["kernel"]
    assert np.abs(seen - kernel.mean(0)).max() <= 4 / 512 + 1e-5
    np.testing.assert_array_equal(state.codes.own[0]["a"]["kernel"][0], kernel)


@pytest.mark.parametrize("compressor", [DELTA, RankOne()], ids=["own", "shared"])
def test_a_step_that_is_not_finite_leaves_the_state(compressor, mesh):
    tx = cgx_jax.sync_gradients("data", compressor, mesh=mesh, exchange="xla")
    state = tx.init(LOCAL)
    step = stepper(tx, mesh, state)
    good = {"a": {"kernel": normal(8, 64, 64)}, "bias": normal(8, 64)}
    bad = {"a": {"kernel": good["a"]["kernel"].copy()}, "bias": good["bias"].copy()}
    bad["bias"][3, 5] = np.nan
    _, state = step(good, state)
    mean, after = step(bad, state)
    assert np.isnan(mean["bias"]).any()
    assert [transforms.metrics(s) for s in (state, after)] == [{"cgx/skipped": n} for n in (0, 1)]
    for x, y in zip(jax.tree.leaves(state.codes), jax.tree.leaves(after.codes), strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("compressor", [DELTA, RankOne()], ids=["own", "shared"])
def test_state_works_under_pmap_and_in_value_and_grad(compressor, mesh):
    tx = cgx_jax.sync_gradients("data", compressor, exchange="xla")
    grads = {"a": {"kernel": normal(8, 64, 64)}, "bias": normal(8, 64)}
    state = jax.pmap(tx.init, axis_name="data")(jax.tree.map(jnp.zeros_like, grads))
    step = jax.pmap(lambda g, s: tx.update(g, s), axis_name="data")
    for _ in range(2):
        mean, state = step(grads, state)
    assert (np.asarray(mean["a"]["kernel"]) == np.asarray(mean["a"]["kernel"])[0]).all()

    loss = lambda p, x: (jnp.tanh(x @ p["a"]["kernel"]) + p["bias"]).mean()  # noqa: E731
    f = cgx_jax.value_and_grad(loss, "data", compressor, mesh=mesh, exchange="xla")
    kept = f.init(LOCAL)
    apply = jax.jit(f.apply)
    for i in range(2):
        (_, got), kept = apply(kept, LOCAL, jnp.asarray(normal(16, 64, seed=i)))
    assert int(kept.step) == 2
    assert np.isfinite(got["a"]["kernel"]).all()
    assert any(np.any(np.asarray(x)) for x in jax.tree.leaves(kept.codes))


def test_the_state_of_other_compressors_is_refused(mesh):
    one, two = Quantize(4), DELTA
    policies = two, one, Stages((one, two), (3,)), Stages((two, one), (3,))
    stateful, other, stages, turned = (
        cgx_jax.sync_gradients("data", c, mesh=mesh, exchange="xla") for c in policies
    )
    for tx, state, says in (
        (stateful, other.init(LOCAL), "holds nothing for Difference"),
        (other, stateful.init(LOCAL), r"the state of Quantize.* is .*but its init makes \[\]"),
        (stages, stateful.init(LOCAL), r"1 tree\(s\) of compressors' states, but .* needs 2"),
        (stateful, stages.init(LOCAL), r"2 tree\(s\) of compressors' states, but .* needs 1"),
        (turned, stages.init(LOCAL), r"the state of Difference.* is \[\] here, but its init makes"),
    ):
        with pytest.raises(ValueError, match=rf"^sync_gradients: .*{says}.*other options"):
            jax.eval_shape(stepper(tx, mesh, state), TREE, state)


def test_a_plan_of_local_shapes_is_taken_by_an_init_of_global_ones():
    """Parameters that are split over a model axis are whole outside shard_map."""
    local = Plan.build({"w": jnp.ones((32, 64))}, Quantize(4))
    tx = cgx_jax.sync_gradients("data", local)
    assert int(tx.init({"w": jnp.ones((64, 64))}).step) == 0


class Claims(Difference):
    shares_state = True


def test_a_state_that_is_said_to_be_shared_and_is_not_is_refused(mesh):
    tx = cgx_jax.sync_gradients("data", Claims(), mesh=mesh, exchange="xla")
    state = tx.init(LOCAL)
    with pytest.raises(ValueError, match=r"says that ranks share its state .*differs over"):
        jax.eval_shape(stepper(tx, mesh, state), TREE, state)


def test_payloads_that_are_no_whole_bytes_are_filled_up(mesh):
    rng = np.random.default_rng(0)
    # One leaf's runs for 8 ranks have 126 values, 378 bits; the other's have 375 values.
    sizes = (1003, np.float32), (3000, jnp.bfloat16)
    x = [rng.integers(-1, 2, (8, n)).astype(dtype) for n, dtype in sizes]
    policy = Rules([], ThreeBits(), exact=())
    reduce = lambda v: cgx_jax.pmean_compressed(v, "data", policy, exchange="xla")  # noqa: E731
    for got, v in zip(on_ranks(reduce, mesh, out=P())(x), x, strict=True):
        want = np.asarray(v, np.float32).mean(0)
        assert np.abs(np.asarray(got, np.float32) - want).max() <= 0.5
        assert ThreeBits().payload_bytes(v[0].size) == -(-3 * v[0].size // 8)
