"""Seconds to trace and compile a training step, and a reduction alone, against the exact ones.

    python benchmarks/compile_time.py --leaves 10,100,300 --reps 3
    python benchmarks/compile_time.py --leaves 100 --ways 'QSGD|TopK'

Leaves have five shapes, 64 to 12,288 values, in turn. The ways take turns, in an order that is
drawn anew, and JAX's caches are cleared before each. `ratio` is a way's time divided by that of the
exact step or of `lax.psum` in the same turn: the median (and quartiles).
"""

import re
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import cgx_jax
import measure
from cgx_jax import ErrorFeedback, Quantize, SecondMoment, compressors
from cgx_jax.transforms import MomentumCorrection

WORLD = 4
SHAPES = [(64, 64), (64,), (128, 64), (32, 128), (64, 192)]
STEP, REDUCTION = "exact step", "lax.psum"  # what others are compared with


def steps(mesh: Mesh) -> dict[str, optax.GradientTransformation]:
    """Returns what precedes Adam in the chain, by name."""
    rotated = Quantize(4, rotation=True)

    def sync(code: Any = rotated, **options: Any) -> optax.GradientTransformation:
        return cgx_jax.sync_gradients("ranks", code, mesh=mesh, exchange="xla", **options)

    return {
        STEP: optax.stateless(lambda grads, _: lax.pmean(grads, "ranks")),
        "4 bits": sync(Quantize(4)),
        "4 bits, rotated": sync(),
        "ErrorFeedback()": sync(memory=ErrorFeedback()),
        "MomentumCorrection()": sync(memory=MomentumCorrection()),
        "SecondMoment()": sync(precondition=SecondMoment()),
        "SecondMoment(), ErrorFeedback()": sync(
            memory=ErrorFeedback(), precondition=SecondMoment()
        ),
        "exact leaves, ErrorFeedback()": sync(cgx_jax.Identity(), memory=ErrorFeedback()),
    }


def reductions() -> dict[str, Callable[[Any], Any]]:
    def reduce(code: Any) -> Callable[[Any], Any]:
        key = jax.random.key(0)
        return lambda tree: cgx_jax.psum_compressed(tree, "ranks", code, exchange="xla", key=key)

    codes = [
        Quantize(4),
        compressors.SignSGD(),
        compressors.TopK(0.1),
        compressors.DGC(0.1),
        compressors.QSGD(),
        compressors.BlockTopK(),
    ]
    return {REDUCTION: lambda tree: lax.psum(tree, "ranks")} | {str(c): reduce(c) for c in codes}


def step_of(reduction: optax.GradientTransformation, params: Any, mesh: Mesh) -> tuple[Any, Any]:
    """Returns a training step and the shapes of its arguments."""
    tx = optax.chain(reduction, optax.adam(1e-3))
    state = jax.eval_shape(tx.init, params)
    specs = cgx_jax.state_specs(state, "ranks")

    def step(params: Any, state: Any, x: jax.Array) -> tuple[Any, Any]:
        def loss(params: Any) -> jax.Array:
            return sum((jax.numpy.sin(p) * x[0]).sum() for p in jax.tree.leaves(params))

        own = jax.tree.map(lambda p: lax.pcast(p, "ranks", to="varying"), params)
        updates, state = tx.update(jax.grad(loss)(own), state, params)
        return optax.apply_updates(params, updates), state

    mapped = jax.shard_map(
        step, mesh=mesh, in_specs=(P(), specs, P("ranks")), out_specs=(P(), specs)
    )
    x = jax.ShapeDtypeStruct((WORLD,), np.float32)
    return jax.jit(mapped, donate_argnums=(0, 1)), (params, state, x)


def reduction_of(reduce: Callable[[Any], Any], params: Any, mesh: Mesh) -> tuple[Any, Any]:
    def call(tree: Any) -> Any:
        return reduce(jax.tree.map(lambda x: lax.pcast(x, "ranks", to="varying"), tree))

    return jax.jit(jax.shard_map(call, mesh=mesh, in_specs=P(), out_specs=P())), (params,)


def seconds(program: tuple[Any, Any]) -> tuple[float, float]:
    """Returns the seconds to trace and lower, and to compile."""
    function, arguments = program
    jax.clear_caches()
    start = time.perf_counter()
    lowered = function.lower(*arguments)
    traced = time.perf_counter()
    lowered.compile()
    return traced - start, time.perf_counter() - traced


def main() -> int:
    parser = measure.parser(__doc__, leaves="10,100,300", reps=3)
    parser.add_argument("--ways", default="", help="only those that match, as a regular expression")
    arguments = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", WORLD)
    mesh = Mesh(np.array(jax.devices()), ("ranks",))
    rng, rows = np.random.default_rng(0), []
    for leaves in map(int, arguments.leaves.split(",")):
        params = {
            f"leaf{i}": jax.ShapeDtypeStruct(SHAPES[i % len(SHAPES)], np.float32)
            for i in range(leaves)
        }
        programs = {n: (STEP, step_of(r, params, mesh)) for n, r in steps(mesh).items()}
        programs |= {n: (REDUCTION, reduction_of(r, params, mesh)) for n, r in reductions().items()}
        chosen = {n for n in programs if re.search(arguments.ways, n)}
        names = [*dict.fromkeys([*(programs[n][0] for n in chosen), *sorted(chosen)])]
        taken = {name: np.empty((arguments.reps, 2)) for name in names}
        seconds(programs[names[0]][1])  # the first compilation of a process does more
        for rep in range(arguments.reps):
            for i in rng.permutation(len(names)):
                taken[names[i]][rep] = seconds(programs[names[i]][1])
        print(f"{leaves} leaves{'':22} {'trace s':>8} {'compile s':>9} {'total s':>8}  ratio")
        for name in sorted(names, key=list(programs).index):
            base, total = programs[name][0], taken[name].sum(axis=1)
            low, ratio, high = measure.quartiles(total / taken[base].sum(axis=1))
            trace, compiled = np.median(taken[name], axis=0)
            print(
                f"{name:>32} {trace:>8.3f} {compiled:>9.3f} {np.median(total):>8.3f}"
                f"  {ratio:.2f} ({low:.2f}-{high:.2f}) x {base}",
                flush=True,
            )
            rows.append(
                {
                    "way": name,
                    "base": base,
                    "leaves": leaves,
                    "reps": arguments.reps,
                    "trace_seconds": float(trace),
                    "compile_seconds": float(compiled),
                    "total_seconds": float(np.median(total)),
                    "ratio": [low, ratio, high],
                }
            )
    measure.write_json(arguments.json, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
