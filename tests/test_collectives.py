"""The collectives against their `jax.lax` namesakes, under every transformation."""

import functools
import itertools
import re
import warnings
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import cgx_jax
from cgx_jax import Cast, Identity, Plan, Quantize, Rules
from cgx_jax.compressors import DGC
from cgx_jax.exchanges import base
from cgx_jax.kernels.primitives import Sent
from worlds import RANKS, first, normal, on_ranks, ranks, sharded

pytestmark = [pytest.mark.oldest, pytest.mark.usefixtures("unoptimized")]

WORLD = 8
Q8 = Quantize(8)
STOCHASTIC = Quantize(8, rounding="stochastic")
KEY = jax.random.key(7)
XLA = {"exchange": "xla"}


@pytest.fixture(scope="module")
def tree():
    return {
        "kernel": normal(WORLD, 33, 70),
        "wide": normal(WORLD, 5, 1000, seed=1),
        "bias": normal(WORLD, 70, seed=2),
        "scale": normal(WORLD, seed=3),
    }


def mesh_of(kind):
    if kind == "two":
        return jax.make_mesh((4, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    axis = AxisType.Explicit if kind == "explicit" else AxisType.Auto
    return jax.make_mesh((WORLD,), ("data",), axis_types=(axis,))


def psum(x, axis="data", compressor=Q8, **kw):
    return cgx_jax.psum_compressed(x, axis, compressor, **{"exchange": "xla"} | kw)


def run_shard_map(f, tree, *, kind="auto", jit=True, check_vma=True):
    mesh = mesh_of(kind)
    spec = P(mesh.axis_names)
    how = {"mesh": mesh, "in_specs": spec, "out_specs": P(), "check_vma": check_vma}
    g = jax.shard_map(lambda t: f(first(t)), **how)
    if kind == "explicit":
        tree = jax.device_put(tree, NamedSharding(mesh, spec))
    return (jax.jit(g) if jit else g)(tree)


def mapped(f, *, out=RANKS, check_vma=True):
    """Returns f of each rank's rows, compiled."""
    return sharded(f, mesh_of("auto"), RANKS, out, check_vma=check_vma)


def updated(tx, tree):
    return tx.update(tree, tx.init(tree))[0]


HALVES = {  # one call each, of values whose sum float16 cannot hold and whose mean it can
    "pmean": lambda t: cgx_jax.pmean_compressed(t, "data", Quantize(4), exchange="xla"),
    "pmean, exact": lambda t: cgx_jax.pmean_compressed(t, "data", Identity()),
    "pmean, in groups": lambda t: cgx_jax.pmean_compressed(
        t, "data", Identity(), axis_index_groups=[[0, 2, 4, 6], [1, 3, 5, 7]]
    ),
    "sync_gradients": lambda t: updated(
        cgx_jax.sync_gradients("data", Quantize(4), exchange="xla"), t
    ),
    "scatter_gradients": lambda t: jax.tree.map(
        lambda x: lax.all_gather(x, "data", tiled=True),
        updated(cgx_jax.transforms.scatter_gradients("data", Quantize(4), exchange="xla"), t),
    ),
}


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("call", HALVES)
def test_means_of_float16_are_finite_on_every_path(call, check_vma):
    """The tree has an exact vector, an exact matrix and a compressed matrix."""
    tree = {k: np.full((WORLD, *s), 4e4, np.float16) for k, s in
            {"bias": (64,), "norm": (64, 64), "kernel": (64, 64)}.items()}  # fmt: skip
    f = on_ranks(HALVES[call], mesh_of("auto"), check_vma=check_vma)
    for k, got in f(tree).items():
        assert got.dtype == np.float16
        np.testing.assert_allclose(np.float32(got), np.float32(tree[k]), rtol=1e-3, err_msg=k)


@pytest.mark.parametrize("compressor", [Identity(), Cast(jnp.bfloat16)], ids=str)
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
@pytest.mark.parametrize("call", ["psum", "psum_scatter", "all_gather"])
def test_cotangents_of_16_bits_are_added_up_in_fp32(call, dtype, compressor):
    """Each rank's cotangent is 1, but for rank 0's of 512: a 16-bit sum of bfloat16 loses ones."""
    calls = {
        "psum": cgx_jax.psum_compressed,
        "psum_scatter": functools.partial(cgx_jax.psum_scatter_compressed, tiled=True),
        "all_gather": functools.partial(cgx_jax.all_gather_compressed, tiled=True),
    }
    x = np.ones((WORLD, 64, 64), dtype)

    def gradient(x):
        weight = jnp.where(lax.axis_index("data") == 0, 512, 1).astype(dtype)
        out, back = jax.vjp(lambda v: calls[call](v, "data", compressor, exchange="xla"), x[0])
        return back((jnp.ones_like(out) * weight).astype(dtype))[0][None]

    got = mapped(gradient, check_vma=False)(x)
    assert got.dtype == dtype
    if call != "psum_scatter":  # whose derivative is a gather
        np.testing.assert_array_equal(np.float32(got), np.float32(dtype(519)))


@pytest.mark.parametrize("kinds", [("rbg", "threefry2x32"), ("threefry2x32", "rbg")])
def test_raw_keys_are_of_the_generator_that_is_the_default_now(kinds):
    for kind in kinds:
        with jax.default_prng_impl(kind):
            key = jax.random.PRNGKey(0)
            sums = run_shard_map(lambda v, k=key: psum(v, compressor=STOCHASTIC, key=k), X)
        np.testing.assert_allclose(sums, X.sum(0), rtol=0.1)


@pytest.mark.parametrize("dtype", ["int32", "uint8", "bool", "complex64", "float32", "bfloat16"])
def test_identity_is_lax_psum_bit_for_bit(dtype):
    x = np.random.default_rng(0).integers(0, 2, (WORLD, 40, 50)).astype(jnp.dtype(dtype))
    ours = jax.pmap(lambda v: cgx_jax.psum_compressed(v, "data", Identity()), axis_name="data")(x)
    lax_ = jax.pmap(lambda v: lax.psum(v, "data"), axis_name="data")(x)
    assert ours.dtype == lax_.dtype
    assert np.asarray(ours).tobytes() == np.asarray(lax_).tobytes()


def test_identity_takes_an_operand_that_does_not_vary():
    f = lambda v: cgx_jax.psum_compressed(v, "data", Identity())  # noqa: E731
    got = sharded(f, mesh_of("auto"), P())(np.ones((3, 4)))
    np.testing.assert_array_equal(got, np.full((3, 4), WORLD))


SCALARS = [3, 2.5, True, 1 + 2j, np.float32(2.5), np.float16(2.5), np.int32(3), np.bool_(True)]


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("groups", [None, [[0, 1, 2, 3], [4, 5, 6, 7]]], ids=["all", "groups"])
@pytest.mark.parametrize("call", ["psum", "pmean", "all_gather"])
def test_scalars_are_taken_as_by_lax(call, groups, check_vma):
    """Alone and in a tree, by every kind of compressor or policy; Python numbers stay numbers."""
    ours = getattr(cgx_jax, f"{call}_compressed")
    policies = (None, Q8, Identity(), DGC(0.5), Rules((), Q8, exact=()))
    count = WORLD if groups is None else 4

    def f(x):
        for policy in policies:
            options = {"axis_index_groups": groups, "key": KEY, "exchange": "xla"}
            got = [ours(s, "data", policy, **options) for s in SCALARS]
            got += ours([x, *SCALARS], "data", policy, **options)[1:]
            for s, y in zip(SCALARS * 2, got, strict=True):
                want = {"psum": s * count, "pmean": s, "all_gather": [s] * count}[call]
                kind = jnp.result_type(getattr(lax, call)(s, "data"))
                assert jnp.result_type(y) == kind, (s, policy, y)
                if isinstance(s, int | float) and call != "all_gather" and policy != policies[-1]:
                    assert isinstance(y, int | float), (s, policy)
                results.append((jnp.asarray(y).astype(complex), want))
        return [jnp.broadcast_to(y, (1, *y.shape)) for y, _ in results]

    results = []
    got = mapped(f, check_vma=check_vma)(np.ones((WORLD, 64, 64)))
    for y, (_, want) in zip(got, results, strict=True):
        for row in np.asarray(y):
            np.testing.assert_allclose(row, want, rtol=0.02)


def test_scalars_beside_arrays_are_taken_by_the_hook_and_by_sync_gradients():
    def loss(p, x):
        p = cgx_jax.reduce_in_backward(p, "data", Q8, exchange="xla")
        return p["s"] * jnp.sum(p["w"] * x)

    def f(x):
        tree = {"w": jnp.full((64, 64), 0.5), "s": 2.0}
        grads = jax.grad(loss)(tree, x[0])
        sync = cgx_jax.sync_gradients("data", exchange="xla")
        return grads, updated(sync, {"w": x[0], "s": 2.0})["s"]

    grads, s = mapped(f, out=P(), check_vma=False)(np.ones((WORLD, 64, 64), np.float32))
    np.testing.assert_allclose(grads["s"], WORLD * 64 * 64 / 2)
    assert s == 2


@pytest.mark.parametrize("world", [2, 3, 8])
@pytest.mark.parametrize("dtype", ["int32", "uint32", "int8", "uint16", "int4", "bool"])
def test_means_of_integers_are_the_nearest_whatever_their_sum(dtype, world):
    """Of two, the even one; float32 holds neither all integers nor their sums."""
    least, most = (0, 1) if dtype == "bool" else (jnp.iinfo(dtype).min, jnp.iinfo(dtype).max)
    rng = np.random.default_rng(world)
    x = rng.integers(least, most, (world, 2 * world, 50), endpoint=True)
    x[:, 0] = least + np.arange(50) % min(most - least + 1, 50)  # alike on all ranks
    x[:, 1] = most - np.arange(50) % min(most - least + 1, 50)
    x[1:, 2] = x[:1, 2] + (x[:1, 2] < most)  # halfway between two, for 2 ranks
    x[:, 3] = np.where(np.arange(50) % 2, least, most)
    want = np.array([round(Fraction(int(v), world)) for v in x.sum(0).ravel()]).reshape(-1, 50)
    x = x.astype(jnp.dtype(dtype))

    def f(x):
        makers = cgx_jax.sync_gradients, cgx_jax.scatter_gradients
        mean, part = (updated(make("data", Q8, **XLA), {"n": x[0]})["n"] for make in makers)
        return mean[None], part

    call = sharded(f, ranks(world), RANKS, RANKS, check_vma=False)
    for got in (call(x)[0][0], call(x)[0][-1], call(x)[1]):
        assert got.dtype == dtype
        np.testing.assert_array_equal(np.asarray(got).astype(int), want)
    assert call.lower(x).as_text().count("stablehlo.all_reduce") == 1


def test_an_integer_that_all_ranks_hold_is_its_own_mean():
    n = np.int32([16777217, 1_000_000_000, -5])

    def f(x):
        return updated(cgx_jax.sync_gradients("data", exchange="xla"), {"n": n, "x": x[0]})["n"]

    got = mapped(f, out=P())(np.ones((WORLD, 64, 64), np.float32))
    np.testing.assert_array_equal(got, n)


def loss(w, x):
    return jnp.sum(jnp.tanh(w * x))


@pytest.mark.parametrize(
    "wrap", [jax.pmap, lambda f, **how: jax.jit(jax.vmap(f, **how))], ids=["pmap", "vmap"]
)
def test_gradient_and_tangent_are_those_of_lax_psum(wrap):
    w, x = normal(20, 30), normal(WORLD, 20, 30, seed=1)

    def grads(reduce):
        def f(w, x):
            g = jax.grad(lambda w: reduce(loss(w, x)))(w)
            return g, jax.jvp(lambda w: reduce(w * x), (w,), (w,))[1]

        return wrap(f, axis_name="data", in_axes=(None, 0))(w, x)

    ours, theirs = grads(psum), grads(lambda v: lax.psum(v, "data"))
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(a, b)


def test_false_claim_of_replication_is_refused(tree):
    with pytest.raises(ValueError, match="out_specs"):
        run_shard_map(lambda t: psum(t, "a"), tree, kind="two")


HALVES_OF = [
    (cgx_jax.psum_scatter_compressed, lax.psum_scatter, "scatter_dimension"),
    (cgx_jax.all_gather_compressed, lax.all_gather, "axis"),
]


@pytest.mark.parametrize("compressor", [Q8, STOCHASTIC, Cast(jnp.bfloat16), Identity()], ids=str)
@pytest.mark.parametrize("tiled", [True, False])
@pytest.mark.parametrize("dimension", [0, 1, -1])
@pytest.mark.quick(
    "1-False-Quantize(bits=8, bucket_size=512, rounding=?nearest*",
    "0-True-Identity()",
    "-1-True-Cast*",
)
def test_scatter_and_gather_match_their_namesakes(compressor, tiled, dimension):
    x = normal(WORLD, 16, 16, 16) if tiled else normal(WORLD, 8, 8, 8)
    options = {"tiled": tiled, "key": KEY if compressor.needs_key else None, "exchange": "xla"}
    options |= {"compressor": compressor}
    for ours, theirs, place in HALVES_OF:
        at = {place: dimension}
        positive = {place: dimension % 3} if place == "scatter_dimension" else at
        ours = functools.partial(ours, axis_name="data", **options, **at)
        theirs = functools.partial(theirs, axis_name="data", tiled=tiled, **positive)
        for wrap in (in_shard_map, lambda f: in_vmap(f, "data")):
            got, want = wrap(ours)(x), wrap(theirs)(x)
            assert got.shape == want.shape
            np.testing.assert_allclose(got, want, atol=0 if compressor == Identity() else 0.25)


def in_shard_map(f):
    return on_ranks(f, mesh_of("auto"))


def in_vmap(f, axis):
    return jax.jit(jax.vmap(f, axis_name=axis))


def test_gathered_shards_are_the_same_bits_on_every_rank():
    gather = lambda v: cgx_jax.all_gather_compressed(v, "data", Quantize(4), exchange="xla")  # noqa: E731
    got = in_shard_map(gather)(normal(WORLD, 9, 77))
    for rank in np.asarray(got):
        assert rank.tobytes() == np.asarray(got)[0].tobytes()


@pytest.mark.parametrize("tiled", [True, False])
@pytest.mark.quick("False")
def test_gradient_of_scatter_and_gather_is_that_of_their_namesakes(tiled):
    x = normal(WORLD, 8, 6)
    for ours, theirs, _ in HALVES_OF:
        ours = functools.partial(ours, exchange="xla")

        def weighted_sum(v, f):
            out = f(v, "data", tiled=tiled)
            return jnp.sum(out * jnp.cos(jnp.arange(float(out.size))).reshape(out.shape))

        grads = [
            in_shard_map(jax.grad(functools.partial(weighted_sum, f=f)))(x) for f in (ours, theirs)
        ]
        np.testing.assert_allclose(*grads, rtol=1e-5, atol=1e-5)


def test_same_key_same_bytes_and_another_key_others():
    x = normal(WORLD, 40, 60)
    f = lambda v, key: psum(v[0], compressor=STOCHASTIC, key=key)  # noqa: E731
    f = sharded(f, mesh_of("auto"), (RANKS, P()))
    one, again, other = (np.asarray(f(x, k)) for k in (KEY, KEY, jax.random.key(8)))
    np.testing.assert_array_equal(one, again)
    assert (one != other).any()


X = np.ones((WORLD, 4, 512), np.float32)
BAD = {
    "bits 0": (ValueError, r"bits=0 .*1\.\.8.*Identity", lambda v: Quantize(0)),
    "bits 9": (ValueError, r"bits=9 .*1\.\.8", lambda v: Quantize(9)),
    "bits 2.5": (TypeError, r"bits=2\.5", lambda v: Quantize(2.5)),
    "bucket 100": (ValueError, "bucket_size=100.*32.*128", lambda v: Quantize(4, 100)),
    "bucket 2**40": (ValueError, "bucket_size=1099511627776 is above",
                     lambda v: Quantize(4, 2**40)),
    "bucket 0": (ValueError, "bucket_size=0.*32", lambda v: Quantize(4, 0)),
    "rounding": (ValueError, "rounding='up'.*nearest", lambda v: Quantize(4, rounding="up")),
    "cast": (ValueError, "int8", lambda v: Cast(np.int8)),
    "unknown axis": (ValueError, "'nodata' is not bound.*data", lambda v: psum(v, "nodata")),
    "arguments swapped": (TypeError, "axis_name is an array; the first argument is what is reduced",
                          lambda v: cgx_jax.psum_compressed("data", v)),
    "a dimension": (TypeError, "axis_name=0 is a dimension", lambda v: psum(v, 0)),
    "exchange": (ValueError, "exchange='pigeon'.*xla", lambda v: psum(v, exchange="pigeon")),
    "no key": (ValueError, "key is None.*jax.random.key", lambda v: psum(v, compressor=STOCHASTIC)),
    "a key that is none": (TypeError, "key=3 is no key",
                           lambda v: psum(v, compressor=STOCHASTIC, key=3)),
    "a raw key of another generator": (
        TypeError,
        r"psum_compressed: key is uint32\[4\], but .* are uint32\[2\]; pass jax.random.wrap_key_d",
        lambda v: psum(v, compressor=STOCHASTIC, key=jax.random.PRNGKey(0, impl="rbg")),
    ),
    "several keys": (TypeError,
                     r"psum_compressed: .*key is key<fry>\[3\], which are several keys; pass one",
                     lambda v: psum(v, compressor=STOCHASTIC, key=jax.random.split(KEY, 3))),
    "several keys, of a hook": (
        TypeError, r"reduce_in_backward: key is key<fry>\[3\], which are several keys",
        lambda v: cgx_jax.reduce_in_backward(v, "data", key=jax.random.split(KEY, 3))
    ),
    "a key that is none, of a hook": (TypeError, "reduce_in_backward: key=3 is no key",
                                      lambda v: cgx_jax.reduce_in_backward(v, "data", key=3)),
    "a key that is none, of layers": (
        TypeError, "scan_layers: key=3 is no key",
        lambda v: cgx_jax.scan_layers(lambda x, w: x, v, v, "data", key=3)
    ),
    "a leaf that is no array": (TypeError, "leaf 'act' is 'gelu', which is no array; take it out",
                                lambda v: psum({"w": v, "act": "gelu"})),
    "a random key": (TypeError,
                     "psum_compressed: leaf 'k' is key<fry>, which is no number.*take it out",
                     lambda v: psum({"w": v, "k": KEY})),
    "a random key, to gather": (
        TypeError, "all_gather_compressed: the operand is key<fry>, which is no number",
        lambda v: cgx_jax.all_gather_compressed(KEY, "data")
    ),
    "a random key among gradients": (
        TypeError,
        "scatter_gradients: leaf 'k' is key<fry>, which is no number",
        lambda v: updated(
            cgx_jax.scatter_gradients("data"),
            {"w": v.reshape(WORLD, -1), "k": jax.random.split(KEY, WORLD)},
        ),
    ),
    "the gradient of an integer": (TypeError, r"leaf 'n' is the gradient of an integer \(float0\)",
                                   lambda v: psum({"w": v, "n": np.zeros(3, jax.dtypes.float0)})),
    "bits that are a bool": (TypeError, "bits=True is not an integer",
                             lambda v: Quantize(bits=True)),
    "not a compressor": (TypeError, "4 is neither a compressor nor a policy",
                         lambda v: psum(v, compressor=4)),
    "integer leaf by name": (
        TypeError, "'n' is int32.*Identity",
        lambda v: Plan.build({"n": np.zeros(3, np.int32)}, overrides={"n": Q8})
    ),
    "unknown path": (ValueError, "no leaf has the path 'kernal'.*kernel",
                     lambda v: Plan.build({"kernel": X}, overrides={"kernal": Q8})),
    "plan of another tree": (ValueError, r"leaf 0 is 'b'.*but the plan has 'a'",
                             lambda v: psum({"b": v}, compressor=Plan.build({"a": X[0]}))),
    "plan of another shape": (ValueError, r"\[4, 512\].*\[8, 4, 512\]",
                              lambda v: psum({"a": v}, compressor=Plan.build({"a": X}))),
    "plan of fewer leaves": (ValueError, "2 leaves, but the plan has 1;",
                             lambda v: psum({"a": v, "b": v}, compressor=Plan.build({"a": X[0]}))),
    "groups that miss a rank": (ValueError, "every index below 8",
                                lambda v: psum(v, axis_index_groups=[[0, 1]])),
    "groups of unequal size": (ValueError, "unequal",
                               lambda v: psum(v, axis_index_groups=[[0], [1, 2, 3, 4, 5, 6, 7]])),
    "payload of the wrong size": (
        ValueError, r"uint8\[7\].*uint8\[264\]",
        lambda v: Quantize(4).decode(jnp.zeros(7, jnp.uint8), (512,), jnp.float32)
    ),
    "payload of the wrong size, cast": (
        ValueError, "7 bytes.*1024",
        lambda v: Cast(jnp.bfloat16).decode(jnp.zeros(7, jnp.uint8), (512,), jnp.float32)
    ),
    "integers to a quantizer": (TypeError, "int32", lambda v: Q8.encode(jnp.arange(5))),
    "scatter length": (ValueError, "length 4.*8.*tiled=True",
                       lambda v: cgx_jax.psum_scatter_compressed(v, "data")),
    "scatter dimension": (
        ValueError, "dimension 5 is out of range",
        lambda v: cgx_jax.psum_scatter_compressed(v, "data", scatter_dimension=5)
    ),
    "reduced already": (ValueError, r"does not vary over axis 'data'.*pcast.*reduce_in_backward",
                        lambda v: psum({"w": lax.psum(v, "data")})),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_a_wrong_call_says_value_limit_and_remedy(name):
    """All are refused in tracing, here of f(v) on each rank."""
    error, match, f = BAD[name]
    with pytest.raises(error, match=re.compile(match, re.DOTALL)):
        jax.eval_shape(on_ranks(f, mesh_of("auto"), out=P()), X)


def test_a_call_outside_of_the_axis_is_refused():
    with pytest.raises(ValueError, match="'data' is not bound"):
        psum(jnp.ones((3, 4)))


def test_gradient_that_ad_has_summed_is_refused_with_two_ways_out():
    f = lambda w, x: psum(jax.grad(loss)(w, x[0]))  # noqa: E731
    f = sharded(f, mesh_of("auto"), (P(), RANKS))
    with pytest.raises(ValueError, match=r"pcast.*reduce_in_backward"):
        jax.eval_shape(f, normal(20, 30), normal(WORLD, 20, 30))


def test_leaves_that_vary_differently_are_reduced_apart():
    a, b = normal(4, 30, 40), normal(4, 2, 30, 40, seed=1)
    f = lambda a, b: psum({"a": a[0], "b": b[0, 0]}, "a")  # noqa: E731
    specs = (P("a"), P("a", "b")), {"a": P(), "b": P("b")}
    out = sharded(f, mesh_of("two"), *specs)(a, b)
    np.testing.assert_allclose(out["a"], a.sum(0), atol=0.1)
    np.testing.assert_allclose(out["b"].reshape(2, 30, 40), b.sum(0), atol=0.1)


def test_world_and_fusion_do_not_change_a_leafs_first_payload():
    from cgx_jax.compressors.buffers import chunk_code
    from cgx_jax.kernels import primitives

    leaves = [normal(17, 41, seed=i) for i in range(5)]
    key = np.uint32([1, 2])
    for world, fusion in itertools.product([1, 2, 3, 8], [1, 4096, 1 << 20]):
        policy = Rules((), Quantize(3, 64, "stochastic"), exact=())
        plan = Plan.build(leaves, policy, fusion_bytes=fusion)
        got = {}
        for buffer in plan.buffers:
            layout = chunk_code(plan.coded(buffer), world).layout
            rows = np.asarray(primitives.encode(Sent(key, [leaves[i] for i in buffer]), layout)[0])
            ends = zip(layout.begins, layout.begins[1:], strict=False)
            stream = np.concatenate([r[: b - a] for r, (a, b) in zip(rows, ends, strict=True)])
            for i, at in zip(buffer, layout.starts, strict=False):
                got[i] = stream[at : at + layout.slots[buffer.index(i)].bytes].tobytes()
        if (world, fusion) == (1, 1):
            want = got
        assert got == want


@pytest.mark.parametrize("cached", [True, False])
def test_cached_programs_of_several_cpu_devices_are_warned_of(cached, mesh):
    base._warn_of_cached_programs.cache_clear()
    before = jax.config.jax_enable_compilation_cache
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        jax.config.update("jax_enable_compilation_cache", cached)
        for exchange in ("xla", "auto"):
            f = functools.partial(cgx_jax.psum_compressed, axis_name="data", exchange=exchange)
            jax.eval_shape(sharded(f, mesh, P("data")), jnp.zeros((8, 64)))
        jax.config.update("jax_enable_compilation_cache", before)
    found = [w for w in caught if "jax_enable_compilation_cache" in str(w.message)]
    assert len(found) == cached


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("call", ["psum_compressed", "pmean_compressed"])
def test_small_exact_leaves_travel_together(call, check_vma):
    """There is one collective per dtype of sums and one per large leaf; fp32 is lax's own."""
    rng = np.random.default_rng(0)
    shapes = {"a": (7,), "b": (), "c": (3, 5), "empty": (0,), "large": (40, 1000)}
    tree = {k: rng.normal(size=(8, *s)).astype(np.float32) for k, s in shapes.items()}
    tree |= {k: tree["c"].astype(jnp.bfloat16) for k in ("half", "halves")}
    tree["count"] = np.arange(8, dtype=np.int32)[:, None]
    exact = {"psum_compressed": lax.psum, "pmean_compressed": lax.pmean}[call]
    if call == "pmean_compressed":
        del tree["count"]  # lax.pmean turns integers into floats

    def run(f):
        return mapped(lambda t: f(first(t)), out=P(), check_vma=check_vma)

    ours = run(lambda t: getattr(cgx_jax, call)(t, "data", cgx_jax.Identity()))
    calls = ours.lower(tree).as_text().count("stablehlo.all_reduce")
    assert calls == 3 + ("count" in tree)  # small fp32 and bf16, the large, the empty one, int32
    with jax.numpy_dtype_promotion("standard"):
        want = run(lambda t: exact(t, "data"))(tree)
    for k, got in ours(tree).items():
        assert got.dtype == want[k].dtype, k
        if got.dtype == jnp.bfloat16:
            of = np.mean if call == "pmean_compressed" else np.sum
            once = of(np.asarray(tree[k], np.float64), axis=0).astype(np.float32)
            np.testing.assert_array_equal(got, once.astype(jnp.bfloat16), err_msg=k)
        else:
            np.testing.assert_array_equal(got, want[k], err_msg=k)


UNREDUCED = {  # a call whose operand is typed as unreduced, with a compressor
    "psum_compressed": lambda g, c: cgx_jax.psum_compressed(g, "data", c, **XLA),
    "pmean_compressed": lambda g, c: cgx_jax.pmean_compressed(g, "data", c, **XLA),
    "psum_scatter_compressed": lambda g, c: cgx_jax.psum_scatter_compressed(
        g, "data", c, tiled=True, **XLA
    ),
    "all_gather_compressed": lambda g, c: cgx_jax.all_gather_compressed(g, "data", c, tiled=True),
    "all_gather_compressed, backward": lambda g, c: cgx_jax.all_gather_compressed(
        g, "data", c, backward=c, tiled=True
    ),
    "reduce_in_backward": lambda g, c: cgx_jax.reduce_in_backward(g, "data", c),
    "sync_gradients": lambda g, c: updated(cgx_jax.sync_gradients("data", c, **XLA), {"w": g})["w"],
    "scatter_gradients": lambda g, c: updated(
        cgx_jax.transforms.scatter_gradients("data", c, **XLA), {"w": g}
    )["w"],
    "scan_layers": lambda g, c: cgx_jax.scan_layers(
        lambda x, w: x @ w, jnp.ones((2, 512)), g[None], "data", weights=c
    ),
}


SUMS = ("psum", "pmean", "psum_scatter", "sync_gradients", "scatter_gradients")


@pytest.mark.parametrize("call", UNREDUCED)
def test_unreduced_operands_are_summed_or_named_as_such(call):
    """Each rank's part of an unreduced value is an operand of a sum, as of lax.psum."""
    mesh = mesh_of("explicit")
    x = jax.device_put(normal(64, 64), NamedSharding(mesh, P("data")))
    w = normal(64, 64, seed=1)
    loss = lambda w, x: jnp.sum(jnp.tanh(x @ w))  # noqa: E731
    compressed = UNREDUCED[call]

    def run(f, **marked):
        with jax.set_mesh(mesh):
            placed = jax.device_put(w, NamedSharding(mesh, P(**marked)))
            each = lambda w, x: f(w, x)[None]  # noqa: E731
            return np.asarray(sharded(each, None, (P(**marked), RANKS), RANKS)(placed, x))

    unreduced = {c: lambda w, x, c=c: compressed(jax.grad(loss)(w, x), c) for c in (Q8, Identity())}
    if not call.startswith(SUMS):
        name = call.partition(",")[0]
        says = f"{name}: .* is typed as unreduced over axis 'data'.*cgx_jax.psum_compressed"
        with pytest.raises(ValueError, match=says):
            run(unreduced[Q8], reduced={"data"})
        return
    gradient = np.asarray(jax.jit(jax.grad(loss))(w, np.asarray(x)))
    want = gradient / (WORLD if call in ("pmean_compressed", *SUMS[3:]) else 1)

    def whole(out):
        return out.reshape(64, 64) if "scatter" in call else out[0]

    exact = run(unreduced[Identity()], reduced={"data"})
    np.testing.assert_allclose(whole(exact), want, atol=1e-4)

    def varying(w, x):
        w = jax.lax.pcast(w, "data", to="varying")
        return compressed(jax.grad(loss)(w, x), Q8)

    got = run(unreduced[Q8], reduced={"data"})
    np.testing.assert_allclose(whole(got), want, atol=0.02 * np.abs(want).max())
    for marked in ({}, {"reduced": {"data"}}):
        np.testing.assert_array_equal(run(varying, **marked), got)
