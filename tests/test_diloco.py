"""DiLoCo and its kin against a NumPy reference of a few lines."""

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

WORLD, STEPS = 3, 24
SHAPES = {"a": (6, 8), "b": {"w": (5, 4), "z": (30,)}}
is_shape = lambda x: isinstance(x, tuple)  # noqa: E731


def draw(seed, *lead):
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda s: rng.normal(size=(*lead, *s)).astype(np.float32), SHAPES, is_leaf=is_shape
    )


TARGETS, START = draw(0, WORLD), draw(1)


def mesh():
    return Mesh(np.array(jax.devices()[:WORLD]), ("data",))


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
    specs = cgx_jax.state_specs(state, "data")
    if over is None:  # as later steps get them, so that the step is compiled once
        start = jax.device_put(start, NamedSharding(mesh(), P()))
        state = jax.device_put(state, cgx_jax.state_shardings(state, "data", mesh()))
    extra = {} if weights is None else {"weight": jnp.asarray(weights, jnp.float32)}

    def step(params, state, targets, extra):
        here = local_params(params, state)
        grads = jax.tree.map(lambda w, t: w - t[0], here, targets)
        own = {k: v[0] for k, v in extra.items()}
        updates, state = tx.update(grads, state, params, **own)
        params = optax.apply_updates(params, updates)
        return params, state, jax.tree.map(lambda x: x[None], local_params(params, state))

    f = jax.jit(
        jax.shard_map(
            step,
            mesh=over or mesh(),
            in_specs=(P(), specs, P("data"), P("data")),
            out_specs=(P(), specs, P("data")),
            check_vma=check_vma,
            axis_names={"data"},
        )
    )
    params, shared, own = start, [], []
    for _ in range(steps):
        params, state, local = f(params, state, targets, extra)
        shared.append(params)
        own.append(local)
    return shared, own, state


def update_of(tx):
    """`tx.update`, with gradients that are typed as those of a worker."""
    own = lambda x: lax.pcast(x, "data", to="varying")  # noqa: E731
    return lambda grads, state, params: tx.update(jax.tree.map(own, grads), state, params)


def reference(
    every,
    *,
    fragments=((0, 1, 2),),
    delay=0,
    mix=0.0,
    weights=None,
    keep=None,
    momentum=0.9,
    start=START,
    targets=TARGETS,
):
    """Inner SGD with momentum .9, outer Nesterov; fragment f is sent f / fragments into a round."""
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
                    theta[i] = theta[i] - 0.7 * (g + momentum * outer[i])
                    local[i] = mix * local[i] + (1 - mix) * theta[i]
                if send and delay:
                    waiting[i] = pseudo_gradient()
        out.append([x.copy() for x in theta])
    return out, local, owed


def largest(x, k):
    cut = np.sort(np.abs(x), None)[-k]
    return np.where(np.abs(x) >= cut, x, 0)


def wrapped(compressor=None, **options):
    return diloco(
        optax.sgd(0.1, 0.9),
        "data",
        exactly(Identity() if compressor is None else compressor),
        mesh=mesh(),
        **({"exchange": "xla"} | options),
    )


CASES = {  # options of diloco, and those of the reference that differ
    "vanilla": ({"every": 4}, {}),
    "every step": ({"every": 1}, {}),
    "mix": ({"every": 4, "mix": 0.5}, {}),
    "delay": ({"every": 6, "delay": 2, "mix": 0.5}, {}),
    "the longest delay": ({"every": 4, "delay": 3}, {}),
    "fragments": ({"every": 6, "fragments": 3}, {"fragments": ((0,), (1,), (2,))}),
    "streaming": (
        {"every": 6, "fragments": 2, "delay": 1, "mix": 0.25},
        {"fragments": ((0,), (1, 2))},
    ),
    "named fragments": (
        {"every": 4, "fragments": lambda path: int(path.startswith("b/"))},
        {"fragments": ((0,), (1, 2))},
    ),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.quick(*CASES.keys() - {"mix", "fragments"})  # within "streaming"
def test_steps_are_those_of_the_reference(case):
    options, changes = CASES[case]
    plain = {k: v for k, v in options.items() if k != "fragments"}
    want, local, _ = reference(**plain, **changes)
    shared, own, state = trained(wrapped(**options))
    for got, theta in zip(shared, want, strict=True):
        for x, y in zip(jax.tree.leaves(got), theta, strict=True):
            np.testing.assert_allclose(x, y, atol=2e-5)
    for x, y in zip(jax.tree.leaves(own[-1]), local, strict=True):
        np.testing.assert_allclose(x, y, atol=2e-5)
    assert int(state.step) == STEPS


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.quick("0", "1", "2")
def test_random_trees_and_options_follow_the_reference(seed):
    rng = np.random.default_rng(seed)
    count, every = rng.integers(1, 6), int(rng.integers(1, 8))
    shapes = [tuple(rng.integers(1, 7, size=rng.integers(0, 4))) for _ in range(count)]
    start = {f"{i}": rng.normal(size=s).astype(np.float32) for i, s in enumerate(shapes)}
    targets = {
        f"{i}": rng.normal(size=(WORLD, *s)).astype(np.float32) for i, s in enumerate(shapes)
    }
    parts = int(rng.integers(1, min(count, every) + 1))
    number = rng.permutation([*range(parts), *rng.integers(parts, size=count - parts)])
    same = {
        "delay": int(rng.integers(every)),
        "mix": float(rng.choice([0, 0.25, 1])),
    }
    weights = [None, (1, 0, 3)][rng.integers(2)]
    problem = {"start": start, "targets": targets, "weights": weights}
    each = tuple(tuple(np.flatnonzero(number == f)) for f in range(parts))
    want, local, _ = reference(every, fragments=each, **same, **problem)
    tx = wrapped(every=every, fragments=lambda path: int(number[int(path)]), **same)
    shared, own, _ = trained(tx, **problem)
    for got, theta in ((shared[-1], want[-1]), (own[-1], local)):
        for x, y in zip(jax.tree.leaves(got), theta, strict=True):
            np.testing.assert_allclose(x, y, atol=3e-5)


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


@pytest.mark.parametrize("weights", [(1, 2, 5), (3, 0, 1), (0, 0, 0)])
def test_workers_count_by_their_weights(weights):
    want, _, _ = reference(4, weights=weights)
    shared, _, _ = trained(wrapped(every=4), weights=weights)
    for x, y in zip(jax.tree.leaves(shared[-1]), want[-1], strict=True):
        np.testing.assert_allclose(x, y, atol=2e-5)


def test_sparse_loco_closes_its_account():
    """What all workers sent, plus what they still remember, is what they have moved."""
    keep = 7
    want, _, owed = reference(4, keep=keep, momentum=0.0)
    tx = wrapped(TopK(keep), every=4, memory=ErrorFeedback(), outer=optax.sgd(0.7))
    shared, _, state = trained(tx)
    for x, y in zip(jax.tree.leaves(shared[-1]), want[-1], strict=True):
        np.testing.assert_allclose(x, y, atol=2e-5)
    memory = jax.tree.leaves(state.fragments[0].sync.memory)
    for x, y in zip(memory, owed, strict=True):
        np.testing.assert_allclose(x, y, atol=2e-5)


AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
OPTIONS_OF_PAIRS = {
    "exact": {},
    "feedback": {"policy": Quantize(8), "memory": ErrorFeedback()},
    "streaming, units": {
        "policy": Quantize(8, rotation=True),
        "precondition": SecondMoment(),
        "fragments": 2,
        "delay": 1,
        "mix": 0.25,
    },
}


def of_pairs(over, policy=None, **options):
    options = {"every": 4, "mesh": over, "exchange": "xla", "specs": SHARDED} | options
    policy = exactly(Identity() if policy is None else policy)
    return diloco(optax.sgd(0.1, 0.9), "data", policy, **options)


@pytest.mark.parametrize("options", OPTIONS_OF_PAIRS.values(), ids=OPTIONS_OF_PAIRS)
@pytest.mark.parametrize(
    ("types", "said"),
    [
        ((AUTO, AUTO), {}),
        (
            (AUTO, AUTO),
            {"specs": lambda path: SHARDED["b"][path[2:]] if "/" in path else P(None, "model")},
        ),
        ((AUTO, EXPLICIT), {"specs": None}),
        ((EXPLICIT, EXPLICIT), {"specs": None}),
    ],
    ids=["specs", "by path", "types", "all types"],
)
def test_a_worker_may_be_several_devices(types, said, options):
    """Its parameters and states stay sharded, and it moves as a worker of one device does."""
    over = mesh_of_pairs(*types)
    plain = {k: v for k, v in options.items() if k != "policy"}
    alone, _, _ = trained(wrapped(options.get("policy"), **({"every": 4} | plain)), steps=12)
    with jax.set_mesh(over):
        shared, _, state = trained(of_pairs(over, **options, **said), steps=12, over=over)
    most = 0.03 if "policy" in options else 2e-6  # each device has buckets of its own
    for pair in zip(jax.tree.leaves(shared[-1]), jax.tree.leaves(alone[-1]), strict=True):
        x, y = map(np.asarray, pair)
        assert np.linalg.norm(x - y) <= most * np.linalg.norm(y)
    memory = [x for tree in state.fragments[0].sync.memory for x in jax.tree.leaves(tree)]
    trace = jax.tree.leaves(state.optimizer[0].trace)
    for x in jax.tree.leaves(shared[-1]):
        assert x.addressable_shards[0].data.size == x.size // 2
    for x in (*jax.tree.leaves(state.moved), *trace, *memory):
        assert x.addressable_shards[0].data.size == x.size // (2 * WORLD)


def test_shards_are_encoded_where_they_lie():
    over = mesh_of_pairs(AUTO, AUTO)
    sent = []
    for specs in (None, SHARDED):
        tx = of_pairs(over, Quantize(8), specs=specs)
        params = placed(over, START)
        state = tx.init(params)
        kept = P(), cgx_jax.state_specs(state, "data")
        f = jax.shard_map(
            lambda p, s, tx=tx: update_of(tx)(p, s, p),
            mesh=over,
            in_specs=kept,
            out_specs=kept,
            axis_names={"data"},
        )
        text = jax.jit(f).lower(params, state).compile().as_text()
        sent.append(sum(c.nbytes for c in collectives(text) if c.dtype == "u8"))
    assert sent[1] <= 0.6 * sent[0]


def test_a_state_is_made_under_jit_too():
    over = mesh_of_pairs(AUTO, AUTO)
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
    kept = P(), cgx_jax.state_specs(state, "data")

    def at_params(params, state, targets):
        loss = lambda p: sum(map(jnp.vdot, jax.tree.leaves(p), jax.tree.leaves(targets)))  # noqa: E731
        return tx.update(jax.grad(loss)(params), state, params)

    def averaged(params, state, targets):
        return tx.update(lax.pmean(targets, "data"), state, params)

    for step in (at_params, averaged):
        own = lambda p, s, t, step=step: step(p, s, jax.tree.map(lambda x: x[0], t))  # noqa: E731
        f = jax.shard_map(own, mesh=mesh(), in_specs=(*kept, P("data")), out_specs=kept)
        with pytest.raises(ValueError, match=r"diloco: the gradient of leaf 'a' .*local_params"):
            jax.eval_shape(f, START, state, TARGETS)


def test_local_steps_average_shards_too():
    over = mesh_of_pairs(AUTO, AUTO)
    means = [
        trained(
            local_steps(optax.sgd(0.1), "data", exactly(Identity()), every=3, **how), 6, over=at
        )
        for at, how in ((None, {"mesh": mesh()}), (over, {"mesh": over, "specs": SHARDED}))
    ]
    (alone, *_), (pairs, *_) = means
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5), pairs[-1], alone[-1])


def test_specs_where_every_axis_is_manual_are_refused():
    with pytest.raises(ValueError, match=r"diloco: specs are for axes .* left to XLA"):
        trained(wrapped(every=1, specs=jax.tree.map(lambda x: P(), START)))


BIG = {"w": np.zeros((64, 64), np.float32), "v": np.zeros((64, 64), np.float32)}


@pytest.mark.parametrize("fragments", [1, 2])
def test_a_round_sends_bytes_and_only_in_a_branch(fragments):
    """Fragments share a peak: each branch sends its part, and nothing is sent elsewhere."""
    tx = diloco(
        optax.sgd(0.1),
        "data",
        Quantize(4, rotation=True),
        every=4,
        fragments=fragments,
        mesh=mesh(),
        exchange="xla",
    )
    state = tx.init(BIG)
    specs = cgx_jax.state_specs(state, "data")
    f = jax.jit(
        jax.shard_map(
            update_of(tx), mesh=mesh(), in_specs=(P(), specs, P()), out_specs=(P(), specs)
        )
    )
    text = f.lower(BIG, state, BIG).compile().as_text()
    sent = collectives(text)
    assert {c.dtype for c in sent} <= {"u8", "s32", "pred"}
    operands = [c.nbytes for c in sent if c.op == "all-to-all"]
    assert len(operands) == fragments * WORLD
    assert "all-to-all" not in text[text.index("ENTRY") :]


def test_states_are_placed_and_resized():
    tx = wrapped(Quantize(4), **CASES["streaming"][0], memory=ErrorFeedback())
    _, _, state = trained(tx, 8)
    placed = jax.device_put(
        jax.tree.map(np.asarray, state), cgx_jax.state_shardings(state, "data", mesh())
    )
    jax.tree.map(np.testing.assert_array_equal, placed, state)
    more = cgx_jax.resize_state(state, 5)
    assert more.moved["a"].shape == (5, *SHAPES["a"])
    assert more.fragments[0].sync.memory[0]["a"].shape == (5, *SHAPES["a"])
    old, new = (x.fragments[0].waiting["a"] for x in (state, more))
    np.testing.assert_allclose(new, np.broadcast_to(np.mean(old, 0), new.shape), rtol=1e-6)
    assert not np.any(more.fragments[0].ticket)


def test_muon_runs_inside():
    tx = diloco(optax.contrib.muon(0.02), "data", Quantize(8), every=3, mesh=mesh(), exchange="xla")
    with jax.numpy_dtype_promotion("standard"):
        shared, _, _ = trained(tx, 60)
    mean = jax.tree.map(lambda t: t.mean(0), TARGETS)
    away = lambda p: sum(  # noqa: E731
        float(np.square(a - b).sum()) for a, b in zip(*map(jax.tree.leaves, (p, mean)), strict=True)
    )
    assert away(shared[-1]) < 0.5 * away(START)


WRONG = {
    "every": ({"every": 0}, ValueError, "diloco: every=0 must be at least 1"),
    "tuner": ({"every": 4, "exchange": cgx_jax.Tuner()}, ValueError, "diloco: exchange is a tuner"),
    "delay": ({"every": 4, "delay": 4}, ValueError, r"diloco: delay=4 must be in \[0, 3\]"),
    "mix": ({"every": 4, "mix": 1.5}, ValueError, r"diloco: mix=1.5 must be in \[0, 1\]"),
    "fragments": (
        {"every": 2, "fragments": 3},
        ValueError,
        r"diloco: fragments=3 must be in 1..2",
    ),
    "a fraction": (
        {"every": 4, "fragments": 1.5},
        TypeError,
        "diloco: fragments=1.5 is not an int",
    ),
    "no optimizer": ({"every": 4, "outer": 1}, TypeError, "diloco: outer=1 is not an optimizer"),
    "an unknown option": ({"every": 4, "foo": 1}, TypeError, "diloco: 'foo' is not an option"),
    "gaps": (
        {"every": 4, "fragments": lambda path: 2 * path.startswith("b/")},
        ValueError,
        r"diloco: fragments gives the numbers \[0, 2\]",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_numbers_are_refused(case):
    options, error, says = WRONG[case]
    with pytest.raises(error, match=says):
        wrapped(**options).init(START)


@pytest.mark.parametrize("policy", [Adaptive(), Stages((TopK(), TopK(0.1)), (3,))])
def test_policies_of_the_whole_tree_need_one_fragment(policy):
    tx = diloco(optax.sgd(0.1), "data", policy, every=4, fragments=2, mesh=mesh())
    with pytest.raises(ValueError, match=r"diloco: \w+ sees the whole tree, but there are 2"):
        tx.init(START)


def weighted(tree, weights, **start):
    """Returns the parameters after one step of plain averaging by workers with these weights."""
    tx = diloco(optax.sgd(1.0), "data", exactly(Identity()), every=1, outer=optax.sgd(1.0),
                mesh=mesh(), exchange="xla")  # fmt: skip
    params = jax.tree.map(lambda x: jnp.zeros_like(x[0]), tree)
    state = tx.init(params)
    specs = cgx_jax.state_specs(state, "data")
    f = jax.shard_map(
        lambda g, s, w: tx.update(jax.tree.map(lambda x: x[0], g), s, params, weight=w[0]),
        mesh=mesh(),
        in_specs=(P("data"), specs, P("data")),
        out_specs=(P(), specs),
    )
    with jax.numpy_dtype_promotion("standard"):
        return jax.jit(f)(tree, state, jnp.asarray(weights, jnp.float32))[0]


def test_what_a_worker_holds_that_does_not_count_does_not_matter():
    x = np.stack([np.full((4, 4), v, np.float32) for v in (1, np.nan, 3)])
    np.testing.assert_allclose(weighted({"w": x}, (1, 0, 1))["w"], -2)
    assert not np.asarray(weighted({"w": x}, (0, 0, 0))["w"]).any()


def test_a_weight_that_is_no_number_shows():
    x = np.ones((3, 4, 4), np.float32)
    assert np.isnan(weighted({"w": x}, (1, np.nan, 1))["w"]).all()


def test_momentum_of_integers_is_refused():
    with pytest.raises(ValueError, match=r"diloco: the outer optimizer .* leaf 'n' int32\[3\]"):
        wrapped(every=2).init(dict(START, n=jnp.arange(3)))


def test_integers_are_weighted_too():
    x = np.full((3, 4), 10, np.int32)
    np.testing.assert_array_equal(weighted({"w": x}, (1, 2, 3))["w"], -10)


def test_gradients_may_be_wider_than_parameters():
    tx = wrapped(Identity(), every=2, fragments=2)
    half = jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), START)
    state = tx.init(half)
    specs = cgx_jax.state_specs(state, "data")
    f = jax.shard_map(
        lambda g, s: update_of(tx)(g, s, half),
        mesh=mesh(),
        in_specs=(P(), specs),
        out_specs=(P(), specs),
    )
    with jax.numpy_dtype_promotion("standard"):
        out, _ = jax.eval_shape(f, START, state)
    assert {x.dtype for x in jax.tree.leaves(out)} == {jnp.dtype(jnp.bfloat16)}


LATE = {"delay": 1}
CHANGED = {  # options of init, those of update, and what is said
    "a delay": ({}, {"delay": 1}, "delay=1, but the state was made without a delay"),
    "no delay": ({"delay": 1}, {}, "delay=0, but the state was made with a delay"),
    "another outer": ({}, {"outer": optax.adam(0.1)}, "another outer optimizer"),
    "other fragments": (
        {"fragments": lambda path: int(path == "a")},
        {"fragments": lambda path: int(path != "a")},
        "fragments with other leaves",
    ),
    "other fragments, delayed": (
        {"fragments": lambda path: int(path == "a")} | LATE,
        {"fragments": lambda path: int(path != "a")} | LATE,
        "fragments with other leaves",
    ),
}


@pytest.mark.parametrize("case", CHANGED)
def test_a_state_of_other_options_is_refused(case):
    before, now, says = CHANGED[case]
    state, tx = wrapped(every=4, **before).init(START), wrapped(every=4, **now)
    specs = cgx_jax.state_specs(state, "data")
    f = jax.shard_map(
        update_of(tx), mesh=mesh(), in_specs=(P(), specs, P()), out_specs=(P(), specs)
    )
    with pytest.raises(ValueError, match=f"diloco: .*{says}"):
        jax.eval_shape(f, START, state, START)


@pytest.mark.parametrize("delay", [0, 1])
def test_parameters_may_be_one_array(delay):
    tx = wrapped(every=2, delay=delay)
    state = tx.init(START["a"])
    specs = cgx_jax.state_specs(state, "data")
    f = jax.shard_map(
        update_of(tx), mesh=mesh(), in_specs=(P(), specs, P()), out_specs=(P(), specs)
    )
    out, _ = jax.jit(f)(START["a"], state, START["a"])
    assert not np.asarray(out).any()  # the first of two steps


def test_a_worker_s_key_is_resized():
    tx = diloco(
        optax.chain(optax.add_noise(0.1, 0.1, 3), optax.sgd(0.1)), "data", every=2, mesh=mesh()
    )
    state = tx.init(START)
    assert {x.shape[0] for x in jax.tree.leaves(cgx_jax.resize_state(state, 5).optimizer)} == {5}


def test_a_weight_is_a_number_and_a_state_is_of_its_options():
    with pytest.raises(ValueError, match=r"diloco: weight has shape \[2\]"):
        trained(wrapped(every=1), 1, weights=np.ones((WORLD, 2)))
    tx, other = wrapped(every=4), wrapped(every=4, fragments=2)
    state = other.init(START)
    specs = cgx_jax.state_specs(state, "data")
    f = jax.shard_map(
        update_of(tx), mesh=mesh(), in_specs=(P(), specs, P()), out_specs=(P(), specs)
    )
    with pytest.raises(ValueError, match="diloco: the state has 2 fragments, but these leaves"):
        jax.eval_shape(f, START, state, START)
