"""Times training steps whose gradients are reduced in the backward pass, and after it.

    python benchmarks/overlap.py --json benchmarks/results/overlap.jsonl
    MASTER_ADDR=127.0.0.1 MASTER_PORT=29517 WORLD_SIZE=2 \\
        mpiexec -n 2 python benchmarks/overlap.py --world 2 --task language --links loopback

Steps of two tasks of the suite, on shaped links, by these ways:

    lax.pmean   exact means of the tree, after the backward pass
    after       `sync_gradients` at 4 bits, after the backward pass
    64 KiB ...  `reduce_in_backward` at 4 bits, by the size of its fusion buffers
    tuned       the same with a `Tuner`, after its trials on this link
    compute     the step without a reduction

A size with the same buffers as the size before it is left out. All ways take turns; a time is the
slowest rank's. `over_after` is the time of "after" divided by the way's time in the same repeat:
the median (and quartiles) over the repeats. `hidden` is the part of the time between "compute" and
"after" that the way saves. Ranks are started and reduce as in suite/speed.py. The link "loopback"
is for ranks that mpiexec started on this machine, as above.
"""

import argparse
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax

sys.path.append(str(Path(__file__).resolve().parent / "suite"))
sys.path.append(str(Path(__file__).resolve().parent / "accuracy"))

from configurations import Configuration
from models import MODELS
from run import Trainer
from speed import Computing, Step, Timed, cells, of_exchange, parser_of
from tasks import Task

import cgx_jax
import measure
from all_reduce import Ranks, run
from cgx_jax import Plan, Tuner
from cgx_jax.compressors import Compressor
from cgx_jax.kernels.wire import HOOK_FUSION_BYTES
from cgx_jax.transforms.precondition import WARMUP

CODE = cgx_jax.Quantize(4)
PMEAN, AFTER, TUNED, COMPUTE = "lax.pmean", "after", "tuned", "compute"
SIZES = {"64 KiB": 1 << 16, "256 KiB": 1 << 18, "1 MiB": 1 << 20, "4 MiB": 1 << 22}


class InBackward(Computing):
    """The step whose loss wraps its parameters in `reduce_in_backward`."""

    def __init__(
        self, task: Task, code: Compressor, exchange: str | Tuner, fusion_bytes: int
    ) -> None:
        self.code, self.exchange, self.fusion_bytes = code, exchange, fusion_bytes
        super().__init__(task, Configuration(), task.steps)

    def _jit(self) -> Callable[..., Any]:
        return self.exchange.jit if isinstance(self.exchange, Tuner) else jax.jit

    def _loss(self, params: Any, batch: Any) -> jax.Array:
        plan = Plan.build(params, self.code, fusion_bytes=self.fusion_bytes)
        reduced = cgx_jax.reduce_in_backward(params, "data", plan, exchange=self.exchange)
        return super()._loss(reduced, batch) / self.mesh.size


class Tuning(Step):
    """A step that a tuner compiles, as often as the tuner needs."""

    def _compiled(self, trainer: Trainer) -> Callable[..., Any]:
        return trainer.step


def trainers(
    task: Task, code: Compressor, exchange: str, sizes: dict[str, int]
) -> dict[str, Trainer]:
    """Returns a trainer for each way except the tuner's, by name."""
    exact, coded = Configuration(), Configuration(lambda _: code)
    made: dict[str, Trainer] = {
        PMEAN: of_exchange(Timed, "xla", task, exact),
        AFTER: of_exchange(Timed, exchange, task, coded),
    }
    _, params = task.initial(0)
    before: Plan | None = None
    for name, size in sizes.items():
        plan = Plan.build(params, code, fusion_bytes=size)
        if plan != before:
            made[name] = InBackward(task, code, exchange, size)
        before = plan
    return made | {COMPUTE: of_exchange(Computing, "xla", task, exact)}


def compare(ranks: Ranks, arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Times a task's step by every way on every link; yields one row per way and link."""
    (task,), exchange = arguments.task, measure.fastest()
    sizes = {name: SIZES[name] for name in arguments.sizes}
    model = MODELS[task]
    batch = tuple(x[0] for x in model.batches(1, 0))
    steps: dict[str, Callable[[], Any]] = {}
    for name, trainer in trainers(model, CODE, exchange, sizes).items():
        steps[name] = Step(trainer, batch)
        if ranks.first:
            print(f"  compiled {name}", flush=True)
    ranks.in_turns(steps, WARMUP // 3 + 1)
    for link in arguments.links:
        if link != "loopback":
            ranks.relink(link)
        tuner = Tuner(reductions=(), cache=False)
        tuned = Tuning(InBackward(model, CODE, tuner, HOOK_FUSION_BYTES), batch)
        while tuner.state in ("waiting", "trying"):
            tuned()
        every = steps | {TUNED: tuned}
        ranks.in_turns(every, 1)
        seconds = ranks.in_turns(every, arguments.reps)
        if ranks.first:
            print(f"{task}: {ranks.world} ranks, {link}, exchange {exchange!r}", flush=True)
            print(HEAD)
        after, compute = seconds[AFTER], seconds[COMPUTE]
        for name, own in seconds.items():
            row = {
                "task": task,
                "world": ranks.world,
                "links": link,
                "exchange": exchange,
                "reps": arguments.reps,
                "batch": len(batch[0]),
                "way": name,
                "seconds": measure.quartiles(own),
                "over_pmean": measure.quartiles(seconds[PMEAN] / own),
                "over_after": measure.quartiles(after / own),
                "hidden": measure.quartiles((after - own) / (after - compute)),
            }
            yield row | ({"setting": str(tuner.current)} if name == TUNED else {})


HEAD = f"  {'way':<10} {'step ms':>8}  {'over pmean':>10}  {'over after (quartiles)':<22} hidden"


def line(row: dict[str, Any]) -> str:
    return (
        f"  {row['way']:<10} {row['seconds'][1] * 1e3:>8.1f}  {row['over_pmean'][1]:>10.2f}  "
        f"{measure.spread(row['over_after']):<22} {row['hidden'][1]:>6.2f}"
        f"  {row.get('setting', '')}"
    )


def main() -> int:
    sizes: dict[str, Any] = {"nargs": "+", "choices": SIZES, "default": list(SIZES)}
    parser = parser_of(__doc__, ["language", "words"], "--sizes", **sizes, help="(default: all)")
    arguments = parser.parse_args()
    return run(arguments, cells(arguments), compare, line, mpi=measure.has_mpi())


if __name__ == "__main__":
    sys.exit(main())
