"""Policies by step: one program, the right stage, and a density that warms up."""

import re

import numpy as np
import pytest

import cgx_jax
import optax_steps
from cgx_jax import ErrorFeedback, Identity, Quantize, Rule, Rules
from cgx_jax.compressors import DGC, PowerSGD, TopK
from cgx_jax.policies import Adaptive, Stages, density_warmup
from worlds import normal, ranks

pytestmark = pytest.mark.usefixtures("unoptimized")

WORLD = 3
MESH = ranks(WORLD)


def sync(policy, **options):
    return cgx_jax.sync_gradients("data", policy, mesh=MESH, exchange="xla", **options)


def bare(compressor):
    return Rules((), compressor, exact=())


def test_each_step_goes_by_its_stage():
    grads = {"w": normal(5, WORLD, 30, 50)}
    policy = Stages((Identity(), bare(TopK(10)), bare(Quantize(8))), (1, 3))
    results, states = optax_steps.run(sync(policy, memory=ErrorFeedback()), MESH, grads)
    sent = [np.count_nonzero(r["w"]) for r in results]
    assert sent[0] == 1500
    assert all(0 < n <= 30 for n in sent[1:3])
    assert all(n > 1000 for n in sent[3:])
    given = grads["w"].astype(np.float64).mean(1).sum(0)
    kept = np.asarray(states[-1].memory[0]["w"], np.float64).mean(0)
    np.testing.assert_allclose(sum(r["w"] for r in results) + kept, given, atol=1e-5)


def test_the_state_of_a_stage_waits_for_it():
    grads = {"w": normal(2, WORLD, 30, 50)}
    _, states = optax_steps.run(sync(Stages((Identity(), PowerSGD(2)), (1,))), MESH, grads)
    first, waiting, used = (s.codes.shared[1]["w"] for s in states)
    np.testing.assert_array_equal(waiting, first)
    assert (np.asarray(used) != first).any()


def test_a_density_falls_to_a_fourth_each_time():
    stages = density_warmup(DGC, 0.001, steps=500)
    assert [c.keep for c in stages.policies] == [0.25, 0.0625, 0.015625, 0.00390625, 0.001]
    assert stages.boundaries == (125, 250, 375, 500)
    assert [int(stages.stage(s)) for s in (0, 124, 125, 499, 500, 9000)] == [0, 0, 1, 3, 4, 4]
    rules = density_warmup(lambda keep: Rules([Rule(TopK(keep), path="embed")]), 0.05, steps=10)
    assert [p.rules[0].compressor.keep for p in rules.policies] == [0.25, 0.0625, 0.05]


WRONG = {
    "one more": (lambda: Stages((TopK(), TopK(0.1)), ()), "2 policies do not fit boundaries=()"),
    "ascending": (lambda: Stages((TopK(),) * 3, (5, 5)), "in ascending order"),
    "from 1 on": (lambda: Stages((TopK(),) * 2, (0,)), "in ascending order"),
    "adapts": (lambda: Stages((Adaptive(), TopK()), (5,)), "that adapts cannot be a stage"),
    "shares": (lambda: density_warmup(TopK, 0.5, 100), "keep=0.5 and first=0.25 must be shares"),
    "steps": (lambda: density_warmup(TopK, 0.001, 3), "steps=3 is below the number of stages, 4"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_stages_are_refused(name):
    make, says = WRONG[name]
    with pytest.raises(ValueError, match=re.escape(says)):
        make()
