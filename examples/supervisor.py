"""Starts the workers of 09_elastic.py, kills one, and starts others in their place."""

import argparse
import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import report
from cgx_jax.commands import rig

PROGRAM = Path(__file__).with_name("09_elastic.py")
WORLD = 4
JOINED = 75  # exit code of workers that stop so that another one can join
DIVERGED = 76


def log(folder: Path, **entry: Any) -> None:
    if rig.joined():
        entry["sent"] = rig.sent_bytes()
    with open(folder / "losses.jsonl", "a") as file:
        file.write(json.dumps(entry | {"time": time.time()}) + "\n")


def join_is_asked(folder: Path, step: int) -> bool:
    """Whether a worker waits to join at a checkpoint of this step."""
    return any(int(path.suffix[1:]) <= step for path in folder.glob("join.*"))


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
        command = [sys.executable, PROGRAM, "--steps", str(self.steps)]
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
        self.end()
        return 1

    def end(self) -> None:
        for worker in self.workers:
            worker.kill()
            worker.wait()

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


def main(work: Callable[[argparse.Namespace], int], description: str) -> int:
    """Runs `work` in a worker that a supervisor has started, and a supervisor otherwise."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("--steps", type=int, default=90)
    parser.add_argument("--round", type=int, default=0, help="steps of a round of DiLoCo; 0: none")
    parser.add_argument("--rate", help='of the links between the workers, such as "10mbit"')
    parser.add_argument("--seed", type=int, default=0, help="chooses which worker is killed")
    parser.add_argument("--png", type=Path, default=Path("demo/elastic.png"))
    for name in ("--rank", "--world"):  # what a supervisor gives to its workers
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


def elsewhere(rate: str | None) -> int | None:
    """Starts this program on hosts that links of `rate` join; None in the one that supervises."""
    if rate and not rig.joined():
        return rig.run(WORLD, rate, [sys.executable, *sys.argv])
    # The supervisor is on the first host. It starts the workers of the others.
    return 0 if rig.joined() and os.environ["RANK"] != "0" else None


def supervise(given: argparse.Namespace) -> int:
    """Kills one worker in the first half of the training and lets one rejoin in the second."""
    steps = given.steps
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with contextlib.ExitStack() as stack:
        name = stack.enter_context(tempfile.TemporaryDirectory())
        supervisor = Supervisor(Path(name), steps, given.round)
        stack.callback(supervisor.end)
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
    report.draw_workers(entries, given.png)
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
