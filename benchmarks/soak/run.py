"""Reduces for hours on several processes, kills some, and looks for losses, errors and growth.

    python benchmarks/soak/run.py --hours 1 --json benchmarks/results/soak.jsonl

Jobs of 2 to 4 processes follow one another, over gloo and over MPI. Each draws a pool of calls:
shapes, dtypes, compressors, plans and reductions. Every result is compared between the ranks by its
checksum, and with the exact sum by the stated bound; error feedback has an account that must
balance. Memory, descriptors and threads of every process are sampled. The phases:

    steady   one pool, for as long as the phase lasts
    churn    each step has a program of a new shape, which is then dropped
    psum     the same with lax.psum only: what JAX itself keeps
    kills    a rank is killed at a random moment; the next job goes on with fewer, others join later

A hang is a job without a reduction for --patience seconds, or one that has not ended that long
after a kill or after its time. Everything is drawn from --seed. A defect prints the command that
repeats its step. FOLDER has the log, the processes' output, and the records of jobs that failed.
The numbers are written after every job.
"""

import argparse
import contextlib
import itertools
import json
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[1]))

import measure
import report
from report import RECORD

HERE = Path(__file__).resolve().parent
SAMPLE = np.dtype([("time", "f8"), ("rss_mb", "f8"), ("descriptors", "i4"), ("threads", "i4")])
# Phase, exchange and share of the time; the kills take both exchanges.
PHASES = [
    ("steady", "xla", 0.25),
    ("steady", "mpi", 0.25),
    ("churn", "xla", 0.08),
    ("churn", "mpi", 0.08),
    ("psum", "xla", 0.06),
    ("kills", None, 0.28),
]
STEADY_WORLD = 3
WORLDS = (3, 2, 4)  # of the kills: one is killed, the other two go on, two more join
KILL_WITHIN = 60  # seconds after a job's first reduction


def main() -> int:
    parser = measure.parser(__doc__)
    known = list(dict.fromkeys(phase for phase, _, _ in PHASES))
    parser.add_argument("--hours", type=float, default=1.0, help="(default %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--phases", nargs="+", choices=known, default=known)
    parser.add_argument("--pool", type=int, default=12, help="calls of a job (default %(default)s)")
    parser.add_argument("--patience", type=float, default=240, help="seconds (default %(default)s)")
    parser.add_argument("--folder", type=Path, default=Path("build/soak"))
    parser.add_argument("--repeat", metavar="JOB:PHASE:EXCHANGE:WORLD:STEP", help="one step again")
    parser.add_argument("--state", help="what the repeated job began with")
    arguments = parser.parse_args()
    if not Path("/proc/self/statm").exists():
        parser.error("memory is read from /proc, which this system lacks; run it on Linux.")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that no process is left behind
    arguments.folder.mkdir(parents=True, exist_ok=True)
    if arguments.repeat:
        return repeat(arguments)
    return Soak(arguments).run()


class Soak:
    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments, self.rows = arguments, []
        self.begin = time.monotonic()
        self.log = open(arguments.folder / "log.txt", "w")  # noqa: SIM115
        self.state: str | None = None

    def say(self, text: str) -> None:
        print(text, flush=True)
        print(text, file=self.log, flush=True)

    def run(self) -> int:
        for spec in self.jobs():
            with Job(self.arguments.folder, spec, self.begin) as job:
                row = job.watch(self.arguments.patience)
            self.rows.append(row)
            self.say(report.line(row))
            for text in job.defects():
                self.say(text)
            if row["outcome"] in ("hang", "failed") or row["mismatches"] or row["over_bound"]:
                shutil.copytree(job.folder, job.kept, dirs_exist_ok=True)
                self.say(f"records and output are kept in {job.kept}")
            saved = job.folder / "state.npz"
            if row["phase"] == "kills" and saved.exists():
                self.state = str(saved.replace(self.arguments.folder / "state.npz"))
            self.write()
        total = report.summary(self.rows)
        self.say(json.dumps(total))
        good = not any(total[k] for k in ("mismatches", "over_bound", "hangs", "failures"))
        self.say("ok" if good and total["reductions"] else "FAILED")
        return 0 if good and total["reductions"] else 1

    def write(self) -> None:
        measure.write_json(self.arguments.json, [report.summary(self.rows), *self.rows])

    def jobs(self) -> Iterator[dict[str, Any]]:
        """Yields jobs phase by phase; the time of left-out phases goes to the others."""
        taken = [p for p in PHASES if p[0] in self.arguments.phases]
        whole, end, number = sum(share for _, _, share in taken), 0.0, 0
        for phase, exchange, share in taken:
            end += 3600 * self.arguments.hours * share / whole
            for turn in range(1) if exchange else itertools.count():
                # Even if time is short, one rank is killed and the others go on.
                least = 5 if exchange is None and turn < 2 else 0
                left = max(least, end - (time.monotonic() - self.begin))
                if left <= 0:
                    break
                yield specification(
                    self.arguments, number, phase, **self.drawn(number, exchange, turn, left)
                )
                number += 1

    def drawn(self, number: int, exchange: str | None, turn: int, left: float) -> dict[str, Any]:
        """Returns how long a job runs, on how many ranks, and which rank is killed when."""
        if exchange is not None:
            return {"exchange": exchange, "world": STEADY_WORLD, "seconds": left}
        rng = np.random.default_rng([self.arguments.seed, number, 1])
        drawn = {"exchange": str(rng.choice(["xla", "mpi"])), "state": self.state}
        world, moment = WORLDS[turn % len(WORLDS)], rng.uniform(0, min(KILL_WITHIN, 0.8 * left))
        if world == min(WORLDS):  # it ends by itself, and others join
            return drawn | {"world": world, "seconds": moment}
        kill = {"victim": int(rng.integers(world)), "kill_after": moment}
        return drawn | {"world": world, "seconds": math.inf} | kill


def specification(
    arguments: argparse.Namespace, number: int, phase: str, **drawn: Any
) -> dict[str, Any]:
    """Returns what the workers of a job are told; `drawn` are its own fields."""
    usual = {"seconds": 0, "state": None, "victim": None, "kill_after": 0, "repeat": None}
    job = {"seed": arguments.seed, "pool": arguments.pool, "number": number, "phase": phase}
    return usual | job | {"kept": str(arguments.folder / f"job{number}")} | drawn


class Job:
    """Processes that reduce together, until they end or are ended."""

    def __init__(self, folder: Path, spec: dict[str, Any], begin: float) -> None:
        self.folder, self.kept = folder / "job", Path(spec["kept"])
        self.spec, self.begin = spec, begin
        self.samples: list[list[tuple[float, ...]]] = [[] for _ in range(spec["world"])]
        self.start = time.monotonic()

    def __enter__(self) -> "Job":
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        world = self.spec["world"]
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            coordinator = f"127.0.0.1:{probe.getsockname()[1]}"
        (self.folder / "job.json").write_text(json.dumps(self.spec | {"coordinator": coordinator}))
        if self.spec["state"] is not None:
            shutil.copy(self.spec["state"], self.folder / "began.npz")
        worker = [sys.executable, "-W", "ignore", str(HERE / "worker.py"), str(self.folder)]
        if self.spec["exchange"] == "mpi":
            if (mpiexec := measure.mpiexec()) is None:
                raise FileNotFoundError(
                    "no mpiexec: pip install mpich mpi4py, or leave out the mpi phases"
                )
            commands = [[mpiexec, "-n", str(world), *worker, "mpi"]]
        else:
            commands = [[*worker, str(rank)] for rank in range(world)]
        environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
        environment |= {"FI_PROVIDER": "tcp"}
        with open(self.folder / "output.txt", "w") as output:
            self.processes = [
                subprocess.Popen(
                    command, env=environment, stdout=output, stderr=output, start_new_session=True
                )
                for command in commands
            ]
        return self

    def __exit__(self, *_: object) -> None:
        for pid in self.pids():
            _signal(os.kill, pid, signal.SIGKILL)
        for process in self.processes:
            _signal(os.killpg, process.pid, signal.SIGKILL)
            process.wait()

    def pids(self) -> dict[int, int]:
        """Returns the process ID of each rank that has started and not ended."""
        found = {int(f.suffix[1:]): f.read_text() for f in self.folder.glob("pid.*")}
        return {
            rank: int(text)
            for rank, text in found.items()
            if text and Path(f"/proc/{text}/statm").exists()
        }

    def records(self) -> list[np.ndarray]:
        files = [self.folder / f"records.{rank}" for rank in range(self.spec["world"])]
        out = []
        for file in files:
            data = file.read_bytes() if file.exists() else b""
            out.append(
                np.frombuffer(data[: len(data) // RECORD.itemsize * RECORD.itemsize], RECORD)
            )
        return out

    def defects(self) -> list[str]:
        """Returns the first few defects, each with the command that repeats it."""
        lines = (self.folder / "output.txt").read_text(errors="replace").splitlines()
        found = [i for i, text in enumerate(lines) if text.startswith("DEFECT")]
        texts = [text for i in found[:5] for text in lines[i : i + 2]]
        if (step := report.compared(self.records())["first_mismatch"]) is not None:
            texts.append(
                f"DEFECT in step {step}: ranks differ\n  {report.command(self.spec, step)}"
            )
        return texts

    def watch(self, patience: float) -> dict[str, Any]:
        """Samples until all processes have ended; kills the victim when it is time to."""
        spec, size, begun, outcome, killed = self.spec, -1, None, None, None
        still = 0.0  # seconds without a record, or after the kill, or after the job's time
        before = time.monotonic()
        while outcome is None:
            time.sleep(0.1)
            now, pids = time.monotonic(), self.pids()
            # Whatever pauses this process pauses the workers too, and that is no hang.
            still, before = still + min(now - before, 1), now
            self.sample(pids, now)
            written = sum(f.stat().st_size for f in self.folder.glob("records.*"))
            late = killed is not None or now > self.start + spec["seconds"]
            if written != size and not late:
                still = 0
            size = written
            victim = spec["victim"]
            if begun is None and written:
                begun = now
            due = begun is not None and now > begun + spec["kill_after"]
            if victim in pids and killed is None and due:
                os.kill(pids[victim], signal.SIGKILL)
                killed, still = now, 0
            codes = [process.poll() for process in self.processes]
            if None not in codes:
                well = killed is not None or not any(codes)
                outcome = "killed" if killed else "ended" if well else "failed"
            elif still > patience:
                outcome = "hang"
                self.dump(pids)
        ended = time.monotonic()
        rows = [np.array(s, SAMPLE) for s in self.samples]
        return {
            **{k: spec[k] for k in ("number", "phase", "exchange", "world", "victim")},
            "begin": self.start - self.begin,
            "seconds": ended - self.start,
            "outcome": outcome,
            "others_ended_after": None if killed is None else ended - killed,
            **report.compared(self.records()),
            "ranks": [report.of_process(samples) for samples in rows],
        }

    def sample(self, pids: dict[int, int], now: float) -> None:
        """Samples each process, at most once per second."""
        for rank, pid in pids.items():
            own = self.samples[rank]
            if own and now - self.start < own[-1][0] + 1:
                continue
            try:
                status = Path(f"/proc/{pid}/status").read_text()
                descriptors = len(os.listdir(f"/proc/{pid}/fd"))
            except OSError:  # it has just ended
                continue
            fields = dict(text.split(":", 1) for text in status.splitlines() if ":" in text)
            if "VmRSS" in fields:
                rss = int(fields["VmRSS"].split()[0]) / 1024
                own.append((now - self.start, rss, descriptors, int(fields["Threads"])))

    def dump(self, pids: dict[int, int]) -> None:
        """Asks every process to write where its threads are."""
        for pid in pids.values():
            _signal(os.kill, pid, signal.SIGUSR1)
        time.sleep(2)


def _signal(send: Any, pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        send(pid, number)


def repeat(arguments: argparse.Namespace) -> int:
    """Repeats one step of one job; prints what its ranks found."""
    number, phase, exchange, world, step = arguments.repeat.split(":")
    spec = specification(
        arguments,
        int(number),
        phase,
        exchange=exchange,
        world=int(world),
        state=arguments.state,
        seconds=math.inf,
        repeat=int(step),
    )
    with Job(arguments.folder, spec, time.monotonic()) as job:
        row = job.watch(arguments.patience)
    print(report.line(row), *job.defects(), sep="\n")
    wrong = row["mismatches"] or row["over_bound"] or row["outcome"] != "ended"
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
