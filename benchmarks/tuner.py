"""The tuner's choice against an exhaustive grid of settings, on shaped links (rig.py).

    sudo python benchmarks/tuner.py --json benchmarks/results/tuner.json             # every cell
    sudo python benchmarks/tuner.py --rates 1gbit --worlds 2 --trees "25 MB, 160 leaves" \
        --windows 4 --reps 4                                                         # a quick look

A cell is a link rate, a number of ranks and a tree of gradients. A step is `sync_gradients` at 4
bits and an SGD update. First `tune` measures the links for `--tune` seconds (0: no profile). Then a
`Tuner` chooses on the step's own calls. Every setting of the grid takes `--reps` steps after one to
warm up, one setting after the other. The grid is exchange x reduction x fusion bytes, and for MPI
segment bytes x window; it knows nothing of settings that compile to the same program. At last psum,
the grid's best and the tuner's choice take turns.

`share` is the median (and quartiles) over these turns of the best one's time over the choice's,
`gain` of psum's. `trials` is the tuner's steps over the grid's, without `tune`. A cell passes with
a share of 0.95, a gain of 0.95 and a tenth of the trials.
"""

import argparse
import itertools
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

import cgx_jax
import measure
import rig
from all_reduce import Ranks, rank_of_process
from cgx_jax.exchanges import Mpi, Xla, auto, mpi
from cgx_jax.link_timer import gradient
from cgx_jax.reductions import GatherSum
from cgx_jax.tuner import Setting
from cgx_jax.tuner.candidates import FUSION

CODE = cgx_jax.Quantize(4)
TREES = {
    "25 MB, 160 leaves": [(200, 195)] * 160,
    "100 MB, 300 leaves": [(300, 277)] * 300,
    "100 MB, one embedding": [(48_828, 512)],
}
LISTS = ("rates", "worlds", "trees")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rates", default="100mbit;1gbit;10gbit;unlimited", help="with ; between")
    parser.add_argument("--worlds", default="2;4", help="ranks (default %(default)s)")
    parser.add_argument("--trees", default=";".join(TREES), help="(default %(default)s)")
    parser.add_argument("--segments", default="32768,131072,524288", help="bytes of a segment")
    parser.add_argument("--windows", default="2,4,8", help="segments in flight")
    parser.add_argument("--reps", type=int, default=8, help="of a setting (default %(default)s)")
    parser.add_argument("--tune", type=float, default=30, help="seconds (default %(default)s)")
    measure.add_json_option(parser)
    return parser.parse_args()


def main() -> int:
    arguments = parse_arguments()
    if rank_of_process() is None:
        return launch(arguments)
    ranks = Ranks(int(arguments.worlds))
    if arguments.tune:
        cgx_jax.tune(ranks.mesh, "ranks", bits=(4,), budget_seconds=arguments.tune)
    row = compare(ranks, TREES[arguments.trees], arguments)
    row |= {"links": arguments.rates, "world": ranks.world, "tree": arguments.trees}
    if ranks.first:
        low, share, high = row["share"]
        print(
            f"{row['links']}, {row['world']} ranks, {row['tree']}: {row['choice']} in"
            f" {row['seconds'][1] * 1e3:.1f} ms, best {row['best']}; share {share:.3f}"
            f" ({low:.3f}-{high:.3f}), gain {row['gain'][1]:.2f}, trials {row['trials']:.3f}:"
            f" {'ok' if passes(row) else 'MISSED'}",
            flush=True,
        )
        measure.write_json(arguments.json, [row])
    return 0


def launch(arguments: argparse.Namespace) -> int:
    """Runs every cell in processes of its own."""
    cells = itertools.product(*(getattr(arguments, name).split(";") for name in LISTS))
    for rate, world, tree in cells:
        command = [sys.executable, sys.argv[0], "--rates", rate, "--worlds", world]
        command += ["--trees", tree]
        for name in ("segments", "windows", "reps", "tune", "json"):
            if (value := getattr(arguments, name)) is not None:
                command += [f"--{name}", str(value)]
        if code := rig.run(int(world), rate, command, timeout=7200, mpi=True):
            return code
    return 0


def passes(row: dict[str, Any]) -> bool:
    return row["share"][1] >= 0.95 and row["gain"][1] >= 0.95 and row["trials"] <= 0.1


class Step:
    """A step that reduces gradients as it is told, and the state between its calls."""

    def __init__(self, ranks: Ranks, grads: Any, policy: Any, **options: Any) -> None:
        sync = cgx_jax.sync_gradients("ranks", policy, mesh=ranks.mesh, **options)
        self.tx = optax.chain(sync, optax.sgd(0.1))
        self.grads = grads
        like = [jnp.zeros(x.shape[1:]) for x in grads]
        self.state = self.tx.init(like)
        specs = cgx_jax.state_specs(self.state, "ranks")
        self.mapped = jax.shard_map(
            lambda g, s: self.tx.update([x[0] for x in g], s),
            mesh=ranks.mesh,
            in_specs=(P("ranks"), specs),
            out_specs=(P(), specs),
        )
        self.call: Callable[..., Any] = jax.jit(self.mapped)

    def __call__(self) -> None:
        out, self.state = self.call(self.grads, self.state)
        jax.block_until_ready((out, self.state))


def fixed(ranks: Ranks, grads: Any, setting: Setting) -> Callable[[], None]:
    """A step by one setting, whose engine runs with its options when it is called."""
    like = [jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for x in grads]
    code = cgx_jax.Identity() if setting.exchange is None else CODE
    plan = cgx_jax.Plan.build(like, code, fusion_bytes=setting.fusion_bytes)
    exchange = setting.exchange or Xla()
    step = Step(ranks, grads, plan, exchange=exchange, reduction=setting.reduction)

    def call() -> None:
        if isinstance(exchange, Mpi):
            exchange.require("benchmark", ())
        step()

    return call


def grid(arguments: argparse.Namespace) -> list[Setting]:
    """psum first, then every combination."""
    engines = [
        Mpi(int(segment), int(window), mpi.defaults().threads)
        for segment in arguments.segments.split(",")
        for window in arguments.windows.split(",")
    ]
    exchanges = [e for e in (*engines, Xla()) if e.shorthand in {a.shorthand for a in usable()}]
    made = itertools.product(exchanges, (None, GatherSum()), (None,), FUSION)
    return [Setting(), *itertools.starmap(Setting, made)]


def usable() -> Sequence[Any]:
    return auto.available()


def turns(ranks: Ranks, calls: Sequence[Callable[[], None]], reps: int) -> np.ndarray:
    """f64[reps, calls]: the slowest rank's seconds, after one call each to warm up.

    Calls that take turns go round in both directions. Each comes twice, and the second is timed: in
    the first the engine changes its options, and its memory is new.
    """
    samples = np.empty((reps + 1, len(calls)))
    order = range(len(calls))
    for turn, row in enumerate(samples):
        for i in order[:: -1 if turn % 2 else 1]:
            if len(calls) > 1:
                calls[i]()
            ranks.barrier()
            ranks.barrier()  # the first one's stragglers have arrived now
            start = time.perf_counter()
            calls[i]()
            row[i] = time.perf_counter() - start
    return ranks.gather(samples.ravel()).max(axis=0).reshape(samples.shape)[1:]


def compare(ranks: Ranks, shapes: Any, arguments: argparse.Namespace) -> dict[str, Any]:
    """Tunes, measures the grid, and sets the choice beside psum and the grid's best."""
    grads = [
        ranks.place(gradient, int(np.prod(shape))).reshape(ranks.world, *shape) for shape in shapes
    ]
    tuner = cgx_jax.Tuner(cache=False)
    step = Step(ranks, grads, CODE, exchange=tuner)
    step.call, tuning_steps = tuner.jit(step.mapped), 0
    while tuner.state in ("waiting", "trying"):
        step()
        tuning_steps += tuner.state == "trying"
    settings = grid(arguments)
    medians = []
    for setting in settings:  # one at a time, so that no program but one is held
        call = fixed(ranks, grads, setting)
        medians.append(float(np.median(turns(ranks, [call], arguments.reps))))
    best = settings[int(np.argmin(medians))]
    last = [fixed(ranks, grads, s) for s in (Setting(), best, tuner.current)]
    seconds = turns(ranks, last, max(7, arguments.reps))
    return {
        "choice": str(tuner.current),
        "best": str(best),
        "seconds": measure.quartiles(seconds[:, 2]),
        "psum_seconds": measure.quartiles(seconds[:, 0]),
        "share": measure.quartiles(seconds[:, 1] / seconds[:, 2]),
        "gain": measure.quartiles(seconds[:, 0] / seconds[:, 2]),
        "trials": tuning_steps / (len(settings) * (arguments.reps + 1)),
        "tuner": tuner.metrics(),
        "grid": dict(zip(map(str, settings), medians, strict=True)),
    }


if __name__ == "__main__":
    sys.exit(main())
