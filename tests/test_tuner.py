"""Tuner: what it tries, in which order, what it keeps, and who decides."""

import dataclasses
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import cgx_jax
from cgx_jax import Adaptive, Plan, Quantize
from cgx_jax.axes import Axes
from cgx_jax.compressors import PowerSGD, SignSGD
from cgx_jax.exchanges import Mpi, Xla
from cgx_jax.reductions import GatherSum, Levels, Ring, Tree
from cgx_jax.route.route import Options
from cgx_jax.tuning import Setting
from cgx_jax.tuning.candidates import Asked, candidates
from cgx_jax.tuning.race import search
from cgx_jax.tuning.setting import Offered
from processes import check_ranks
from profiles import with_crossing
from tuning_steps import (
    LIKE,
    MESH,
    PSUM,
    SPLIT,
    TRIAL_STEPS,
    WHOLE,
    WORLD,
    Training,
    costs_of,
    grads,
    steps_of,
    tuner,
)
from worlds import on_ranks, sharded

pytestmark = pytest.mark.usefixtures("no_cache", "unoptimized")

REDUCTIONS = ("gather_sum", "tree", "ring")
WAYS = [SPLIT, WHOLE, Setting(Xla(), Tree()), Setting(Xla(), Ring())]
# A step's seconds by xla, gather_sum, tree and ring, where psum takes 1; in every race, who takes
# part in it by number; and what is kept.
RACES = {
    "the first is the fastest": ([0.5, 0.6, 0.7, 0.8], [[0, 1, 2, 3], [0, 1]], 0),
    "the last is the fastest": ([0.8, 0.7, 0.6, 0.5], [[0, 1, 2, 3], [2, 3]], 3),
    "of three, two go on": ([0.7, 0.6, 0.8], [[0, 1, 2], [0, 1]], 1),
    "one alone meets psum at once": ([0.5], [], 0),
    "of two that are as fast, the better ranked one": ([0.5, 0.5], [[0, 1]], 0),
    "psum wins": ([1.1, 1.01], [[0, 1]], None),
    "psum wins a tie": ([1.0, 1.1], [[0, 1]], None),
}


@pytest.mark.parametrize("name", RACES)
@pytest.mark.quick("the last is the fastest", "one alone meets psum at once", "psum wins a tie")
def test_the_slower_half_drops_out_until_one_meets_psum(monkeypatch, name):
    seconds, expected, best = RACES[name]
    settings = WAYS[: len(seconds)]
    each = dict(zip(settings, seconds, strict=True)) | {PSUM: 1.0}
    training = Training(
        tuner(compilations=6, reductions=REDUCTIONS[: len(seconds) - 1]),
        monkeypatch=monkeypatch,
        costs=lambda setting, step: each[setting],
    )
    fastest = settings[int(np.argmin(seconds))]
    fields = [*([settings[i] for i in race] for race in expected), [PSUM, fastest]]
    kept = PSUM if best is None else settings[best]
    for field in fields:
        training.ran.clear()
        training.run(steps_of(len(field)))
        assert {s: training.ran.count(s) for s in set(training.ran)} == dict.fromkeys(
            field, steps_of(1)
        )
    training.ran.clear()
    training.run(2)
    assert training.ran == [kept] * 2
    assert training.tuner.traces == 1 + 1 + len(settings)  # before anything is known; each program
    metrics = training.tuner.metrics()
    assert metrics["cgx/tuner"] == "kept"
    assert metrics["cgx/setting"] == str(kept)
    for setting, own in each.items():
        assert metrics[f"cgx/saved/{setting}"] == pytest.approx(1 - own)
        assert metrics[f"cgx/seconds/{setting}"] == pytest.approx(own)


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


@pytest.mark.parametrize("compilations", [2, 3, 4])
@pytest.mark.quick("3")
def test_no_more_programs_are_compiled_than_allowed(monkeypatch, compilations):
    training = Training(
        tuner(compilations=compilations, reductions=REDUCTIONS),
        monkeypatch=monkeypatch,
        costs=lambda setting, step: 0.5 + 0.5 * (setting == PSUM),
    )
    training.run(100)
    assert training.tuner.state == "kept"
    assert set(training.ran) == {PSUM, *WAYS[: compilations - 1]}
    assert training.tuner.traces == 1 + compilations


def raced(seconds, noise):
    """Returns what is kept of the settings that take these seconds, times what `noise` returns."""
    race = search(PSUM, [setting for setting in seconds if setting != PSUM])
    field = next(race)
    try:
        while True:
            field = race.send(noise((8, len(field))) * [seconds[setting] for setting in field])
    except StopIteration as end:
        return end.value


@pytest.mark.parametrize(("ratio", "low", "high"), [(0.9, 0.8, 1), (1.0, 0, 0.3), (1.1, 0, 0.02)])
def test_under_noise_nothing_slower_than_psum_is_kept(ratio, low, high):
    """Two settings that take `ratio` of psum's time, in eight rounds under noise of 5 %."""
    rng = np.random.default_rng(0)
    seconds = {PSUM: 1.0, SPLIT: ratio, WHOLE: ratio}
    kept = [
        raced(seconds, lambda shape: np.exp(rng.normal(scale=0.05, size=shape))) for _ in range(500)
    ]
    assert low <= np.mean([setting != PSUM for setting in kept]) <= high


@pytest.mark.usefixtures("optimized")
def test_what_is_reduced_is_what_the_setting_says(monkeypatch):
    """By psum the mean is exact; by a code it is that of the same call with its options."""
    training = Training(tuner(), monkeypatch=monkeypatch, costs=costs_of(1.5, 1.8))

    def mean(t, **options):
        f = lambda own: cgx_jax.pmean_compressed(own, "data", **options)  # noqa: E731
        return jax.tree.map(lambda x: -np.asarray(x), on_ranks(f, MESH, out=P())(grads(t)))

    training.run(TRIAL_STEPS)
    exact = training.run(1)
    assert training.tuner.current == PSUM
    for k, x in grads(0).items():
        np.testing.assert_allclose(exact[k], -x.mean(0), atol=1e-6)
    for kept, options in ((SPLIT, {}), (WHOLE, {"reduction": "gather_sum"})):
        training.tuner.current = kept
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
@pytest.mark.quick("0-0.8-kept0-one machine*")
def test_a_slow_spell_does_not_flip_the_choice(monkeypatch, name, split, kept, start):
    costs = costs_of(split, 1.2, lambda setting, step: SLOW[name](setting, step - start))
    training = Training(tuner(rounds=8), monkeypatch=monkeypatch, costs=costs)
    training.run(2 * 2 * (1 + 2 * 8) + 1)
    assert training.tuner.state == "kept"
    assert training.tuner.current == kept


def asked(like, compressor, world=8):
    options = Options("test", Axes(("data",), None, world), None)
    return [Asked(options, Plan.build(like, compressor), False)]


BIG = np.zeros((4096, 4096), np.float32)  # 64 MiB
OFFERED = Offered((Mpi(window=4), Xla()), (GatherSum(),), ())
FOUR = {str(i): np.zeros((2048, 1024), np.float32) for i in range(4)}  # 8 MiB each
MPI, XLA = "mpi(window=4)", "xla"
# tree, compressor, ranks, what is worth a trial: the best-ranked first
TWO, ONCE = [f"{MPI}, 64", "xla, 64"], [f"{MPI}/gather_sum, 64", "xla/gather_sum, 64"]
SIZES = [f"{way}, {mib}" for mib in (64, 16, 4) for way in (MPI, "xla")]
RANKED = {
    "a tie of bytes goes by the table of exchanges": (BIG, Quantize(4), 2,
                                                      [TWO[0], ONCE[0], TWO[1], ONCE[1]]),
    "more ranks, more bytes by gather_sum": (BIG, Quantize(4), 8, TWO + ONCE),
    "what sends more than psum is ruled out": (BIG, Quantize(4), 32, TWO),
    "large buffers come first": (FOUR, Quantize(4), 32, SIZES),
    "what is summed as numbers goes by xla alone": (BIG, PowerSGD(2), 4, ["xla, 64"]),
    "one rank sends nothing": (BIG, Quantize(4), 1, []),
}  # fmt: skip


@pytest.mark.parametrize("name", RANKED)
def test_without_a_profile_what_sends_less_than_psum_is_tried_in_order(name):
    like, compressor, world, expected = RANKED[name]
    first, *rest = candidates(asked(like, compressor, world), OFFERED, None)
    assert first.setting == PSUM
    assert {c.seconds for c in rest} <= {None}
    assert [str(c.setting) for c in rest] == [f"{setting} MiB" for setting in expected]
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


def test_a_profile_ranks_and_rules_out():
    """By it xla pays from 100 KiB on, and takes half of psum's time at 256 KiB."""
    profile = with_crossing()
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
    found = candidates(asked(like, Quantize(4)), offered, with_crossing())
    assert [(str(c.setting), c.seconds is None) for c in found] == [
        ("psum", False),
        ("xla, 64 MiB", False),
        ("xla/tree, 64 MiB", True),
        ("xla/gather_sum, 64 MiB", True),
    ]


def test_nothing_is_predicted_far_beyond_what_was_measured():
    """Up to four times its 256 KiB for xla, and not beyond its 16 KiB for gather_sum."""
    rows = [("xla/gather_sum", 4.125, 4096 * 4**i, 1e-6) for i in range(2)]
    profile = with_crossing(world=2)
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
        options = Options("test", Axes.resolve("f", ("data", "model"), None), None)
        call = Asked(options, Plan.build(x, Quantize(4)), False)
        offered = Offered((Xla(),), (), (Levels("model"),))
        seen.extend(candidates([call], offered, with_crossing()))
        return x

    x = jax.ShapeDtypeStruct((64, 1024), np.float32)
    jax.eval_shape(sharded(f, mesh_2d, P(), check_vma=False), x)
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
    "one compilation": ({"compilations": 1}, "compilations=1 must be .* 2 or more, for a race"),
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
    assert training.ran == other.ran


def test_a_tuner_without_its_jit_is_refused():
    training = Training(tuner())
    with pytest.raises(ValueError, match=r"write tuner.jit\(step\) instead of jax.jit\(step\)"):
        jax.jit(training.sharded())(grads(), training.state)
    with pytest.raises(ValueError, match="this tuner has a step already; make another Tuner"):
        training.tuner.jit(lambda x: x)


def test_a_step_that_asks_nothing_or_is_jitted_outside_is_refused():
    with pytest.raises(ValueError, match="Tuner: the step did not use the setting"):
        tuner().jit(lambda x: x + 1)(jnp.ones(3))
    training = Training(tuner())
    with pytest.raises(ValueError, match=r"Tuner: .* would keep the first setting.*within jax.jit"):
        jax.jit(training.step)(grads(), training.state)
    with pytest.raises(ValueError, match=r"would keep the first setting"):
        jax.jit(lambda: training.step(grads(), training.state))()


def test_parts_that_are_jitted_follow_the_setting():
    own, traced = tuner(), []

    def total(x):
        traced.append(own.current)
        return cgx_jax.psum_compressed(x, "data", Quantize(4), exchange=own)

    whole = jax.shard_map(jax.jit(total), mesh=MESH, in_specs=P("data"), out_specs=P())
    step = own.jit(jax.jit(whole))
    while own.state in ("waiting", "trying"):
        step(jnp.ones(3000))
    assert set(own._tried) <= set(traced)
    assert len(set(traced)) > 1


@pytest.mark.quick
def test_a_plain_reduction_follows_the_tuner():
    """`psum_compressed` and `pmean_compressed` take a tuner as `sync_gradients` does."""
    choose = tuner()

    def step(g):
        own = jax.tree.map(lambda x: x[0], g)
        return cgx_jax.pmean_compressed(own, "data", Quantize(4), exchange=choose)

    step = choose.jit(jax.shard_map(step, mesh=MESH, in_specs=P("data"), out_specs=P()))
    for t in range(TRIAL_STEPS + 1):
        out = step(grads(t))
        if choose.current == PSUM:
            for k, x in grads(t).items():
                np.testing.assert_allclose(out[k], x.mean(0), atol=1e-6)
    assert choose.state == "kept"
    assert {s for tried, _ in choose._history for s in tried} == {PSUM, SPLIT, WHOLE}
    f = lambda x: cgx_jax.psum_scatter_compressed(x, "data", exchange=tuner())  # noqa: E731
    with pytest.raises(TypeError, match=r"psum_scatter_compressed: .*Tuner object .* not an exch"):
        jax.eval_shape(on_ranks(f, MESH), jnp.zeros((WORLD, 4, 1024)))


def test_what_the_tuner_chooses_is_not_named_beside_it():
    says = r"the tuner chooses these; leave .*Tuner\(reductions=\[...\]"
    for option in ({"reduction": "tree"}, {"levels": Levels("local")}):
        with pytest.raises(ValueError, match=says):
            cgx_jax.sync_gradients("data", Quantize(4), exchange=tuner(), mesh=MESH, **option)


def test_memories_survive_changes_of_the_setting(monkeypatch):
    """What the optimizer saw and what the ranks remember are all gradients, over the trials too."""
    how = {"costs": costs_of(0.5, 0.8), "memory": cgx_jax.ErrorFeedback()}
    training = Training(tuner(), monkeypatch=monkeypatch, **how)
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


def test_the_table_sets_predicted_beside_measured(monkeypatch, following, caplog):
    rows = ("psum", 32, 1.0), ("xla", 4.125, 0.25), ("xla/gather_sum", 4.125, 0.5)
    rows = tuple((method, bits, 8192, seconds) for method, bits, seconds in rows)
    following(dataclasses.replace(with_crossing(world=WORLD), rows=rows))
    training = Training(tuner(), monkeypatch=monkeypatch, costs=costs_of(0.5, 0.8))
    training.run(TRIAL_STEPS + 1)
    ((level, text),) = [r[1:] for r in caplog.record_tuples if r[0] == "cgx_jax.tuning.tuner"]
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
from cgx_jax.tuning import cache

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
    check_ranks(PROGRAM.replace("FOLDER", repr(str(tmp_path))), 2)
