"""Times a training step of the suite's tasks by every method, on shaped links.

    python benchmarks/suite/speed.py                    # every task, world and link: an hour
    python benchmarks/suite/speed.py --task recommender --world 2 --links 1gbit --reps 5

The ranks share the task's batch. Every repeat takes one step of each method, one after the other,
each behind a barrier; a time is the slowest rank's. `ratio` is the fp32 step's time divided by the
method's time in the same repeat: the median (and quartiles) over the repeats. A step's time is
split by steps that leave something out, in the same repeat:

    compute   the step without a reduction
    encode    the first encoding of a rank's gradients by itself, without units
    decode    the rest of a step in which nothing is sent: adding up, encoding sums, decoding
    wire      the additional time of the step that sends

"exact" is `lax.pmean` of the tree. On CPUs XLA makes a collective for each leaf of it. In "exact,
small leaves together" `sync_gradients` makes one for all leaves of up to 64 KiB. "bf16, lax.psum"
is a sum of 16-bit values as XLA makes it. Ranks are started by mpiexec and reduce over the "mpi"
exchange if it is available, otherwise over "xla". A step in which nothing is sent uses the kernels
of "xla".
"""

import argparse
import contextlib
import itertools
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
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
from all_reduce import Ranks, rank_of_process
from cgx_jax.axes import Axes
from cgx_jax.choice import auto
from cgx_jax.commands import rig
from cgx_jax.compressors import SummedCompressor
from cgx_jax.compressors.buffers import chunk_code, whole_code
from cgx_jax.exchanges import Mpi, xla
from cgx_jax.host import agreement
from cgx_jax.kernels.primitives import Sent
from cgx_jax.reductions.named import reduction_of
from cgx_jax.transforms.precondition import WARMUP

TOGETHER = "exact, small leaves together"
BF16_PSUM = "bf16, lax.psum"
NEVER = 1_000_000  # seconds that a program would have to compile to be cached
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


@contextlib.contextmanager
def unplugged() -> Iterator[None]:
    """Makes reductions that are traced in this context compute everything and send nothing."""

    def gather(row: jax.Array, axes: Axes) -> jax.Array:
        return jnp.broadcast_to(row, (axes.world, *row.shape))

    with (
        mock.patch.object(jax.lax, "pmean", lambda x, axis_name: x),
        mock.patch.object(Axes, "sum", lambda self, leaves: list(leaves)),
        mock.patch.object(Axes, "mean", lambda self, leaves, **_: list(leaves)),
        mock.patch.object(xla, "scatter", lambda rows, axes: rows),
        mock.patch.object(xla, "gather", gather),
    ):
        yield


class Step:
    """A compiled step of a trainer, which continues from its own state."""

    def __init__(self, ranks: Ranks, trainer: Trainer, batch: Any, *, sends: bool) -> None:
        replicated = NamedSharding(trainer.mesh, P())
        _, params = trainer.task.initial(0)
        params = jax.device_put(params, replicated)
        init = trainer.tx.init
        split = cgx_jax.state_shardings(jax.eval_shape(init, params), "data", trainer.mesh)
        self.state = params, jax.jit(init, out_shardings=split)(params)
        self.batch = jax.device_put(batch, NamedSharding(trainer.mesh, P("data")))
        self.step = self._compiled(ranks, trainer, sends=sends)

    def _compiled(self, ranks: Ranks, trainer: Trainer, *, sends: bool) -> Callable[..., Any]:
        return compiled(ranks, trainer.step.lower(*self.state, self.batch), sends=sends)

    def __call__(self) -> None:
        *self.state, _ = jax.block_until_ready(self.step(*self.state, self.batch))


def compiled(ranks: Ranks, lowered: Any, *, sends: bool) -> Callable[..., Any]:
    """Compiles a program. If it sends nothing, the first rank compiles and the others read that.

    XLA forgets the order of collectives in programs that it reads from a cache, so every rank
    compiles a program that sends.
    """
    jax.config.update("jax_persistent_cache_min_compile_time_secs", NEVER if sends else 0)
    if sends:
        return lowered.compile()
    if ranks.first:
        first = lowered.compile()
    ranks.barrier()
    return first if ranks.first else lowered.compile()


def encoding(trainer: Trainer, configuration: Configuration, ranks: Ranks) -> Callable[[], Any]:
    """Returns a call of the trainer's first encoding of gradients; empty where codes are sums."""
    _, params = trainer.task.initial(0)
    policy = trainer.policy or cgx_jax.Identity()
    plan = cgx_jax.Plan.build(params, policy)

    def encode(x: jax.Array) -> list[jax.Array]:
        out = [x]
        for buffer in plan.buffers:
            coded = plan.coded(buffer)
            if isinstance(coded[0].compressor, SummedCompressor):
                continue
            pairs = [(plan.leaves[leaf.number].path, leaf) for leaf in coded]
            chunks = reduction_of("speed", None, pairs).shorthand == "scatter_gather"
            code = chunk_code(coded, ranks.world) if chunks else whole_code(coded)
            leaves = [jnp.resize(x, leaf.shape) for leaf in coded]
            rank, seed = jax.lax.axis_index("data"), np.zeros(2, np.uint32)
            own = Sent(seed, leaves, rank=rank)
            rows, residuals = code.encode(own, residual=configuration.memory is not None)
            out += [rows, *(residuals or ())]
        return [y[None] for y in out]

    mapped = jax.shard_map(
        lambda x: encode(x[0]),
        mesh=trainer.mesh,
        in_specs=P("data"),
        out_specs=P("data"),
        check_vma=False,
    )
    values = max(leaf.size for leaf in plan.leaves)
    x = jax.device_put(
        np.zeros((ranks.world, 1), np.float32), NamedSharding(trainer.mesh, P("data"))
    )
    x = jax.jit(lambda x: x + jax.random.normal(jax.random.key(0), (ranks.world, values)))(x)
    encoded = compiled(ranks, jax.jit(mapped).lower(x), sends=False)
    return lambda: jax.block_until_ready(encoded(x))


def compare(
    ranks: Ranks, task: str, names: list[str], exchange: str, links: list[str], reps: int
) -> list[dict[str, Any]]:
    """Times a task's step by every method on every link; one row per method and link."""
    model = MODELS[task]
    batch = tuple(x[0] for x in model.batches(1, 0))
    steps: dict[tuple[str, str], Callable[[], Any]] = {}
    sent = {}

    for name in names:
        configuration = METHODS.get(name, METHODS["exact"])
        kind = KINDS.get(name, Timed)
        policy = configuration.policy and configuration.policy(model.steps)
        summed = policy is None or isinstance(policy, SummedCompressor)
        trainer = of_exchange(kind, "xla" if summed else exchange, model, configuration)
        steps["step", name] = Step(ranks, trainer, batch, sends=True)
        silent = of_exchange(kind, "xla", model, configuration)
        with unplugged():
            steps["silent", name] = Step(ranks, silent, batch, sends=False)
        steps["encode", name] = encoding(trainer, configuration, ranks)
        plan = cgx_jax.Plan.build(model.initial(0)[1], policy or cgx_jax.Identity())
        sent[name] = plan.wire_bytes(ranks.world) // (2 if name == BF16_PSUM else 1)
        if ranks.first:
            print(f"  compiled {name}", flush=True)
    computing = Computing(model, METHODS["exact"], model.steps)
    steps["compute", ""] = Step(ranks, computing, batch, sends=False)
    in_turns(ranks, steps, WARMUP + 1)
    rows = []
    for link in links:
        ranks.barrier()
        if ranks.first:
            rig.shape(link)
        ranks.barrier()
        in_turns(ranks, steps, 1)
        seconds = in_turns(ranks, steps, reps)
        shown = {"exchange": exchange, "reps": reps, "batch": len(batch[0])}
        shown |= {"world": ranks.world, "links": link}
        new = [
            {"task": task, "method": name, "sent_bytes": sent[name], **shown}
            | split(seconds, name, names[0])
            for name in names
        ]
        if ranks.first:
            print(f"{task}: {ranks.world} ranks, {link}, exchange {exchange!r}", flush=True)
            print_rows(new)
        rows += new
    return rows


def split(seconds: dict[Any, np.ndarray], name: str, exact: str) -> dict[str, Any]:
    """A method's times, and what its step spends them on."""
    whole, silent, encode = (seconds[part, name] for part in ("step", "silent", "encode"))
    compute = seconds["compute", ""]
    return {
        "seconds": measure.quartiles(whole),
        "ratio": measure.quartiles(seconds["step", exact] / whole),
        "compute": measure.quartiles(compute),
        "encode": measure.quartiles(encode),
        "decode": measure.quartiles(silent - compute - encode),
        "wire": measure.quartiles(whole - silent),
    }


def of_exchange(
    kind: type[Timed], exchange: str, model: Any, configuration: Configuration
) -> Timed:
    return type(kind.__name__, (kind,), {"exchange": exchange})(model, configuration, model.steps)


def in_turns(ranks: Ranks, steps: dict[Any, Callable[[], Any]], reps: int) -> dict[Any, np.ndarray]:
    """Returns the slowest rank's seconds of every step, f64[reps]."""
    samples = np.empty((reps, len(steps)))
    for rep in range(reps):
        for i, step in enumerate(steps.values()):
            ranks.barrier()
            ranks.barrier()  # by now the stragglers of the first barrier have arrived
            start = time.perf_counter()
            step()
            samples[rep, i] = time.perf_counter() - start
    slowest = agreement.maximum(samples)
    return dict(zip(steps, slowest.T, strict=True))


def parser_of(description: str | None, tasks: list[str]) -> argparse.ArgumentParser:
    """Returns a parser of the tasks, worlds and links that `launch` goes through."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--task", nargs="+", choices=MODELS, default=tasks)
    parser.add_argument("--world", nargs="+", type=int, default=[2, 4], help="(default 2 and 4)")
    rates = ["100mbit", "1gbit", "10gbit"]
    parser.add_argument("--links", nargs="+", default=rates, help="(default %(default)s)")
    parser.add_argument("--reps", type=int, default=11, help="repeats (default %(default)s)")
    measure.add_json_option(parser)
    return parser


def main() -> int:
    parser = parser_of(__doc__, list(MODELS))
    parser.add_argument("--methods", default=";".join(TIMED), help="names separated by ';'")
    arguments = parser.parse_args()
    if rank_of_process() is None:
        return launch(arguments, "--methods", arguments.methods)
    (world,), (task,) = arguments.world, arguments.task
    ranks = Ranks(world)
    names = list(dict.fromkeys(["exact", *arguments.methods.split(";")]))
    rows = compare(ranks, task, names, fastest(), arguments.links, arguments.reps)
    if ranks.first:
        measure.write_json(arguments.json, rows)
    return 0


def fastest() -> str:
    """Returns the exchange that CPU ranks use: "mpi" if it is available, otherwise "xla"."""
    return "mpi" if Mpi() in auto.available() else "xla"


def launch(arguments: argparse.Namespace, *options: str) -> int:
    """Runs every task and world in its own processes, with the command's own `options`."""
    for world, task in itertools.product(arguments.world, arguments.task):
        command = [sys.executable, sys.argv[0], "--task", task, "--world", str(world)]
        command += ["--links", *arguments.links, *options, "--reps", str(arguments.reps)]
        command += ["--json", str(arguments.json)] if arguments.json else []
        with tempfile.TemporaryDirectory() as cache:
            os.environ["JAX_COMPILATION_CACHE_DIR"] = cache
            os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = str(NEVER)
            if code := rig.run(
                world, arguments.links[0], command, timeout=3600, mpi=measure.has_mpi()
            ):
                return code
    return 0


def print_rows(rows: list[dict[str, Any]]) -> None:
    print(
        f"  {'method':<30} {'step ms':>8}  {'ratio (quartiles)':<18} {'samples/s':>9} "
        f"{'compute':>8} {'encode':>7} {'decode':>7} {'wire':>8} ms"
    )
    for row in rows:
        low, ratio, high = row["ratio"]
        parts = [row[part][1] * 1e3 for part in ("compute", "encode", "decode", "wire")]
        print(
            f"  {row['method']:<30} {row['seconds'][1] * 1e3:>8.1f}  "
            f"{f'{ratio:.2f} ({low:.2f}-{high:.2f})':<18} {row['batch'] / row['seconds'][1]:>9.0f} "
            f"{parts[0]:>8.1f} {parts[1]:>7.1f} {parts[2]:>7.1f} {parts[3]:>8.1f}",
            flush=True,
        )


if __name__ == "__main__":
    sys.exit(main())
