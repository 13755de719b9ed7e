"""The tuner's choice against every fixed setting of a grid, on shaped links.

    python benchmarks/tuner.py --json benchmarks/results/tuner.jsonl             # every cell
    python benchmarks/tuner.py --rates 1gbit --worlds 2 --trees "25 MB, 160 leaves" \
        --windows 4 --seconds 1                                                      # a quick look

A cell is a link rate, a number of ranks and a tree of gradients. A step is `sync_gradients` at 4
bits and an SGD update. On each link `tune` measures for `--tune` seconds (0: no profile), and a
`Tuner` then chooses on the step's own calls. After that every setting of the grid takes 3 to
`--reps` steps on each link, as many as `--seconds` allow. The grid is exchange x reduction x fusion
bytes, and for MPI segment bytes x window. Lastly the `--finalists` best settings of the grid take
turns with the choice, and psum takes turns with the choice: 2 x TURNS and TURNS
or more, as `--final` seconds allow.

The first half of the turns says which finalist is the best. `share` is the best one's time over the
choice's in the second half, and `gain` is psum's time over the choice's: median and quartiles. A
cell is near the best if the median share is 0.9 or more, and no slower than psum if the upper
quartile of the gain is 1 or more. The bar is 22 of 24 cells near the best, and none slower than
psum.
"""

import argparse
import collections
import dataclasses
import itertools
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import cgx_jax
import measure
from all_reduce import Ranks, rank_of_process
from cgx_jax.choice import auto
from cgx_jax.exchanges import Mpi, Xla, mpi
from cgx_jax.host import agreement
from cgx_jax.reductions import GatherSum
from cgx_jax.tuning import Setting
from cgx_jax.tuning.candidates import FUSION
from cgx_jax.tuning.link_timer import gradient

CODE = cgx_jax.Quantize(4)
TREES = {
    "25 MB, 160 leaves": [(200, 195)] * 160,
    "100 MB, 300 leaves": [(300, 277)] * 300,
    "100 MB, one embedding": [(48_828, 512)],
}
LEAST = 3  # steps of a setting of the grid
TURNS = 10  # at least, in each half of the last turns
FINAL = 200  # turns, at most
NEAR, SLOWER = "near the best", "slower than psum"


def main() -> int:
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
    parser.add_argument("--finalists", type=int, default=3, help="(default %(default)s)")
    parser.add_argument("--final", type=float, default=60, help="seconds (default %(default)s)")
    parser.add_argument("--verdicts", help=argparse.SUPPRESS)  # a line for each cell
    arguments = parser.parse_args()
    if rank_of_process() is None:
        return launch(arguments)
    ranks = Ranks()
    for row in compare(ranks, TREES[arguments.trees], arguments):
        row |= {"world": ranks.world, "tree": arguments.trees}
        if ranks.first:
            verdicts = [NEAR] * (row["share"][1] >= 0.9) + [SLOWER] * (row["gain"][2] < 1)
            print(
                f"{row['links']}, {row['world']} ranks, {row['tree']}: {row['choice']} in"
                f" {row['seconds'][1] * 1e3:.1f} ms, best {row['best']}; share"
                f" {measure.spread(row['share'], '.3f')}, gain {row['gain'][1]:.2f},"
                f" {row['turns']} turns: {', '.join(verdicts) or 'MISSED'}",
                flush=True,
            )
            with open(arguments.verdicts, "a") as file:
                print(row["turns"], *verdicts, sep=";", file=file)
            measure.add_json(arguments.json, row, ("links", "world", "tree"))
    return 0


def launch(arguments: argparse.Namespace) -> int:
    """Runs every number of ranks and tree in processes of its own, and prints the bar's counts."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "verdicts"
        first = arguments.rates.split(";")[0]
        pairs = itertools.product(arguments.worlds.split(";"), arguments.trees.split(";"))
        cells = ((w, first, {"worlds": w, "trees": tree, "verdicts": path}) for w, tree in pairs)
        if code := measure.launch(arguments, cells, timeout=7200, mpi=True):
            return code
        verdicts = [line.split(";") for line in path.read_text().splitlines()]
    counts = collections.Counter(verdict for row in verdicts for verdict in row[1:])
    print(
        f"within 10 % of the best fixed setting: {counts[NEAR]} of {len(verdicts)} cells (bar: 22"
        f" of 24); slower than lax.psum: {counts[SLOWER]} (bar: 0); at least"
        f" {min(int(row[0]) for row in verdicts)} turns (bar: {TURNS})"
    )
    return 0


class Step:
    """A step that reduces gradients as it is told, and the state between its calls."""

    def __init__(self, ranks: Ranks, grads: Any, policy: Any, **options: Any) -> None:
        sync = cgx_jax.sync_gradients("ranks", policy, mesh=ranks.mesh, **options)
        self.tx = optax.chain(sync, optax.sgd(0.1))
        self.grads = grads
        like = [jnp.zeros(x.shape[1:]) for x in grads]
        self.state = self.tx.init(like)
        self.mapped = measure.updating(self.tx, self.state, ranks.mesh, "ranks")
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


def turns(
    ranks: Ranks,
    calls: Sequence[Callable[[], None]],
    most: int,
    seconds: float,
    least: int = LEAST,
) -> np.ndarray:
    """f64[reps, calls]: the slowest rank's seconds, after one call each to warm up.

    There are `least` to `most` repeats, as many as `seconds` allow. Calls that take turns do so in
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
    round_seconds = agreement.maximum(turn()).sum() * (2 if len(calls) > 1 else 1)
    reps = int(np.clip(seconds / round_seconds, least, most))
    samples = np.array([turn() for _ in range(reps)])
    ranks.barrier()
    return agreement.maximum(samples)


def compare(ranks: Ranks, shapes: Any, arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Tunes, measures the grid, and sets the choice beside psum and the grid's best, by links."""
    grads = [
        ranks.place(gradient, int(np.prod(shape))).reshape(ranks.world, *shape) for shape in shapes
    ]
    rates = arguments.rates.split(";")
    settings = grid(arguments)
    tuners = {}
    for rate in rates:
        ranks.relink(rate)
        tuners[rate] = tuned(ranks, grads, arguments.tune)
    medians = {rate: np.empty(len(settings)) for rate in rates}
    step, known = None, None
    for i, setting in enumerate(settings):
        # Neighbors share their program; no other is held.
        if step is None or program(setting) != known:
            step, known = compiled(ranks, grads, setting), program(setting)
        for rate in rates:
            ranks.relink(rate)
            took = turns(ranks, [by(setting, step)], arguments.reps, arguments.seconds)
            medians[rate][i] = np.median(took)
    for rate in rates:
        ranks.relink(rate)
        choice = tuners[rate].current
        best = [settings[i] for i in np.argsort(medians[rate])[: arguments.finalists]]
        entered = dict.fromkeys([*best, choice])
        every = (*entered, Setting())
        steps = {p: compiled(ranks, grads, p) for p in dict.fromkeys(map(program, every))}
        calls = {s: by(s, steps[program(s)]) for s in every}
        mine = list(entered).index(choice)
        seconds = turns(ranks, [calls[s] for s in entered], FINAL, arguments.final, least=2 * TURNS)
        half = len(seconds) // 2
        fastest = int(np.median(seconds[:half, : len(best)], axis=0).argmin())
        seconds = seconds[half:]
        # The choice beside itself, if it is psum, would only measure noise.
        beside = seconds[:, [mine, mine]]
        if choice.exchange is not None:
            pair = [calls[Setting()], calls[choice]]
            beside = turns(ranks, pair, FINAL, arguments.final, least=TURNS)
        yield {
            "links": rate,
            "choice": str(choice),
            "best": str(best[fastest]),
            "seconds": measure.quartiles(seconds[:, mine]),
            "psum_seconds": measure.quartiles(beside[:, 0]),
            "share": measure.quartiles(seconds[:, fastest] / seconds[:, mine]),
            "gain": measure.quartiles(beside[:, 0] / beside[:, 1]),
            "turns": min(len(seconds), len(beside)),
            "tuner": tuners[rate].metrics(),
            "grid": dict(zip(map(str, settings), medians[rate].tolist(), strict=True)),
        }


def tuned(ranks: Ranks, grads: Any, budget: float) -> cgx_jax.Tuner:
    """A tuner after its races, on links that `tune` has measured."""
    if budget:
        cgx_jax.tune(ranks.mesh, "ranks", bits=(4,), budget_seconds=budget)
    tuner = cgx_jax.Tuner(cache=False)
    step = Step(ranks, grads, CODE, exchange=tuner)
    step.call = tuner.jit(step.mapped)
    while tuner.state in ("waiting", "trying"):
        step()
    return tuner


if __name__ == "__main__":
    sys.exit(main())
