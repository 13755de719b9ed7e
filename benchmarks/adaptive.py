"""What adaptive widths and preconditioning cost per step, and compilations over a training run.

Times the same data-parallel step of the example's language model with uniform 4 bits, with the
statistics of `Adaptive` every 10 steps and every step, and with 4 bits preconditioned. Each way
runs in rounds of 20 steps, in an order that changes from round to round. Ratios compare a round to
uniform's time in the same round. Then the script trains with `Adaptive` for --train steps and
counts its compilations. `share_of_10000_steps` is their seconds, without the first one's, divided
by the time of 10,000 measured steps.

    python benchmarks/adaptive.py --json benchmarks/results/adaptive.jsonl
"""

import sys
import time
from pathlib import Path

import jax
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import cgx_jax
import measure

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
import corpus
from model import Transformer, next_byte_loss

WORLD, LENGTH, ROUND = 2, 128, 20


class Training:
    """A model, its state and its compiled step under a policy."""

    def __init__(self, policy, mesh, width, layers, precondition=None):
        model = Transformer(width, layers, LENGTH, nnx.Rngs(0))
        graphdef, params = nnx.split(model)
        reduce = cgx_jax.sync_gradients(
            "data", policy, precondition=precondition, mesh=mesh, exchange="xla"
        )
        tx = optax.chain(reduce, optax.adamw(1e-3))
        state = tx.init(params)
        specs = cgx_jax.state_specs(state, "data")

        def step(params, state, tokens):
            varying = jax.tree.map(lambda x: jax.lax.pcast(x, "data", to="varying"), params)
            loss, grads = jax.value_and_grad(
                lambda p: next_byte_loss(nnx.merge(graphdef, p), tokens)
            )(varying)
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state, jax.lax.pmean(loss, "data")

        sharded = jax.shard_map(
            step, mesh=mesh, in_specs=(P(), specs, P("data")), out_specs=(P(), specs, P())
        )
        compiler = policy.jit if isinstance(policy, cgx_jax.Adaptive) else jax.jit
        self.step = compiler(sharded)
        self.params, self.state = params, state

    def run(self, batches):
        """Returns the seconds per step; the host waits only for the last step."""
        start = time.perf_counter()
        for tokens in batches:
            self.params, self.state, loss = self.step(self.params, self.state, tokens)
        loss.block_until_ready()
        return (time.perf_counter() - start) / len(batches)


def main():
    parser = measure.parser(__doc__, width=128, layers=4, batch=16, rounds=15, train=300)
    arguments = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", WORLD)
    mesh = Mesh(np.array(jax.devices()), ("data",))
    text, _ = corpus.load()
    windows = corpus.windows(text, ROUND, arguments.batch, LENGTH, 0)
    batches = [jax.device_put(w, NamedSharding(mesh, P("data"))) for w in windows]

    make = lambda *args: Training(args[0], mesh, arguments.width, arguments.layers, *args[1:])  # noqa: E731
    uniform = cgx_jax.Quantize(4)
    trainings = {
        "uniform": make(uniform),
        "statistics every 10 steps": make(cgx_jax.Adaptive(warmup=10**9)),
        "statistics every step": make(cgx_jax.Adaptive(warmup=10**9, sample_every=1)),
        "preconditioned": make(uniform, cgx_jax.SecondMoment()),
    }
    for training in trainings.values():
        training.run(batches)
    seconds = {name: [] for name in trainings}
    for number in range(arguments.rounds):
        order = list(trainings)
        for name in order[number % len(order) :] + order[: number % len(order)]:
            seconds[name].append(trainings[name].run(batches))
    of_uniform = {
        name: measure.quartiles(np.divide(own, seconds["uniform"]) - 1)
        for name, own in seconds.items()
        if name != "uniform"
    }
    step_seconds = float(np.median(seconds["uniform"]))

    policy = cgx_jax.Adaptive(warmup=100, every=max(1, arguments.train // 10))
    adaptive = make(policy)
    for _ in range(arguments.train // ROUND):
        adaptive.run(batches)
    again = policy.compile_seconds[1:]
    share = sum(again) / (10_000 * step_seconds)
    metrics = policy.metrics()
    result = {
        "step_seconds": step_seconds,
        "over_uniform": of_uniform,
        "compilations": len(policy.compile_seconds),
        "compile_seconds_again": again,
        "share_of_10000_steps": share,
        "bits_per_value": metrics["cgx/bits_per_value"],
    }
    print(f"a step with uniform 4 bits: {1e3 * step_seconds:.1f} ms, {WORLD} ranks")
    for name, quartiles in of_uniform.items():
        low, middle, high = (100 * x for x in quartiles)
        print(f"{name}: {middle:+.2f} % of it (quartiles {low:+.2f} to {high:+.2f})")
    print(
        f"{len(again)} compilations after the first, {sum(again):.1f} s: {100 * share:.2f} % of a "
        f"run of 10,000 steps; {metrics['cgx/bits_per_value']:.2f} bits per value at the end"
    )
    measure.write_json(arguments.json, [result])


if __name__ == "__main__":
    main()
