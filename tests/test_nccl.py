"""The NCCL exchange's streams, and its all-reduce in one phase: operands of fused calls.

The C++ tests check the bytes of these calls.
"""

import dataclasses
import json
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import cgx_jax
from cgx_jax import Quantize
from cgx_jax.choice import Auto, Profile, auto
from cgx_jax.collective import Collective
from cgx_jax.exchanges import Nccl, Xla, experimental, nccl
from cgx_jax.exchanges.base import Fused
from cgx_jax.exchanges.nccl import MOST_STREAMS, SEGMENT_BYTES
from cgx_jax.kernels import primitives
from cgx_jax.kernels.primitives import NO_RANK
from cgx_jax.kernels.wire import Layout
from cgx_jax.tuning import candidates, engine
from profiles import profile
from worlds import needs_streams, on_ranks

WORLD = 8


@pytest.mark.parametrize("streams", [-1, 0, 1.5, MOST_STREAMS + 1])
def test_another_number_of_streams_is_refused(streams):
    says = rf"Nccl: streams={streams} must be a whole number in \[1, 8\]; the default is 1"
    with pytest.raises(ValueError, match=says):
        Nccl(streams=streams)


@pytest.mark.parametrize("streams", range(1, MOST_STREAMS + 1))
@pytest.mark.parametrize("size", [0, 1, 4096, 10**6, 3 * 10**8])
def test_every_stream_has_a_message_where_there_is_enough(size, streams):
    layout = Layout((Quantize(4).slot(size),), WORLD)
    told = Nccl(streams=streams)._options(layout)
    segment = told["segment_bytes"]
    assert told["streams"] == streams
    assert segment % nccl.ALIGNMENT == 0
    assert 0 < segment <= SEGMENT_BYTES
    count = -(-layout.chunk_bytes // segment)
    assert segment == nccl.ALIGNMENT or count >= min(streams, layout.chunk_bytes // 4096)
    if streams == 1:
        assert segment == SEGMENT_BYTES


@dataclasses.dataclass(frozen=True)
class Halved(Quantize):
    """A code of a user, with the kernels of another one."""

    def prepare(self, x, state):
        return x / 2, state


@pytest.mark.parametrize("reduction", [None, "gather_sum"])
def test_what_a_code_prepares_is_not_sent_by_a_call_that_cannot_prepare(reduction, mesh, built):
    def f(x):
        return summed(x, "nccl", compressor=Halved(4), reduction=reduction)

    jaxpr = str(jax.make_jaxpr(over(mesh, f))(jnp.ones((WORLD, 4096))))
    found = re.findall(r"cgx_\w+", jaxpr)
    assert "cgx_encode" in found
    assert not [name for name in found if name.endswith("_nccl")]


def summed(x, exchange, **options):
    return cgx_jax.psum_compressed(x, "data", exchange=exchange, **options)


def over(mesh, f):
    return on_ranks(f, mesh, out=P())


@needs_streams
@pytest.mark.parametrize(
    ("reduction", "target"), [(None, "cgx_all_reduce_nccl"), ("gather_sum", "cgx_gather_sum_nccl")]
)
def test_a_sum_is_one_call_on_as_many_streams(reduction, target, mesh, built):
    f = over(mesh, lambda x: summed(x, Nccl(streams=4), reduction=reduction))
    x = np.zeros((WORLD, 10**5), np.float32)
    text = str(jax.make_jaxpr(f)(x))
    assert text.count(target) == 1
    assert "cgx_encode" not in text
    module = f.trace(x).lower(lowering_platforms=("cuda",)).as_text()
    assert module.count(f"@{target}(") == 1
    assert "streams = 4 : i64" in module


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ("--xla_gpu_nccl_async_execution=true", "--xla_gpu_nccl_async_execution=true"),
        ("--xla_gpu_nccl_async_execution", "--xla_gpu_nccl_async_execution"),
        ("--a=b --xla_gpu_nccl_blocking_communicators=False", "blocking_communicators=False"),
        ("--xla_gpu_nccl_async_execution=true --xla_gpu_nccl_async_execution=false", None),
        ("--xla_gpu_nccl_blocking_communicators=true", None),
        ("--xla_gpu_nccl_terminate_on_error=false", None),
    ],
)
@pytest.mark.parametrize("exchange", [Nccl(), experimental.Peer()])
def test_communicators_of_one_thread_are_refused(exchange, flags, named, mesh, built, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", flags)
    if named is None:
        assert exchange.missing() is None
        return
    says = rf"does not work here: XLA_FLAGS has .*{named}, with .*use exchange=\"xla\""
    with pytest.raises(ValueError, match=says):
        jax.make_jaxpr(over(mesh, lambda x: summed(x, exchange)))(np.zeros((WORLD, 9), np.float32))


def unfused(self, call, sent, factors=()):
    """Computes a gather-sum by kernels and XLA's collectives, so that it runs on a CPU."""
    assert call.collective is Collective.GATHER_SUM
    layout, leaves = call.layout, sent.leaves
    payload, lost = primitives.encode(sent, layout, residual=call.residual)
    rows = Xla().gather(call.name, payload.reshape(-1), call.axes)
    zeros = [jnp.zeros(x.shape, x.dtype) for x in leaves]
    rank = jnp.int32(NO_RANK)
    return Fused(primitives.accumulate(rank, rows, zeros, layout, divisor=call.divisor), lost)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("rounding", ["nearest", "stochastic", "correlated"])
@pytest.mark.quick("correlated-bfloat16")
def test_a_sum_in_one_phase_is_handed_what_gives_the_bytes_of_xla(
    rounding, dtype, mesh, fused_on_cpu
):
    fused_on_cpu(unfused)
    values = np.random.default_rng(0).normal(size=(WORLD, 3, 700))
    tree = [jnp.asarray(values, dtype), jnp.asarray(values[:, 0, :5], dtype)]
    code, key = Quantize(3, 64, rounding), jax.random.key(1)

    def f(own, exchange):
        return cgx_jax.pmean_compressed(
            own, "data", code, exchange=exchange, reduction="gather_sum", key=key
        )

    got, want = (over(mesh, lambda t, e=e: f(t, e))(tree) for e in ("nccl", "xla"))
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b), got, want)


def measured_with(engine):
    return profile(
        [("psum", 32, 10**7, 1.0), ("nccl", 4.125, 10**7, 0.1)], here=True, engine=engine
    )


def test_nccl_runs_on_the_streams_that_it_was_measured_with():
    made = measured_with(Nccl(streams=4))
    assert Profile.from_json(made.to_json()) == made
    assert json.loads(made.to_json())["engine"] == {"exchange": "nccl", "streams": 4}
    load = auto.Load(25 * 10**5, 4.125)
    assert Auto(made).choose("here", (Nccl(), Xla()), 4, load) == Nccl(streams=4)


class Links:
    """A link on which a call takes the seconds that `seconds_of` has for its streams."""

    axis = "data"

    def __init__(self, seconds_of):
        self.now, self.seconds_of = 0.0, seconds_of

    def all_reduce(self, code, exchange):
        return exchange

    def place(self, value_of, values):
        return np.zeros((2, 1), np.float32)

    def seconds(self, exchanges, x, rounds):
        times = np.array([self.seconds_of[e.streams] for e in exchanges])
        self.now += rounds * times.sum()
        return np.tile(times, (rounds, 1))


@pytest.mark.parametrize(
    ("seconds_of", "budget", "expected"),
    [
        ({1: 1.0, 2: 0.8, 4: 0.5}, 1000, 4),
        ({1: 1.0, 2: 0.8, 4: 0.9}, 1000, 2),
        ({1: 1.0, 2: 1.0, 4: 1.1}, 1000, 1),
        ({1: 1.0, 2: 0.8, 4: 0.5}, 12, 1),  # no time for five rounds
    ],
)
def test_tune_takes_the_fastest_number_of_streams(seconds_of, budget, expected):
    links = Links(seconds_of)
    assert engine.tune_streams(links, lambda: budget - links.now) == Nccl(streams=expected)
    assert links.now <= budget


@pytest.fixture(params=["aborts", "recoverability"])
def recovering(request, monkeypatch):
    """Sets this process up to go on without a lost rank."""
    if request.param == "aborts":
        monkeypatch.setenv("XLA_PYTHON_CLIENT_ABORT_COLLECTIVES_ON_FAILURE", "1")
    jax.config.update("jax_enable_recoverability", request.param == "recoverability")
    yield
    jax.config.update("jax_enable_recoverability", False)


def test_a_job_that_recovers_is_tuned_to_one_stream(recovering):
    links = Links({1: 1.0, 2: 0.8, 4: 0.5})
    assert engine.tune_streams(links, lambda: 1000 - links.now) == Nccl()


@needs_streams
def test_a_job_that_recovers_has_one_stream_even_if_a_profile_has_more(recovering, mesh, built):
    f = over(mesh, lambda x: summed(x, Nccl(streams=2)))
    with pytest.raises(ValueError, match=r"streams=2 would wait for that rank forever; use str"):
        jax.make_jaxpr(f)(np.zeros((WORLD, 10**5), np.float32))
    jax.make_jaxpr(over(mesh, lambda x: summed(x, Nccl())))(np.zeros((WORLD, 10**5), np.float32))


@pytest.mark.parametrize(
    ("processors", "expected"),
    [((28, 132), (1,)), ((33, 40), (1, 2)), ((35,), (1, 2, 4)), ((132, 132), (1, 2, 4))],
)
def test_tune_tries_as_many_streams_as_fit_on_every_device(processors, expected, pretend):
    pretend(devices=[types.SimpleNamespace(core_count=count) for count in processors])
    assert candidates.streams() == expected
