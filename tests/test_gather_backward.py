"""all_gather_compressed(backward=...): gradients travel compressed, under any transformation."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import cgx_jax
from cgx_jax import Identity, Plan, Quantize, Rules
from cgx_jax.compressors import SharedTernGrad, ShiftedLattice, Signum
from worlds import assert_same_bits, normal, on_ranks, ranks, sharded

pytestmark = [pytest.mark.oldest, pytest.mark.usefixtures("unoptimized")]

WORLD = 8
KEY = jax.random.key(3)
Q4, Q8 = Quantize(4), Quantize(8)
STOCHASTIC = Quantize(3, 64, rounding="stochastic")
GROUPS = [[6, 0, 3, 5], [1, 2, 7, 4]]
HOW = {"exchange": "xla", "tiled": True}
gather, scatter = cgx_jax.all_gather_compressed, cgx_jax.psum_scatter_compressed


def shards():
    """Every rank's shards, [world, ...]: compressed and exact leaves of several dtypes."""
    return {
        "bias": normal(WORLD, 32),
        "half": normal(WORLD, 16, 16, dtype="bfloat16"),
        "layer": {"big": normal(WORLD, 8, 96), "counts": jnp.arange(WORLD * 64).reshape(WORLD, 64)},
        "small": normal(WORLD, 8, 3, dtype="float16"),
    }


def floats(tree):
    """Returns the leaves that have a derivative, as a dict by path."""
    return {
        jax.tree_util.keystr(path): x
        for path, x in jax.tree_util.tree_leaves_with_path(tree)
        if jnp.issubdtype(x.dtype, jnp.inexact)
    }


def weights_of(tree):
    """Returns cotangents that differ between ranks, in the tree's shapes and dtypes."""
    scale = 1 + lax.axis_index("data").astype(jnp.float32)
    wave = lambda x: scale * jnp.cos(jnp.arange(x.size, dtype=jnp.float32)).reshape(x.shape)  # noqa: E731
    return jax.tree.map(lambda x: wave(x).astype(x.dtype), tree)


def gradient(call, tree):
    """Returns the gradient whose cotangents are `weights_of` the results of `call`."""

    def total(tree):
        out = floats(call(tree))
        products = jax.tree.map(
            lambda x, w: (x * w).astype(jnp.float32).sum(), out, weights_of(out)
        )
        return sum(products.values())

    return floats(jax.grad(total, allow_int=True)(tree))


def scattered(tree, c, *, axis=0, **options):
    """Returns what `backward=c` promises."""
    how = {name: options.get(name) for name in ("tiled", "axis_index_groups")}
    whole = lax.all_gather(floats(tree), "data", axis=axis, **how)
    names, whole = whole.keys(), weights_of(whole)
    out = scatter(whole, "data", c, scatter_dimension=axis, **options)
    return {name: out[name] for name in names}


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize(
    ("axis", "tiled", "groups"), [(0, True, None), (-1, True, None), (0, False, GROUPS)]
)
@pytest.mark.quick("0-True-None-True", "-1-True-None-False", "0-False-*-True")
def test_the_gradient_is_scattered_as_the_other_call_would(axis, tiled, groups, check_vma, mesh):
    """Each leaf as by `psum_scatter_compressed`; exact ones exactly; integers have none."""
    options = {"axis_index_groups": groups, "tiled": tiled, "exchange": "xla"}
    call = lambda t: gather(t, "data", Q8, backward=Q4, axis=axis, **options)  # noqa: E731
    got = on_ranks(lambda t: gradient(call, t), mesh, check_vma=check_vma)(shards())
    promised = lambda t: scattered(t, Q4, axis=axis, **options)  # noqa: E731
    assert_same_bits(got, on_ranks(promised, mesh, check_vma=check_vma)(shards()))
    exact = lambda t: gradient(lambda t: gather(t, "data", Q8, axis=axis, **options), t)  # noqa: E731
    want = on_ranks(exact, mesh, check_vma=check_vma)(shards())
    for path, x in want.items():
        lossy = path in ("['half']", "['layer']['big']")
        assert (np.abs(got[path] - x).astype(np.float32).max() > 0.1) == lossy


def test_leaves_of_several_dimensions_come_back_where_they_were_cut(mesh):
    places = {"bias": 0, "half": 1, "layer": 1, "small": -1}
    tree = shards()
    del tree["layer"]["counts"]
    call = lambda t: gather(t, "data", Q8, backward=Q4, axis=places, **HOW)  # noqa: E731
    together = on_ranks(lambda t: gradient(call, t), mesh)(tree)
    for name, place in places.items():
        f = lambda t, p=place: gradient(  # noqa: E731
            lambda t: gather(t, "data", Q8, backward=Q4, axis=p, **HOW), t
        )
        alone = on_ranks(f, mesh)({name: tree[name]})
        assert_same_bits({path: together[path] for path in alone}, alone)


def in_scan(call):
    def scanned(tree):
        rows = jax.tree.map(lambda x: x[None], tree)
        return lax.scan(lambda c, t: (c, call(t)), (), rows)[1]

    return lambda tree: jax.tree.map(lambda y: y[0], scanned(tree))


def in_vmap(call):
    pair = lambda tree: jax.tree.map(lambda x: jnp.stack([x, x]), tree)  # noqa: E731
    return lambda tree: jax.tree.map(lambda y: y[1], jax.vmap(call)(pair(tree)))


def test_it_is_the_same_inside_other_transformations(mesh):
    """Whether the key is typed or raw."""
    tree = {k: x for k, x in shards().items() if k != "small"}

    def result(key, inside=lambda call: call):
        call = lambda t: gather(t, "data", STOCHASTIC, backward=STOCHASTIC, key=key, **HOW)  # noqa: E731
        return on_ranks(lambda t: gradient(inside(call), t), mesh)(tree)

    want = result(KEY)
    for key, inside in ((KEY, in_scan), (jax.random.PRNGKey(3), in_vmap)):
        assert_same_bits(result(key, inside), want)


def test_it_works_over_an_axis_of_vmap(mesh):
    call = lambda t: gather(t, "data", Q4, backward=Q4, **HOW)  # noqa: E731
    f = lambda t: gradient(call, t)  # noqa: E731
    got = jax.jit(jax.vmap(f, axis_name="data"))(shards())
    want = on_ranks(f, mesh)(shards())
    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-2, atol=1e-4)  # noqa: E731
    jax.tree.map(lambda a, b: close(*(x.astype(jnp.float32) for x in (a, b))), got, want)


def test_the_passes_draw_different_noise(mesh):
    """The same key gives the same bits; the gradient's noise is not that of a call with the key."""
    tree = {"w": normal(WORLD, 8, 96)}

    def gradient_of(key, t):
        call = lambda t: gather(t, "data", backward=STOCHASTIC, key=key, **HOW)  # noqa: E731
        return gradient(call, t)["['w']"]

    of = lambda key: f(jnp.broadcast_to(key, WORLD), tree)  # noqa: E731
    f = on_ranks(gradient_of, mesh)
    again = on_ranks(lambda t: scattered(t, STOCHASTIC, key=KEY, **HOW), mesh)(tree)["['w']"]
    first = of(KEY)
    assert_same_bits(first, of(KEY))
    for other in (of(jax.random.key(4)), again):
        assert (np.asarray(first) != other).mean() > 0.05


def test_second_derivatives_are_exact(mesh):
    """Of a call without compressed weights, so that the values are those of `lax`."""
    tree = {"w": normal(WORLD, 8, 96)}

    def curved(call):
        def total(t):
            w = call(t)["w"]
            return (weights_of(w) * w**3).sum()

        along = lambda t: (jax.grad(total)(t)["w"] * jnp.cos(t["w"])).sum()  # noqa: E731
        forward = lambda t: jax.jvp(jax.grad(total), (t,), (t,))[1]  # noqa: E731
        return on_ranks(lambda t: (jax.grad(along)(t), forward(t)), mesh)(tree)

    got = curved(lambda t: gather(t, "data", Identity(), backward=Identity(), **HOW))
    want = curved(lambda t: lax.all_gather(t, "data", tiled=True))
    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-3)  # noqa: E731
    jax.tree.map(close, got, want)
    lossy = curved(lambda t: gather(t, "data", Identity(), backward=Q4, **HOW))
    jax.tree.map(close, lossy[1], want[1])  # the derivative of the rounded gradient


def test_forward_mode_is_refused(mesh):
    call = lambda t: gather(t, "data", backward=Q4, **HOW)  # noqa: E731
    with pytest.raises(TypeError, match="forward-mode"):
        on_ranks(lambda t: jax.jvp(call, (t,), (t,))[1], mesh)(normal(WORLD, 8, 96))


@pytest.mark.parametrize("spec", [P("data"), P()], ids=["shards", "the same on all ranks"])
@pytest.mark.parametrize("check_vma", [True, False])
def test_gradients_are_typed_as_those_of_the_namesake(spec, check_vma, mesh_2d):
    """Also of an operand that does not vary: its gradient is summed over the ranks."""
    tree = {"one": normal(8, 96), "both": normal(8, 96)}
    specs = {"one": spec, "both": P(*spec, *[None] * (1 - len(spec)), "model")}

    def gradients(call):
        types = []

        def f(t):
            out = jax.grad(lambda t: sum(x.sum() for x in jax.tree.leaves(call(t))))(t)
            types.append(jax.tree.map(jax.typeof, out))
            return out

        return sharded(f, mesh_2d, (specs,), specs, check_vma=check_vma)(tree), types[0]

    got, ours = gradients(lambda t: gather(t, "data", Q4, backward=Q8, **HOW))
    want, theirs = gradients(lambda t: lax.all_gather(t, "data", tiled=True))
    assert jax.tree.map(str, ours) == jax.tree.map(str, theirs)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), got, want)


def test_all_leaves_travel_in_one_call(mesh):
    """In each pass, with the exact ones."""
    tree = {name: normal(WORLD, 8, 96) for name in "abc"} | {"bias": normal(WORLD, 8)}
    call = lambda t: jax.tree.map(jnp.tanh, gather(t, "data", Q8, backward=Q4, **HOW))  # noqa: E731
    hlo = on_ranks(lambda t: gradient(call, t), mesh).lower(tree).as_text("hlo")
    found = re.findall(r"= (\w+)\[.* (all-gather|all-to-all|reduce-scatter|all-reduce)\(", hlo)
    assert sorted(found) == [("u8", "all-gather"), ("u8", "all-to-all")]


def test_layers_gathered_ahead_are_scanned_layers():
    """`scan_layers` only changes the order: it has the bits of a scan with one gather per layer."""
    count = 4
    stack = {"kernel": normal(2, count, 32, 64) / 8, "bias": normal(2, count, 32)}
    x, mesh = normal(2, 2, 64), ranks(2)
    weights, gradients = ShiftedLattice(8), Quantize(4, rounding="stochastic")
    body = lambda x, layer: x + jnp.tanh(x @ layer["kernel"] + layer["bias"])  # noqa: E731

    def ahead(x, stack):
        return cgx_jax.scan_layers(body, x, stack, "data", key=KEY, exchange="xla")

    def scanned(x, stack):
        def block(x, numbered):
            number, layer = numbered
            key = jax.random.fold_in(KEY, number)
            whole = gather(layer, "data", weights, backward=gradients, key=key, **HOW)
            return body(x, whole), None

        numbers = jnp.arange(count, dtype=jnp.int32)
        return lax.scan(jax.checkpoint(block), x, (numbers, stack))[0]

    each = [
        on_ranks(jax.grad(lambda x, s, f=f: (f(x, s) ** 2).sum(), argnums=(0, 1)), mesh)(x, stack)
        for f in (ahead, scanned)
    ]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-3), *each)


@pytest.mark.parametrize(
    ("backward", "error", "message"),
    [
        (STOCHASTIC, ValueError, "leaf 'a/w': Quantize.*key is None"),
        (4, TypeError, "4 is neither a compressor nor a policy"),
        (SharedTernGrad(64), ValueError, ".*SharedTernGrad.* sends numbers that the ranks sum"),
        (Signum(0.5), ValueError, "Signum.*state"),
        (cgx_jax.Adaptive(), ValueError, "Adaptive adapts"),
        (
            Plan.build({"a": {"w": jnp.zeros((8, 300))}}, Q4),
            ValueError,
            r"leaf 0 is 'a/w' float32\[64, 300\], but the plan has .*\[8, 300\]",
        ),
    ],
    ids=["no key", "no compressor", "sums", "state", "adapts", "plan of shards"],
)
def test_errors_begin_with_the_call(backward, error, message, mesh):
    def f(x):
        tree = {"a": {"w": x}}
        return jax.grad(lambda t: gather(t, "data", backward=backward, **HOW)["a"]["w"].sum())(tree)

    with pytest.raises(error, match=rf"^all_gather_compressed: {message}"):
        jax.eval_shape(on_ranks(f, mesh), normal(WORLD, 8, 300))


def test_a_policy_sees_whole_leaves_of_all_dtypes(mesh):
    """One plan of whole leaves serves both passes, though integers have no cotangents."""
    whole = jax.eval_shape(
        on_ranks(lambda t: lax.all_gather(t, "data", tiled=True), mesh), shards()
    )
    plan = Plan.build(jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), whole), Q4)
    by = [
        on_ranks(lambda t: gradient(lambda t: gather(t, "data", Q8, backward=b, **HOW), t), mesh)  # noqa: B023
        for b in (plan, Q4, Rules((), Q4))
    ]
    assert len({f.lower(shards()).as_text() for f in by}) == 1  # programs
