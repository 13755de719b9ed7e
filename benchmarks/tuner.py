"""The tuner's choice against an exhaustive grid of settings, on shaped links (rig.py).

    sudo python benchmarks/tuner.py --json benchmarks/results/tuner.jsonl            # every cell
    sudo python benchmarks/tuner.py --rates 1gbit --worlds 2 --trees "25 MB, 160 leaves" \
        --windows 4 --reps 4                                                         # a quick look
    sudo python benchmarks/tuner.py --worlds 3 --rates "300mbit;3gbit" --trees "30 MB, all sizes" \
        --json benchmarks/results/tuner_held_out.jsonl      # what no rule of the tuner was made on

A cell is a link rate, a number of ranks and a tree of gradients. A step is `sync_gradients` at 4
bits and an SGD update. On each link `tune` measures for `--tune` seconds (0: no profile), and a
`Tuner` then chooses on the step's own calls. After that every setting of the grid takes 3 to
`--reps` steps on each link, as many as `--seconds` allow, after one to warm up. The grid is
exchange x reduction x fusion bytes, and for MPI segment bytes x window; it knows nothing of
settings that compile to the same program. With `--grids FILE`, the grid of a cell that FILE, of an
earlier run, has is taken from there: it does not depend on the tuner. Lastly the `--finalists` best
settings of the grid and the tuner's choice take turns, at most FINAL, in `--final` seconds, and so
do psum and the choice.

The first half of the turns says which finalist is the best. `share` is the median (and quartiles)
over the second half of the best one's time over the choice's: the best of many is partly luck, and
luck must not count twice. `gain` is psum's time over the choice's. `trials` is the number of
settings that the tuner tried over those of the grid; `tune` is not counted, since it serves every
job on these links. A cell passes with a share of 0.95, a gain of 0.95 and a tenth of the trials.
"""

import argparse
import dataclasses
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
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
# Not among the default ones, so that the rules of the tuner can be tried on another tree.
HELD_OUT = {
    "30 MB, all sizes": [(1 << i // 2, 1 << i - i // 2) for i in range(4, 22)] + [(1000, 875)] * 4
}
LEAST = 3  # steps of a setting
FINAL = 200  # turns of the finalists


def parse_arguments() -> argparse.Namespace:
    parser = measure.parser(
        __doc__,
        rates="100mbit;1gbit;10gbit;unlimited",
        worlds="2;4",
        segments="32768,131072,524288",
        windows="2,4,8",
        reps=8,
        seconds=4.0,
        tune=30.0,
    )
    parser.add_argument("--trees", default=";".join(TREES), help="(default %(default)s)")
    parser.add_argument("--grids", type=Path, metavar="FILE", help="of an earlier run's --json")
    parser.add_argument("--finalists", type=int, default=3, help="(default %(default)s)")
    parser.add_argument("--final", type=float, default=120, help="seconds (default %(default)s)")
    return parser.parse_args()


def main() -> int:
    arguments = parse_arguments()
    if rank_of_process() is None:
        return launch(arguments)
    ranks = Ranks(int(arguments.worlds))
    for row in compare(ranks, (TREES | HELD_OUT)[arguments.trees], arguments):
        row |= {"world": ranks.world, "tree": arguments.trees}
        if ranks.first:
            low, share, high = row["share"]
            print(
                f"{row['links']}, {row['world']} ranks, {row['tree']}: {row['choice']} in"
                f" {row['seconds'][1] * 1e3:.1f} ms, best {row['best']}; share {share:.3f}"
                f" ({low:.3f}-{high:.3f}), gain {row['gain'][1]:.2f}, trials {row['trials']:.3f}:"
                f" {'ok' if passes(row) else 'MISSED'}",
                flush=True,
            )
            measure.add_json(arguments.json, row, ("links", "world", "tree"))
    return 0


def launch(arguments: argparse.Namespace) -> int:
    """Runs every number of ranks and tree in processes of its own."""
    for world, tree in itertools.product(arguments.worlds.split(";"), arguments.trees.split(";")):
        command = measure.command(arguments, worlds=world, trees=tree)
        first = arguments.rates.split(";")[0]
        if code := rig.run(int(world), first, command, timeout=7200, mpi=True):
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


def program(setting: Setting) -> Setting:
    """The setting without the options that its compiled program does not know."""
    if isinstance(setting.exchange, Mpi):
        return dataclasses.replace(setting, exchange=Mpi())
    return setting


def compiled(ranks: Ranks, grads: Any, setting: Setting) -> Step:
    """A step by one setting, whatever the options of its engine."""
    like = [jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for x in grads]
    code = cgx_jax.Identity() if setting.exchange is None else CODE
    plan = cgx_jax.Plan.build(like, code, fusion_bytes=setting.fusion_bytes)
    exchange = program(setting).exchange or Xla()
    return Step(ranks, grads, plan, exchange=exchange, reduction=setting.reduction)


def by(setting: Setting, step: Step) -> Callable[[], None]:
    """`step` on an engine with the setting's options."""

    def call() -> None:
        if isinstance(setting.exchange, Mpi):
            setting.exchange.require("benchmark", ())
        step()

    return call


def grid(arguments: argparse.Namespace) -> list[Setting]:
    """psum first, then every combination."""
    engines = [
        Mpi(int(segment), int(window), mpi.defaults().threads)
        for segment in arguments.segments.split(",")
        for window in arguments.windows.split(",")
    ]
    usable = {exchange.shorthand for exchange in auto.available()}
    exchanges = [e for e in (*engines, Xla()) if e.shorthand in usable]
    made = itertools.product((None, GatherSum()), FUSION, exchanges)
    return [Setting(), *(Setting(e, reduction, None, size) for reduction, size, e in made)]


def grids(arguments: argparse.Namespace, settings: list[Setting]) -> dict[str, np.ndarray]:
    """Returns the seconds of each setting in an earlier run, by link rates."""
    if arguments.grids is None:
        return {}
    return {
        row["links"]: np.array([row["grid"][str(setting)] for setting in settings])
        for row in measure.rows(arguments.grids)
        if (row["world"], row["tree"]) == (int(arguments.worlds), arguments.trees)
    }


def turns(
    ranks: Ranks, calls: Sequence[Callable[[], None]], most: int, seconds: float
) -> np.ndarray:
    """f64[reps, calls]: the slowest rank's seconds, after one call each to warm up.

    There are `LEAST` to `most` repeats, as many as `seconds` allow. Calls that take turns do so in
    a random order, the same on all ranks. Each comes twice, and the second is timed: in the first
    the engine changes its options, and its memory is new.
    """
    orders = np.random.default_rng(0)

    def turn() -> np.ndarray:
        row = np.empty(len(calls))
        for i in orders.permutation(len(calls)):
            if len(calls) > 1:
                calls[i]()
            row[i] = ranks.timed(calls[i])
        return row

    # Ranks share processors, so a call takes longer if the ranks that are done work on something
    # else. A barrier follows every call, and nothing is gathered before the end.
    round_seconds = ranks.gather(turn()).max(axis=0).sum() * (2 if len(calls) > 1 else 1)
    reps = int(np.clip(seconds / round_seconds, LEAST, most))
    samples = np.array([turn() for _ in range(reps)])
    ranks.barrier()
    return ranks.gather(samples.ravel()).max(axis=0).reshape(samples.shape)


def relink(ranks: Ranks, rate: str) -> None:
    """All links have `rate` from here on."""
    ranks.barrier()
    if ranks.first:
        rig.shape(rate)
    ranks.barrier()


def compare(ranks: Ranks, shapes: Any, arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Tunes, measures the grid, and sets the choice beside psum and the grid's best, by links."""
    grads = [
        ranks.place(gradient, int(np.prod(shape))).reshape(ranks.world, *shape) for shape in shapes
    ]
    rates = arguments.rates.split(";")
    settings = grid(arguments)
    tuners = {}
    for rate in rates:
        relink(ranks, rate)
        tuners[rate] = tuned(ranks, grads, arguments.tune)
    earlier = grids(arguments, settings)
    medians = {rate: earlier.get(rate, np.empty(len(settings))) for rate in rates}
    missing = [rate for rate in rates if rate not in earlier]
    step, known = None, None
    for i, setting in enumerate(settings if missing else ()):
        # Neighbors share their program; no other is held.
        if program(setting) != known:
            step, known = compiled(ranks, grads, setting), program(setting)
        for rate in missing:
            relink(ranks, rate)
            took = turns(ranks, [by(setting, step)], arguments.reps, arguments.seconds)
            medians[rate][i] = np.median(took)
    for rate in rates:
        relink(ranks, rate)
        tuner = tuners[rate]
        best = [settings[i] for i in np.argsort(medians[rate])[: arguments.finalists]]
        entered = [Setting(), *best, tuner.current]
        steps = {p: compiled(ranks, grads, p) for p in dict.fromkeys(map(program, entered))}
        calls = [by(s, steps[program(s)]) for s in entered]
        seconds = turns(ranks, calls[1:], FINAL, arguments.final)
        half = len(seconds) // 2
        fastest = int(np.median(seconds[:half, :-1], axis=0).argmin())
        mine = best.index(tuner.current) if tuner.current in best else -1
        seconds = seconds[half:]
        beside = turns(ranks, [calls[0], calls[-1]], arguments.reps, 5 * arguments.seconds)
        yield {
            "links": rate,
            "choice": str(tuner.current),
            "best": str(best[fastest]),
            "seconds": measure.quartiles(seconds[:, mine]),
            "psum_seconds": measure.quartiles(beside[:, 0]),
            "share": measure.quartiles(seconds[:, fastest] / seconds[:, mine]),
            "gain": measure.quartiles(beside[:, 0] / beside[:, 1]),
            "trials": tried(tuner) / len(settings),
            "turns": len(seconds),
            "grid": dict(zip(map(str, settings), medians[rate].tolist(), strict=True)),
        }


def tuned(ranks: Ranks, grads: Any, budget: float) -> cgx_jax.Tuner:
    """A tuner after its trials, on links that `tune` has measured."""
    if budget:
        cgx_jax.tune(ranks.mesh, "ranks", bits=(4,), budget_seconds=budget)
    tuner = cgx_jax.Tuner(cache=False)
    step = Step(ranks, grads, CODE, exchange=tuner)
    step.call = tuner.jit(step.mapped)
    while tuner.state in ("waiting", "trying"):
        step()
    return tuner


def tried(tuner: cgx_jax.Tuner) -> int:
    return sum(name.startswith("cgx/seconds/") for name in tuner.metrics())


if __name__ == "__main__":
    sys.exit(main())
