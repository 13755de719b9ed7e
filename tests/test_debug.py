"""Debug mode: ranks whose results differ make the step fail, and healthy ranks do not."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax._src import dispatch

import cgx_jax
from cgx_jax.collective import Collective
from cgx_jax.compressors.quantize import QuantizedChunks, QuantizedWhole
from worlds import on_ranks

pytestmark = pytest.mark.usefixtures("unoptimized")

X = np.random.default_rng(0).normal(size=(8, 40, 64)).astype(np.float32)
CALLS = {
    "psum_compressed": lambda x: cgx_jax.psum_compressed(x, "data", exchange="xla"),
    "pmean_compressed": lambda x: cgx_jax.pmean_compressed(x, "data", exchange="xla"),
    "all_gather_compressed": lambda x: cgx_jax.all_gather_compressed(x, "data", exchange="xla"),
}
GROUPS = [[0, 3], [1, 2], [4, 5], [6, 7]]


def grouped(x):
    return cgx_jax.psum_compressed(x, "data", axis_index_groups=GROUPS, exchange="xla")


def run(f, x):
    """Runs to the end, so that errors of callbacks come out here."""
    out = jax.block_until_ready(f(x))
    jax.effects_barrier()
    return out


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("f", [*CALLS.values(), grouped], ids=[*CALLS, "groups"])
def test_ranks_that_agree_pass_and_get_the_same_numbers(mesh, f, check_vma):
    want = run(on_ranks(f, mesh, check_vma=check_vma), X)
    with cgx_jax.debug.debug_checksums():
        np.testing.assert_array_equal(run(on_ranks(f, mesh, check_vma=check_vma), X), want)


@pytest.mark.parametrize(
    "f",
    [
        jax.pmap(CALLS["psum_compressed"], axis_name="data"),
        jax.vmap(CALLS["psum_compressed"], axis_name="data"),
        jax.pmap(jax.grad(lambda x: CALLS["psum_compressed"](x).sum()), axis_name="data"),
        jax.pmap(jax.checkpoint(CALLS["psum_compressed"]), axis_name="data"),
    ],
    ids=["pmap", "vmap", "grad", "remat"],
)
def test_the_mode_works_under(f):
    with cgx_jax.debug.debug_checksums():
        run(f, X)


@pytest.mark.parametrize("dtype", ["int4", "uint2", "float4_e2m1fn", "bool", "complex64"])
def test_exact_leaves_of_any_dtype_are_compared(mesh, dtype):
    x = (np.arange(16).reshape(8, 2) % 2).astype(jnp.dtype(dtype))
    f = on_ranks(lambda x: cgx_jax.psum_compressed(x, "data", cgx_jax.Identity()), mesh)
    want = run(f, x)
    with cgx_jax.debug.debug_checksums():
        np.testing.assert_array_equal(run(f, x), want)


@pytest.mark.parametrize("name", CALLS)
def test_ranks_that_differ_are_named(mesh, name, monkeypatch, request):
    def with_a_flipped_bit(x):
        flip = (lax.axis_index("data") == 5).astype(jnp.int32)
        return lax.bitcast_convert_type(lax.bitcast_convert_type(x, jnp.int32) ^ flip, x.dtype)

    for code in (QuantizedChunks, QuantizedWhole):
        monkeypatch.setattr(
            code,
            "decode",
            lambda self, rows, like, *units, intact=code.decode: [
                with_a_flipped_bit(x) for x in intact(self, rows, like, *units)
            ],
        )
    # A failed callback's token stays until the process ends, which would then fail on it again.
    request.addfinalizer(dispatch.runtime_tokens.clear)
    run(on_ranks(CALLS[name], mesh, check_vma=False), X)  # outside the mode nothing is checked
    with (
        cgx_jax.debug.debug_checksums(),
        pytest.raises(Exception, match=rf"{name}: .*axis data.*rank 5 .*\(1 of 8 ranks differ\)"),
    ):
        run(on_ranks(CALLS[name], mesh, check_vma=False), X)


@pytest.mark.parametrize("groups", [None, [[0, 3], [1, 5], [2, 4], [6, 7]]])
def test_exact_sums_are_compared_and_ranks_of_groups_have_their_own_numbers(
    mesh, groups, monkeypatch, request
):
    def differing(self, axes, leaves, intact=Collective.exact, **how):
        wrong = lax.axis_index("data") == 5
        return [x + wrong.astype(x.dtype) for x in intact(self, axes, leaves, **how)]

    monkeypatch.setattr(Collective, "exact", differing)
    request.addfinalizer(dispatch.runtime_tokens.clear)
    options = {"compressor": cgx_jax.Identity(), "axis_index_groups": groups}
    call = functools.partial(cgx_jax.psum_compressed, axis_name="data", **options)
    first = 0 if groups is None else 1
    with (
        cgx_jax.debug.debug_checksums(),
        pytest.raises(Exception, match=rf"of rank {first} is .*, that of rank 5 "),
    ):
        run(on_ranks(call, mesh, check_vma=False), X)
