"""Continues training when a worker is lost: 4 processes, one is killed, 3 go on, and one rejoins.

A supervisor starts the workers. When one dies, the others cannot finish their collectives, so the
supervisor ends them too and starts as many new ones as are left. They read the last checkpoint, and
`resize_state` converts the state of the reduction to the new number of ranks. A worker that joins
waits for the next checkpoint. The batch stays the same for any number of workers. On a cluster the
launcher takes the supervisor's place; the workers need no change.

Expected, in about two minutes on 2 cores: the loss falls from about 6.1 to below 3.3 nats per byte
through both changes. `demo/elastic.png` shows it. The last lines are

    worker 3 of 4 killed after step 31; 3 workers went on from step 30
    4 workers went on from step 60
    ranks hold the same parameters at every checkpoint: True
    ok
"""

import argparse
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
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import cgx_jax
import corpus
from model import Transformer, next_byte_loss
from training import adamw

WORLD = 4
BATCH, LENGTH = 24, 32  # windows per step over all workers, and bytes per window
SAVE_EVERY = 10  # steps
JOINED = 75  # exit code of workers that stop so that another one can join
DIVERGED = 76


# --- a worker


def work(rank: int, world: int, coordinator: str, folder: Path, steps: int) -> int:
    """Continues training from the last checkpoint in `folder`; returns the process's exit code."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 1)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(coordinator, world, rank)
    mesh = jax.make_mesh((world,), ("data",))
    graphdef, params = nnx.split(Transformer(32, 1, LENGTH, nnx.Rngs(0)))
    reduce = cgx_jax.sync_gradients(
        "data", cgx_jax.Quantize(4), memory=cgx_jax.ErrorFeedback(), mesh=mesh, exchange="xla"
    )
    optimizer = optax.chain(reduce, adamw(steps))
    begin, state = restored(folder, (params, optimizer.init(params)), world)
    specs = cgx_jax.state_specs(state, "data")

    def train(state, tokens):
        params, opt_state = state
        varying = jax.tree.map(lambda x: jax.lax.pcast(x, "data", to="varying"), params)
        loss, grads = jax.value_and_grad(
            lambda params: next_byte_loss(nnx.merge(graphdef, params), tokens)
        )(varying)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), jax.lax.pmean(loss, "data")

    step = jax.jit(
        jax.shard_map(train, mesh=mesh, in_specs=(specs, P("data")), out_specs=(specs, P())),
        donate_argnums=0,
    )
    whole = jax.jit(lambda state: state, out_shardings=NamedSharding(mesh, P()))
    state = jax.device_put(state, cgx_jax.state_shardings(state, "data", mesh))
    text, _ = corpus.load()
    for number in range(begin, steps):
        batch = corpus.windows(text, 1, BATCH, LENGTH, seed=number)[0]
        tokens = jax.device_put(batch, NamedSharding(mesh, P("data")))
        state, loss = step(state, tokens)
        if rank == 0:
            log(folder, step=number, loss=float(loss), world=world)
        if (number + 1) % SAVE_EVERY and number + 1 < steps:
            continue
        saved = [np.asarray(leaf) for leaf in jax.tree.leaves(whole(state))]
        if not ranks_agree(saved):
            return DIVERGED
        if rank == 0:
            save(folder, number + 1, saved)
        joins = multihost_utils.broadcast_one_to_all(np.array((folder / "join").exists()))
        if joins and number + 1 < steps:
            return JOINED
    return 0


def ranks_agree(leaves: list[np.ndarray]) -> bool:
    """Whether all ranks hold the same bits."""
    own = zlib.crc32(b"".join(leaf.tobytes() for leaf in leaves))
    return len(set(multihost_utils.process_allgather(np.uint32(own)).tolist())) == 1


def log(folder: Path, **entry: Any) -> None:
    with open(folder / "losses.jsonl", "a") as file:
        file.write(json.dumps(entry | {"time": time.time()}) + "\n")


def save(folder: Path, step: int, leaves: list[np.ndarray]) -> None:
    """Writes a checkpoint, completely or not at all."""
    partial = folder / "partial.npz"
    np.savez(partial, step=step, **{str(i): leaf for i, leaf in enumerate(leaves)})
    partial.replace(folder / "checkpoint.npz")


def restored(folder: Path, initial: Any, world: int) -> tuple[int, Any]:
    """Returns the next step, and (params, opt_state) for `world` ranks."""
    if not (folder / "checkpoint.npz").exists():
        return 0, initial
    with np.load(folder / "checkpoint.npz") as file:
        leaves = [file[str(i)] for i in range(len(file.files) - 1)]
        params, opt_state = jax.tree.unflatten(jax.tree.structure(initial), leaves)
        return int(file["step"]), (params, cgx_jax.resize_state(opt_state, world))


# --- the supervisor


class Supervisor:
    """Keeps workers running that train in `folder`."""

    def __init__(self, folder: Path, steps: int) -> None:
        self.folder, self.steps = folder, steps
        self.workers: list[subprocess.Popen[str]] = []

    def start(self, world: int) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            coordinator = f"127.0.0.1:{probe.getsockname()[1]}"
        (self.folder / "join").unlink(missing_ok=True)
        command = [sys.executable, __file__, "--steps", str(self.steps)]
        command += ["--folder", str(self.folder), "--coordinator", coordinator]
        with open(self.folder / "workers.log", "a") as output:
            self.workers = [
                subprocess.Popen(
                    [*command, "--world", str(world), "--rank", str(rank)],
                    stdout=output,
                    stderr=output,
                    text=True,
                )
                for rank in range(world)
            ]

    def kill(self, rank: int) -> None:
        self.workers[rank].kill()

    def ask_to_join(self) -> None:
        """Asks the workers to exit with `JOINED` after their next checkpoint."""
        (self.folder / "join").touch()

    def entries(self) -> list[dict[str, Any]]:
        """Returns what the workers have logged."""
        path = self.folder / "losses.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def ended(self) -> int | None:
        """Returns the exit code that all workers share, 1 if one was lost, None while they run.

        The shared exit code is 0, `JOINED` or `DIVERGED`. After a loss, this ends the others too.
        """
        codes = [worker.poll() for worker in self.workers]
        if all(code == codes[0] for code in codes) and codes[0] in (0, JOINED, DIVERGED):
            return codes[0]
        if all(code in (None, 0, JOINED, DIVERGED) for code in codes):
            return None
        for worker in self.workers:
            worker.kill()
            worker.wait()
        return 1

    def wait_for_step(self, step: int, seconds: float = 300) -> None:
        """Returns once all steps before `step` were taken, or the workers have ended."""
        deadline = time.monotonic() + seconds
        while self.ended() is None and not any(e["step"] + 1 >= step for e in self.entries()):
            if time.monotonic() > deadline:
                raise TimeoutError(f"no step {step} after {seconds} s; see {self.folder}")
            time.sleep(0.05)

    def wait(self, seconds: float = 300) -> int:
        """Waits until the workers have ended; returns the code of `ended`."""
        deadline = time.monotonic() + seconds
        while (code := self.ended()) is None:
            if time.monotonic() > deadline:
                raise TimeoutError(f"the workers still run after {seconds} s; see {self.folder}")
            time.sleep(0.05)
        return code


def supervise(steps: int, seed: int, picture: Path) -> int:
    """Kills one worker in the first half of the training and lets one rejoin in the second."""
    with tempfile.TemporaryDirectory() as name:
        supervisor = Supervisor(Path(name), steps)
        supervisor.start(WORLD)
        supervisor.wait_for_step(steps // 3 + 2)
        victim = random.Random(seed).randrange(WORLD)
        killed_after = supervisor.entries()[-1]["step"]
        supervisor.kill(victim)
        assert supervisor.wait() == 1
        seen = len(supervisor.entries())
        supervisor.start(WORLD - 1)
        supervisor.wait_for_step(2 * steps // 3 - SAVE_EVERY // 2)
        supervisor.ask_to_join()
        code, joined = supervisor.wait(), len(supervisor.entries())
        if code == JOINED:
            supervisor.start(WORLD)
            code = supervisor.wait()
        entries = supervisor.entries()
        if code not in (0, DIVERGED) or joined == len(entries):
            print((supervisor.folder / "workers.log").read_text()[-4000:])
            print("FAILED: the workers did not finish")
            return 1
    draw(entries, picture)
    first, last = entries[0]["loss"], float(np.mean([e["loss"] for e in entries[-steps // 10 :]]))
    print(f"loss {first:.3f} at first, {last:.3f} at last; drawn in {picture}")
    print(
        f"worker {victim} of {WORLD} killed after step {killed_after}; {WORLD - 1} workers went on"
        f" from step {entries[seen]['step']}"
    )
    print(f"{WORLD} workers went on from step {entries[joined]['step']}")
    print(f"ranks hold the same parameters at every checkpoint: {code != DIVERGED}")
    worlds = [e["world"] for e in entries]
    passed = code == 0 and last < 0.8 * first and {WORLD, WORLD - 1} == set(worlds)
    print("ok" if passed else "FAILED: expected a falling loss with 4, 3 and 4 workers", flush=True)
    return 0 if passed else 1


def draw(entries: list[dict[str, Any]], path: Path) -> None:
    """Draws the loss by step into `path`, in one color per number of workers."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    ends = [i for i in range(1, len(entries)) if entries[i]["world"] != entries[i - 1]["world"]]
    for begin, end in zip([0, *ends], [*ends, len(entries)], strict=True):
        part = entries[begin:end]
        world = part[0]["world"]
        axes.plot(
            [e["step"] for e in part],
            [e["loss"] for e in part],
            color="tab:blue" if world == WORLD else "tab:orange",
            label=f"{world} workers, from step {part[0]['step']}",
        )
    axes.set(xlabel="step", ylabel="loss [nats per byte]")
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=90)
    parser.add_argument("--seed", type=int, default=0, help="chooses which worker is killed")
    parser.add_argument("--png", type=Path, default=Path("demo/elastic.png"))
    for name in ("--rank", "--world"):
        parser.add_argument(name, type=int, help=argparse.SUPPRESS)
    for name in ("--coordinator", "--folder"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank is None:
        return supervise(given.steps, given.seed, given.png)
    try:
        return work(given.rank, given.world, given.coordinator, Path(given.folder), given.steps)
    except BaseException:
        # On exit JAX waits for all workers, and they wait for this one.
        traceback.print_exc()
        os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
