"""Trains with few bits, with many, and with few where Accordion finds that they do no harm.

    python benchmarks/critical_phases.py --json benchmarks/results/critical_phases.jsonl

A small network predicts the next byte of the standard library's source from the 8 bytes before it.
Its learning rate falls to a tenth after two thirds of the steps. All runs of a seed start from the
same parameters and see the same batches. Accordion takes 8 bits while the norm of the gradients
changes fast, and otherwise 2. Each line has the mean bits per value, the bytes that a rank sends in
all, and the training loss (the mean of the last tenth of the steps), as means over the seeds.
"""

import sys
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

sys.path.append(str(Path(__file__).resolve().parents[1] / "examples"))

import cgx_jax
import corpus
import measure
from cgx_jax.policies import Accordion, Uniform

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
        rate = optax.piecewise_constant_schedule(0.3, {2 * steps // 3: 0.1})
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


def bits_per_value(plan: cgx_jax.Plan) -> float:
    """Payload bits per value, including the buckets' ranges."""
    pairs = zip(plan.leaves, plan.compressors, strict=True)
    bits = sum(c.wire_bits(leaf.shape, leaf.dtype) for leaf, c in pairs)
    return bits / sum(leaf.size for leaf in plan.leaves)


def policies(steps: int) -> dict[str, Any]:
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
    }


def main() -> None:
    arguments = measure.parser(__doc__, steps=480, seeds=5).parse_args()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", WORLD)
    mesh = jax.make_mesh((WORLD,), ("data",))
    text, _ = corpus.load()
    rows = []
    for name, policy in policies(arguments.steps).items():
        training = Training(policy, mesh, arguments.steps)
        runs = []
        for seed in range(arguments.seeds):
            batches = corpus.windows(text, arguments.steps, 64 * WORLD, CONTEXT, seed)
            runs.append(training.run(batches, seed))
        losses = np.array([r.final_loss for r in runs])
        bits = float(np.mean([r.bits.mean() for r in runs]))
        sent = float(np.mean([r.sent_bytes for r in runs]))
        rows.append({"way": name, "bits": bits, "sent_bytes": sent, "losses": losses.tolist()})
        print(f"{name}: {bits:.2f} bits per value, {sent / 1e6:.1f} MB, loss {losses.mean():.4f}")
    measure.write_json(arguments.json, rows)


if __name__ == "__main__":
    main()
