"""Continues training when a worker is lost: 4 processes, one is killed, 3 go on, and one rejoins.

A supervisor starts the workers. When one dies, the others cannot finish their collectives, so the
supervisor ends them too and starts as many new ones as are left. They read the last checkpoint, and
`resize_state` converts the state of the reduction to the new number of ranks. A worker that joins
waits for the next checkpoint. The batch stays the same for any number of workers. On a cluster the
launcher takes the supervisor's place; the workers need no change.

    python 09_elastic.py                                       # 4 bits in every step
    python 09_elastic.py --steps 240 --round 10 --rate 10mbit  # DiLoCo over slow links (Linux)

With `--round 10` the workers train alone for 10 steps, and then send how far they have moved, in 4
bits. Each round ends with a checkpoint, so a loss costs at most the steps of one round. Each worker
saves its own optimizer's state itself: over slow links it is too large to send.

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
from cgx_jax.commands import rig
from cgx_jax.transforms import diloco, local_params
from model import Transformer, next_byte_loss
from training import adamw

WORLD = 4
BATCH, LENGTH = 24, 32  # windows per step over all workers, and bytes per window
SAVE_EVERY = 10  # steps
JOINED = 75  # exit code of workers that stop so that another one can join
DIVERGED = 76


# --- a worker


def work(given: argparse.Namespace) -> int:
    """Continues training from the last checkpoint in the folder; returns the exit code."""
    rank, world, steps = given.rank, given.world, given.steps
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 1)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(given.coordinator, world, rank)
    mesh = jax.make_mesh((world,), ("data",))
    graphdef, params = nnx.split(Transformer(32, 1, LENGTH, nnx.Rngs(0)))
    q4 = cgx_jax.Quantize(4)
    options = {"memory": cgx_jax.ErrorFeedback(), "mesh": mesh, "exchange": "xla"}
    if given.round:
        optimizer = diloco(adamw(steps), "data", q4, every=given.round, **options)
    else:
        optimizer = optax.chain(cgx_jax.sync_gradients("data", q4, **options), adamw(steps))
    begin, bits, state = restored(given.folder, (params, optimizer.init(params)), world)
    specs = cgx_jax.state_specs(state, "data")

    def train(state, tokens):
        params, opt_state = state
        if given.round:
            here = local_params(params, opt_state)
        else:
            here = jax.tree.map(lambda x: jax.lax.pcast(x, "data", to="varying"), params)
        loss, grads = jax.value_and_grad(
            lambda params: next_byte_loss(nnx.merge(graphdef, params), tokens)
        )(here)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss[None]

    step = jax.jit(
        jax.shard_map(train, mesh=mesh, in_specs=(specs, P("data")), out_specs=(specs, P("data"))),
        donate_argnums=0,
    )
    state = jax.tree.map(placed, state, cgx_jax.state_shardings(state, "data", mesh))
    if bits not in (None, shared_bits(state)):
        return DIVERGED
    text, _ = corpus.load()
    for number in range(begin, steps):
        batch = corpus.windows(text, 1, BATCH, LENGTH, seed=number)[0]
        tokens = placed(batch, NamedSharding(mesh, P("data")))
        state, losses = step(state, tokens)
        if rank == 0:
            # Its own loss: a mean over the workers would send something in every step.
            log(given.folder, step=number, loss=float(own(losses)[0]), world=world)
        if (number + 1) % (given.round or SAVE_EVERY) and number + 1 < steps:
            continue
        if not save(given.folder, number + 1, state):
            return DIVERGED
        asked = [int(path.suffix[1:]) <= number + 1 for path in given.folder.glob("join.*")]
        joins = multihost_utils.broadcast_one_to_all(np.array(any(asked)))
        if joins and number + 1 < steps:
            return JOINED
    return 0


def placed(value: Any, sharding: NamedSharding) -> jax.Array:
    """Places a value that all processes have; `jax.device_put` would send it, to compare it."""
    if not getattr(value, "is_fully_addressable", True):
        return value  # as `init` made it, on the mesh
    host = np.asarray(value)
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])


def own(array: jax.Array) -> np.ndarray:
    """Returns this process's rows of an array, or all of one that the ranks share."""
    return np.asarray(array.addressable_data(0))


def shared_bits(state: Any) -> int:
    """Returns a checksum of what the ranks share: the parameters, and part of the state."""
    shared = [x for x in jax.tree.leaves(state) if x.sharding.is_fully_replicated]
    return zlib.crc32(b"".join(own(x).tobytes() for x in shared))


def log(folder: Path, **entry: Any) -> None:
    if rig.joined():
        entry["sent"] = rig.sent_bytes()
    with open(folder / "losses.jsonl", "a") as file:
        file.write(json.dumps(entry | {"time": time.time()}) + "\n")


def save(folder: Path, step: int, state: Any) -> bool:
    """Writes a checkpoint, completely or not at all; returns whether all ranks share its bits.

    Each rank writes what it holds, so no rank's state travels.
    """
    rank, world = jax.process_index(), jax.process_count()
    arrays = {str(i): own(leaf) for i, leaf in enumerate(jax.tree.leaves(state))}
    np.savez(folder / f"{step}.{rank}.npz", **arrays)
    # Once the checksums of all ranks are here, all of them have written.
    bits = multihost_utils.process_allgather(np.uint32(shared_bits(state))).tolist()
    agree = len(set(bits)) == 1
    if rank == 0 and agree:
        partial = folder / "partial.json"
        partial.write_text(json.dumps({"step": step, "world": world, "bits": bits[0]}))
        partial.replace(folder / "checkpoint.json")
        for part in folder.glob("*.npz"):
            if not part.name.startswith(f"{step}."):
                part.unlink()
    return agree


def restored(folder: Path, initial: Any, world: int) -> tuple[int, int | None, Any]:
    """Returns the next step, its checksum, and (params, opt_state) for `world` ranks."""
    if not (folder / "checkpoint.json").exists():
        return 0, None, initial
    saved = json.loads((folder / "checkpoint.json").read_text())
    parts = [np.load(folder / f"{saved['step']}.{rank}.npz") for rank in range(saved["world"])]
    leaves = [
        parts[0][str(i)] if spec == P() else np.concatenate([part[str(i)] for part in parts])
        for i, spec in enumerate(jax.tree.leaves(cgx_jax.state_specs(initial, "data")))
    ]
    params, opt_state = jax.tree.unflatten(jax.tree.structure(initial), leaves)
    return saved["step"], saved["bits"], (params, cgx_jax.resize_state(opt_state, world))


# --- the supervisor


class Supervisor:
    """Keeps workers running that train in `folder`."""

    def __init__(self, folder: Path, steps: int, round_steps: int) -> None:
        self.folder, self.steps, self.round_steps = folder, steps, round_steps
        self.workers: list[subprocess.Popen[str]] = []

    def start(self, world: int) -> None:
        address = os.environ["MASTER_ADDR"] if rig.joined() else "127.0.0.1"
        with socket.socket() as probe:
            probe.bind((address, 0))
            coordinator = f"{address}:{probe.getsockname()[1]}"
        for asked in self.folder.glob("join.*"):
            asked.unlink()
        command = [sys.executable, __file__, "--steps", str(self.steps)]
        command += ["--round", str(self.round_steps)]
        command += ["--folder", str(self.folder), "--coordinator", coordinator]
        with open(self.folder / "workers.log", "a") as output:
            self.workers = [
                subprocess.Popen(
                    [
                        *(rig.on_host(rank) if rig.joined() else ()),
                        *command,
                        *("--world", str(world), "--rank", str(rank)),
                    ],
                    stdout=output,
                    stderr=output,
                    text=True,
                )
                for rank in range(world)
            ]

    def kill(self, rank: int) -> None:
        self.workers[rank].kill()

    def ask_to_join(self, step: int) -> None:
        """Asks the workers to exit with `JOINED` at their first checkpoint from `step` on."""
        (self.folder / f"join.{step}").touch()

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


def elsewhere(rate: str | None) -> int | None:
    """Starts this program on hosts that links of `rate` join; None in the one that supervises."""
    if rate and not rig.joined():
        return rig.run(WORLD, rate, [sys.executable, *sys.argv])
    # The supervisor is on the first host. It starts the workers of the others.
    return 0 if rig.joined() and os.environ["RANK"] != "0" else None


def supervise(given: argparse.Namespace) -> int:
    """Kills one worker in the first half of the training and lets one rejoin in the second."""
    steps = given.steps
    with tempfile.TemporaryDirectory() as name:
        supervisor = Supervisor(Path(name), steps, given.round)
        supervisor.start(WORLD)
        supervisor.wait_for_step(steps // 3 + 2)
        victim = random.Random(given.seed).randrange(WORLD)
        supervisor.kill(victim)
        assert supervisor.wait() == 1
        seen = len(supervisor.entries())
        supervisor.start(WORLD - 1)
        supervisor.ask_to_join(2 * steps // 3)
        code, joined = supervisor.wait(), len(supervisor.entries())
        if code == JOINED:
            supervisor.start(WORLD)
            code = supervisor.wait()
        entries = supervisor.entries()
        if code not in (0, DIVERGED) or joined == len(entries):
            print((supervisor.folder / "workers.log").read_text()[-4000:])
            print("FAILED: the workers did not finish")
            return 1
    draw(entries, given.png)
    first, last = entries[0]["loss"], float(np.mean([e["loss"] for e in entries[-steps // 10 :]]))
    print(f"loss {first:.3f} at first, {last:.3f} at last; drawn in {given.png}")
    if "sent" in entries[-1]:
        print(f"the first host sent {entries[-1]['sent'] / 1e6:.2f} MB")
    print(
        f"worker {victim} of {WORLD} killed after step {entries[seen - 1]['step']}; {WORLD - 1}"
        f" workers went on from step {entries[seen]['step']}"
    )
    print(f"{WORLD} workers went on from step {entries[joined]['step']}")
    print(f"ranks hold the same parameters at every checkpoint: {code != DIVERGED}")
    worlds = [e["world"] for e in entries]
    passed = code == 0 and last < 0.8 * first and {WORLD, WORLD - 1} == set(worlds)
    print("ok" if passed else "FAILED: expected a falling loss with 4, 3 and 4 workers", flush=True)
    return 0 if passed else 1


def draw(entries: list[dict[str, Any]], path: Path) -> None:
    """Draws the loss by time, and by bytes over links, in one color per number of workers."""
    from matplotlib.figure import Figure

    ends = [i for i in range(1, len(entries)) if entries[i]["world"] != entries[i - 1]["world"]]
    gaps = [entries[i]["time"] - entries[i - 1]["time"] for i in ends]
    labels = ["seconds, without restarts", "MB that the first host has sent"]
    figure = Figure(figsize=(10, 4), layout="constrained")
    panels = figure.subplots(1, 1 + ("sent" in entries[0]), sharey=True, squeeze=False)[0]
    start = entries[0]["time"]
    for begin, end, gap in zip([0, *ends], [*ends, len(entries)], [0, *gaps], strict=True):
        part = entries[begin:end]
        world = part[0]["world"]
        start += gap
        label = f"{world} workers, from step {part[0]['step']}"
        look = {
            "color": "tab:blue" if world == WORLD else "tab:orange",
            "label": label + (f", after {gap:.0f} s" if gap else ""),
        }
        losses = [e["loss"] for e in part]
        xs = [[e["time"] - start for e in part], [e.get("sent", 0) / 1e6 for e in part]]
        for axes, x in zip(panels, xs, strict=False):
            axes.plot(x, losses, **look)
    for axes, label in zip(panels, labels, strict=False):
        axes.set(xlabel=label)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set(ylabel="loss of a worker [nats per byte]")
    panels[0].legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=90)
    parser.add_argument(
        "--round", type=int, default=0, help="DiLoCo in rounds of this many steps; 0: no DiLoCo"
    )
    parser.add_argument("--rate", help='of the links between the workers, such as "10mbit"')
    parser.add_argument("--seed", type=int, default=0, help="chooses which worker is killed")
    parser.add_argument("--png", type=Path, default=Path("demo/elastic.png"))
    for name in ("--rank", "--world"):
        parser.add_argument(name, type=int, help=argparse.SUPPRESS)
    parser.add_argument("--coordinator", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank is None:
        code = elsewhere(given.rate)
        return supervise(given) if code is None else code
    try:
        return work(given)
    except BaseException:
        # On exit JAX waits for all workers, and they wait for this one.
        traceback.print_exc()
        os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
