"""The bytes of the compiled jnp fallback are the oracle's, and its program has a bounded size."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import oracle
from cgx_jax.kernels import chunk, primitives, reference
from cgx_jax.kernels.wire import ROUNDINGS, Layout, Slot

KEY = np.uint32([3, 5])


def layout_of(fields, world):
    """Returns the layout for (size, bits, bucket size, rounding, rotation), and oracle leaves."""
    fields = tuple(Slot(*f[:4], i, *f[4:]) for i, f in enumerate(fields))
    leaves = [
        oracle.Leaf(
            f.size, f.bits, f.bucket_size, ROUNDINGS.index(f.rounding), f.number, f.rotation
        )
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


def compiled(f, *args, **static):
    return jax.tree.map(np.asarray, jax.jit(functools.partial(f, **static))(*args))


def stream(rows, leaves):
    begin, _ = oracle.layout(leaves, len(rows))
    parts = [row[: b - a] for row, a, b in zip(rows, begin, begin[1:], strict=False)]
    return np.concatenate(parts)


@pytest.mark.parametrize(
    "rounding", ["nearest", *(pytest.param(r, marks=pytest.mark.slow) for r in ROUNDINGS[1:])]
)
@pytest.mark.slow
def test_bytes_of_many_buckets_of_every_width_are_the_oracles(rounding):
    sizes, world, rank = [64 * 300] * 7 + [64 * 300 + 17, 0], 3, 2
    layout, leaves = layout_of([(n, i % 8 + 1, 64, rounding) for i, n in enumerate(sizes)], world)
    x = values(sizes)
    offset = np.float32(rank) / np.float32(world)
    want = oracle.encode_buffer(x, leaves, KEY, offset, oracle.all_zero_masks(x, leaves))
    encode = functools.partial(compiled, reference.encode, KEY, layout=layout)
    rows, *lost = encode(jnp.int32(rank), *x, residual=True)
    begin, _ = oracle.layout(leaves, world)
    want[begin[rank] : begin[rank + 1]] = 0
    np.testing.assert_array_equal(stream(rows, leaves), want)
    decoded = oracle.decode(np.asarray(rows), leaves, [np.float32] * 9)
    mine = oracle.in_chunk(leaves, begin[rank], begin[rank + 1])
    for e, v, y, own in zip(lost, x, decoded, mine, strict=True):
        with np.errstate(invalid="ignore"):
            np.testing.assert_array_equal(e, np.where(own, np.float32(0), v - y))
    dtypes = [np.dtype(("float32", "float16", "bfloat16")[i % 3]) for i in range(9)]
    got = compiled(reference.decode, rows, layout=layout, dtypes=dtypes)
    for y, z in zip(got, oracle.decode(rows, leaves, dtypes), strict=True):
        np.testing.assert_array_equal(np.float32(y), np.float32(z))


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


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.quick("3")
def test_a_batch_is_reduced_like_its_elements(batch, mesh):
    sizes, world = [64 * 9, 64 * 30], 4
    layout, _ = layout_of([(n, 4, 64, "nearest") for n in sizes], world)
    rng = np.random.default_rng(0)
    keys = rng.integers(0, 9, (8, batch, 2)).astype(np.uint32)
    ranks = rng.integers(0, world, (8, batch)).astype(np.int32)
    payload = np.tile(np.zeros((world, layout.chunk_bytes), np.uint8), (8, batch, 1, 1))
    x = [rng.normal(size=(8, batch, n)).astype(np.float32) for n in sizes]

    def reduce(key, rank, payload, *leaves):
        flat = [a.reshape(-1, *a.shape[2:]) for a in (key, rank, payload, *leaves)]
        flat = [a[0] for a in flat] if batch == 1 else flat
        out = primitives.reduce_jnp(*flat, layout=layout, divisor=2.0, batch=batch)
        return out[0].reshape(1, batch, -1)

    f = jax.shard_map(reduce, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    got = np.asarray(jax.jit(f)(keys, ranks, payload, *x))
    one = jax.jit(functools.partial(chunk.reduce, layout=layout, divisor=2.0))
    for d in range(8):
        for b in range(batch):
            want = one(keys[d, b], ranks[d, b], payload[d, b], *(v[d, b] for v in x))[0]
            np.testing.assert_array_equal(got[d, b], want)


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
        compiled = jax.jit(reduce).lower(*operands, x).compile()
        costs.append(compiled.cost_analysis()["flops"])
    # A loop's body counts once: a chunk has an eighth of the values, plus costs per record.
    assert costs[1] < costs[0] / 4, costs
