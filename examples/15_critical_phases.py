"""Trains with few bits, with many, and with policies that use few bits where that does no harm.

A small network predicts the next byte of the standard library's source from the 8 bytes before it.
Its learning rate falls to a tenth after two thirds of the steps. All runs start from the same
parameters and see the same batches:

    2, 3, 8 bits     the same width throughout; 3 bits send about as much as Accordion
    Accordion        8 bits while the norm of the gradients changes fast, otherwise 2 bits
    LeastTime        per leaf, the widest width that costs no more time, by a profile from `tune`

Each line has the mean bits per value, the bytes that a rank sent in all, and the training loss (the
mean of the last tenth). With --seeds 2 or more, these are means over the seeds, and the loss has
its standard deviation. demo/critical_phases.png shows the first seed's losses and bits per step.

Expected, in about half a minute on one core: the norm changes by a third after the start and by at
most a tenth later, even where the learning rate falls. Accordion therefore takes 8 bits for 66
steps, and then 2 bits. Its loss is nearer to that of 2 bits than to that of 8 bits. 3 bits reach
the loss of 8 bits with about as many bytes as Accordion. LeastTime depends on the machine: where
no data crosses a network, it takes 8 bits.

    2 bits: 2.12 bits per value, 26.6 MB, loss 2.0467
    3 bits: 3.12 bits per value, 39.2 MB, loss 1.9834
    8 bits: 8.12 bits per value, 101.8 MB, loss 1.9927
    Accordion: 2.92 bits per value, 36.7 MB, loss 2.0371
"""

import argparse
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import cgx_jax
import corpus
import report
from cgx_jax.policies import Accordion, LeastTime, Uniform

WORLD = 4
CONTEXT = 8  # bytes that the network sees
WIDTH = 32
HIDDEN = 256
FEW, MANY = cgx_jax.Quantize(2), cgx_jax.Quantize(8)
LOOKS = 16  # how often Accordion looks at the norm in a run


class Result(NamedTuple):
    """One run: the loss and bits per value of each step, and the bytes that a rank sent in all."""

    losses: np.ndarray
    bits: np.ndarray
    sent_bytes: int

    @property
    def final_loss(self) -> float:
        return float(self.losses[-max(1, self.losses.size // 10) :].mean())


def initial_params(seed: int) -> dict[str, jax.Array]:
    keys = jax.random.split(jax.random.key(seed), 3)
    shapes = {
        "embedding": (corpus.VOCABULARY, WIDTH),
        "hidden": (CONTEXT * WIDTH, HIDDEN),
        "logits": (HIDDEN, corpus.VOCABULARY),
    }
    return {
        name: jax.random.normal(key, shape) / shape[0] ** 0.5
        for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }


def loss_of(params: dict[str, jax.Array], text: jax.Array) -> jax.Array:
    """Mean cross-entropy in nats per byte, of the last byte of windows i32[batch, CONTEXT + 1]."""
    seen = params["embedding"][text[:, :-1]].reshape(len(text), -1)
    logits = jax.nn.relu(seen @ params["hidden"]) @ params["logits"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, text[:, -1]).mean()


class Training:
    """A compiled step under a policy; `run` trains from the start with any seed."""

    def __init__(self, policy: Any, mesh: jax.sharding.Mesh, steps: int):
        self.policy, self.mesh = policy, mesh
        rate = optax.piecewise_constant_schedule(0.3, {drop_of(steps): 0.1})
        reduce = cgx_jax.sync_gradients(
            "data",
            policy,
            mesh=mesh,
            exchange="xla",  # "auto" sums a model this small exactly
        )
        self.optimizer = optax.chain(reduce, optax.sgd(rate, momentum=0.9))

        def step(state, text):
            params, opt_state = state
            varying = jax.tree.map(lambda x: jax.lax.pcast(x, "data", to="varying"), params)
            loss, grads = jax.value_and_grad(loss_of)(varying, text)
            updates, opt_state = self.optimizer.update(grads, opt_state, params)
            return (optax.apply_updates(params, updates), opt_state), jax.lax.pmean(loss, "data")

        sharded = jax.shard_map(step, mesh=mesh, in_specs=(P(), P("data")), out_specs=(P(), P()))
        self.adapts = isinstance(policy, cgx_jax.Adaptive)
        self.step = (policy.jit if self.adapts else jax.jit)(sharded)
        jax.eval_shape(self.optimizer.init, initial_params(0))  # shows the policy the tree
        self.fresh = policy.state_dict() if self.adapts else None

    def run(self, batches: np.ndarray, seed: int) -> Result:
        if self.adapts:
            self.policy.load_state_dict(self.fresh)
        params = initial_params(seed)
        state = jax.device_put((params, self.optimizer.init(params)), NamedSharding(self.mesh, P()))
        losses, bits, sent = [], [], 0
        for batch in batches:
            state, loss = self.step(
                state, jax.device_put(batch, NamedSharding(self.mesh, P("data")))
            )
            losses.append(float(loss))
            plan = self.policy.plan if self.adapts else cgx_jax.Plan.build(params, self.policy)
            sent += plan.wire_bytes(WORLD)
            bits.append(bits_per_value(plan))
        return Result(np.array(losses), np.array(bits), sent)


def drop_of(steps: int) -> int:
    """The step at which the learning rate falls to a tenth."""
    return 2 * steps // 3


def bits_per_value(plan: cgx_jax.Plan) -> float:
    """Payload bits per value, including the buckets' ranges."""
    pairs = zip(plan.leaves, plan.compressors, strict=True)
    bits = sum(c.wire_bits(leaf.shape, leaf.dtype) for leaf, c in pairs)
    return bits / sum(leaf.size for leaf in plan.leaves)


def policies(mesh: jax.sharding.Mesh, steps: int) -> dict[str, Any]:
    profile = cgx_jax.tune(mesh, "data", sizes=[1 << 16, 1 << 19], budget_seconds=5)
    every = max(1, steps // LOOKS)
    return {
        "2 bits": Uniform(FEW),
        "3 bits": Uniform(cgx_jax.Quantize(3)),
        "8 bits": Uniform(MANY),
        "Accordion": cgx_jax.Adaptive(
            Accordion(threshold=0.5),
            base=Uniform(MANY),
            candidates=(FEW, MANY),
            warmup=every,
            every=every,
            sample_every=1,
        ),
        "LeastTime": cgx_jax.Adaptive(
            LeastTime(profile),
            base=Uniform(MANY),
            candidates=[cgx_jax.Quantize(bits) for bits in (2, 4, 8)],
            warmup=every,
            every=steps,
            sample_every=1,
        ),
    }


def print_looks(policy: cgx_jax.Adaptive) -> None:
    """Prints Accordion's phases: the norm at each look, its relative change, and the bits."""
    before = None
    for look in policy.history:
        change = "" if before is None else f"{abs(look.norm - before) / before:8.2f}"
        print(
            f"step {look.step:>4}  norm {look.norm:7.3f}  change {change:>8}  {look.bits[0]} bits"
        )
        before = look.norm


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=480)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("demo"), help="folder of the chart")
    arguments = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", WORLD)
    mesh = jax.make_mesh((WORLD,), ("data",))
    text, _ = corpus.load()

    results: dict[str, list[Result]] = {}
    for name, policy in policies(mesh, arguments.steps).items():
        training = Training(policy, mesh, arguments.steps)
        for seed in range(arguments.seeds):
            batches = corpus.windows(text, arguments.steps, 64 * WORLD, CONTEXT, seed)
            results.setdefault(name, []).append(training.run(batches, seed))
        if name == "Accordion":
            print_looks(policy)

    for name, runs in results.items():
        losses = np.array([r.final_loss for r in runs])
        spread = f" ± {losses.std(ddof=1):.4f}" if len(runs) > 1 else ""
        bits = np.mean([r.bits.mean() for r in runs])
        sent = np.mean([r.sent_bytes for r in runs]) / 1e6
        print(f"{name}: {bits:.2f} bits per value, {sent:.1f} MB, loss {losses.mean():.4f}{spread}")
    chart = arguments.out / "critical_phases.png"
    first = {name: (runs[0].losses, runs[0].bits) for name, runs in results.items()}
    report.draw_phases(first, drop_of(arguments.steps), chart)
    print(f"chart: {chart}")
    accordion = results["Accordion"][0]
    phases = {round(b) for b in accordion.bits}
    between = (
        results["2 bits"][0].sent_bytes < accordion.sent_bytes < results["8 bits"][0].sent_bytes
    )
    if not (len(phases) == 2 and between):
        raise SystemExit("FAILED: expected phases of 2 and of 8 bits, and bytes between theirs")
    print("ok")


if __name__ == "__main__":
    main()
