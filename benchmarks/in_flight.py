"""What several buffers in flight gain over one, on links with a delay.

    python benchmarks/in_flight.py --json benchmarks/results/in_flight.jsonl

A packet takes one of `--delays` seconds from one host to another, so a connection that
waits for answers does not fill its link. 16 MB of gradients are reduced at 4 bits in three ways: as
buffers of 1 MB that each wait for the one before, as the same buffers all at once, and as one
buffer. All ways take turns, as in tuner.py. `ratio` is the time of the buffers that wait divided by
the way's time: the median (and quartiles) over the repeats.
"""

import argparse
import math
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

import cgx_jax
import measure
from all_reduce import Ranks, run
from cgx_jax.tuning.link_timer import gradient
from tuner import turns

BUFFERS, SHAPE = 16, (500, 500)
AXIS = "ranks"
EXCHANGES = ("xla", "mpi")


def one_by_one(leaves: list[jax.Array], exchange: str) -> list[jax.Array]:
    """Each buffer waits for the sum of the one before."""
    out, waits = [], jnp.zeros(())
    for own in leaves:
        out += reduced([own + waits], exchange)
        waits = jnp.where(jnp.isinf(out[-1][0, 0]), 1.0, 0.0)
    return out


def at_once(leaves: list[jax.Array], exchange: str) -> list[jax.Array]:
    return [y for own in leaves for y in reduced([own], exchange)]


def reduced(leaves: list[jax.Array], exchange: str) -> list[jax.Array]:
    """The sums of leaves that travel in one buffer."""
    plan = cgx_jax.Plan.build(leaves, cgx_jax.Quantize(4))
    return cgx_jax.psum_compressed(leaves, AXIS, plan, exchange=exchange)


METHODS: dict[str, Callable[[list[jax.Array], str], list[jax.Array]]] = {
    "one by one": one_by_one,
    "all at once": at_once,
    "one buffer": reduced,
}


def main() -> int:
    parser = measure.parser(__doc__, rate="100mbit", world=2, reps=9)
    parser.add_argument("--delays", default="0,0.001,0.01", help="seconds (default %(default)s)")
    arguments = parser.parse_args()
    for delay in map(float, arguments.delays.split(",")):
        cell = arguments.world, arguments.rate, {"delays": f"{delay:g}"}
        if code := run(arguments, [cell], compare, line, mpi=True, delay=delay):
            return code
    return 0


def compare(ranks: Ranks, arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Times all methods over both exchanges; yields one row for each pair."""
    # Separate arrays, as gradients are. XLA would reuse the memory of slices of one array, and a
    # call that waits for memory waits for the call before it.
    leaves = [ranks.place(gradient, math.prod(SHAPE)) for _ in range(BUFFERS)]
    for exchange in EXCHANGES:
        calls = [on_ranks(ranks, f, exchange, leaves) for f in METHODS.values()]
        turns(ranks, calls, 2, 0)  # compiles, and opens the connections' windows
        seconds = turns(ranks, calls, arguments.reps, 600)
        for i, name in enumerate(METHODS):
            yield {
                "method": name,
                "exchange": exchange,
                "delay": float(arguments.delays),
                "links": arguments.rate,
                "world": ranks.world,
                "bytes": 4 * BUFFERS * math.prod(SHAPE),
                "seconds": measure.quartiles(seconds[:, i]),
                "ratio": measure.quartiles(seconds[:, 0] / seconds[:, i]),
            }


def line(row: dict[str, Any]) -> str:
    return (
        f"{row['delay'] * 1e3:g} ms {row['exchange']:<4} {row['method']:<12}"
        f" {row['seconds'][1] * 1e3:9.1f} ms  {measure.spread(row['ratio'])} times the speed of one"
        " by one"
    )


def on_ranks(
    ranks: Ranks,
    function: Callable[[list[jax.Array], str], list[jax.Array]],
    exchange: str,
    leaves: list[jax.Array],
) -> Callable[[], None]:
    """Returns a compiled call of `function` on each rank's leaves."""
    call = jax.jit(
        jax.shard_map(
            lambda rows: function([row.reshape(SHAPE) for row in rows], exchange),
            mesh=ranks.mesh,
            in_specs=P(AXIS),
            out_specs=P(),
        )
    )
    return lambda: jax.block_until_ready(call(leaves)) and None


if __name__ == "__main__":
    sys.exit(main())
