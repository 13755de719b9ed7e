"""psum_scatter_compressed and all_gather_compressed: the choice of an exchange, and what a fused
call is handed. Its own bytes are the C++ tests' matter.
"""

import re

import jax
import jax.numpy as jnp
import jaxlib.version
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import cgx_jax
from cgx_jax import Cast, Profile, Quantize, installation
from cgx_jax.exchange import choose, nccl, xla
from cgx_jax.kernels import primitives

WORLD = 8
KEY = jax.random.key(3)
Q4 = Quantize(4)
STOCHASTIC = Quantize(3, 64, rounding="stochastic")
HALVES = {
    "scatter": cgx_jax.psum_scatter_compressed,
    "gather": cgx_jax.all_gather_compressed,
}
# Before that, JAX has no call on a stream of the GPU.
needs_streams = pytest.mark.skipif(
    jaxlib.version.__version_info__ < (0, 11), reason="fused calls on CUDA need jaxlib 0.11"
)


def values(*shape):
    return jnp.asarray(np.random.default_rng(0).normal(size=shape), jnp.float32)


def sharded(f, mesh, *, check_vma=True):
    """`f` of one rank's values, its results stacked."""
    return jax.shard_map(
        lambda v: f(v[0])[None],
        mesh=mesh,
        in_specs=P("data"),
        out_specs=P("data"),
        check_vma=check_vma,
    )


def targets(f, *args):
    """Names of the fused calls that `f` is traced to."""
    return re.findall(r"cgx_\w+_nccl", str(jax.make_jaxpr(f)(*args)))


@pytest.fixture
def built(monkeypatch):
    """As if the CUDA module with its fused calls were there: enough for tracing."""
    monkeypatch.setattr(nccl, "missing", lambda: None)


@pytest.fixture
def stand_ins(built, monkeypatch):
    """The fused calls' contract in single steps, row by row, in place of the calls."""

    def reduce_scatter(name, words, rows, layout, axes):
        encoded = [
            primitives.encode(w, [row], layout)[0][0]
            for w, row in zip(jnp.asarray(words), rows, strict=True)
        ]
        received = xla.scatter(jnp.stack(encoded), axes, None)
        rank = lax.axis_index(axes)
        own = lax.dynamic_index_in_dim(rows, rank, 0, keepdims=False)
        return primitives.accumulate(rank, received, [own], layout)[0]

    def all_gather(name, words, x, layout, axes):
        payloads = lax.all_gather(primitives.encode(words, [x], layout)[0][0], axes)
        return jnp.stack([primitives.decode(p[None], layout, [x])[0] for p in payloads])

    monkeypatch.setattr(nccl, "reduce_scatter", reduce_scatter)
    monkeypatch.setattr(nccl, "all_gather", all_gather)


@pytest.mark.parametrize("compressor", [Q4, STOCHASTIC], ids=str)
@pytest.mark.parametrize("tiled", [True, False])
@pytest.mark.parametrize("half", HALVES)
def test_a_fused_call_is_handed_what_gives_the_bytes_of_xla(
    half, tiled, compressor, mesh, stand_ins
):
    x = values(WORLD, 3, 2 * WORLD if tiled else WORLD, 37)
    place = {"scatter": {"scatter_dimension": 1}, "gather": {"axis": 1}}[half]
    by = {
        exchange: jax.jit(
            sharded(
                lambda v, e=exchange: HALVES[half](
                    v, "data", compressor, key=KEY, tiled=tiled, exchange=e, **place
                ),
                mesh,
            )
        )(x)
        for exchange in ("xla", "nccl")
    }
    assert np.asarray(by["nccl"]).tobytes() == np.asarray(by["xla"]).tobytes()


@needs_streams
@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("check_vma", [True, False])
def test_a_fused_call_is_one_operation_and_typed_as_its_namesake(half, check_vma, mesh_2d, built):
    namesake = {"scatter": lax.psum_scatter, "gather": lax.all_gather}[half]
    x = jax.ShapeDtypeStruct((4, 4, 6, 100), jnp.bfloat16)
    types = []

    def f(v, reduce):
        out = reduce(v[0])
        types.append(jax.typeof(out))
        return out[None]

    for reduce in (
        lambda v: HALVES[half](v, "data", exchange="nccl"),
        lambda v: namesake(v, "data"),
    ):
        one = jax.shard_map(
            lambda v, r=reduce: f(v, r),
            mesh=mesh_2d,
            in_specs=P("data", None, "model"),
            out_specs=P("data", None, "model"),
            check_vma=check_vma,
        )
        found = targets(one, x)
        assert len(found) == (len(types) == 1)
    ours, theirs = types
    assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
    assert ours.mat.varying == theirs.mat.varying == ({"data", "model"} if check_vma else set())


@needs_streams
def test_what_is_gathered_from_an_operand_that_does_not_vary_varies(mesh, built):
    types = []

    def f(v):
        types.append(jax.typeof(cgx_jax.all_gather_compressed(v, "data", exchange="nccl")))
        return v

    jax.make_jaxpr(jax.shard_map(f, mesh=mesh, in_specs=P(), out_specs=P()))(values(64))
    assert types[0].shape == (WORLD, 64)
    assert types[0].mat.varying == {"data"}


@needs_streams
@pytest.mark.parametrize("half", HALVES)
def test_derivative_and_batch_of_a_fused_call(half, mesh, built):
    call = lambda v: HALVES[half](v, "data", exchange="nccl")  # noqa: E731
    x = values(WORLD, WORLD, 40)
    gradient = sharded(jax.grad(lambda v: jnp.sum(call(v) ** 2)), mesh)
    jaxpr = str(jax.make_jaxpr(gradient)(x))
    assert jaxpr.count(f"cgx_{'reduce_scatter' if half == 'scatter' else 'all_gather'}_nccl") == 1
    assert {"scatter": "all_gather", "gather": "reduce_scatter"}[half] in jaxpr  # exact cotangents
    batched = sharded(jax.vmap(call), mesh)
    assert len(targets(batched, values(WORLD, 3, WORLD, 40))) == 3  # one for each element
    shape = jax.eval_shape(batched, values(WORLD, 3, WORLD, 40)).shape
    assert shape == ((WORLD, 3, 40) if half == "scatter" else (WORLD, 3, WORLD, WORLD, 40))


@needs_streams
@pytest.mark.parametrize("half", HALVES)
def test_a_fused_call_is_refused_on_a_cpu(half, mesh, built):
    f = sharded(lambda v: HALVES[half](v, "data", exchange="nccl"), mesh)
    with pytest.raises(ValueError, match=rf"{half}.*exchange='nccl'.*CUDA.*compiled for cpu.*xla"):
        jax.jit(f).lower(values(WORLD, WORLD, 40))


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize(
    ("exchange", "message"),
    [
        ("pigeon", r"exchange='pigeon' is unknown; use one of .*auto.*xla.*nccl"),
        ("mpi", r"exchange='mpi' has .*psum and pmean only; use one of \['auto', 'xla', 'nccl'\]"),
    ],
)
def test_other_exchanges_are_refused_with_those_there_are(half, exchange, message, mesh):
    f = sharded(lambda v: HALVES[half](v, "data", exchange=exchange), mesh)
    with pytest.raises(ValueError, match=rf"{half}_compressed: {message}"):
        jax.make_jaxpr(f)(values(WORLD, WORLD, 40))


@pytest.mark.parametrize("half", HALVES)
def test_without_cuda_kernels_nccl_is_refused_with_the_remedy(half, mesh, monkeypatch):
    monkeypatch.setattr(nccl.native, "cuda_module", lambda: None)
    f = sharded(lambda v: HALVES[half](v, "data", exchange="nccl"), mesh)
    with pytest.raises(ValueError, match=r"exchange='nccl' does not work here: .*put nvcc"):
        jax.make_jaxpr(f)(values(WORLD, WORLD, 40))


@pytest.mark.parametrize("half", HALVES)
def test_an_axis_of_vmap_is_refused(half, built):
    f = jax.vmap(lambda v: HALVES[half](v, "data", exchange="nccl"), axis_name="data")
    with pytest.raises(ValueError, match=r"exchange='nccl'.*the axis is one of vmap"):
        f(values(WORLD, WORLD, 40))


def profile_of(times):
    """Of one measured size, and the seconds that each method takes for it."""
    rows = [(m, 32 if m == "psum" else 4.125, 1 << 12, s) for m, s in times.items()]
    known = {"hosts": 1, "mpi": None, "axis": "data", "latency": 1e-5, "algbw": 4e8}
    return Profile(**(installation.facts() | known), world=WORLD, rows=tuple(rows))


@needs_streams
@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("fastest", ["psum", "xla", "nccl"])
def test_auto_follows_the_profile(half, fastest, mesh, built, following, monkeypatch):
    monkeypatch.setattr(choose, "available", lambda axes=(): ("xla", "mpi", "nccl"))
    times = {"psum": 2.0, "xla": 2.0, "nccl": 2.0, "mpi": 0.1}
    following(profile_of(times | {fastest: 1.0}))
    f = sharded(lambda v: HALVES[half](v, "data"), mesh)
    jaxpr = str(jax.make_jaxpr(f)(values(WORLD, WORLD, 512)))
    fused = {"scatter": "cgx_reduce_scatter_nccl", "gather": "cgx_all_gather_nccl"}[half]
    assert (fused in jaxpr, "cgx_encode" in jaxpr) == (fastest == "nccl", fastest == "xla")


@pytest.mark.parametrize("half", HALVES)
def test_auto_without_a_profile_is_xla(half, mesh, built, monkeypatch):
    monkeypatch.setattr(choose, "available", lambda axes=(): ("xla", "mpi", "nccl"))
    f = sharded(lambda v: HALVES[half](v, "data"), mesh)
    assert "cgx_encode" in str(jax.make_jaxpr(f)(values(WORLD, WORLD, 512)))


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize(
    ("compressor", "width", "dtype"),
    [(Cast(jnp.bfloat16), 40, "float32"), (Q4, 40, "int32"), (Q4, 0, "float32")],
    ids=["another compressor", "integers", "empty"],
)
def test_what_has_no_fused_call_travels_as_by_xla(half, compressor, width, dtype, mesh, built):
    x = values(WORLD, WORLD, width).astype(dtype)
    by = [
        jax.jit(sharded(lambda v, e=e: HALVES[half](v, "data", compressor, exchange=e), mesh))(x)
        for e in ("nccl", "xla")
    ]
    assert np.asarray(by[0]).tobytes() == np.asarray(by[1]).tobytes()


def test_one_rank_needs_no_exchange():
    mesh = Mesh(np.array(jax.devices()[:1]), ("data",))
    x = values(1, 1, 40)
    for half in HALVES.values():
        f = sharded(lambda v, h=half: h(v, "data", exchange="nccl"), mesh)
        np.testing.assert_array_equal(np.ravel(f(x)), np.ravel(x))
