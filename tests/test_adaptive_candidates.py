"""Adaptive among compressors of several kinds: measured, chosen, compiled and saved."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cgx_jax
from adaptive_training import LIKE, WIDTHS, WORLD, Training, adaptive
from cgx_jax import Adaptive, Cast, Identity, Quantize, Rule, Rules
from cgx_jax.leaves import Leaf
from cgx_jax.policies import Bayesian, KMeans, LeastBytes, LeastError, Linear, Uniform, statistics
from cgx_jax.policies.decide import Subject
from cgx_jax.policies.statistics import Statistics
from mean_compressor import Mean

PLAIN, ROTATED, WIDE = Quantize(4, 64), Quantize(4, 64, rotation=True), Cast(jnp.bfloat16)

# The collectives of statistics and gradients do not wait for each other: see `no_cache`.
pytestmark = pytest.mark.usefixtures("no_cache", "unoptimized")


MIXED = (Quantize(2, 64), Quantize(2, 64, rotation=True), PLAIN, ROTATED, WIDE)
START = Uniform(Quantize(4, 64))
# Even values need no rotation, rare large ones do, and the largest leaf needs the most bits.
EXPECTED = {"big": PLAIN, "table": ROTATED, "small": WIDE}
# What they take together: 5 bits per value for codes in buckets of 64, and 16 for the wide one.
BUDGET = LeastError(1.001 * (5 * (128 * 128 + 64 * 64) + 16 * 32 * 64) / (128 * 128 + 96 * 64))


def gradients():
    rng = np.random.default_rng(0)
    shapes = {k: (WORLD, *x.shape) for k, x in LIKE.items()}
    return {
        "bias": rng.normal(size=shapes["bias"]).astype(np.float32),
        "big": rng.uniform(-1, 1, shapes["big"]).astype(np.float32),
        "small": 1000 * rng.normal(size=shapes["small"]).astype(np.float32),
        "table": rng.standard_t(2, shapes["table"]).astype(np.float32),
    }


def trained(policy, steps=9):
    training = Training(policy)
    return training, training.run(steps, grads=gradients())


def chosen(policy, like=LIKE):
    """Returns the compressor of each adaptive leaf, by its path."""
    cgx_jax.Plan.build(like, policy)
    return dict(zip(policy._subject.paths, policy.progress.current, strict=True))


@pytest.fixture(scope="module")
def mixed():
    """A policy of several kinds of candidates after its first change, and its results."""
    policy = adaptive(solver=BUDGET, base=START, candidates=MIXED)
    return trained(policy)


# Width, block size, codec work, whether it is unbiased.
STATED = {
    Quantize(4, 64): (4, 64, set(), False),
    Quantize(3, rotation=True): (3, 512, {"rotation"}, False),
    Quantize(8, rounding="correlated", rotation=True): (8, 512, {"noise", "rotation"}, True),
    Cast(jnp.bfloat16): (16, 1, set(), False),
    Cast(jnp.float8_e5m2): (8, 1, set(), False),
    Identity(): (32, 1, set(), True),
    Mean(): (1, None, set(), False),
}


@pytest.mark.parametrize("c", STATED, ids=str)
def test_every_compressor_states_what_solvers_and_statistics_need(c):
    assert (c.width, c.block_size, c.codec_work, c.unbiased) == STATED[c]


# --- in a training.


def test_each_leaf_takes_the_kind_that_suits_it(mixed):
    policy = mixed[0].policy
    assert [r.outcome for r in policy.history] == ["changed"]
    assert policy.history[0].bits == (4, 16, 4)  # big, small, table
    assert chosen(policy) == EXPECTED
    assert policy.plan == cgx_jax.Plan.build(LIKE, policy)
    metrics = policy.metrics()
    for path, compressor in EXPECTED.items():
        assert metrics[f"cgx/bits/{path}"] == compressor.width
        assert metrics[f"cgx/bytes/{path}"] == compressor.payload_bytes(LIKE[path].shape)
    assert len(policy.compile_seconds) == 2


def test_the_new_plan_reduces_to_the_mean(mixed):
    got = mixed[1]
    for k, x in gradients().items():
        mean = -x.mean(axis=0)
        error = np.linalg.norm(got[-1][k] - mean) / np.linalg.norm(mean)
        assert error < (0.01 if k in ("bias", "small") else 0.2), k


def test_each_kind_s_error_is_what_encoding_loses(mixed):
    states = jax.tree.leaves(mixed[0].state, is_leaf=lambda x: isinstance(x, Statistics))
    averages = statistics.mean(next(x for x in states if isinstance(x, Statistics)))
    grads = gradients()
    names = "big", "small", "table"

    @jax.jit
    def decoded(grads):
        return [[jax.vmap(c.approximate)(grads[k]) for c in MIXED] for k in names]

    for k, of_codes, errors in zip(names, decoded(grads), averages["error"], strict=True):
        for got, measured in zip(of_codes, errors, strict=True):
            true = np.square(np.asarray(got) - grads[k]).sum() / len(grads[k])
            # Eight runs of 64 values stand for the leaf: large values are rare in "table".
            np.testing.assert_allclose(measured, true, rtol=0.9 if k == "table" else 0.2)


def test_a_leaf_may_become_exact():
    policy = adaptive(
        solver=LeastError(32), base=START, candidates=(Quantize(2, 64), Quantize(4, 64), Identity())
    )
    _, got = trained(policy)
    assert set(chosen(policy).values()) == {Identity()}
    assert policy.history[0].error == 0
    for k, x in gradients().items():
        np.testing.assert_allclose(got[-1][k], -x.mean(axis=0), rtol=1e-5, atol=1e-6 * x.max())


# --- which leaves adapt.


def test_leaves_that_base_compresses_adapt_whatever_with():
    base = Rules([Rule(Identity(), path="big"), Rule(WIDE, path="small")], Quantize(4, 64))
    assert set(chosen(Adaptive(base=base, candidates=MIXED))) == {"small", "table"}


def test_a_leaf_whose_dtype_some_candidate_does_not_take_stays_as_it_is():
    like = LIKE | {"table": jnp.zeros((64, 64), jnp.bfloat16)}
    assert set(chosen(Adaptive(base=START, candidates=MIXED), like)) == set(EXPECTED)
    policy = Adaptive(base=START, candidates=(Mean(), *MIXED))
    assert chosen(policy, like) == dict.fromkeys(("big", "small"), Quantize(4, 64))
    assert set(cgx_jax.Plan.build(like, policy).exact) == {0}  # table is coded, the bias is not


def test_a_start_that_is_no_candidate_counts_as_the_nearest_in_bytes():
    leaf = Leaf("w", (4096,), np.dtype(np.float32))
    errors = np.array([[64.0, 32, 16, 8, 4, 2, 1]])
    subject = Subject((leaf,), WIDTHS)  # buckets of 64: a bit more per value than the width
    for start, nearest in {
        Quantize(4, 512): 3,
        Quantize(7, 512): 6,
        Quantize(4, 64): 4,
        WIDE: 8,
    }.items():
        assert subject.errors((start,), {"error": errors}) == [errors[0][nearest - 2]]


# --- what is refused, when the policy is made.

WRONG = {
    r"must be Quantize\(...\) or other compressors": lambda: Adaptive(candidates=(4,)),
    "sorted by ascending bits": lambda: Adaptive(candidates=(WIDE, PLAIN)),
    "all different and sorted": lambda: Adaptive(candidates=(PLAIN, ROTATED, PLAIN)),
    "Linear: it chooses only by width, but several candidates have 2 bits; pass one": (
        lambda: Adaptive(Linear(2, 4), candidates=MIXED)
    ),
    "KMeans: it chooses only by width, but several candidates have 4 bits; pass one": (
        lambda: Adaptive(KMeans(4, 16), candidates=MIXED)
    ),
    "Linear: most=8 is not among the candidates": lambda: Adaptive(Linear(2, 8), candidates=MIXED),
    "LeastBytes: uniform_bits=3 is not among the candidates, which have": (
        lambda: Adaptive(LeastBytes(uniform_bits=3), candidates=MIXED)
    ),
    "Bayesian: most=8 is not among": lambda: Adaptive(Bayesian(), candidates=MIXED),
}


@pytest.mark.parametrize("message", WRONG)
def test_candidates_that_cannot_be_chosen_among_are_refused(message):
    with pytest.raises(ValueError, match=message):
        WRONG[message]()


def test_solvers_by_width_take_mixed_kinds_of_distinct_widths():
    distinct = (Quantize(2, 64), ROTATED, WIDE)
    for solver in (Linear(2, 16), KMeans(2, 16), LeastBytes(), cgx_jax.policies.Bayesian(2, 16)):
        Adaptive(solver, candidates=distinct)
    leaves = tuple(Leaf(path, (4096,), np.dtype(np.float32)) for path in "abc")
    averages = {"square": np.array([1e8, 1e4, 1.0]), "error": np.ones((3, 3))}
    problem = Subject(leaves, distinct).problem(averages)
    assert Linear(2, 16).solve(problem).tolist() == [2, 2, 1]


# --- checkpoints.


def test_a_checkpoint_of_mixed_kinds_goes_on_as_if_nothing_had_happened(mixed):
    policy = mixed[0].policy
    saved = json.loads(json.dumps(policy.state_dict()))
    again = adaptive(solver=BUDGET, base=START, candidates=MIXED)
    again.load_state_dict(saved)
    assert again.state_dict() == saved
    resumed = Training(again)
    assert chosen(again) == EXPECTED
    assert again.history == policy.history
    assert again.progress.plans == policy.progress.plans
    assert json.loads(json.dumps(again.state_dict())) == saved
    resumed.run(1, grads=gradients())
    assert len(again.compile_seconds) == 1
