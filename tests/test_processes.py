"""The reduction on real processes: jax.distributed, gloo on loopback."""

import socket
import subprocess
import sys

import pytest

PROGRAM = """
import sys
import jax
rank, world, port = map(int, sys.argv[1:])
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(f"localhost:{port}", world, rank, local_device_ids=[0])
import jax.numpy as jnp, numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
import cgx_jax

mesh = Mesh(np.array(jax.devices()), ("data",))
every = [np.random.default_rng(r).normal(size=(30, 1001)).astype(np.float32) for r in range(world)]
mine = jax.make_array_from_process_local_data(NamedSharding(mesh, P("data")), every[rank][None])
for compressor in (cgx_jax.Quantize(8), cgx_jax.Cast(jnp.bfloat16), cgx_jax.Identity()):
    f = jax.shard_map(
        lambda x: cgx_jax.psum_compressed(x[0], "data", compressor),
        mesh=mesh, in_specs=P("data"), out_specs=P(),
    )
    got = np.asarray(jax.jit(f)(mine).addressable_data(0))
    assert np.abs(got - sum(every)).max() < 0.2, compressor
    gathered = multihost_utils.process_allgather(got)
    assert all(g.tobytes() == got.tobytes() for g in gathered), compressor
print("ok")
"""


@pytest.mark.parametrize("world", [2, 4])
def test_processes_hold_the_same_bits(world):
    with socket.socket() as s:
        s.bind(("localhost", 0))
        port = s.getsockname()[1]
    ranks = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", PROGRAM, *map(str, (rank, world, port))],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=_environment(),
        )
        for rank in range(world)
    ]
    try:
        for p in ranks:
            out, error = p.communicate(timeout=180)
            assert out.endswith("ok\n"), error
    finally:
        for p in ranks:
            p.kill()
            p.wait()


def _environment():
    import os

    return {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
