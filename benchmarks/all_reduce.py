"""psum_compressed against lax.psum in fp32, interleaved in one run.

    python benchmarks/all_reduce.py --world 4                  # host devices of one process
    python benchmarks/all_reduce.py --processes 4              # processes, over loopback
    python benchmarks/all_reduce.py --world 4 --rate 1gbit   # over shaped links
    python benchmarks/all_reduce.py --world 4 --rate 1gbit --methods psum,xla,mpi

A method is lax.psum, an exchange of psum_compressed, or "cast": bf16 values as bytes over the xla
exchange. With "mpi" the ranks are started by mpiexec. Every repeat times all methods one after the
other, each behind a barrier; a time is the slowest rank's. `ratio` is psum's time divided by the
method's time in the same repeat: the median (and quartiles) over the repeats. algbw is the
uncompressed bytes per second. busbw is algbw times 2(W-1)/W, the share of the message that a rank
of a perfect fp32 ring sends; it makes worlds of different sizes comparable. `sent` is what a rank's
network device counted (the largest over ranks). `/plan` is `sent` divided by the bytes that the
format predicts (for psum: that a ring sends). `#wrong` counts values farther from the exact sum
than the stated error bound. The run ends if the ranks' compressed results differ in a single bit.
"""

import argparse
import importlib
import itertools
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

import cgx_jax
import measure
from cgx_jax.commands import bench, rig
from cgx_jax.host import agreement
from cgx_jax.tuning.link_timer import LinkTimer, gradient

METHODS = ("psum", "cast", "xla", "mpi", "auto")


def main() -> int:
    parser = measure.parser(__doc__, sizes="1M,4M,25M", reps=11, world=4)
    parser.add_argument("--methods", default="psum,xla", help="list (default %(default)s)")
    parser.add_argument("--bits", default="4", help="list, 1 to 8 (default %(default)s)")
    parser.add_argument("--bucket-size", type=int, default=512)
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--processes", type=int, metavar="N", help="N processes over loopback")
    how.add_argument("--rate", help="processes over shaped links: 1gbit, 100mbit, unlimited, ...")
    arguments = parser.parse_args()
    arguments.sizes = [measure.size_in_bytes(size) for size in arguments.sizes.split(",")]
    arguments.bits = [int(bits) for bits in arguments.bits.split(",")]
    arguments.methods = arguments.methods.split(",")
    if arguments.methods[0] != "psum" or not set(arguments.methods) <= set(METHODS):
        parser.error(f"--methods starts with psum and goes on with some of {METHODS[1:]}")
    if arguments.processes and rank_of_process() is None:
        return rig.run_ranks(arguments.processes, [sys.executable, *sys.argv], timeout=3600)
    cells = [(arguments.world, arguments.rate, {})] if arguments.rate else []
    how = {"mpi": "mpi" in arguments.methods}
    return run(arguments, cells, compare, line, world=arguments.world, **how)


def rank_of_process() -> int | None:
    """Returns this process's rank, which the rig or mpiexec has set, or None."""
    rank = os.environ.get("RANK", os.environ.get("PMI_RANK"))
    return None if rank is None else int(rank)


class Ranks(LinkTimer):
    """The ranks of this run, one device each: all in this process, or one in each of several."""

    def __init__(self, world: int = 1):
        """`world` counts the devices of a single process."""
        jax.config.update("jax_platforms", "cpu")
        self.distributed = rank_of_process() is not None
        if "PMI_RANK" in os.environ:  # started by mpiexec: "auto" uses MPI only if it is loaded
            importlib.import_module("mpi4py.MPI")
        if self.distributed:
            jax.config.update("jax_cpu_collectives_implementation", "gloo")
            jax.distributed.initialize(
                f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}",
                num_processes=int(os.environ["WORLD_SIZE"]),
                process_id=rank_of_process(),
                local_device_ids=[0],
            )
        else:
            jax.config.update("jax_num_cpu_devices", world)
        self.links = "loopback" if self.distributed else "one process"
        super().__init__("all_reduce", Mesh(np.array(jax.devices()), ("ranks",)), "ranks")

    def in_turns(self, steps: dict[Any, Callable[[], Any]], reps: int) -> dict[Any, np.ndarray]:
        """Returns the slowest rank's seconds of every step, f64[reps].

        Steps take turns in a random order, the same on all ranks. In its turn a step is taken three
        times, and the last is timed: the first ones find caches and connections as other steps have
        left them, which they do not in a training loop.
        """
        samples = np.empty((reps, len(steps)))
        orders = np.random.default_rng(0)
        calls = list(steps.values())
        for sample in samples:
            for i in orders.permutation(len(calls)):
                calls[i]()
                calls[i]()
                sample[i] = self.timed(calls[i])
        return dict(zip(steps, agreement.maximum(samples).T, strict=True))

    def in_order(
        self, functions: Sequence[Callable], x: Any, reps: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns f64[reps, functions]: the slowest rank's seconds, and the most sent bytes.

        In every repeat all functions run one after the other. A first round is a warm-up.
        """
        samples = [[self._measured(f, x) for f in functions] for _ in range(reps + 1)]
        seconds, sent = np.moveaxis(agreement.maximum(np.array(samples[1:])), -1, 0)
        return seconds, sent

    def _measured(self, function: Callable, x: Any) -> tuple[float, int]:
        """Returns the seconds and sent bytes of one call, which all ranks begin together."""
        self.barrier()
        self.barrier()  # by now the stragglers of the first barrier have arrived
        before = rig.sent_bytes()
        start = time.perf_counter()
        function(x).block_until_ready()
        seconds = time.perf_counter() - start
        self.barrier()
        return seconds, rig.sent_bytes() - before

    def relink(self, rate: str) -> None:
        """All links have `rate` from here on."""
        self.barrier()
        if self.first:
            rig.shape(rate)
        self.barrier()


def run(
    arguments: argparse.Namespace,
    cells: Iterable[Any],
    compare: Callable[[Ranks, argparse.Namespace], Iterable[dict[str, Any]]],
    line: Callable[[dict[str, Any]], str],
    cell: Sequence[str] = (),
    world: int = 1,
    **how: Any,
) -> int:
    """Runs a benchmark: starts the ranks of every one of `cells` with `measure.launch`, or is one.

    Without cells, this process has all ranks, `world` of them. A rank yields rows from
    compare(ranks, arguments). The first rank prints the `line` of each, and writes the rows so far:
    with `cell` by `measure.add_json`.
    """
    if cells and rank_of_process() is None:
        return measure.launch(arguments, cells, **how)
    ranks = Ranks(world)
    rows = []
    for row in compare(ranks, arguments):
        rows.append(row)
        if ranks.first:
            print(line(row), flush=True)
            if cell:
                measure.add_json(arguments.json, row, cell)
            else:
                measure.write_json(arguments.json, rows)
    return 0


def compare(ranks: Ranks, arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Times the methods; yields one row per size, width and method."""
    if ranks.first:
        print(
            f"{'bytes':>11} {'method':>10} bits {'median ms':>9} {'algbw':>6} {'busbw':>6} Gbit/s"
            f"  {'ratio (quartiles)':<18} {'sent MB':>8} {'/plan':>6} #wrong"
        )
    for size, bits in itertools.product(arguments.sizes, arguments.bits):
        values, code = size // 4, cgx_jax.Quantize(bits, arguments.bucket_size)
        codes = dict.fromkeys(arguments.methods, code)
        if "cast" in codes:
            codes["cast"] = cgx_jax.Cast(jnp.bfloat16)
        x = ranks.place(gradient, values)
        functions = {"psum": ranks.psum}
        for method in arguments.methods[1:]:
            exchange = "xla" if method == "cast" else method
            functions[method] = ranks.all_reduce(codes[method], exchange)
        wrong = {
            method: bench.check(ranks, values, codes[method], [f(x)], exact=method == "psum")[0]
            for method, f in functions.items()
        }
        seconds, sent = ranks.in_order(list(functions.values()), x, arguments.reps)
        ring = 2 * (ranks.world - 1) * 4 * values / ranks.world
        like = jax.ShapeDtypeStruct((values,), np.float32)
        for i, (method, own) in enumerate(codes.items()):
            plan = cgx_jax.Plan.build(like, own)
            yield {
                "bytes": 4 * values,
                "method": method,
                "bits": {"psum": 32, "cast": 16}.get(method, bits),
                "bucket_size": arguments.bucket_size,
                "reps": arguments.reps,
                **bench.figures(ranks.world, 4 * values, seconds[:, 0], seconds[:, i]),
                "sent_bytes": float(np.median(sent[:, i])) if ranks.distributed else None,
                "wrong": wrong[method],
                "arithmetic_bytes": ring if method == "psum" else plan.wire_bytes(ranks.world),
                "world": ranks.world,
                "links": arguments.rate or ranks.links,
            }


def line(row: dict[str, Any]) -> str:
    counted = row["sent_bytes"]
    sent = f"{counted / 1e6:.3f}" if counted else "-"
    share = f"{counted / row['arithmetic_bytes']:.3f}" if counted else "-"
    return (
        f"{row['bytes']:>11,} {row['method']:>10} {row['bits']:>4}"
        f" {row['seconds'][1] * 1e3:>9.2f} {row['algbw_gbit']:>6.2f} {row['busbw_gbit']:>6.2f}"
        f"         {measure.spread(row['ratio']):<18} {sent:>8} {share:>6}"
        f" {row['wrong']:>6}"
    )


if __name__ == "__main__":
    sys.exit(main())
