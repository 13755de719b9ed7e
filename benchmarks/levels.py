"""Two nodes of two ranks over shaped links: lax.psum, flat and leveled reductions.

    python benchmarks/levels.py --json benchmarks/results/levels.jsonl
    python benchmarks/levels.py --rates 100mbit --sizes 25M

A node is a host with two processes, started by mpiexec. Links between nodes have the given rate.
Inside a node the rate is not limited: the "xla" exchange uses gloo's sockets there, "mpi" shared
memory. Times and `ratio` are those of all_reduce.py, and `over_flat` is a ratio to the time of the
exchange without levels. `between` is what a node sends to the other, by the counter of its network
device.
"""

import argparse
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np

import cgx_jax
import measure
from all_reduce import Ranks, run
from cgx_jax.tuning.link_timer import gradient, size_text

NODES, LOCAL = 2, 2
GROUPS = [[0, 1], [2, 3]]
NEAR = cgx_jax.reductions.Levels(groups=GROUPS)
HOW: dict[str, dict[str, Any]] = {
    "flat": {},
    "levels": {"levels": NEAR},
    "levels, gather_sum": {"levels": NEAR, "reduction": "gather_sum"},
}
METHODS = [(exchange, name) for exchange in ("xla", "mpi") for name in HOW]


def main() -> int:
    rates = "100mbit,250mbit,500mbit,1gbit,2500mbit"
    arguments = measure.parser(__doc__, sizes="1M,25M", rates=rates, reps=15).parse_args()
    cells = ((NODES, rate, {"rates": rate}) for rate in arguments.rates.split(","))
    return run(arguments, cells, compare, line, mpi=True, per_host=LOCAL)


def compare(nodes: Ranks, arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Times all methods; yields one row per size and method."""
    methods = [("", "psum"), *METHODS]
    code = cgx_jax.Quantize(4)
    reductions = (nodes.all_reduce(code, exchange, **HOW[name]) for exchange, name in METHODS)
    functions = [nodes.psum, *reductions]
    for size in map(measure.size_in_bytes, arguments.sizes.split(",")):
        x = nodes.place(gradient, size // 4)
        results = [np.asarray(f(x).addressable_data(0)) for f in functions]
        seconds, sent = nodes.in_order(functions, x, arguments.reps)
        for i, (exchange, name) in enumerate(methods):
            flat = methods.index((exchange, "flat")) if exchange else 0
            error = np.linalg.norm(results[i] - results[0]) / np.linalg.norm(results[0])
            yield {
                "bytes": 4 * (size // 4),
                "links": arguments.rates,
                "exchange": exchange,
                "method": name,
                "seconds": measure.quartiles(seconds[:, i]),
                "ratio": measure.quartiles(seconds[:, 0] / seconds[:, i]),
                "over_flat": measure.quartiles(seconds[:, flat] / seconds[:, i]),
                "between": float(np.median(sent[:, i])),
                "relative_error": float(error),
            }


def line(row: dict[str, Any]) -> str:
    return (
        f"{row['links']:>8} {size_text(row['bytes']):>7} {row['exchange']:<4}{row['method']:<20}"
        f" {row['seconds'][1] * 1e3:9.2f} ms  {measure.spread(row['ratio'])} of psum's speed,"
        f" {row['over_flat'][1]:.2f} of flat's; {row['between']:>12,.0f} bytes between nodes,"
        f" relative error {row['relative_error']:.4f}"
    )


if __name__ == "__main__":
    sys.exit(main())
