"""Accordion: many bits where the gradients' norm changes by the threshold, few elsewhere."""

import dataclasses

import jax
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import cgx_jax
from adaptive_training import LIKE, MESH, SCALE, Training, gradients
from cgx_jax import Adaptive, Quantize
from cgx_jax.policies import Accordion, Problem, Uniform
from cgx_jax.policies.decide import Refresh, last_norm
from worlds import on_ranks

FEW, MANY = Quantize(2, 64), Quantize(8, 64)

# The collectives of statistics and gradients do not wait for each other: see `no_cache`.
pytestmark = pytest.mark.usefixtures("no_cache", "unoptimized")


EVERY = 4
# Each period's (scale of the gradients, bits that Accordion chooses at its look).
PERIODS = [(1, 8), (1, 2), (1.4, 2), (1.4, 2), (3, 8), (3, 2), (1, 8), (1, 2)]


def accordion():
    """Looks every 4 steps at the last step's norm; an older sample counts only a hundredth."""
    return Adaptive(
        Accordion(0.5),
        base=Uniform(MANY),
        candidates=(FEW, MANY),
        warmup=EVERY,
        every=EVERY,
        sample_every=1,
        decay=0.01,
    )


def run(training, periods):
    """Returns the means of a period's steps, for each scale."""
    return [training.run(EVERY, {k: s * v for k, v in SCALE.items()}) for s in periods]


@pytest.mark.usefixtures("optimized")
def test_bits_follow_the_change_of_the_norm_and_two_plans_are_compiled_once_each():
    policy = accordion()
    scales = [scale for scale, _ in PERIODS] + [1]
    got = run(Training(policy), scales)
    assert [set(r.bits) for r in policy.history] == [{bits} for _, bits in PERIODS]
    assert len(policy.compile_seconds) == policy.metrics()["cgx/plans"] == 2
    norms = np.array([r.norm for r in policy.history])
    # Every step has its own gradients, and an older sample counts a little.
    np.testing.assert_allclose(norms / norms[0], scales[:-1], rtol=0.05)

    # What is reduced has the bits of the fixed plan.
    def fixed(compressor):
        tx = optax.chain(
            cgx_jax.sync_gradients("data", compressor, mesh=MESH, exchange="xla"), optax.sgd(1.0)
        )
        return on_ranks(lambda g: tx.update(g, tx.init(LIKE))[0], MESH, out=P())

    plans = {FEW.bits: fixed(FEW), MANY.bits: fixed(MANY)}
    for t, mean in enumerate(mean for period in got for mean in period):
        # What a look chose, such as the one after 8 steps, is used 3 steps later.
        bits = PERIODS[(t - 7) // EVERY][1] if t >= 7 else MANY.bits
        own = gradients(t % EVERY, {k: scales[t // EVERY] * v for k, v in SCALE.items()})
        few, many = plans[FEW.bits](own), plans[MANY.bits](own)
        jax.tree.map(np.testing.assert_array_equal, mean, few if bits == FEW.bits else many)
        assert (few["big"] != many["big"]).any()


@pytest.mark.parametrize(
    ("scales", "bits"),
    [([np.nan, 1, 1, 3], [8, 8, 2, 8]), ([1, 1, np.nan, 3], [8, 2, 2, 8])],
    ids=["first", "third"],
)
@pytest.mark.quick("third")
def test_a_period_that_is_not_finite_neither_is_a_change_nor_hides_one(scales, bits):
    policy = accordion()
    run(Training(policy), [*scales, 3])
    assert [set(r.bits) for r in policy.history] == [{b} for b in bits]


def problem(change, leaves=3, bits=(2, 8)):
    ones = np.ones((leaves, len(bits)))
    return Problem(
        np.ones(leaves, int), np.ones(leaves), bits, ones.astype(int), ones, change=change
    )


@pytest.mark.parametrize(
    ("change", "chosen"), [(None, 1), (0.0, 0), (0.4999, 0), (0.5, 1), (2.0, 1)]
)
def test_the_threshold_itself_is_critical_and_so_is_the_first_look(change, chosen):
    assert Accordion(0.5).solve(problem(change)).tolist() == [chosen] * 3


def test_a_look_that_is_not_usable_leaves_no_norm_to_compare_with():
    known = Refresh(1, "kept", (8,), 1, 0.0, (0.1,), (), (), norm=3.0)
    lost = dataclasses.replace(known, norm=5.0, outcome="unusable")
    assert last_norm([known, lost]) == 3.0
    assert last_norm([lost]) is None


WRONG = {
    "a threshold of 0": (lambda: Accordion(0), "Accordion: threshold=0 is not a finite number"),
    "three candidates": (
        lambda: Adaptive(Accordion(), base=Uniform(MANY), candidates=(FEW, Quantize(4, 64), MANY)),
        r"Accordion: 3 candidates, of \[2, 4, 8\] bits; pass two",
    ),
    "a negative change": (lambda: problem(-0.1), "Problem: change=-0.1 must be finite"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_options_are_refused(case):
    make, message = WRONG[case]
    with pytest.raises(ValueError, match=message):
        make()
