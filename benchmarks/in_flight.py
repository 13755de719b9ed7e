"""What several buffers in flight gain over one, where links are far away.

    sudo python benchmarks/in_flight.py --json benchmarks/results/in_flight.json

A packet takes `--delay` seconds from one host to another (rig.py), so a connection that waits for
answers does not fill its link. 16 MB of gradients are reduced at 4 bits: as buffers of 1 MB of
which one waits for the other, as the same buffers all at once, and as one buffer. Every repeat
times all of them one after the other, each behind a barrier; a time is the slowest rank's. `ratio`
is the median (and quartiles) over the repeats of the time of buffers that wait over the others'.
"""

import argparse
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import cgx_jax
import measure
import rig
from all_reduce import Ranks, rank_of_process
from cgx_jax.link_timer import gradient

BUFFERS, VALUES = 16, 250_000
AXIS = "ranks"
EXCHANGES = ("xla", "mpi")


def one_by_one(x: jax.Array, exchange: str) -> jax.Array:
    """Each buffer waits for the sum of the one before."""
    out, waits = [], jnp.zeros(())
    for own in x.reshape(BUFFERS, VALUES):
        out.append(reduced(own + waits, exchange))
        waits = jnp.where(jnp.isinf(out[-1][0]), 1.0, 0.0)
    return jnp.concatenate(out)


def at_once(x: jax.Array, exchange: str) -> jax.Array:
    return jnp.concatenate([reduced(own, exchange) for own in x.reshape(BUFFERS, VALUES)])


def reduced(x: jax.Array, exchange: str) -> jax.Array:
    return cgx_jax.psum_compressed(x, AXIS, cgx_jax.Quantize(4), exchange=exchange)


METHODS: dict[str, Callable[[jax.Array, str], jax.Array]] = {
    "one by one": one_by_one,
    "all at once": at_once,
    "one buffer": reduced,
}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rate", default="100mbit", help="of rig.py (default %(default)s)")
    parser.add_argument("--delays", default="0,0.001,0.01", help="seconds (default %(default)s)")
    parser.add_argument("--world", type=int, default=2, help="ranks (default %(default)s)")
    parser.add_argument("--reps", type=int, default=9, help="(default %(default)s)")
    measure.add_json_option(parser)
    return parser.parse_args()


def main() -> int:
    arguments = parse_arguments()
    if rank_of_process() is None:
        for delay in map(float, arguments.delays.split(",")):
            command = [sys.executable, sys.argv[0], "--delays", f"{delay:g}"]
            for name in ("rate", "world", "reps", "json"):
                if (value := getattr(arguments, name)) is not None:
                    command += [f"--{name}", str(value)]
            if code := rig.run(
                arguments.world, arguments.rate, command, timeout=900, mpi=True, delay=delay
            ):
                return code
        return 0
    ranks = Ranks(arguments.world)
    rows = compare(ranks, arguments)
    if ranks.first:
        measure.write_json(arguments.json, rows)
    return 0


def compare(ranks: Ranks, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Times all methods by both exchanges; one row for each."""
    x = ranks.place(gradient, BUFFERS * VALUES)
    rows = []
    for exchange in EXCHANGES:
        functions = [
            ranks.collective(lambda x, f=f, exchange=exchange: f(x, exchange))
            for f in METHODS.values()
        ]
        ranks.seconds(functions, x, 2)  # compiles, and opens the connections' windows
        seconds = ranks.seconds(functions, x, arguments.reps)
        for i, name in enumerate(METHODS):
            row = {
                "method": name,
                "exchange": exchange,
                "delay": float(arguments.delays),
                "links": arguments.rate,
                "world": ranks.world,
                "bytes": 4 * BUFFERS * VALUES,
                "seconds": measure.quartiles(seconds[:, i]),
                "ratio": measure.quartiles(seconds[:, 0] / seconds[:, i]),
            }
            rows.append(row)
            if ranks.first:
                low, middle, high = row["ratio"]
                print(
                    f"{float(arguments.delays) * 1e3:g} ms {exchange:<4} {name:<12}"
                    f" {row['seconds'][1] * 1e3:9.1f} ms  {middle:.2f} ({low:.2f}-{high:.2f}) times"
                    " the speed of one by one",
                    flush=True,
                )
    return rows


if __name__ == "__main__":
    sys.exit(main())
