"""One process of tests/test_faults.py: reduces over gloo, and fails as the command line says.

    python gloo_worker.py FAULT RANK WORLD PORT

Only the last rank fails. The others print what they see, and after how many seconds.
"""

import os
import signal
import sys
import threading
import time

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import cgx_jax

FAULT, RANK, WORLD, PORT = sys.argv[1], *map(int, sys.argv[2:])
FAULTY = RANK == WORLD - 1
HEARTBEAT = 10  # seconds of silence after which a process counts as dead; 100 by default
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(
    f"localhost:{PORT}", WORLD, RANK, local_device_ids=[0], heartbeat_timeout_seconds=HEARTBEAT
)
mesh = jax.make_mesh((WORLD,), ("data",))


def values(size: int) -> np.ndarray:
    """Returns the same values on every rank."""
    return np.random.default_rng(0).standard_normal(size).astype(np.float32)


def reducer(bits: int, size: int, **options):
    """Returns a compiled reduction of f32[size] per rank."""
    code = cgx_jax.Quantize(bits, **options)
    mapped = jax.shard_map(
        lambda x: cgx_jax.psum_compressed(x[0], "data", code, exchange="xla"),
        mesh=mesh,
        in_specs=P("data"),
        out_specs=P(),
    )
    own = values(size)[None]
    x = jax.make_array_from_process_local_data(NamedSharding(mesh, P("data")), own)
    step = jax.jit(mapped).lower(x).compile()
    return lambda: jax.block_until_ready(step(x))


def say(text: str) -> None:
    os.write(1, f"[{RANK}] {text}\n".encode())


size = 2_000_000
good = reducer(4, size)
others = {"width": (8, size), "narrow": (2, size), "shape": (4, 4 * size)}
faulty = reducer(*others[FAULT]) if FAULT in others else good
if FAULT == "rotated":  # as many bytes
    with cgx_jax.debug.debug_checksums():
        good, faulty = reducer(4, size), reducer(4, size, rotation=True)
for _ in range(2 if FAULT != "rotated" else 0):
    good()
start = time.monotonic()
say("started")
try:
    if FAULTY and FAULT == "killed before":
        os.kill(os.getpid(), signal.SIGKILL)
    if FAULTY and FAULT == "raises":
        raise RuntimeError("the data are broken")
    if FAULTY and FAULT == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    if FAULTY and FAULT == "slow":
        time.sleep(3)
    if FAULTY and FAULT == "killed in":
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGKILL)).start()
    for _ in range(200 if FAULT == "killed in" else 1):
        out = faulty() if FAULTY else good()
    got, want = np.asarray(out.addressable_data(0)), WORLD * values(size)
    right = bool(np.linalg.norm(got - want) < 0.2 * np.linalg.norm(want))
    say(f"after {time.monotonic() - start:.1f} s a right result: {right}")
except Exception as error:
    text = " ".join(str(error).split())
    say(f"after {time.monotonic() - start:.1f} s {type(error).__name__}: {text}")
    raise
