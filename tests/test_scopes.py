"""The compiled program names the call and the phase of each operation, as profilers show them."""

import functools
import re

import jax
import jax.numpy as jnp
import pytest

import cgx_jax
from cgx_jax import Quantize
from cgx_jax.compressors import RandomK, ScaledSign, TopK
from worlds import on_ranks

ALL, SUM = "encode exchange reduce decode", "encode exchange reduce"
Q4 = Quantize(4)
CASES = {
    "in chunks": ("psum_compressed", {"compressor": Q4}, ALL),
    "whole": ("psum_compressed", {"compressor": Q4, "reduction": "gather_sum"}, SUM),
    "ring": ("psum_compressed", {"compressor": Q4, "reduction": "ring"}, SUM),
    "tree": ("psum_compressed", {"compressor": Q4, "reduction": "tree"}, SUM),
    "another code": ("psum_compressed", {"compressor": ScaledSign()}, ALL),
    "sparse": ("psum_compressed", {"compressor": TopK(100)}, SUM),
    "sums": ("psum_compressed", {"compressor": RandomK(100)}, "exchange"),
    "scattered": ("psum_scatter_compressed", {"compressor": Q4}, SUM),
    "gathered": ("all_gather_compressed", {"compressor": Q4}, "encode exchange decode"),
}


# JAX's cache ignores names, and may return a program with older names.
@pytest.mark.usefixtures("no_cache")
@pytest.mark.parametrize("case", CASES)
def test_operations_are_named_after_call_and_phase(mesh, case):
    call, options, phases = CASES[case]

    options = {"exchange": "xla", "key": jax.random.key(0)} | options
    options |= {"tiled": True} if "scatter" in call else {}
    f = on_ranks(functools.partial(getattr(cgx_jax, call), axis_name="data", **options), mesh)
    text = f.lower(jnp.zeros((8, 64, 96))).compile().as_text()
    names = re.findall(r'op_name="([^"]*)"', text)
    found = {p for p in ALL.split() for name in names if f"/{call}/" in name and f"/{p}/" in name}
    assert found == set(phases.split()), sorted(set(names))
