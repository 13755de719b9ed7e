"""When a training reaches a loss over slow links, exactly and compressed, in every step and rarely.

    python benchmarks/time_to_loss.py --json benchmarks/results/time_to_loss.jsonl

Four workers of one core train the model of the examples, each on a host of its own. All ways start
from the same parameters and see the same batches. A row is a link and a way: the held-out loss of
the shared parameters after every few steps, and the seconds of training until then. An exact run
over the slower link takes only a few steps, since all of them would take half an hour.
"""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import optax
from flax import nnx

import cgx_jax
import measure
from all_reduce import Ranks, run
from cgx_jax.commands import rig
from cgx_jax.transforms import diloco

sys.path.append(str(Path(__file__).resolve().parents[1] / "examples"))

import corpus
from model import Transformer
from training import adamw, train_workers

WIDTH, LAYERS, LENGTH, BATCH, SEED = 128, 4, 128, 8, 0
Q4 = cgx_jax.Quantize(4, rotation=True)


def ways(steps: int, every: int) -> dict[str, optax.GradientTransformationExtraArgs]:
    """Returns how to train, by name."""
    sync = cgx_jax.sync_gradients("data", Q4, precondition=cgx_jax.SecondMoment(), exchange="xla")
    exact = optax.stateless(lambda grads, _: jax.lax.pmean(grads, "data"))
    rare: dict[str, Any] = {"every": every, "exchange": "xla"}
    return {
        "exact": optax.chain(exact, adamw(steps)),
        "4 bits": optax.chain(sync, adamw(steps)),
        "DiLoCo, fp32": diloco(adamw(steps), "data", cgx_jax.Identity(), **rare),
        "DiLoCo, 4 bits": diloco(adamw(steps), "data", Q4, **rare),
        "DiLoCo, 4 bits, streaming": diloco(adamw(steps), "data", Q4, fragments=4, **rare),
    }


def main() -> int:
    parser = measure.parser(__doc__, rates="100mbit;10mbit", world=4)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--every", type=int, default=10, help="steps of DiLoCo's rounds")
    parser.add_argument("--few", type=int, default=10, help="steps of exact runs below 50 Mbit/s")
    arguments = parser.parse_args()
    if min(arguments.steps, arguments.few, arguments.every) < 5:
        parser.error("--steps, --few and --every must be at least 5")
    cells = ((arguments.world, r, {"rates": r}) for r in arguments.rates.split(";"))
    return run(arguments, cells, compare, line, ("links", "way"))


def compare(ranks: Ranks, arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Trains in all ways; yields one row per way."""
    mesh = jax.make_mesh((ranks.world,), ("data",))
    text, held_out = corpus.load()
    batches = corpus.windows(text, arguments.steps, BATCH, LENGTH, SEED)
    (checks,) = corpus.windows(held_out, 1, 32, LENGTH, SEED)
    graphdef, params = nnx.split(Transformer(WIDTH, LAYERS, LENGTH, nnx.Rngs(SEED)))
    for way, optimizer in ways(arguments.steps, arguments.every).items():
        slow = rig.bits_per_second(arguments.rates) < 50e6 and way == "exact"
        taken = batches[: arguments.few] if slow else batches
        apart = way.startswith("DiLoCo")
        losses, seconds = train_workers(graphdef, params, optimizer, taken, checks, mesh, apart)
        yield {
            "links": arguments.rates,
            "way": way,
            "steps": len(taken),
            "losses": [round(loss, 4) for loss in losses],
            "seconds": [round(x, 3) for x in seconds],
        }


def line(row: dict[str, Any]) -> str:
    ends = f"loss {row['losses'][-1]:.3f} after {row['seconds'][-1]:.0f} s"
    return f"{row['links']}, {row['way']}: {ends} and {row['steps']} steps"


if __name__ == "__main__":
    sys.exit(main())
