"""Continues training in the same processes when one is lost, by JAX's own fault tolerance.

14_elastic.py ends all workers and starts as many as are left. Here the survivors stay. JAX's
`live_devices` tells them which devices are left. They build a smaller mesh, take the last snapshot
from their own memory, and `resize_state` converts the state of the reduction to the new number of
ranks.

JAX calls its fault tolerance experimental, and says that it works fully only on GPUs. Nobody has
run this example on several GPUs. On CPU devices no collective is aborted: a process whose
connection to the lost one breaks gets an error, and the others wait for a timeout, here 20 s. Most
runs survive this. In some, gloo ends a survivor with "Received data size doesn't match expected
size". XLA keeps the broken connections of a group of CPU processes, so the lost one cannot rejoin.

When the survivors do not go on, the supervisor starts as many processes as are left, as
14_elastic.py does. They read the last snapshot from a file. This always happens if process 0 is
lost: it runs JAX's coordinator, and JAX ends all processes that lose it. `--lose 0` shows this.

    python 17_elastic_gpu.py                     # 4 processes with one CPU device each
    python 17_elastic_gpu.py --platform cuda     # 4 GPUs of this machine, one per process

On a cluster, start `--rank` 0, 1, ... yourself with the variables that `environment` returns. Give
every rank `--world`, the first machine's host:port as `--coordinator`, and a shared `--folder`.

Expected: the loss falls from about 6.1 to below 3.3 nats per byte, and the last lines are these,
with False where all processes were started again:

    process 2 of 4 killed; 3 went on from step 30, in the same processes: True
    ranks hold the same state at every snapshot: True
    ok
"""

import argparse
import itertools
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
import traceback
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx
from jax.experimental.multihost_utils import ProcessFailureError, live_devices
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import cgx_jax
import corpus
from model import Transformer, next_byte_loss
from training import adamw

WORLD = 4
BATCH, LENGTH = 24, 32  # windows per step over all ranks, and bytes per window
SNAPSHOT_EVERY = 10  # steps
HEARTBEAT = 10  # seconds of silence after which JAX counts a process as lost; 100 by default
PATIENCE = 100  # seconds that the supervisor waits for the next snapshot

# A collective with a lost process has to end. On GPUs XLA aborts its NCCL communicators.
GPU_FLAGS = (
    "--xla_gpu_nccl_terminate_on_error=false",  # an error of NCCL must not end the process
    "--xla_gpu_nccl_async_execution=true",
    "--xla_gpu_nccl_blocking_communicators=false",
    # XLA divides autotuning between processes by their numbers, which have gaps after a loss.
    "--xla_gpu_shard_autotuning=false",
)
CPU_FLAGS = ("--xla_cpu_collective_timeout_seconds=20",)


def environment(platform: str) -> dict[str, str]:
    """Returns the variables that JAX needs in a process that must survive the loss of others."""
    flags = GPU_FLAGS if platform == "cuda" else CPU_FLAGS
    return {
        "XLA_FLAGS": " ".join([os.environ.get("XLA_FLAGS", ""), *flags]),
        "XLA_PYTHON_CLIENT_ABORT_COLLECTIVES_ON_FAILURE": "1",
        "XLA_PYTHON_CLIENT_USE_TFRT_GPU_CLIENT": "1",
    }


# --- a process


class Trainer:
    """The training step on the given devices, and its state there."""

    def __init__(
        self,
        devices: Sequence[jax.Device],
        snapshot: Sequence[np.ndarray] | None,
        steps: int,
    ) -> None:
        self.devices = devices
        self.mesh = mesh = Mesh(np.array(devices), ("data",))
        graphdef, params = nnx.split(Transformer(32, 1, LENGTH, nnx.Rngs(0)))
        reduce = cgx_jax.sync_gradients(
            "data",
            cgx_jax.Quantize(4),
            memory=cgx_jax.ErrorFeedback(),
            mesh=mesh,
            exchange="xla",  # "nccl" cannot have XLA's communicators under GPU_FLAGS
        )
        optimizer = optax.chain(reduce, adamw(steps))
        state = (params, optimizer.init(params))
        if snapshot is not None:
            params, opt_state = jax.tree.unflatten(jax.tree.structure(state), snapshot)
            state = (params, cgx_jax.resize_state(opt_state, len(devices)))
        specs = cgx_jax.state_specs(state, "data")

        def train(state, tokens):
            params, opt_state = state
            varying = jax.tree.map(lambda x: jax.lax.pcast(x, "data", to="varying"), params)
            loss, grads = jax.value_and_grad(
                lambda params: next_byte_loss(nnx.merge(graphdef, params), tokens)
            )(varying)
            updates, opt_state = optimizer.update(grads, opt_state, params)
            return (optax.apply_updates(params, updates), opt_state), jax.lax.pmean(loss, "data")

        self.step = jax.jit(
            jax.shard_map(train, mesh=mesh, in_specs=(specs, P("data")), out_specs=(specs, P())),
            donate_argnums=0,
        )
        self.whole = jax.jit(lambda state: state, out_shardings=NamedSharding(mesh, P()))
        self.state = jax.device_put(state, cgx_jax.state_shardings(state, "data", mesh))

    def train(self, text: np.ndarray, begin: int, end: int) -> tuple[list[float], list[np.ndarray]]:
        """Takes steps `begin` to `end` - 1; returns their losses, and all ranks' final state."""
        losses = []
        for number in range(begin, end):
            batch = corpus.windows(text, 1, BATCH, LENGTH, seed=number)[0]
            tokens = jax.device_put(batch, NamedSharding(self.mesh, P("data")))
            self.state, loss = self.step(self.state, tokens)
            losses.append(float(loss))
        return losses, [np.asarray(leaf) for leaf in jax.tree.leaves(self.whole(self.state))]


def work(rank: int, world: int, coordinator: str, folder: Path, given: argparse.Namespace) -> None:
    """Continues training from the last snapshot in `folder`, with the processes that are left."""
    jax.config.update("jax_platforms", given.platform)
    if given.platform == "cpu":
        jax.config.update("jax_num_cpu_devices", 1)
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_enable_recoverability", True)
    jax.distributed.initialize(coordinator, world, rank, heartbeat_timeout_seconds=HEARTBEAT)
    text, _ = corpus.load()
    begin, snapshot = restored(folder)
    trainer = None
    while begin < given.steps:
        end = min(begin + SNAPSHOT_EVERY, given.steps)
        try:
            # At its end the block waits for all survivors. It fails in all of them, or in none.
            with live_devices(jax.devices()) as devices:
                if trainer is None or trainer.devices != devices:
                    trainer = Trainer(devices, snapshot, given.steps)
                losses, new = trainer.train(text, begin, end)
        except ProcessFailureError:
            traceback.print_exc()
            trainer = None  # this also drops the steps since the last snapshot
            continue
        if rank == 0:
            save(folder, end, new)
        log(folder, rank, begin=begin, losses=losses, world=len(devices), crc=checksum(new))
        begin, snapshot = end, new
    finish(folder, rank, len(trainer.devices) if trainer else 1)


def finish(folder: Path, rank: int, world: int) -> None:
    """Ends this process. Process 0 ends last: JAX ends processes that lose its coordinator."""
    deadline = time.monotonic() + PATIENCE
    while rank == 0 and len(list(folder.glob("*.ended"))) < world - 1:
        if time.monotonic() > deadline:
            raise TimeoutError(f"some of {world - 1} processes have not ended after {PATIENCE} s")
        time.sleep(0.05)
    jax.distributed.shutdown()
    (folder / f"{rank}.ended").touch()
    os._exit(0)  # connections to a lost process may not close


def checksum(leaves: Sequence[np.ndarray]) -> int:
    return zlib.crc32(b"".join(leaf.tobytes() for leaf in leaves))


def log(folder: Path, rank: int, **entry: Any) -> None:
    with open(folder / f"{rank}.jsonl", "a") as file:
        file.write(json.dumps(entry) + "\n")


def save(folder: Path, step: int, leaves: Sequence[np.ndarray]) -> None:
    """Writes a snapshot, completely or not at all."""
    partial = folder / "partial.npz"
    np.savez(partial, step=step, **{str(i): leaf for i, leaf in enumerate(leaves)})
    partial.replace(folder / "snapshot.npz")


def restored(folder: Path) -> tuple[int, list[np.ndarray] | None]:
    """Returns the next step and the snapshot before it; (0, None) without a snapshot."""
    if not (folder / "snapshot.npz").exists():
        return 0, None
    with np.load(folder / "snapshot.npz") as file:
        return int(file["step"]), [file[str(i)] for i in range(len(file.files) - 1)]


# --- the supervisor


class Supervisor:
    """Starts processes that train in `folder`, and reads what they have logged."""

    def __init__(self, folder: Path, given: argparse.Namespace) -> None:
        self.folder, self.given = folder, given
        self.processes: list[subprocess.Popen[str]] = []

    def start(self, world: int) -> None:
        for ended in self.folder.glob("*.ended"):
            ended.unlink()
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            coordinator = f"127.0.0.1:{probe.getsockname()[1]}"
        given = self.given
        command = [sys.executable, __file__, "--steps", str(given.steps)]
        command += ["--platform", given.platform]
        command += ["--folder", str(self.folder), "--coordinator", coordinator]
        variables = os.environ | environment(given.platform)
        with open(self.folder / "processes.log", "a") as output:
            self.processes = [
                subprocess.Popen(
                    [*command, "--world", str(world), "--rank", str(rank)],
                    env=variables | {"CUDA_VISIBLE_DEVICES": str(rank)},
                    stdout=output,
                    stderr=output,
                    text=True,
                )
                for rank in range(world)
            ]

    def entries(self, rank: int) -> list[dict[str, Any]]:
        """Returns what a rank has logged, one entry per snapshot."""
        path = self.folder / f"{rank}.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def wait_for_step(self, step: int) -> None:
        """Returns once there is a snapshot after all steps before `step`."""
        deadline = time.monotonic() + PATIENCE
        while not any(e["begin"] + len(e["losses"]) >= step for e in self.entries(0)):
            if time.monotonic() > deadline or any(p.poll() is not None for p in self.processes):
                raise RuntimeError(f"the processes did not come to step {step}")
            time.sleep(0.05)

    def finished(self, but: int = -1) -> bool:
        """Waits for all processes except `but`; returns whether they trained to the end.

        Ends all processes if one of them fails, or if no snapshot comes for too long.
        """
        others = [process for rank, process in enumerate(self.processes) if rank != but]
        seen, deadline = len(self.entries(0)), time.monotonic() + PATIENCE
        codes = [process.poll() for process in others]
        while None in codes and not any(codes) and time.monotonic() < deadline:
            if len(self.entries(0)) > seen:
                seen, deadline = len(self.entries(0)), time.monotonic() + PATIENCE
            time.sleep(0.05)
            codes = [process.poll() for process in others]
        self.end()
        return not any(process.returncode for process in others)

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


def supervise(given: argparse.Namespace) -> int:
    """Kills one process in the first half of the training; returns the exit code."""
    lost = random.Random(given.seed).randrange(1, WORLD) if given.lose is None else given.lose
    with tempfile.TemporaryDirectory() as name:
        supervisor = Supervisor(Path(name), given)
        try:
            supervisor.start(WORLD)
            supervisor.wait_for_step(given.steps // 3)
            supervisor.processes[lost].kill()
            survived = supervisor.finished(but=lost)
            if not survived:
                supervisor.start(WORLD - 1)
            if not survived and not supervisor.finished():
                raise RuntimeError("the processes that were started again did not finish")
        except RuntimeError as error:
            print((supervisor.folder / "processes.log").read_text()[-4000:])
            print(f"FAILED: {error}")
            return 1
        finally:
            supervisor.end()
        ranks = [supervisor.entries(rank) for rank in range(WORLD)]
    smaller = next(e for e in ranks[0] if e["world"] < WORLD)
    losses = {e["begin"] + i: loss for e in ranks[0] for i, loss in enumerate(e["losses"])}
    first, last = (
        losses[0],
        float(np.mean([losses[s] for s in sorted(losses)[-given.steps // 10 :]])),
    )
    print(f"loss {first:.3f} at first, {last:.3f} at last")
    print(
        f"process {lost} of {WORLD} killed; {smaller['world']} went on from step"
        f" {smaller['begin']}, in the same processes: {survived}"
    )
    checksums: dict[tuple[int, int], set[int]] = {}
    for entry in itertools.chain(*ranks):
        checksums.setdefault((entry["begin"], entry["world"]), set()).add(entry["crc"])
    agree = all(len(found) == 1 for found in checksums.values())
    print(f"ranks hold the same state at every snapshot: {agree}")
    passed = agree and len(losses) == given.steps and last < 0.8 * first
    print("ok" if passed else "FAILED: expected equal states and a falling loss", flush=True)
    return 0 if passed else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=90)
    parser.add_argument("--platform", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--lose", type=int, choices=range(WORLD), help="the process to kill")
    parser.add_argument("--seed", type=int, default=0, help="chooses it otherwise, never 0")
    parser.add_argument("--rank", type=int, help="started by hand: this process's rank")
    parser.add_argument("--world", type=int, help="started by hand: the number of processes")
    parser.add_argument("--coordinator", help="started by hand: host:port of rank 0")
    parser.add_argument("--folder", type=Path, help="started by hand: where snapshots go")
    given = parser.parse_args()
    if given.rank is None:
        return supervise(given)
    try:
        work(given.rank, given.world, given.coordinator, given.folder, given)
    except BaseException:
        # On exit JAX waits for all processes, and they wait for this one.
        traceback.print_exc()
        os._exit(1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
