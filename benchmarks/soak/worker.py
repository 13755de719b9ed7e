"""One rank of benchmarks/soak/run.py: reduces until its time is up, and records the results.

    python benchmarks/soak/worker.py FOLDER RANK

FOLDER/job.json says what to do. RANK is a number, or "mpi" under mpiexec. Every reduction is a
record in FOLDER/records.RANK. What ranks hold, and in which order they reduce, follows from the
seed, so every rank knows the exact sums.
"""

import faulthandler
import functools
import json
import os
import signal
import sys
import threading
import time
import traceback
import zlib
from pathlib import Path
from typing import Any

import jax
import numpy as np
from drawing import Draw, draw, exact
from feedback import Feedback
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import cgx_jax
from cgx_jax.exchanges import Mpi, Xla
from report import RECORD, command

ASK_EVERY = 32  # steps after which the ranks agree whether to end; 4 if each step compiles
FEEDBACK_EVERY = 8
# JAX ends processes that it has not heard from for this many seconds. A machine that was paused for
# minutes is not a defect, and the supervisor finds hangs.
HEARTBEAT = 1800
NEW_SHAPES = ("churn", "psum")  # phases that compile in each step


class Worker:
    def __init__(self, folder: Path, rank: int, job: dict[str, Any]) -> None:
        self.folder, self.rank, self.job = folder, rank, job
        self.world, self.numbers = job["world"], (job["seed"], job["number"])
        self.mesh = jax.make_mesh((self.world,), ("data",))
        self.sharding = NamedSharding(self.mesh, P("data"))
        self.exchange = Mpi() if job["exchange"] == "mpi" else Xla()
        rng = np.random.default_rng(self.numbers)
        self.pool = [draw(rng, self.exchange.can) for _ in range(job["pool"])]
        self.records = os.open(folder / f"records.{rank}", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        self.feedback = Feedback(self.mesh, job["exchange"])
        if job["state"] is not None:
            self.feedback.restore(folder / "began.npz")

    def place(self, own: np.ndarray) -> jax.Array:
        return jax.make_array_from_process_local_data(self.sharding, own[None])

    def program(self, what: Draw) -> Any:
        """Returns f(leaves of all ranks, seed), compiled when it is first called."""
        plan, call = what.plan(), cgx_jax.psum_compressed
        if what.mean:
            call = cgx_jax.pmean_compressed
        options: dict[str, Any] = {"exchange": self.exchange, "reduction": what.reduction}

        def of_rank(leaves, seed):
            own = [x[0] for x in leaves]
            return call(own, "data", plan, key=jax.random.key(seed), **options)

        mapped = jax.shard_map(
            of_rank, mesh=self.mesh, in_specs=(P("data"), P()), out_specs=P(), check_vma=True
        )
        return jax.jit(mapped)

    @functools.cached_property
    def programs(self) -> list[Any]:
        return [(self.program(what), jax.jit(what.bounds)) for what in self.pool]

    def reduce(self, step: int, number: int, what: Draw, program: Any, bounds: Any) -> None:
        """Reduces once, checks on rank 0 and records."""
        numbers = (*self.numbers, step)
        own = what.values(self.rank, *numbers)
        sums = program([self.place(x) for x in own], np.uint32(step))
        got = [np.asarray(y.addressable_data(0)) for y in sums]
        share = -1.0
        if self.rank == 0:
            others = [what.values(r, *numbers) for r in range(1, self.world)]
            every = [np.stack(rows) for rows in zip(own, *others, strict=True)]
            share = what.share_of_bound(got, every, [np.asarray(b) for b in bounds(every)])
            if share > 1:
                self.report(step, f"{what}: an error of {share:.3g} times the bound")
        self.record(number, got, share)

    def record(self, number: int, got: list[np.ndarray], share: float) -> None:
        crc = zlib.crc32(b"".join(y.tobytes() for y in got))
        row = np.array([(number, crc, share, time.time())], RECORD)
        os.write(self.records, row.tobytes())

    def report(self, step: int, text: str) -> None:
        print(f"DEFECT in step {step}: {text}\n  {command(self.job, step)}", flush=True)

    def step(self, step: int) -> None:
        rng = np.random.default_rng([*self.numbers, step])
        if self.job["phase"] in NEW_SHAPES:
            churns = self.job["phase"] == "churn"
            what = draw(rng, self.exchange.can, new_shape=True) if churns else exact(rng)
            self.reduce(step, 0, what, self.program(what), jax.jit(what.bounds))
        elif step % FEEDBACK_EVERY < FEEDBACK_EVERY - 1:
            number = int(rng.integers(len(self.pool)))
            self.reduce(step, number, self.pool[number], *self.programs[number])
        else:
            number, got = self.feedback.step(self.numbers, step)
            self.record(len(self.pool) + number, got, -1)
            if self.feedback.due:
                if (lost := self.feedback.settle()) > 1:
                    self.report(step, f"feedback: {lost:.3g} times what rounding may lose is lost")
                    self.record(len(self.pool) + number, got, lost)
                if self.rank == 0 and self.job["repeat"] is None:
                    self.feedback.save(self.folder / "state.npz")

    def run(self) -> None:
        last, compiles = self.job["repeat"], self.job["phase"] in NEW_SHAPES
        if last is not None:
            fed = last % FEEDBACK_EVERY == FEEDBACK_EVERY - 1
            for step in range(last + 1) if fed and not compiles else [last]:
                self.step(step)
            return
        end = time.monotonic() + self.job["seconds"]
        vote = jax.jit(
            jax.shard_map(
                lambda x: lax.psum(x[0], "data"), mesh=self.mesh, in_specs=P("data"), out_specs=P()
            )
        )
        step = 0
        while True:
            for _ in range(4 if compiles else ASK_EVERY):
                self.step(step)
                step += 1
            over = np.float32(time.monotonic() > end)
            if np.asarray(vote(self.place(over)).addressable_data(0)) > 0:
                return


def guard() -> None:
    """Ends this process when its parent is gone, so that none is left behind."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
    faulthandler.register(signal.SIGUSR1, all_threads=True)


def main() -> None:
    guard()
    folder, rank = Path(sys.argv[1]), sys.argv[2]
    job = json.loads((folder / "job.json").read_text())
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 1)
    if rank == "mpi":
        jax.distributed.initialize(
            cluster_detection_method="mpi4py", heartbeat_timeout_seconds=HEARTBEAT
        )
    else:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(
            job["coordinator"], job["world"], int(rank), heartbeat_timeout_seconds=HEARTBEAT
        )
    own = jax.process_index()
    (folder / f"pid.{own}").write_text(str(os.getpid()))
    Worker(folder, own, job).run()


if __name__ == "__main__":
    try:
        main()
    except BaseException:
        # At its end JAX waits for all processes, and they wait for this one.
        traceback.print_exc()
        os._exit(1)
