"""Adaptive among families: bits, top-k and low rank; states wait while they are not in use."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from adaptive_training import WORLD, Training, adaptive
from cgx_jax import ErrorFeedback, Quantize
from cgx_jax.compressors import PowerSGD, Signum, TopK
from cgx_jax.leaves import Leaf
from cgx_jax.policies import Uniform
from cgx_jax.policies.decide import Subject

# The collectives of statistics and gradients do not wait for each other: see `no_cache`.
pytestmark = pytest.mark.usefixtures("no_cache", "unoptimized")


FAMILIES = (TopK(0.02), PowerSGD(2), Quantize(2, 64), Quantize(4, 64), Quantize(8, 64))
LIKE = {"dense": jnp.zeros((64, 64)), "embed": jnp.zeros((256, 32)), "matrix": jnp.zeros((48, 64))}
EXPECTED = {"dense": Quantize(4, 64), "embed": TopK(0.02), "matrix": PowerSGD(2)}


def gradients(seed):
    """Returns noise, an embedding with four touched rows per rank, and a matrix of rank 2."""
    rng = np.random.default_rng(seed)
    embed = np.zeros((WORLD, 256, 32))
    for rank in range(WORLD):
        embed[rank, rng.choice(256, 4, replace=False)] = rng.normal(size=(4, 32))
    left, right = rng.normal(size=(48, 2)), rng.normal(size=(WORLD, 2, 64))
    grads = {"dense": rng.normal(size=(WORLD, 64, 64)), "embed": embed, "matrix": left @ right}
    return {k: x.astype(np.float32) for k, x in grads.items()}


def policy(**options):
    options = {"base": Uniform(Quantize(4, 64)), "candidates": FAMILIES, "runs": 128, **options}
    return adaptive(**options)


def chosen(policy):
    return dict(zip(policy._subject.paths, policy.progress.current, strict=True))


def run(training, steps, first=0):
    """Returns the sums over the steps of what was given and of what was seen, in fp64."""
    given = {k: np.zeros(x.shape) for k, x in LIKE.items()}
    seen = {k: np.zeros(x.shape) for k, x in LIKE.items()}
    for t in range(first, first + steps):
        grads = gradients(t)
        (result,) = training.run(1, grads=grads)
        for k in LIKE:
            given[k] += grads[k].astype(np.float64).mean(0)
            seen[k] -= result[k]
    return given, seen


@pytest.fixture(scope="module")
def mixed():
    """A training with feedback through the first change of its plan."""
    training = Training(policy(), memory=ErrorFeedback(), like=LIKE)
    before = jax.tree.map(jnp.shape, training.state)
    account = run(training, 11)
    return training, before, account


@pytest.mark.slow
def test_each_leaf_takes_the_family_that_suits_it(mixed):
    training, _, _ = mixed
    assert [r.outcome for r in training.policy.history] == ["changed"]
    assert chosen(training.policy) == EXPECTED


def test_a_gathered_code_weighs_what_all_its_copies_take():
    leaf = Leaf("w", (4096,), np.dtype(np.float32))
    averages = {"square": np.ones(1), "error": np.ones((1, 2))}
    candidates = (TopK(0.02), Quantize(4, 64))
    payloads = np.array([c.payload_bytes((4096,)) for c in candidates])
    for world, weight in ((2, 1), (8, 4), (16, 8)):
        subject = Subject((leaf,), candidates, world)
        assert subject.problem(averages).nbytes.tolist() == [(payloads * [weight, 1]).tolist()]
        assert subject.cost(candidates[:1], averages)[0] == weight * payloads[0]


@pytest.mark.slow
def test_a_change_of_family_loses_nothing(mixed):
    training, _, (given, seen) = mixed
    (memory,) = training.state[0].memory
    for k in LIKE:
        kept = np.asarray(memory[k], np.float64).mean(0)
        np.testing.assert_allclose(seen[k] + kept, given[k], atol=1e-4)


@pytest.mark.slow
def test_states_of_all_candidates_are_kept_in_shapes_that_no_plan_changes(mixed):
    training, before, _ = mixed
    assert jax.tree.map(jnp.shape, training.state) == before
    shared = [tree["matrix"] for tree in training.state[0].codes.shared]
    first = PowerSGD(2).init(LIKE["matrix"].shape, jnp.float32)
    assert [np.shape(s) for s in shared] == [(0,), (2, 64), (0,), (0,), (0,)]
    assert np.abs(np.asarray(shared[1]) - first).max() > 0.1  # in use since the change
    waiting = training.state[0].codes.shared[1]["dense"]
    np.testing.assert_array_equal(waiting, PowerSGD(2).init((64, 64), jnp.float32))


def test_a_state_of_each_rank_waits_too():
    candidates = (Signum(0.5), Quantize(4, 64))
    training = Training(policy(candidates=candidates), like=LIKE)
    own = [tree["dense"] for tree in training.state[0].codes.own]
    assert jax.tree.map(jnp.shape, own) == [(WORLD, 64, 64), ()]
    run(training, 1)
    assert not np.asarray(training.state[0].codes.own[0]["dense"]).any()


def test_a_memory_refuses_a_candidate_that_lets_it_grow_before_it_is_chosen():
    training = Training(
        policy(candidates=(Signum(0.5), Quantize(4, 64))), memory=ErrorFeedback(), like=LIKE
    )
    with pytest.raises(ValueError, match=r"Signum.* of leaf 'dense' can exceed its input"):
        run(training, 1)
