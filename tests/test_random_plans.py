"""Random trees, rules and buffer sizes: each leaf takes its rule and is in one buffer or exact."""

import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

import cgx_jax
from cgx_jax import Cast, Identity, Plan, Quantize, Rule, Rules
from cgx_jax.policies.rules import EXACT
from toys import Steps
from worlds import on_ranks, ranks

WORLD = 3
# All of them sum up whole numbers exactly if all values of a leaf are the same number.
CODES = [Quantize(4), Quantize(2, 64), Quantize(8, 32), Cast(jnp.bfloat16), Steps(), Identity()]
SHAPES = [(), (3,), (0, 4), (1030,), (40, 40), (33, 65), (2, 20, 30)]
DTYPES = [jnp.float32, jnp.bfloat16, jnp.float16, jnp.int32]
names = st.sampled_from(["kernel", "bias", "w", "norm", "layers", "bn1"])
leaves = st.builds(jax.ShapeDtypeStruct, st.sampled_from(SHAPES), st.sampled_from(DTYPES))
trees = st.dictionaries(
    names,
    st.recursive(leaves, lambda t: st.dictionaries(names, t, max_size=3) | st.lists(t, max_size=3)),
    min_size=1,
    max_size=4,
)


@st.composite
def rules(draw):
    lows = [draw(st.sampled_from(values)) for values in ((0, 1, 1024, 1600), (0, 1, 2))]
    highs = [
        draw(st.sampled_from([None, *(v for v in values if v >= low)]))
        for low, values in zip(lows, ((3, 1030, 2000), (1, 2, 3)), strict=True)
    ]
    return Rule(
        draw(st.sampled_from(CODES)),
        path=draw(st.sampled_from([None, "kernel$", "^w", "/", "norm|bias", "0"])),
        min_size=lows[0],
        max_size=highs[0],
        min_ndim=lows[1],
        max_ndim=highs[1],
        dtype=draw(st.sampled_from([None, *DTYPES])),
    )


policies = st.builds(
    Rules, st.lists(rules(), max_size=4), st.sampled_from(CODES), st.sampled_from([(), EXACT])
)
cases = {"tree": trees, "policy": policies, "fusion_bytes": st.sampled_from([1, 5000, 2**20])}


def planned(tree, policy, fusion_bytes):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # rules that choose for no leaf
        return Plan.build(tree, policy, fusion_bytes=fusion_bytes)


def holds(rule, path, leaf):
    size, ndim = int(np.prod(leaf.shape)), len(leaf.shape)
    return (
        (rule.path is None or bool(re.search(rule.path, path)))
        and size >= rule.min_size
        and (rule.max_size is None or size <= rule.max_size)
        and ndim >= rule.min_ndim
        and (rule.max_ndim is None or ndim <= rule.max_ndim)
        and (rule.dtype is None or leaf.dtype == rule.dtype)
    )


def expected(policy, path, leaf):
    """Returns the compressor that the documentation of `Rules` promises."""
    for rule in (*policy.rules, *policy.exact):
        if holds(rule, path, leaf):
            return rule.compressor
    return policy.default


def paths_of(tree):
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        yield "/".join(str(getattr(p, "key", getattr(p, "idx", None))) for p in path), leaf


@given(**cases)
def test_every_leaf_takes_its_rule_and_is_in_one_buffer_or_exact(tree, policy, fusion_bytes):
    plan = planned(tree, policy, fusion_bytes)
    at = list(paths_of(tree))
    assert [leaf.path for leaf in plan.leaves] == [path for path, _ in at]
    lossy = []
    for i, (path, leaf) in enumerate(at):
        code = expected(policy, path, leaf)
        takes = code.lossless or leaf.dtype != jnp.int32
        assert plan.compressors[i] == (code if takes else Identity())
        if takes and not code.lossless and leaf.size:
            lossy.append(i)
    assert sorted(i for buffer in plan.buffers for i in buffer) == lossy
    assert sorted([*lossy, *plan.exact]) == list(range(len(at)))
    for buffer in plan.buffers:
        assert len({type(plan.compressors[i]) for i in buffer}) == 1
        assert list(buffer) == sorted(buffer)
        assert len(buffer) == 1 or sum(plan.leaves[i].nbytes for i in buffer) <= fusion_bytes


def reduced(plan):
    return lambda tree: cgx_jax.psum_compressed(tree, "data", plan, exchange="xla")


def sent_in(jaxpr):
    """Returns the world size times the bytes that a rank sends in a program's collectives."""
    total = 0
    for eqn in jaxpr.eqns:
        name, times = str(eqn.primitive), 0
        if name.startswith("psum"):
            times = 2
        elif name.startswith(("all_to_all", "all_gather")):
            times = 1
        total += times * (WORLD - 1) * sum(v.aval.size * v.aval.dtype.itemsize for v in eqn.outvars)
        for param in eqn.params.values():
            inner = getattr(param, "jaxpr", param)
            total += sent_in(inner) if hasattr(inner, "eqns") else 0
    return total


@given(**cases)
def test_the_plan_states_the_bytes_of_the_program(tree, policy, fusion_bytes):
    plan = planned(tree, policy, fusion_bytes)
    f = on_ranks(reduced(plan), ranks(WORLD), out=P(), check_vma=False)
    of_ranks = jax.tree.map(lambda x: jax.ShapeDtypeStruct((WORLD, *x.shape), x.dtype), tree)
    sent = sent_in(jax.make_jaxpr(f)(of_ranks).jaxpr)
    assert plan.wire_bytes(WORLD) == -(-sent // WORLD)
