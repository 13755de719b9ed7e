"""sync_gradients: what feedback promises, in every composition and through checkpoints."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import cgx_jax
import optax_steps
from cgx_jax import Cast, ErrorFeedback, Identity, Quantize, Rule, Rules, SecondMoment
from cgx_jax.compressors import PowerSGD
from cgx_jax.policies import Stages
from cgx_jax.transforms import MomentumCorrection
from cgx_jax.transforms.precondition import Moments
from cgx_jax.transforms.sync_gradients import SyncState
from worlds import on_ranks, ranks, sharded

pytestmark = [pytest.mark.oldest, pytest.mark.usefixtures("unoptimized")]


def gradients(world, steps, seed=0, dtype=np.float32):
    """Returns gradients that differ by rank and step, of two scales; one leaf has many buckets."""
    rng = np.random.default_rng(seed)
    return {
        "w": rng.normal(size=(steps, world, 40, 50)).astype(dtype),
        "v": (1e-3 * rng.standard_cauchy(size=(steps, world, 7, 150))).astype(dtype),
        "bias": rng.normal(size=(steps, world, 30)).astype(dtype),
    }


def run(tx, grads, world, state=None, check_vma=True):
    """Every step's result [steps, ...] and the state after the last."""
    results, states = optax_steps.run(tx, ranks(world), grads, state, check_vma)
    return jax.tree.map(lambda *x: np.stack(x), *results), states[-1]


def everything(compressor):
    return Rules((), compressor, exact=[Rule(Identity(), path="bias")])


@functools.cache
def with_memory(compressor, world, memory=None, **kwargs):
    return cgx_jax.sync_gradients(
        "data",
        everything(compressor),
        memory=ErrorFeedback() if memory is None else memory,
        mesh=ranks(world),
        exchange="xla",
        **kwargs,
    )


@pytest.mark.usefixtures("optimized")
def test_feedback_changes_what_is_sent_and_its_absence_does_not():
    grads = gradients(2, 3)
    alone = cgx_jax.sync_gradients("data", everything(Quantize(2)), exchange="xla")
    plain, state = run(alone, grads, 2)
    assert state.memory == ()
    fed, _ = run(with_memory(Quantize(2), 2), grads, 2)
    np.testing.assert_array_equal(plain["w"][0], fed["w"][0])
    assert (plain["w"][1] != fed["w"][1]).any()

    def mean(own):
        return cgx_jax.pmean_compressed(own, "data", everything(Quantize(2)), exchange="xla")

    reduced = on_ranks(mean, ranks(2), out=P())
    for t in range(3):
        expected = reduced(jax.tree.map(lambda x, t=t: x[t], grads))
        np.testing.assert_array_equal(plain["w"][t], expected["w"])


@pytest.mark.slow
def test_decay_forgets():
    grads = gradients(2, 1)
    _, once = run(with_memory(Quantize(2), 2, ErrorFeedback(0.5)), grads, 2)
    silent = jax.tree.map(np.zeros_like, grads)
    got, _ = run(with_memory(Quantize(8), 2, ErrorFeedback(0.5)), silent, 2, state=once)
    half = np.asarray(once.memory[0]["w"]).mean(0) / 2
    np.testing.assert_allclose(got["w"][0], half, atol=np.abs(half).max() / 50)


def test_momentum_correction_is_exact_momentum_where_nothing_is_lost():
    grads = gradients(4, 6)
    tx = cgx_jax.sync_gradients("data", Identity(), memory=MomentumCorrection(0.9), mesh=ranks(4))
    got, _ = run(tx, grads, 4)
    trace = optax.trace(0.9)
    state = trace.init(jax.tree.map(lambda g: g[0, 0], grads))
    for t in range(6):
        mean = jax.tree.map(lambda g, t=t: g[t].mean(0), grads)
        expected, state = trace.update(mean, state)
        for name in grads:
            atol = 1e-5 * np.abs(grads[name]).max()
            np.testing.assert_allclose(got[name][t], expected[name], atol=atol)


@pytest.mark.slow
@pytest.mark.usefixtures("optimized")
def test_masked_reduces_each_half_its_own_way():
    grads = gradients(2, 2)
    mask = {"w": True, "v": False, "bias": False}
    other = {k: not v for k, v in mask.items()}
    tx = optax.chain(
        optax.masked(with_memory(Quantize(2), 2), mask),  # biases are not in it
        optax.masked(cgx_jax.sync_gradients("data", Identity()), other),
    )
    got, _ = run(tx, grads, 2)
    np.testing.assert_allclose(got["v"], grads["v"].mean(1), rtol=1e-6)
    alone, _ = run(with_memory(Quantize(2), 2), {"w": grads["w"]}, 2)
    np.testing.assert_array_equal(got["w"], alone["w"])


@pytest.mark.slow
def test_multi_steps_around_it_reduces_the_accumulated_gradients():
    """Accumulators differ between ranks, which the types of shard_map cannot express."""
    world, grads = 2, gradients(2, 4)
    inner = optax.chain(with_memory(Quantize(2), world), optax.sgd(1.0))
    tx = optax.MultiSteps(inner, every_k_schedule=2)
    accumulated = jax.tree.map(lambda g: (g[0::2] + g[1::2]) / 2, grads)
    expected, _ = run(inner, accumulated, world)
    with jax.numpy_dtype_promotion("standard"):  # optax divides by an integer
        got, _ = run(tx, grads, world, check_vma=False)
    assert not got["w"][[0, 2]].any()
    np.testing.assert_allclose(got["w"][[1, 3]], expected["w"], atol=1e-5)


def test_state_has_the_same_shapes_under_every_plan():
    like = jax.tree.map(lambda g: g[0, 0], gradients(1, 1))
    codes = Quantize(2), Quantize(2, 128, rotation=True), Cast(jnp.bfloat16), Identity()
    shapes = [jax.tree.map(jnp.shape, with_memory(c, 8).init(like)) for c in codes]
    assert all(s == shapes[0] for s in shapes)
    assert shapes[0].memory[0]["w"] == (8, 40, 50)


def test_init_inside_shard_map_and_outside_agree():
    like = jax.tree.map(lambda g: g[0, 0], gradients(1, 1))
    tx = cgx_jax.sync_gradients("data", Quantize(2), memory=ErrorFeedback())
    with pytest.raises(ValueError, match="pass mesh= to sync_gradients"):
        tx.init(like)
    other = Mesh(np.array(jax.devices()), ("model",))
    with pytest.raises(ValueError, match="axis 'data' is not in the mesh"):
        cgx_jax.sync_gradients("data", memory=ErrorFeedback(), mesh=other).init(like)
    outside = with_memory(Quantize(2), 4).init(like)
    inside = sharded(tx.init, ranks(4), P(), cgx_jax.state_specs(outside, "data"))(like)
    jax.tree.map(np.testing.assert_array_equal, outside, inside)
    for x, y in zip(jax.tree.leaves(outside), jax.tree.leaves(inside), strict=True):
        assert x.sharding.is_equivalent_to(y.sharding, x.ndim) or x.ndim == 0


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_init_takes_a_mesh_of_either_kind_of_axes_in_jit_and_outside(kind):
    kinds = (getattr(AxisType, kind), AxisType.Auto)
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=kinds)
    tx = cgx_jax.sync_gradients("data", Quantize(2), memory=ErrorFeedback(), mesh=mesh)
    like = {"w": jnp.zeros((40, 50))}
    for init in (tx.init, jax.jit(tx.init)):
        state = init(like)
        memory = state.memory[0]["w"]
        assert memory.shape == (4, 40, 50)
        assert {s.data.shape for s in memory.addressable_shards} == {(1, 40, 50)}
        assert state.step.sharding.is_fully_replicated


def test_a_memory_is_split_over_the_ranks_and_all_else_is_not():
    state = (with_memory(Quantize(2), 2).init({"w": jnp.zeros((3, 4))}), optax.EmptyState())
    specs = cgx_jax.state_specs(state, "data")
    assert specs[0] == SyncState(P(), ({"w": P("data")},), (), (), skipped=P())


def test_shardings_are_those_that_init_gives_and_place_a_state_that_is_known_by_shape():
    mesh, params = ranks(4), {"w": jnp.ones((40, 50)), "bias": jnp.ones(3)}
    sync = with_memory(Quantize(2), 4, MomentumCorrection(), precondition=SecondMoment())
    tx = optax.chain(sync, optax.sgd(1.0, 0.9))

    def init():
        return params, tx.init(params)

    shape = jax.eval_shape(init)
    shardings = cgx_jax.state_shardings(shape, "data", mesh)
    params_at, (sync_at, momentum_at) = shardings
    whole, split = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))
    moments_at = Moments({"w": whole, "bias": whole}, *[whole] * 5)
    memory_at = ({"w": split, "bias": split},) * 2
    assert sync_at == SyncState(whole, memory_at, (), moments_at, skipped=whole)
    assert set(jax.tree.leaves((params_at, momentum_at))) == {whole}
    for state in (
        jax.jit(init, out_shardings=shardings)(),
        jax.device_put(jax.tree.map(np.asarray, init()), shardings),
    ):
        assert placed(state, shardings)
        jax.tree.map(np.testing.assert_array_equal, state, init())
    assert placed(init()[1][0], sync_at)


def placed(state, shardings):
    at = jax.tree.map(lambda x, s: x.sharding.is_equivalent_to(s, x.ndim), state, shardings)
    return all(jax.tree.leaves(at))


def test_shardings_over_several_axes_count_all_their_ranks():
    mesh = Mesh(np.array(jax.devices()).reshape(2, 2, 2), ("a", "b", "model"))
    tx = cgx_jax.sync_gradients(("a", "b"), Quantize(2), memory=ErrorFeedback(), mesh=mesh)
    state = tx.init({"w": jnp.zeros((40, 50))})
    shardings = cgx_jax.state_shardings(state, ("a", "b"), mesh)
    assert shardings.memory[0]["w"].spec == P(("a", "b"))
    assert jax.device_put(state, shardings).memory[0]["w"].shape == (4, 40, 50)


@pytest.mark.parametrize("rest", [(), (None, "model")], ids=str)
def test_rows_that_lie_on_every_rank_of_explicit_axes_are_split(rest):
    mesh = jax.make_mesh((2, 2), ("data", "model"), devices=jax.devices()[:4])

    def on_mesh(world):
        state = with_memory(Quantize(2), world).init({"w": np.zeros((3, 4), np.float32)})
        at = lambda x: NamedSharding(mesh, P(None, *rest) if x.ndim else P())  # noqa: E731
        return jax.tree.map(lambda x: jax.device_put(x, at(x)), state)

    memory = cgx_jax.state_shardings(on_mesh(2), "data", mesh).memory[0]["w"]
    assert memory == NamedSharding(mesh, P("data", *rest))
    with pytest.raises(ValueError, match="is the memory of 4 ranks"):
        cgx_jax.state_shardings(on_mesh(4), "data", mesh)


def test_shardings_for_other_ranks_or_axes_are_refused():
    state = optax.chain(with_memory(Quantize(2), 8)).init({"w": jnp.zeros((3, 4))})
    says = r"memory/0/w is the memory of 8 ranks, .* 'data' .* has 4;"
    with pytest.raises(ValueError, match=says):
        cgx_jax.state_shardings(state, "data", ranks(4))
    with pytest.raises(ValueError, match=r"state_shardings: axis 'model' is not .* \('data',\)"):
        cgx_jax.state_shardings(state, "model", ranks(8))


BIT = "would grow without bound; use Quantize with 2 bits or more"
WRONG = [
    (lambda: ErrorFeedback(0), r"decay=0 is outside \(0, 1\]"),
    (lambda: ErrorFeedback(1.1), r"decay=1.1 is outside"),
    (lambda: MomentumCorrection(1.0), r"momentum=1.0 is outside \[0, 1\)"),
    (lambda: run(with_memory(Quantize(1), 2), gradients(2, 1), 2), BIT),
]


@pytest.mark.parametrize(("make", "message"), WRONG)
def test_wrong_memories_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    "seed",
    [jax.random.key(0), jnp.float32(1.5), jnp.arange(2), True, 1.5, "1"],
    ids=["key", "float array", "integers", "bool", "float", "text"],
)
@pytest.mark.parametrize("call", ["sync_gradients", "scatter_gradients"])
def test_seeds_that_are_no_integer_are_refused(call, seed):
    with pytest.raises(TypeError, match=f"(?s)^{call}: seed=.* is not an integer; pass"):
        getattr(cgx_jax, call)("data", seed=seed)


@pytest.mark.parametrize("seed", [2**32, -(2**31) - 1, np.int64(2**40)])
def test_seeds_of_more_than_32_bits_are_refused(seed):
    """Of these, JAX would keep the lower 32 bits, which may be another seed's."""
    with pytest.raises(ValueError, match=r"^sync_gradients: seed=.* does not fit into 32 bits"):
        cgx_jax.sync_gradients("data", seed=seed)
    with jax.enable_x64(True):  # where JAX keeps all bits
        cgx_jax.sync_gradients("data", seed=seed)
        with pytest.raises(ValueError, match=r"^sync_gradients: seed=.* fit into 64 bits"):
            cgx_jax.sync_gradients("data", seed=2**63)


@pytest.mark.parametrize("seed", [-1, 2**32 - 1, np.int64(3), np.array(3), jnp.uint32(3)])
def test_integers_of_any_kind_are_seeds(seed):
    cgx_jax.sync_gradients("data", seed=seed)
    jax.eval_shape(lambda s: cgx_jax.sync_gradients("data", seed=s).init(jnp.ones(3)), np.int32(3))


@pytest.mark.parametrize("make", [cgx_jax.sync_gradients, cgx_jax.transforms.scatter_gradients])
def test_gradients_that_jax_has_summed_are_refused_though_all_leaves_are_exact(make):
    """Under check_vma, a replicated parameter's gradient is the sum over the ranks."""
    tx = make("data", Identity(), mesh=ranks(4), exchange="xla")

    def step(x, varying):
        v, w = (
            jax.lax.pcast(jnp.ones(4), "data", to="varying") if vary else jnp.ones(4)
            for vary in varying
        )
        grads = jax.grad(lambda p: (x * p["v"] * p["w"]).sum())({"v": v, "w": w})
        grads |= {"frozen": jnp.zeros_like(x), "none": jnp.zeros((0, 3))}
        return tx.update(grads, tx.init(grads))[0]["w"]

    x = np.ones((4, 4), np.float32)
    whole = on_ranks(functools.partial(step, varying=(True, True)), ranks(4))
    np.testing.assert_array_equal(np.ravel(whole(x)), 1)
    for varying in ((False, False), (True, False)):
        says = r"'w' does not vary over axis 'data'|'v' does not vary.*Either make the param"
        with pytest.raises(ValueError, match=says):
            on_ranks(functools.partial(step, varying=varying), ranks(4))(x)


@pytest.mark.parametrize("then", [lambda g: g * 2, lambda g: g.astype(jnp.bfloat16)])
def test_scalars_that_jax_has_summed_are_refused_though_an_inner_jit_hides_it(then):
    tx = cgx_jax.sync_gradients("data", Identity(), mesh=ranks(4), exchange="xla")

    def step(x):
        grad = jax.grad(lambda s: (x * s).sum())(jnp.ones(()))
        return jax.jit(lambda g: tx.update(then(g), tx.init(jnp.ones(())))[0])(grad)

    with pytest.raises(ValueError, match=r"sync_gradients: .* does not vary over axis 'data'"):
        on_ranks(step, ranks(4))(np.ones((4, 4), np.float32))


FROZEN = {  # what becomes of the gradients before they are reduced
    "as they are": lambda grads: grads,
    "scaled": lambda grads: jax.tree.map(lambda g: g / 2 * 2, grads),
    "cast": lambda grads: jax.tree.map(lambda g: g.astype(jnp.bfloat16).astype(g.dtype), grads),
    "added up": lambda grads: jax.tree.map(lambda a, b: (a + b) / 2, grads, grads),
    "clipped": lambda grads: jax.tree.map(lambda g: jnp.clip(g, -9, 9), grads),
    "of NumPy": lambda grads: grads | {"frozen": np.zeros(4, np.float32)},
}


@pytest.mark.parametrize("specs", [False, True], ids=["whole", "specs"])
@pytest.mark.parametrize(
    "policy",
    [Identity(), Rules((), Quantize(8), exact=()), Stages((Identity(), Cast(jnp.float16)), (9,))],
    ids=["exact", "8 bits", "stages"],
)
@pytest.mark.parametrize("then", FROZEN.values(), ids=FROZEN)
@pytest.mark.quick("*-8 bits-whole", "as they are-exact-specs", "cast-stages-whole")
def test_zeros_of_frozen_parameters_need_not_vary_but_sums_of_jax_are_seen(then, policy, specs):
    mesh = Mesh(np.reshape(jax.devices()[:8], (4, 2)), ("data", "model"))
    like = {"frozen": np.ones(4, np.float32), "w": np.ones(4, np.float32)}
    at = {"frozen": P("model"), "w": P()} if specs else None
    tx = cgx_jax.sync_gradients("data", policy, mesh=mesh, exchange="xla", specs=at)

    def step(params, x, state, cast):
        if cast:
            params = params | {"w": jax.lax.pcast(params["w"], "data", to="varying")}
        loss = lambda p: (x * p["w"] * jax.lax.stop_gradient(p["frozen"])).sum()  # noqa: E731
        return tx.update(then(jax.grad(loss)(params)), state)[0]

    def run(cast):
        f = functools.partial(step, cast=cast)
        f = sharded(f, mesh, (P(), P("data"), P()), axis_names={"data"})
        with jax.set_mesh(mesh):
            return f(like, np.ones((4, 4), np.float32), tx.init(like))

    means = run(True)
    np.testing.assert_array_equal(means["w"], 1)
    np.testing.assert_array_equal(means["frozen"], 0)
    with pytest.raises(ValueError, match="sync_gradients: leaf 'w' does not vary over axis 'data'"):
        run(False)


@pytest.mark.parametrize(
    "options",
    [{"memory": ErrorFeedback()}, {"precondition": SecondMoment()}, {"policy": PowerSGD(2)}],
    ids=["memory", "moments", "codes"],
)
def test_a_state_that_devices_of_a_rank_would_not_share_is_refused(options):
    mesh = Mesh(np.reshape(jax.devices()[:4], (2, 2)), ("data", "model"))
    options = {"policy": Quantize(4), "mesh": mesh, "exchange": "xla"} | options
    tx = cgx_jax.sync_gradients("data", **options)
    init = jax.shard_map(tx.init, mesh=mesh, in_specs=P(None, "model"), out_specs=P("data"))
    remedy = r"axis_names=\{'data'\}.*pass specs="
    if isinstance(options["policy"], PowerSGD):
        remedy = "use a fixed policy of other compressors"
    message = rf"^sync_gradients: .*over axis 'model', too.*{remedy}"
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(init, {"w": jnp.zeros((64, 64))})


@pytest.mark.parametrize("check_vma", [True, False])
def test_a_leaf_that_is_no_array_is_named(check_vma):
    mesh = ranks(4)
    tx = cgx_jax.sync_gradients("data", Identity(), mesh=mesh)
    state = tx.init({"w": jnp.ones((8, 8))})
    update = lambda w: tx.update({"w": w, "act": "gelu"}, state)[0]["w"]  # noqa: E731
    with pytest.raises(
        TypeError, match=r"^sync_gradients: leaf 'act' is 'gelu', which is no array"
    ):
        sharded(update, mesh, P("data"), check_vma=check_vma)(jnp.ones((32, 8)))
