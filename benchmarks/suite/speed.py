"""Times a training step of the suite's tasks by every method, on shaped links.

    python benchmarks/suite/speed.py                    # every task, world and link: an hour
    python benchmarks/suite/speed.py --task recommender --world 2 --links 1gbit --reps 5

The ranks share the task's batch. All methods take turns; a time is the slowest rank's. `ratio` is
the fp32 step's time divided by the method's time in the same repeat: the median (and quartiles)
over the repeats. `compute` is the time of a step without a reduction.

"exact" is `lax.pmean` of the tree. On CPUs XLA makes a collective for each leaf of it. In "exact,
small leaves together" `sync_gradients` makes one for all leaves of up to 64 KiB. "bf16, lax.psum"
is a sum of 16-bit values as XLA makes it. Ranks are started by mpiexec and reduce over the "mpi"
exchange if it is available, otherwise over "xla".
"""

import argparse
import itertools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

sys.path.append(str(Path(__file__).resolve().parents[1]))
sys.path.append(str(Path(__file__).resolve().parents[1] / "accuracy"))

from configurations import Configuration
from methods import METHODS
from models import MODELS
from run import Trainer

import cgx_jax
import measure
from all_reduce import Ranks, run
from cgx_jax.compressors import SummedCompressor
from cgx_jax.transforms.precondition import WARMUP

TOGETHER = "exact, small leaves together"
BF16_PSUM = "bf16, lax.psum"
TIMED = [
    "exact",
    TOGETHER,
    BF16_PSUM,
    "8 bits",
    "4 bits, rotated, SecondMoment",
    "TopK 1 %, feedback",
    "BlockTopK 5 of 512, feedback",
    "PowerSGD 4, feedback",
    "ScaledSign, feedback",
    "QSGD, feedback",
]


class Timed(Trainer):
    """A training step that sends its gradients and nothing else."""

    check_vma = False  # steps without a reduction end with parameters that differ

    def _mean_loss(self, loss: jax.Array) -> jax.Array:
        return loss


class Computing(Timed):
    """The step without a reduction."""

    def _reduction(self, configuration: Configuration) -> optax.GradientTransformation:
        return optax.identity()


class HalfPsum(Timed):
    """The step with `lax.pmean` of gradients in bf16."""

    def _reduction(self, configuration: Configuration) -> optax.GradientTransformation:
        def update(grads: Any, _: Any) -> Any:
            means = jax.lax.pmean(jax.tree.map(lambda g: g.astype(jnp.bfloat16), grads), "data")
            return jax.tree.map(lambda m, g: m.astype(g.dtype), means, grads)

        return optax.stateless(update)


class Together(Timed):
    """The step with exact means by `sync_gradients`, in which small leaves travel together."""

    def _reduction(self, configuration: Configuration) -> optax.GradientTransformation:
        return cgx_jax.sync_gradients("data", cgx_jax.Identity(), mesh=self.mesh)


KINDS = {TOGETHER: Together, BF16_PSUM: HalfPsum}


class Step:
    """A compiled step of a trainer, which continues from its own state."""

    def __init__(self, trainer: Trainer, batch: Any) -> None:
        replicated = NamedSharding(trainer.mesh, P())
        _, params = trainer.task.initial(0)
        params = jax.device_put(params, replicated)
        init = trainer.tx.init
        split = cgx_jax.state_shardings(jax.eval_shape(init, params), "data", trainer.mesh)
        self.state = params, jax.jit(init, out_shardings=split)(params)
        self.batch = jax.device_put(batch, NamedSharding(trainer.mesh, P("data")))
        self.step = self._compiled(trainer)

    def _compiled(self, trainer: Trainer) -> Callable[..., Any]:
        return trainer.step.lower(*self.state, self.batch).compile()

    def __call__(self) -> None:
        *self.state, _ = jax.block_until_ready(self.step(*self.state, self.batch))


def compare(ranks: Ranks, arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Times a task's step by every method on every link; yields one row per method and link."""
    (task,), exchange = arguments.task, measure.fastest()
    model = MODELS[task]
    batch = tuple(x[0] for x in model.batches(1, 0))
    steps: dict[str, Callable[[], Any]] = {}
    sent = {}
    for name in dict.fromkeys(["exact", *arguments.methods.split(";")]):
        configuration = METHODS.get(name, METHODS["exact"])
        kind = KINDS.get(name, Timed)
        policy = configuration.policy and configuration.policy(model.steps)
        summed = policy is None or isinstance(policy, SummedCompressor)
        trainer = of_exchange(kind, "xla" if summed else exchange, model, configuration)
        steps[name] = Step(trainer, batch)
        plan = cgx_jax.Plan.build(model.initial(0)[1], policy or cgx_jax.Identity())
        sent[name] = plan.wire_bytes(ranks.world) // (2 if name == BF16_PSUM else 1)
        if ranks.first:
            print(f"  compiled {name}", flush=True)
    steps["compute"] = Step(Computing(model, METHODS["exact"], model.steps), batch)
    ranks.in_turns(steps, WARMUP // 3 + 1)
    for link in arguments.links:
        ranks.relink(link)
        ranks.in_turns(steps, 1)
        seconds = ranks.in_turns(steps, arguments.reps)
        if ranks.first:
            print(f"{task}: {ranks.world} ranks, {link}, exchange {exchange!r}", flush=True)
            print(HEAD)
        for name, nbytes in sent.items():
            yield {
                "task": task,
                "method": name,
                "sent_bytes": nbytes,
                "exchange": exchange,
                "reps": arguments.reps,
                "batch": len(batch[0]),
                "world": ranks.world,
                "links": link,
                "seconds": measure.quartiles(seconds[name]),
                "ratio": measure.quartiles(seconds["exact"] / seconds[name]),
                "compute": measure.quartiles(seconds["compute"]),
            }


HEAD = f"  {'method':<30} {'step ms':>8}  {'ratio (quartiles)':<18} {'samples/s':>9} compute ms"


def line(row: dict[str, Any]) -> str:
    return (
        f"  {row['method']:<30} {row['seconds'][1] * 1e3:>8.1f}  "
        f"{measure.spread(row['ratio']):<18} {row['batch'] / row['seconds'][1]:>9.0f} "
        f"{row['compute'][1] * 1e3:>10.1f}"
    )


def of_exchange(
    kind: type[Timed], exchange: str, model: Any, configuration: Configuration
) -> Timed:
    return type(kind.__name__, (kind,), {"exchange": exchange})(model, configuration, model.steps)


def parser_of(
    description: str | None, tasks: list[str], option: str, **how: Any
) -> argparse.ArgumentParser:
    """Returns a parser of the tasks, worlds and links of `cells`, and `option`."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--task", nargs="+", choices=MODELS, default=tasks)
    parser.add_argument("--world", nargs="+", type=int, default=[2, 4], help="(default 2 and 4)")
    rates = ["100mbit", "1gbit", "10gbit"]
    parser.add_argument("--links", nargs="+", default=rates, help="(default %(default)s)")
    parser.add_argument(option, **how)
    parser.add_argument("--reps", type=int, default=11, help="repeats (default %(default)s)")
    measure.add_json_option(parser)
    return parser


def main() -> int:
    methods = {"default": ";".join(TIMED), "help": "names separated by ';'"}
    arguments = parser_of(__doc__, list(MODELS), "--methods", **methods).parse_args()
    return run(arguments, cells(arguments), compare, line, mpi=measure.has_mpi())


def cells(arguments: argparse.Namespace) -> Iterator[Any]:
    """Yields every task and world as a cell of its own."""
    for world, task in itertools.product(arguments.world, arguments.task):
        yield world, arguments.links[0], {"task": [task], "world": [world]}


if __name__ == "__main__":
    sys.exit(main())
