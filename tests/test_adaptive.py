"""Adaptive: the plan follows the gradients, stays within its bounds, and survives a checkpoint."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import cgx_jax
from adaptive_training import LIKE, MESH, SCALE, WIDTHS, WORLD, Training, adaptive, gradients
from cgx_jax import Adaptive, ErrorFeedback, Identity, Quantize
from cgx_jax.compressors import Cast, TopK
from cgx_jax.leaves import Leaf, leaves_of
from cgx_jax.policies import LeastBytes, LeastError
from cgx_jax.policies.decide import Decision, Subject, decide
from hlo import before, computations, entry_of, named
from worlds import RANKS, on_ranks, placed, with_state

# The collectives of statistics and gradients do not wait for each other: see `no_cache`.
pytestmark = pytest.mark.usefixtures("no_cache", "unoptimized")


# Fewer candidates are quicker to compile, for training whose widths do not matter.
few = functools.partial(adaptive, candidates=tuple(Quantize(b, 64) for b in (2, 4, 8)))


def bits(policy):
    return {k.removeprefix("cgx/bits/"): v for k, v in policy.metrics().items() if "/bits/" in k}


@functools.cache  # no fixture, because `no_cache` must be active
def changed():
    """Returns a policy whose plan has changed, and (metrics, plan) after 0, 1 and 9 steps."""
    policy = adaptive(base=cgx_jax.policies.Uniform(Quantize(4, 64)))
    training, seen = Training(policy), []
    for steps in (0, 1, 8):
        training.run(steps)
        seen.append((policy.metrics(), policy.plan))
    return policy, seen


def test_the_plan_changes_to_what_the_solver_finds_and_costs_fewer_bytes_at_no_more_error():
    policy, ((before, _), _, (after, _)) = changed()
    assert {before[f"cgx/bits/{k}"] for k in ("big", "small", "table")} == {4}
    (refresh,) = policy.history
    assert refresh.outcome == "changed"
    assert after["cgx/bytes"] < before["cgx/bytes"]
    # Leaves with the smallest norm per value get the fewest bits, those with the largest the most.
    assert bits(policy)["big"] <= bits(policy)["table"] < bits(policy)["small"]
    # It is estimated from a sample of other steps' gradients.
    assert refresh.error <= 1.1 * error_of_one_step(Quantize(4, 64))
    assert after["cgx/plan_changes"] == 1
    assert after["cgx/plans"] == 2
    assert len(policy.compile_seconds) == 2


def error_of_one_step(code):
    """Returns the squared error of the adaptive leaves' gradients, of the mean rank."""
    x = {k: v for k, v in gradients(0).items() if k != "bias"}
    sent = jax.vmap(lambda v: code.decode(code.encode(v), v.shape, v.dtype))
    decoded = jax.jit(lambda x: jax.tree.map(sent, x))(x)
    return sum(np.square(decoded[k] - x[k]).sum() for k in x) / WORLD


@pytest.mark.slow
def test_the_number_of_plans_is_bounded():
    policy = few(every=5, max_plans=2, decay=0.01, sample_every=1)
    training = Training(policy)
    swapped = {"bias": 1.0, "big": 10.0, "small": 0.01, "table": 1.0}
    for scale in (SCALE, swapped, SCALE, swapped):
        training.run(10, scale)
    assert policy.metrics()["cgx/plans"] == len(policy.compile_seconds) == 2


def test_metrics_say_what_every_leaf_has_and_what_a_rank_sends():
    policy, ((young, none), (before, first), (after, plan)) = changed()
    assert none is None
    leaves = ("big", "small", "table")
    kinds = ("bits", "bytes", "relative_error")
    assert young["cgx/refresh"] == "warmup"
    assert young["cgx/nonfinite_leaves"] == 0
    assert "cgx/wire_bytes" not in young  # the axis is not known before the first step
    assert {f"cgx/{kind}/{k}" for kind in kinds[:2] for k in leaves} < young.keys()
    for metrics, reduced in ((before, first), (after, plan)):
        reduced.check("here", leaves_of(LIKE))
        assert metrics["cgx/wire_bytes"] == reduced.wire_bytes(WORLD)
        pairs = zip(reduced.leaves, reduced.compressors, strict=True)
        chosen = {leaf.path: (c, leaf.size) for leaf, c in pairs}
        assert chosen["bias"][0] == Identity()
        for k in leaves:
            compressor, size = chosen[k]
            assert metrics[f"cgx/bits/{k}"] == compressor.bits
            assert metrics[f"cgx/bytes/{k}"] == compressor.wire_bits(size) // 8
        assert metrics["cgx/bytes"] == sum(metrics[f"cgx/bytes/{k}"] for k in leaves)
    assert plan == cgx_jax.Plan.build(LIKE, policy) != first
    assert before["cgx/wire_bytes"] > after["cgx/wire_bytes"] > 64 * 4  # with the exact bias
    errors = [after[f"cgx/relative_error/{k}"] for k in leaves]
    assert all(0 < e < 1 for e in errors)
    assert {k for k, v in after.items() if isinstance(v, str)} == {"cgx/refresh"}


@pytest.mark.parametrize("case", ["zero", "nan"])
@pytest.mark.quick("zero")
def test_zero_or_non_finite_statistics_give_no_plan_and_the_metrics_say_so(case):
    policy = few()
    training = Training(policy)
    fill = 0.0 if case == "zero" else np.nan
    grads = jax.tree.map(lambda x: np.full((WORLD, *x.shape), fill, np.float32), LIKE)
    before = bits(policy)
    training.run(9, grads=grads)
    assert bits(policy) == before
    metrics = policy.metrics()
    assert metrics["cgx/refresh"] == "unusable"
    assert metrics["cgx/unusable"] == "big, small, table"
    if case == "zero":
        json.dumps(policy.state_dict(), allow_nan=False)
    else:
        assert metrics["cgx/nonfinite"] == "big, small, table"
    training.run(8)
    assert policy.history[1].outcome == "changed"
    assert "cgx/unusable" not in policy.metrics()


@pytest.mark.parametrize("sample_every", [2, 8])
@pytest.mark.quick("8")
def test_a_leaf_is_named_at_the_look_after_its_nan_and_not_again(sample_every):
    policy = few(sample_every=sample_every)
    training = Training(policy)
    poisoned = gradients(0)
    poisoned["small"][1, 3, 4] = np.nan
    training.run(4 + 8)  # a look at 4, used at 8; the next at 12
    training.run(8, grads=poisoned)  # until the look at 20
    assert policy.metrics()["cgx/nonfinite_leaves"] == 0
    training.run(8)
    assert policy.metrics()["cgx/nonfinite"] == "small"
    assert policy.metrics()["cgx/nonfinite_leaves"] == 1
    saved = json.loads(json.dumps(policy.state_dict()))
    policy.load_state_dict(saved)
    training.run(8)
    assert "cgx/nonfinite" not in policy.metrics()
    assert policy.metrics()["cgx/nonfinite_leaves"] == 0
    assert float(training.state[0].statistics.nonfinite[1]) == 8 / sample_every
    training.run(8, grads=poisoned)
    training.run(8)
    assert [r.nonfinite for r in policy.history] == [(), (), ("small",), (), (), ("small",)]
    Training(policy).run(16)  # the policy goes on with the state of another run
    assert "cgx/nonfinite" not in policy.metrics()


def test_a_budget_that_cannot_be_met_says_what_the_least_is():
    training = Training(few(solver=LeastError(bits_per_value=1.0)))
    with pytest.raises(ValueError, match=r"bits_per_value=1.0 allows .* pass 3(.0+)? or more"):
        training.run(9)


def test_memory_and_plan_changes_lose_nothing():
    policy = few()
    training = Training(policy, memory=ErrorFeedback())
    got = training.run(12)
    assert policy.history[0].outcome == "changed"
    kept = training.state[0].memory[0]
    for k in LIKE:
        given = sum(gradients(t)[k].astype(np.float64).mean(0) for t in range(12))
        seen = -sum(g[k].astype(np.float64) for g in got)
        total = seen + np.asarray(kept[k], np.float64).mean(0)
        np.testing.assert_allclose(total, given, atol=1e-4 * SCALE[k])


# Step 6 lies between a look at the statistics and its use.
@pytest.mark.parametrize("steps", [6, pytest.param(10, marks=pytest.mark.slow)])
def test_a_resumed_run_goes_on_as_if_nothing_had_happened(steps):
    first = Training(few(), memory=ErrorFeedback())
    first.run(steps)
    saved = json.loads(json.dumps(first.policy.state_dict()))
    state = jax.tree.map(np.asarray, first.state)
    chosen, history = bits(first.policy), list(first.policy.history)
    expected = first.run(6)
    policy = few()
    policy.load_state_dict(saved)  # before the tree is known, in a trace
    tx = cgx_jax.sync_gradients("data", policy, mesh=MESH, memory=ErrorFeedback())
    jax.eval_shape(tx.init, LIKE)
    second = Training(policy, memory=ErrorFeedback())
    second.state = second.placed(state)
    assert bits(policy) == chosen
    assert policy.history == history
    jax.tree.map(np.testing.assert_array_equal, expected, second.run(6))
    assert policy.history == first.policy.history


def gathered():
    """Returns a policy whose choice depends on the number of ranks, and its reduction."""
    half = Cast(jnp.bfloat16)
    candidates = (TopK(0.02, values=half), TopK(0.1, values=half), Quantize(4), Quantize(8))
    often = {"warmup": 2, "every": 4, "sample_every": 1, "candidates": candidates}
    uniform = cgx_jax.policies.Uniform(Quantize(4))
    policy = Adaptive(cgx_jax.policies.LeastError(5.0), base=uniform, **often)
    options = {"memory": ErrorFeedback(), "mesh": MESH, "exchange": "xla"}
    return policy, cgx_jax.sync_gradients("data", policy, **options)


def test_a_run_resumed_when_a_look_is_due_decides_as_if_it_had_not_stopped():
    """Whether its state is loaded before `init` or after."""
    like = {"w": jnp.zeros((64, 64))}

    def step_of(policy, tx, state):
        update = lambda g, s: tx.update({"w": g[0]}, s)  # noqa: E731
        return policy.jit(with_state(update, MESH, state, RANKS))

    def run(step, state, steps):
        for t in steps:
            rng = np.random.default_rng(t)
            heavy = rng.normal(size=(8, 64, 64)) * np.exp(4 * rng.normal(size=(8, 64, 64)))
            updates, state = step(heavy.astype(np.float32), state)
        return updates, state

    first, tx = gathered()
    state = placed(tx.init(like), MESH)
    step = step_of(first, tx, state)
    _, state = run(step, state, range(5))
    saved, kept = jax.device_get(state), json.loads(json.dumps(first.state_dict()))
    updates, _ = run(step, state, range(5, 9))
    assert [r.outcome for r in first.history] == ["changed"]
    for init in (True, False):
        second, tx = gathered()
        if init:
            tx.init(like)
        second.load_state_dict(kept)
        got, _ = run(step_of(second, tx, saved), placed(saved, MESH), range(5, 9))
        assert second.history == first.history
        jax.tree.map(np.testing.assert_array_equal, got, updates)


def test_a_policy_begins_anew_from_the_state_of_one_that_has_not_begun():
    policy, fresh = few(), few().state_dict()
    Training(policy).run(6)
    policy.load_state_dict(fresh)
    assert (policy.progress.step, policy.history) == (0, [])


def test_a_checkpoint_of_another_tree_is_refused_with_the_first_differing_path():
    policy = few()
    Training(policy).run(1)
    saved = policy.state_dict()
    other = few()
    other.load_state_dict(saved)
    tx = cgx_jax.sync_gradients("data", other, mesh=MESH, exchange="xla")
    with pytest.raises(ValueError, match=r"leaf 'huge' .* has 'small' float32\[32, 64\]"):
        tx.init({"bias": jnp.zeros(64), "big": jnp.zeros((128, 128)), "huge": jnp.zeros((9, 9))})
    with pytest.raises(ValueError, match=r"leaf 'table' of the policy's first tree is the first"):
        policy.bind([x for x in policy._leaves if x.path != "table"])


@dataclasses.dataclass
class Unhashable:
    """A step that is an object, equal to others like it."""

    step: object

    def __call__(self, *args):
        return self.step(*args)


def test_a_step_compiled_by_something_else_is_refused():
    training = Training(few())
    with pytest.raises(ValueError, match=r"write policy.jit\(step\) .* in place of jax.jit"):
        jax.jit(training.sharded())(gradients(0), training.state)
    plain, inner = Training(few()), Training(few())
    inner.step = inner.policy.jit(jax.jit(inner.sharded()))  # which follows the plan as well
    expected = plain.run(10)
    jax.tree.map(np.testing.assert_array_equal, expected, inner.run(10))
    assert inner.policy.history[0].outcome == "changed"
    called = Training(few())
    called.step = called.policy.jit(Unhashable(called.sharded()))
    jax.tree.map(np.testing.assert_array_equal, expected[:2], called.run(2))
    lost = Training(few(warmup=1))
    step = lost.policy.jit(lambda g, s: lost.sharded()(g, s)[0])
    with pytest.raises(ValueError, match="holds no statistics; return the optimizer state"):
        step(gradients(0), lost.state)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"warmup": 0}, "warmup=0 must be at least 1"),
        ({"sample_every": 0}, "sample_every=0 must be"),
        ({"max_plans": 0}, "max_plans=0 must be"),
        ({"runs": 0}, "runs=0 must be"),
        ({"decay": 0}, r"decay=0 is outside \(0, 1\]"),
        ({"hysteresis": 1}, r"hysteresis=1 is outside \[0, 1\)"),
        ({"candidates": (Quantize(4), Quantize(2))}, "ascending bits"),
        ({"candidates": ()}, "must be Quantize"),
    ],
)
def test_wrong_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Adaptive(**options)


def test_calls_that_keep_no_statistics_refuse_it():
    policy = few()

    for call, options in (
        (cgx_jax.pmean_compressed, {}),
        (cgx_jax.reduce_in_backward, {}),
        (cgx_jax.psum_scatter_compressed, {"tiled": True}),
        (cgx_jax.all_gather_compressed, {}),
    ):
        f = functools.partial(call, axis_name="data", compressor=policy, **options)
        with pytest.raises(ValueError, match=f"{call.__name__}: Adaptive adapts to statistics"):
            jax.eval_shape(on_ranks(f, MESH, out=P()), gradients(0))


# --- decisions, without a training around them.

LEAVES = tuple(Leaf(path, (4096,), np.dtype(np.float32)) for path in "ab")
SUBJECT = Subject(LEAVES, WIDTHS)


def averages(a, b):
    square = np.array([a, b], np.float64)
    error = square[:, None] * 4.0 ** -np.array([c.bits for c in WIDTHS])
    return {"error": error, "square": square, "nonfinite": np.zeros(2)}


def decision(now, measured, plans=(), max_plans=9):
    how = {"hysteresis": 0.05, "max_plans": max_plans}
    return decide(measured, SUBJECT, LeastBytes(), now, plans or (now,), **how)


def test_a_decision_is_a_pure_function_of_what_it_is_given():
    start = (WIDTHS[2], WIDTHS[2])
    assert decision(start, averages(1, 1)) == Decision("kept", start)
    wide = decision(start, averages(100, 1))
    assert wide.outcome == "changed"
    assert wide == decision(start, averages(100, 1))
    assert decision(wide.compressors, averages(100, 1), (start, wide.compressors)).outcome == "kept"


def test_at_the_bound_only_a_known_plan_that_errs_no_more_is_taken():
    start = (WIDTHS[2], WIDTHS[2])
    wanted = decision(start, averages(1000, 1)).compressors
    assert decision(start, averages(1000, 1), (start,), max_plans=1) == Decision("bounded", start)
    finer = tuple(dataclasses.replace(w, bits=w.bits + 1) for w in wanted)
    coarse = (WIDTHS[0], WIDTHS[0])
    got = decision(start, averages(1000, 1), (start, coarse, finer), max_plans=3)
    assert got.compressors in (start, finer)
    got = decision(coarse, averages(1000, 1), (coarse, finer), max_plans=2)
    assert got == Decision("changed", finer)


def test_the_statistics_are_summed_after_all_other_collectives():
    """XLA on CPUs would run them side by side, in an order that differs between devices."""
    policy = few()
    training = Training(policy)
    policy.running = True
    step = jax.jit(training.sharded(), donate_argnums=(1,))
    hlo = step.lower(gradients(0), training.state).compile().as_text()
    module, entry = computations(hlo), entry_of(hlo)
    sends = named(entry, "all-reduce", "all-to-all", "all-gather")
    (branch,) = named(entry, "conditional")
    assert any(named(ops, "all-reduce") for ops in module.values() if ops != entry)
    assert len(sends) == 3
    assert sends <= before(entry, branch)


def test_a_leaf_that_is_not_finite_again_is_named_whatever_steps_are_sampled():
    """The second time it holds few such values, of steps that are sampled unevenly by looks."""
    training = Training(few(warmup=15, every=15, sample_every=10))
    for step in range(60):
        grads = gradients(step)
        if step == 20:
            grads["small"][0] = np.nan
        if step == 40:
            grads["small"][0, 0, :2] = np.nan
        training.run(1, grads=grads)
    named = {r.step: r.nonfinite for r in training.policy.history}
    assert [named[step] for step in sorted(named)][1:3] == [("small",), ("small",)], named


class Answers(cgx_jax.policies.Solver):
    """A user's solver, which answers by a function of the problem."""

    def __init__(self, answer):
        self.answer = answer

    def solve(self, problem):
        return self.answer(problem)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (lambda p: {}["x"], "the solver failed: KeyError"),
        (lambda p: [0.5] * len(p.values), "Answers.solve returned"),
        (lambda p: [-1] * len(p.values), "Answers.solve returned"),
        (lambda p: [0], "return an integer from 0 to 2 for each of the"),
    ],
    ids=["error", "shares", "negative", "short"],
)
def test_a_solver_that_fails_or_answers_otherwise_is_named(answer, message):
    with pytest.raises(ValueError, match=f"^Adaptive: .*{message}"):
        Training(few(solver=Answers(answer))).run(12)
