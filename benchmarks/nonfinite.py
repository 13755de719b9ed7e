"""What `debug_nonfinite` adds to a training step of the suite's tasks at 4 bits.

    python benchmarks/nonfinite.py --json benchmarks/results/nonfinite.jsonl
    python benchmarks/nonfinite.py --task language --reps 21 --exchanges xla    # a quick look

Two ranks: first simulated devices of one process over the exchange "xla", then processes that
mpiexec starts here over "mpi". Every repeat takes a step without the mode, one of the same program
compiled again, and one under `debug_nonfinite("log")`, each behind a barrier; a time is the slowest
rank's. The order rotates with every repeat. `added` is the step's time divided by the first step's
time in the same repeat, minus 1: the median (and quartiles) over the repeats. For the second step
it is noise. Then the step's reduction is measured alone, which has less noise. There `added` is the
additional time in the same repeat, divided by the median time of the whole step without the mode.
Values are finite throughout. Needs the packages of the extra `accuracy`.
"""

import argparse
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

sys.path.append(str(Path(__file__).resolve().parent / "suite"))

from methods import METHODS
from models import MODELS
from speed import Step, Timed, of_exchange

import cgx_jax
import measure
from all_reduce import Ranks, rank_of_process, run

WORLD = 2
METHOD = "4 bits"
MASTER_PORT = 29_517


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    every = ["xla", "mpi"]
    parser.add_argument("--exchanges", nargs="+", choices=every, default=every, help="(both)")
    parser.add_argument("--task", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--reps", type=int, default=301, help="repeats (default %(default)s)")
    measure.add_json_option(parser)
    arguments = parser.parse_args()
    (exchange, *more) = arguments.exchanges
    if more or (exchange == "mpi" and rank_of_process() is None):
        return launch(arguments)
    return run(arguments, [], compare, line, world=WORLD)


def launch(arguments: argparse.Namespace) -> int:
    """Runs every exchange in its own processes."""
    for exchange in arguments.exchanges:
        command, variables = measure.command(arguments, exchanges=exchange), {}
        if exchange == "mpi":
            if (mpiexec := measure.mpiexec()) is None:
                print("nonfinite: left out 'mpi': no mpiexec; pip install mpich mpi4py")
                continue
            command = [mpiexec, "-n", str(WORLD), *command]
            variables = {
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(MASTER_PORT),
                "WORLD_SIZE": str(WORLD),
            }
        if code := subprocess.call(command, env=os.environ | variables):
            return code
    return 0


def compare(ranks: Ranks, arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Times every task without the mode, again, and with it; yields one row per program."""
    (exchange,) = arguments.exchanges
    for task in arguments.task:
        yield from compare_task(ranks, task, exchange, arguments.reps)


def compare_task(ranks: Ranks, task: str, exchange: str, reps: int) -> Iterator[dict[str, Any]]:
    """Times a task's step, and its reduction alone."""
    model = MODELS[task]
    batch = tuple(x[0] for x in model.batches(1, 0))
    params = model.initial(0)[1]
    plan = cgx_jax.Plan.build(params, METHODS[METHOD].policy(model.steps))

    def trainer() -> Timed:
        return of_exchange(Timed, exchange, model, METHODS[METHOD])

    kinds: dict[str, Callable[[], Any]] = {
        "step": lambda: Step(trainer(), batch),
        "reduction": lambda: reduction(trainer().mesh, params, plan, exchange),
    }
    for what, make in kinds.items():
        programs = {"off": make(), "off, again": make()}
        with cgx_jax.debug_nonfinite("log"):
            programs["on"] = make()
        ranks.in_turns(programs, 1)
        seconds = ranks.in_turns(programs, reps)
        jax.effects_barrier()
        if what == "step":
            whole = float(np.median(seconds["off"]))
        over = seconds["off"] if what == "step" else whole
        for mode in programs:
            yield {
                "task": task,
                "what": what,
                "mode": mode,
                "exchange": exchange,
                "method": METHOD,
                "world": ranks.world,
                "values": sum(leaf.size for leaf in plan.leaves),
                "leaves": len(plan.leaves),
                "reps": reps,
                "seconds": measure.quartiles(seconds[mode]),
                "added": measure.quartiles((seconds[mode] - seconds["off"]) / over),
            }


def line(row: dict[str, Any]) -> str:
    low, middle, high = (100 * x for x in row["added"])
    return (
        f"{row['task']:<13} {row['exchange']:<4} {row['values']:>9,} values {row['leaves']:>3}"
        f" leaves {row['what']:<9} {row['mode']:<11} {row['seconds'][1] * 1e3:8.2f} ms"
        f"  added {middle:5.2f} % ({low:.2f} to {high:.2f})"
    )


def reduction(mesh: Mesh, params: Any, plan: cgx_jax.Plan, exchange: str) -> Callable[[], Any]:
    """Returns a compiled call of a step's reduction alone, on random gradients."""
    rows = NamedSharding(mesh, P("data"))
    rng = np.random.default_rng(0)

    def place(leaf: Any) -> jax.Array:
        host = rng.standard_normal((mesh.size, *leaf.shape), np.float32)
        return jax.make_array_from_callback(host.shape, rows, host.__getitem__)

    def reduce(tree: Any) -> Any:
        own = jax.tree.map(lambda x: 2 * x[0], tree)  # computed, as a step's gradients are
        return cgx_jax.pmean_compressed(own, "data", plan, exchange=exchange)

    tree = jax.tree.map(place, params)
    mapped = jax.shard_map(reduce, mesh=mesh, in_specs=P("data"), out_specs=P())
    program = jax.jit(mapped).lower(tree).compile()
    return lambda: jax.block_until_ready(program(tree))


if __name__ == "__main__":
    sys.exit(main())
