"""DiLoCo, local steps and their kin against a NumPy reference of a few lines."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import cgx_jax
from cgx_jax import Adaptive, ErrorFeedback, Identity, Quantize, Rules, SecondMoment
from cgx_jax.compressors import TopK
from cgx_jax.policies import Stages
from cgx_jax.transforms import diloco, local_params, local_steps
from hlo import collectives
from worlds import RANKS, first, normal, ranks, sharded, stacked, with_state
from worlds import placed as placed_on

pytestmark = pytest.mark.usefixtures("unoptimized")

WORLD, STEPS = 3, 24
MESH = ranks(WORLD)
SHAPES = {"a": (6, 8), "b": {"w": (5, 4), "z": (30,)}}


def draw(seed, *lead):
    rng = np.random.default_rng(seed)
    one = lambda s: rng.normal(size=(*lead, *s)).astype(np.float32)  # noqa: E731
    return jax.tree.map(one, SHAPES, is_leaf=lambda x: isinstance(x, tuple))


def close(tree, leaves, atol=2e-5):
    for x, y in zip(jax.tree.leaves(tree), leaves, strict=True):
        np.testing.assert_allclose(x, y, atol=atol)


TARGETS, START = draw(0, WORLD), draw(1)


def exactly(compressor):
    return Rules((), compressor, exact=())


SHARDED = {"a": P(None, "model"), "b": {"w": P(None, "model"), "z": P("model")}}


def mesh_of_pairs(*types):
    """Two devices for each worker, between which the parameters are `SHARDED`."""
    return jax.make_mesh((WORLD, 2), ("data", "model"), types, devices=jax.devices()[: 2 * WORLD])


def placed(over, tree, *lead):
    """Returns a tree like the parameters, sharded over the mesh `over`."""
    place = lambda x, s: jax.device_put(x, NamedSharding(over, P(*lead, *s)))  # noqa: E731
    return jax.tree.map(place, tree, SHARDED)


def trained(tx, steps=STEPS, weights=None, check_vma=True, over=None, start=START, targets=TARGETS):
    """Returns each step's shared parameters and each worker's own, and the last state.

    A worker pulls its parameters to its own target. On a mesh `over`, it is two devices.
    """
    if over is not None:
        start, targets = placed(over, start), placed(over, targets, "data")
    state = tx.init(start)
    if over is None:
        start, state = jax.device_put(start, NamedSharding(MESH, P())), placed_on(state, MESH)
    extra = {} if weights is None else {"weight": jnp.asarray(weights, jnp.float32)}

    def step(params, targets, extra, state):
        grads = jax.tree.map(jnp.subtract, local_params(params, state), first(targets))
        updates, state = tx.update(grads, state, params, **first(extra))
        params = optax.apply_updates(params, updates)
        return (params, stacked(local_params(params, state))), state

    how = {"out": (P(), RANKS), "check_vma": check_vma, "axis_names": {"data"}}
    f = jax.jit(with_state(step, over or MESH, state, P(), RANKS, RANKS, **how))
    params, shared, own = start, [], []
    for _ in range(steps):
        (params, local), state = f(params, targets, extra, state)
        shared.append(params)
        own.append(local)
    return shared, own, state


def update_of(tx, state, over=None, **options):
    """f(grads, params, state) of `tx.update`; gradients are typed as those of a worker."""

    def f(grads, params, state):
        own = jax.tree.map(lambda x: lax.pcast(x, "data", to="varying"), grads)
        return tx.update(own, state, params)

    return with_state(f, over or MESH, state, P(), P(), **options)


def reference(
    every, *, fragments=((0, 1, 2),), delay=0, mix=0.0, weights=None, keep=None, momentum=0.9,
    rate=0.7, start=START, targets=TARGETS,
):  # fmt: skip
    """Inner SGD with momentum .9, outer Nesterov; fragment f is sent f / fragments into a round.

    Returns the parameters after each step, and each worker's parameters and residuals at the end.
    """
    theta = [x.astype(np.float64) for x in jax.tree.leaves(start)]
    targets = [x.astype(np.float64) for x in jax.tree.leaves(targets)]
    local = [np.repeat(x[None], WORLD, 0) for x in theta]
    inner, outer = [0 * x for x in local], [0 * x for x in theta]
    owed, waiting = [0 * x for x in local], {}
    share = np.ones(WORLD) if weights is None else np.asarray(weights, float)
    share = share / share.sum() if share.sum() else share
    out = []
    for t in range(1, STEPS + 1):
        for i, x in enumerate(local):
            inner[i] = 0.9 * inner[i] + x - targets[i]
            local[i] = x - 0.1 * inner[i]
        for f, leaves in enumerate(fragments):
            offset = round(f * every / len(fragments)) % every
            send, arrive = t % every == offset, t > delay and (t - delay) % every == offset
            for i in leaves:

                def pseudo_gradient(i=i):
                    moved = local[i] - theta[i] + owed[i]
                    sent = moved if keep is None else np.array([largest(x, keep) for x in moved])
                    owed[i] = moved - sent
                    return -np.tensordot(share, sent, 1)

                if send and not delay:
                    waiting[i] = pseudo_gradient()
                if arrive:
                    g = waiting[i]
                    outer[i] = momentum * outer[i] + g
                    theta[i] = theta[i] - rate * (g + momentum * outer[i])
                    local[i] = mix * local[i] + (1 - mix) * theta[i]
                if send and delay:
                    waiting[i] = pseudo_gradient()
        out.append([x.copy() for x in theta])
    return out, local, owed


def largest(x, k):
    cut = np.sort(np.abs(x), None)[-k]
    return np.where(np.abs(x) >= cut, x, 0)


def wrapped(compressor=Identity(), inner=optax.sgd(0.1, 0.9), **options):  # noqa: B008
    options = {"mesh": MESH, "exchange": "xla"} | options
    return diloco(inner, "data", exactly(compressor), **options)


def locally(every, optimizer=None, **options):
    options = {"mesh": MESH, "exchange": "xla"} | options
    optimizer = optax.sgd(0.1, 0.9) if optimizer is None else optimizer
    return local_steps(optimizer, "data", exactly(Identity()), every=every, **options)


APART = {"fragments": ((0,), (1, 2))}
CASES = {  # options of diloco, and those of the reference that differ
    "every step": ({"every": 1}, {}),
    "the longest delay": ({"every": 4, "delay": 3}, {}),
    "streaming": ({"every": 6, "fragments": 2, "delay": 1, "mix": 0.25}, APART),
    "named fragments": ({"every": 4, "fragments": lambda path: int(path.startswith("b/"))}, APART),
}


ALONE = {"momentum": 0.0, "rate": 1.0}  # local steps, whose outer optimizer does nothing
LOCAL = {"local steps": ({"every": 3}, ALONE)}


@pytest.mark.parametrize("case", CASES | LOCAL)
def test_steps_are_those_of_the_reference(case):
    options, changes = (CASES | LOCAL)[case]
    plain = {k: v for k, v in options.items() if k != "fragments"}
    want, local, _ = reference(**plain, **changes)
    shared, own, state = trained((locally if case in LOCAL else wrapped)(**options))
    for got, theta in zip(shared, want, strict=True):
        close(got, theta)
    close(own[-1], local)
    assert int(state.step) == STEPS


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.quick("0", "1")
def test_random_trees_and_options_follow_the_reference(seed):
    rng = np.random.default_rng(seed)
    count, every = rng.integers(1, 6), int(rng.integers(1, 8))
    shapes = [tuple(rng.integers(1, 7, size=rng.integers(0, 4))) for _ in range(count)]
    start, targets = (
        {f"{i}": rng.normal(size=(*n, *s)).astype(np.float32) for i, s in enumerate(shapes)}
        for n in ((), (WORLD,))
    )
    parts = int(rng.integers(1, min(count, every) + 1))
    number = rng.permutation([*range(parts), *rng.integers(parts, size=count - parts)])
    same = {"delay": int(rng.integers(every)), "mix": float(rng.choice([0, 0.25, 1]))}
    weights = [None, (1, 0, 3)][rng.integers(2)]
    problem = {"start": start, "targets": targets, "weights": weights}
    each = tuple(tuple(np.flatnonzero(number == f)) for f in range(parts))
    want, local, _ = reference(every, fragments=each, **same, **problem)
    tx = wrapped(every=every, fragments=lambda path: int(number[int(path)]), **same)
    shared, own, _ = trained(tx, **problem)
    close(shared[-1], want[-1], 3e-5)
    close(own[-1], local, 3e-5)


def test_without_check_vma_it_is_the_same():
    options, _ = CASES["streaming"]
    shared, _, _ = trained(wrapped(**options), check_vma=False)
    want, _, _ = trained(wrapped(**options))
    jax.tree.map(np.testing.assert_array_equal, shared[-1], want[-1])


@pytest.mark.parametrize("delay", [0, 2])
@pytest.mark.quick("2")
def test_workers_may_be_an_axis_of_vmap(delay):
    tx = wrapped(Quantize(8), every=4, delay=delay)

    def step(params, state, target):
        grads = jax.tree.map(jnp.subtract, local_params(params, state), target)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    def over_workers(f, in_axes, out_axes):
        return jax.jit(jax.vmap(f, in_axes, out_axes, axis_name="data", axis_size=WORLD))

    made = jax.eval_shape(over_workers(tx.init, None, 0), START)
    places = jax.tree.map(lambda s: 0 if len(s) else None, cgx_jax.state_specs(made, "data"))
    params, state = START, over_workers(tx.init, None, places)(START)
    # None among the axes of results asks for one value of all workers, as a branch that is taken or
    # not gives it, and a selection does not.
    stepped = over_workers(step, (None, places, 0), (None, places))
    shared, _, _ = trained(tx)
    for expected in shared:
        params, state = stepped(params, state, TARGETS)
        jax.tree.map(np.testing.assert_array_equal, params, expected)


def test_sparse_loco_closes_its_account():
    """What all workers sent, plus what they still remember, is what they have moved."""
    keep = 7
    want, _, owed = reference(4, keep=keep, momentum=0.0)
    tx = wrapped(TopK(keep), every=4, memory=ErrorFeedback(), outer=optax.sgd(0.7))
    shared, _, state = trained(tx)
    close(shared[-1], want[-1])
    close(state.fragments[0].sync.memory, owed)


AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
OPTIONS_OF_PAIRS = {
    "exact": {},
    "feedback": {"policy": Quantize(8), "memory": ErrorFeedback()},
    "streaming": {"fragments": 2, "delay": 1, "mix": 0.25},
    "units": {"policy": Quantize(8, rotation=True), "precondition": SecondMoment()},
}


def of_pairs(over, policy=Identity(), **options):  # noqa: B008
    return wrapped(policy, **({"every": 4, "mesh": over, "specs": SHARDED} | options))


def by_path(path):
    return SHARDED["b"][path[2:]] if "/" in path else SHARDED["a"]


@pytest.mark.parametrize("options", OPTIONS_OF_PAIRS.values(), ids=OPTIONS_OF_PAIRS)
@pytest.mark.parametrize(
    ("types", "said"),
    [
        ((AUTO, AUTO), {}),
        ((AUTO, AUTO), {"specs": by_path}),
        ((AUTO, EXPLICIT), {"specs": None}),
        ((EXPLICIT, EXPLICIT), {"specs": None}),
    ],
    ids=["specs", "by path", "types", "all types"],
)
def test_a_worker_may_be_several_devices(types, said, options):
    """Its parameters and states stay sharded, and it moves as a worker of one device does."""
    over = mesh_of_pairs(*types)
    plain = {k: options[k] for k in ("delay", "mix") if k in options}
    alone, *_ = reference(4, **plain, **(APART if "fragments" in options else {}))
    with jax.set_mesh(over):
        shared, _, state = trained(of_pairs(over, **options, **said), steps=12, over=over)
    most = 0.03 if "policy" in options else 2e-6  # each device has buckets of its own
    for pair in zip(jax.tree.leaves(shared[-1]), alone[11], strict=True):
        x, y = map(np.asarray, pair)
        assert np.linalg.norm(x - y) <= most * np.linalg.norm(y)
    memory = [x for tree in state.fragments[0].sync.memory for x in jax.tree.leaves(tree)]
    trace = jax.tree.leaves(state.optimizer[0].trace)
    for x in jax.tree.leaves(shared[-1]):
        assert x.addressable_shards[0].data.size == x.size // 2
    for x in (*jax.tree.leaves(state.moved), *trace, *memory):
        assert x.addressable_shards[0].data.size == x.size // (2 * WORLD)


@pytest.mark.parametrize("types", [AUTO, EXPLICIT], ids=str)
def test_workers_that_meet_in_every_step_keep_their_shards(types):
    over = mesh_of_pairs(types, types)
    with jax.set_mesh(over):
        tx = of_pairs(over, Quantize(8), every=1, specs=SHARDED if types == AUTO else None)
        params = placed(over, START)
        state = tx.init(params)
        f = jax.jit(update_of(tx, state, over, axis_names={"data"}))
        _, state = f(params, params, state)
    for x in jax.tree.leaves(state.moved):
        assert x.addressable_shards[0].data.size == x.size // (2 * WORLD)


def test_shards_are_encoded_where_they_lie():
    over = mesh_of_pairs(AUTO, AUTO)
    sent = []
    for specs in (None, SHARDED):
        tx = of_pairs(over, Quantize(8), specs=specs)
        params = placed(over, START)
        state = tx.init(params)
        f = update_of(tx, state, over, axis_names={"data"})
        text = jax.jit(f).lower(params, params, state).compile().as_text()
        sent.append(sum(c.nbytes for c in collectives(text) if c.dtype == "u8"))
    assert sent[1] <= 0.6 * sent[0]


@pytest.mark.parametrize("types", [AUTO, EXPLICIT], ids=str)
def test_a_state_is_made_under_jit_too(types):
    over = mesh_of_pairs(types, types)
    params = placed(over, START)
    for specs in (None, SHARDED):
        inner = optax.chain(optax.adam(0.1), optax.contrib.schedule_free_sgd(0.1))
        tx = diloco(inner, "data", Quantize(8), every=4, mesh=over, specs=specs)
        jax.tree.map(np.testing.assert_array_equal, jax.jit(tx.init)(params), tx.init(params))


def test_one_array_is_sharded_too():
    over = mesh_of_pairs(AUTO, AUTO)
    w = jax.device_put(START["a"], NamedSharding(over, SHARDED["a"]))
    state = of_pairs(over, specs=w, memory=ErrorFeedback()).init(w)
    at = P("data", *SHARDED["a"])
    (memory,) = state.fragments[0].sync.memory
    assert {x.sharding.spec for x in (state.moved, state.optimizer[0].trace, memory)} == {at}


WRONG_SPECS = {
    "another tree": ({"a": P()}, "specs is no tree like the parameters"),
    "no spec": (dict(SHARDED, a="model"), "specs has 'model' for 'a' float32"),
    "an array without it": (dict(SHARDED, a=jnp.ones((6, 8))), "specs has ArrayImpl for 'a'"),
    "the workers": (dict(SHARDED, a=P("data")), "'data' is the axis of the reduction"),
    "no axis": (dict(SHARDED, a=P("tensor")), "'tensor' is no axis of the mesh"),
    "no such dimension": (
        dict(SHARDED, a=P(None, None, "model")),
        "cuts dimension 2 into 2; name dimensions that it has",
    ),
    "a rest": (
        {"a": P("model"), "b": {"w": P("model"), "z": P()}},
        r"'b/w' float32\[5, 4\] has the spec P\('model',?\), which cuts dimension 0 into 2",
    ),
}


@pytest.mark.parametrize("case", WRONG_SPECS)
def test_specs_that_do_not_fit_are_refused(case):
    specs, message = WRONG_SPECS[case]
    over = mesh_of_pairs(AUTO, AUTO)
    with pytest.raises(ValueError, match=f"diloco: .*{message}"):
        of_pairs(over, specs=specs).init(placed(over, START))


def test_gradients_that_are_the_same_on_all_workers_are_refused():
    tx = wrapped(every=2)
    state = tx.init(START)

    def at_params(params, targets, state):
        targets = jax.tree.leaves(first(targets))
        loss = lambda p: sum(map(jnp.vdot, jax.tree.leaves(p), targets))  # noqa: E731
        return tx.update(jax.grad(loss)(params), state, params)

    def averaged(params, targets, state):
        return tx.update(lax.pmean(first(targets), "data"), state, params)

    for step in (at_params, averaged):
        f = with_state(step, MESH, state, P(), RANKS)
        with pytest.raises(ValueError, match=r"diloco: the gradient of leaf 'a' .*local_params"):
            jax.eval_shape(f, START, TARGETS, state)


def test_local_steps_average_shards_too():
    over = mesh_of_pairs(AUTO, AUTO)
    want, *_ = reference(3, **ALONE)
    shared, *_ = trained(locally(3, mesh=over, specs=SHARDED), 6, over=over)
    close(shared[-1], want[5])


def test_specs_where_every_axis_is_manual_are_refused():
    with pytest.raises(ValueError, match=r"diloco: specs are for axes .* left to XLA"):
        trained(wrapped(every=1, specs=jax.tree.map(lambda x: P(), START)))


BIG = {"w": np.zeros((64, 64), np.float32), "v": np.zeros((64, 64), np.float32)}


@pytest.mark.parametrize("fragments", [1, 2, "exact local steps"])
def test_a_round_sends_bytes_and_only_in_a_branch(fragments):
    """Fragments share a peak: each branch sends its part, and nothing is sent elsewhere."""
    exact = fragments == "exact local steps"
    tx = locally(4) if exact else wrapped(Quantize(4, rotation=True), every=4, fragments=fragments)
    state = tx.init(BIG)
    text = jax.jit(update_of(tx, state)).lower(BIG, BIG, state).compile().as_text()
    op, sent = "all-reduce" if exact else "all-to-all", collectives(text)
    assert {c.dtype for c in sent} <= {"f32" if exact else "u8", "s32", "pred"}
    operands = [c.nbytes for c in sent if c.op == op]
    assert exact or len(operands) == fragments * WORLD
    assert operands
    assert f"{op}(" not in text[text.index("ENTRY") :]


def test_states_are_placed_and_resized():
    tx = wrapped(Quantize(4), **CASES["streaming"][0], memory=ErrorFeedback())
    _, _, state = trained(tx, 8)
    again = placed_on(jax.tree.map(np.asarray, state), MESH)
    jax.tree.map(np.testing.assert_array_equal, again, state)
    assert (again.moved["a"].sharding.spec, again.step.sharding.spec) == (RANKS, P())
    more = cgx_jax.resize_state(state, 5)
    assert more.moved["a"].shape == (5, *SHAPES["a"])
    assert more.fragments[0].sync.memory[0]["a"].shape == (5, *SHAPES["a"])
    old, new = (x.fragments[0].waiting["a"] for x in (state, more))
    mean = np.asarray(old, np.float64).mean(0)
    np.testing.assert_allclose(new, np.broadcast_to(mean, new.shape), rtol=1e-7)
    assert not np.any(more.fragments[0].ticket)


def with_a_gap(path):
    return 2 * path.startswith("b/")


WRONG = {
    "every": ({"every": 0}, ValueError, "every=0 must be at least 1"),
    "tuner": ({"exchange": cgx_jax.Tuner()}, ValueError, "exchange is a tuner"),
    "delay": ({"delay": 4}, ValueError, r"delay=4 must be in \[0, 3\]"),
    "mix": ({"mix": 1.5}, ValueError, r"mix=1.5 must be in \[0, 1\]"),
    "fragments": ({"every": 2, "fragments": 3}, ValueError, r"fragments=3 must be in 1..2"),
    "a fraction": ({"fragments": 1.5}, TypeError, "fragments=1.5 is not an int"),
    "no optimizer": ({"outer": 1}, TypeError, "outer=1 is not an optimizer"),
    "an unknown option": ({"foo": 1}, TypeError, "'foo' is not an option"),
    "a fraction of a step": ({"every": 1.5}, TypeError, "every=1.5 is not an integer"),
    "gaps": ({"fragments": with_a_gap}, ValueError, r"fragments gives the numbers \[0, 2\]"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_numbers_are_refused(case):
    options, error, says = WRONG[case]
    with pytest.raises(error, match=f"diloco: {says}"):
        wrapped(**({"every": 4} | options)).init(START)


@pytest.mark.parametrize(
    ("make", "error", "says"),
    [
        (lambda: locally(0), ValueError, "local_steps: every=0 must be at least 1"),
        (lambda: locally(1.5), TypeError, "local_steps: every=1.5 is not an integer"),
        (lambda: locally(2, mesh=None).init(START), ValueError, "local_steps: init .* pass mesh="),
        (lambda: local_params({}, ()), ValueError, "holds 0 states of diloco or local_steps"),
    ],
)
def test_wrong_local_steps_are_refused(make, error, says):
    with pytest.raises(error, match=says):
        make()


@pytest.mark.parametrize("policy", [Adaptive(), Stages((TopK(), TopK(0.1)), (3,))])
def test_policies_of_the_whole_tree_need_one_fragment(policy):
    tx = diloco(optax.sgd(0.1), "data", policy, every=4, fragments=2, mesh=MESH)
    with pytest.raises(ValueError, match=r"diloco: \w+ sees the whole tree, but there are 2"):
        tx.init(START)


def weighted(tree, weights, **start):
    """Returns the parameters after one step of plain averaging by workers with these weights."""
    tx = diloco(optax.sgd(1.0), "data", exactly(Identity()), every=1, outer=optax.sgd(1.0),
                mesh=MESH, exchange="xla")  # fmt: skip
    params = jax.tree.map(lambda x: np.zeros_like(x[0]), tree)
    state = tx.init(params)
    step = lambda g, w, s: tx.update(first(g), s, params, weight=w[0])  # noqa: E731
    with jax.numpy_dtype_promotion("standard"):
        f = jax.jit(with_state(step, MESH, state, RANKS, RANKS))
        return f(tree, jnp.asarray(weights, jnp.float32), state)[0]


def test_what_a_worker_holds_that_does_not_count_does_not_matter():
    x = np.stack([np.full((4, 4), v, np.float32) for v in (1, np.nan, 3)])
    np.testing.assert_allclose(weighted({"w": x}, (1, 0, 1))["w"], -2)
    assert not np.asarray(weighted({"w": x}, (0, 0, 0))["w"]).any()


def test_a_weight_that_is_no_number_shows():
    x = np.ones((3, 4, 4), np.float32)
    assert np.isnan(weighted({"w": x}, (1, np.nan, 1))["w"]).all()


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize("every", [1, 2])
def test_an_outer_optimizer_may_widen_its_state(every):
    """A number in fp32 widens one part of it, which widens the other one in the step after."""
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), START)

    def update(grads, state, params):
        fast, slow = state
        widened = jax.tree.map(lambda g, x: g + np.float32(0.9) * x, grads, fast)
        return grads, (widened, jax.tree.map(jnp.add, fast, slow))

    tx = wrapped(every=every, outer=optax.GradientTransformation(lambda p: (p, p), update))
    states = [tx.init(params)]
    zeros = jax.tree.map(lambda x: np.zeros((WORLD, *x.shape), x.dtype), params)
    step = with_state(lambda p, g, s: tx.update(first(g), s, p), MESH, states[0], P(), RANKS)
    for _ in range(4):
        states.append(jax.eval_shape(step, params, zeros, states[-1])[1])
    kinds = [[x.dtype for x in jax.tree.leaves(state)] for state in states]
    assert all(kind == kinds[0] for kind in kinds)
    assert {x.dtype for x in jax.tree.leaves(states[0].fragments[0].outer)} == {
        jnp.dtype("float32")
    }


def test_momentum_of_integers_is_refused():
    with pytest.raises(ValueError, match=r"diloco: .*outer optimizer .* in its state '.*n'"):
        wrapped(every=2).init(dict(START, n=jnp.arange(3)))


def test_integers_are_weighted_too():
    x = np.full((3, 4), 10, np.int32)
    np.testing.assert_array_equal(weighted({"w": x}, (1, 2, 3))["w"], -10)


def test_gradients_may_be_wider_than_parameters():
    tx = wrapped(Identity(), every=2, fragments=2)
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), START)
    state = tx.init(half)
    with jax.numpy_dtype_promotion("standard"):
        out, _ = jax.eval_shape(update_of(tx, state), START, half, state)
    assert {x.dtype for x in jax.tree.leaves(out)} == {jnp.dtype(jnp.bfloat16)}


LATE = {"delay": 1}
TWO = ({"fragments": lambda path: int(path == "a")}, {"fragments": lambda path: int(path != "a")})
CHANGED = {  # options of init, those of update, and what is said
    "a delay": ({}, {"delay": 1}, "delay=1, but the state was made without a delay"),
    "no delay": ({"delay": 1}, {}, "delay=0, but the state was made with a delay"),
    "another inner": ({}, {"inner": optax.adam(0.1)}, "another inner optimizer"),
    "another outer": ({}, {"outer": optax.adam(0.1)}, "another outer optimizer"),
    "fewer fragments": ({"fragments": 2}, {}, "the state has 2 fragments, but these leaves"),
    "other fragments": (*TWO, "fragments with other leaves"),
    "other fragments, delayed": (*(f | LATE for f in TWO), "fragments with other leaves"),
    "other fragments, no outer state": (
        *(f | LATE | {"outer": optax.sgd(0.7)} for f in TWO),
        "for other leaves: its reduction that waits has leaf",
    ),
}


@pytest.mark.parametrize("case", CHANGED)
def test_a_state_of_other_options_is_refused(case):
    before, now, says = CHANGED[case]
    state = jax.eval_shape(wrapped(every=4, **before).init, START)
    tx = wrapped(every=4, **now)
    with pytest.raises(ValueError, match=f"diloco: .*{says}"):
        jax.eval_shape(update_of(tx, state), START, START, state)


@pytest.mark.parametrize(("before", "now"), [(1, 3), (3, 1)])
def test_what_waits_is_applied_once_whatever_the_delay_is_then(before, now):
    """Workers move by 1 in each step; all that they moved before a round counts once."""
    txs = [
        diloco(optax.sgd(1.0), "data", Identity(), every=4, delay=delay, outer=optax.sgd(1.0),
               mesh=MESH, exchange="xla")
        for delay in (before, now)
    ]  # fmt: skip
    params, state = {"w": jnp.zeros(4)}, txs[0].init({"w": jnp.zeros(4)})
    steps = [jax.jit(update_of(tx, state)) for tx in txs]
    path = []
    for i in range(12):
        updates, state = steps[i >= 6]({"w": -jnp.ones(4)}, params, state)
        params = optax.apply_updates(params, updates)
        path.append(int(params["w"][0]))
    changes = [i + 1 for i in range(12) if path[i] != (path[i - 1] if i else 0)]
    assert changes == ([5, 11] if before == 1 else [7, 9])
    assert path[changes[0] - 1] == 4


@pytest.mark.parametrize("mesh", [MESH, None], ids=["mesh", "set_mesh"])
def test_a_state_can_be_donated(mesh):
    tx = diloco(optax.sgd(0.1), "data", every=3, delay=1, fragments=2, mesh=mesh)
    with jax.set_mesh(MESH):
        state = tx.init(START)
    jax.block_until_ready(jax.jit(lambda s: s, donate_argnums=0)(state))


def test_a_worker_may_be_ranks_that_reduce_and_keep_a_memory():
    mesh = Mesh(np.reshape(jax.devices()[:4], (2, 2)), ("pod", "data"))
    kept = {"memory": ErrorFeedback(), "precondition": SecondMoment()}
    reduces = {
        "exact": optax.stateless(lambda grads, _: lax.pmean(grads, "data")),
        "8 bits": cgx_jax.sync_gradients("data", Quantize(8), mesh=mesh, exchange="xla", **kept),
    }
    x, start = normal(4, 8, 32), {"w": jnp.ones((32, 32))}

    def steps(params, x, reduce):
        tx = diloco(optax.chain(reduce, optax.sgd(0.1)), "pod", Identity(), every=2, mesh=mesh)
        state, shared = tx.init(params), params
        for _ in range(4):
            own = local_params(shared, state)
            own = jax.tree.map(lambda p: lax.pcast(p, "data", to="varying"), own)
            grads = jax.grad(lambda p: jnp.square(x[0] @ p["w"]).mean())(own)
            updates, state = tx.update(grads, state, shared)
            shared = optax.apply_updates(shared, updates)
        return shared

    found = {}
    for name, reduce in reduces.items():
        f = functools.partial(steps, reduce=reduce)
        found[name] = sharded(f, mesh, (P(), P(("pod", "data"))))(start, x)["w"]
    moved = np.abs(found["exact"] - 1).max()
    np.testing.assert_allclose(found["8 bits"], found["exact"], atol=0.02 * moved)


@pytest.mark.usefixtures("standard_promotion")
def test_zeros_of_frozen_parameters_are_a_worker_s_own():
    """Those of NumPy and of JAX."""
    inner = optax.apply_if_finite(optax.adam(0.1), 3)
    tx = diloco(inner, "data", Quantize(8), every=2, mesh=MESH, exchange="xla")
    state = tx.init(START)

    def update(grads, state):
        own = lax.pcast(grads["a"], "data", to="varying")
        zeros = {"w": np.zeros_like(START["b"]["w"]), "z": jnp.zeros_like(grads["b"]["z"])}
        return tx.update({"a": own, "b": zeros}, state)

    f = jax.jit(with_state(update, MESH, state, P()))
    for _ in range(2):
        out, state = f(START, state)
    assert np.asarray(out["a"]).any()
    assert not any(np.asarray(x).any() for x in jax.tree.leaves(out["b"]))


CASTS = {  # a part of the state, and what is said
    "moved": (lambda s: s.moved, "state's moved is bfloat16"),
    "inner": (lambda s: s.optimizer, "inner optimizer's state is bfloat16"),
    "outer": (lambda s: s.fragments[0].outer, "outer optimizer's state is bfloat16"),
    "waiting": (lambda s: s.fragments[0].waiting, "reduction that waits is bfloat16"),
}


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize("part", CASTS)
def test_a_state_that_was_cast_is_refused(part):
    tx = wrapped(every=4, **LATE)
    state, (get, says) = tx.init(START), CASTS[part]
    own = {id(x) for x in jax.tree.leaves(get(state))}
    cast = jax.tree.map(lambda x: x.astype(jnp.bfloat16) if id(x) in own else x, state)
    with pytest.raises(ValueError, match=f"^diloco: .*{says}.*cast only parameters"):
        jax.eval_shape(update_of(tx, state), START, START, cast)
    own = jax.tree.map(lambda x: x[:1] if x.ndim else x, cast)  # a worker's rows
    if part == "moved":
        with pytest.raises(ValueError, match=f"^local_params: .*{says}"):
            local_params(START, own)


def test_the_state_of_an_inner_optimizer_may_follow_the_dtype_of_the_gradients():
    follows = optax.GradientTransformation(lambda params: params, lambda g, _, params: (g, g))
    tx = wrapped(inner=follows, every=2)
    state, narrow = tx.init(START), jax.tree.map(lambda x: x.astype(jnp.bfloat16), START)
    for _ in range(2):
        _, state = jax.eval_shape(update_of(tx, state), narrow, START, state)
    assert {x.dtype for x in jax.tree.leaves(state.optimizer)} == {jnp.dtype(jnp.bfloat16)}


def test_a_worker_s_parameters_have_the_dtypes_of_parameters_that_were_cast():
    state = jax.tree.map(lambda x: x[:1] if x.ndim else x, wrapped(every=4).init(START))
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), START)
    assert {x.dtype for x in jax.tree.leaves(local_params(half, state))} == {half["a"].dtype}


@pytest.mark.parametrize("lost", [dict, tuple])
def test_a_fragment_that_lost_its_type_is_refused(lost):
    tx = wrapped(every=4)
    state = tx.init(START)
    (fragment,) = state.fragments
    plain = fragment._asdict() if lost is dict else tuple(fragment)
    broken = state._replace(fragments=(plain,))
    for call in (
        lambda: cgx_jax.state_specs(broken, "data"),
        lambda: cgx_jax.resize_state(broken, 2),
    ):
        with pytest.raises(ValueError, match=f"a {lost.__name__} in the place of Fragment"):
            call()
    own = jax.tree.map(lambda x: x[:1] if x.ndim else x, broken)
    update = jax.shard_map(
        lambda s: tx.update(START, s, START),
        mesh=MESH,
        in_specs=P(),
        out_specs=P(),
        check_vma=False,
    )
    with pytest.raises(ValueError, match=f"diloco: .* a {lost.__name__} in the place of Fragment"):
        jax.eval_shape(update, own)


@pytest.mark.parametrize("delay", [0, 1])
def test_parameters_may_be_one_array(delay):
    tx = wrapped(every=2, delay=delay)
    state = tx.init(START["a"])
    out, _ = jax.jit(update_of(tx, state))(START["a"], START["a"], state)
    assert not np.asarray(out).any()  # the first of two steps


def test_a_worker_s_key_is_resized():
    noisy = optax.chain(optax.add_noise(0.1, 0.1, 3), optax.sgd(0.1))
    state = diloco(noisy, "data", every=2, mesh=MESH).init(START)
    assert {x.shape[0] for x in jax.tree.leaves(cgx_jax.resize_state(state, 5).optimizer)} == {5}


def test_a_weight_is_a_number():
    with pytest.raises(ValueError, match=r"diloco: weight has shape \[2\]"):
        trained(wrapped(every=1), 1, weights=np.ones((WORLD, 2)))
