"""The exchange over peers' memory, as far as it works without a GPU: traces and refusals.

tests/cpp/cuda/peer_test.cc checks its bytes.
"""

from functools import partial

import jax
import pytest
from jax.sharding import PartitionSpec as P

import cgx_jax
from cgx_jax.exchanges.experimental import Peer, peer
from worlds import needs_streams, normal, on_ranks

WORLD = 8


def psum(mesh):
    return on_ranks(lambda x: cgx_jax.psum_compressed(x, "data", exchange=Peer()), mesh, out=P())


def values():
    return normal(WORLD, 4096)


@needs_streams
def test_a_buffer_is_reduced_in_one_call(built, mesh):
    jaxpr = str(jax.make_jaxpr(psum(mesh))(values()))
    assert jaxpr.count("cgx_all_reduce_peer") == 1
    assert "all_gather" not in jaxpr
    assert "all_to_all" not in jaxpr


@needs_streams
def test_it_is_refused_for_other_devices(built, mesh):
    with pytest.raises(ValueError, match=r"psum_compressed.*'peer'.*for CUDA.*compiled for cpu"):
        psum(mesh).lower(values())


def call_in(step, mesh, *operands):
    """Returns the line of the call in a program of `step` for CUDA."""
    traced = on_ranks(step, mesh, out=P()).trace(*operands)
    module = traced.lower(lowering_platforms=("cuda",)).as_text()
    (line,) = [text for text in module.splitlines() if "@cgx_all_reduce_peer" in text]
    return line


@needs_streams
@pytest.mark.parametrize(
    ("exchange", "attribute"),
    [
        (Peer(timeout=12.5), "timeout_ms = 12500 : i64"),
        (Peer(), "in_host = 0 : i64"),
        (Peer(memory="host"), "in_host = 1 : i64"),
    ],
)
def test_a_call_has_its_options(exchange, attribute, built, mesh):
    step = partial(cgx_jax.psum_compressed, axis_name="data", exchange=exchange)
    assert attribute in call_in(step, mesh, values())


@needs_streams
@pytest.mark.parametrize("bucket_size", [512, 1024])
def test_the_kernel_multiplies_by_units(bucket_size, built, mesh):
    transform = cgx_jax.sync_gradients(
        "data",
        cgx_jax.Quantize(bits=4, bucket_size=bucket_size, rotation=True),
        precondition=cgx_jax.SecondMoment(),
        exchange=Peer(),
    )

    def step(x):
        gradients = x.reshape(64, 64)
        return transform.update(gradients, transform.init(gradients))[0]

    # The keys, the leaf and its units.
    assert call_in(step, mesh, values()).count("%") == 1 + 3


@pytest.mark.parametrize("timeout", [0, 0.0001, 2e9, float("nan")])
def test_impossible_options_are_refused(timeout):
    with pytest.raises(ValueError, match=rf"Peer: timeout={timeout} must be in \[0\.001, 1e\+09\]"):
        Peer(timeout=timeout)
    with pytest.raises(ValueError, match="Peer: memory='disk' must be 'device' or 'host'"):
        Peer(memory="disk")


def test_halves_go_by_kernels_around_collectives(built, mesh):
    f = on_ranks(lambda x: cgx_jax.psum_scatter_compressed(x, "data", exchange=Peer()), mesh)
    jaxpr = str(jax.make_jaxpr(f)(values().reshape(WORLD, 1, -1).repeat(WORLD, 1)))
    assert "cgx_encode" in jaxpr
    assert "all_to_all" in jaxpr
    assert "cgx_all_reduce_peer" not in jaxpr


def test_more_ranks_than_lanes_are_refused(built, mesh, monkeypatch):
    monkeypatch.setattr(peer, "MOST_RANKS", 4)
    with pytest.raises(ValueError, match=r"psum_compressed: .*at most 4 ranks.* has 8; use .*nccl"):
        jax.make_jaxpr(psum(mesh))(values())


def test_an_axis_of_vmap_is_refused(built):
    f = jax.vmap(lambda x: cgx_jax.psum_compressed(x, "data", exchange=Peer()), axis_name="data")
    with pytest.raises(ValueError, match=r"exchange='peer'.*the axis is a vmap axis"):
        f(values())


@pytest.mark.parametrize(
    ("version", "refused"), [("2.28.9", True), ("2.29.2", False), ("2.30", False), (None, False)]
)
def test_an_nccl_without_windows_of_peers_is_refused(version, refused, built, mesh, monkeypatch):
    def installed(name):
        assert name == "nvidia-nccl-cu13"
        if version is None:
            raise peer.metadata.PackageNotFoundError
        return version

    monkeypatch.setattr(peer.metadata, "version", installed)
    assert Peer(memory="host").missing() is None
    if refused:
        with pytest.raises(ValueError, match=r"NCCL is 2\.28\.9, but must be 2\.29 or newer; pip"):
            jax.make_jaxpr(psum(mesh))(values())
    else:
        assert Peer().missing() is None
