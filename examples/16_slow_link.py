"""Trains a small language model over a slow link: with an exact and with a 4-bit all-reduce.

Two processes of this machine train the model of 02_language_model.py over a link of 100 Mbit/s, and
then over one of 1 Gbit/s. All runs start from the same parameters and see the same batches. The
table has the step time and how much faster 4 bits are. demo/slow_link.png shows loss against time.
The link needs Linux but no root. Where it cannot run, the program prints what is missing.

Expected, in 1 to 2 minutes on 2 cores: 4-bit steps are about 4 times as fast at 100 Mbit/s and
about 2.5 times as fast at 1 Gbit/s. They send all leaves together; `lax.pmean` does not. The final
losses of both runs agree within 2 % (otherwise the exit code is 1).
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

import jax
import numpy as np
import optax
from flax import nnx

import cgx_jax
import corpus
import report
from cgx_jax.commands import rig
from model import Transformer
from training import Run, adamw, data_parallel_step, ring_bytes, train

RATES = {"100mbit": "100 Mbit/s", "1gbit": "1 Gbit/s"}
LENGTH = 128
BATCH = 4
SEED = 0
TOLERANCE = 0.02


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--out", type=Path, default=Path("demo"), help="folder of the chart")
    parser.add_argument("--results", type=Path, help=argparse.SUPPRESS)  # only ranks get it
    return parser.parse_args()


def train_over_the_link(steps: int, results: Path) -> None:
    """Trains both ways in one of the two processes; process 0 writes the runs to `results`."""
    rig.initialize()
    mesh = jax.make_mesh((jax.device_count(),), ("data",))
    text, _ = corpus.load()
    batches = corpus.windows(text, steps, BATCH, LENGTH, SEED)
    graphdef, params = nnx.split(Transformer(128, 4, LENGTH, nnx.Rngs(SEED)))
    plan = cgx_jax.Plan.build(params, cgx_jax.Quantize(bits=4, rotation=True))
    exact = optax.stateless(lambda grads, _: jax.lax.pmean(grads, "data"))
    compressed = cgx_jax.sync_gradients(
        "data", plan, precondition=cgx_jax.SecondMoment(), exchange="xla"
    )
    world = jax.device_count()
    runs = []
    for name, mean, sent_bytes in (
        ("exact", exact, ring_bytes(params, world)),
        ("4-bit", compressed, plan.wire_bytes(world)),
    ):
        optimizer = optax.chain(mean, adamw(steps))
        step = data_parallel_step(graphdef, optimizer, mesh)
        _, losses, seconds = train(step, params, optimizer.init(params), batches, mesh)
        runs.append((name, losses.tolist(), sent_bytes, seconds))
    if jax.process_index() == 0:
        results.write_text(json.dumps(runs))


def main() -> int:
    arguments = parse_arguments()
    if rig.joined():
        train_over_the_link(arguments.steps, arguments.results)
        return 0
    if problem := rig.missing():
        print(f"the part over a slow link is left out: {problem}")
        return 0
    by_link = {}
    with tempfile.TemporaryDirectory() as folder:
        for rate, link in RATES.items():
            print(f"training twice over {link} ...", flush=True)
            results = Path(folder) / f"{rate}.json"
            command = [sys.executable, __file__, "--steps", str(arguments.steps)]
            if code := rig.run(2, rate, [*command, "--results", str(results)]):
                return code
            by_link[link] = [
                Run(name, np.array(losses), float("nan"), sent_bytes, seconds)
                for name, losses, sent_bytes, seconds in json.loads(results.read_text())
            ]
    report.print_links(by_link)
    chart = arguments.out / "slow_link.png"
    report.draw_links(by_link, chart)
    print(f"chart: {chart}")

    gap = max(abs(b.final_loss / a.final_loss - 1) for a, b in by_link.values())
    passed = gap <= TOLERANCE  # also False when a loss is NaN
    print(f"the final losses differ by {gap:.2%}, at most {TOLERANCE:.0%} allowed")
    print("ok" if passed else "FAILED")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
