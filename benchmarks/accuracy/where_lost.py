"""Which leaves and which steps cause the cost of compression in the recurrent language models.

    python benchmarks/accuracy/where_lost.py

The baseline is the recommended setting (rotated, `SecondMoment`) at 3 bits, where the cost is large
enough to be divided. Each further run reduces a part exactly: one layer's matrices, or all leaves
in the first tenth of the steps. Results are written after every run. Runs whose results are already
in the file are skipped. Needs the packages of the extra `accuracy`.
"""

import sys
from typing import Any

import jax
import jax.numpy as jnp
import optax
from configurations import MOMENT, Configuration
from run import RESULTS, WORLD, Trainer
from tasks import TASKS

import measure
import tables
from cgx_jax import Quantize, Rule, Rules
from cgx_jax.compressors import Identity

NAMES = ("recurrent", "words")
SEEDS = range(5)
COMPRESSOR = Quantize(3, rotation=True)
LAYERS = {"embedding": "token", "recurrent layer": "input|recurrent", "output layer": "logits"}
NOTHING, FIRST_STEPS = "nothing", "first tenth of the steps"
OUT = RESULTS / "where_lost.jsonl"


def exact_in(path: str) -> Configuration:
    """Compresses all leaves except those under `path`."""
    rule = Rule(Identity(), path=f"(^|/)({path})(/|$)")
    return Configuration(lambda _: Rules([rule], COMPRESSOR), precondition=MOMENT)


class ExactAtFirst(Trainer):
    """Compresses all leaves, but only in the last nine tenths of the steps."""

    def _reduction(self, configuration: Configuration) -> optax.GradientTransformation:
        compressed = super()._reduction(configuration)

        def init(params: Any) -> Any:
            return jnp.zeros((), jnp.int32), compressed.init(params)

        def update(grads: Any, state: Any, params: Any = None) -> Any:
            step, inner = state
            exact = jax.lax.pmean(grads, "data")
            means, inner = compressed.update(grads, inner, params)
            first = step < self.steps // 10
            means = jax.tree.map(lambda a, b: jnp.where(first, a, b), exact, means)
            return means, (step + 1, inner)

        return optax.GradientTransformation(init, update)


def trainer(task: str, exact: str) -> Trainer:
    """Returns the trainer of a task in which the part `exact` is reduced exactly."""
    steps = TASKS[task].steps
    if exact in LAYERS:
        return Trainer(TASKS[task], exact_in(LAYERS[exact]), steps)
    kind = ExactAtFirst if exact == FIRST_STEPS else Trainer
    return kind(TASKS[task], Configuration(lambda _: COMPRESSOR, precondition=MOMENT), steps)


def main() -> int:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", WORLD)
    rows: list[dict[str, Any]] = tables.rows("accuracy/where_lost") if OUT.exists() else []
    for task in NAMES:
        for exact in (NOTHING, *LAYERS, FIRST_STEPS):
            seen = {r["seed"] for r in rows if (r["task"], r["exact"]) == (task, exact)}
            if seen.issuperset(SEEDS):
                continue
            run = trainer(task, exact)
            for seed in sorted(set(SEEDS) - seen):
                row = {"task": task, "exact": exact, **run.run(seed)}
                rows.append(row)
                measure.write_json(OUT, rows)
                print(f"{task}, {exact} exact, seed {seed}: {row['held_out_loss']:.4f}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
