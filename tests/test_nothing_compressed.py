"""A call whose compressors are not used says so once, with the reason and the remedy."""

import logging
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import cgx_jax
from cgx_jax import Quantize
from cgx_jax.reductions import Levels
from cgx_jax.route import route
from profiles import with_crossing
from worlds import ranks

LOGGER = "cgx_jax.route.route"


@pytest.fixture
def said(monkeypatch, caplog):
    """Provides a function that returns all warnings since the start of the test."""
    monkeypatch.setattr(route, "_told", set())
    caplog.set_level(logging.INFO, LOGGER)

    def messages():
        found = [r for r in caplog.records if r.name == LOGGER]
        assert {r.levelno for r in found} <= {logging.WARNING}
        return [r.getMessage() for r in found]

    return messages


def reduced(mesh, call, shape=(64, 64)):
    """Traces `call` on every rank."""
    names = mesh.axis_names
    mapped = jax.shard_map(call, mesh=mesh, in_specs=P(names), out_specs=P(), check_vma=False)
    jax.eval_shape(jax.jit(mapped), jnp.ones((mesh.size * shape[0], *shape[1:])))


def psum(x, **options):
    return cgx_jax.psum_compressed(x, "data", Quantize(4), **options)


def sync(x):
    tx = cgx_jax.sync_gradients("data", Quantize(4))
    return tx.update({"w": x}, tx.init({"w": x}))[0]


def plain(mesh, **options):
    f = cgx_jax.value_and_grad(
        lambda w, x: jnp.mean(x @ w), "data", Quantize(4), mesh=mesh, **options
    )
    jax.eval_shape(f, jnp.ones((64, 64)), jnp.ones((64, 64)))


CALLS = {
    "psum_compressed": lambda mesh: reduced(mesh, psum),
    "sync_gradients": lambda mesh: reduced(mesh, sync),
    "value_and_grad": plain,
}


@pytest.mark.parametrize("name", CALLS)
def test_an_axis_of_one_rank_is_told_once(said, name):
    for _ in range(2):
        CALLS[name](ranks(1))
    reason = f"{name}: nothing is compressed: axis 'data' has one rank, which sends nothing. "
    assert said() == [reason + "Name an axis of several ranks, such as the one between nodes."]


def test_groups_of_one_rank_are_the_reason(said):
    call = lambda x: psum(x, axis_index_groups=[[0], [1]])  # noqa: E731
    reduced(ranks(2), call)
    assert "each of axis_index_groups has one rank, which sends nothing. Pass groups" in said()[0]


@pytest.mark.parametrize("name", CALLS)
def test_exact_buffers_of_auto_are_told_once(said, name):
    for _ in range(2):
        CALLS[name](ranks(8))
    (message,) = said()
    assert message.startswith(f'{name}: nothing is compressed: exchange="auto" sends every buffer')
    assert "The largest has 16,384 bytes" in message
    assert message.endswith('cgx_jax tune, or name an exchange: exchange="xla".')


def test_each_call_and_each_reason_is_told(said):
    for count in (1, 8, 1):
        for call in CALLS.values():
            call(ranks(count))
    assert len(said()) == len(set(said())) == 2 * len(CALLS)


def test_a_profile_is_the_reason(said, following):
    following(with_crossing())
    reduced(ranks(8), psum)
    (message,) = said()
    assert re.search(r"does not pay by the profile\. .*exchange=\"xla\"\.$", message)


def test_levels_of_one_node_are_the_reason(said):
    levels = Levels(groups=[list(range(8))])
    reduced(ranks(8), lambda x: psum(x, levels=levels, exchange="xla"))
    assert said() == [
        "psum_compressed: nothing is compressed: levels= finds one node, inside which sums are "
        "exact. Leave out levels= to compress inside the node."
    ]


@pytest.mark.parametrize(
    ("leaf", "why"),
    [
        (np.zeros((8, 96), np.float32), r"fewer than 1,024 values; Rules\(\.\.\., exact=\(\)\)"),
        (np.zeros((64, 64)), "does not take float64; cast gradients to float32"),
    ],
)
def test_trees_that_the_rules_keep_exact_are_told(leaf, why):
    tree = {"w": leaf, "b": np.zeros(512, np.float32)}
    with pytest.warns(UserWarning, match=f"Rules: all leaves are reduced exactly, .*{why}"):
        assert not cgx_jax.Plan.build(tree, Quantize(4)).buffers


SILENT = {
    "biases and norms": lambda: cgx_jax.Plan.build({"b": jnp.ones(4096)}, Quantize(4)),
    "integers": lambda: cgx_jax.Plan.build({"n": np.zeros((64, 64), np.int32)}, Quantize(4)),
    "exact by a rule": lambda: cgx_jax.Plan.build(
        {"w": jnp.ones((8, 96)), "v": jnp.ones((8, 96))},
        cgx_jax.Rules([cgx_jax.Rule(cgx_jax.Identity())]),
    ),
    "few values": lambda: cgx_jax.Plan.build({"w": jnp.ones((8, 8))}, Quantize(4)),
    "exact by choice": lambda: cgx_jax.Plan.build({"w": jnp.ones((8, 96))}, cgx_jax.Identity()),
    "a named exchange": lambda: reduced(ranks(8), lambda x: psum(x, exchange="xla")),
    "one large buffer": lambda: reduced(ranks(8), psum, (1024, 1024)),
    "no compressor": lambda: reduced(
        ranks(1), lambda x: cgx_jax.psum_compressed(x, "data", cgx_jax.Identity())
    ),
    "a table": lambda: cgx_jax.plan_table(cgx_jax.Plan.build(jnp.ones((64, 64)), Quantize(4)), 8),
}


@pytest.mark.parametrize("call", SILENT.values(), ids=SILENT)
def test_nothing_is_said_where_it_would_be_wrong(said, call):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "jax_compilation_cache_dir is set")
        call()
    assert said() == []
