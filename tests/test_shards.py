"""The halves of a reduction: trees, policies, the choice of an exchange, operands of fused calls.

They are psum_scatter_compressed and all_gather_compressed. The C++ tests check the fused calls'
bytes.
"""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import cgx_jax
from cgx_jax import Cast, Identity, Plan, Quantize, Rule, Rules
from cgx_jax.collective import Collective
from cgx_jax.compressors import SignSGD
from cgx_jax.exchanges import Xla, nccl
from cgx_jax.exchanges.base import Fused
from cgx_jax.kernels import primitives
from cgx_jax.kernels.primitives import Sent
from cgx_jax.kernels.wire import Layout
from cgx_jax.policies import Policy
from profiles import profile
from worlds import assert_same_bits, needs_streams, normal, on_ranks, ranks, sharded

pytestmark = pytest.mark.usefixtures("unoptimized")

WORLD = 8
KEY = jax.random.key(3)
Q4 = Quantize(4)
STOCHASTIC = Quantize(3, 64, rounding="stochastic")
HALVES = {"scatter": cgx_jax.psum_scatter_compressed, "gather": cgx_jax.all_gather_compressed}


def targets(f, *args):
    """Returns the names of the fused calls in the trace of `f`."""
    return re.findall(r"cgx_\w+_nccl", str(jax.make_jaxpr(f)(*args)))


def ranked(half, mesh, compressor=None, **options):
    """Returns a half of each rank's operand, compiled."""
    return on_ranks(lambda v: HALVES[half](v, "data", compressor, **options), mesh)


@pytest.fixture
def stand_ins(built, monkeypatch):
    """Replaces the fused calls by what they promise, in separate steps and row by row."""

    def reduce_scatter(call, words, rows):
        layout, axes = call.layout, call.axes
        encoded = [
            primitives.encode(Sent(w, [row]), layout)[0][0]
            for w, row in zip(jnp.asarray(words), rows, strict=True)
        ]
        received = Xla().scatter(call.name, jnp.stack(encoded), axes)
        rank = axes.rank()
        own = lax.dynamic_index_in_dim(rows, rank, 0, keepdims=False)
        return primitives.accumulate(rank, received, [own], layout, divisor=call.divisor)[0]

    def all_gather(call, words, x):
        layout, axes = call.layout, call.axes
        payload = primitives.encode(Sent(words, [x]), layout)[0][0]
        payloads = lax.all_gather(payload, axes.names, axis_index_groups=axes.groups)
        return jnp.stack([primitives.decode(p[None], layout, [x])[0] for p in payloads])

    calls = {Collective.REDUCE_SCATTER: reduce_scatter, Collective.ALL_GATHER: all_gather}

    def fused(self, call, sent):
        (x,) = sent.leaves
        return Fused([calls[call.collective](call, sent.words, x)], None)

    monkeypatch.setattr(nccl.Nccl, "fused", fused)


@pytest.mark.parametrize(
    ("tiled", "compressor", "groups"),
    [
        (True, Q4, None),
        (True, STOCHASTIC, None),
        (False, Q4, None),
        (False, STOCHASTIC, [[6, 0, 3, 5], [1, 2, 7, 4]]),
    ],
)
@pytest.mark.parametrize("half", HALVES)
def test_a_fused_call_is_handed_what_gives_the_bytes_of_xla(
    half, tiled, compressor, groups, mesh, stand_ins
):
    x = normal(WORLD, 3, 2 * WORLD if tiled else len(groups[0]) if groups else WORLD, 37)
    options = {"key": KEY, "tiled": tiled, "axis_index_groups": groups}
    place = {"scatter": {"scatter_dimension": 1}, "gather": {"axis": 1}}[half]
    ours, theirs = (
        ranked(half, mesh, compressor, exchange=e, **options, **place)(x) for e in ("nccl", "xla")
    )
    assert np.asarray(ours).tobytes() == np.asarray(theirs).tobytes()


@pytest.mark.parametrize("policy", [Q4, STOCHASTIC], ids=str)
def test_a_mean_by_a_fused_call_is_that_of_xla(policy, mesh, stand_ins):
    x = normal(WORLD, 2 * WORLD, 64)

    def mean(exchange):
        tx = cgx_jax.scatter_gradients("data", policy, mesh=mesh, exchange=exchange)
        return on_ranks(lambda v: tx.update(v, tx.init(v))[0], mesh, out=P("data"))(x)

    got = np.asarray(mean("nccl"))
    assert got.tobytes() == np.asarray(mean("xla")).tobytes()
    np.testing.assert_allclose(got, x.mean(axis=0), atol=0.7)


@needs_streams
@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("check_vma", [True, False])
def test_a_fused_call_is_one_operation_and_typed_as_its_namesake(half, check_vma, mesh_2d, built):
    namesake = {"scatter": lax.psum_scatter, "gather": lax.all_gather}[half]
    x, spec = jax.ShapeDtypeStruct((4, 4, 6, 100), jnp.bfloat16), P("data", None, "model")
    types = []

    def f(v, reduce):
        out = reduce(v[0])
        types.append(jax.typeof(out))
        return out[None]

    for reduce in (
        lambda v: HALVES[half](v, "data", exchange="nccl"),
        lambda v: namesake(v, "data"),
    ):
        one = functools.partial(f, reduce=reduce)
        found = targets(sharded(one, mesh_2d, spec, spec, check_vma=check_vma), x)
        assert len(found) == (len(types) == 1)
    ours, theirs = types
    assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
    assert ours.mat.varying == theirs.mat.varying == ({"data", "model"} if check_vma else set())


@needs_streams
def test_what_is_gathered_from_an_operand_that_does_not_vary_varies(mesh, built):
    types = []

    def f(v):
        types.append(jax.typeof(cgx_jax.all_gather_compressed(v, "data", exchange="nccl")))
        return v

    jax.make_jaxpr(sharded(f, mesh, P()))(normal(64))
    assert types[0].shape == (WORLD, 64)
    assert types[0].mat.varying == {"data"}


@needs_streams
@pytest.mark.parametrize("half", HALVES)
def test_derivative_and_batch_of_a_fused_call(half, mesh, built):
    call = lambda v: HALVES[half](v, "data", exchange="nccl")  # noqa: E731
    x = normal(WORLD, WORLD, 40)
    gradient = on_ranks(jax.grad(lambda v: jnp.sum(call(v) ** 2)), mesh)
    jaxpr = str(jax.make_jaxpr(gradient)(x))
    assert jaxpr.count(f"cgx_{'reduce_scatter' if half == 'scatter' else 'all_gather'}_nccl") == 1
    assert {"scatter": "all_gather", "gather": "reduce_scatter"}[half] in jaxpr  # exact cotangents
    batched = on_ranks(jax.vmap(call), mesh)
    assert len(targets(batched, normal(WORLD, 3, WORLD, 40))) == 3  # one for each element
    shape = jax.eval_shape(batched, normal(WORLD, 3, WORLD, 40)).shape
    assert shape == ((WORLD, 3, 40) if half == "scatter" else (WORLD, 3, WORLD, WORLD, 40))


@needs_streams
def test_a_compressed_derivative_travels_by_the_same_exchange(mesh, built):
    call = lambda v: HALVES["gather"](v, "data", backward=Q4, exchange="nccl")  # noqa: E731
    gradient = on_ranks(jax.grad(lambda v: jnp.sum(call(v) ** 2)), mesh)
    found = targets(gradient, normal(WORLD, WORLD, 40))
    assert sorted(found) == ["cgx_all_gather_nccl", "cgx_reduce_scatter_nccl"]


@pytest.mark.parametrize(
    ("size", "world", "rows", "expected"),
    [
        (2048 * 2048, 8, 16, 4_327_424),
        (25_000_000, 8, 16, 25_788_416),
        (25_000_000 // 8, 1, 16, 25_786_368),
        (25_000_000 // 8, 1, 8, 12_893_184),
    ],
)
def test_payload_memory_is_what_the_handlers_ask_for(size, world, rows, expected):
    """Sizes and segments are those of tests/cpp/nccl/fused_test.cc."""
    layout = Layout((Quantize(4, 512).slot(size),), world)
    assert nccl.payload_bytes(rows, layout, 1 << 20) == expected


@needs_streams
@pytest.mark.parametrize("half", HALVES)
def test_a_fused_call_is_refused_on_a_cpu(half, mesh, built):
    with pytest.raises(ValueError, match=rf"{half}.*exchange='nccl'.*CUDA.*compiled for cpu.*xla"):
        ranked(half, mesh, exchange="nccl").lower(normal(WORLD, WORLD, 40))


class SumsAlone(Xla):
    shorthand = "sums"
    can = frozenset({"sum"})


REFUSED = {
    "pigeon": r"exchange='pigeon' is unknown; use one of .*auto.*nccl.*xla",
    "mpi": r"exchange='mpi' does not work here: .* but it must have 1",
    "nccl": r"exchange='nccl' does not work here: .*put nvcc",
    SumsAlone(): r"exchange='sums' lacks '(scatter|gather)'",
}


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("exchange", REFUSED, ids=str)
@pytest.mark.every_combination
def test_other_exchanges_are_refused_with_the_remedy(half, exchange, mesh, pretend):
    pretend(cuda_kernels=None)
    with pytest.raises(ValueError, match=rf"{half}_compressed: {REFUSED[exchange]}"):
        jax.make_jaxpr(ranked(half, mesh, exchange=exchange))(normal(WORLD, WORLD, 40))


@pytest.mark.parametrize("half", HALVES)
def test_an_axis_of_vmap_is_refused(half, built):
    f = jax.vmap(lambda v: HALVES[half](v, "data", exchange="nccl"), axis_name="data")
    with pytest.raises(ValueError, match=r"exchange='nccl'.*the axis is a vmap axis"):
        jax.eval_shape(f, normal(WORLD, WORLD, 40))


def profile_of(times):
    """Returns a profile of one size, with the seconds that each method takes."""
    rows = [(m, 32 if m == "psum" else 4.125, 1 << 12, s) for m, s in times.items()]
    return profile(rows, here=True, world=WORLD)


@needs_streams
@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("fastest", ["psum", "xla", "nccl"])
def test_auto_follows_the_profile(half, fastest, mesh, built, following, every_exchange):
    times = {"psum": 2.0, "xla": 2.0, "nccl": 2.0, "mpi": 0.1}
    following(profile_of(times | {fastest: 1.0}))
    jaxpr = str(jax.make_jaxpr(ranked(half, mesh))(normal(WORLD, WORLD, 512)))
    fused = {"scatter": "cgx_reduce_scatter_nccl", "gather": "cgx_all_gather_nccl"}[half]
    assert (fused in jaxpr, "cgx_encode" in jaxpr) == (fastest == "nccl", fastest == "xla")


@pytest.mark.parametrize("half", HALVES)
def test_auto_without_a_profile_is_xla_from_some_size_on(half, mesh, built, every_exchange):
    for size, taken in ((512, False), (1 << 18, True)):
        x = jax.ShapeDtypeStruct((WORLD, WORLD, size), "float32")
        assert ("cgx_encode" in str(jax.make_jaxpr(ranked(half, mesh))(x))) == taken


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize(
    ("compressor", "width", "dtype"),
    [(Cast(jnp.bfloat16), 40, "float32"), (Q4, 40, "int32"), (Q4, 0, "float32")],
    ids=["another compressor", "integers", "empty"],
)
def test_what_has_no_fused_call_travels_as_by_xla(half, compressor, width, dtype, mesh, built):
    x = normal(WORLD, WORLD, width).astype(dtype)
    by = [ranked(half, mesh, compressor, exchange=e)(x) for e in ("nccl", "xla")]
    assert np.asarray(by[0]).tobytes() == np.asarray(by[1]).tobytes()


def test_one_rank_needs_no_exchange():
    x = normal(1, 1, 40)
    for half in HALVES:
        got = ranked(half, ranks(1), exchange="nccl")(x)
        np.testing.assert_array_equal(np.ravel(got), np.ravel(x))


# --- trees.

# Whole leaves; a rank owns an eighth of each. The shard of "mid" is below the size under which a
# rule keeps leaves exact, the whole leaf is above it.
WHOLE = {
    "big": (64, 96),
    "mid": (32, 48),
    "layer": {"bias": (2048, 2), "half": (16, 128), "small": (24, 40), "vector": (4096,)},
    "counts": (16, 80),
}
DTYPES = {"half": jnp.bfloat16, "counts": jnp.int32}


def paths_of(tree):
    return [".".join(k.key for k in path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]


def operands(half):
    """Returns what every rank passes, stacked: whole leaves to scatter, shards to gather."""

    def operand(path, shape):
        if half == "gather":
            shape = (shape[0] // WORLD, *shape[1:])
        x = 8 * normal(WORLD, *shape)
        return x.astype(DTYPES.get(path[-1].key, jnp.float32))

    return jax.tree_util.tree_map_with_path(operand, WHOLE, is_leaf=lambda x: isinstance(x, tuple))


# A plan of whole leaves serves both halves.
PLAN = Plan.build(
    jax.tree.map(lambda x: x[0], operands("scatter")), Q4, overrides={"layer/bias": Quantize(8)}
)
RULES = Rules([Rule(Quantize(8, 64), path="mid"), Rule(Cast(jnp.bfloat16), path="vector")], Q4)
TAKEN = {  # what each leaf takes; None: exact
    Q4: {"big": Q4, "mid": Q4, "layer": {"bias": None, "half": Q4, "small": None, "vector": None},
         "counts": None},
    RULES: {"big": Q4, "mid": Quantize(8, 64),
            "layer": {"bias": None, "half": Q4, "small": None, "vector": Cast(jnp.bfloat16)},
            "counts": None},
    PLAN: {"big": Q4, "mid": Q4,
           "layer": {"bias": Quantize(8), "half": Q4, "small": None, "vector": None},
           "counts": None},
    Rules((), Q4, exact=()): {"big": Q4, "mid": Q4,
                              "layer": {"bias": Q4, "half": Q4, "small": Q4, "vector": Q4},
                              "counts": None},
}  # fmt: skip


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("given", TAKEN, ids=["one compressor", "rules", "a plan", "nothing exact"])
@pytest.mark.quick("rules-scatter", "a plan-gather")
def test_a_leaf_is_what_the_bare_array_gives_with_what_was_chosen_for_it(half, given, mesh):
    tree = operands(half)

    def alone(t):
        return jax.tree.map(
            lambda c, x: HALVES[half](x, "data", c or Identity(), tiled=True, exchange="xla"),
            TAKEN[given],
            t,
            is_leaf=lambda c: c is None,
        )

    got = ranked(half, mesh, given, tiled=True, exchange="xla")(tree)
    want = on_ranks(alone, mesh)(tree)
    for path, x in jax.tree_util.tree_leaves_with_path(got):
        compressor, y = TAKEN[given], want
        for k in path:
            compressor, y = compressor[k.key], y[k.key]
        assert x.dtype == y.dtype
        # XLA adds up exact sums in its own order.
        atol = 1e-4 if compressor is None and half == "scatter" else 0
        np.testing.assert_allclose(x, y, rtol=0, atol=atol, err_msg=str(path))


class Seen(Policy):
    """Records the leaves that it is shown."""

    def __init__(self):
        self.leaves = []

    def choose(self, leaves):
        self.leaves.append(leaves)
        return [Identity()] * len(leaves)


@pytest.mark.parametrize("tiled", [True, False])
@pytest.mark.parametrize("dimension", [0, -1])
def test_both_halves_show_a_policy_the_whole_leaf(tiled, dimension, mesh):
    policy = Seen()
    place = {"scatter": {"scatter_dimension": dimension}, "gather": {"axis": dimension}}

    def there_and_back(t):
        out = t
        for half in ("gather", "scatter"):
            out = HALVES[half](out, "data", policy, tiled=tiled, **place[half])
        return out

    tree = operands("gather")
    back = jax.eval_shape(on_ranks(there_and_back, mesh), tree)
    assert jax.tree.map(jnp.shape, back) == jax.tree.map(jnp.shape, tree)
    gathered, scattered = policy.leaves
    assert gathered == scattered
    assert [leaf.path.replace("/", ".") for leaf in gathered] == paths_of(tree)
    if tiled and dimension == 0:
        assert [leaf.shape for leaf in gathered] == jax.tree.leaves(
            WHOLE, is_leaf=lambda x: isinstance(x, tuple)
        )


def test_a_plan_of_shards_is_refused_for_what_is_gathered(mesh):
    tree = operands("gather")
    shards = Plan.build(jax.tree.map(lambda x: x[0], tree), Q4)
    with pytest.raises(ValueError, match=r"'big'.*\[64, 96\].*\[8, 96\].*from its result"):
        jax.eval_shape(ranked("gather", mesh, shards, tiled=True), tree)


PLACES = {"big": 1, "mid": 0, "layer": -1, "counts": 0}


@pytest.mark.parametrize(
    "given", [PLACES, lambda path: PLACES[path.partition("/")[0]]], ids=["a prefix", "a function"]
)
@pytest.mark.parametrize("tiled", [True, False])
@pytest.mark.parametrize("half", HALVES)
def test_each_leaf_is_cut_where_it_says(half, tiled, given, mesh):
    """As if it travelled alone, and all leaves still travel in one call."""
    tree = {
        "big": normal(WORLD, 8, 96 if tiled else WORLD, 8),
        "mid": normal(WORLD, WORLD, 300),
        "layer": {"a": normal(WORLD, 40, WORLD), "b": normal(WORLD, 5, 16, WORLD)},
        "counts": np.ones((WORLD, WORLD, 3), np.int32),
    }
    name = {"scatter": "scatter_dimension", "gather": "axis"}[half]
    code = Rules((), Q4, exact=())
    how = {"tiled": tiled, "exchange": "xla"}
    call = lambda x, place: HALVES[half](x, "data", code, **{name: place}, **how)  # noqa: E731
    together = on_ranks(lambda t: call(t, given), mesh)
    each = lambda t: {k: call(x, PLACES[k]) for k, x in t.items()}  # noqa: E731
    assert_same_bits(together(tree), on_ranks(each, mesh)(tree))
    hlo = together.lower(tree).as_text("hlo")
    assert len(re.findall(r"= u8\[.* (?:all-gather|all-to-all)\(", hlo)) == 1


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.quick("scatter")
def test_leaves_do_not_share_their_noise(half, mesh):
    x = normal(WORLD, WORLD, 256)
    f = ranked(half, mesh, STOCHASTIC, key=KEY, exchange="xla")
    got = f({"a": x, "b": x})
    assert (np.asarray(got["a"]) != np.asarray(got["b"])).mean() > 0.05
    assert_same_bits(f({"a": x, "b": x}), got)


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("rounding", ["stochastic", "correlated"])
def test_no_two_ranks_and_no_two_rows_share_their_noise(half, rounding, mesh):
    same = np.broadcast_to(normal(1024), (WORLD, WORLD, 1024))
    code = Quantize(3, 64, rounding=rounding)
    got = np.asarray(ranked(half, mesh, code, key=KEY, exchange="xla")(same))
    # A gather's rows come from the ranks; in a scatter, each rank sums one row.
    each = got[0, :, 0] if half == "gather" else got
    different = {(a, b): (each[a] != each[b]).mean() for a in range(WORLD) for b in range(a)}
    assert min(different.values()) > 0.05
    if half == "scatter":
        # Errors of seven ranks that share their noise would be seven times as large as one.
        one = np.abs(np.asarray(code.decode(code.encode(same[0, 0], key=KEY), (1024,), "float32")))
        one = np.std(one - np.abs(same[0, 0]))
        assert np.std(got - WORLD * same[0]) < 2 * np.sqrt(WORLD - 1) * one


@pytest.mark.parametrize("half", HALVES)
def test_trees_without_leaves_or_with_empty_ones_come_back(half, mesh):
    empty = {"a": None, "b": ()}
    assert ranked(half, mesh)(empty) == empty
    assert ranked(half, mesh)([normal(WORLD, WORLD, 0)])[0].size == 0


LAYER = {"up": (64, 96), "down": (96, 64), "bias": (96,), "norm": (64,), "table": (512, 64)}


@pytest.mark.parametrize(("fusion_bytes", "calls"), [(1 << 20, 1), (32 << 10, 2)])
@pytest.mark.parametrize("half", HALVES)
def test_a_layer_travels_in_one_call_for_each_fusion_buffer(half, fusion_bytes, calls, mesh):
    """Small exact leaves travel in the same call, in fp32; a large one in its own collective."""
    whole = {n: jax.ShapeDtypeStruct(s, jnp.float32) for n, s in LAYER.items()}
    exact = {"table": Identity()}
    plan = Plan.build(whole, Q4, overrides=exact, fusion_bytes=fusion_bytes)
    world = WORLD if half == "gather" else 1
    tree = {n: normal(WORLD, s[0] // world, *s[1:]) for n, s in LAYER.items()}
    hlo = ranked(half, mesh, plan, tiled=True, exchange="xla").lower(tree).as_text("hlo")
    pattern = r"= (\w+)\[([\d,]*)\]\S* (all-gather|all-to-all|reduce-scatter)\("
    found = re.findall(pattern, hlo)
    small = [Q4.payload_bytes(math.prod(LAYER[n]) // WORLD) for n in ("up", "down")]
    small += [4 * LAYER[n][0] // WORLD for n in ("bias", "norm")]
    sizes = [math.prod(map(int, shape.split(","))) for kind, shape, _ in found if kind == "u8"]
    assert len(sizes) == calls
    assert sum(sizes) == WORLD * sum(small)
    assert [op for kind, _, op in found if kind == "f32"] == [
        {"gather": "all-gather", "scatter": "reduce-scatter"}[half]
    ]


@pytest.mark.parametrize("half", HALVES)
def test_leaves_of_a_buffer_keep_the_mesh_axes_that_they_vary_over(half, mesh_2d):
    """Leaves that vary over the model do not make others vary over it; all keep their bits."""
    tree = {"both": normal(4, 8, 512), "bias": normal(4, 8), "one": normal(4, 8, 256)}
    specs = {"both": P("data", None, "model"), "bias": P("data"), "one": P("data")}

    def each(call):
        own = lambda t: jax.tree.map(lambda y: y[0], t)  # noqa: E731
        f = lambda t: jax.tree.map(lambda y: y[None], call(own(t)))  # noqa: E731
        return sharded(f, mesh_2d, (specs,), specs)(tree)

    how = {"tiled": True, "exchange": "xla"}
    got = each(lambda t: HALVES[half](t, "data", Q4, **how))
    taken = {"both": Q4, "bias": Identity(), "one": Q4}
    alone = each(lambda t: jax.tree.map(lambda x, c: HALVES[half](x, "data", c, **how), t, taken))
    np.testing.assert_allclose(got.pop("bias"), alone.pop("bias"), rtol=0, atol=1e-5)
    assert_same_bits(got, alone)


@needs_streams
@pytest.mark.parametrize("half", HALVES)
def test_every_compressed_leaf_is_a_fused_call_of_its_own(half, mesh, built):
    f = ranked(half, mesh, RULES, tiled=True, exchange="nccl")
    assert len(targets(f, operands(half))) == 3  # big, mid, half; "vector" is cast, by "xla"


W = "leaf 'a/w': "
NO_FIT = r"scatter_dimension does not fit the tree: it has no int for leaf 'a/w'. Pass"
ONE = {"scatter_dimension": 1, "tiled": True}
# A half, the leaf's shape (0: all ranks hold it), its options, and what is said.
WRONG = [
    ("scatter", (12, 200), {}, ValueError, W + r"dimension 0 .* has length 12, .*tiled=True"),
    ("scatter", (8, 300), ONE, ValueError,
     W + r"dimension 1 .* multiple of the world size 8; pad it"),
    ("scatter", (8, 300), {"scatter_dimension": 2}, ValueError,
     W + r"dimension 2 is out of range; .* 2 dimensions"),
    ("gather", (8, 300), {"axis": 4}, ValueError, W + "axis=4 is out of range; .* 3 dimensions"),
    ("scatter", (8, 300), {"scatter_dimension": {"ok": 0, "a": {}}}, ValueError, NO_FIT),
    ("gather", (8, 300), {"axis": {"ok": 0, "a": "w"}}, TypeError, W + "axis='w' is not an int"),
    *((half, (8, 300), {"compressor": STOCHASTIC}, ValueError, W + "Quantize.*key is None")
      for half in HALVES),
    *((half, (8, 300), {"compressor": 4}, TypeError, "4 is neither a compressor nor a policy")
      for half in HALVES),
    ("scatter", 0, {}, ValueError, "leaf 'a/w' does not vary over axis 'data'"),
]  # fmt: skip


@pytest.mark.parametrize(("half", "shape", "options", "error", "message"), WRONG)
def test_errors_name_the_leaf(half, shape, options, error, message, mesh):

    def f(x):
        x = x[0] if shape else lax.psum(x[0], "data")
        HALVES[half]({"ok": jnp.zeros((8, 3, 8)), "a": {"w": x}}, "data", **options)
        return x

    with pytest.raises(error, match=message):
        jax.eval_shape(sharded(f, mesh, P("data")), normal(WORLD, *(shape or (8, 300))))


def test_votes_are_scattered_as_the_majority(mesh_of_each_size):
    world = mesh_of_each_size.size
    x = normal(world, world, 1200)
    vote = lambda v: cgx_jax.psum_scatter_compressed(v, "data", SignSGD(), exchange="xla")  # noqa: E731
    majority = np.sign(np.sign(x).sum(0)) if world > 1 else x[0]
    np.testing.assert_array_equal(on_ranks(vote, mesh_of_each_size)(x), majority)
    if world % 2 == 0:
        assert (majority == 0).any()
