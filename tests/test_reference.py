"""The jnp fallback writes the same format as the native kernels, and stands in for them."""

import functools
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import oracle
from cgx_jax import Quantize
from cgx_jax.kernels import chunk, native, primitives, reference
from cgx_jax.kernels.primitives import Sent
from cgx_jax.kernels.wire import Layout, Slot, mask_segment

needs_native = pytest.mark.skipif(
    "_native" not in str(native.module()), reason="no native module; a C++17 compiler builds it"
)
KEY = np.uint32([3, 5])
SIZES = [0, 1, 33, 512, 2000]


def leaves_of(dtype, sizes=SIZES):
    """Normal values; some runs and some single ones are 0."""
    rng = np.random.default_rng(0)
    x = [rng.normal(size=n) for n in sizes]
    for v in x:
        v[10:30] = v[300:500] = v[1100:1400] = v[::7] = 0
    return [jnp.asarray(v, dtype) for v in x]


def layout_of(bits, bucket_size, world, sizes=SIZES, rounding="nearest", rotation=False):
    fields = (
        Slot(n, bits, bucket_size, rounding, i, rotation, segment=mask_segment(n, bucket_size))
        for i, n in enumerate(sizes)
    )
    return Layout(tuple(fields), world)


def compiled(f, *args, **static):
    """f(*args), compiled as a whole."""
    return jax.jit(functools.partial(f, **static))(*args)


def split(rows, layout):
    """Returns a payload's ranges, masks and levels; rotated records with all their places."""
    lengths = np.diff(layout.begins)
    stream = np.concatenate([np.asarray(r)[:n] for r, n in zip(rows, lengths, strict=True)])
    ranges, masks, levels, at = [], [], [], 0
    for f in layout.slots:
        for first in range(0, f.size, f.bucket_size):
            n = min(f.bucket_size, f.size - first)
            n += -n % 32 if f.rotation else 0
            length = 8 + f.bits * 4 * -(-n // 32)
            low, unit, mask = oracle.words_of(stream[None, at : at + 8])
            ranges += [low[0, 0], unit[0, 0]]
            masks.append(mask[0])
            codes = jnp.asarray(stream[None, at + 8 : at + length])
            levels.append(np.asarray(reference.unpack(codes, f.bits))[0, :n])
            at += length
    return np.array(ranges), np.array(masks), np.concatenate(levels).astype(int)


CODINGS = [
    *[(1, "nearest", False), (4, "nearest", False), (4, "nearest", True), (7, "nearest", False)],
    *[(3, "stochastic", False), (8, "stochastic", False), (3, "correlated", True)],
]
EACH = [
    ("bfloat16", 3, "stochastic", False, [0, 33, 2000]),
    ("float16", 4, "nearest", True, [0, 33, 2000]),
    *(
        pytest.param(dtype, *coding, SIZES, marks=pytest.mark.slow)
        for dtype in ("float32", "bfloat16", "float16")
        for coding in CODINGS
    ),
]


@needs_native
@pytest.mark.parametrize(("dtype", "bits", "rounding", "rotation", "sizes"), EACH)
def test_fallback_equals_the_native_kernels_or_is_within_one_level_of_rotated_ones(
    dtype, bits, rounding, rotation, sizes
):
    world = 3 if rounding == "nearest" else 4
    layout = layout_of(bits, 96, world, sizes, rounding, rotation)
    leaves, rank = leaves_of(dtype, sizes), world - 1
    ours = primitives.encode(Sent(KEY, leaves, rank=rank), layout)[0].at[rank].set(0)
    theirs = compiled(
        reference.encode, KEY, jnp.int32(rank), *leaves, layout=layout, residual=False
    )[0]
    ranges, masks, levels = split(ours, layout)
    ranges_jnp, masks_jnp, levels_jnp = split(theirs, layout)
    # XLA may add squares and rotated values in another order, which may change how a unit rounds.
    np.testing.assert_allclose(ranges, ranges_jnp, rtol=2.0**-7 if rotation else 0)
    np.testing.assert_array_equal(masks, masks_jnp)
    assert np.abs(levels - levels_jnp).max() <= (1 if rotation else 0)
    assert (levels != levels_jnp).mean() < 3e-3  # ties, which are more frequent in short dtypes
    ours = primitives.encode(Sent(KEY, leaves), layout)[0]
    decoded = primitives.decode(ours, layout, leaves)
    again = compiled(reference.decode, ours, layout=layout, dtypes=[x.dtype for x in leaves])
    for a, b, x in zip(decoded, again, leaves, strict=True):
        np.testing.assert_allclose(
            np.float32(a), np.float32(b), rtol=float(jnp.finfo(dtype).eps), atol=1e-6
        )
        bound = np.asarray(Quantize(bits, 96, rounding, rotation).error_bound(x))
        assert (np.abs(np.float32(a) - np.float32(x)) <= bound).all()


@needs_native
@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 2])
def test_fallback_reduces_accumulates_and_leaves_residuals_of_rotated_leaves_as_native_does(rank):
    """Others are compared with the oracle, by test_fallback."""
    layout, leaves = layout_of(8, 64, 3, rotation=True), leaves_of("float32")
    peers = primitives.encode(Sent(KEY, [2 * x for x in leaves]), layout)[0]
    rows = jnp.tile(peers[rank], (3, 1))
    kept = [jnp.full_like(x, 7) for x in leaves]
    ours, lost = primitives.reduce(
        Sent(KEY, leaves, rank=rank), rows, layout, divisor=3, residuals=kept
    )
    theirs, *lost_too = compiled(
        chunk.reduce, KEY, jnp.int32(rank), rows, *leaves, *kept, layout=layout, divisor=3.0
    )
    for x, y in zip(lost, lost_too, strict=True):
        np.testing.assert_allclose(x, y, atol=0.3)
        np.testing.assert_array_equal(x == 7, y == 7)
    alone = [jnp.zeros_like(rows).at[rank].set(c) for c in (ours, theirs)]  # other chunks: 0
    a, b = (primitives.decode(rows, layout, leaves) for rows in alone)
    for x, y in zip(a, b, strict=True):
        np.testing.assert_allclose(x, y, atol=0.1)
    assert sum(np.abs(x).sum() for x in a) > 0
    got = primitives.encode(Sent(KEY, leaves, rank=rank), layout, residual=True)[1]
    want = compiled(reference.encode, KEY, jnp.int32(rank), *leaves, layout=layout, residual=True)[
        1:
    ]
    for x, y in zip(got, want, strict=True):
        np.testing.assert_allclose(x, y, atol=0.05)
    one = layout.with_world(1)
    payload = primitives.encode(Sent(KEY, leaves), one)[0]
    stacked = jnp.concatenate([payload] * 3)
    got = primitives.accumulate(jnp.int32(rank), stacked, leaves, one, divisor=3)
    want = compiled(
        reference.accumulate, jnp.int32(rank), stacked, *leaves, layout=one, divisor=3.0
    )
    for x, y in zip(got, want, strict=True):
        np.testing.assert_allclose(x, y, atol=1e-5)


@pytest.mark.parametrize("batch", [(1,), (3, 1), (1, 3), (3, 1, 2)])
def test_batches_of_one_among_others_are_batches(batch):
    c = Quantize(8, 32)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(*batch, 131)), jnp.float32)

    def round_trip(v):
        return c.decode(c.encode(v), v.shape, v.dtype)

    batched = round_trip
    for _ in batch:
        batched = jax.vmap(batched)
    want = np.stack([jax.jit(round_trip)(v) for v in x.reshape(-1, 131)])
    np.testing.assert_array_equal(jax.jit(batched)(x), want.reshape(x.shape))


@pytest.mark.slow
def test_a_batch_of_residuals_takes_a_leaf_that_is_whole_in_one_chunk_under_shard_map(mesh):
    fields = Slot(512, 4, 512, "nearest", 0), Slot(5000, 4, 512, "nearest", 1)
    layout = Layout(fields, 2)
    leaves = leaves_of(jnp.float32, [512, 5000])

    def own(payload, *leaves):
        def one(rank, payload, *leaves):
            key = jnp.zeros(2, jnp.uint32)
            return chunk.reduce(key, rank, payload, *leaves, layout=layout, divisor=2)

        # As the primitive does: JAX cannot batch a branch with constants under check_vma.
        return lax.map(lambda xs: one(*xs), (payload[:, 0, 0].astype(jnp.int32), payload, *leaves))

    payload = jnp.zeros((8, 2, layout.chunk_bytes), jnp.uint8)
    batch = [jnp.tile(x, (8, 1)) for x in (*leaves, *leaves)]
    f = jax.shard_map(own, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    _, *lost = jax.jit(f)(payload, *batch)
    expected = chunk.reduce(
        jnp.zeros(2, jnp.uint32),
        jnp.int32(0),
        payload[0],
        *leaves,
        *leaves,
        layout=layout,
        divisor=2,
    )
    for x, y in zip(lost, expected[1:], strict=True):
        np.testing.assert_array_equal(x, np.broadcast_to(y, x.shape))


WITHOUT_NATIVE = """
import sys, warnings
sys.modules["cgx_jax._native"] = None
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import cgx_jax
    import cgx_jax.transforms.backward_hook
assert [w.category for w in caught] == [RuntimeWarning], caught
assert "C++17 compiler" in str(caught[0].message)
assert cgx_jax.kernels.backends()["cpu"] == "jnp"
import jax, jax.numpy as jnp
from jax.extend.backend import backends
x = jnp.arange(2 * 4 * 600, dtype=jnp.float32).reshape(2, 4, 600) % 77
y = jax.pmap(lambda v: cgx_jax.psum_compressed(v, "i", cgx_jax.Quantize(8)), axis_name="i")(x)
assert abs(y[1] - x.sum(0)).max() < 1, "wrong sum"
print("ok")
"""

WITHOUT_CUDA = """
import sys, warnings
sys.modules["cgx_jax_cuda13"] = None
import cgx_jax, jax
from jax._src import xla_bridge
assert not xla_bridge.backends_are_initialized(), "the import starts a backend"
f = jax.jit(lambda x: cgx_jax.Quantize(4).encode(x))
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for size in (64, 96):  # two programs: nothing of the second is cached
        x = jax.ShapeDtypeStruct((size,), "float32")
        f.trace(x).lower(lowering_platforms=("cpu",))
        assert len(caught) == (size > 64), caught
        program = f.trace(x).lower(lowering_platforms=("cuda",)).as_text()
        assert "cgx_encode" not in program, program
assert [w.category for w in caught] == [RuntimeWarning], caught
assert "nvcc" in str(caught[0].message) and "reinstall" in str(caught[0].message)
print("ok")
"""


@pytest.mark.parametrize("program", [WITHOUT_NATIVE, WITHOUT_CUDA], ids=["native", "CUDA"])
def test_without_a_module_import_and_call_work_and_one_warning_says_so(program):
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert run.stdout == "ok\n", run.stderr
