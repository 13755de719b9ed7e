"""Figures of docs/choosing.md that follow from the formats only."""

import jax
import jax.numpy as jnp
import pytest

import scripts
from cgx_jax import Identity, Plan, Quantize
from cgx_jax.compressors import BlockTopK, TopK

VALUES = jax.ShapeDtypeStruct((25_000_000,), jnp.float32)


@pytest.mark.parametrize(
    ("other", "first"), [(Quantize(4), 15), (Identity(), 113)], ids=["4 bits", "fp32"]
)
def test_gathered_top_k_sends_more_from_this_many_ranks_on(other, first):
    gathered, whole = (Plan.build(VALUES, c) for c in (TopK(0.01), other))
    for world in range(2, 128):
        assert (gathered.wire_bytes(world) > whole.wire_bytes(world)) == (world >= first)


def test_block_top_k_sends_less_than_twice_its_payload_on_any_number_of_ranks():
    payload = BlockTopK(5).payload_bytes(VALUES.size)
    blocks, bits = (Plan.build(VALUES, c) for c in (BlockTopK(5), Quantize(4)))
    assert blocks.wire_bytes(1024) < 2.2 * payload
    assert all(blocks.wire_bytes(n) < bits.wire_bytes(n) / 8 for n in range(2, 65))


def test_the_picture_s_limits_are_those_of_the_model():
    predict = scripts.load("benchmarks/predict.py")
    limits = [f"{predict.reach(way):.2g}" for way in predict.WAYS]
    assert limits == ["0.067", "0.52", "2.1", "17"]


def test_diloco_sends_this_share_of_an_exact_reduction_in_each_step():
    ours, exact = (Plan.build(VALUES, c).wire_bytes(4) for c in (Quantize(4), Identity()))
    assert f"{ours / exact / 32:.1g}" == "0.004"
