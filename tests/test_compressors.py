"""The compressors: bytes and values against NumPy, bias and contraction as stated."""

import dataclasses
import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import cgx_jax
from cases import CASES, every
from cgx_jax import compressors
from cgx_jax.compressors import (
    DGC,
    INCEPTIONN,
    QSGD,
    AdaptiveThreshold,
    BlockTopK,
    Cast,
    DynamicTree8,
    Natural,
    NonUniform,
    OneBit,
    PayloadCompressor,
    QSparse,
    Quantize,
    RandomK,
    ScaledSign,
    SharedTernGrad,
    ShiftedLattice,
    SignSGD,
    Signum,
    SketchML,
    TernGrad,
    ThreeLC,
    Threshold,
    TopK,
)
from cgx_jax.compressors.non_uniform import tree
from cgx_jax.compressors.packing import pack, pack_trits, packed_bytes, unpack, unpack_trits
from worlds import on_ranks, ranks, stepper

KEY = jax.random.key(7)


def normal(n, seed=0, spread=1.0):
    rng = np.random.default_rng(seed)
    return (rng.standard_normal(n) * 10.0 ** rng.uniform(-spread, spread, n)).astype(np.float32)


@functools.cache
def compiled(c):
    return jax.jit(lambda x, key: c.approximate(x, key=key if c.needs_key else None))


def reduction(c, call=cgx_jax.psum_compressed, **options):
    return functools.partial(call, axis_name="data", compressor=c, exchange="xla", **options)


def over(world, f, x):
    return np.asarray(on_ranks(f, ranks(world))(x))


def back(c, x, key=KEY):
    return np.asarray(compiled(c)(x, key))


# --- bytes


@pytest.mark.parametrize("bits", [1, 2, 3, 7, 8, 9, 17, 25, 32])
@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 1000])
def test_codes_lie_in_the_payload_from_the_lowest_bit_on(bits, count):
    codes = np.random.default_rng(bits).integers(0, 2**bits, count, np.uint64)
    every = codes[:, None] >> np.arange(bits, dtype=np.uint64) & np.uint64(1)
    want = np.packbits(every.astype(np.uint8).ravel(), bitorder="little")
    packed = jax.jit(pack, static_argnums=1)(jnp.asarray(codes, jnp.uint32), bits)
    np.testing.assert_array_equal(packed, want)
    assert packed.size == packed_bytes(count, bits)
    again = jax.jit(unpack, static_argnums=(1, 2))(packed, bits, count)
    np.testing.assert_array_equal(again, codes)


@pytest.mark.parametrize("count", [0, 1, 5, 6, 1003])
def test_five_codes_of_three_values_share_a_byte(count):
    codes = np.random.default_rng(0).integers(0, 3, count).astype(np.uint8)
    packed = pack_trits(jnp.asarray(codes))
    assert packed.size == -(-count // 5)
    assert (np.asarray(packed) < 243).all()
    np.testing.assert_array_equal(unpack_trits(packed, count), codes)


N, B = 10_000, 500
# compressor -> bytes of N values in buckets of B, as the method's paper counts them
BYTES = {
    SignSGD(): N / 8,
    Signum(): N / 8,
    ScaledSign(B): N / 8 + 4 * N / B,
    OneBit(B): N / 8 + 8 * N / B,
    QSGD(7, B): 4 * N / 8 + 4 * N / B,
    QSGD(127, B): N + 4 * N / B,
    TernGrad(B): 0.2 * N + 4 * N / B,
    SharedTernGrad(B): N + 4 * N / B,
    ShiftedLattice(4): Quantize(4).payload_bytes(N),
    ThreeLC(B): 0.2 * N + 4 * N / B,
    Natural(): N,
    DynamicTree8(B): N + 4 * N / B,
    NonUniform(3, "exponential", B): 3 * N / 8 + 4 * N / B,
    NonUniform(4, "fitted", B): 4 * N / 8 + 4 * N / B + 4 * 16,
    TopK(0.01): 100 * (14 / 8 + 4),
    TopK(100, values=Cast(jnp.bfloat16)): 100 * (14 / 8 + 2),
    TopK(512, values=Quantize(8)): 512 * 14 / 8 + 512 + 8,
    BlockTopK(5): 20 * 5 * (9 / 8 + 4),
    BlockTopK(5, values=Cast(jnp.bfloat16)): math.ceil(20 * 5 * 9 / 8) + 20 * 5 * 2,
    Threshold(1.0, 0.01): 100 * (14 / 8 + 4),
    DGC(0.01): 100 * (14 / 8 + 4),
    RandomK(0.01): 400,
    RandomK(1): 4,
    RandomK(1.0): 4 * N,
    AdaptiveThreshold(0.01): 100 * 14 / 8 + 8,
    SketchML(256): N + 4 * 256,
    INCEPTIONN((0.01, 0.05, 0.2)): N / 4 + 400 + 1000 + 2000,
}


@pytest.mark.parametrize("c", BYTES, ids=str)
def test_a_payload_has_the_papers_bytes(c):
    assert c.payload_bytes(N) == math.ceil(BYTES[c])
    if isinstance(c, PayloadCompressor):
        payload = jax.eval_shape(lambda x: c.encode(x, key=KEY), jnp.zeros(N))
        assert payload.shape == (c.payload_bytes(N),)


# --- values, by other means


def of_buckets(x, size, f):
    return np.concatenate([f(x[i : i + size]) for i in range(0, len(x), size)])


def one_bit(v):
    low, high = v[v < 0], v[v >= 0]
    means = [part.mean(dtype=np.float64) if part.size else 0 for part in (low, high)]
    return np.where(v < 0, means[0], means[1])


def tree_by_search(v):
    scale = np.abs(v).max()
    table = np.concatenate([-tree()[::-1], tree()]).astype(np.float64) * scale
    return table[np.abs(v[:, None].astype(np.float64) - table).argmin(axis=1)]


def largest(x, k):
    return np.where(np.isin(np.arange(len(x)), np.argsort(-np.abs(x))[:k]), x, 0)


def adaptive(x, k):
    out = np.zeros(len(x))
    for sign, count in ((1, k - k // 2), (-1, k // 2)):
        at = np.argsort(-sign * x)[:count]
        at = at[sign * x[at] > 0]
        out[at] = x[at].mean(dtype=np.float64)
    return out


def by_exponent(x):
    bits = x.astype(jnp.bfloat16).astype(np.float32)
    byte = np.sign(x) * np.minimum(np.round(np.abs(x) * 4096), 127) / 4096
    size = np.abs(x)
    classes = [size < 2**-10, size < 2**-5, size < 1]
    return np.select(classes, [np.zeros_like(x), byte, bits], x)


ORACLES = {
    ScaledSign(96): lambda x: of_buckets(
        x, 96, lambda v: np.where(v >= 0, 1, -1) * np.abs(v).mean(dtype=np.float64)
    ),
    OneBit(100): lambda x: of_buckets(x, 100, one_bit),
    DynamicTree8(64): lambda x: of_buckets(x, 64, tree_by_search),
    ThreeLC(64, 1.25): lambda x: of_buckets(
        x, 64, lambda v: 1.25 * np.abs(v).max() * np.round(v / (1.25 * np.abs(v).max()))
    ),
    TopK(0.02): lambda x: largest(x, math.ceil(0.02 * len(x))),
    TopK(33): lambda x: largest(x, 33),
    BlockTopK(3, 50): lambda x: of_buckets(x, 50, lambda v: largest(v, 3)),
    Threshold(2.0, 1.0): lambda x: np.where(np.abs(x) > 2, x, 0),
    Threshold(2.0, 20): lambda x: largest(np.where(np.abs(x) > 2, x, 0), 20),
    Threshold(1e9, 20): np.zeros_like,
    AdaptiveThreshold(41): lambda x: adaptive(x, 41),
    INCEPTIONN((1, 1, 1)): by_exponent,
    SignSGD(): lambda x: np.where(x >= 0, 1, -1),
}


@pytest.mark.parametrize("c", ORACLES, ids=str)
def test_what_comes_back_is_what_numpy_says(c):
    x = normal(1717)
    np.testing.assert_allclose(back(c, x), ORACLES[c](x), rtol=2e-6, atol=1e-7)


def test_the_magnitudes_of_the_dynamic_tree():
    """128, ascending; the fraction has 6 bits in the highest power of ten, 0 in the seventh."""
    table = tree()
    assert table.shape == (128,)
    assert table[0] == 0
    assert table[-1] == 1
    assert (np.diff(table) > 0).all()
    for zeros in range(7):
        inside = (table > 10.0 ** -(zeros + 1)) & (table <= 10.0**-zeros)
        assert inside.sum() == 2 ** (6 - zeros)


def test_fitted_levels_err_less_than_even_ones_on_values_with_tails():
    x = normal(1 << 14, spread=0.5)
    even = np.square(back(Quantize(3), x) - x).sum()
    assert np.square(back(NonUniform(3, "fitted"), x) - x).sum() < 0.6 * even


def test_a_sampled_threshold_keeps_about_the_largest():
    x = normal(1 << 17, spread=0.3)
    kept = back(DGC(0.01), x)
    exact = largest(x, math.ceil(0.01 * len(x)))
    assert np.isin(kept, [0, *x]).all()
    assert np.count_nonzero(kept) > 0.7 * np.count_nonzero(exact)
    assert np.square(kept).sum() > 0.75 * np.square(exact).sum()


def test_a_sampled_threshold_lets_nobody_wait_for_ever():
    """If all values are equal, all are candidates; the key decides which are sent."""
    x = np.ones(5000, np.float32)
    seen = sum(back(DGC(0.02), x, jax.random.key(i)) for i in range(400))
    assert (seen > 0).mean() > 0.99


def test_a_sampled_threshold_sends_no_zeros():
    x = np.where(np.arange(100_000) % 199 == 0, normal(100_000), 0).astype(np.float32)
    np.testing.assert_array_equal(back(DGC(0.01), x), x)


@pytest.mark.parametrize("x", [[1, -np.inf, 2], [-1, -2, -0.5], [3]])
def test_a_share_of_one_value_has_room_for_either_sign(x):
    x = np.float32(x)
    kept = [np.argmax(x)] * bool((x > 0).any()) + [np.argmin(x)] * bool((x < 0).any())
    want = np.where(np.isin(np.arange(len(x)), kept), x, 0)
    np.testing.assert_array_equal(back(AdaptiveThreshold(0.01), x), want)


@pytest.mark.parametrize("tied", [0, 1])
def test_a_value_that_fills_many_bins_has_one_of_its_own(tied):
    x = np.full(2048, tied, np.float32)
    x[100:110], x[200:210] = tied + 1000, tied - 1
    np.testing.assert_allclose(back(SketchML(), x), x, rtol=1e-4)


def test_the_mean_of_a_bin_of_millions_of_values_is_exact():
    x = np.repeat(np.float32([1.1, 1.9]), 1 << 21)
    np.testing.assert_allclose(back(SketchML(2), x), x, rtol=1e-4)


@pytest.mark.parametrize("c", [ScaledSign(), OneBit()], ids=str)
@pytest.mark.parametrize("n", [1, 5, 33, 1025])
def test_the_padding_of_chunks_does_not_count(c, n):
    total = over(4, reduction(c), np.ones((4, n), np.float32))[0]
    np.testing.assert_allclose(total, np.full(n, 4), rtol=1e-6)
    x = normal(n)
    longer = np.append(x, np.repeat(c.filler(x), 7))
    np.testing.assert_allclose(back(c, longer)[:n], back(c, x), rtol=1e-6)


@pytest.mark.parametrize("c", [ScaledSign(), OneBit()], ids=str)
def test_a_last_chunk_that_is_shorter_loses_no_more_than_others(c):
    x = np.zeros((4, 25), np.float32)
    x[:, -1] = 1  # among the four values of the last chunk
    mean = over(4, reduction(c, cgx_jax.pmean_compressed), x)[0]
    np.testing.assert_allclose(mean[-4:], 0.25, rtol=1e-6)


def test_zeros_that_repeat_in_step_with_the_sample_have_a_bin_of_their_own():
    x = np.where(np.arange(1 << 16) % 8, 0, normal(1 << 16))
    assert not back(SketchML(), x)[x == 0].any()


@pytest.mark.parametrize("c", [TernGrad(), SharedTernGrad()], ids=str)
def test_what_has_no_spread_is_not_clipped(c):
    for x in (np.float32(-3), np.full(300, 2.5, np.float32)):
        np.testing.assert_allclose(back(c, x), x, rtol=1e-5)


def test_bins_hold_their_means():
    x = normal(5000, spread=0.3)
    y = back(SketchML(16), x)
    for value in np.unique(y):
        assert value == pytest.approx(x[y == value].mean(dtype=np.float64), rel=1e-4, abs=1e-5)
    assert len(np.unique(y)) == 16
    assert np.bincount(np.unique(y, return_inverse=True)[1]).max() < 1.2 * len(x) / 16


def test_the_largest_take_the_room_and_what_is_left_of_them_takes_the_next_class():
    x = np.float32([0.01, 2, 3, 4, 0.5, 0.25, 0.02, 0.015, 1e-5])
    y = back(INCEPTIONN((0.2, 0.2, 0.2)), x)  # two of each
    exact = [0, 2, 3, 4, 0.5, 0, 0, 0, 0]  # 3 and 4 in 32 bits, 2 and 0.5 in 16
    eighth = np.float32([0.01, 0, 0, 0, 0, 0, 0.02, 0, 0])
    np.testing.assert_allclose(y, exact + eighth, atol=2.0**-13)
    none = back(INCEPTIONN((0, 0.5, 0)), np.float32([4, 0.5, 0.25, 0.02]))
    np.testing.assert_array_equal(none, [4, 0.5, 0, 0])


# --- bias and variance

UNBIASED = {
    QSGD(7, 64): None,
    QSGD(2, 32, norm="max"): None,
    QSGD(127, 512): None,
    TernGrad(64, clip=None): (64**0.5 - 1) / 2,
    SharedTernGrad(64, clip=None): (64**0.5 - 1) / 2,
    Natural(): 1 / 8,
    NonUniform(4, "exponential", 64): 1 / 8 + 64 * 2.0**-12 / 4,
    RandomK(0.25, scaled=True): 3,
    QSparse(1.0, values=QSGD(3, 32)): QSGD(3, 32).variance,
    QSparse(1.0): QSGD(7).variance,
}


@pytest.mark.parametrize("c", UNBIASED, ids=str)
@pytest.mark.quick("QSGD(levels=7, *", "TernGrad*", "NonUniform*", "RandomK*")
def test_unbiased_within_the_stated_variance(c):
    """The mean of 3,000 draws is within 6 standard errors; the variance is at most ω |x|²."""
    x, draws = normal(192, spread=0.5), 3000
    one = functools.partial(c.approximate, jnp.asarray(x))
    every = np.asarray(jax.jit(jax.vmap(lambda k: one(key=k)))(jax.random.split(KEY, draws)))
    errors = every.astype(np.float64) - x
    spread = errors.std(axis=0) / math.sqrt(draws)
    assert (np.abs(errors.mean(axis=0)) <= 6 * spread + 1e-6 * np.abs(x)).all()
    omega = UNBIASED[c] if UNBIASED[c] is not None else c.variance
    variance = np.square(errors).sum(axis=1).mean()
    assert variance <= omega * np.square(x).sum() * (1 + 6 / math.sqrt(draws))
    if c.feedback_scale is not None:
        assert c.feedback_scale <= 1 / (1 + omega) + 1e-9


def test_a_stochastic_cast_is_one_of_the_two_nearest_numbers_and_unbiased():
    c, draws = Cast("bfloat16", rounding="stochastic"), 3000
    x = np.float32(normal(192, spread=0.5))
    one = functools.partial(c.approximate, jnp.asarray(x))
    every = np.asarray(jax.jit(jax.vmap(lambda k: one(key=k)))(jax.random.split(KEY, draws)))
    low = (x.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)  # towards 0
    high = ((x.view(np.uint32) | np.uint32(0xFFFF)) + np.uint32(1)).view(np.float32)
    assert ((every == low) | (every == high)).all()
    assert ((every == low).any(0) & (every == high).any(0)).mean() > 0.95
    errors = every.astype(np.float64) - x
    assert (np.abs(errors.mean(0)) <= 6 * np.abs(high - low) / (2 * math.sqrt(draws))).all()


def test_a_stochastic_cast_leaves_numbers_of_its_type_as_they_are():
    c = Cast("bfloat16", rounding="stochastic")
    every = np.arange(1 << 16, dtype=np.uint16).view(jnp.bfloat16)
    for dtype in (np.float32, jnp.bfloat16):
        x = every.astype(dtype)
        back = np.asarray(jax.jit(c.approximate)(x, key=KEY))
        numbers = ~np.isnan(every)
        assert back[numbers].tobytes() == x[numbers].tobytes()
        assert np.isnan(back[~numbers]).all()
    nans = np.uint32([0x7F800001, 0x7FFFFFFF, 0xFFFFFFFF]).view(np.float32)
    assert np.isnan(jax.jit(c.approximate)(nans, key=KEY)).all()


# --- contraction: |x - back|² <= (1 - δ) |x|², so that feedback can make up for the error

CONTRACTIONS = {
    ScaledSign(64): lambda x: of_buckets(
        x, 64, lambda v: np.full(len(v), np.square(np.abs(v).mean()))
    ).sum(),
    OneBit(64): lambda x: 0,
    ThreeLC(64): lambda x: 0,
    ThreeLC(64, 1.9): lambda x: 0,
    DynamicTree8(64): lambda x: 0.99 * np.square(x).sum(),
    NonUniform(3, "fitted", 64): lambda x: 0,
    TopK(0.1): lambda x: 0.1 * np.square(x).sum(),
    BlockTopK(4, 32): lambda x: np.square(x).sum() / 8,
    Threshold(0.5, 0.2): lambda x: 0,
    DGC(0.1): lambda x: 0,
    AdaptiveThreshold(0.1): lambda x: 0,
    SketchML(8): lambda x: 0,
    INCEPTIONN(): lambda x: 0,
    RandomK(0.1): lambda x: 0,
}
KINDS = {
    "normal": lambda rng, n: rng.standard_normal(n),
    "heavy tails": lambda rng, n: rng.standard_cauchy(n),
    "one large": lambda rng, n: np.eye(n)[7] * 1e4 + rng.standard_normal(n) * 1e-3,
    "positive": lambda rng, n: rng.exponential(size=n) + 5,
    "mostly zero": lambda rng, n: rng.standard_normal(n) * (rng.random(n) < 0.02),
}


@pytest.mark.parametrize("c", CONTRACTIONS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.quick(
    "normal-ScaledSign*",
    "heavy tails-OneBit*",
    "one large-NonUniform*",
    "positive-DGC*",
    "mostly zero-SketchML*",
    "normal-INCEPTIONN*",
    "heavy tails-BlockTopK*",
)
def test_no_more_is_lost_than_was_given(c, kind):
    assert c.feedback_scale == 1
    for seed in range(3):
        x = KINDS[kind](np.random.default_rng(seed), 2048).astype(np.float32)
        lost = np.square(back(c, x, jax.random.key(seed)).astype(np.float64) - x).sum()
        kept = CONTRACTIONS[c](x.astype(np.float64))
        assert lost <= (np.square(x.astype(np.float64)).sum() - kept) * (1 + 1e-5)


# --- leaves at the edge

PAYLOADS = {n: case.compressor for n, case in CASES.items() if "toy" not in n}
EDGES = {
    "empty": np.zeros((0, 3), np.float32),
    "scalar": np.float32(0.75),
    "zeros": np.zeros(700, np.float32),
    "equal": np.full(700, -0.25, np.float32),
    "subnormal": np.full(700, 1e-40, np.float32),
    "small": np.where(np.arange(700) < 300, 1e-36, 1.187e-38).astype(np.float32),
    "huge": np.where(np.arange(700) % 2, 1e37, -1e36).astype(np.float32),
}


def fits(c, shape):
    size = math.prod(shape)
    keep = getattr(c, "keep", 0)
    return not (isinstance(keep, int) and not isinstance(c, BlockTopK) and keep > size > 0)


@pytest.mark.parametrize("code", [TopK, DGC, RandomK])
def test_all_values_are_another_number_than_one(code):
    """Or the compiled program of one code would serve the other."""
    assert code(1.0) != code(1)
    assert [code(keep).payload_bytes(50) for keep in (1.0, 50)] == [code(50).payload_bytes(50)] * 2


@pytest.mark.parametrize("edge", EDGES)
@pytest.mark.parametrize("name", every(PAYLOADS))
def test_leaves_at_the_edge_stay_within_the_bound(name, edge):
    c, x = PAYLOADS[name], EDGES[edge]
    if not fits(c, x.shape):
        with pytest.raises(ValueError, match=r"TopK: keep=5 is more than the 1 values of the leaf"):
            back(c, x)
        return
    y = back(c, x)
    assert y.shape == x.shape
    bound = np.asarray(jax.jit(c.error_bound)(x), np.float64)
    finite = np.isfinite(bound)
    assert (np.abs(y.astype(np.float64) - x)[finite] <= bound[finite]).all()
    if edge == "zeros" and not isinstance(c, SignSGD):
        assert not y.any()


@pytest.mark.parametrize("name", PAYLOADS)
def test_integer_options_may_be_arrays_of_one_integer(name):
    c = PAYLOADS[name]
    whole = {f.name: getattr(c, f.name) for f in dataclasses.fields(c)}
    arrays = {n: np.asarray(x) for n, x in whole.items() if type(x) is int}
    again = dataclasses.replace(c, **arrays)
    assert (hash(again), again, repr(again)) == (hash(c), c, repr(c))


# For maxima of 4,096 values and more, XLA's CPU compiler calls a library that drops NaN.
@pytest.mark.parametrize("size", [700, 20_000])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", every(PAYLOADS))
def test_what_is_not_finite_does_not_come_back_finite(name, value, size):
    """A bare sign cannot represent it."""
    c, x = PAYLOADS[name], normal(size)
    x[123] = value
    y = back(c, x)
    bound = np.asarray(jax.jit(c.error_bound)(x))
    if isinstance(c, compressors.Identity):
        np.testing.assert_array_equal(y, x)
        return
    assert not bound[123] < np.inf
    if isinstance(c, SignSGD):
        assert not c.carries_nonfinite
        return
    assert not np.isfinite(y[123])
    assert not (bound < np.inf)[~np.isfinite(y)].any()


SMALL_BUCKETS = [
    DynamicTree8(8),
    NonUniform(3, bucket_size=8),
    NonUniform(3, "fitted", bucket_size=8),
    OneBit(8),
    QSGD(7, bucket_size=8),
    QSGD(7, norm="max", bucket_size=8),
    ScaledSign(8),
    TernGrad(8, clip=None),
    ThreeLC(8),
]


@pytest.mark.parametrize("c", SMALL_BUCKETS, ids=str)
@pytest.mark.quick("DynamicTree8*", "OneBit*", "QSGD(*l2*", "ThreeLC*")
def test_nan_in_any_place_of_a_bucket_comes_back_as_nan(c):
    """XLA's maximum of a few values drops NaN in some places."""
    for i in range(8):
        x = normal(19, seed=i)
        x[i] = np.nan
        assert np.isnan(back(c, x)[i]), i


# --- arguments

BAD = {
    "a bucket of none": (lambda: ScaledSign(0), ValueError, r"ScaledSign: bucket_size=0 .*least 1"),
    "no whole bucket": (lambda: OneBit(2.5), TypeError, r"OneBit: bucket_size=2\.5 is not an int"),
    "no levels": (lambda: QSGD(0), ValueError, r"QSGD: levels=0 must be in 1\.\.32767"),
    "a norm": (lambda: QSGD(norm="l1"), ValueError, r"QSGD: norm='l1' is unknown.*l2.*max"),
    "a clip": (lambda: TernGrad(clip=0), ValueError, r"TernGrad: clip=0 must be positive"),
    "a shared clip": (lambda: SharedTernGrad(clip=-1), ValueError, r"SharedTernGrad: clip=-1 must"),
    "sparsity": (lambda: ThreeLC(sparsity=2.0), ValueError, r"sparsity=2\.0 must be in \[1, 2\)"),
    "1 bit": (lambda: NonUniform(1), ValueError, r"NonUniform: bits=1 must be in 2\.\.8"),
    "levels": (lambda: NonUniform(4, "even"), ValueError, r"levels='even' is unknown.*fitted"),
    "keep nothing": (lambda: TopK(0), ValueError, r"TopK: keep=0 must be at least 1"),
    "keep no share": (lambda: DGC(0.0), ValueError, r"DGC: keep=0\.0 must be in \(0, 1\]"),
    "keep too large a share": (lambda: RandomK(1.5), ValueError, r"RandomK: keep=1\.5 must be"),
    "keep more than a bucket": (lambda: BlockTopK(9, 8), ValueError, r"keep=9 must be in 1\.\.8"),
    "values": (lambda: TopK(values=4), TypeError, r"TopK: values=4 must be a compressor"),
    "values of whole leaves": (lambda: TopK(values=TernGrad()), TypeError, r"any run of values"),
    "values summed": (lambda: TopK(values=RandomK()), TypeError, r"TopK: values=RandomK"),
    "biased values": (lambda: QSparse(values=Quantize(8)), ValueError, r"QSparse: .* is biased"),
    "a threshold": (lambda: Threshold(-1.0), ValueError, r"threshold=-1\.0 must be 0 or more"),
    "capacities": (lambda: INCEPTIONN((1, 2)), ValueError, r"INCEPTIONN: capacities=\(1, 2\)"),
    "no room for NaN": (lambda: INCEPTIONN((0, 0, 0.5)), ValueError, "first two must be above 0"),
    "bins": (lambda: SketchML(1), ValueError, r"SketchML: bins=1 must be in 2\.\.256"),
    "a narrow cast": (lambda: Cast("float16", rounding="stochastic"), ValueError,
                      "^Cast: .*to float16 is not supported, only to bfloat16"),
    "a correlated cast": (lambda: Cast("bfloat16", rounding="correlated"), ValueError,
                          "^Cast: .*rounding='correlated' is unknown"),
    "momentum of 1": (lambda: Signum(1.0), ValueError,
                      r"Signum: momentum=1\.0 must be in \[0, 1\)"),
    "values as they are": (lambda: QSparse(values=compressors.Identity()), ValueError,
                           r"QSparse: values=Identity\(\) is biased or exact"),
    "no key": (lambda: QSGD().encode(jnp.ones(3)), ValueError, r"QSGD\(.* needs key=jax\.random"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_wrong_arguments_are_refused(name):
    make, error, message = BAD[name]
    with pytest.raises(error, match=message):
        make()


def test_every_compressor_of_the_package_has_a_case():
    concrete = {
        c
        for c in vars(compressors).values()
        if isinstance(c, type)
        and issubclass(c, compressors.Compressor)
        and not getattr(c, "__abstractmethods__", None)
    }
    assert concrete == {type(case.compressor) for case in CASES.values()} & concrete


# --- in a sum


@pytest.mark.parametrize("world", [2, 3, 4, 7, 8])
@pytest.mark.parametrize("call", [cgx_jax.psum_compressed, cgx_jax.pmean_compressed])
@pytest.mark.quick("psum_compressed-4", "pmean_compressed-3")
def test_a_vote_is_the_sign_that_most_ranks_have(world, call):
    """Each rank has one vote, whatever its values; a tie is zero; the mean equals the sum."""
    rng = np.random.default_rng(world)
    x = (rng.standard_normal((world, 1003)) * 10.0 ** rng.uniform(-9, 9, (world, 1))).astype("f4")
    got = over(world, reduction(SignSGD(), call), x)
    want = np.sign(np.where(x >= 0, 1, -1).sum(axis=0))
    for row in got:
        np.testing.assert_array_equal(row, want)
    assert (want == 0).any() == (world % 2 == 0)


def test_signum_votes_by_its_running_means():
    world, steps = 3, 4
    mesh = ranks(world)
    tx = cgx_jax.sync_gradients("data", Signum(0.75), mesh=mesh, exchange="xla")
    grads = np.random.default_rng(0).standard_normal((steps, world, 40, 25)).astype(np.float32)
    state = tx.init(jnp.zeros((40, 25)))
    step = stepper(tx, mesh, state)
    means = np.zeros((world, 40, 25), np.float32)
    for g in grads:
        means = np.float32(0.75) * means + np.float32(0.25) * g
        got, state = step(g, state)
        np.testing.assert_array_equal(got, np.sign(np.where(means >= 0, 1, -1).sum(axis=0)))


def test_clipping_sees_the_whole_leaf_where_a_chunk_is_encoded():
    """Chunks have values of very different sizes, but the deviation is that of the whole leaf."""
    world = 4
    x = np.repeat(10.0 ** np.arange(4), 250)[None] * np.ones((world, 1))
    x = (x * np.random.default_rng(0).choice([-1, 1], (1, 1000))).astype(np.float32)
    got = over(world, reduction(TernGrad(1000), cgx_jax.pmean_compressed, key=KEY), x)[0]
    limit = 2.5 * x[0].std(dtype=np.float64)
    assert np.abs(x).max() < limit  # so nothing is clipped, although a chunk by itself would be
    assert np.abs(got).max() == pytest.approx(1000, rel=1e-5)


@pytest.mark.parametrize("world", [2, 3, pytest.param(8, marks=pytest.mark.slow)])
def test_codes_of_a_shared_scale_are_summed_in_words_as_narrow_as_the_world_allows(world):
    c, bits = SharedTernGrad(100, clip=None), {2: 3, 3: 3, 8: 5}[world]
    x = np.stack([normal(1003, seed=r, spread=0.5) for r in range(world)])
    call = reduction(c, key=KEY)
    got = over(world, call, x)
    scale = of_buckets(np.abs(x).max(0), 100, lambda v: np.full(len(v), v.max()))
    sums = got / scale
    np.testing.assert_allclose(sums, np.round(sums), atol=1e-5)
    assert (np.abs(np.round(sums)) <= world).all()
    hlo = on_ranks(call, ranks(world), out=P()).lower(x).as_text("hlo")
    sizes = dict(re.findall(r"= (f32|u32)\[(\d+)\]\S* all-reduce\(", hlo))
    assert sizes == {"f32": "11", "u32": str(-(-1003 // (32 // bits)))}
    assert hlo.count(" all-reduce(") == 2
    assert c.summed_bytes(x[0].shape, jnp.float32, world) == 4 * sum(map(int, sizes.values()))


def test_random_k_scales_sums_that_cancel_out_and_not_their_parts():
    x = np.full((8, 4000), 1.5e38, np.float32) * np.array([1, -1] * 4, np.float32)[:, None]

    assert not over(8, reduction(RandomK(0.25, scaled=True), key=KEY), x).any()
