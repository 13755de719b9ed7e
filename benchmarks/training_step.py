"""What a reduction adds to a training step: a stack of matrix products under Adam, on shaped links.

    python benchmarks/training_step.py --json benchmarks/results/training_step.jsonl
    python benchmarks/training_step.py --cases 2:unlimited:1 --reps 3      # a quick look

A case is RANKS:RATE:MEGABYTES of fp32 gradients. All ways take turns; a time is the slowest rank's.
A step is the forward and the backward pass, `optax.chain(sync_gradients(...), optax.adamw(...))`
and the update, with donated state. "compute alone" reduces nothing. `/ plain` is a step's time
divided by that of plain 4 bits in the same repeat: the median (and quartiles) over the repeats. `in
all` is the total time of all repeats divided by that of plain 4 bits, so it includes the steps that
update units. Repeats start once units are updated only in every 16th step. Ranks are started by
mpiexec and reduce over the "mpi" exchange if it is available, otherwise over "xla".
"""

import argparse
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import cgx_jax
import measure
from all_reduce import Ranks, run
from cgx_jax.route import run as running
from cgx_jax.transforms.precondition import PERIOD, WARMUP, SecondMoment

PLAIN = "4 bits"


def ways(exchange: str) -> dict[str, optax.GradientTransformation]:
    """Returns what precedes the optimizer in the chain, by name; "fp32" comes first."""

    def sync(compressor: cgx_jax.Quantize, **options: Any) -> optax.GradientTransformation:
        return cgx_jax.sync_gradients("ranks", compressor, exchange=exchange, **options)

    plain, rotated = cgx_jax.Quantize(bits=4), cgx_jax.Quantize(bits=4, rotation=True)
    return {
        "fp32": optax.stateless(lambda grads, _: lax.pmean(grads, "ranks")),
        "compute alone": optax.identity(),
        PLAIN: sync(plain),
        "4 bits, sums in new memory": in_new_memory(sync(plain)),
        "4 bits, exchange 'xla'": cgx_jax.sync_gradients("ranks", plain, exchange="xla"),
        "4 bits, rotated": sync(rotated),
        "... SecondMoment()": sync(rotated, precondition=SecondMoment()),
    }


def in_new_memory(reduction: optax.GradientTransformation) -> optax.GradientTransformation:
    """Returns `reduction` with sums that do not reuse the memory of the gradients."""

    def update(*args: Any) -> Any:
        with mock.patch.object(running._compat, "is_computed", return_value=False):
            return reduction.update(*args)

    return optax.GradientTransformation(reduction.init, update)


def main() -> int:
    parser = measure.parser(__doc__, reps=2 * PERIOD)
    parser.add_argument(
        "--cases", default="4:1gbit:22.8,2:unlimited:88", help="(default %(default)s)"
    )
    parser.add_argument("--layers", type=int, default=8, help="(default %(default)s)")
    parser.add_argument("--batch", type=int, default=64, help="rows a rank (default %(default)s)")
    arguments = parser.parse_args()
    cells = ((*x.split(":")[:2], {"cases": x}) for x in arguments.cases.split(","))
    return run(arguments, cells, compare, line, mpi=measure.has_mpi())


def compare(ranks: Ranks, arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Times a step of every way; yields one row per way."""
    world, rate, megabytes = arguments.cases.split(":")
    exchange = measure.fastest()
    width = 4 * round((float(megabytes) * 1e6 / 4 / arguments.layers) ** 0.5 / 4)
    if ranks.first:
        print(
            f"{world} ranks, {rate}, {arguments.layers} layers of {width} x {width}, "
            f"{4e-6 * arguments.layers * width**2:.1f} MB of gradients, exchange {exchange!r}"
        )
    x = ranks.place(normal, arguments.batch * width)
    states: dict[str, Any] = {}
    steps = {}
    for name, reduction in ways(exchange).items():
        step, states[name] = training(ranks, reduction, width, arguments.layers)

        def call(name: str = name, step: Any = step) -> None:
            states[name] = jax.block_until_ready(step(states[name], x))

        steps[name] = call
    ranks.in_turns(steps, WARMUP // 3 + 1)
    seconds = ranks.in_turns(steps, arguments.reps)
    plain = seconds[PLAIN]
    for name, own in seconds.items():
        yield {
            "way": name,
            "reps": arguments.reps,
            "seconds": measure.quartiles(own),
            "over_plain": measure.quartiles(own / plain),
            "in_all": float(own.sum() / plain.sum()),
            "links": rate,
            "world": int(world),
            "megabytes": float(megabytes),
            "exchange": exchange,
        }


def normal(rank: int, values: int) -> np.ndarray:
    """A rank's batch, flat."""
    return np.random.default_rng(rank).standard_normal(values, dtype=np.float32)


def matrices(layers: int, width: int) -> list[jax.Array]:
    keys = jax.random.split(jax.random.key(0), layers)
    return [jax.random.normal(key, (width, width)) / width**0.5 for key in keys]


def loss_of(params: list[jax.Array], x: jax.Array) -> jax.Array:
    for w in params:
        x = jnp.tanh(x @ w)
    return jnp.square(x).mean()


def training(
    ranks: Ranks, reduction: optax.GradientTransformation, width: int, layers: int
) -> tuple[Any, Any]:
    """Returns a compiled step (state, batch) -> state with donated state, and the first state."""
    optimizer = optax.chain(reduction, optax.adamw(1e-4))

    def initial() -> Any:
        params = matrices(layers, width)
        return params, optimizer.init(params)

    def step(state: Any, x: jax.Array) -> Any:
        params, opt_state = state
        grads = jax.grad(loss_of)(params, x.reshape(-1, width))
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    replicated = NamedSharding(ranks.mesh, P())
    state = jax.jit(initial, out_shardings=replicated)()
    mapped = jax.shard_map(
        step, mesh=ranks.mesh, in_specs=(P(), P("ranks")), out_specs=P(), check_vma=False
    )
    return jax.jit(mapped, donate_argnums=0), state


def line(row: dict[str, Any]) -> str:
    return (
        f"  {row['way']:<32} {row['seconds'][1] * 1e3:>8.1f} ms   / plain "
        f"{measure.spread(row['over_plain'], '.3f')}   in all {row['in_all']:.3f}"
    )


if __name__ == "__main__":
    sys.exit(main())
