"""What compression harms under Adam: its first moment, its second, or both?

    python benchmarks/accuracy/feedback_under_adam.py

Adam divides the mean of gradients by the root of the mean of their squares. Every run keeps both
moments twice: of the exact mean, and of the mean after compression ("sent"). The update takes each
moment from one of the two. "sent, sent" is training as usual. In "exact, exact" compression is only
measured. The other pairs show the effect of one moment alone. "rescaled" is the second moment of
the sent mean, scaled leaf by leaf to the size of the exact one. 1-bit Adam (Tang et al., ICML 2021)
holds that Adam does not tolerate errors in the second moment. Compression is plain, with error
feedback, or preconditioned. Needs the packages of the extra `accuracy`.
"""

import argparse
import itertools
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from run import RESULTS, WORLD, measure
from tasks import TASKS, schedule

import cgx_jax

SOURCES = ("exact", "sent", "rescaled")
FEEDS = (  # sources of the first and of the second moment
    ("exact", "exact"),
    ("exact", "sent"),
    ("sent", "exact"),
    ("sent", "rescaled"),
    ("sent", "sent"),
)
# Per task: the peak learning rate, the norm that gradients are clipped to, and the weight decay.
OPTIMIZERS = {"language": (3e-3, 1.0, 0.01), "autoencoder": (2e-3, np.inf, 0.0)}
STEPS = {"language": 100, "autoencoder": 200}
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "feedback": {"memory": cgx_jax.ErrorFeedback()},
    "preconditioned": {"precondition": cgx_jax.SecondMoment()},
}
B1, B2, EPSILON = 0.9, 0.999, 1e-8
# No Adam step is larger than this (Kingma and Ba, ICLR 2015) if both moments come from the same
# gradients. If they do not, it can be: where the exact gradient is 0, the sent one may not be.
LARGEST = (1 - B1) / (1 - B2) ** 0.5
MEASURED = ("root_v", "error_of_m", "step")
Moments = tuple[Any, Any]


class State(NamedTuple):
    params: Any
    reduction: Any
    exact: Moments
    sent: Moments


class Trainer:
    """A task at one width, in one of WAYS; `run` chooses what feeds the moments."""

    def __init__(self, task: str, bits: int, way: str, steps: int) -> None:
        self.task, self.steps = TASKS[task], steps
        peak, self.clip, self.decay = OPTIMIZERS[task]
        self.rate = schedule(peak, steps)
        self.mesh = Mesh(np.array(jax.devices()), ("data",))
        quantize = cgx_jax.Quantize(bits)
        options = WAYS[way] | {"mesh": self.mesh, "exchange": "xla"}  # compresses every size
        self.tx = cgx_jax.sync_gradients("data", quantize, **options)
        self.graphdef, params = self.task.initial(0)
        plan = cgx_jax.Plan.build(params, quantize)
        self.lossy = [i for i, c in enumerate(plan.compressors) if not c.lossless]
        self.begin = jax.jit(self._begin)
        specs = cgx_jax.state_specs(jax.eval_shape(self._begin, params), "data")
        sharded = jax.shard_map(
            self._step,
            mesh=self.mesh,
            in_specs=(specs, P("data"), P(), P()),
            out_specs=(specs, P()),
        )
        self.step = jax.jit(sharded, donate_argnums=0)
        self.loss = jax.jit(lambda p, *b: self.task.metrics(nnx.merge(self.graphdef, p), *b))

    def _begin(self, params: Any) -> State:
        zeros = optax.tree.zeros_like(params)
        return State(params, self.tx.init(params), (zeros, zeros), (zeros, zeros))

    def _moments(self, old: Moments, mean: Any) -> Moments:
        scale = jnp.minimum(1, self.clip / optax.tree.norm(mean))
        mean = optax.tree.scale(scale, mean)
        return (
            jax.tree.map(lambda m, g: B1 * m + (1 - B1) * g, old[0], mean),
            jax.tree.map(lambda v, g: B2 * v + (1 - B2) * g**2, old[1], mean),
        )

    def _step(self, state: State, batch: Any, i: Any, sources: Any) -> tuple[State, Any]:
        """Takes a step; `sources` i32[2] are the indices in SOURCES of the two moments' sources."""
        varying = jax.tree.map(lambda p: lax.pcast(p, "data", to="varying"), state.params)
        grads = jax.grad(lambda p: self.task.loss(nnx.merge(self.graphdef, p), *batch))(varying)
        mean, reduction = self.tx.update(grads, state.reduction)
        sent = self._moments(state.sent, mean)
        exact = self._moments(state.exact, lax.pmean(grads, "data"))

        def update(p: jax.Array, m: Moments, v: Moments) -> jax.Array:
            ratio = jnp.sqrt(v[0]).mean() / jnp.maximum(jnp.sqrt(v[1]).mean(), 1e-30)
            first = lax.select_n(sources[0], *m, m[1]) / (1 - B1 ** (i + 1))
            second = lax.select_n(sources[1], *v, v[1] * ratio**2) / (1 - B2 ** (i + 1))
            return jnp.clip(first / (jnp.sqrt(second) + EPSILON), -LARGEST, LARGEST)

        both = zip(exact, sent, strict=True)
        updates = jax.tree.map(
            lambda p, *x: update(p, x[:2], x[2:]), state.params, *itertools.chain(*both)
        )
        params = jax.tree.map(
            lambda p, u: p - self.rate(i) * (u + self.decay * p), state.params, updates
        )
        m, v = (tuple(self._lossy(x) for x in pair) for pair in zip(exact, sent, strict=True))
        found = {
            "root_v": jnp.sqrt(v[1]).mean() / jnp.sqrt(v[0]).mean(),
            "error_of_m": jnp.linalg.norm(m[1] - m[0]) / jnp.linalg.norm(m[0]),
            "step": jnp.sqrt(jnp.square(self._lossy(updates)).mean()),
        }
        return State(params, reduction, exact, sent), found

    def _lossy(self, tree: Any) -> jax.Array:
        """All values of the leaves that are compressed."""
        leaves = jax.tree.leaves(tree)
        return jnp.concatenate([leaves[i].ravel() for i in self.lossy])

    def run(self, seed: int, feeds: tuple[str, str]) -> dict[str, float]:
        """Returns the held-out loss, and the mean of each of MEASURED after the warm-up."""
        _, params = self.task.initial(seed)
        state = self.begin(jax.device_put(params, NamedSharding(self.mesh, P())))
        batches = self.task.batches(self.steps, seed)
        sources = np.array([SOURCES.index(feed) for feed in feeds], np.int32)
        rows = []
        for i in range(self.steps):
            batch = tuple(x[i] for x in batches)
            batch = jax.device_put(batch, NamedSharding(self.mesh, P("data")))
            state, found = self.step(state, batch, np.float32(i), sources)
            rows.append([float(found[k]) for k in MEASURED])
        params = jax.device_get(state.params)
        held_out = zip(*self.task.held_out(), strict=True)
        loss = np.mean([self.loss(params, *b)["loss"] for b in held_out])
        means = np.mean(rows[self.steps // 10 :], axis=0).tolist()
        return {"held_out_loss": float(loss), **dict(zip(MEASURED, means, strict=True))}


def print_table(rows: list[dict[str, Any]]) -> None:
    """Prints means over seeds; losses also relative to exact training with the same seed."""
    exact = {
        (r["task"], r["seed"]): r["held_out_loss"]
        for r in rows
        if r["second_moment"] == "exact" and r["first_moment"] == "exact"
    }
    print("| task | bits | way | moments | loss | worse by | root v | error of m | step |")
    print("|" + " --- |" * 9)
    keys = ("task", "bits", "way", "first_moment", "second_moment")
    for key, group in itertools.groupby(rows, lambda r: [r[k] for k in keys]):
        runs = list(group)
        worse = [r["held_out_loss"] - exact[r["task"], r["seed"]] for r in runs]
        mean = {k: np.mean([r[k] for r in runs]) for k in ("held_out_loss", *MEASURED)}
        task, bits, way, *feeds = key
        print(
            f"| {task} | {bits} | {way} | {', '.join(feeds)} "
            f"| {mean['held_out_loss']:.4f} | {np.mean(worse):+.4f} ± {np.std(worse, ddof=1):.4f} "
            f"| {mean['root_v']:.2f} | {mean['error_of_m']:.2f} | {mean['step']:.2f} |"
        )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--task", nargs="+", choices=OPTIMIZERS, default=list(OPTIMIZERS))
    parser.add_argument("--bits", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--way", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--seeds", type=int, default=3, help="how many, 2 or more")
    parser.add_argument("--steps", type=int, help=f"default: {STEPS}")
    parser.add_argument("--json", type=Path, default=RESULTS / "feedback_under_adam.jsonl")
    return parser.parse_args()


def main() -> int:
    arguments = parse_arguments()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", WORLD)
    rows = []
    for task, bits, way in itertools.product(arguments.task, arguments.bits, arguments.way):
        start = time.perf_counter()
        steps = arguments.steps or STEPS[task]
        trainer = Trainer(task, bits, way, steps)
        for feeds, seed in itertools.product(FEEDS, range(arguments.seeds)):
            row = {"task": task, "bits": bits, "way": way, "seed": seed, "steps": steps}
            row |= {"first_moment": feeds[0], "second_moment": feeds[1]}
            rows.append(row | trainer.run(seed, feeds))
        seconds = time.perf_counter() - start
        said = f"{task}, {bits} bits, {way}: {seconds:.0f} s"
        print(said, file=sys.stderr, flush=True)
    print_table(rows)
    measure.write_json(arguments.json, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
