"""The model behind the predicted steps: limits that arithmetic gives, and what levels save."""

import itertools

import pytest

import scripts

predict = scripts.load("benchmarks/predict.py")

NODES = [m for m in predict.MACHINES if m.nodes > 1]


@pytest.mark.parametrize("machine", predict.MACHINES, ids=lambda m: m.name)
def test_a_step_gains_what_amdahl_leaves_it(machine):
    fp32, ours = (predict.reduction_seconds(machine, how) for how in ("fp32", "levels"))
    nothing, long = (predict.step_speedup(machine, "levels", c) for c in (0.0, 1e6))
    assert nothing == pytest.approx(fp32 / ours)
    assert long == pytest.approx(1, abs=2e-4)
    assert predict.step_speedup(machine, "fp32", 0.1) == 1


@pytest.mark.parametrize("machine", NODES, ids=lambda m: m.name)
def test_a_flat_reduction_sends_all_pairs_of_nodes_over_one_link(machine):
    free = predict.Machine("", machine.nodes, machine.local, 1e30)
    seconds = {}
    for how in ("flat", "levels", "fp32"):
        on_the_link = predict.reduction_seconds(machine, how)
        seconds[how] = on_the_link - predict.reduction_seconds(free, how)
    # In each of two phases, 8 ranks of a flat reduction share a link and send 24/32 of a payload
    # each; levels send 3/4 of one.
    assert seconds["flat"] / seconds["levels"] == pytest.approx(8 * 24 / 32 / (3 / 4))
    # A tree between 4 nodes sends 3/4 of the gradients in each direction.
    assert seconds["fp32"] / seconds["flat"] == pytest.approx(
        3 / 4 / (8 * 24 / 32) * 32 / 4.125, rel=0.01
    )


@pytest.mark.parametrize(("way", "next_way"), [*itertools.pairwise([*predict.WAYS, None])])
def test_a_way_is_taken_up_to_its_reach(way, next_way):
    link = 1e9
    for factor, taken in ((0.999, way), (1.001, next_way)):
        values = int(factor * predict.reach(way) * link / 4)
        steps = {
            "fp32": 1 + 2 * 3 / 4 * 4 * values / link,
            "4 bits": 1 + predict.sent("scatter_gather", values, 4) / link,
        }
        assert predict.way_for(1.0, steps) == taken
