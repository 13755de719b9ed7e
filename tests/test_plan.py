"""Plans: rules, fusion, arithmetic, summary."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cgx_jax import Cast, Plan, Quantize, plan_table
from cgx_jax.choice.auto import Load
from cgx_jax.route.route import load_of

TREE = {
    "dense": {"kernel": np.zeros((64, 64), np.float32), "bias": np.zeros(4096, np.float32)},
    "small": np.zeros((10, 10), np.float32),
    "half": np.zeros((64, 32), jnp.bfloat16),
    "double": np.zeros((64, 64), np.float64),
    "count": np.zeros((64, 64), np.int32),
    "empty": np.zeros((0, 64), np.float32),
}


def test_a_buffers_load_counts_the_values_that_are_dearer_to_encode():
    tree = {"plain": np.zeros((64, 64), np.float32), "noisy": np.zeros((32, 64), np.float16)}
    tree |= {"rotated": np.zeros((64, 96), np.float32), "both": np.zeros((64, 128), np.float32)}
    overrides = {
        "noisy": Quantize(4, rounding="stochastic"),
        "rotated": Quantize(4, rotation=True),
        "both": Quantize(4, rounding="correlated", rotation=True),
    }
    plan = Plan.build(tree, Quantize(4), overrides=overrides)
    (buffer,) = plan.buffers
    sizes = {name: x.size for name, x in tree.items()}
    assert load_of(plan.coded(buffer)) == Load(
        values=sum(sizes.values()),
        bits=4.125,
        noisy=sizes["noisy"] + sizes["both"],
        rotated=sizes["rotated"] + sizes["both"],
    )
    (both,) = [i for i, leaf in enumerate(plan.leaves) if leaf.path == "both"]
    assert load_of(plan.coded(buffer), in_units={both}).in_units == sizes["both"]


def test_buffers_hold_consecutive_leaves_up_to_the_fusion_size():
    leaves = [np.zeros((32, 32), np.float32) for _ in range(10)]
    plan = Plan.build(leaves, fusion_bytes=3 * 4096)
    assert plan.buffers == ((0, 1, 2), (3, 4, 5), (6, 7, 8), (9,))
    mixed = Plan.build(leaves, overrides={"1": Cast(jnp.bfloat16), "4": Cast(jnp.float16)})
    assert mixed.buffers == ((0, 2, 3, 5, 6, 7, 8, 9), (1, 4))


def test_plans_are_equal_and_hash_by_value():
    one, two = Plan.build(TREE), Plan.build(TREE)
    assert one == two
    assert hash(one) == hash(two)
    assert one != Plan.build(TREE, Quantize(3))


def test_the_table_names_leaf_shape_compressor_bits_and_bytes():
    text = plan_table(Plan.build(TREE, Quantize(4)))
    (line,) = [row for row in text.splitlines() if row.startswith("dense/kernel")]
    for word in ("float32[64, 64]", "Quantize(bits=4", "4.12", "2,112"):
        assert word in line
    assert "7 leaves in 1 fusion buffers and 5 exact" in text


def test_the_table_does_not_depend_on_the_mesh_around_it():
    plan = Plan.build(TREE, Quantize(4))
    with jax.set_mesh(jax.make_mesh((4,), ("data",))):
        inside = plan_table(plan, 4)
    assert inside == plan_table(plan, 4)


@pytest.mark.parametrize("call", [plan_table, lambda plan: plan.wire_bytes(4)])
def test_random_keys_have_no_bytes_that_travel(call):
    plan = Plan.build({"w": np.zeros((64, 64), np.float32), "k": jax.random.key(0)})
    with pytest.raises(TypeError, match=r"^(plan_table|Plan\.wire_bytes): leaf 'k' is key<fry>"):
        call(plan)


def test_spans_cover_every_value_once_beyond_32_bits():
    from cgx_jax.kernels.wire import Layout, spans

    fields = (Quantize(3).slot(2**33 + 5), Quantize(4, 64).slot(7), Quantize(8).slot(0))
    for world in (1, 3, 64):
        layout = Layout(fields, world)
        seen = [0] * len(fields)
        for w in range(world):
            for s in spans(layout, w):
                assert s.values[0] == seen[s.slot]
                seen[s.slot] = s.values[1]
        assert seen == [f.size for f in fields]
        assert layout.chunk_bytes <= -(-layout.total_bytes // world) + fields[0].record
