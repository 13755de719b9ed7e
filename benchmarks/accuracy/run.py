"""Trains small tasks under several configurations and seeds, on 4 simulated ranks.

    python benchmarks/accuracy/run.py --task language --seeds 0-4
    python benchmarks/accuracy/run.py --seeds 0-4    # all tasks

All configurations of a seed start from the same parameters and see the same batches. Results are
written after every run. Runs whose results are already in the file are skipped, unless --again is
given, so a long run can be stopped and continued. Needs the packages of the extra `accuracy`.
"""

import argparse
import math
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

sys.path.append(str(Path(__file__).resolve().parents[1]))

from configurations import CONFIGURATIONS, Configuration
from tasks import TASKS, Task

import cgx_jax
import measure
from cgx_jax import Adaptive, Plan
from cgx_jax.leaves import Leaf
from cgx_jax.policies import statistics
from cgx_jax.policies.decide import Subject
from cgx_jax.policies.statistics import Statistics

WORLD = 4
RESULTS = Path(__file__).resolve().parents[1] / "results" / "accuracy"
LOOKS = 20  # how often a run reads an adaptive plan's error


class Trainer:
    """A task under one configuration: compiled once, run for many seeds."""

    exchange = "xla"  # compresses every size
    check_vma = True

    def __init__(self, task: Task, configuration: Configuration, steps: int) -> None:
        self.task, self.steps, self.every = task, steps, configuration.every
        self.mesh = Mesh(np.array(jax.devices()), ("data",))
        self.graphdef, params = task.initial(0)
        self.policy = configuration.policy and configuration.policy(steps)
        make = task.plain if configuration.takes_momentum else task.optimizer
        make = configuration.optimizer or make
        if make is None:
            raise ValueError("this task's optimizer has no momentum to take over")
        optimizer = optax.chain(make(steps), optax.scale(configuration.rate))
        if self.every is None:
            self.tx = optax.chain(self._reduction(configuration), optimizer)
        else:
            self.tx = self._alone(configuration, self.every, optimizer)
        state = jax.eval_shape(self.tx.init, params)
        specs = cgx_jax.state_specs(state, "data")
        sharded = jax.shard_map(
            self._step,
            mesh=self.mesh,
            in_specs=(P(), specs, P("data")),
            out_specs=(P(), specs, P()),
            check_vma=self.check_vma,
        )
        self.step = self._jit()(sharded, donate_argnums=(0, 1))
        self.fresh = self.policy.state_dict() if isinstance(self.policy, Adaptive) else None
        self.metrics = jax.jit(lambda p, *b: task.metrics(nnx.merge(self.graphdef, p), *b))

    def _jit(self) -> Callable[..., Any]:
        return self.policy.jit if isinstance(self.policy, Adaptive) else jax.jit

    def _reduction(self, configuration: Configuration) -> optax.GradientTransformation:
        if self.policy is None:
            return optax.stateless(lambda grads, _: jax.lax.pmean(grads, "data"))
        return cgx_jax.sync_gradients("data", self.policy, **self._options(configuration))

    def _alone(
        self, configuration: Configuration, every: int, inner: optax.GradientTransformation
    ) -> optax.GradientTransformation:
        """DiLoCo, in which ranks train alone for `every` steps."""
        policy = cgx_jax.Identity() if self.policy is None else self.policy
        options = self._options(configuration)
        return cgx_jax.transforms.diloco(
            inner, "data", policy, every=every, outer=configuration.outer, **options
        )

    def _options(self, configuration: Configuration) -> dict[str, Any]:
        return {
            "memory": configuration.memory,
            "precondition": configuration.precondition,
            "mesh": self.mesh,
            "exchange": self.exchange,
        }

    def _step(self, params: Any, state: Any, batch: Any) -> tuple[Any, Any, jax.Array]:
        if self.every is None:
            own = jax.tree.map(lambda p: jax.lax.pcast(p, "data", to="varying"), params)
        else:
            own = cgx_jax.transforms.local_params(params, state)
        loss, grads = jax.value_and_grad(self._loss)(own, batch)
        updates, state = self.tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, self._mean_loss(loss)

    def _loss(self, params: Any, batch: Any) -> jax.Array:
        return self.task.loss(nnx.merge(self.graphdef, params), *batch)

    def _mean_loss(self, loss: jax.Array) -> jax.Array:
        return jax.lax.pmean(loss, "data")

    def run(self, seed: int) -> dict[str, Any]:
        """Trains once; returns the row of results."""
        if isinstance(self.policy, Adaptive):
            self.policy.load_state_dict(self.fresh)
        _, params = self.task.initial(seed)
        params = jax.device_put(params, NamedSharding(self.mesh, P()))
        state = self.tx.init(params)
        batches = self.task.batches(self.steps, seed)
        split = NamedSharding(self.mesh, P("data"))
        losses, bits, looks = [], [], []
        for i in range(self.steps):
            batch = jax.device_put(tuple(x[i] for x in batches), split)
            params, state, loss = self.step(params, state, batch)
            losses.append(float(loss))
            bits.append(self._bits_per_value(params))
            if isinstance(self.policy, Adaptive) and (i + 1) % max(1, self.steps // LOOKS) == 0:
                looks.append(self._look(params, state))
        row: dict[str, Any] = {
            "seed": seed,
            "steps": self.steps,
            **self._evaluate(params),
            "training_loss": float(np.mean(losses[-max(1, self.steps // 10) :])),
            "bits_per_value": float(np.mean(bits)),
            "bytes_per_step": self._bytes_per_step(params),
            "kernels": cgx_jax.kernels.backends()["cpu"],  # a file may have rows of two machines
        }
        if looks:
            # Only after the first plan was chosen, which happens shortly after the warm-up.
            after = [x for x, step in looks if step > self.steps // 10 + 4]
            row["bytes_to_4_bits"], row["error_to_4_bits"] = np.mean(after, axis=0).tolist()
            row["widths"] = [
                [r.step, r.outcome, "".join(map(str, r.bits))] for r in self.policy.history
            ]
        return row

    def _evaluate(self, params: Any) -> dict[str, float]:
        params = jax.device_get(params)
        found = [
            jax.device_get(self.metrics(params, *b))
            for b in zip(*self.task.held_out(), strict=True)
        ]
        return {f"held_out_{k}": float(np.mean([x[k] for x in found])) for k in found[0]}

    def _bits_per_value(self, params: Any) -> float:
        """Payload bits per value, including metadata, over the leaves that are compressed."""
        if self.policy is None:
            return 32.0
        if isinstance(self.policy, Adaptive):
            return float(self.policy.metrics()["cgx/bits_per_value"])
        lossy = self._lossy(params)
        sent = sum(c.wire_bits(leaf.shape, leaf.dtype) for leaf, c in lossy)
        return sent / sum(leaf.size for leaf, _ in lossy)

    def _bytes_per_step(self, params: Any) -> int:
        """Bytes that a rank sends per step, on average, under the plan at the end of the run."""
        policy = cgx_jax.Identity() if self.policy is None else self.policy
        return round(Plan.build(params, policy).wire_bytes(WORLD) / (self.every or 1))

    def _lossy(self, params: Any) -> list[tuple[Leaf, Any]]:
        """The leaves that are compressed, each with its compressor."""
        plan = Plan.build(params, self.policy)
        pairs = zip(plan.leaves, plan.compressors, strict=True)
        return [(leaf, c) for leaf, c in pairs if not c.lossless]

    def _look(self, params: Any, state: Any) -> tuple[list[float], int]:
        """Returns the plan's bytes and squared error over those of 4 bits, and the calls so far.

        The error comes from the statistics in the training state. "4 bits" is the policy's own
        4-bit candidate for all leaves, so it is rotated if that candidate is.
        """
        leaves, taken = zip(*self._lossy(params), strict=True)
        candidates = self.policy.sampler.candidates
        four = next(c for c in candidates if c.width == 4)
        subject = Subject(leaves, candidates)
        nodes = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, Statistics))
        measured = next(x for x in nodes if isinstance(x, Statistics))
        averages = statistics.mean(jax.device_get(measured))
        mine = subject.cost(taken, averages)
        uniform = subject.cost((four,) * len(leaves), averages)
        ratios = [a / b if b else math.nan for a, b in zip(mine, uniform, strict=True)]
        return ratios, self.policy.state_dict()["step"]


def key(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["configuration"], row["seed"], row["steps"]


def add(
    path: Path, task: str, row: dict[str, Any], order: list[str], steps: int | None = None
) -> None:
    """Adds a row to those of this task and machine, in place of an older one."""
    command = f"python {os.path.relpath(sys.argv[0])} --task {task}"
    about = {"command": command + (f" --steps {steps}" if steps else "")}
    about["machine"] = measure.machine()
    runs = measure.read(path) if path.exists() else []
    for run in runs:
        run["rows"] = [r for r in run["rows"] if key(r) != key(row)]
    if not any(about.items() <= run.items() for run in runs):
        runs.append({**about, "rows": []})
    (own,) = (run for run in runs if about.items() <= run.items())
    own["rows"] = sorted(
        [*own["rows"], row], key=lambda r: (r["seed"], order.index(r["configuration"]))
    )
    measure.write(path, [run for run in runs if run["rows"]])


def main(
    description: str | None = __doc__,
    tasks: Mapping[str, Task] = TASKS,
    configurations: Mapping[str, Configuration] = CONFIGURATIONS,
    results: Path = RESULTS,
) -> int:
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--task", nargs="+", choices=tasks, default=list(tasks))
    parser.add_argument("--seeds", default="0-4", help="a range such as 0-4, or one number")
    parser.add_argument("--configs", help="names separated by ';' (default: all that fit the task)")
    parser.add_argument("--steps", type=int, help="default: the task's own")
    parser.add_argument("--out", type=Path, default=results, help="folder of TASK.jsonl")
    parser.add_argument("--again", action="store_true", help="replace results that are there")
    arguments = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", WORLD)
    first, _, last = arguments.seeds.partition("-")
    trainers: dict[tuple[str, str], Trainer] = {}
    for seed in range(int(first), int(last or first) + 1):
        for task in arguments.task:
            out = arguments.out / f"{task}.jsonl"
            steps = arguments.steps or tasks[task].steps
            for name in arguments.configs.split(";") if arguments.configs else configurations:
                if tasks[task].plain is None and configurations[name].takes_momentum:
                    continue  # it does not fit the task's optimizer
                known = {key(r) for r in measure.rows(out)} if out.exists() else set()
                if (name, seed, steps) in known and not arguments.again:
                    continue
                start = time.perf_counter()
                if (task, name) not in trainers:
                    trainers[task, name] = Trainer(tasks[task], configurations[name], steps)
                row = {"configuration": name, **trainers[task, name].run(seed)}
                add(out, task, row, list(configurations), arguments.steps)
                said = f"{task}, seed {seed}, {name}: {row['held_out_loss']:.5f}"
                print(f"{said} ({time.perf_counter() - start:.1f} s)", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
