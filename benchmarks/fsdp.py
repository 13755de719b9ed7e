"""What quantized weights and gradients cost sharded training: losses of example 03 over five seeds.

    python benchmarks/fsdp.py --json benchmarks/results/fsdp.jsonl

A seed draws the initial weights and the batches, which are the same for all ways. Prints the mean
and the standard deviation of the final loss (the mean of the last tenth of the steps), and the
difference to exact training in standard deviations of the exact runs.
"""

import importlib
import sys
from pathlib import Path

import jax
import numpy as np
from flax import nnx

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

import cgx_jax
import corpus
import measure
from cgx_jax.compressors import NonUniform, ShiftedLattice
from model import Transformer

fsdp = importlib.import_module("03_fsdp")
LATTICE = ShiftedLattice(8)
WAYS = {  # compressors of weights and gradients, and options of `scatter_gradients`
    "exact": (cgx_jax.Identity(), cgx_jax.Identity(), {}),
    "8 and 4 bits, in units": (
        LATTICE,
        cgx_jax.Quantize(4),
        {"precondition": cgx_jax.SecondMoment()},
    ),
    "8 and 4 bits, stochastic": (LATTICE, cgx_jax.Quantize(4, rounding="stochastic"), {}),
    "8 and 4 bits, nearest": (cgx_jax.Quantize(8), cgx_jax.Quantize(4, rotation=True), {}),
    "5 and 4 bits": (ShiftedLattice(5), cgx_jax.Quantize(4), {}),
    "5 and 4 bits, learned levels": (NonUniform(5, "fitted"), NonUniform(4, "fitted"), {}),
}


def final_losses(mesh, seeds: int, steps: int) -> dict[str, list[float]]:
    """Returns each way's final losses, one per seed; `mesh` has the axis "data"."""
    text, _ = corpus.load()
    last = max(1, steps // 10)
    finals: dict[str, list[float]] = {way: [] for way in WAYS}
    for seed in range(seeds):
        batches = corpus.windows(text, steps, 2 * mesh.size, fsdp.LENGTH, seed=seed)
        graphdef, params = nnx.split(Transformer(64, 1, fsdp.LENGTH, nnx.Rngs(seed)))
        for way, (weights, gradients, options) in WAYS.items():
            losses = fsdp.train(graphdef, params, batches, mesh, weights, gradients, **options)
            finals[way].append(float(losses[-last:].mean()))
            print(f"seed {seed}, {way}: {finals[way][-1]:.4f}", flush=True)
    return finals


def main() -> None:
    parser = measure.parser(__doc__, seeds=5, steps=60)
    arguments = parser.parse_args()
    if arguments.seeds < 2:
        parser.error(f"--seeds={arguments.seeds} has no deviation; pass 2 or more")
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", fsdp.WORLD)
    finals = final_losses(jax.make_mesh((fsdp.WORLD,), ("data",)), arguments.seeds, arguments.steps)
    exact = finals["exact"]
    rows = []
    for way, values in finals.items():
        mean, deviation = np.mean(values), np.std(values, ddof=1)
        off = (mean - np.mean(exact)) / np.std(exact, ddof=1)
        rows.append(
            {
                "way": way,
                "steps": arguments.steps,
                "seeds": arguments.seeds,
                "final_loss": float(mean),
                "deviation": float(deviation),
                "deviations_from_exact": float(off),
            }
        )
        print(f"{way}: {mean:.4f}, deviation {deviation:.4f}, {off:+.2f} deviations from exact")
    measure.write_json(arguments.json, rows)


if __name__ == "__main__":
    main()
