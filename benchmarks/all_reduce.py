"""psum_compressed against lax.psum in fp32, interleaved in one run.

    python benchmarks/all_reduce.py --world 4                  # host devices of one process
    python benchmarks/all_reduce.py --processes 4              # processes, over loopback
    sudo python benchmarks/all_reduce.py --world 4 --rate 1gbit   # over shaped links (rig.py)

Every repeat times lax.psum and psum_compressed one after the other, each behind a barrier; a time
is the slowest rank's. `ratio` is the median (and quartiles) over the repeats of psum's time over
the compressed one's in the same repeat. algbw is uncompressed bytes over time; busbw is algbw times
2(W-1)/W, the share of the message that a rank of a perfect fp32 ring sends, so that worlds of
different size compare. `sent` is what a rank's network device counted (the largest over ranks),
`/plan` that over the format's arithmetic (for psum: over the ring's). `#wrong` counts values
farther from the exact sum than the stated error bound; ranks whose compressed results differ in a
single bit end the run.
"""

import argparse
import os
import sys
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import bound
import cgx_jax
import measure
import rig

METHODS = ("psum", "compressed")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--sizes", default="1M,4M,25M", help="fp32 bytes a rank, with k, M, G (default %(default)s)"
    )
    parser.add_argument("--bits", default="4", help="list, 1 to 8 (default %(default)s)")
    parser.add_argument("--bucket-size", type=int, default=512)
    parser.add_argument("--reps", type=int, default=11, help="repeats (default %(default)s)")
    parser.add_argument("--world", type=int, default=4, help="ranks (default %(default)s)")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--processes", type=int, metavar="N", help="N processes over loopback")
    how.add_argument("--rate", help="processes over shaped links: 1gbit, 100mbit, unlimited, ...")
    measure.add_json_option(parser)
    arguments = parser.parse_args()
    arguments.sizes = [measure.size_in_bytes(size) for size in arguments.sizes.split(",")]
    arguments.bits = [int(bits) for bits in arguments.bits.split(",")]
    return arguments


def main() -> int:
    arguments = parse_arguments()
    if "RANK" not in os.environ:
        command = [sys.executable, *sys.argv]
        if arguments.rate:
            return rig.run(arguments.world, arguments.rate, command, timeout=3600)
        if arguments.processes:
            return rig.run_ranks(arguments.processes, command, timeout=3600)
    ranks = Ranks(arguments.world)
    rows = []
    for size in arguments.sizes:
        for bits in arguments.bits:
            compressor = cgx_jax.Quantize(bits=bits, bucket_size=arguments.bucket_size)
            rows += compare(ranks, size // 4, compressor, arguments.reps)
            if ranks.first:
                print_rows(rows[-len(METHODS) :], header=len(rows) == len(METHODS))
    if ranks.first:
        for row in rows:
            row.update(world=ranks.world, links=arguments.rate or ranks.links)
        measure.write_json(arguments.json, rows)
    return 0


class Ranks:
    """The ranks of this run, one device each: all in this process, or one in each of several."""

    def __init__(self, world: int):
        jax.config.update("jax_platforms", "cpu")
        self.distributed = "RANK" in os.environ
        if self.distributed:
            jax.config.update("jax_cpu_collectives_implementation", "gloo")
            jax.distributed.initialize(
                f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}",
                num_processes=int(os.environ["WORLD_SIZE"]),
                process_id=int(os.environ["RANK"]),
                local_device_ids=[0],
            )
        else:
            jax.config.update("jax_num_cpu_devices", world)
        self.links = "loopback" if self.distributed else "one process"
        self.world = jax.device_count()
        self.first = jax.process_index() == 0
        self.mesh = Mesh(np.array(jax.devices()), ("ranks",))
        self._token = self.place(lambda rank: np.zeros(1, np.float32))
        self._barrier = self.collective(lambda x: lax.psum(x, "ranks"))

    def place(self, value_of: Callable[[int], np.ndarray]) -> jax.Array:
        """An array whose row r, on rank r, is value_of(r)."""
        rows = [
            jax.device_put(value_of(rank)[None], device)
            for rank, device in enumerate(self.mesh.devices)
            if device.process_index == jax.process_index()
        ]
        shape = (self.world, *rows[0].shape[1:])
        return jax.make_array_from_single_device_arrays(
            shape, NamedSharding(self.mesh, P("ranks")), rows
        )

    def collective(self, function: Callable[[jax.Array], jax.Array]) -> Callable:
        """Compiles `function` of a rank's row; its result is the same on every rank."""
        return jax.jit(
            jax.shard_map(
                lambda x: function(x[0]), mesh=self.mesh, in_specs=P("ranks"), out_specs=P()
            )
        )

    def barrier(self) -> None:
        self._barrier(self._token).block_until_ready()

    def gather(self, values: Any) -> np.ndarray:
        """A row of float64 from every process."""
        mine = np.frombuffer(np.asarray(values, np.float64).tobytes(), np.uint8)
        if not self.distributed:
            return mine.view(np.float64)[None]
        return np.asarray(multihost_utils.process_allgather(mine)).view(np.float64)


def sent_bytes() -> int:
    """Bytes this process's network devices have sent, loopback left out."""
    path = Path("/proc/self/net/dev")
    lines = path.read_text().splitlines()[2:] if path.exists() else []
    return sum(int(line.split(":")[1].split()[8]) for line in lines if "lo:" not in line)


def input_of(rank: int, values: int) -> np.ndarray:
    """A rank's gradient-like input, f32[values]."""
    return np.random.default_rng(rank).standard_normal(values, dtype=np.float32) * 1e-2


def compare(
    ranks: Ranks, values: int, compressor: cgx_jax.Quantize, reps: int
) -> list[dict[str, Any]]:
    """Times both methods on f32[values] a rank; one row a method."""
    plan = cgx_jax.Plan.build(jax.ShapeDtypeStruct((values,), np.float32), compressor)
    x = ranks.place(lambda rank: input_of(rank, values))
    functions = [
        ranks.collective(lambda x: lax.psum(x, "ranks")),
        ranks.collective(lambda x: cgx_jax.psum_compressed(x, "ranks", compressor)),
    ]
    wrong = check(ranks, values, compressor, [function(x) for function in functions])

    samples = np.empty((reps, len(METHODS), 2))
    for rep in range(-1, reps):  # one round of warm-up
        for method, function in enumerate(functions):
            samples[rep, method] = timed(ranks, function, x)
    seconds, sent = np.moveaxis(
        ranks.gather(samples.ravel()).reshape(-1, *samples.shape).max(axis=0), -1, 0
    )
    ring = 2 * (ranks.world - 1) * 4 * values / ranks.world
    arithmetic = (ring, plan.wire_bytes(ranks.world))
    return [
        row_of(ranks, values, compressor, method, seconds, sent[:, i], arithmetic[i], wrong[i])
        for i, method in enumerate(METHODS)
    ]


def timed(ranks: Ranks, function: Callable, x: jax.Array) -> tuple[float, int]:
    """Seconds and sent bytes of one call, begun by all ranks together."""
    ranks.barrier()
    ranks.barrier()  # the first one's stragglers have arrived now
    before = sent_bytes()
    start = time.perf_counter()
    function(x).block_until_ready()
    seconds = time.perf_counter() - start
    ranks.barrier()
    return seconds, sent_bytes() - before


def check(
    ranks: Ranks, values: int, compressor: cgx_jax.Quantize, results: list[jax.Array]
) -> list[int]:
    """How many values of each method's result break its bound; exits when ranks differ."""
    copies = [[np.asarray(s.data) for s in result.addressable_shards] for result in results]
    checksums = ranks.gather([[zlib.crc32(copy) for copy in copies[-1]]])
    if np.unique(checksums).size > 1:
        sys.exit("all_reduce: the ranks hold different results")
    inputs = (input_of(rank, values) for rank in range(ranks.world))
    allowed = bound.all_reduce(inputs, compressor.bits, compressor.bucket_size)
    return [allowed.wrong(copies[i][0], exact=method == "psum") for i, method in enumerate(METHODS)]


def row_of(ranks, values, compressor, method, seconds, sent, arithmetic, wrong) -> dict[str, Any]:
    """The numbers of one method at one size."""
    mine = seconds[:, METHODS.index(method)]
    median = float(np.median(mine))
    algbw = 4 * values / median
    return {
        "bytes": 4 * values,
        "method": method,
        "bits": 32 if method == "psum" else compressor.bits,
        "bucket_size": compressor.bucket_size,
        "reps": len(mine),
        "seconds": measure.quartiles(mine),
        "algbw_gbit": algbw * 8e-9,
        "busbw_gbit": algbw * 8e-9 * 2 * (ranks.world - 1) / ranks.world,
        "ratio": measure.quartiles(seconds[:, 0] / mine),
        "sent_bytes": float(np.median(sent)) if ranks.distributed else None,
        "arithmetic_bytes": float(arithmetic),
        "wrong": wrong,
    }


def print_rows(rows: list[dict[str, Any]], header: bool) -> None:
    if header:
        print(
            f"{'bytes':>11} {'method':>10} bits {'median ms':>9} {'algbw':>6} {'busbw':>6} Gbit/s"
            f"  {'ratio (quartiles)':<18} {'sent MB':>8} {'/plan':>6} #wrong"
        )
    for row in rows:
        low, ratio, high = row["ratio"]
        counted = row["sent_bytes"]
        sent = f"{counted / 1e6:.3f}" if counted else "-"
        share = f"{counted / row['arithmetic_bytes']:.3f}" if counted else "-"
        print(
            f"{row['bytes']:>11,} {row['method']:>10} {row['bits']:>4}"
            f" {row['seconds'][1] * 1e3:>9.2f} {row['algbw_gbit']:>6.2f} {row['busbw_gbit']:>6.2f}"
            f"         {f'{ratio:.2f} ({low:.2f}-{high:.2f})':<18} {sent:>8} {share:>6}"
            f" {row['wrong']:>6}",
            flush=True,
        )


if __name__ == "__main__":
    sys.exit(main())
