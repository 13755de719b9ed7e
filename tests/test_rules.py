"""Rules: which leaf takes which compressor, on every library's trees; what is reported."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

from cgx_jax import Identity, Plan, Quantize, Rule, Rules
from cgx_jax.policies import Uniform
from cgx_jax.policies.rules import DEFAULT

BIG = np.zeros((64, 64), np.float32)
TREE = {
    "embed": {"table": np.zeros((512, 32), np.float32)},
    "layers": [
        {"kernel": BIG, "bias": np.zeros(64, np.float32), "norm": {"scale": np.zeros((16, 256))}}
        for _ in range(2)
    ],
    "bn1": {"stacked": np.zeros((8, 512), np.float32)},
    "half": np.zeros((64, 64), jnp.bfloat16),
    "count": np.zeros((64, 64), np.int32),
}
LEAVES = ["bn1/stacked", "count", "embed/table", "half"]
LEAVES += [f"layers/{i}/{name}" for i in range(2) for name in ("bias", "kernel", "norm/scale")]


def chosen(tree, policy):
    plan = Plan.build(tree, policy)
    return {leaf.path: c for leaf, c in zip(plan.leaves, plan.compressors, strict=True)}


def takes(tree, policy, compressor):
    return [path for path, c in chosen(tree, policy).items() if c == compressor]


Q2, Q4, Q8 = Quantize(2), Quantize(4), Quantize(8)

CASES = [
    # rules, the leaves that take 2 bits
    ([Rule(Q2, path="kernel$")], ["layers/0/kernel", "layers/1/kernel"]),
    ([Rule(Q2, path=r"layers/1/")], ["layers/1/bias", "layers/1/kernel"]),
    ([Rule(Q2, min_size=10_000)], ["embed/table"]),
    ([Rule(Q2, max_size=64)], ["layers/0/bias", "layers/1/bias"]),
    ([Rule(Q2, max_ndim=1)], ["layers/0/bias", "layers/1/bias"]),
    ([Rule(Q2, min_ndim=2, path="^bn1")], ["bn1/stacked"]),
    ([Rule(Q2, dtype=jnp.bfloat16)], ["half"]),
    # the first that matches chooses
    ([Rule(Q8, path="/0/"), Rule(Q2, path="kernel")], ["layers/1/kernel"]),
    ([Rule(Q2, path="kernel", min_size=4096, max_size=4096, dtype="float32")],
     ["layers/0/kernel", "layers/1/kernel"]),
]  # fmt: skip


@pytest.mark.parametrize(("rules", "expected"), CASES, ids=lambda x: str(x[0]) if x else "")
def test_the_first_rule_that_matches_chooses(rules, expected):
    assert [leaf.path for leaf in Plan.build(TREE).leaves] == LEAVES
    assert takes(TREE, Rules(rules, Q4), Q2) == expected


def test_biases_norms_vectors_and_small_leaves_are_exact_unless_a_rule_says_otherwise():
    lossy = ["embed/table", "half", "layers/0/kernel", "layers/1/kernel"]
    assert takes(TREE, Uniform(Q4), Q4) == takes(TREE, Q4, Q4) == lossy
    assert takes(TREE, Rules(()), DEFAULT) == takes(TREE, None, DEFAULT) == lossy
    everything = takes(TREE, Rules((), Q4, exact=()), Q4)
    # the norms' scale is float64 and the count is an integer: no quantizer takes them
    assert everything == [p for p in LEAVES if p != "count" and not p.endswith("scale")]


def test_names_of_flax_nnx_linen_and_bare_trees_are_matched():
    class Linen(linen.Module):
        @linen.compact
        def __call__(self, x):
            return linen.LayerNorm()(linen.Dense(64)(x))

    class Nnx(nnx.Module):
        def __init__(self):
            self.dense = nnx.Linear(64, 64, rngs=nnx.Rngs(0))
            self.norm = nnx.LayerNorm(64, rngs=nnx.Rngs(0))

    @jax.tree_util.register_dataclass
    @dataclasses.dataclass
    class Bare:
        kernel: jax.Array
        norm: jax.Array

    trees = {
        "linen": jax.eval_shape(Linen().init, jax.random.key(0), jnp.ones((1, 64)))["params"],
        "nnx": nnx.state(nnx.eval_shape(Nnx), nnx.Param),
        "bare": Bare(jnp.zeros((64, 64)), jnp.zeros((64, 64))),
    }
    for name, tree in trees.items():
        rules = Rules([Rule(Q2, path=r"kernel$")], Q8)
        assert len(takes(tree, rules, Q2)) == 1, (name, chosen(tree, Q4))
        assert not takes(tree, rules, Q8)


class Heads(NamedTuple):
    policy: jax.Array
    value: jax.Array


def test_only_the_wrappers_of_nnx_leave_out_their_name():
    heads = Heads(jnp.zeros((64, 64)), jnp.zeros((64, 64)))

    class Model(nnx.Module):
        def __init__(self):
            self.heads = nnx.data(Heads(*map(nnx.Param, heads)))
            self.value = nnx.Param(heads.value)

    assert chosen({"h": heads}, Q4).keys() == {"h/policy", "h/value"}
    assert takes({"h": heads}, Rules([Rule(Q2, path="value$")], Q8), Q2) == ["h/value"]
    plan = Plan.build({"h": heads}, Q4, overrides={"h/value": Q2})
    assert plan.compressors == (Q4, Q2)
    for tree in (nnx.state(Model()), Model()):
        assert chosen(tree, Q4).keys() == {"heads/policy", "heads/value", "value"}


# Paths as the libraries write them: Linen, NNX, Haiku, Equinox, Keras, PyTorch and plain trees.
EXACT_PATHS = """
    Dense_0/bias layers/mlp/bias decoder/layers/self_attention/query/bias linear1/bias
    blocks/0/attn/in_proj_bias attn.bias lstm/bias_ih_l0 layers/0/1/bias biases/3 dense_4/bias
    swin/relative_position_bias_table attention/pos_bias_u PreNorm_0/Dense_0/bias
    LayerNorm_0/scale BatchNorm_3/bias PreNorm_0/scale RMSNorm_0/scale WSNorm/gain
    encoder/encoder_norm/scale layers/pre_attention_norm/scale layers/post_ffw_norm/scale
    attention/output/LayerNorm/scale final_layer_norm/weight model/layers/input_layernorm/kernel
    transformer/h/ln_1/scale transformer/ln_f/scale visual.ln_pre.weight ln_post/weight
    encoder/layer_norm1/scale layernorm_before/weight norm1/weight norms/0/weight norms/1
    blocks/norm_1/weight norm_out/weight bn1/stacked bn_init/scale norm_proj/scale gn/weight
    mlp/~/layer_norm/offset block/~/batch_norm_1/scale group_normalization/gamma
    batch_normalization_2/moving_variance layer_normalization/beta downsample/bn2/running_mean
    LayerNormMLP_0/scale LayerNormMLP_0/ln_bias layers/attn_norm layers/ln_1_scale
    layers/norm_weight LAYERNORM/scale norm
"""
COMPRESSED_PATHS = """
    PreNorm_0/Attention_0/qkv/kernel LayerNorm_0/Dense_0/kernel norm_mlp/kernel norm1/linear/weight
    SpectralNorm_0/Dense_0/kernel WeightNorm_0/Conv_0/kernel pre_norm_block/mlp/wi/kernel
    NormMlp_0/kernel norm_proj/kernel bn_relu_conv/kernel LayerNormMLP_0/wi_kernel
    normalized_conv/kernel NormalizedDense_0/kernel normal_map/kernel abnormal/kernel enormous/w
    Normal_0/kernel NORMAL/kernel unbiased/kernel debias/kernel Debiased_0/kernel bias_net/kernel
    attention_bias/kernel bias_kernel unbiased normals vulnerable/kernel columns/w lnr/w
    self_attn.q_proj.weight linear/w layers/0/weight mlp/wo/kernel embed_tokens/embedding
    norm_first_encoder/layers/0/self_attn/out_proj/weight
"""


@pytest.mark.parametrize("path", (EXACT_PATHS + COMPRESSED_PATHS).split())
def test_whole_words_of_the_last_names_keep_stacked_biases_and_norms_exact(path):
    *modules, leaf = path.split("/")
    tree = {leaf: np.zeros((12, 256), np.float32)}
    for name in reversed(modules):
        tree = {name: tree}
    assert chosen(tree, Q4) == {path: Identity() if path in EXACT_PATHS.split() else Q4}


def test_rules_work_on_optax_like_masks_of_the_tree():
    masked = jax.tree.map(lambda x: x if x.ndim > 1 else optax.MaskedNode(), TREE)
    assert "layers/0/bias" not in chosen(masked, Q4)


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ([Rule(Q2, path="kernal")], r"path='kernal'\) applies to none of the 10 leaves: paths"),
        ([Rule(Q8, path="kernel"), Rule(Q2, path="layers/0/kernel")], "earlier rules match all"),
    ],
)
def test_a_rule_that_chooses_nothing_is_reported(rules, message):
    with pytest.warns(UserWarning, match=message):
        Plan.build(TREE, Rules(rules))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Rule(Q2, path="a("), "not a regular expression"),
        (lambda: Rule(Q2, min_size=5, max_size=4), "min_size=5 and max_size=4 do not form a range"),
        (lambda: Rule(Q2, min_ndim=-1), "min_ndim=-1"),
        (lambda: Rule(4), "not a compressor"),
        (lambda: Rules([Q4]), "not a rule"),
        (lambda: Rules(Rule(Q4)), r"is one rule; pass a sequence, \(rules,\)"),
        (lambda: Rules((), 4), "default=4 is not a compressor"),
        (lambda: Plan.build(TREE, 4), "neither a compressor nor a policy"),
    ],
)
def test_wrong_rules_are_refused(make, message):
    with pytest.raises((TypeError, ValueError), match=message):
        make()
