"""The compiled program names the call and the phase of each operation, as profilers show them."""

import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import cgx_jax
from cgx_jax import Quantize
from cgx_jax.compressors import RandomK, ScaledSign, TopK

CALLS = {
    "psum_compressed": lambda x, **o: cgx_jax.psum_compressed(x, "data", **o),
    "psum_scatter_compressed": lambda x, **o: cgx_jax.psum_scatter_compressed(
        x, "data", tiled=True, **o
    ),
    "all_gather_compressed": lambda x, **o: cgx_jax.all_gather_compressed(x, "data", **o),
}
ALL = "encode exchange reduce decode"
CASES = {
    "in chunks": ("psum_compressed", {"compressor": Quantize(4)}, ALL),
    "whole": (
        "psum_compressed",
        {"compressor": Quantize(4), "reduction": "gather_sum"},
        "encode exchange reduce",
    ),
    "ring": (
        "psum_compressed",
        {"compressor": Quantize(4), "reduction": "ring"},
        "encode exchange reduce",
    ),
    "tree": (
        "psum_compressed",
        {"compressor": Quantize(4), "reduction": "tree"},
        "encode exchange reduce",
    ),
    "another code": ("psum_compressed", {"compressor": ScaledSign()}, ALL),
    "sparse": ("psum_compressed", {"compressor": TopK(100)}, "encode exchange reduce"),
    "sums": ("psum_compressed", {"compressor": RandomK(100)}, "exchange"),
    "scattered": (
        "psum_scatter_compressed",
        {"compressor": Quantize(4)},
        "encode exchange reduce",
    ),
    "gathered": ("all_gather_compressed", {"compressor": Quantize(4)}, "encode exchange decode"),
}


# JAX's cache ignores names, and may return a program with older names.
@pytest.mark.usefixtures("no_cache")
@pytest.mark.parametrize("case", CASES)
def test_operations_are_named_after_call_and_phase(mesh, case):
    call, options, phases = CASES[case]

    def step(x):
        return CALLS[call](x[0], exchange="xla", key=jax.random.key(0), **options)[None]

    f = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=P("data"), out_specs=P("data")))
    text = f.lower(jnp.zeros((8, 64, 96))).compile().as_text()
    names = re.findall(r'op_name="([^"]*)"', text)
    found = {p for p in ALL.split() for name in names if f"/{call}/" in name and f"/{p}/" in name}
    assert found == set(phases.split()), sorted(set(names))
