"""Trains with bit widths that follow the gradients, and resumes from a checkpoint, bit for bit.

sync_gradients comes first in the optimizer's chain, so the optimizer state holds what a checkpoint
needs: the statistics from which the policy chooses widths, and the second moments. Gradients are
compressed in units of the roots of these moments, because Adam divides by them.
policy.jit takes the place of jax.jit. One run trains without a break. The other resumes from its
checkpoint with a new policy and optimizer, as a new process would. Their losses must be equal.
policy.metrics() gives the widths of every step, of which it draws a chart.

Expected: after a warm-up at 8 bits, every leaf gets its own width. All leaves together take at most
3.2 bits per value. The loss falls from about 6.3 to below 3.3 nats per byte. The last lines are

    bits per value: 8.12 before, 3.17 after
    loss: 6.281 at first, 2.659 at last
    losses after the checkpoint are the same, bit for bit: True
    ok
"""

import argparse
import json
import tempfile
from pathlib import Path

import jax
import optax
import orbax.checkpoint as ocp
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import cgx_jax
import corpus
import report
from model import Transformer
from training import adamw, data_parallel_step

WORLD, LENGTH = 8, 64  # ranks, and bytes per window
BUDGET = 3.2  # bits per value, including the range of each bucket


class Training:
    """A model, its optimizer and its policy, as a process that has just started has them."""

    def __init__(self, steps: int):
        mesh = jax.make_mesh((WORLD,), ("data",))
        # For a run of thousands of steps, keep the defaults of the last three options.
        self.policy = cgx_jax.Adaptive(
            cgx_jax.policies.LeastError(bits_per_value=BUDGET),
            base=cgx_jax.policies.Uniform(cgx_jax.Quantize(bits=8, rotation=True)),
            candidates=[cgx_jax.Quantize(bits, rotation=True) for bits in range(1, 9)],
            warmup=steps // 4,
            every=steps // 2,
            sample_every=2,
        )
        how = {"precondition": cgx_jax.SecondMoment()}
        optimizer = optax.chain(
            # "auto" would sum a model this small exactly.
            cgx_jax.sync_gradients("data", self.policy, **how, mesh=mesh, exchange="xla"),
            adamw(steps),  # clips the mean, which is the same on every rank
        )
        graphdef, params = nnx.split(Transformer(64, 1, LENGTH, nnx.Rngs(0)))
        state = [params, optimizer.init(params)]
        self.state = jax.device_put(state, cgx_jax.state_shardings(state, "data", mesh))
        self.metrics: list[dict[str, float | str]] = []  # of each step
        self.batches = NamedSharding(mesh, P("data"))
        specs = cgx_jax.state_specs(state[1], "data")
        self.step = data_parallel_step(graphdef, optimizer, mesh, specs, self.policy.jit)

    def run(self, batches) -> list[float]:
        losses = []
        for batch in batches:
            *self.state, loss = self.step(*self.state, jax.device_put(batch, self.batches))
            losses.append(float(loss))
            self.metrics.append(self.policy.metrics())
        return losses

    def save(self, folder: Path) -> None:
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(folder / "state", self.state)
        (folder / "policy.json").write_text(json.dumps(self.policy.state_dict()))

    def load(self, folder: Path) -> None:
        self.policy.load_state_dict(json.loads((folder / "policy.json").read_text()))
        with ocp.StandardCheckpointer() as checkpointer:
            self.state = checkpointer.restore(folder / "state", self.state)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60, help="12 or more")
    steps = parser.parse_args().steps
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", WORLD)
    text, _ = corpus.load()
    batches = corpus.windows(text, steps, 2 * WORLD, LENGTH, seed=0)
    saved = 2 * steps // 3

    training, resumed = Training(steps), Training(steps)
    with tempfile.TemporaryDirectory() as folder:
        losses = training.run(batches[:saved])
        training.save(Path(folder))
        resumed.load(Path(folder))
    losses += training.run(batches[saved:])
    same = resumed.run(batches[saved:]) == losses[saved:]

    chart = Path("demo/adaptive.png")
    report.draw_widths(training.metrics, chart)
    print(f"bits of every leaf in every step: {chart}")
    was, *_, now = (metrics["cgx/bits_per_value"] for metrics in training.metrics)
    print(f"bits per value: {was:.2f} before, {now:.2f} after")
    print(f"loss: {losses[0]:.3f} at first, {losses[-1]:.3f} at last")
    print(f"losses after the checkpoint are the same, bit for bit: {same}")
    if not (same and now <= BUDGET and losses[-1] < 0.9 * losses[0]):
        raise SystemExit("FAILED: expected equal losses, fewer bits and a falling loss")
    print("ok")


if __name__ == "__main__":
    main()
