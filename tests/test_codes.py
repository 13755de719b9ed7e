"""Native codes of one array write the same bytes as their jnp functions."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cgx_jax.compressors import natural, packing, qsgd, sparse, terngrad
from cgx_jax.kernels import codes, native

pytestmark = pytest.mark.usefixtures("same_isa_afterwards")
pytest.importorskip("cgx_jax._native", reason="the native module is not built")
module = native.module()

SIZES = [1, 7, 64, 65, 513, 5000]
LARGE = 300_000  # so many values that a sample finds the bound, and threads share the work
EDGES = np.array([0, -0.0, 1e-40, -1e-40, np.inf, -np.inf, np.nan, -np.nan, 3e38, -3e38], "f4")


def on_every_isa(f, *operands):
    """Yields every instruction set of this machine, and what it gives."""
    for isa in module.isas():
        module.set_isa(isa)
        yield isa, f(*operands)


def normal(n, seed=0):
    return np.random.default_rng(seed).standard_normal(n).astype(np.float32)


def edges(n):
    return np.resize(np.concatenate([EDGES, normal(13)]), n)


def equal(n):
    return np.where(np.arange(n) % 3 == 0, -1, 1).astype(np.float32)


def sparse_values(n):
    return np.where(np.arange(n) % 200 == 0, normal(n), 0)


ARRAYS = {f.__name__: f for f in (normal, edges, equal, sparse_values)}


@functools.cache
def both(target, plain, static):
    """Returns the native and the jnp function, compiled once for all arrays of a size."""
    static = dict(static)
    return (
        jax.jit(lambda *xs: codes.call(target, plain, *xs, **static)),
        jax.jit(functools.partial(plain, **static)),
    )


def check(target, plain, *operands, **static):
    ours, theirs = both(target, plain, tuple(static.items()))
    want = [np.asarray(z) for z in theirs(*operands)]
    for isa, got in on_every_isa(ours, *operands):
        for y, z in zip(got, want, strict=True):
            assert (y.shape, y.dtype) == (z.shape, z.dtype)
            np.testing.assert_array_equal(np.asarray(y).view(np.uint8), z.view(np.uint8), isa)
    assert target in ours.lower(*operands).as_text(), "the call is native"


@pytest.mark.parametrize("kind", ARRAYS)
@pytest.mark.parametrize("n", SIZES)
def test_signs_are_those_of_jnp(n, kind):
    check("cgx_pack_signs", packing.pack_signs_jnp, ARRAYS[kind](n))
    payload = np.random.default_rng(0).integers(0, 256, -(-n // 8), np.uint8)
    check("cgx_unpack_signs", packing.unpack_signs_jnp, payload, count=n)


def test_signs_of_many_values_are_those_of_jnp():
    n = 9_000_011  # results go past the caches
    x = normal(n)
    check("cgx_pack_signs", packing.pack_signs_jnp, x)
    check("cgx_unpack_signs", packing.unpack_signs_jnp, np.packbits(x > 0), count=n)


@pytest.mark.parametrize("kind", ARRAYS)
@pytest.mark.parametrize("n", [*SIZES, LARGE])
def test_the_largest_are_those_of_jnp(n, kind):
    for count in sorted({1, -(-n // 100), -(-n // 3), n}):
        check("cgx_largest", sparse.largest_jnp, ARRAYS[kind](n), count=count)


@pytest.mark.parametrize("place", [0, LARGE // 2, LARGE - 1])
def test_a_run_of_large_values_is_found_though_a_sample_misleads(place):
    # All of the largest are neighbors, so that the sample finds too many of them, or too few.
    x = normal(LARGE)
    begin = min(place, LARGE - 3000)
    x[begin : begin + 3000] += 10
    check("cgx_largest", sparse.largest_jnp, x, count=3000)
    stepped = normal(LARGE)
    stepped[:: LARGE // 2**14] *= 100  # what the sample sees
    check("cgx_largest", sparse.largest_jnp, stepped, count=30_000)


@pytest.mark.parametrize("kind", ARRAYS)
@pytest.mark.parametrize("n", [*SIZES, LARGE])
def test_what_is_above_a_sampled_threshold_is_that_of_jnp(n, kind):
    for count, stride in ((-(-n // 100), 1), (-(-n // 10), max(1, min(7, n)))):
        rank = max(1, count // stride)
        for turns in ((0, 0), (n // 3, n - 1), (n - 1, n // 2)):
            static = {"count": count, "stride": stride, "rank": rank}
            x, turns = ARRAYS[kind](n), np.int32(turns)
            check("cgx_above_sampled", sparse.above_sampled_jnp, x, turns, **static)


KEY = np.uint32([0x12345678, 0x9ABCDEF0])
SCALES = np.float32([1e38, 1e20, 1e-30, 1e-36, 1e-40])


def scaled(n):
    with np.errstate(over="ignore", under="ignore"):
        return normal(n) * np.resize(np.repeat(SCALES, 600), n)


def smallest(n):
    """Returns values whose scale is so small that its inverse times the levels overflows."""
    return np.copysign(np.float32(2.0**-126), normal(n)) * np.float32(1.25)


LEVELS = {
    "natural": ("cgx_natural", natural.encode_jnp, {}),
    "ternary": ("cgx_ternary", terngrad.encode_jnp, {"bucket_size": 512}),
    "ternary, 7": ("cgx_ternary", terngrad.encode_jnp, {"bucket_size": 7}),
    "ternary, 5000": ("cgx_ternary", terngrad.encode_jnp, {"bucket_size": 5000}),
    "qsgd": ("cgx_qsgd", qsgd.encode_jnp, {"bucket_size": 512, "levels": 7, "l2": 1}),
    "qsgd, 3 bits": ("cgx_qsgd", qsgd.encode_jnp, {"bucket_size": 50, "levels": 3, "l2": 1}),
    "qsgd, 8 bits": ("cgx_qsgd", qsgd.encode_jnp, {"bucket_size": 4096, "levels": 127, "l2": 1}),
    "qsgd, of the largest": ("cgx_qsgd", qsgd.encode_jnp, {"bucket_size": 3, "levels": 1, "l2": 0}),
}


@pytest.mark.parametrize("name", LEVELS)
@pytest.mark.parametrize("n", [1, 65, 5000, LARGE])
def test_levels_are_those_of_jnp(n, name):
    target, plain, static = LEVELS[name]
    for kind in (*ARRAYS.values(), scaled, smallest):
        check(target, plain, KEY, kind(n), **static)


@pytest.mark.parametrize(("keep", "bucket_size"), [(5, 512), (1, 7), (7, 7), (40, 100), (3, 4096)])
@pytest.mark.parametrize("n", [1, 65, 5000, LARGE])
def test_the_largest_of_every_bucket_are_those_of_jnp(n, keep, bucket_size):
    static = {"keep": keep, "bucket_size": bucket_size}
    for kind in (*ARRAYS.values(), scaled):
        check("cgx_largest_of_buckets", sparse.largest_of_buckets_jnp, kind(n), **static)


def test_a_batch_is_as_many_calls():
    x = np.stack([normal(1000, seed) for seed in range(6)])
    call = lambda v: codes.call("cgx_largest", sparse.largest_jnp, v, count=10)  # noqa: E731
    once, mapped = jax.jit(call), jax.jit(jax.vmap(jax.vmap(call)))
    for isa, results in on_every_isa(mapped, x.reshape(2, 3, 1000)):
        for i in range(6):
            for got, want in zip(results, once(x[i]), strict=True):
                np.testing.assert_array_equal(got.reshape(6, 10)[i], want, isa)
    assert [y.shape for y in jax.vmap(call)(x[:0])] == [(0, 10), (0, 10)]
    shared = jax.vmap(lambda p: packing.unpack_signs(p, 9), in_axes=1, out_axes=1)
    payload = np.arange(6, dtype=np.uint8).reshape(2, 3)
    want = [packing.unpack_signs(jnp.asarray(p), 9) for p in payload.T]
    for isa, got in on_every_isa(jax.jit(shared), payload):
        np.testing.assert_array_equal(got, np.stack(want, 1), isa)


# Calls on CUDA: whether there is a kernel, the handler, the jnp function, operands, attributes.
ON_CUDA = [
    (False, "cgx_pack_signs", packing.pack_signs_jnp, [normal(64)], {}),
    (False, "cgx_unpack_signs", packing.unpack_signs_jnp, [np.zeros(8, np.uint8)], {"count": 64}),
    (False, "cgx_natural", natural.encode_jnp, [KEY, normal(64)], {}),
    (False, "cgx_ternary", terngrad.encode_jnp, [KEY, normal(64)], {"bucket_size": 512}),
    (True, "cgx_qsgd", qsgd.encode_jnp, [KEY, normal(64)], LEVELS["qsgd"][2]),
    (False, "cgx_qsgd", qsgd.encode_jnp, [KEY, normal(64)], LEVELS["qsgd, of the largest"][2]),
    (False, "cgx_qsgd", qsgd.encode_jnp, [KEY, normal(64)],
     {"bucket_size": 4097, "levels": 7, "l2": 0}),
    (True, "cgx_largest_of_buckets", sparse.largest_of_buckets_jnp, [normal(64)],
     {"keep": 5, "bucket_size": 32}),
    (True, "cgx_largest", sparse.largest_jnp, [normal(64)], {"count": 5}),
    (True, "cgx_above_sampled", sparse.above_sampled_jnp, [normal(64), np.int32([0, 1])],
     {"count": 5, "stride": 2, "rank": 3}),
]  # fmt: skip


@pytest.mark.skipif(
    native.cuda_module() is None, reason="no CUDA module: run by `make builds`, with nvcc"
)
@pytest.mark.parametrize("case", ON_CUDA, ids=lambda c: f"{c[1]}-{c[4]}")
def test_cuda_calls_what_has_a_kernel(case):
    has_kernel, target, plain, operands, static = case
    traced = jax.jit(lambda *xs: codes.call(target, plain, *xs, **static)).trace(*operands)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert (f"@{target}" in text) == has_kernel


# Wrong calls: the error message, the handler without cgx_, operands, results, attributes.
ONE, TWO = [("f4", 5)], [("u4", 2), ("f4", 5)]
THREE = [("i4", 3), ("f4", 3)]
WRONG = [
    ("size of payload is 3, expected 1", "pack_signs", ONE, [("u1", 3)], {}),
    ("size of payload is 3, expected 1", "unpack_signs", [("u1", 3)], ONE, {"count": 5}),
    ("size of result is 5, expected 6", "unpack_signs", [("u1", 1)], ONE, {"count": 6}),
    ("count is 6, must be in [1, 5]", "largest", ONE, [("i4", 6), ("f4", 6)], {"count": 6}),
    ("size of taken is 2, expected 3", "largest", ONE, [("i4", 3), ("f4", 2)], {"count": 3}),
    ("stride is 0, must be in [1, 5]", "above_sampled", [*ONE, ("i4", 2)], THREE,
     {"count": 3, "stride": 0, "rank": 1}),
    ("rank is 4, must be in [1, 3]", "above_sampled", [*ONE, ("i4", 2)], THREE,
     {"count": 3, "stride": 2, "rank": 4}),
    ("size of turns is 3, expected 2", "above_sampled", [*ONE, ("i4", 3)], THREE,
     {"count": 3, "stride": 2, "rank": 3}),
    ("keep is 4, must be in [1, 3]", "largest_of_buckets", ONE, THREE,
     {"keep": 4, "bucket_size": 3}),
    ("bucket_size is 4097, must be in [1, 4096]", "largest_of_buckets", ONE, THREE,
     {"keep": 3, "bucket_size": 4097}),
    ("size of places is 3, expected 4", "largest_of_buckets", ONE, THREE,
     {"keep": 2, "bucket_size": 3}),
    ("levels is 128, must be in [1, 127]", "qsgd", TWO, [("u1", 9)],
     {"bucket_size": 5, "levels": 128, "l2": 0}),
    ("bucket_size is 4097, must be in [1, 4096]", "qsgd", TWO, [("u1", 9)],
     {"bucket_size": 4097, "levels": 7, "l2": 1}),
    ("size of payload is 9, expected 5", "ternary", TWO, [("u1", 9)], {"bucket_size": 5}),
    ("size of words is 3, expected 2", "natural", [("u4", 3), *ONE], [("u1", 5)], {}),
]  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG, ids=lambda w: f"{w[1]}-{w[0]}")
def test_a_wrong_call_names_the_value_and_the_limit(wrong):
    says, name, operands, results, static = wrong
    shapes = [jax.ShapeDtypeStruct((1, n), np.dtype(t)) for t, n in results]
    call = jax.ffi.ffi_call(f"cgx_{name}", shapes)
    zeros = [np.zeros((1, n), np.dtype(t)) for t, n in operands]
    with pytest.raises(jax.errors.JaxRuntimeError) as error:
        jax.block_until_ready(call(*zeros, **{k: np.int64(v) for k, v in static.items()}))
    assert f"cgx_{name}: {says}" in str(error.value)


def test_a_turn_outside_of_the_array_is_refused():
    shapes = [jax.ShapeDtypeStruct((1, 3), t) for t in (np.int32, np.float32)]
    static = {"count": np.int64(3), "stride": np.int64(2), "rank": np.int64(1)}
    call = jax.ffi.ffi_call("cgx_above_sampled", shapes)
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"turn is 10, must be in \[0, 10\)"):
        jax.block_until_ready(call(np.zeros((1, 10), "f4"), np.int32([[0, 10]]), **static))
