"""What `delay` hides of a slow link: a round of DiLoCo against the same steps without a link.

    python benchmarks/delayed.py --json benchmarks/results/delayed.jsonl
    python benchmarks/delayed.py --rate 10mbit --ways '4 bits'

Four workers train a model of 20 MB, each on a host of its own. A round has `--every` steps, in each
of which the workers read their loss, as training loops do. All ways take turns, as in tuner.py.
`ratio` is the time of a round over that of the same steps of the inner optimizer alone: the median
(and quartiles) over the repeats.
"""

import argparse
import functools
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import cgx_jax
import measure
from all_reduce import Ranks, run
from cgx_jax.transforms import diloco, local_params
from training_step import loss_of, matrices
from tuner import turns

AXIS = "ranks"
WIDTH, LAYERS, BATCH = 1000, 5, 512  # 20 MB in fp32, and as many rows per worker and step
ALONE = "alone"
Q4 = cgx_jax.Quantize(4, rotation=True)
METHODS: dict[str, dict[str, Any] | None] = {
    ALONE: None,
    "fp32": {"policy": cgx_jax.Identity(), "exchange": "xla"},
    "4 bits, xla": {"policy": Q4, "exchange": "xla"},
    "4 bits, mpi": {"policy": Q4, "exchange": "mpi"},
    "4 bits, mpi, delayed": {"policy": Q4, "exchange": "mpi", "delay": 0.5},
}


def main() -> int:
    parser = measure.parser(__doc__, rate="100mbit", world=4, reps=9)
    parser.add_argument("--every", type=int, default=32, help="steps (default %(default)s)")
    parser.add_argument("--ways", default="", help="only ways that match, besides the steps alone")
    arguments = parser.parse_args()
    cgx_jax.keep_memory()  # also for the steps alone
    cell = arguments.world, arguments.rate, {"world": arguments.world}
    return run(arguments, [cell], compare, line, mpi=True)


def compare(ranks: Ranks, arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Times a round of every way; yields one row per way."""
    taken = [x for x in METHODS if x == ALONE or re.search(arguments.ways, x)]
    ways = [round_of(ranks, arguments.every, METHODS[name]) for name in taken]
    seconds = turns(ranks, ways, arguments.reps, 3000)
    for i, name in enumerate(taken):
        yield {
            "method": name,
            "links": arguments.rate,
            "world": arguments.world,
            "every": arguments.every,
            "step_seconds": measure.quartiles(seconds[:, i] / arguments.every),
            "ratio": measure.quartiles(seconds[:, i] / seconds[:, 0]),
        }


def line(row: dict[str, Any]) -> str:
    return (
        f"{row['method']:<22}{row['step_seconds'][1] * 1e3:9.1f} ms a step "
        f" {measure.spread(row['ratio'], '.3f')} times the steps alone"
    )


def round_of(ranks: Ranks, every: int, how: dict[str, Any] | None) -> Callable[[], None]:
    """Returns a function that takes the steps of a round."""
    inner, mesh = optax.adam(1e-4), ranks.mesh
    if how is None:
        tx: Any = inner
        specs: Any = P(AXIS), P(AXIS)  # nothing is shared
    else:
        delay = int(how.get("delay", 0) * every)
        tx = diloco(inner, AXIS, mesh=mesh, every=every, **(how | {"delay": delay}))
        specs = P(), cgx_jax.state_specs(jax.eval_shape(tx.init, matrices(LAYERS, WIDTH)), AXIS)

    @functools.partial(jax.jit, donate_argnums=1)
    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=(P(AXIS), specs), out_specs=(P(AXIS), specs)
    )
    def step(x: jax.Array, kept: Any) -> Any:
        params, state = jax.tree.map(lambda v: v[0], kept) if how is None else kept
        here = params if how is None else local_params(params, state)
        loss, grads = jax.value_and_grad(loss_of)(here, x)
        updates, state = tx.update(grads, state, params)
        kept = optax.apply_updates(params, updates), state
        return loss[None], jax.tree.map(lambda v: v[None], kept) if how is None else kept

    def made() -> Any:
        kept = matrices(LAYERS, WIDTH), tx.init(matrices(LAYERS, WIDTH))
        rows = ranks.world if how is None else 0
        return jax.tree.map(lambda v: jnp.tile(v, (rows, *[1] * v.ndim)) if rows else v, kept)

    shardings = jax.tree.map(
        lambda spec: NamedSharding(mesh, spec), specs, is_leaf=lambda x: isinstance(x, P)
    )
    kept = jax.jit(made, out_shardings=shardings)()
    x = jax.jit(
        lambda: jax.random.normal(jax.random.key(7), (ranks.world * BATCH, WIDTH)),
        out_shardings=NamedSharding(mesh, P(AXIS)),
    )()

    def steps() -> None:
        nonlocal kept
        for _ in range(every):
            loss, kept = step(x, kept)
            jax.block_until_ready(loss)
        jax.block_until_ready(kept)

    return steps


if __name__ == "__main__":
    sys.exit(main())
