"""Seconds to trace and compile a training step, and a reduction alone, against the exact ones.

    python benchmarks/compile_time.py --models 10,100,300,resnet50,gpt2 --reps 3
    python benchmarks/compile_time.py --models 100 --ways 'QSGD|TopK'

A number is that of the leaves of a model that computes next to nothing. They have five shapes, 64
to 12,288 values, in turn. The other models are those of tests/gpu, which need flax. An exact step
whose optimizer keeps one to three more arrays per leaf (`optax.trace`) shows what as much state
costs in plain JAX. The ways take turns, in an order that is drawn anew, and JAX's caches are
cleared before each. `ratio` is a way's time divided by that of the exact step or of `lax.psum` in
the same turn: the median (and quartiles).
"""

import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import cgx_jax
import measure
from cgx_jax import ErrorFeedback, Quantize, SecondMoment, compressors, policies, transforms

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests" / "gpu"))

WORLD = 4
SHAPES = [(64, 64), (64,), (128, 64), (32, 128), (64, 192)]
Program = tuple[Any, Any]  # a jitted function and the shapes of its arguments
# What others are compared with.
STEP, SHARDED, PLAIN, REDUCTION = "exact step", "exact sharded step", "exact plain jit", "lax.psum"
FSDP = "exact plain jit of shards"
WHOLE = P()
CODE = Quantize(4, rotation=True)


class Model(NamedTuple):
    """Shapes of parameters and of a batch of all ranks, and the loss of both."""

    name: str
    params: Any
    loss: Callable[..., Any]
    batch: Any
    plain: bool = True  # whether plain jit has this loss; BatchNorm of each rank's batch has it not


def model_of(name: str) -> Model:
    """Returns a model of that many leaves, or the one of that name."""
    if name.isdigit():
        params = {
            f"leaf{i}": jax.ShapeDtypeStruct(SHAPES[i % len(SHAPES)], np.float32)
            for i in range(int(name))
        }
        # Two examples per rank, since with one value_and_grad traces the loss six times.
        batch = jax.ShapeDtypeStruct((2 * WORLD,), np.float32)
        return Model(f"{name} leaves", params, loss_of, batch)
    import models

    params, loss = getattr(models, name)(0)
    batch = jax.tree.map(np.concatenate, models.synthetic(name, WORLD, small=True))
    params, batch = jax.eval_shape(lambda: (params, batch))
    return Model(
        f"{name}, {len(jax.tree.leaves(params))} leaves", params, loss, batch, name != "resnet50"
    )


def steps(mesh: Mesh) -> dict[str, optax.GradientTransformation]:
    """Returns whole optimizers by name: most are what precedes Adam in the chain."""
    adam = optax.adam(1e-3)

    def sync(code: Any = CODE, **options: Any) -> optax.GradientTransformation:
        return cgx_jax.sync_gradients("ranks", code, mesh=mesh, exchange="xla", **options)

    def diloco(**options: Any) -> optax.GradientTransformation:
        return transforms.diloco(adam, "ranks", CODE, every=8, mesh=mesh, exchange="xla", **options)

    exact = optax.stateless(lambda grads, _: lax.pmean(grads, "ranks"))
    before_adam = {
        STEP: exact,
        "exact step, 1 array more per leaf": optax.chain(exact, optax.trace(0.9)),
        "exact step, 2 arrays more": optax.chain(exact, *2 * [optax.trace(0.9)]),
        "exact step, 3 arrays more": optax.chain(exact, *3 * [optax.trace(0.9)]),
        "4 bits": sync(Quantize(4)),
        "4 bits, rotated": sync(),
        "ErrorFeedback()": sync(memory=ErrorFeedback()),
        "MomentumCorrection()": sync(memory=transforms.MomentumCorrection()),
        "SecondMoment()": sync(precondition=SecondMoment()),
        "SecondMoment(), ErrorFeedback()": sync(
            memory=ErrorFeedback(), precondition=SecondMoment()
        ),
        "exact leaves, ErrorFeedback()": sync(cgx_jax.Identity(), memory=ErrorFeedback()),
        "Stages of two": sync(policies.Stages((Quantize(8), CODE), (1000,))),
    }
    return {name: optax.chain(way, adam) for name, way in before_adam.items()} | {
        "diloco(every=8)": diloco(),
        "diloco(every=8, fragments=4, delay=1)": diloco(fragments=4, delay=1),
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


def loss_of(params: Any, x: jax.Array) -> jax.Array:
    leaves = jax.tree.leaves(params)
    return sum((jax.numpy.sin(p) * x.mean()).sum() for p in leaves)


def step_of(tx: optax.GradientTransformation, model: Model, mesh: Mesh, **jit: Any) -> Program:
    """Returns a training step under shard_map; `jit` is as in `mapped`."""
    state = jax.eval_shape(tx.init, model.params)
    specs = cgx_jax.state_specs(state, "ranks")

    def step(params: Any, state: Any, x: Any) -> tuple[Any, Any]:
        own = jax.tree.map(lambda p: lax.pcast(p, "ranks", to="varying"), params)
        updates, state = tx.update(jax.grad(model.loss)(own, x), state, params)
        return optax.apply_updates(params, updates), state

    return mapped(step, mesh, (P(), specs), state, model, **jit)


def adaptive(model: Model, mesh: Mesh) -> Program:
    policy = cgx_jax.Adaptive()
    first = cgx_jax.sync_gradients("ranks", policy, mesh=mesh, exchange="xla")
    return step_of(optax.chain(first, optax.adam(1e-3)), model, mesh, jit=policy.jit)


def mapped(
    step: Callable[..., Any],
    mesh: Mesh,
    specs: Any,
    state: Any,
    model: Model,
    jit: Callable[..., Any] = jax.jit,
) -> Program:
    """Returns a step of (parameters, state, batch) under shard_map."""
    over = jax.shard_map(step, mesh=mesh, in_specs=(*specs, P("ranks")), out_specs=specs)
    return jit(over, donate_argnums=(0, 1)), (model.params, state, model.batch)


def hooked(model: Model, mesh: Mesh) -> Program:
    """Returns a step whose gradients are reduced in the backward pass."""
    tx = optax.adam(1e-3)

    def step(params: Any, state: Any, x: Any) -> tuple[Any, Any]:
        def loss(params: Any) -> jax.Array:
            whole = cgx_jax.reduce_in_backward(params, "ranks", CODE, exchange="xla")
            return lax.pmean(model.loss(whole, x), "ranks")

        updates, state = tx.update(jax.grad(loss)(params), state, params)
        return optax.apply_updates(params, updates), state

    return mapped(step, mesh, (P(), P()), jax.eval_shape(tx.init, model.params), model)


def sharded(model: Model, mesh: Mesh, *, exact: bool) -> Program:
    """Returns a step of sharded data-parallel training, which gathers whole weights."""
    if exact:
        gather = lambda x: lax.all_gather(x, "ranks", tiled=True)  # noqa: E731
        scatter = optax.stateless(
            lambda grads, _: jax.tree.map(
                lambda x: lax.psum_scatter(x, "ranks", tiled=True) / WORLD, grads
            )
        )
    else:
        scatter = cgx_jax.scatter_gradients("ranks", CODE, mesh=mesh, exchange="xla")
    tx = optax.chain(scatter, optax.adam(1e-3))
    first, state = jax.eval_shape(tx.init, model.params)
    cut = lambda tree: jax.tree.map(lambda x: P("ranks") if x.ndim else P(), tree)  # noqa: E731
    specs = cut(model.params), (cgx_jax.state_specs(first, "ranks"), cut(state))

    def step(shards: Any, state: Any, x: jax.Array) -> tuple[Any, Any]:
        if exact:
            whole = jax.tree.map(gather, shards)
        else:
            whole = cgx_jax.all_gather_compressed(
                shards, "ranks", Quantize(8), tiled=True, exchange="xla"
            )
        updates, state = tx.update(jax.grad(model.loss)(whole, x), state, shards)
        return optax.apply_updates(shards, updates), state

    return mapped(step, mesh, specs, (first, state), model)


def plain_jit(model: Model, mesh: Mesh, *, exact: bool, cut: P = WHOLE) -> Program:
    """Returns a step under plain jit, whose batch is sharded, with parameters placed as `cut`."""
    tx = optax.adam(1e-3)
    how = {"specs": cut, "weights": Quantize(8)} if len(cut) else {}
    compressed = cgx_jax.value_and_grad(
        model.loss, "ranks", CODE, mesh=mesh, in_specs={1: P("ranks")}, exchange="xla", **how
    )
    differentiate = jax.value_and_grad(model.loss) if exact else compressed

    def step(params: Any, state: Any, x: jax.Array) -> tuple[Any, Any]:
        _, grads = differentiate(params, x)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    def placed(tree: Any, spec: P) -> Any:
        def place(x: Any) -> Any:
            at = NamedSharding(mesh, spec if x.ndim else P())
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at)

        return jax.tree.map(place, tree)

    state, x = jax.eval_shape(tx.init, model.params), placed(model.batch, P("ranks"))
    given = placed(model.params, cut), placed(state, cut), x
    return jax.jit(step, donate_argnums=(0, 1)), given


def programs_of(model: Model, mesh: Mesh) -> dict[str, tuple[str, Program]]:
    """Returns by name what a program is compared with, and the program."""
    found = {n: (STEP, step_of(tx, model, mesh)) for n, tx in steps(mesh).items()}
    found["reduce_in_backward"] = STEP, hooked(model, mesh)
    if model.plain:
        found[PLAIN] = PLAIN, plain_jit(model, mesh, exact=True)
        found["value_and_grad"] = PLAIN, plain_jit(model, mesh, exact=False)
        found[FSDP] = FSDP, plain_jit(model, mesh, exact=True, cut=P("ranks"))
        found["value_and_grad of shards"] = (
            FSDP,
            plain_jit(model, mesh, exact=False, cut=P("ranks")),
        )
    if model.loss is loss_of:
        found["Adaptive()"] = STEP, adaptive(model, mesh)
        found[SHARDED] = SHARDED, sharded(model, mesh, exact=True)
        found["scatter_gradients"] = SHARDED, sharded(model, mesh, exact=False)
        found |= {n: (REDUCTION, reduction_of(r, model, mesh)) for n, r in reductions().items()}
    return found


def reduction_of(reduce: Callable[[Any], Any], model: Model, mesh: Mesh) -> Program:
    def call(tree: Any) -> Any:
        return reduce(jax.tree.map(lambda x: lax.pcast(x, "ranks", to="varying"), tree))

    return jax.jit(jax.shard_map(call, mesh=mesh, in_specs=P(), out_specs=P())), (model.params,)


def seconds(program: Program) -> tuple[float, float]:
    """Returns the seconds to trace and lower, and to compile.

    What only runs, as a step that an adaptive policy compiles, runs once; all of it counts as the
    second.
    """
    function, arguments = program
    jax.clear_caches()
    if not hasattr(function, "lower"):
        zeros = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), arguments)
        start = time.perf_counter()
        jax.block_until_ready(function(*zeros))
        return 0.0, time.perf_counter() - start
    start = time.perf_counter()
    lowered = function.lower(*arguments)
    traced = time.perf_counter()
    lowered.compile()
    return traced - start, time.perf_counter() - traced


def main() -> int:
    parser = measure.parser(__doc__, models="10,100,300,resnet50,gpt2", reps=3)
    parser.add_argument("--ways", default="", help="only those that match, as a regular expression")
    arguments = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", WORLD)
    mesh = Mesh(np.array(jax.devices()), ("ranks",))
    rng, rows = np.random.default_rng(0), []
    for model in map(model_of, arguments.models.split(",")):
        programs = programs_of(model, mesh)
        chosen = {n for n in programs if re.search(arguments.ways, n)}
        names = [*dict.fromkeys([*(programs[n][0] for n in chosen), *sorted(chosen)])]
        taken = {name: np.empty((arguments.reps, 2)) for name in names}
        seconds(programs[names[0]][1])  # the first compilation of a process does more
        for rep in range(arguments.reps):
            for i in rng.permutation(len(names)):
                taken[names[i]][rep] = seconds(programs[names[i]][1])
        print(f"{model.name:>32} {'trace s':>8} {'compile s':>9} {'total s':>8}  ratio")
        for name in sorted(names, key=list(programs).index):
            base, total = programs[name][0], taken[name].sum(axis=1)
            ratio = measure.quartiles(total / taken[base].sum(axis=1))
            trace, compiled = np.median(taken[name], axis=0)
            print(
                f"{name:>32} {trace:>8.3f} {compiled:>9.3f} {np.median(total):>8.3f}"
                f"  {measure.spread(ratio)} x {base}",
                flush=True,
            )
            rows.append(
                {
                    "way": name,
                    "base": base,
                    "model": model.name,
                    "reps": arguments.reps,
                    "trace_seconds": float(trace),
                    "compile_seconds": float(compiled),
                    "total_seconds": float(np.median(total)),
                    "ratio": ratio,
                }
            )
    measure.write_json(arguments.json, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
