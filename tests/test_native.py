"""The native kernels write the bytes of wire format 2, as the NumPy oracle does."""

import dataclasses
import functools
import json
import pathlib

import jax
import ml_dtypes
import numpy as np
import pytest

import oracle
from cgx_jax.kernels import native
from cgx_jax.kernels.wire import mask_segment
from oracle import Leaf

pytestmark = pytest.mark.usefixtures("same_isa_afterwards")
pytest.importorskip("cgx_jax._native", reason="the native module is not built")
module = native.module()

DTYPES = {"f32": np.float32, "bf16": ml_dtypes.bfloat16, "f16": np.float16}
KEY = (0x12345678, 0x9ABCDEF0)


@pytest.fixture(params=module.isas())
def isa(request):
    """Runs a test on every instruction set of this machine."""
    module.set_isa(request.param)


every_isa = pytest.mark.usefixtures("isa")


# --- calling the handlers -----------------------------------------------------------------------


SLOT = (
    *("bits", "bucket_size", "rounding", "number", "rotation", "segment"),
    *("num_columns", "rows", "columns"),
)


def ints(*values):
    return np.array(values, np.int64)


def attributes(leaves, world, units=(), **more):
    """Returns a call's attributes; `slots` has the numbers that SLOT names, for each leaf."""
    _, places = factors_and_places(units or [None] * len(leaves))
    rows = [
        (f.bits, f.bucket_size, f.rounding, f.number, f.rotation, f.segment, *place)
        for f, place in zip(leaves, places, strict=True)
    ]
    return {"slots": ints(*np.ravel(rows)), "world": np.int64(world)} | more


@functools.cache
def compiled(name, results, attrs, aliases):
    """Returns a compiled call, which serves every instruction set."""
    shapes = [jax.ShapeDtypeStruct(s, t) for s, t in results]
    kwargs = {k: np.array(v, np.int64) if isinstance(v, tuple) else v for k, v in attrs}
    ffi_call = jax.ffi.ffi_call(name, shapes, input_output_aliases=dict(aliases))
    return jax.jit(lambda *a: ffi_call(*a, **kwargs))


def call(name, results, args, attrs, aliases=()):
    frozen = tuple((k, tuple(v.tolist()) if np.ndim(v) else v) for k, v in attrs.items())
    shapes = tuple((tuple(s), np.dtype(t)) for s, t in results)
    out = compiled(name, shapes, frozen, tuple(aliases))(*args)
    return [np.asarray(o) for o in out]


def batched(arrays):
    return [a[None] for a in arrays]


def factors_and_places(units):
    """Returns the operand with all units, if there are any, and each leaf's place in it."""
    parts, places, end = [], [], 0
    for k, unit in enumerate(units):
        starts = [0, 0]
        for i in (0, 1) if k % 2 else (1, 0):  # in any order
            if unit is not None:
                starts[i] = end
                parts.append(unit[i])
                end += unit[i].shape[1]
        places.append((0, 0, 0) if unit is None else (unit[1].shape[1], *starts))
    return [np.concatenate(parts, axis=1)[None]] if parts else [], places


def factors(units):
    return factors_and_places(units)[0]


def encode(values, leaves, world, rank=-1, key=KEY, residual=False, units=()):
    _, row = oracle.layout(leaves, world)
    results = [((1, world, row), np.uint8)]
    results += [((1, v.size), v.dtype) for v in values] if residual else []
    args = [np.array([key], np.uint32), np.array([rank], np.int32), *batched(values)]
    args += factors(units)
    payload, *rest = call("cgx_encode", results, args, attributes(leaves, world, units))
    return payload[0], [r[0] for r in rest]


def reduce(values, payload, leaves, rank, divisor=1.0, key=KEY, residuals=(), units=()):
    args = [np.array([key], np.uint32), np.array([rank], np.int32), payload[None]]
    args += batched(values) + batched(residuals) + factors(units)
    attrs = attributes(leaves, len(payload), units, divisor=np.float32(divisor))
    results = [((1, payload.shape[1]), np.uint8), *(((1, r.size), r.dtype) for r in residuals)]
    aliases = [(3 + len(values) + i, 1 + i) for i in range(len(residuals))]
    chunk, *rest = call("cgx_reduce", results, args, attrs, aliases)
    return chunk[0], [r[0] for r in rest]


def decode(payload, leaves, dtypes, units=()):
    results = [((1, leaf.size), t) for leaf, t in zip(leaves, dtypes, strict=True)]
    args = [payload[None], *factors(units)]
    out = call("cgx_decode", results, args, attributes(leaves, len(payload), units))
    return [o[0] for o in out]


def accumulate(values, payload, leaves, rank=-1, divisor=1.0):
    results = [((1, v.size), v.dtype) for v in values]
    attrs = attributes(leaves, 1, divisor=np.float32(divisor))
    args = [np.array([rank], np.int32), payload[None], *batched(values)]
    return [o[0] for o in call("cgx_accumulate", results, args, attrs)]


def assert_same_bytes(got, want, what):
    """Asserts that both are equal to the last bit; says where and what differs first."""
    got, want = np.ascontiguousarray(got), np.ascontiguousarray(want)
    assert (got.shape, got.dtype) == (want.shape, want.dtype), what
    size = got.dtype.itemsize
    a, b = got.reshape(-1).view(np.uint8), want.reshape(-1).view(np.uint8)
    bad = np.flatnonzero((a != b).reshape(-1, size).any(1)) if a.size else ()
    if len(bad):
        i = int(bad[0])
        hexes = [x[i * size : (i + 1) * size].tobytes().hex() for x in (a, b)]
        values = f"{got.flat[i]!r} not {want.flat[i]!r}"
        pytest.fail(f"{what}: {len(bad)} of {got.size} differ, first at {i}: {hexes} ({values})")


def check_all_calls(values, leaves, world, rank, divisor, units=()):
    """Checks every handler, on every instruction set, on payloads of `world` different ranks."""
    dtypes = [v.dtype for v in values]
    want, lost = oracle.encode(values, leaves, world, rank, KEY, units)
    full, _ = oracle.encode(values, leaves, world, -1, KEY, units)
    whole = oracle.decode(full, leaves, dtypes, units)
    # Every other peer has other zeros. Some send what belongs to another chunk: any bytes decode.
    others = [np.roll(v, 13) for v in values]
    two = full, oracle.encode(others, leaves, world, -1, KEY, units)[0]
    own = max(rank, 0)
    sent = np.stack([two[p % 2][(own + (p % 4 == 2)) % world] for p in range(world)])
    reduced, filled = oracle.reduce(values, sent, leaves, own, divisor, KEY, lost, units)
    rows = [oracle.encode(v, leaves, 1, -1, KEY)[0] for v in (values, others)]
    peers = np.concatenate([rows[0], rows[0], rows[1]])
    sums = oracle.accumulate(values, peers, leaves, 1, divisor)

    def check_each(got, expected, what):
        for k, (a, b) in enumerate(zip(got, expected, strict=True)):
            assert_same_bytes(a, b, f"leaf {k} of {what}")

    for isa in module.isas():
        module.set_isa(isa)
        where = f"{isa}, world {world}, rank {rank}"
        payload, _ = encode(values, leaves, world, rank, units=units)
        assert_same_bytes(payload, want, f"encode, {where}")
        payload, got = encode(values, leaves, world, rank, residual=True, units=units)
        assert_same_bytes(payload, want, f"encode with residual, {where}")
        check_each(got, lost, f"residual, {where}")
        check_each(decode(full, leaves, dtypes, units), whole, f"decode, {where}")
        if world == 3 or rank < 0:  # without residuals too, over every width, dtype and rounding
            got, _ = reduce(values, sent, leaves, own, divisor, units=units)
            assert_same_bytes(got, reduced, f"reduce, {where}")
        got, kept = reduce(values, sent, leaves, own, divisor, residuals=lost, units=units)
        assert_same_bytes(got, reduced, f"reduce with residual, {where}")
        check_each(kept, filled, f"residual of reduce, {where}")
        check_each(accumulate(values, peers, leaves, 1, divisor), sums, f"accumulate, {where}")


# --- the table ----------------------------------------------------------------------------------

EDGES = (0, 1, 5, 31, 32, 33, 127, 128, 129, 511, 512, 513, 1000)


CODINGS = {
    "nearest": {"row": 50},
    "stochastic": {"rounding": 1},
    "rotated": {"rotation": True},
    "rotated correlated": {"rounding": 2, "rotation": True, "row": 50},
}
every_coding = pytest.mark.parametrize("coding", CODINGS.values(), ids=CODINGS)


def leaf_of(size, bits, bucket_size, rounding=0, number=0, rotation=False, row=0):
    """Returns a leaf with rows of `row` values (0: one row)."""
    segment = mask_segment(row or size, bucket_size)
    return Leaf(size, bits, bucket_size, rounding, number, rotation, segment)


def edges(bits, bucket_size=512, number=0, sizes=EDGES, **coding):
    """One leaf of every awkward size, with numbers from `number` on."""
    return [leaf_of(n, bits, bucket_size, number=number + s, **coding) for s, n in enumerate(sizes)]


def values_for(leaves, dtype, seed=0):
    """Normal values of many scales and signs; most leaves have zeros of some kind."""
    rng = np.random.default_rng(seed)
    scale = 10.0 ** rng.uniform(-6, 3, len(leaves))
    return [
        (with_zeros(rng.standard_normal(leaf.size), rng) * s).astype(np.float32).astype(dtype)
        for leaf, s in zip(leaves, scale, strict=True)
    ]


def with_zeros(x, rng):
    """Sets single values, rows of a few values, or long runs to 0 or -0; may drop a sign."""
    length = rng.choice([0, 1, 16, 20, 50, 512, 700])
    if length:
        rows = rng.random(-(-x.size // length)) < 0.5
        x = np.where(np.repeat(rows, length)[: x.size], rng.choice([0.0, -0.0], x.size), x)
    return rng.choice([lambda v: v, lambda v: v, np.abs, lambda v: -np.abs(v), lambda v: v + 9])(x)


@every_coding
@pytest.mark.parametrize("bits", range(1, 9))
# Other tests mix widths with these codings.
@pytest.mark.quick("*-nearest", "[1358]-rotated correlated", "[148]-stochastic", "4-rotated")
def test_every_width_dtype_coding_and_edge_size_is_the_oracle_s(bits, coding):
    leaves, values = [], []
    few = (1, 31, 33, 511, 1000)
    for number, (dtype, sizes) in enumerate({"f32": EDGES, "bf16": few, "f16": few}.items()):
        own = edges(bits, number=100 * number, sizes=sizes, **coding)
        leaves += own
        values += values_for(own, DTYPES[dtype], 10 * number + bits)
    check_all_calls(values, leaves, 3, 1, 3.0)


@pytest.mark.parametrize("bucket_size", [32, 96, 544, 1024, 4128, 1 << 20])
def test_every_bucket_size_is_the_oracle_s(bucket_size):
    leaves = edges(5, bucket_size, rounding=1) + edges(3, bucket_size, rotation=True, row=50)
    leaves += [leaf_of(9000, 2, bucket_size, number=99, rotation=True, row=45)]
    check_all_calls(values_for(leaves, np.float32), leaves, 2, 0, 2.0)


@pytest.mark.parametrize(("world", "rank"), [(1, 0), (3, -1), (8, 7), (64, 5)])
def test_every_world_size_cuts_the_same_records(world, rank):
    leaves = edges(4) + edges(4, rounding=2) + edges(4, rotation=True)
    check_all_calls(values_for(leaves, np.float32), leaves, world, rank, world)


def test_one_buffer_may_mix_dtypes_widths_and_buckets():
    rng = np.random.default_rng(1)
    leaves = [
        leaf_of(int(n), int(b), int(s) * 32, int(r), int(m), bool(t), 20)
        for n, b, s, r, m, t in rng.integers([0, 1, 1, 0, 0, 0], [700, 9, 9, 3, 2**31, 2], (30, 6))
    ]
    dtypes = [list(DTYPES.values())[i % 3] for i in range(30)]
    values = [values_for([leaf], dtypes[i], i)[0] for i, leaf in enumerate(leaves)]
    check_all_calls(values, leaves, 4, 2, 4.0)


def test_300_leaves_travel_in_one_call():
    leaves = [Leaf(37 * k % 900, 4, 128, number=k) for k in range(300)]
    check_all_calls(values_for(leaves, np.float32), leaves, 5, 4, 1.0)


@every_coding
@pytest.mark.quick("rotated correlated")
def test_work_split_over_threads_writes_the_same_bytes(coding):
    leaves = [
        leaf_of(2**18 + 3, 4, 512, number=7, **coding),
        leaf_of(150_000, 7, 96, number=8, **coding),
        leaf_of(2**18, 1, 1 << 18, number=9, **coding),
    ]
    check_all_calls(values_for(leaves, np.float32), leaves, 2, 1, 2.0)


@every_isa
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_leaf_too_large_for_the_caches_is_as_its_two_halves(dtype):
    half = 8200 * 512  # together more than kNontemporalValues
    x = np.random.default_rng(0).standard_normal(2 * half + 3, np.float32).astype(DTYPES[dtype])
    parts = [x[:half], x[half:]]

    def written(values):
        leaves = [Leaf(v.size) for v in values]
        payload, residuals = encode(values, leaves, 1, residual=True)
        decoded = decode(payload, leaves, [v.dtype for v in values])
        sums = accumulate(values, np.concatenate([payload] * 2), leaves, 0)
        return [payload] + [np.concatenate(r) for r in (residuals, decoded, sums)]

    for got, want in zip(written([x]), written(parts), strict=True):
        assert_same_bytes(got, want, "one leaf")


def units_for(leaves, columns_of, seed=0):
    """Returns units of every leaf except the first; `columns_of` maps a size to the columns."""
    rng = np.random.default_rng(seed)

    def pair(size, columns):
        rows = size // columns if columns else 3  # 3 rows of no columns
        return tuple(np.float32(10.0 ** rng.uniform(-4, 4, (2, n))) for n in (rows, columns))

    return [None, *(pair(leaf.size, columns_of(leaf.size)) for leaf in leaves[1:])]


def divisor_near(root):
    """Returns a function that maps a size to its largest divisor up to size**root, for columns."""
    return lambda size: max((d for d in range(1, int(size**root) + 1) if size % d == 0), default=0)


COLUMNS = {"one each": lambda n: n, "one column": lambda n: min(n, 1), "both": divisor_near(0.7)}


@pytest.mark.parametrize("columns", COLUMNS)
@every_coding
@pytest.mark.parametrize("dtype", DTYPES)
def test_units_multiply_every_value_on_its_way_in_and_out(dtype, coding, columns):
    for bits, world, rank in [(1, 1, -1), (4, 3, 1)]:
        leaves = [*edges(bits, **coding), leaf_of(96 * 43, bits, 544, number=40, **coding)]
        values = values_for(leaves, DTYPES[dtype], bits)
        check_all_calls(values, leaves, world, rank, world, units_for(leaves, COLUMNS[columns]))


def test_units_of_large_leaves_and_of_rows_shorter_than_a_vector():
    size = 5 * 3 * 2**14
    leaves = [Leaf(size), leaf_of(size, 4, 512, number=1, rotation=True, row=15)] * 2
    units = [None, *units_for(leaves, lambda n: 5)[1:2], *units_for(leaves, lambda n: n // 3)[1:3]]
    check_all_calls(values_for(leaves, np.float32), leaves, 2, 1, 2.0, units)


# --- values -------------------------------------------------------------------------------------

NAN, INF, MAX = float("nan"), float("inf"), 3.4028235e38
SPECIAL = {
    "all_equal": [3.1] * 40,
    "zeros": [0.0] * 40,
    "signed_zeros": [-0.0, 0.0] * 20,
    "negative_zero_lowest": [-0.0, 1.0, 2.0, 3.0] * 10,
    "negative_zero_highest": [-0.0, -1.0, -2.0, -3.0] * 10,
    "subnormals": [k * 2.0**-149 for k in range(40)],
    "unit_just_normal": [0.0, 255 * 2.0**-126, 2.0**-126] * 10,
    "unit_just_subnormal": [0.0, 2.0**-125, 2.0**-126] * 10,
    "widest_range": [-MAX / 2, MAX / 2, 0.0, 1.0] * 10,
    "sum_overflows_but_range_does_not": [MAX] * 20 + [MAX / 2] * 20,
    "range_overflows": [-MAX, MAX, 0.0, 1.0] * 10,
    "nan_first": [NAN] + [1.0] * 39,
    "nan_last": [1.0] * 39 + [NAN],
    "inf": [1.0] * 20 + [INF] + [2.0] * 19,
    "both_inf": [-INF, INF] * 20,
    "all_nan": [NAN] * 40,
    "ties": [k + 0.5 for k in range(39)] + [0.0],
}


@pytest.mark.parametrize("case", SPECIAL)
@pytest.mark.every_combination
def test_special_values_are_the_oracle_s_in_every_dtype(case):
    x = np.array(SPECIAL[case], np.float32)
    codings = [(1, 0, 0), (4, 1, 0), (8, 0, 0), (3, 0, 1), (5, 1, 1)]
    leaves = [
        Leaf(x.size, bits, 64, rounding, 10 * i + bits, bool(rotation))
        for i in range(len(DTYPES))
        for bits, rounding, rotation in codings
    ]
    with np.errstate(over="ignore"):
        values = [x.astype(dtype) for dtype in DTYPES.values() for _ in codings]
    check_all_calls(values, leaves, 2, 0, 2.0)


@every_isa
def test_every_half_converts_as_numpy_and_ml_dtypes_do():
    bits = np.arange(2**16, dtype=np.uint16)
    leaves = [Leaf(2**16, 8, 32), Leaf(2**16, 8, 32)]
    with np.errstate(invalid="ignore"):  # signalling NaNs
        values = [bits.view(t) for t in (np.float16, ml_dtypes.bfloat16)]
        values = [np.where(np.isfinite(v), v, np.zeros_like(v)) for v in values]
    zeros = np.zeros((1, oracle.layout(leaves, 1)[1]), np.uint8)
    for got, want in zip(accumulate(values, zeros, leaves), values, strict=True):
        assert_same_bytes(got, want + np.zeros_like(want), "widen, add zero, narrow")


@every_isa
def test_narrowing_rounds_to_nearest_even_at_every_tie():
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 2**32, 200_000, np.uint64), np.arange(0, 2**32, 2**12, np.uint64)
    lo = np.concatenate(bits).astype(np.uint32).view(np.float32)
    record = np.zeros((lo.size, 16), np.uint8)  # 32 values at 1 bit, all equal to lo
    record[:, :4] = lo[:, None].view(np.uint8)
    leaves = [Leaf(32 * lo.size, 1, 32)] * 2
    payload = np.concatenate([record[:, :12].reshape(-1)] * 2)[None]
    got = decode(payload, leaves, [np.float16, ml_dtypes.bfloat16])
    for y in got:
        # From numbers that no encoder writes, a decoder makes one NaN.
        with np.errstate(invalid="ignore"):  # signalling NaNs
            lo_and_zero = np.where(np.isfinite(lo), lo + np.float32(0), oracle.QUIET_NAN)
        want = oracle.narrow(lo_and_zero, y.dtype)
        assert_same_bytes(y[::32], want, f"narrow to {y.dtype}")


# --- golden vectors, layout, contracts ----------------------------------------------------------

GOLDEN = json.loads((pathlib.Path(__file__).parent / "golden.json").read_text())


@every_isa
@pytest.mark.parametrize("case", GOLDEN, ids=lambda c: c["name"].split(":")[0].replace(" ", "_"))
def test_golden_records(case):
    x = np.array(case["values"], np.float32)
    bucket = case.get("bucket", 0)
    size = 256 if bucket == 0 else 32
    given = (case.get(k, 0) for k in ("rounding", "number", "rotation", "segment"))
    leaf = Leaf(size * bucket + x.size, case["bits"], size, *given)
    before = np.zeros(size * bucket, np.float32)
    payload, _ = encode([np.concatenate([before, x])], [leaf], 1, key=case.get("key", KEY))
    want = np.frombuffer(bytes.fromhex("".join(case["record"])), np.uint8)
    at = bucket * oracle.record_bytes(size, leaf.bits)
    assert_same_bytes(payload[0, at:], want, case["name"])
    (y,) = decode(payload, [leaf], [np.float32])
    decoded = np.array(case.get("decoded", case["values"]), np.float32)
    assert_same_bytes(y[before.size :], decoded, "decode")


@pytest.mark.parametrize("world", [1, 2, 3, 4, 7, 8, 16, 100])
def test_layout_is_the_oracle_s(world):
    rng = np.random.default_rng(world)
    for _ in range(20):
        rows = rng.integers([0, 1, 1], [3000, 9, 20], (rng.integers(0, 12), 3))
        leaves = [Leaf(int(n), int(b), int(s) * 32) for n, b, s in rows]
        names = "size", "bits", "bucket_size"
        columns = [[getattr(leaf, name) for leaf in leaves] for name in names]
        assert module.layout(*columns, world) == oracle.layout(leaves, world)


@every_isa
def test_a_batch_is_as_many_calls():
    leaves = [Leaf(700, 4, 64, 1, 3), Leaf(33, 8, 32, 0, 4)]
    world, batch = 3, 4
    sets = [values_for(leaves, np.float32, b) for b in range(batch)]
    keys = np.arange(2 * batch, dtype=np.uint32).reshape(batch, 2)
    ranks = np.array([-1, 0, 1, 2], np.int32)
    stacked = [np.stack(v) for v in zip(*sets, strict=True)]
    row, attrs = oracle.layout(leaves, world)[1], attributes(leaves, world)
    results = [((batch, world, row), np.uint8)]
    (payload,) = call("cgx_encode", results, [keys, ranks, *stacked], attrs)
    for b in range(batch):
        want, _ = oracle.encode(sets[b], leaves, world, ranks[b], keys[b])
        assert_same_bytes(payload[b], want, f"batch element {b}")
    own = np.maximum(ranks, 0)
    operands, attrs = [keys, own, payload, *stacked], attrs | {"divisor": np.float32(3)}
    (chunk,) = call("cgx_reduce", [((batch, row), np.uint8)], operands, attrs)
    for b in range(batch):
        want, _ = oracle.reduce(sets[b], payload[b], leaves, own[b], 3, keys[b])
        assert_same_bytes(chunk[b], want, f"reduce, batch element {b}")


@every_isa
@pytest.mark.parametrize("name", ["cgx_encode", "cgx_reduce", "cgx_decode"])
def test_a_buffer_without_leaves_or_values_is_fine(name):
    for leaves in ([], [Leaf(0)]):
        values = [np.zeros((1, 0), np.float32) for _ in leaves]
        key, rank = np.zeros((1, 2), np.uint32), np.zeros(1, np.int32)
        payload = np.zeros((1, 2, 0), np.uint8)
        attrs = attributes(leaves, 2)
        if name == "cgx_encode":
            call(name, [((1, 2, 0), np.uint8)], [key, rank, *values], attrs)
        elif name == "cgx_reduce":
            attrs["divisor"] = np.float32(1)
            call(name, [((1, 0), np.uint8)], [key, rank, payload, *values], attrs)
        else:
            call(name, [(v.shape, v.dtype) for v in values], [payload], attrs)


# --- wrong calls --------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Wrong:
    """A call that is wrong in one point, and the words of its error."""

    says: str
    name: str = "cgx_encode"
    attrs: dict = dataclasses.field(default_factory=dict)
    slot: dict = dataclasses.field(default_factory=dict)  # changes to SLOT's numbers
    args: dict = dataclasses.field(default_factory=dict)  # position -> operand
    results: dict = dataclasses.field(default_factory=dict)  # position -> (shape, dtype)


SOME_UNITS = {3: np.zeros((1, 2, 1000), np.float32)}
WRONG = [
    Wrong("cgx_encode: bits of leaf 0 is 9, must be in", slot={"bits": 9}),
    Wrong("bits of leaf 0 is 0, must be in", slot={"bits": 0}),
    Wrong("bucket_size of leaf 0 is 48, must be a multiple of 32", slot={"bucket_size": 48}),
    Wrong("bucket_size of leaf 0 is 0", slot={"bucket_size": 0}),
    Wrong("rounding of leaf 0 is 3", slot={"rounding": 3}),
    Wrong("segment of leaf 0 is -1", slot={"segment": -1}),
    Wrong("segment of leaf 0 is 34, must be such that no bucket of 512 values meets more than 16 "
          "segments", slot={"segment": 34}),
    Wrong("rotation of leaf 0 is 2", slot={"rotation": 2}),
    Wrong("number of leaf 0 is -1", slot={"number": -1}),
    Wrong("length of slots is 5, expected 9 for each of 1 leaves",
          attrs={"slots": ints(4, 512, 0, 0, 0)}),
    Wrong("world is 0, must be in", attrs={"world": np.int64(0)}),
    Wrong("size of payload is 2, expected", results={0: ((1, 2, 1), np.uint8)}),
    Wrong("rank is 2, must be in [-1, 2)", args={1: np.array([2], np.int32)}),
    Wrong("batch is 0, expected 1", args={1: np.zeros(0, np.int32)}),
    Wrong("size of key is 3, expected 2", args={0: np.zeros((1, 3), np.uint32)}),
    Wrong("leaf 0 has 1001 values, must be a multiple of the batch of 2",
          args={1: np.zeros(2, np.int32), 2: np.zeros(1001, np.float32)}),
    Wrong("dtype of leaf 0", args={2: np.zeros((1, 1000), np.int32)}),
    Wrong("number of result leaves is 2, expected 1",
          results={1: ((1, 1000), np.float32), 2: ((1, 1000), np.float32)}),
    Wrong("result leaf 0 has 999 values", results={1: ((1, 999), np.float32)}),
    Wrong("result leaf 0 has 1000 values", results={1: ((1, 1000), np.float16)}),
    Wrong("number of operands is 1, must be at least 2, the leaves and their units",
          slot={"num_columns": 10}),
    Wrong("units of leaf 0 are rows of 3 values, from 0 and 0 of 1000 on, which do not fit its "
          "1000 values", slot={"num_columns": 3}, args=SOME_UNITS),
    Wrong("units of leaf 0 are rows of -1 values", slot={"num_columns": -1}, args=SOME_UNITS),
    Wrong("from 901 and 0 of 1000", slot={"num_columns": 10, "rows": 901}, args=SOME_UNITS),
    Wrong("from 0 and 991 of 1000", slot={"num_columns": 10, "columns": 991}, args=SOME_UNITS),
    Wrong("from -1 and 0 of 1000", slot={"num_columns": 10, "rows": -1}, args=SOME_UNITS),
    Wrong("from 0 and -1 of 1000", slot={"num_columns": 10, "columns": -1}, args=SOME_UNITS),
    Wrong("size of the units is 5, must be a multiple of 2", slot={"num_columns": 10},
          args={3: np.zeros((1, 5), np.float32)}),
    Wrong("dtype of the units is not f32", slot={"num_columns": 10},
          args={3: np.zeros((1, 2, 1000), np.float16)}),
    Wrong("cgx_decode: number of units is 0, expected 1", "cgx_decode", slot={"num_columns": 10}),
    Wrong("cgx_reduce: rank is -1, must be in [0, 2)", "cgx_reduce",
          args={1: np.array([-1], np.int32)}),
    Wrong("size of payload is 2, expected", "cgx_reduce", args={2: np.zeros((1, 2, 1), np.uint8)}),
    Wrong("number of leaves is 1, must be at least 2", "cgx_reduce",
          results={1: ((1, 1000), np.float32), 2: ((1, 1000), np.float32)}),
    Wrong("residual results must lie where their operands lie", "cgx_reduce",
          args={4: np.zeros((1, 1000), np.float32)}, results={1: ((1, 1000), np.float32)}),
    Wrong("divisor is 0", "cgx_reduce", attrs={"divisor": np.float32(0)}),
    Wrong("divisor is nan", "cgx_reduce", attrs={"divisor": np.float32("nan")}),
    Wrong("size of chunk is 5, expected", "cgx_reduce", results={0: ((1, 5), np.uint8)}),
    Wrong("cgx_decode: bits of leaf 0 is 12", "cgx_decode", slot={"bits": 12}),
    Wrong("size of payload is 14, expected", "cgx_decode", args={0: np.zeros((1, 2, 7), np.uint8)}),
    Wrong("dtype of leaf 0", "cgx_decode", results={0: ((1, 1000), np.int8)}),
    Wrong("cgx_accumulate: world is 2, expected 1", "cgx_accumulate", attrs={"world": np.int64(2)}),
    Wrong("rank is 2, must be in [-1, 2)", "cgx_accumulate", args={0: np.array([2], np.int32)}),
    Wrong("size of payload is 6, expected", "cgx_accumulate",
          args={1: np.zeros((1, 2, 3), np.uint8)}),
    Wrong("leaf 0 has units, but this call takes none", "cgx_accumulate", slot={"num_columns": 10}),
    Wrong("rank of payload is 1, expected 2", "cgx_accumulate", args={1: np.zeros(9, np.uint8)}),
]  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG, ids=lambda w: f"{w.name}-{w.says}")
def test_a_wrong_call_names_the_value_and_the_limit(wrong):
    leaves = [Leaf(1000)]
    key, rank = np.zeros((1, 2), np.uint32), np.zeros(1, np.int32)
    x = np.zeros((1, 1000), np.float32)
    payload = np.zeros((1, 2, oracle.layout(leaves, 2)[1]), np.uint8)
    whole = np.zeros((1, 2, oracle.layout(leaves, 1)[1]), np.uint8)
    args, results, attrs = {
        "cgx_encode": ([key, rank, x], [payload], {}),
        "cgx_reduce": ([key, rank, payload, x], [payload[:, 0]], {"divisor": np.float32(1)}),
        "cgx_decode": ([payload], [x], {}),
        "cgx_accumulate": ([rank, whole, x], [x], {"divisor": np.float32(1)}),
    }[wrong.name]
    exact = wrong.name == "cgx_accumulate"
    attrs = attributes(leaves, 1 if exact else 2, **attrs) | wrong.attrs
    for name, value in wrong.slot.items():
        attrs["slots"][SLOT.index(name)] = value
    operands = [wrong.args.get(i, a) for i, a in enumerate(args)]
    operands += [a for i, a in sorted(wrong.args.items()) if i >= len(args)]
    shapes = {i: (r.shape, r.dtype) for i, r in enumerate(results)} | wrong.results
    with pytest.raises(jax.errors.JaxRuntimeError) as error:
        call(wrong.name, list(shapes.values()), operands, attrs)
    assert "INVALID_ARGUMENT" in str(error.value)
    assert wrong.says in str(error.value)


def test_an_unknown_instruction_set_is_refused():
    with pytest.raises(ValueError, match="isa 'mmx' is not in isas"):
        module.set_isa("mmx")
