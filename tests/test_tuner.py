"""Tuner: what it tries, in which order, what it keeps, and who decides."""

import dataclasses
import itertools
import logging
import socket
import subprocess
import sys
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import cgx_jax
from cgx_jax import Adaptive, Plan, Quantize, Tuner
from cgx_jax.axes import Axes
from cgx_jax.compressors import PowerSGD, SignSGD
from cgx_jax.exchanges import Mpi, Xla, mpi
from cgx_jax.policies import training_loop
from cgx_jax.reductions import GatherSum, Levels, Tree
from cgx_jax.tuner import Setting
from cgx_jax.tuner import candidates as candidates_module
from cgx_jax.tuner import tuner as tuner_module
from cgx_jax.tuner.candidates import Asked, Candidate, candidates, other_size
from cgx_jax.tuner.setting import Offered
from cgx_jax.tuner.trials import Trials, best, challenges, relative
from test_agreement import HEADER, _environment
from test_tune import profile_with_crossing

pytestmark = pytest.mark.usefixtures("no_cache")

WORLD = 2
PSUM, SPLIT, WHOLE = Setting(), Setting(Xla()), Setting(Xla(), GatherSum())
LARGE, SMALL = (Setting(Xla(), fusion_bytes=n) for n in (1 << 16, 1 << 14))
LIKE = {"w": jnp.zeros((64, 64)), "v": jnp.zeros((64, 64)), "bias": jnp.zeros(64)}


def mesh():
    return Mesh(np.array(jax.devices()[:WORLD]), ("data",))


def grads(seed=0):
    rng = np.random.default_rng(seed)
    return {k: rng.normal(size=(WORLD, *x.shape)).astype(np.float32) for k, x in LIKE.items()}


class Training:
    """A step that does nothing but reduce gradients by a tuner; `costs` are a step's seconds."""

    def __init__(self, tuner, policy=None, monkeypatch=None, costs=None, **options):
        self.tuner, self.costs, self.now, self.steps = tuner, costs, 0.0, 0
        if policy is None:
            policy = Quantize(4)
        sync = cgx_jax.sync_gradients("data", policy, exchange=tuner, mesh=mesh(), **options)
        self.tx = optax.chain(sync, optax.sgd(1.0))
        self.state = self.tx.init(LIKE)
        self.step = tuner.jit(self.sharded(), donate_argnums=1)
        self.ran = []
        if monkeypatch is not None:
            ticks = itertools.cycle([lambda: 0.0, self._cost])
            monkeypatch.setattr(training_loop, "clock", lambda: next(ticks)())

    def _cost(self):
        self.steps += 1
        return self.costs(self.tuner.current, self.steps)

    def sharded(self):
        specs = cgx_jax.state_specs(self.state, "data")
        return jax.shard_map(
            lambda g, s: self.tx.update(jax.tree.map(lambda x: x[0], g), s),
            mesh=mesh(),
            in_specs=(P("data"), specs),
            out_specs=(P(), specs),
        )

    def run(self, steps):
        for t in range(steps):
            out, self.state = self.step(grads(t), self.state)
            self.ran.append(self.tuner.current)
        return jax.tree.map(np.asarray, out)


def tuner(policy=None, **options):
    return Tuner(policy, **({"compilations": 3, "rounds": 4, "cache": False} | options))


def costs_of(split, whole, slow=lambda setting, step: 1.0):
    """Seconds of a step: psum takes 1."""
    each = {PSUM: 1.0, SPLIT: split, WHOLE: whole}
    return lambda setting, step: each[setting] * slow(setting, step)


def steps_of(count):
    """Steps of the trials of `count` settings: one to compile, and two in each of four rounds."""
    return count * (1 + 2 * 4)


TRIAL_STEPS = steps_of(2) + steps_of(2)  # two ways, then the faster one and psum


@pytest.mark.parametrize(
    ("split", "whole", "kept"), [(0.5, 0.8, SPLIT), (0.8, 0.5, WHOLE), (1.1, 1.01, PSUM)]
)
def test_the_fastest_is_kept_and_psum_where_nothing_beats_it(monkeypatch, split, whole, kept):
    training = Training(tuner(), monkeypatch=monkeypatch, costs=costs_of(split, whole))
    training.run(TRIAL_STEPS + 2)
    ways, last = training.ran[: steps_of(2)], training.ran[steps_of(2) : TRIAL_STEPS]
    faster = SPLIT if split < whole else WHOLE
    assert {s: ways.count(s) for s in (SPLIT, WHOLE)} == dict.fromkeys((SPLIT, WHOLE), steps_of(1))
    assert {s: last.count(s) for s in (PSUM, faster)} == dict.fromkeys((PSUM, faster), steps_of(1))
    assert training.ran[TRIAL_STEPS:] == [kept] * 2
    metrics = training.tuner.metrics()
    assert metrics["cgx/tuner"] == "kept"
    assert metrics["cgx/setting"] == str(kept)
    assert metrics[f"cgx/saved/{SPLIT}"] == pytest.approx(1 - split)
    assert metrics[f"cgx/saved/{WHOLE}"] == pytest.approx(1 - whole)
    assert metrics[f"cgx/seconds/{WHOLE}"] == pytest.approx(whole)


def test_no_setting_is_compared_with_another_right_after_psum(monkeypatch):
    """Even if the two steps that follow a step of psum take twice their time."""
    ran = []

    def costs(setting, step):
        ran.append(setting)
        after = PSUM in ran[-3:-1] and setting == SPLIT
        return {PSUM: 20.0, SPLIT: 0.5, WHOLE: 0.7}[setting] * (2 if after else 1)

    training = Training(tuner(), monkeypatch=monkeypatch, costs=costs)
    training.run(TRIAL_STEPS + 1)
    assert training.tuner.current == SPLIT


@dataclasses.dataclass(frozen=True)
class Engined(Xla):
    """XLA's collectives with an option that no compiled program knows."""

    speed: int | None = None
    running: ClassVar[list[int]] = []

    def in_program(self):
        return Engined()

    def nearby(self):
        return [Engined(speed) for speed in (1, 2, 3) if speed != self.speed][:2]

    def require(self, name, axes):
        if self.speed is not None:
            self.running.append(self.speed)


@pytest.mark.parametrize(("fastest", "kept"), [(3, 3), (1, 1), (2, 2)])
def test_options_outside_of_the_program_are_tried_second_and_compile_nothing(
    monkeypatch, fastest, kept
):
    monkeypatch.setattr(tuner_module, "_exchanges", lambda asked: (Engined(2),))
    Engined.running.clear()

    def costs(setting, step):
        if setting.exchange is None:
            return 1.0
        assert Engined.running[-1] == setting.exchange.speed
        return 0.5 + 0.1 * (setting.exchange.speed != fastest) + 0.2 * (setting.reduction is None)

    training = Training(tuner(), monkeypatch=monkeypatch, costs=costs)
    challenge = 0 if fastest == 2 else 2 * steps_of(2)
    ends = np.cumsum([steps_of(2), steps_of(3), challenge, steps_of(2)])
    training.run(ends[-1] + 2)
    way = Setting(Engined(2), GatherSum())
    winner = dataclasses.replace(way, exchange=Engined(kept))
    first, second, again, third, last = np.split(np.array(training.ran, object), ends)
    assert set(first) == {Setting(Engined(2)), way}
    assert set(second) == {way, *(dataclasses.replace(way, exchange=Engined(s)) for s in (1, 3))}
    assert set(again) == ({way, winner} if challenge else set())
    assert set(third) == {PSUM, winner}
    assert set(last) == {winner}
    assert training.tuner.traces == 1 + 3  # before anything is known, and each program once
    shown = training.tuner.metrics()
    assert shown[f"cgx/saved/{winner}"] == pytest.approx(0.5)
    # Measured beside the winner's, which alone was measured beside psum's.
    assert shown[f"cgx/saved/{Setting(Engined(2))}"] == pytest.approx(0.3 - 0.1 * (fastest != 2))


@pytest.mark.parametrize(("small", "kept"), [(0.4, SMALL), (0.6, LARGE), (0.4999, LARGE)])
def test_another_size_of_the_fastest_ones_buffers_is_tried(monkeypatch, small, kept):
    """Three programs: psum, one way by one buffer, and the same way by a buffer per matrix."""
    monkeypatch.setattr(candidates_module, "FUSION", (LARGE.fusion_bytes, SMALL.fusion_bytes))
    noise = itertools.cycle([0.002, -0.002, -0.002, 0.002])  # so that 0.4999 is not surely less

    def costs(setting, step):
        return {PSUM: 1.0, LARGE: 0.5, SMALL: small}[setting] + next(noise)

    training = Training(tuner(reductions=()), monkeypatch=monkeypatch, costs=costs)
    training.run(5 * steps_of(2))
    first = training.ran.index(PSUM)
    assert set(training.ran[:first]) == {LARGE, SMALL}
    assert first == steps_of(2) * (1 if small == 0.6 else 3)
    assert set(training.ran[first : first + steps_of(2)]) == {PSUM, kept}
    assert set(training.ran[first + steps_of(2) :]) == {kept}
    assert training.tuner.traces == 1 + 3
    assert training.tuner.metrics()[f"cgx/saved/{SMALL}"] == pytest.approx(1 - small, abs=0.005)


@pytest.mark.parametrize("compilations", [2, 3, 4])
def test_no_more_programs_are_compiled_than_allowed(monkeypatch, compilations):
    monkeypatch.setattr(candidates_module, "FUSION", (LARGE.fusion_bytes, SMALL.fusion_bytes))
    training = Training(
        tuner(compilations=compilations),
        monkeypatch=monkeypatch,
        costs=lambda setting, step: 0.5 + 0.5 * (setting == PSUM),
    )
    training.run(100)
    assert training.tuner.state == "kept"
    assert len(set(training.ran)) == compilations
    assert training.tuner.traces == 1 + compilations


def test_what_is_reduced_is_what_the_setting_says(monkeypatch):
    """By psum the mean is exact; by a code it is that of the same call with its options."""
    training = Training(tuner(), monkeypatch=monkeypatch, costs=costs_of(1.5, 1.8))

    def mean(t, **options):
        f = jax.shard_map(
            lambda g: cgx_jax.pmean_compressed(jax.tree.map(lambda x: x[0], g), "data", **options),
            mesh=mesh(),
            in_specs=P("data"),
            out_specs=P(),
        )
        return jax.tree.map(lambda x: -np.asarray(x), jax.jit(f)(grads(t)))

    training.run(TRIAL_STEPS)
    exact = training.run(1)
    assert training.tuner.current == PSUM
    for k, x in grads(0).items():
        np.testing.assert_allclose(exact[k], -x.mean(0), atol=1e-6)
    for kept, options in ((SPLIT, {}), (WHOLE, {"reduction": "gather_sum"})):
        monkeypatch.setattr(training.tuner, "current", kept)
        got, want = training.run(1), mean(0, compressor=Quantize(4), exchange="xla", **options)
        jax.tree.map(np.testing.assert_array_equal, got, want)


SLOW = {
    "one machine is ten times slower for all of two rounds": lambda s, n: 10 if 9 <= n < 21 else 1,
    "and just while the best one runs, once": lambda s, n: 10 if n == 6 else 1,
    "psum alone is slow once": lambda s, n: 50 if n in (8, 10) and s == PSUM else 1,
}


@pytest.mark.parametrize("name", SLOW)
@pytest.mark.parametrize(("split", "kept"), [(0.8, SPLIT), (1.05, PSUM)])
@pytest.mark.parametrize("start", [0, 17])  # when the spell falls on the ways, or on psum
def test_a_slow_spell_does_not_flip_the_choice(monkeypatch, name, split, kept, start):
    costs = costs_of(split, 1.2, lambda setting, step: SLOW[name](setting, step - start))
    training = Training(tuner(rounds=8), monkeypatch=monkeypatch, costs=costs)
    training.run(2 * 2 * (1 + 2 * 8) + 1)
    assert training.tuner.state == "kept"
    assert training.tuner.current == kept


def test_every_candidate_takes_two_steps_of_each_round_and_the_second_counts():
    trials, order = Trials(3, 2), []
    while not trials.done:
        order.append(trials.current)
        trials.record(len(order))
    assert order == [0, 1, 2, 2, 2, 1, 1, 0, 0, 0, 0, 1, 1, 2, 2]
    np.testing.assert_array_equal(trials.samples, [[9, 7, 5], [11, 13, 15]])


def test_one_slow_round_does_not_choose_the_fastest():
    samples = np.array([[1.0, 1.1, 1.3]] * 8)
    samples[2] *= 10
    samples[5, 0] = 10
    assert relative(samples).argmin() == 0
    assert relative(samples[:, ::-1]).argmin() == 2


@pytest.mark.parametrize(
    ("split", "whole", "kept"), [(0.5, 0.505, WHOLE), (0.505, 0.5, WHOLE), (0.5, 0.52, SPLIT)]
)
def test_of_two_that_are_as_fast_the_one_with_less_error_is_kept(monkeypatch, split, whole, kept):
    training = Training(tuner(), monkeypatch=monkeypatch, costs=costs_of(split, whole))
    training.run(TRIAL_STEPS + 1)
    assert training.tuner.current == kept


@pytest.mark.parametrize(("gain", "low", "high"), [(0.95, 0.7, 1), (1.0, 0, 0.15), (1.05, 0, 0.02)])
@pytest.mark.parametrize(("rounds", "noise"), [(16, 0.05), (48, 0.1)])
def test_a_challenger_of_another_speed_is_told_from_the_first(rounds, noise, gain, low, high):
    """Noisier steps take more rounds; a challenger that is as fast may replace the first."""
    rng = np.random.default_rng(0)
    samples = np.exp(rng.normal(scale=noise, size=(2000, rounds, 2))) * [1, gain]
    assert low <= np.mean([challenges(s) for s in samples]) <= high


def test_all_ranks_have_passed_a_first_barrier_before_a_trial_is_timed(monkeypatch):
    training, seen = Training(tuner()), []
    monkeypatch.setattr(training_loop, "clock", lambda: seen.append("clock") or 0.0)
    training.run(1)
    gather = training_loop.agreement.gather
    monkeypatch.setattr(
        training_loop.agreement, "gather", lambda n: seen.append("barrier") or gather(n)
    )
    seen.clear()
    training.run(1)
    assert seen == ["barrier", "barrier", "clock", "clock"]


@pytest.mark.parametrize(("seconds", "blocks"), [(1.0, 1), (0.1, 4), (0.001, 6)])
def test_short_steps_take_more_rounds(monkeypatch, seconds, blocks):
    """Two ways of four rounds take 16 steps; a few seconds of them are needed, or 24 rounds."""
    costs = {PSUM: 1.0, SPLIT: 0.9 * seconds, WHOLE: seconds}
    training = Training(
        tuner(), monkeypatch=monkeypatch, costs=lambda setting, step: costs[setting]
    )
    training.run((blocks + 6) * steps_of(2))
    assert training.ran.index(PSUM) == blocks * steps_of(2)
    assert training.tuner.current == SPLIT


def test_nothing_slower_than_psum_is_ever_kept():
    rng = np.random.default_rng(0)
    for _ in range(500):
        samples = np.exp(rng.normal(size=(8, 4)))
        i = best(samples)
        ratio = samples[:, i] / samples[:, 0]
        assert i == 0 or np.quantile(ratio, 0.75) < 1


def test_the_noise_of_the_first_one_does_not_choose_between_the_others():
    """The better of two is found in 95 % of the trials; by ratios to the first it would be 86 %."""
    rng = np.random.default_rng(0)
    samples = np.exp(rng.normal(scale=[0.5, 0.1, 0.1], size=(2000, 8, 3))) * [20, 1.1, 1]
    assert np.mean([best(s) == 2 for s in samples]) > 0.94


# The times of other options over those of the first in eight rounds, and whether they replace it.
OPTIONS = {
    "1 % less in every round": ([0.99] * 8, True),
    "1 % less in seven rounds of eight": ([0.99] * 7 + [1.2], False),
    "6 % less in seven rounds of eight": ([0.94] * 7 + [1.2], True),
    "4 % less in seven rounds of eight": ([0.96] * 7 + [1.2], False),
    "half in five rounds of eight": ([0.5] * 5 + [1.2] * 3, False),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options_of_one_program_must_be_faster_more_often_or_by_more(name):
    ratios, replace = OPTIONS[name]
    samples = np.stack([np.ones(8), ratios, [0.5] + [1.1] * 7], axis=1)
    assert best(samples, similar=True) == int(replace)


@pytest.mark.parametrize(("ratio", "low", "high"), [(1.05, 0, 0.03), (0.9, 0.75, 1)])
def test_noise_seldom_decides_between_options(ratio, low, high):
    """Two others that take `ratio` of the first one's time, under noise of 10 %."""
    rng = np.random.default_rng(0)
    samples = np.exp(rng.normal(scale=0.1, size=(2000, 8, 3))) * [1, ratio, ratio]
    replaced = np.mean([best(s, similar=True) > 0 for s in samples])
    assert low <= replaced <= high


def asked(like, compressor, world=8, **options):
    return [Asked("test", Plan.build(like, compressor), Axes(("data",), None, world), False)]


BIG = np.zeros((4096, 4096), np.float32)  # 64 MiB
OFFERED = Offered((Mpi(window=4), Xla()), (GatherSum(),), ())
# tree, compressor, ranks, what is worth a trial
FIRST = {
    "a tie of bytes goes by the table of exchanges": (
        BIG,
        Quantize(4),
        2,
        [
            "mpi(window=4), 64 MiB",
            "xla, 64 MiB",
            "mpi(window=4)/gather_sum, 64 MiB",
            "xla/gather_sum, 64 MiB",
        ],
    ),
    "more ranks, more bytes by gather_sum": (
        BIG,
        Quantize(4),
        8,
        [
            "mpi(window=4), 64 MiB",
            "xla, 64 MiB",
            "mpi(window=4)/gather_sum, 64 MiB",
            "xla/gather_sum, 64 MiB",
        ],
    ),
    "what sends more than psum is ruled out": (
        BIG,
        Quantize(4),
        32,
        ["mpi(window=4), 64 MiB", "xla, 64 MiB"],
    ),
    "what is summed as numbers goes by xla alone": (BIG, PowerSGD(2), 4, ["xla, 64 MiB"]),
    "one rank sends nothing": (BIG, Quantize(4), 1, []),
}


@pytest.mark.parametrize("name", FIRST)
def test_without_a_profile_what_sends_less_than_psum_is_tried_in_order(name):
    like, compressor, world, expected = FIRST[name]
    first, *rest = candidates(asked(like, compressor, world), OFFERED, None)
    assert first.setting == PSUM
    assert {c.seconds for c in rest} <= {None}
    assert sorted(str(c.setting) for c in rest) == sorted(expected)
    assert [c.nbytes for c in rest] == sorted(c.nbytes for c in rest)
    assert all(c.nbytes < first.nbytes for c in rest)


@pytest.mark.parametrize(
    ("later", "expected"),
    [
        (Quantize(8), ["mpi", "mpi/gather_sum", "xla", "xla/gather_sum"]),
        (SignSGD(), ["mpi", "xla"]),  # gather_sum is wrong for votes
        (PowerSGD(2), ["xla"]),  # summed as numbers
    ],
    ids=str,
)
def test_a_setting_is_right_for_every_plan_that_a_policy_may_choose(later, expected):
    (call,) = asked(BIG, Quantize(4), 2)
    call = call._replace(later=(Plan.build(BIG, later),))
    offered = Offered((Mpi(), Xla()), (GatherSum(),), ())
    found = {str(c.setting).split(",")[0] for c in candidates([call], offered, None)}
    assert sorted(found) == sorted(["psum", *expected])


def test_a_tuner_asks_for_all_that_an_adaptive_policy_may_choose():
    policy = Adaptive(candidates=[SignSGD(), Quantize(4)])
    training = Training(tuner(policy), policy)
    training.run(1)
    assert [c.setting.reduction for c in training.tuner._found] == [None, None]


def test_settings_that_compile_to_one_program_are_one_candidate():
    offered = Offered((Xla(),), (), ())
    small = candidates(asked(np.zeros((64, 64), np.float32), Quantize(4)), offered, None)
    assert [str(c.setting) for c in small] == ["psum", "xla, 64 MiB"]
    four = {str(i): np.zeros((2048, 1024), np.float32) for i in range(4)}  # 8 MiB each
    some = candidates(asked(four, Quantize(4)), offered, None)
    assert {str(c.setting) for c in some} == {"psum", "xla, 64 MiB", "xla, 16 MiB", "xla, 4 MiB"}


def test_a_profile_ranks_and_rules_out():
    """By it xla pays from 100 KiB on, and takes half of psum's time at 256 KiB."""
    profile = profile_with_crossing()
    for shape, expected in {(16, 128): ["psum"], (64, 1024): ["psum", "xla, 64 MiB"]}.items():
        like = np.zeros(shape, np.float32)
        found = candidates(asked(like, Quantize(4)), Offered((Xla(),), (), ()), profile)
        assert [str(c.setting) for c in found] == expected
    psum, xla = found
    assert psum.seconds == pytest.approx(64e-5)
    assert xla.seconds == pytest.approx(40e-5, rel=0.1)
    other = candidates(asked(like, Quantize(4), world=4), Offered((Xla(),), (), ()), profile)
    assert [c.seconds for c in other] == [None, None]  # it is of 8 ranks


def test_reductions_without_measurements_come_after_those_with_a_prediction():
    offered = Offered((Xla(),), (Tree(), GatherSum()), ())
    like = np.zeros((64, 1024), np.float32)
    found = candidates(asked(like, Quantize(4)), offered, profile_with_crossing())
    assert [(str(c.setting), c.seconds is None) for c in found] == [
        ("psum", False),
        ("xla, 64 MiB", False),
        ("xla/tree, 64 MiB", True),
        ("xla/gather_sum, 64 MiB", True),
    ]


@pytest.mark.parametrize(
    ("xla", "expected"),  # seconds of XLA's collectives where MPI takes 1e-3
    [
        (
            1.2e-3,
            ["mpi, 64 MiB", "xla, 64 MiB", "mpi/gather_sum, 64 MiB", "xla/gather_sum, 64 MiB"],
        ),
        (
            2e-3,
            ["mpi, 64 MiB", "mpi/gather_sum, 64 MiB", "xla, 64 MiB", "xla/gather_sum, 64 MiB"],
        ),
    ],
)
def test_each_way_that_may_be_the_fastest_comes_before_other_sizes(xla, expected):
    """Between 2 ranks gather_sum sends as much, and no profile says more of 32 MiB."""
    rows = [("psum", 32, 1 << 25, 1.0), ("mpi", 4.125, 1 << 25, 1e-3), ("xla", 4.125, 1 << 25, xla)]
    profile = dataclasses.replace(profile_with_crossing(world=2), rows=tuple(rows))
    four = {str(i): np.zeros((2048, 1024), np.float32) for i in range(4)}  # 8 MiB each
    offered = Offered((Mpi(), Xla()), (GatherSum(),), ())
    _, *found = candidates(asked(four, Quantize(4), 2), offered, profile)
    assert [str(c.setting) for c in found][: len(expected)] == expected


# Predicted seconds by 64, 16 and 4 MiB; None beyond what was measured. Then, in MiB, the size that
# is tried first over XLA's collectives, and the one that is tried beside it if it is kept.
SIZES = {
    "all alike": ([1.0, 1.05, 1.09], 64, 4),
    "smaller ones seem a little faster": ([1.4, 1.2, 1.0], 64, 4),
    "smaller ones are predicted to be faster": ([2.0, 1.6, 1.0], 4, None),
    "only the largest is predicted to be slower": ([1.6, 1.0, 1.0], 16, 4),
    "the smallest is predicted to be slower": ([1.0, 1.05, 1.6], 64, 16),
    "nothing is known": ([None, None, None], 64, 4),
    "the largest was not measured": ([None, 1.0, 1.05], 64, 4),
    "one size only": ([1.0], 64, None),
}


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("name", SIZES)
def test_of_sizes_that_are_predicted_alike_the_largest_comes_first(monkeypatch, name, fused):
    """The largest and the next one for fused calls, whatever is predicted."""
    monkeypatch.setattr(mpi, "defaults", lambda: DEFAULT)
    seconds, first, other = SIZES[name]
    if fused:
        first, other = 64, 16 if len(seconds) > 1 else None
    exchange = DEFAULT if fused else Xla()
    settings = [Setting(exchange, None, None, mib << 20) for mib in (64, 16, 4)]
    found = [Candidate(x, t, 1) for x, t in zip(settings, seconds, strict=False)]
    ordered = sorted(found, key=candidates_module._cost)
    head, *rest = candidates_module._varied(ordered)
    assert head.setting.fusion_bytes == first << 20
    assert rest == [c for c in ordered if c != head]
    beside = other_size(found, head.setting, [head.setting])
    expected = None if other is None else Setting(exchange.together(), None, None, other << 20)
    assert beside == expected


SHORT, DEFAULT, LONG = Mpi(1 << 15, 2, 1), Mpi(1 << 17, 4, 1), Mpi(1 << 19, 4, 1)


@pytest.mark.parametrize(
    ("engine", "expected"),
    [
        (DEFAULT, [SHORT, LONG]),
        (SHORT, [DEFAULT, LONG]),
        (LONG, [DEFAULT, SHORT]),
        (Mpi(1 << 15, 4, 1), [DEFAULT, SHORT]),
    ],
    ids=str,
)
def test_engine_options_with_short_and_with_long_segments_are_tried(monkeypatch, engine, expected):
    monkeypatch.setattr(mpi, "defaults", lambda: DEFAULT)
    found = Setting(engine, GatherSum()).nearby()
    assert found == [Setting(other, GatherSum()) for other in expected]


def test_another_size_has_long_segments_and_leaves_out_what_was_tried(monkeypatch):
    monkeypatch.setattr(mpi, "defaults", lambda: DEFAULT)
    settings = [Setting(Mpi(window=4), None, None, mib << 20) for mib in (64, 16, 4)]
    found = [Candidate(x, None, 1) for x in settings]
    kept = dataclasses.replace(settings[0], exchange=Mpi(window=8))
    other = Setting(LONG, None, None, 16 << 20)
    assert other_size(found, kept, [kept, settings[2]]) == other
    assert other_size(found, kept, settings) is None
    assert other_size(found, Setting(), [Setting()]) is None


def test_nothing_is_predicted_far_beyond_what_was_measured():
    """Up to four times its 256 KiB for xla, and not beyond its 16 KiB for gather_sum."""
    rows = [("xla/gather_sum", 4.125, 4096 * 4**i, 1e-6) for i in range(2)]
    profile = profile_with_crossing(world=2)
    profile = dataclasses.replace(profile, rows=(*profile.rows, *rows))
    offered = Offered((Xla(),), (GatherSum(),), ())
    for nbytes, known in (
        (1 << 14, {GatherSum()}),  # xla is ruled out
        (1 << 20, {None}),
        ((1 << 20) + 4, set()),
    ):
        like = np.zeros(nbytes // 4, np.float32)
        _, *found = candidates(asked(like, Quantize(4), 2), offered, profile)
        assert {c.setting.reduction for c in found if c.seconds is not None} == known
        assert len(found) == (1 if nbytes == 1 << 14 else 2)


def test_levels_are_tried_and_price_what_crosses(mesh_2d):
    """Over 4 x 2 ranks the share that crosses is half of the values."""
    seen = []

    def f(x):
        call = Asked(
            "test", Plan.build(x, Quantize(4)), Axes.resolve("f", ("data", "model"), None), False
        )
        offered = Offered((Xla(),), (), (Levels("model"),))
        seen.extend(candidates([call], offered, profile_with_crossing()))
        return x

    jax.eval_shape(
        jax.shard_map(f, mesh=mesh_2d, in_specs=P(), out_specs=P(), check_vma=False),
        jax.ShapeDtypeStruct((64, 1024), np.float32),
    )
    names = [str(c.setting) for c in seen]
    assert names == ["psum", "xla, levels ('model',), 64 MiB", "xla, 64 MiB"]
    assert seen[1].seconds < seen[2].seconds


def test_levels_that_do_not_fit_the_mesh_fail_in_the_first_step():
    for levels, message in (
        (Levels(groups=[[0, 1], [2, 3]]), "must hold every index below 2 once"),
        (Levels("local"), r"Levels\(inner=\('local',\)\) must name some of the call's axes"),
    ):
        with pytest.raises(ValueError, match=message):
            Training(tuner(levels=[levels])).run(1)


BAD = {
    "one compilation": ({"compilations": 1}, "compilations=1 must be .* 2 or more, for a trial"),
    "half a compilation": ({"compilations": 2.5}, "compilations=2.5 must be a whole number"),
    "no quartiles": ({"rounds": 3}, "rounds=3 must be a whole number of 4 or more"),
    "an unknown reduction": ({"reductions": ["pigeon"]}, "reduction='pigeon' is unknown"),
    "levels of no kind": ({"levels": ["local"]}, r"'local'; pass a list of Levels\(...\)"),
    "a policy that is fixed": ({"policy": Quantize(4)}, "is not an Adaptive policy"),
}


@pytest.mark.parametrize("name", BAD)
def test_options_that_cannot_hold_are_refused(name):
    options, message = BAD[name]
    with pytest.raises((TypeError, ValueError), match=f"Tuner: .*{message}"):
        tuner(**options)


def test_a_first_step_that_fails_leaves_nothing_behind():
    training, other = Training(tuner()), Training(tuner())
    good = training.tx

    def fail(grads, state):
        good.update(grads, state)
        raise RuntimeError("a mistake of the user's")

    training.tx = good._replace(update=fail)
    with pytest.raises(RuntimeError, match="a mistake"):
        training.run(1)
    training.tx = good
    for each in (training, other):
        each.run(1)
    assert training.tuner._found == other.tuner._found


def test_a_tuner_without_its_jit_is_refused():
    training = Training(tuner())
    with pytest.raises(ValueError, match=r"write tuner.jit\(step\) instead of jax.jit\(step\)"):
        jax.jit(training.sharded())(grads(), training.state)
    with pytest.raises(ValueError, match="this tuner has a step already; make another Tuner"):
        training.tuner.jit(lambda x: x)
    with pytest.raises(TypeError, match=r"Tuner object .* is not an exchange"):
        cgx_jax.psum_compressed(jnp.ones(3), "data", exchange=tuner())


def test_a_step_that_is_jitted_already_or_asks_nothing_is_refused():
    training = Training(tuner())
    inner = tuner()
    training.tx = cgx_jax.sync_gradients("data", Quantize(4), exchange=inner, mesh=mesh())
    training.state = training.tx.init(LIKE)
    step = inner.jit(jax.jit(training.sharded()))
    with pytest.raises(ValueError, match=r"already jitted.*Pass tuner.jit the function without"):
        step(grads(), training.state)
    with pytest.raises(ValueError, match="Tuner: the step did not use the setting"):
        tuner().jit(lambda x: x + 1)(jnp.ones(3))


def test_what_the_tuner_chooses_is_not_named_beside_it():
    for option in ({"reduction": "tree"}, {"levels": Levels("local")}):
        with pytest.raises(
            ValueError, match=r"the tuner chooses these; leave .*Tuner\(reductions=\[...\]"
        ):
            cgx_jax.sync_gradients("data", Quantize(4), exchange=tuner(), mesh=mesh(), **option)


def test_memories_survive_changes_of_the_setting(monkeypatch):
    """What the optimizer saw and what the ranks remember are all gradients, over the trials too."""
    training = Training(
        tuner(),
        monkeypatch=monkeypatch,
        costs=costs_of(0.5, 0.8),
        memory=cgx_jax.ErrorFeedback(),
    )
    total = {k: np.zeros(x.shape) for k, x in LIKE.items()}
    steps = TRIAL_STEPS + 3
    for t in range(steps):
        out, training.state = training.step(grads(t), training.state)
        for k in total:
            total[k] -= np.asarray(out[k])
    (memory,) = training.state[0].memory
    for k in total:
        want = sum(grads(t)[k].mean(0) for t in range(steps))
        np.testing.assert_allclose(total[k] + np.asarray(memory[k]).mean(0), want, atol=1e-4)
    assert training.tuner.current == SPLIT


@pytest.mark.slow
def test_with_adaptive_one_object_compiles_and_plans_change_after_the_trials(monkeypatch):
    policy = Adaptive(
        candidates=[Quantize(b, 64) for b in (2, 4, 8)], warmup=4, every=7, sample_every=1
    )
    training = Training(tuner(policy), policy, monkeypatch=monkeypatch, costs=costs_of(0.5, 0.8))
    training.run(TRIAL_STEPS)
    assert not policy.history  # a new plan would compile every candidate again
    training.run(1)
    assert [r.step for r in policy.history] == [TRIAL_STEPS]
    assert training.tuner.current == SPLIT
    assert len(policy.compile_seconds) == 3 + (policy.history[0].outcome == "changed")
    with pytest.raises(ValueError, match=r"policy.jit\(step\) or Tuner\(policy\).jit\(step\)"):
        Training(tuner(), Adaptive()).run(1)


def test_the_table_sets_predicted_beside_measured(monkeypatch, following, caplog):
    rows = [
        ("psum", 32, 8192, 1.0),
        ("xla", 4.125, 8192, 0.25),
        ("xla/gather_sum", 4.125, 8192, 0.5),
    ]
    profile = profile_with_crossing(world=WORLD)
    following(dataclasses.replace(profile, rows=tuple(rows)))
    training = Training(tuner(), monkeypatch=monkeypatch, costs=costs_of(0.5, 0.8))
    training.run(TRIAL_STEPS + 1)
    ((level, text),) = [r[1:] for r in caplog.record_tuples if r[0] == "cgx_jax.tuner.tuner"]
    assert level == logging.WARNING  # shown where logging is not set up
    head, _, shown = text.partition("\n")
    assert head == f"Tuner: {SPLIT} is kept."
    assert shown == training.tuner.table()
    line = next(x for x in shown.splitlines() if x.startswith("->"))
    assert line.split()[1:4] == ["xla,", "64", "MiB"]
    assert line.split()[4:6] == ["500.00", "500.00"]
    metrics = training.tuner.metrics()
    # psum: 4 times the measured size and the bias. xla: a quarter of it, and a psum of the bias
    # alone, which takes no less than the smallest that was measured.
    assert metrics[f"cgx/predicted/{SPLIT}"] == pytest.approx((4 + 1 / 32) - (4 / 4 + 1))
    assert metrics[f"cgx/predicted/{PSUM}"] == 0


PROGRAM = """
import sys
from pathlib import Path
from cgx_jax.policies import training_loop
from cgx_jax.tuner import cache

folder = Path(FOLDER) / str(rank)
LIKE = {"w": jnp.zeros((64, 64))}

def train(costs):
    tuner = cgx_jax.Tuner(compilations=3, rounds=4, cache=folder)
    tx = cgx_jax.sync_gradients("data", cgx_jax.Quantize(4), exchange=tuner, mesh=mesh)
    state = tx.init(LIKE)
    step = tuner.jit(jax.shard_map(
        lambda g, s: tx.update(jax.tree.map(lambda x: x[0, :1, :1] * jnp.ones((64, 64)), g), s),
        mesh=mesh, in_specs=(P("data"), P()), out_specs=(P(), P()),
    ))
    ticks = [lambda: 0.0, lambda: costs[str(tuner.current)]]
    calls = iter(range(10**6))
    training_loop.clock = lambda: ticks[next(calls) % 2]()
    for _ in range((2 + 2) * (1 + 2 * 4) + 1):
        _, state = step({"w": place(every[rank])}, state)
    return tuner

# To rank 1 the split one seems fast, and psum a little faster than the gathered one; the slowest
# process counts, and process 0 decides.
names = ["psum", "xla, 64 MiB", "xla/gather_sum, 64 MiB"]
first = train(dict(zip(names, [[1.0, 2.0, 0.5], [0.7, 0.1, 0.9]][rank])))
assert first.state == "kept" and str(first.current) == names[2], (first.state, first.current)
assert len(list(folder.rglob("*.json"))) == (rank == 0)
multihost_utils.sync_global_devices("looked")
# Rank 1 has a cache of its own that says something else: process 0's holds.
if rank == 0:
    (file,) = folder.rglob("*.json")
    other = folder.parent / "1" / file.relative_to(folder)
    other.parent.mkdir(parents=True)
    other.write_text(file.read_text().replace('"gather_sum"', "null"))
multihost_utils.sync_global_devices("written")
second = train({name: 1.0 for name in names})
assert second.state == "cached" and str(second.current) == names[2], second.current
print("ok")
"""


def test_processes_follow_process_0(tmp_path):
    with socket.socket() as s:
        s.bind(("localhost", 0))
        port = s.getsockname()[1]
    program = HEADER + PROGRAM.replace("FOLDER", repr(str(tmp_path)))
    ranks = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", program, *map(str, (rank, 2, port))],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=_environment(),
        )
        for rank in range(2)
    ]
    try:
        for p in ranks:
            out, error = p.communicate(timeout=240)
            assert out.endswith("ok\n"), error
    finally:
        for p in ranks:
            p.kill()
            p.wait()
