"""Every reduction under every transformation, in every public call that allows it."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import cgx_jax
from cases import FEW, LOSSY, PAIRS, every
from cgx_jax import Quantize, Rules
from cgx_jax.compressors.base import CodedLeaf
from cgx_jax.exchanges import Mpi
from cgx_jax.reductions import GatherSum
from cgx_jax.reductions.named import named
from hlo import collectives
from toys import Difference, Largest, Stateless, Steps, Vote
from worlds import normal, on_ranks, ranks, sharded

KEY = jax.random.key(11)
SHAPE = (12, 50)
# One code for each reduction, without state.
WAYS = {
    "scatter_gather": Steps(),
    "gather_sum": Steps(),
    "gather_sum of Quantize": Quantize(8, 64),
    "ring": Steps(),
    "ring of Quantize": Quantize(8, 64),
    "tree": Steps(),
    "tree of Quantize": Quantize(8, 64),
    "sum_rounds": Stateless(),
    "majority": Vote(),
}
# Of the two reductions with partial sums, the quick tests try only one.
QUICK_WAYS = [
    pytest.param(n, marks=pytest.mark.slow if n in ("tree", "ring of Quantize") else ())
    for n in WAYS
]


def how_of(name):
    """Returns the reduction that a row of WAYS names, or None for the compressor's first."""
    return None if name == "majority" else name.split()[0]


by_xla = functools.partial(cgx_jax.psum_compressed, axis_name="data", exchange="xla")


def psum(name, x, axis="data", **options):
    return by_xla(x, axis_name=axis, compressor=WAYS[name], reduction=how_of(name), **options)


def within(name, got, x, divisor=1):
    reduction = named("test", how_of(name) or "scatter_gather")
    bound = np.asarray(jax.jit(lambda v: reduction.error_bound(WAYS[name], v, divisor))(x))
    exact = np.asarray(x, np.float64).sum(0) / divisor
    assert (np.abs(np.asarray(got) - exact) <= bound + 1e-5).all()


def summed_by(f, mesh, **options):
    """Returns f of each rank's own values, typed as the same on all ranks."""
    return on_ranks(f, mesh, out=P(), **options)


@functools.cache
def summed(name, mesh):
    return summed_by(functools.partial(psum, name), mesh)


def on_explicit_axes(call, x):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Explicit,))
    return summed_by(call, mesh)(jax.device_put(x, NamedSharding(mesh, P("data"))))


BOTH = ("data", "model")
# f(call, one, two, x): a rank's result of `call`; the meshes have one axis and two.
TRANSFORMED = {
    "explicit axes": lambda call, one, two, x: on_explicit_axes(call, x),
    "eagerly": lambda call, one, two, x: jax.shard_map(
        lambda v: call(v[0]), mesh=one, in_specs=P("data"), out_specs=P()
    )(x),
    "without check_vma": lambda call, one, two, x: summed_by(call, one, check_vma=False)(x),
    "pmap": lambda call, one, two, x: jax.pmap(call, axis_name="data")(x)[5],
    "vmap over the axis": lambda call, one, two, x: jax.jit(jax.vmap(call, axis_name="data"))(x)[5],
    "vmap over two axes": lambda call, one, two, x: jax.jit(
        jax.vmap(jax.vmap(lambda v: call(v, BOTH), axis_name="model"), axis_name="data")
    )(x.reshape(4, 2, *SHAPE))[1, 1],
    "two axes": lambda call, one, two, x: summed_by(lambda v: call(v, BOTH), two)(x),
    "two axes in another order": lambda call, one, two, x: summed_by(
        lambda v: call(v, BOTH[::-1]), two
    )(x.reshape(2, 4, *SHAPE).swapaxes(0, 1).reshape(x.shape)),
    "scan": lambda call, one, two, x: summed_by(
        lambda v: lax.scan(lambda c, _: (call(v + 0 * c), None), call(v), length=2)[0], one
    )(x),
    "remat": lambda call, one, two, x: summed_by(jax.checkpoint(call), one)(x),
    "vmap inside": lambda call, one, two, x: summed_by(
        lambda v: jax.vmap(call)(jnp.stack([v, 2 * v]))[0], one
    )(x),
}


@pytest.mark.parametrize("way", TRANSFORMED)
@pytest.mark.parametrize("name", WAYS)
@pytest.mark.quick(
    *(f"ring-{way}" for way in ("vmap over two axes", "vmap inside", "scan", "*order")),
    *(f"scatter_gather-{way}" for way in ("explicit axes", "eagerly", "pmap")),
)
def test_transformations_agree_bit_for_bit(name, way, mesh, mesh_2d):
    x = normal(8, *SHAPE)
    want = summed(name, mesh)(x)
    within(name, want, x)
    # Rounds add up numbers, and the last bits of batched products and sums may differ.
    tolerance = 1e-5 if name == "sum_rounds" else 0
    got = TRANSFORMED[way](functools.partial(psum, name), mesh, mesh_2d, x)
    np.testing.assert_allclose(got, want, tolerance, tolerance)


@pytest.mark.parametrize(
    "world", [1, 3, *(pytest.param(w, marks=pytest.mark.slow) for w in (2, 4, 8))]
)
@pytest.mark.parametrize("name", QUICK_WAYS)
def test_every_world_size(name, world):
    x = normal(world, *SHAPE)
    got = on_ranks(functools.partial(psum, name), ranks(world))(x)
    assert (np.asarray(got) == np.asarray(got)[:1]).all()  # every rank the same bits
    if world == 1:
        np.testing.assert_array_equal(got, x)
    else:
        within(name, got[0], x)


@pytest.mark.parametrize("how", ["scatter_gather", "gather_sum", "ring", "tree"])
def test_the_bound_of_a_mean_is_that_of_the_sum_over_the_number(how):
    x = normal(4, *SHAPE)
    bound = functools.partial(named("test", how).error_bound, Quantize(4, 64), jnp.asarray(x))
    np.testing.assert_allclose(4 * bound(4), bound(1), rtol=1e-5)


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("name", QUICK_WAYS)
@pytest.mark.quick("scatter_gather-*", "sum_rounds-True", "ring-False", "majority-True")
def test_groups_reduce_apart(name, check_vma, mesh):
    groups, x = [[0, 3, 5, 6], [7, 1, 4, 2]], normal(8, *SHAPE)
    call = functools.partial(psum, name, axis_index_groups=groups)
    got = np.asarray(on_ranks(call, mesh, check_vma=check_vma)(x))
    for group in groups:
        assert (got[group] == got[group[0]]).all()
        within(name, got[group[0]], x[group])


@pytest.mark.parametrize("name", QUICK_WAYS)
def test_the_derivative_is_that_of_lax(name, mesh):
    for got, want in zip(derivatives(name, mesh), derivatives(None, mesh), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-6)


@functools.cache
def derivatives(name, mesh):
    """The gradient and the tangent of a sum, of lax.psum without a name."""
    x, t = normal(8, *SHAPE), normal(8, *SHAPE, seed=1)
    weights = normal(*SHAPE, seed=2)
    f = functools.partial(psum, name) if name else lambda v: lax.psum(v, "data")

    def both(v, u):
        gradient = jax.grad(lambda w: jnp.vdot(weights, f(w[0])))(v)
        return gradient, jax.jvp(lambda w: f(w[0]), (v,), (u,))[1]

    return sharded(both, mesh, P("data"), (P("data"), P()))(x, t)


def sent_in(text, world):
    """Returns the bytes that a rank sends in a compiled program's collectives."""
    share = (world - 1) / world
    shares = {"all-reduce": 2 * share, "all-to-all": share, "all-gather": share}
    shares["collective-permute"] = 1
    return sum(sent.nbytes * shares[sent.op] for sent in collectives(text))


@pytest.mark.usefixtures("unoptimized")
@pytest.mark.parametrize("name", every(PAIRS, quick=FEW))
@pytest.mark.quick(
    "quantize 4, ring",
    "top k, gather_sum",
    "random k, sum_rounds",
    "stochastic, tree",
    "voting toy, scatter_gather",
)
def test_the_stated_bytes_are_those_of_the_program(name, mesh):
    compressor, how = PAIRS[name]
    if LOSSY[name.rpartition(", ")[0]].stateful:
        compressor = Stateless() if how == "sum_rounds" else Steps()
    x = normal(8, 24, 700)
    call = functools.partial(by_xla, compressor=compressor, key=KEY, reduction=how)
    text = summed_by(call, mesh).lower(x).compile().as_text()
    leaf = CodedLeaf(compressor, (24, 700), np.dtype(np.float32), 0)
    stated = named("test", how).bytes_sent((leaf,), 8)
    assert stated == pytest.approx(sent_in(text, 8), rel=1e-6)
    # XLA for CPUs does not order a loop's collectives with others, which can exhaust its threads.
    entry = re.search(r"^ENTRY %?([\w.-]+)", text, re.M)[1]
    assert {sent.computation for sent in collectives(text)} == {entry}


def test_between_two_ranks_a_tree_is_the_sum_of_whole_payloads():
    x = normal(2, *SHAPE)
    tree, whole = (summed(f"{n} of Quantize", ranks(2))(x) for n in ("tree", "gather_sum"))
    np.testing.assert_array_equal(tree, whole)


@pytest.mark.parametrize("name", ["ring of Quantize", "tree of Quantize"])
def test_partial_sums_of_three_ranks_under_vmap_are_those_of_devices(name):
    x, call = normal(3, *SHAPE), functools.partial(psum, name)
    got = jax.jit(jax.vmap(call, axis_name="data"))(x)
    np.testing.assert_array_equal(got, on_ranks(call, ranks(3))(x))


@pytest.mark.parametrize("rounding", ["stochastic", "correlated"])
@pytest.mark.parametrize("name", ["ring", "tree"])
def test_partial_sums_are_rounded_with_noise_of_their_own(name, rounding):
    """If hops or levels shared their noise, their errors would add up."""
    x, code = normal(4, 64, 512), Quantize(4, 512, rounding)
    call = functools.partial(by_xla, compressor=code, key=KEY, reduction=name)
    off = np.asarray(summed_by(call, ranks(4))(x)) - np.asarray(x, np.float64).sum(0)
    alone = np.asarray(code.approximate(x[0], key=KEY)) - x[0]
    # A sum of k ranks is sqrt(k) times as large, and encoding it loses sqrt(k) times as much.
    squares = {"ring": 1 + 2 + 3 + 4, "tree": 4 * 1 + 2 * 2}[name]
    assert np.linalg.norm(off) / np.linalg.norm(alone) == pytest.approx(squares**0.5, rel=0.1)


@pytest.mark.parametrize("rounding", ["stochastic", "correlated"])
def test_errors_of_random_rounding_average_out_in_a_sum_of_whole_payloads(rounding, mesh):
    """This also holds if all ranks have the same values; errors of shared noise would not."""
    x = np.broadcast_to(normal(64, 512), (8, 64, 512))
    code = Quantize(3, 512, rounding)
    call = lambda v: cgx_jax.pmean_compressed(  # noqa: E731
        v, "data", code, key=KEY, exchange="xla", reduction="gather_sum"
    )
    off = np.linalg.norm(np.asarray(summed_by(call, mesh)(x)) - x[0])
    alone = np.linalg.norm(np.asarray(code.approximate(x[0], key=KEY)) - x[0])
    assert 0.25 < off / alone < 0.45  # 1 / sqrt(8)


def hook(tree, *args, **options):
    """The gradient by `reduce_in_backward` of a loss whose gradient is `tree`."""

    def loss(p):
        leaves = jax.tree.leaves(cgx_jax.reduce_in_backward(p, *args, **options))
        return sum(map(jnp.vdot, leaves, jax.tree.leaves(tree)))

    return jax.grad(loss)(tree)


def update(tree, *args, **options):
    tx = cgx_jax.sync_gradients(*args, **options)
    return tx.update(tree, tx.init(tree))[0]


CALLS = {
    "psum_compressed": cgx_jax.psum_compressed,
    "pmean_compressed": cgx_jax.pmean_compressed,
    "reduce_in_backward": hook,
    "sync_gradients": update,
}


@pytest.mark.usefixtures("unoptimized")
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(
    "name", ["scatter_gather", "gather_sum", "ring", "tree", "sum_rounds", "majority"]
)
@pytest.mark.quick(
    "ring-psum_compressed",
    "sum_rounds-pmean_compressed",
    "gather_sum-reduce_in_backward",
    "tree-sync_gradients",
)
def test_every_call_takes_every_reduction(call, name, mesh):
    policy = Rules((), WAYS[name], exact=())
    tree = {"a": normal(8, *SHAPE), "b": normal(8, 7, 9, seed=1)}
    options = {"exchange": "xla", "reduction": how_of(name)}
    run = lambda t: CALLS[call](t, "data", policy, **options)  # noqa: E731
    got = summed_by(run, mesh, check_vma=False)(tree)
    divisor = 8 if call in ("pmean_compressed", "sync_gradients") else 1
    for k, x in tree.items():
        within(name, got[k], x, divisor)


@pytest.mark.parametrize("half", ["psum_scatter", "all_gather"])
@pytest.mark.parametrize("compressor", [Steps(), Largest(1.0)], ids=lambda c: type(c).__name__)
def test_halves_take_codes_of_bytes(half, compressor, mesh):
    x = normal(8, 8, 40)
    ours = functools.partial(getattr(cgx_jax, f"{half}_compressed"), exchange="xla")
    got = on_ranks(lambda v: ours(v, "data", compressor), mesh)(x)
    want = on_ranks(lambda v: getattr(lax, half)(v, "data"), mesh)(x)
    np.testing.assert_allclose(got, want, atol=8 / 256)


def test_a_half_refuses_a_code_that_is_summed(mesh):
    f = lambda v: cgx_jax.psum_scatter_compressed(v, "data", Stateless())  # noqa: E731
    with pytest.raises(ValueError, match=r"psum_scatter_compressed: .* sends numbers"):
        jax.eval_shape(on_ranks(f, mesh), normal(8, 8, 40))


class OwnZeros(Stateless):
    """Its total is right, but typed as varying over the ranks."""

    def rounds(self, x, state, *, key, world):
        end = yield from super().rounds(x, state, key=key, world=world)
        return end._replace(total=end.total + jnp.zeros_like(x))


def test_a_total_that_is_not_typed_alike_is_refused_with_the_remedy(mesh):
    f = functools.partial(by_xla, compressor=OwnZeros())
    with pytest.raises(ValueError, match=r"psum_compressed: .* over axis 'data'.*zeros_like"):
        jax.eval_shape(summed_by(f, mesh), normal(8, *SHAPE))
    summed_by(f, mesh, check_vma=False)(normal(8, *SHAPE))


class Reversed(GatherSum):
    """A third party's reduction: like `GatherSum`, for all codes that can be sent whole."""

    shorthand = "reversed"

    def refusal(self, compressor):
        return None if "gather_sum" in compressor.reductions else "it cannot be sent whole"


def test_a_reduction_of_ones_own(mesh):
    x = normal(8, *SHAPE)

    def call(how, code=Steps()):  # noqa: B008
        f = functools.partial(by_xla, compressor=code, reduction=how)
        return summed_by(f, mesh)(x)

    np.testing.assert_array_equal(call(Reversed()), call("gather_sum"))
    says = r"psum_compressed: reduction='reversed' does not suit .*cannot be sent"
    with pytest.raises(ValueError, match=says):
        call(Reversed(), Vote())


WRONG = {
    "a chunked reduction of a sparse code": (
        {"compressor": Largest(), "reduction": "scatter_gather"}, ValueError,
        r"'scatter_gather' does not suit Largest.*: it allows gather_sum"
    ),
    "rounds of a code of bytes": (
        {"compressor": Quantize(4), "reduction": "sum_rounds"}, ValueError,
        r"'sum_rounds' does not suit Quantize.* it allows scatter_gather, gather_sum"
    ),
    "an unknown name": (
        {"compressor": Quantize(4), "reduction": "butterfly"}, ValueError,
        r"reduction='butterfly' is unknown; use one of \['scatter_gather', 'gather_sum', 'ring', "
    ),
    "partial sums of votes": (
        {"compressor": Vote(), "reduction": "tree"}, ValueError,
        r"'tree' does not suit Vote.*: it needs the same weight for every rank"
    ),
    "pairs over an exchange without": (
        {"compressor": Quantize(4), "exchange": Mpi(), "reduction": "ring"}, ValueError,
        r"exchange='mpi' lacks 'permute', which the reduction 'ring' needs; .*xla"
    ),
    "no reduction": ({"compressor": Quantize(4), "reduction": 3}, TypeError,
                     r"reduction=3 is not a reduction; pass one of"),
    "no exchange": ({"compressor": Quantize(4), "exchange": 3}, TypeError,
                    r"exchange=3 is not an exchange; pass one of .* cgx_jax.exchanges.Mpi"),
    "an exchange that is not here": ({"compressor": Quantize(4), "exchange": "mpi"}, ValueError,
                                     r"exchange='mpi' does not work here"),
    "sums over an exchange of bytes": (
        {"compressor": Stateless(), "exchange": Mpi()}, ValueError,
        r"exchange='mpi' lacks 'sum', which the reduction 'sum_rounds' needs; .*xla"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("call", ["psum_compressed", "pmean_compressed"])
def test_a_wrong_call_is_refused_under_its_own_name(call, name, mesh):
    options, error, says = WRONG[name]
    f = lambda v: getattr(cgx_jax, call)(v, "data", **options)  # noqa: E731
    with pytest.raises(error, match=rf"^{call}: .*{says}"):
        jax.eval_shape(summed_by(f, mesh), normal(8, 64, 64))


class ChunkedDifference(Difference):
    reductions = ("scatter_gather",)


def test_state_is_of_whole_leaves_where_chunks_are_encoded(mesh):
    """In the second step each rank sends what has changed in its own leaf since the first."""
    tx = cgx_jax.sync_gradients("data", ChunkedDifference(), exchange="xla")
    x = np.clip(normal(16, 30, 40), -2, 2).reshape(2, 8, 30, 40)

    def steps(first, second):
        _, state = tx.update(first[0], tx.init(first[0]))
        return tx.update(second[0], state)[0]

    f = sharded(steps, mesh, (P("data"), P("data")), check_vma=False)
    change = (x[1] - x[0]).mean(0)
    np.testing.assert_allclose(f(*x), change, atol=2 * ChunkedDifference().step)
