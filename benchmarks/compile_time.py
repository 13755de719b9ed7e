"""Trace and compile time of psum_compressed over a tree of many leaves, against lax.psum's.

    python benchmarks/compile_time.py --leaves 1000

The two are interleaved, and JAX's caches are cleared before each measurement. `ratio` is the
compressed time divided by psum's time in the same repeat: the median (and quartiles).
"""

import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

import cgx_jax
import measure

WORLD = 8
METHODS = {
    "psum": lambda tree: lax.psum(tree, "ranks"),
    "compressed": lambda tree: cgx_jax.psum_compressed(tree, "ranks", exchange="xla"),
}


def compile_seconds(reduce: Callable[[Any], Any], tree: Any, mesh: jax.sharding.Mesh) -> np.ndarray:
    """Seconds to trace and lower, and to compile, `reduce` of a tree that differs by rank."""
    jax.clear_caches()

    def step(tree):
        return reduce(jax.tree.map(lambda x: lax.pcast(x, "ranks", to="varying"), tree))

    function = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=P(), out_specs=P()))
    start = time.perf_counter()
    lowered = function.lower(tree)
    traced = time.perf_counter()
    lowered.compile()
    return np.array([traced - start, time.perf_counter() - traced])


def main() -> int:
    arguments = measure.parser(__doc__, leaves=1000, reps=5).parse_args()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", WORLD)
    mesh = jax.make_mesh((WORLD,), ("ranks",))
    tree = [jax.ShapeDtypeStruct((64, 64), np.float32)] * arguments.leaves

    samples = np.empty((arguments.reps, len(METHODS), 2))
    for rep in range(-1, arguments.reps):  # one round of warm-up
        for method, reduce in enumerate(METHODS.values()):
            samples[rep, method] = compile_seconds(reduce, tree, mesh)
    totals = samples.sum(axis=2)

    rows = []
    print(f"{arguments.leaves} leaves  {'trace s':>8} {'compile s':>9} {'total s':>8}  ratio")
    for i, method in enumerate(METHODS):
        trace, compiled = np.median(samples[:, i], axis=0)
        low, ratio, high = measure.quartiles(totals[:, i] / totals[:, 0])
        total = float(np.median(totals[:, i]))
        print(
            f"{method:>11}  {trace:>8.3f} {compiled:>9.3f} {total:>8.3f}"
            f"  {ratio:.2f} ({low:.2f}-{high:.2f})"
        )
        rows.append(
            {
                "method": method,
                "leaves": arguments.leaves,
                "reps": arguments.reps,
                "trace_seconds": float(trace),
                "compile_seconds": float(compiled),
                "total_seconds": total,
                "ratio": [low, ratio, high],
            }
        )
    measure.write_json(arguments.json, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
