"""The jnp fallback: its bytes are the oracle's and the native kernels', its program is bounded."""

import functools
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import oracle
from cgx_jax import Quantize
from cgx_jax.kernels import chunk, native, primitives, reference
from cgx_jax.kernels.primitives import Sent
from cgx_jax.kernels.wire import ROUNDINGS, Layout, Slot, mask_segment

KEY = np.uint32([3, 5])


def layout_of(fields, world):
    """Returns the layout for (size, bits, bucket size, rounding, rotation), and oracle leaves."""
    fields = tuple(Slot(*f[:4], i, *f[4:]) for i, f in enumerate(fields))
    number = ROUNDINGS.index
    leaves = [
        oracle.Leaf(f.size, f.bits, f.bucket_size, number(f.rounding), f.number, f.rotation)
        for f in fields
    ]
    return Layout(fields, world), leaves


def values(sizes, dtype=np.float32, seed=0):
    """Normal values of many scales: zeros, a constant bucket and some that are not finite."""
    rng = np.random.default_rng(seed)
    out = []
    for n in sizes:
        x = rng.normal(size=n) * np.exp2(rng.integers(-20, 4, n // 64 + 1)).repeat(64)[:n]
        x[2000:2600] = 3
        x[3000::5] = x[3200:3500] = x[3600:3620] = 0
        x[3610:3611] = -0.0
        x[4000:4200] = np.abs(x[4000:4200])
        x[4001:4200:2] = -0.0  # a minimum
        x[4200:4400] = -np.abs(x[4200:4400])
        x[4400:4600] += 100
        x[5000:5001] = np.nan
        x[7000:7001] = np.inf
        out.append(x.astype(np.float32).astype(dtype))
    return out


def on_device(f, *args, **static):
    """f(*args), compiled as a whole."""
    return jax.jit(functools.partial(f, **static))(*args)


def compiled(f, *args, **static):
    return jax.tree.map(np.asarray, on_device(f, *args, **static))


@pytest.mark.parametrize(
    ("rounding", "widths"),
    [
        ("nearest", (1, 5, 2, 8)),
        pytest.param("nearest", range(1, 9), marks=pytest.mark.slow),
        pytest.param("stochastic", range(1, 9), marks=pytest.mark.slow),
    ],
)
@pytest.mark.every_combination
def test_reduced_bytes_and_residuals_of_every_width_are_the_oracles(rounding, widths):
    sizes, world = [3, 64 * 300 + 1, 0, 64 * 20, 64 * 7, 64 * 90, 64 * 50, 64 * 100 + 9], 3
    sizes = sizes[: len(widths)]
    fields = [(n, bits, 64, rounding) for n, bits in zip(sizes, widths, strict=True)]
    layout, leaves = layout_of(fields, world)
    x, kept = values(sizes), [np.full(n, 7, np.float32) for n in sizes]
    every = [values(sizes, seed=r) for r in range(world)]
    peers = [
        oracle.encode_buffer(own, leaves, KEY, 0, oracle.all_zero_masks(own, leaves))
        for own in every
    ]
    begin, row = oracle.layout(leaves, world)
    reduce = jax.jit(functools.partial(chunk.reduce, layout=layout, divisor=3.0))
    for rank in range(world):
        own = slice(begin[rank], begin[rank + 1])
        payload = np.stack([np.pad(p[own], (0, row - len(p[own]))) for p in peers])
        want, want_lost = oracle.reduce(x, payload, leaves, rank, 3.0, KEY, kept)
        got, *lost = reduce(KEY, jnp.int32(rank), payload, *x, *kept)
        np.testing.assert_array_equal(got, want)
        for a, b in zip(lost, want_lost, strict=True):
            np.testing.assert_array_equal(a, b)
    one, every = Layout(layout.slots, 1), np.stack(peers)
    got = compiled(reference.accumulate, jnp.int32(1), every, *x, layout=one, divisor=3.0)
    for a, b in zip(got, oracle.accumulate(x, every, leaves, 1, 3.0), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.usefixtures("unoptimized")
@pytest.mark.parametrize(
    "rounding", ["nearest", *(pytest.param(r, marks=pytest.mark.slow) for r in ROUNDINGS[1:])]
)
def test_reduced_bytes_of_rotated_leaves_decode_to_the_oracles_up_to_a_level(rounding):
    sizes, world, rank = [64 * 20 + 5, 512], 3, 1
    layout, leaves = layout_of([(n, 6, 64, rounding, True) for n in sizes], world)
    x = [np.random.default_rng(i).normal(size=n).astype(np.float32) for i, n in enumerate(sizes)]
    for v in x:
        v[40:150] = v[300:] = 0
    y = [np.where(np.arange(v.size) % 8 < 4, v, np.float32(0)) for v in x]
    peers = [oracle.encode(v, leaves, world)[0][rank] for v in (x, x, y)]
    payload = np.stack(peers)
    want, _ = oracle.reduce(x, payload, leaves, rank, 3.0, KEY)
    (got,) = compiled(chunk.reduce, KEY, jnp.int32(rank), payload, *x, layout=layout, divisor=3.0)
    assert (got != want).mean() < 0.02
    other = np.zeros_like(payload)
    decoded = []
    for chosen in (got, want):
        other[rank] = chosen
        decoded.append(np.concatenate(oracle.decode(other, leaves, [np.float32] * 2)))
    np.testing.assert_allclose(*decoded, atol=0.2)
    ones = [np.ones(n, np.float32) for n in sizes]
    kept = [
        oracle.without_masked(one, oracle.zero_masks(v, f), f)
        for one, v, f in zip(ones, x, leaves, strict=True)
    ]
    zeros = np.concatenate(kept) == 0
    assert zeros.sum() > 1000
    assert not any(d[zeros].any() for d in decoded)
    one = Layout(layout.slots, 1)
    every = np.stack([oracle.encode(v, leaves, 1)[0][0] for v in (x, y)])
    got = compiled(reference.accumulate, jnp.int32(-1), every, *x, layout=one, divisor=3.0)
    for a, b in zip(got, oracle.accumulate(x, every, leaves, -1, 3.0), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.quick("1")
def test_masks_of_segments_that_do_not_divide_a_bucket_are_the_oracles(rank):
    x = np.random.default_rng(0).normal(size=(40, 10)).astype(np.float32)
    x[5:30:2] = 0
    layout = Layout((Slot(x.size, 4, 64, "nearest", 0, segment=5),), 2)
    leaves = [oracle.Leaf(x.size, 4, 64, segment=5)]
    own = x.reshape(-1)
    sent = np.stack([oracle.encode([own * (r + 1)], leaves, 2)[0][rank] for r in range(2)])
    want, _ = oracle.reduce([own], sent, leaves, rank)
    (got,) = compiled(chunk.reduce, KEY, jnp.int32(rank), sent, own, layout=layout, divisor=1.0)
    np.testing.assert_array_equal(got, want)


@pytest.mark.usefixtures("unoptimized")
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.quick("3")
def test_a_batch_is_reduced_like_its_elements(batch, mesh):
    """With residuals, of a leaf that is whole in one chunk too."""
    sizes, world = [64, 64 * 30], 4
    layout, _ = layout_of([(n, 4, 64, "nearest") for n in sizes], world)
    rng = np.random.default_rng(0)
    keys = rng.integers(0, 9, (8, batch, 2)).astype(np.uint32)
    ranks = rng.integers(0, world, (8, batch)).astype(np.int32)
    payload = np.tile(np.zeros((world, layout.chunk_bytes), np.uint8), (8, batch, 1, 1))
    x = [rng.normal(size=(8, batch, n)).astype(np.float32) for n in sizes * 2]

    def reduce(key, rank, payload, *leaves):
        flat = [a.reshape(-1, *a.shape[2:]) for a in (key, rank, payload, *leaves)]
        flat = [a[0] for a in flat] if batch == 1 else flat
        out = primitives.reduce_jnp(*flat, layout=layout, divisor=2.0, batch=batch)
        return [y.reshape(1, batch, -1) for y in out]

    f = jax.shard_map(reduce, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    got = jax.tree.map(np.asarray, jax.jit(f)(keys, ranks, payload, *x))
    one = jax.jit(functools.partial(chunk.reduce, layout=layout, divisor=2.0))
    for d in range(8):
        for b in range(batch):
            want = one(keys[d, b], ranks[d, b], payload[d, b], *(v[d, b] for v in x))
            for y, z in zip(got, want, strict=True):
                np.testing.assert_array_equal(y[d, b], z)


def lowered(world, batch=1, residuals=True):
    """The StableHLO of the fallback's reduce, as lines."""
    sizes = [512 * 40, 100, 512 * 64 + 3]
    layout, _ = layout_of([(n, 4, 512, "nearest") for n in sizes], world)
    reduce = functools.partial(primitives.reduce_jnp, layout=layout, divisor=2.0, batch=batch)
    lead = () if batch == 1 else (batch,)
    leaves = [jax.ShapeDtypeStruct((*lead, n), jnp.float32) for n in sizes] * (1 + residuals)
    payload = jax.ShapeDtypeStruct((*lead, world, layout.chunk_bytes), jnp.uint8)
    key = jax.ShapeDtypeStruct((*lead, 2), jnp.uint32)
    rank = jax.ShapeDtypeStruct(lead, jnp.int32)
    return jax.jit(reduce).lower(key, rank, payload, *leaves).as_text().splitlines()


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.quick("3")
def test_the_program_does_not_grow_with_the_number_of_ranks(batch):
    sizes = {world: len(lowered(world, batch)) for world in (4, 64)}
    assert sizes[64] < 1.1 * sizes[4], sizes
    assert sizes[4] < 3600, sizes  # lines, for three leaves


def test_a_rank_works_on_its_own_chunk_alone():
    sizes = [512 * 64]
    costs = []
    for world in (2, 16):
        layout, _ = layout_of([(n, 4, 512, "nearest") for n in sizes], world)
        reduce = functools.partial(chunk.reduce, layout=layout, divisor=2.0)
        operands = (KEY, jnp.int32(0), np.zeros((world, layout.chunk_bytes), np.uint8))
        x = np.zeros(sizes[0], np.float32)
        costs.append(jax.jit(reduce).lower(*operands, x).cost_analysis()["flops"])
    # A loop's body counts once: a chunk has an eighth of the values, plus costs per record.
    assert costs[1] < costs[0] / 4, costs


# --- beside the native kernels

needs_native = pytest.mark.skipif(
    "_native" not in str(native.module()), reason="no native module; a C++17 compiler builds it"
)
SIZES = [0, 1, 33, 512, 2000]


def leaves_of(dtype, sizes=SIZES):
    """Normal values; some runs and some single ones are 0."""
    rng = np.random.default_rng(0)
    x = [rng.normal(size=n) for n in sizes]
    for v in x:
        v[10:30] = v[300:500] = v[1100:1400] = v[::7] = 0
    return [v.astype(jnp.dtype(dtype)) for v in x]


def layout_of_sizes(bits, bucket_size, world, sizes=SIZES, rounding="nearest", rotation=False):
    fields = (
        Slot(n, bits, bucket_size, rounding, i, rotation, segment=mask_segment(n, bucket_size))
        for i, n in enumerate(sizes)
    )
    return Layout(tuple(fields), world)


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
    layout = layout_of_sizes(bits, 96, world, sizes, rounding, rotation)
    leaves, rank = leaves_of(dtype, sizes), world - 1
    ours, lost = primitives.encode(Sent(KEY, leaves, rank=rank), layout, residual=True)
    theirs, *lost_jnp = on_device(
        reference.encode, KEY, jnp.int32(rank), *leaves, layout=layout, residual=True
    )
    if not rotation:
        jax.tree.map(np.testing.assert_array_equal, lost, lost_jnp)
    ranges, masks, levels = split(ours.at[rank].set(0), layout)
    ranges_jnp, masks_jnp, levels_jnp = split(theirs, layout)
    # XLA may add squares and rotated values in another order, which may change how a unit rounds.
    np.testing.assert_allclose(ranges, ranges_jnp, rtol=2.0**-7 if rotation else 0)
    np.testing.assert_array_equal(masks, masks_jnp)
    assert np.abs(levels - levels_jnp).max() <= (1 if rotation else 0)
    assert (levels != levels_jnp).mean() < 3e-3  # ties, which are more frequent in short dtypes
    ours = primitives.encode(Sent(KEY, leaves), layout)[0]
    decoded = primitives.decode(ours, layout, leaves)
    again = on_device(reference.decode, ours, layout=layout, dtypes=[x.dtype for x in leaves])
    bound_of = jax.jit(Quantize(bits, 96, rounding, rotation).error_bound)
    for a, b, x in zip(decoded, again, leaves, strict=True):
        np.testing.assert_allclose(
            np.float32(a), np.float32(b), rtol=float(jnp.finfo(dtype).eps), atol=1e-6
        )
        bound = np.asarray(bound_of(x))
        assert (np.abs(np.float32(a) - np.float32(x)) <= bound).all()


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
