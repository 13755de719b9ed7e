"""A state belongs to the leaves that it was made for, in every way that a program passes it on."""

import dataclasses
import functools
import pickle
import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx, serialization
from flax.core import FrozenDict
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import cgx_jax
from cgx_jax import (
    ErrorFeedback,
    Plan,
    Quantize,
    Rule,
    Rules,
    SecondMoment,
    resize_state,
    transforms,
)
from cgx_jax.compressors import DGC, Identity, PowerSGD, Signum, Threshold
from cgx_jax.policies import Adaptive, Stages
from cgx_jax.transforms import MomentumCorrection, local_params, local_steps, scatter_gradients
from worlds import RANKS, sharded, with_state

pytestmark = pytest.mark.usefixtures("unoptimized")

WORLD = 8


def sync(mesh, compressor=None, memory=None, **options):
    policy = Rules((), compressor or Quantize(4), exact=())
    options = {"mesh": mesh, "exchange": "xla", **options}
    return cgx_jax.sync_gradients("data", policy, memory=memory, **options)


def scatter(mesh, **options):
    return scatter_gradients("data", Quantize(4), mesh=mesh, exchange="xla", **options)


def local(mesh, optimizer=None):
    optimizer = optimizer or optax.sgd(0.1, 0.9)
    return local_steps(optimizer, "data", Quantize(4), every=2, mesh=mesh, exchange="xla")


# Every kind of state that holds something of each leaf.
KINDS = {
    "feedback": lambda mesh: sync(mesh, memory=ErrorFeedback()),
    "momentum": lambda mesh: sync(mesh, memory=MomentumCorrection(learning_rate=rate)),
    "rooms": lambda mesh: sync(mesh, Threshold(0.5), ErrorFeedback()),
    "units": lambda mesh: sync(mesh, precondition=SecondMoment()),
    "shared codes": lambda mesh: sync(mesh, PowerSGD(2)),
    "codes of a rank": lambda mesh: sync(mesh, Signum()),
    "shards' feedback": lambda mesh: scatter(mesh, memory=ErrorFeedback()),
    "shards' units": lambda mesh: scatter(mesh, precondition=SecondMoment()),
    "local": local,
}


def zeros(shapes, dtype=jnp.float32):
    is_shape = lambda x: type(x) is tuple and all(isinstance(n, int) for n in x)  # noqa: E731
    return jax.tree.map(lambda s: np.zeros(s, jnp.dtype(dtype)), shapes, is_leaf=is_shape)


def stepper(tx, mesh, state):
    """A step in which all ranks have the same gradients."""
    out = RANKS if "scatter" in tx.update.__module__ else P()
    step = lambda g, s: tx.update(g, s, g)  # noqa: E731
    return jax.jit(with_state(step, mesh, state, P(), out=out, check_vma=False))


class First(NamedTuple):
    b: object
    a: object


SQUARE, FLAT = (64, 64), (1, 64)
# What the state was made for, what the gradients are, and what the message names of both.
OTHERS = {
    "renamed": ({"Dense_0": {"kernel": SQUARE}}, {"Up": {"kernel": SQUARE}}, "Dense_0", "Up"),
    "renamed in order": (
        {"a": SQUARE, "b": SQUARE},
        {"b": SQUARE, "c": SQUARE},
        "leaf 'a",
        "leaf 'c'",
    ),
    "of other shapes": ({"w": (8, 64)}, {"w": SQUARE}, r"\b(8|80)\b", r"\[64, 64\]"),
    "that broadcast": ({"w": FLAT}, {"w": SQUARE}, r"\b(1|80)\b", r"\[64, 64\]"),
    "in another order": (First(SQUARE, SQUARE), {"a": SQUARE, "b": SQUARE}, "'b'", "'a'"),
    "more": ({"a": SQUARE}, {"a": SQUARE, "b": SQUARE}, "no such leaf", "leaf 'b'"),
    "fewer": ({"a": SQUARE, "b": SQUARE}, {"a": SQUARE}, "leaf 'b", "no such leaf"),
    "deeper": ({"a": SQUARE}, {"a": {"w": SQUARE}}, "leaf 'a", "leaf 'a/w'"),
    "none": ({}, {"a": SQUARE}, "no such leaf", "leaf 'a'"),
    "some for none": ({"a": SQUARE}, {}, "leaf 'a", "no such leaf"),
}


@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_leaves_that_the_state_was_not_made_for_are_refused(kind, other, mesh):
    made_for, given, theirs, ours = OTHERS[other]
    if kind == "shared codes" and other == "of other shapes":
        pytest.skip("PowerSGD keeps the right factor, which may start from any matrix of its shape")
    tx = KINDS[kind](mesh)
    state = jax.eval_shape(tx.init, zeros(made_for))
    name = {"s": "scatter_gradients", "l": "local_steps"}.get(kind[0] if "'" in kind else "", "")
    name = "local_steps" if kind == "local" else name or "sync_gradients"
    with pytest.raises(ValueError, match=rf"^{name}: the state ") as error:
        jax.eval_shape(stepper(tx, mesh, state), zeros(given), state)
    told = str(error.value)
    if "holds nothing" not in told:
        assert re.search(theirs, told), told
    assert re.search(ours, told), told


@pytest.mark.parametrize("kind", [k for k in KINDS if "codes" not in k and k != "local"])
def test_other_containers_with_the_same_paths_are_the_same_leaves(kind, mesh):
    tx = KINDS[kind](mesh)
    params = FrozenDict(zeros({"a": {"w": SQUARE}}))
    state = jax.eval_shape(tx.init, {"a": params["a"], "n": None})
    got, after = jax.eval_shape(stepper(tx, mesh, state), params, state)
    assert jax.tree.structure(got) == jax.tree.structure(params)
    assert jax.tree.structure(after) == jax.tree.structure(state)


@pytest.mark.parametrize("kind", [*KINDS, "statistics"])
def test_every_array_of_a_state_can_be_donated(kind, mesh):
    adapts = lambda mesh: cgx_jax.sync_gradients("data", Adaptive())  # noqa: E731
    state = KINDS.get(kind, adapts)(mesh).init(zeros({"a": SQUARE, "b": SQUARE}))
    places = [x.addressable_data(0).unsafe_buffer_pointer() for x in jax.tree.leaves(state)]
    assert len(set(places)) == len(places)


@pytest.mark.parametrize("kind", KINDS)
def test_an_empty_tree_comes_back_with_its_state(kind, mesh):
    tx = KINDS[kind](mesh)
    state = tx.init({})
    got, after = stepper(tx, mesh, state)({}, state)
    assert got == {}
    assert jax.tree.structure(after) == jax.tree.structure(state)


@pytest.mark.parametrize("kind", [k for k in KINDS if "units" not in k and "shared" not in k])
def test_a_state_that_is_not_split_over_the_ranks_is_refused(kind, mesh):
    tx, params = KINDS[kind](mesh), zeros({"w": SQUARE})
    f = jax.shard_map(tx.update, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    with pytest.raises(ValueError, match=r"^\w+: the memory has 8 rows here, .*state_specs"):
        jax.eval_shape(f, params, jax.eval_shape(tx.init, params))


def test_a_plan_of_other_leaves_is_refused_by_init(mesh):
    tx = cgx_jax.sync_gradients("data", Plan.build(zeros({"b": SQUARE}), PowerSGD(2)), mesh=mesh)
    for params in ({"a": SQUARE}, {"b": SQUARE, "c": SQUARE}):
        with pytest.raises(ValueError, match=r"^sync_gradients: the plan was built for other leav"):
            tx.init(zeros(params))


# --- a state that lost its types.


def plain(x):
    """What a checkpoint library returns without a target."""
    return serialization.msgpack_restore(serialization.to_bytes(x))


CALLS = {
    "state_specs": lambda s, mesh: cgx_jax.state_specs(s, "data"),
    "state_shardings": lambda s, mesh: cgx_jax.state_shardings(s, "data", mesh),
    "resize_state": lambda s, mesh: resize_state(s, 4),
    "metrics": lambda s, mesh: transforms.metrics(s),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("kind", [*KINDS, "nothing"])
def test_a_state_restored_without_a_target_is_refused_by(call, kind, mesh):
    tx = KINDS.get(kind, sync)(mesh)
    state = {"params": {"w": np.ones(3)}, "opt": plain((tx.init(zeros({"w": SQUARE})), ()))}
    kept = "LocalState" if kind == "local" else "SyncState"
    says = rf"^{call}: the state has a dict in the place of {kept}, .*Restore with a target"
    with pytest.raises(ValueError, match=says):
        CALLS[call](state, mesh)


@pytest.mark.parametrize("lost", [plain, list, lambda x: None, lambda x: plain((x,))["0"]])
@pytest.mark.parametrize("kind", KINDS)
def test_update_refuses_a_state_that_lost_its_types(kind, lost, mesh):
    tx, params = KINDS[kind](mesh), zeros({"w": SQUARE})
    with pytest.raises(ValueError, match=r"^\w+: the state has a .* in the place of .*State, "):
        tx.update(params, lost(tx.init(params)), params)
    with pytest.raises(ValueError, match=r"^local_params: "):
        local_params(params, lost(local(mesh).init(params)))


PARTS = {"memory": "feedback", "moments": "units", "codes": "codes of a rank"}


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("lost", [plain, list], ids=["dict", "list"])
def test_update_refuses_a_part_that_lost_its_types(part, lost, mesh):
    tx, params = KINDS[PARTS[part]](mesh), zeros({"w": SQUARE})
    state = tx.init(params)
    state = state._replace(**{part: lost(getattr(state, part))})
    with pytest.raises(ValueError, match=r"^sync_gradients: .* in the place of .*target"):
        tx.update(params, state)


# --- how programs pass a state on.


def orbax(state, like, path):
    checkpoint = pytest.importorskip("orbax.checkpoint")
    with checkpoint.StandardCheckpointer() as files:
        files.save(path / "state", state)
        files.wait_until_finished()
        return files.restore(path / "state", like)


PASSED = {
    "pickle": lambda state, like, path: pickle.loads(pickle.dumps(jax.device_get(state))),
    "flax": lambda state, like, path: serialization.from_bytes(
        jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), like), serialization.to_bytes(state)
    ),
    "orbax": orbax,
    "jit": lambda state, like, path: jax.jit(lambda s: s, donate_argnums=0)(state),
    "resize_state": lambda state, like, path: resize_state(state, WORLD),
}


@pytest.mark.parametrize("way", PASSED)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.quick("momentum-flax", "rooms-orbax", "shared codes-resize_state", "local-pickle")
def test_a_state_goes_on_after(way, kind, mesh, tmp_path):
    tx, params = KINDS[kind](mesh), zeros({"a": {"w": SQUARE}, "b": (64,)})
    state = tx.init(params)
    at = cgx_jax.state_shardings(state, "data", mesh)
    step = stepper(tx, mesh, state)
    grads = jax.tree.map(lambda x: x + 0.25, params)
    _, state = step(grads, jax.device_put(state, at))
    expected = jax.device_get(step(grads, state))
    like = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
        jax.eval_shape(tx.init, params),
        at,
    )
    again = jax.device_put(PASSED[way](state, like, tmp_path), at)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-6), step(grads, again), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_tree_map_params_maps_what_is_like_the_parameters_and_only_that(kind, mesh):
    tx = optax.chain(KINDS[kind](mesh), optax.scale_by_adam())
    params = zeros({"a": {"w": SQUARE}, "b": (64,)})
    state = tx.init(params)
    for policy_state in (state, jax.eval_shape(tx.init, params)):
        same = optax.tree_utils.tree_map_params(tx, lambda x, p: x, policy_state, params)
        assert jax.tree.structure(same) == jax.tree.structure(state)
    marked = optax.tree_utils.tree_map_params(
        tx, lambda x, p: "param", state, params, transform_non_params=lambda x: "other"
    )
    sync_state, adam = marked
    if hasattr(sync_state, "fragments"):
        sync_state = sync_state.fragments[0].sync
    lines, *rest = sync_state.moments or ((), ())
    assert set(jax.tree.leaves((adam.mu, sync_state.memory, lines))) == {"param"}
    assert set(jax.tree.leaves((sync_state.step, sync_state.codes, rest))) == {"other"}


def test_tree_map_params_leaves_an_adaptive_policy_without_a_tree(mesh):
    tx = cgx_jax.sync_gradients("data", Adaptive(), mesh=mesh)
    params = zeros({"a": {"w": SQUARE}})
    state = tx.init(params)
    same = optax.tree_utils.tree_map_params(tx, lambda x: x, state)
    assert jax.tree.structure(same) == jax.tree.structure(state)
    fresh = cgx_jax.sync_gradients("data", Adaptive(), mesh=mesh)
    optax.tree_utils.tree_map_params(fresh, lambda x: x, state)
    assert jax.tree.structure(fresh.init(params)) == jax.tree.structure(state)


def test_statistics_of_other_leaves_are_refused(mesh):
    one, two = (cgx_jax.sync_gradients("data", Adaptive(), mesh=mesh) for _ in range(2))
    state = one.init(zeros({"a": SQUARE}))
    grads = zeros({"a": SQUARE, "b": SQUARE})
    with pytest.raises(ValueError, match=r"^sync_gradients: the state holds statistics of shapes"):
        jax.eval_shape(stepper(two, mesh, state), grads, state)
    plain = sync(mesh).init(grads)
    with pytest.raises(ValueError, match=r"statistics of shapes \[\], but"):
        jax.eval_shape(stepper(two, mesh, plain), grads, plain)


@pytest.mark.parametrize("form", [lambda o: o, nnx.state, lambda o: nnx.split(o)[1]])
def test_the_state_in_an_optimizer_of_nnx_is_found(form, mesh):
    tx = optax.chain(sync(mesh, Threshold(0.5), ErrorFeedback()), optax.sgd(0.1))
    model = nnx.Linear(64, 64, rngs=nnx.Rngs(0))
    state = form(nnx.Optimizer(model, tx, wrt=nnx.Param))
    specs = jax.tree.leaves(cgx_jax.state_specs(state, "data"))
    assert specs.count(P("data")) == 4  # memory and overflow of two leaves
    shardings = jax.tree.leaves(cgx_jax.state_shardings(state, "data", mesh))
    assert shardings.count(NamedSharding(mesh, P("data"))) == 4
    smaller = resize_state(state, 4)
    assert jax.tree.structure(smaller) == jax.tree.structure(state)
    shapes = [x.shape for x in jax.tree.leaves(smaller)]
    assert sorted(s for s in shapes if s[:1] == (4,)) == [(4,), (4,), (4, 64), (4, 64, 64)]
    assert transforms.metrics(state)["cgx/overflow"] == 0


@pytest.mark.parametrize(
    "code", [Signum(), PowerSGD(2), Stages((PowerSGD(2), Signum()), (1,))], ids=repr
)
def test_codes_keep_their_state_in_an_optimizer_of_nnx(code, mesh):
    model = nnx.Linear(64, 64, rngs=nnx.Rngs(0))
    sync = cgx_jax.sync_gradients("data", code, mesh=mesh, exchange="xla")
    tx = optax.chain(sync, optax.sgd(0.1))
    graph, state = nnx.split((model, nnx.Optimizer(model, tx, wrt=nnx.Param)))

    def step(state):
        model, optimizer = nnx.merge(graph, state)
        optimizer.update(model, nnx.state(model, nnx.Param))
        return nnx.state((model, optimizer))

    specs = cgx_jax.state_specs(state, "data")
    step = sharded(step, mesh, (specs,), specs, check_vma=False)
    after = step(step(state))  # all stages
    assert jax.tree.map(jnp.shape, after) == jax.tree.map(jnp.shape, state)
    codes = after[1]["opt_state"][0]["codes"]
    assert all(np.asarray(x).any() for x in jax.tree.leaves(codes))


@pytest.mark.parametrize("form", [lambda o: o, nnx.state])
def test_what_waits_in_an_optimizer_of_nnx_is_found(form, mesh):
    late = {"every": 2, "delay": 1, "mesh": mesh, "exchange": "xla"}
    tx = transforms.diloco(optax.sgd(0.1), "data", Quantize(4), **late)
    model = nnx.Linear(64, 64, use_bias=False, rngs=nnx.Rngs(0))
    state = form(nnx.Optimizer(model, tx, wrt=nnx.Param))
    assert jax.tree.leaves(cgx_jax.state_specs(state, "data")).count(P("data")) == 3
    shapes = [x.shape for x in jax.tree.leaves(resize_state(state, 4))]
    rows = [(4, 2), (4, 64, 64), (4, 64, 64)]  # the ticket, what has moved, and what waits
    assert sorted(s for s in shapes if s[:1] == (4,)) == rows


def test_rows_on_several_processes_are_refused_unless_each_has_all(mesh):
    state = sync(mesh, memory=ErrorFeedback()).init(zeros({"w": SQUARE}))

    @dataclasses.dataclass
    class Rows:
        is_fully_replicated: bool
        is_fully_addressable = False
        shape, ndim, dtype = (8, 64, 64), 3, np.dtype(np.float32)

        def __array__(self, dtype=None, copy=None):
            return np.ones(self.shape, np.float32)

    far, near = (state._replace(memory=({"w": Rows(whole)},)) for whole in (False, True))
    with pytest.raises(ValueError, match=r"^resize_state: rows of float32\[8, 64, 64\] lie on sev"):
        resize_state(far, 4)
    np.testing.assert_array_equal(resize_state(near, 4).memory[0]["w"], np.ones((4, 64, 64)))


def two_axes():
    return Mesh(np.array(jax.devices()).reshape(4, 2), ("a", "b"))


def test_a_chain_over_two_axes_is_split_state_by_state():
    mesh = two_axes()
    kinds = [
        cgx_jax.sync_gradients(axis, Quantize(4), memory=ErrorFeedback(), mesh=mesh)
        for axis in ("a", "b")
    ]
    state = optax.chain(*kinds).init(zeros({"w": SQUARE}))
    says = r"^state_shardings: 1/memory/0/w is the memory of 2 ranks, .*another axis than 'a', call"
    for given in (state, (state[0]._replace(memory=()), state[1])):
        with pytest.raises(ValueError, match=says):
            cgx_jax.state_shardings(given, "a", mesh)
    with pytest.raises(ValueError, match=r"rows for \[2, 4\] ranks.*each SyncState by itself"):
        resize_state(state, 8)
    each = tuple(cgx_jax.state_shardings(s, n, mesh) for s, n in zip(state, "ab", strict=True))
    assert [s.memory[0]["w"].spec for s in each] == [P("a"), P("b")]


# --- names of axes.


MAKERS = {
    "sync_gradients": lambda axis, mesh: cgx_jax.sync_gradients(
        axis, Quantize(4), memory=ErrorFeedback(), mesh=mesh, exchange="xla"
    ),
    "scatter_gradients": lambda axis, mesh: scatter_gradients(
        axis, Quantize(4), memory=ErrorFeedback(), mesh=mesh, exchange="xla"
    ),
    "local_steps": lambda axis, mesh: local_steps(
        optax.sgd(0.1), axis, Quantize(4), every=1, mesh=mesh, exchange="xla"
    ),
}


@pytest.mark.usefixtures("optimized")
@pytest.mark.parametrize("name", MAKERS)
def test_a_list_of_axes_is_as_good_as_a_tuple(name):
    mesh, params = two_axes(), zeros({"w": SQUARE})
    results = []
    for axes in (["a", "b"], ("a", "b")):
        tx = MAKERS[name](axes, mesh)
        state = tx.init(params)
        specs = cgx_jax.state_specs(state, axes)
        assert P(("a", "b")) in jax.tree.leaves(specs)
        placed = jax.device_put(state, cgx_jax.state_shardings(state, axes, mesh))
        out = P(("a", "b")) if name == "scatter_gradients" else P()
        step = sharded(tx.update, mesh, (P(), specs), (out, specs), check_vma=False)
        results.append(step(jax.tree.map(jnp.ones_like, params), placed))
    jax.tree.map(np.testing.assert_array_equal, *results)


@pytest.mark.parametrize("axes", [(), [], None, ["a", None]], ids=str)
def test_no_axis_is_refused(axes):
    mesh = two_axes()
    state = MAKERS["sync_gradients"]("a", mesh).init(zeros({"w": SQUARE}))
    calls = {name: lambda make=make: make(axes, mesh) for name, make in MAKERS.items()}
    calls["state_specs"] = lambda: cgx_jax.state_specs(state, axes)
    calls["state_shardings"] = lambda: cgx_jax.state_shardings(state, axes, mesh)
    for name, call in calls.items():
        with pytest.raises(ValueError, match=rf"^{name}: axis_name=.* names no axis"):
            call()


# --- the dtypes of a state are those of init.


DTYPES = {
    "bf16 and f32": (jnp.bfloat16, jnp.float32),
    "f32 and bf16": (jnp.float32, jnp.bfloat16),
    "f16 and f32": (jnp.float16, jnp.float32),
    "f32 and f16": (jnp.float32, jnp.float16),
    "bf16 and f16": (jnp.bfloat16, jnp.float16),
    "bf16": (jnp.bfloat16, jnp.bfloat16),
    "f64 and f32": (jnp.float64, jnp.float32),
    "f64": (jnp.float64, jnp.float64),
}


@pytest.fixture
def x64():
    with jax.enable_x64(True):
        yield


def dtypes(tree):
    return [(x.shape, x.dtype) for x in jax.tree.leaves(tree)]


def rate(step):
    return 0.1 / (1 + step.astype(jnp.float32))


SCHEDULED = {
    "feedback by rates": lambda mesh: sync(mesh, memory=ErrorFeedback(0.9, learning_rate=rate)),
    "momentum by rates": lambda mesh: sync(
        mesh, Threshold(0.5), memory=MomentumCorrection(learning_rate=rate)
    ),
    "units and feedback": lambda mesh: sync(
        mesh, memory=ErrorFeedback(), precondition=SecondMoment()
    ),
}


@pytest.mark.parametrize("pair", DTYPES)
@pytest.mark.parametrize("kind", [*KINDS, *SCHEDULED])
def test_a_step_keeps_the_dtypes_of_the_state_and_of_the_gradients(kind, pair, mesh, request):
    """Under scan, which accepts nothing else; integers and bools in the tree keep theirs."""
    parameters, gradients = DTYPES[pair]
    if "f64" in pair:
        request.getfixturevalue("x64")
    tx = (KINDS | SCHEDULED)[kind](mesh, *([optax.scale(-0.1)] if kind == "local" else []))
    others = {"int": np.ones((8, 8), np.int32), "short": np.ones(8, np.int8)}
    others["flag"] = np.ones(8, np.bool_)
    if kind == "local":  # Optax scales no integers
        others = {}
    params = zeros({"w": (64, 64), "b": (64,)}, parameters) | others
    grads = zeros({"w": (64, 64), "b": (64,)}, gradients) | others
    state = jax.eval_shape(tx.init, params)
    specs = cgx_jax.state_specs(state, "data")

    def steps(grads, state):
        def body(state, _):
            updates, state = tx.update(grads, state, params)
            return state, updates

        return jax.lax.scan(body, state, length=2)[::-1]

    split = (P(), specs)
    f = jax.shard_map(steps, mesh=mesh, in_specs=split, out_specs=split, check_vma=False)
    if "codes" in kind and pair == "f64 and f32":  # float64 is not compressed
        with pytest.raises(ValueError, match=r"holds nothing for .*parameters of a dtype that"):
            jax.eval_shape(f, grads, state)
        return
    updates, after = jax.eval_shape(f, grads, state)
    assert dtypes(after) == dtypes(state)
    wanted = params if kind == "local" else grads
    assert [x.dtype for x in jax.tree.leaves(updates)] == [x.dtype for x in jax.tree.leaves(wanted)]


@pytest.mark.parametrize("options", [{"memory": ErrorFeedback()}, {"precondition": SecondMoment()}])
def test_devices_that_share_a_rank_do_not_keep_different_states(options, mesh_2d):
    """Of the gradients of several devices; what they have in common may be kept."""
    tx = sync(mesh_2d, **options)
    like = zeros({"w": (64, 64)})
    state = tx.init(like)

    def step(x, state, average):
        grads = {"w": jax.lax.pmean(x[0], "model") if average else x[0]}
        return tx.update(grads, state)

    def run(average):
        axes = mesh_2d.axis_names
        f = with_state(functools.partial(step, average=average), mesh_2d, state, P(axes))
        return jax.eval_shape(f, np.ones((8, 64, 64), np.float32), state)

    says = r"over axis 'model', but the state does not.*\('data', 'model'\)"
    with pytest.raises(ValueError, match=says):
        run(False)
    run(True)


def test_a_leaf_s_state_may_differ_where_its_own_gradient_does(mesh_2d):
    """A sharded leaf beside one that all devices of a rank share."""
    rules = [Rule(Quantize(4), "a"), Rule(PowerSGD(2), "b")]
    tx = cgx_jax.sync_gradients("data", Rules(rules, exact=()), mesh=mesh_2d, exchange="xla")
    state = tx.init(zeros({"a": (64, 64), "b": (64, 64)}))

    def step(x, state):
        return tx.update({"a": x[0], "b": jax.lax.pmean(x[0], "model")}, state)

    out = {"a": P("model"), "b": P()}
    f = with_state(step, mesh_2d, state, P(mesh_2d.axis_names), out=out)
    jax.eval_shape(f, np.ones((8, 64, 64), np.float32), state)


def test_what_a_narrow_gradient_cannot_carry_waits_in_a_wider_memory(mesh):
    """Half of bfloat16's last place is too little to be sent, even exactly, until it adds up."""
    tx = sync(mesh, Identity(), ErrorFeedback())
    state = tx.init(zeros({"w": (4, 4)}))
    state = state._replace(memory=jax.tree.map(lambda x: x + 2.0**-10, state.memory))
    step = stepper(tx, mesh, state)
    updates, state = step({"w": jnp.ones((4, 4), jnp.bfloat16)}, state)
    np.testing.assert_array_equal(updates["w"].astype(jnp.float32), 1)
    np.testing.assert_array_equal(state.memory[0]["w"], 2.0**-10)
    updates, state = step({"w": jnp.zeros((4, 4), jnp.bfloat16)}, state)
    np.testing.assert_array_equal(updates["w"].astype(jnp.float32), 2.0**-10)
    np.testing.assert_array_equal(state.memory[0]["w"], 0)


def test_a_memory_of_integers_for_gradients_of_floats_is_refused(mesh):
    tx = sync(mesh, memory=ErrorFeedback())
    state = jax.eval_shape(tx.init, zeros({"w": SQUARE}, jnp.int32))
    with pytest.raises(ValueError, match=r"^sync_gradients: the memory of leaf 'w' is int32, but"):
        jax.eval_shape(stepper(tx, mesh, state), zeros({"w": SQUARE}), state)


CONTINUED = {  # the codes and memories before, those now, and what is said
    "no counts": ((Quantize(4), ErrorFeedback()), (DGC(0.1), ErrorFeedback()), "no counts of"),
    "shared codes": ((PowerSGD(2), None), (Quantize(4), None), "but its init makes"),
    "codes of a rank": ((Signum(), None), (Quantize(4), None), "but its init makes"),
}


@pytest.mark.parametrize("case", CONTINUED)
def test_a_state_of_codes_that_keep_something_else_is_refused(case, mesh):
    before, now, says = CONTINUED[case]
    like = zeros({"w": SQUARE})
    state = jax.eval_shape(sync(mesh, *before).init, like)
    with pytest.raises(ValueError, match=f"^sync_gradients: .*{says}"):
        jax.eval_shape(stepper(sync(mesh, *now), mesh, state), like, state)


CASTS = {
    "step": lambda s: s._replace(step=s.step.astype(jnp.bfloat16)),
    "skipped": lambda s: s._replace(skipped=s.skipped[None]),
    "memory": lambda s: s._replace(memory=jax.tree.map(lambda x: x.astype(jnp.bfloat16), s.memory)),
    "moments": lambda s: s._replace(
        moments=s.moments._replace(factors=s.moments.factors.astype(jnp.bfloat16))
    ),
}


@pytest.mark.parametrize("part", CASTS)
def test_a_state_that_was_cast_is_refused(part, mesh):
    tx = sync(mesh, memory=ErrorFeedback(), precondition=SecondMoment())
    like = zeros({"w": SQUARE})
    state = jax.eval_shape(lambda: CASTS[part](tx.init(like)))
    with pytest.raises(ValueError, match=rf"^sync_gradients: the state's {part}.*cast only param"):
        jax.eval_shape(stepper(tx, mesh, state), like, state)
