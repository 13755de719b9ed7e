"""Compares the fused calls with their lax namesakes, on real NCCL between processes on one GPU.

    python tests/gpu/ranks.py OUT.jsonl --world 2 --megabytes 4,100 [--rate 10gbit]

Every rank tells NCCL that it is on its own host (NCCL_HOSTID), so the ranks talk over sockets on
loopback, as nodes on Ethernet do. With --rate, `tc` shapes the loopback (needs root), and the ranks
share that rate. For psum, psum_scatter and all_gather, prints and writes the median, over
interleaved repeats, of lax's time divided by each exchange's time, and whether "nccl" gave the same
bytes as "xla" on every rank. The results of one size are written before the next size starts.

With --connection-rate, every TCP connection has that rate, as in clouds that limit flows, and the
ranks share no other limit. --sockets sets how many sockets NCCL itself opens per connection between
two ranks (NCCL_NSOCKS_PERTHREAD), which is the other way to fill such links.
"""

import argparse
import ctypes
import itertools
import os
import pathlib
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

sys.path.append(str(pathlib.Path(__file__).resolve().parents[2] / "benchmarks"))

# What makes NCCL use a transport between processes that share a GPU.
SHARED = {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}
TRANSPORTS = {
    "sockets": {"NCCL_HOSTID": "virtual-host-{rank}"},
    "p2p": SHARED,
    "host": SHARED | {"NCCL_P2P_DISABLE": "1"},
}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--megabytes", default="100", help="list")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--exchanges", default="xla,nccl")
    parser.add_argument("--calls", default="psum,psum_scatter,all_gather")
    parser.add_argument("--segment-bytes", help="of the fused calls, a list; default: theirs")
    parser.add_argument("--streams", default="1", help="of the fused calls, a list")
    parser.add_argument("--reductions", default="scatter_gather", help="of psum, a list")
    return run(parser, rank)


def run(parser: argparse.ArgumentParser, rank: Callable[[argparse.Namespace, int], int]) -> int:
    """Adds the options of the links and starts the script once per rank; each runs `rank`.

    The parser must give `world`, and `paced` if ranks call `pace_program`.
    """
    parser.add_argument("--rate", help="of loopback, as tc takes it")
    parser.add_argument("--connection-rate", type=float, help="of each TCP connection, in Gbit/s")
    parser.add_argument("--sockets", type=int, help="of NCCL, per connection; default: NCCL's")
    parser.add_argument(
        "--transport",
        choices=TRANSPORTS,
        default="sockets",
        help="other than sockets: ranks of one host, which needs NCCL 2.30",
    )
    parser.add_argument(
        "--platform",
        default="cuda",
        help="cpu tries the script itself: little data, and xla in the place of nccl",
    )
    arguments = parser.parse_args()
    if "CGX_RANK" in os.environ:
        return rank(arguments, int(os.environ["CGX_RANK"]))
    if arguments.rate:
        shape("add", "dev", "lo", "root", "tbf", "rate", arguments.rate, "burst", "256kb",
              "latency", "50ms")  # fmt: skip
    try:
        return start(arguments)
    finally:
        if arguments.rate:
            shape("del", "dev", "lo", "root")


def pacing(gigabits: float | None, folder: str) -> dict[str, str]:
    """Returns variables that limit the connections of a program; builds a library in `folder`.

    With None the program limits itself, by `pace_program`.
    """
    library = f"{folder}/paced_sockets.so"
    source = pathlib.Path(__file__).with_name("paced_sockets.cc")
    subprocess.run(["c++", "-O2", "-shared", "-fPIC", "-o", library, source], check=True)
    return {"LD_PRELOAD": library, "CGX_PACE": str(int((gigabits or 0) * 1e9 / 8))}


def pace_program(gigabits: float) -> None:
    """Limits what this process sends to all others together, in Gbit/s; 0 is no limit."""
    function = ctypes.CDLL(None).cgx_pace_program
    function.argtypes, function.restype = [ctypes.c_double], None
    function(gigabits * 1e9 / 8)


def add_run(out: pathlib.Path, rows: list[dict], **fields: object) -> None:
    """Adds a run to a file of results."""
    import measure  # and JAX, which the process that starts the ranks has no use for

    measure.add_run(out, rows, **fields)


def shape(*command: str) -> None:
    subprocess.run(["tc", "qdisc", *command], check=True)


def start(arguments: argparse.Namespace) -> int:
    """Starts the ranks and returns the first exit code that is not 0, or 0."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    links = {}
    if arguments.sockets:
        links |= {"NCCL_NSOCKS_PERTHREAD": str(arguments.sockets), "NCCL_SOCKET_NTHREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        if arguments.connection_rate or "paced" in arguments:
            links |= pacing(arguments.connection_rate, folder)
        links |= TRANSPORTS[arguments.transport]
        return start_on(links, arguments.world, address)


def start_on(links: dict[str, str], world: int, address: str) -> int:
    processes = []
    for number in range(world):
        variables = {
            "CGX_RANK": str(number),
            "CGX_COORDINATOR": address,
            "NCCL_SOCKET_IFNAME": "lo",
            "NCCL_IB_DISABLE": "1",
            "NCCL_NVLS_ENABLE": "0",
            "NCCL_MNNVL_ENABLE": "0",
            "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
            **{name: value.format(rank=number) for name, value in links.items()},
        }
        command = [sys.executable, *sys.argv]
        processes.append(subprocess.Popen(command, env=os.environ | variables))
    codes = [process.wait(timeout=300) for process in processes]
    return next((code for code in codes if code), 0)


def join(arguments: argparse.Namespace, number: int) -> None:
    """Makes this process rank `number`."""
    import jax

    jax.config.update("jax_platforms", arguments.platform)
    if arguments.platform == "cpu":
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        os.environ["CGX_COORDINATOR"], arguments.world, number, local_device_ids=[0]
    )


def rank(arguments: argparse.Namespace, number: int) -> int:
    import jax
    import numpy as np
    from jax.sharding import Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P

    from cgx_jax.exchanges import Nccl
    from cgx_jax.exchanges.nccl import SEGMENT_BYTES

    join(arguments, number)
    mesh = Mesh(np.array(jax.devices()), ("data",))
    sizes = map(float, arguments.megabytes.split(","))
    segments = map(int, arguments.segment_bytes.split(",")) if arguments.segment_bytes else [None]
    failed = False
    streams = map(int, arguments.streams.split(","))
    reductions = arguments.reductions.split(",")
    for megabytes, segment_bytes, count, reduction in itertools.product(
        sizes, segments, streams, reductions
    ):
        nccl = Nccl(segment_bytes or SEGMENT_BYTES, count)
        values = int(megabytes * 1e6 / 4) // (1 if arguments.platform == "cuda" else 1000)
        values = max(1, values // arguments.world) * arguments.world
        own = np.random.default_rng(number).standard_normal((1, values)).astype(np.float32)
        x = jax.make_array_from_single_device_arrays(
            (arguments.world, values),
            NamedSharding(mesh, P("data")),
            [jax.device_put(own, jax.local_devices()[0])],
        )
        rows = []
        for call in arguments.calls.split(","):
            rows += measured(call, mesh, x, arguments, nccl, reduction)
        failed |= any(row["bytes_of_xla"] is False for row in rows)
        if number == 0:
            for row in rows:
                print(
                    f"{megabytes:6g} MB {row['call']:>12} {row['method']:>9} {reduction} {count}"
                    f" {row['seconds'] * 1e3:9.2f} ms  {row['ratio'][1]:.2f}"
                    f"  relative error {row['error']:.3f}  bytes of xla: {row['bytes_of_xla']}",
                    flush=True,
                )
            add_run(
                arguments.out,
                rows,
                device=jax.devices()[0].device_kind,
                world=arguments.world,
                megabytes=megabytes,
                rate=arguments.rate or "unlimited",
                connection_rate=arguments.connection_rate,
                sockets=arguments.sockets,
                transport=arguments.transport,
                segment_bytes=nccl.segment_bytes,
                streams=count,
                reduction=reduction,
            )
    jax.distributed.shutdown()
    return int(failed)


def measured(call: str, mesh, x, arguments: argparse.Namespace, nccl, reduction: str) -> list[dict]:
    """Returns a row for lax's `call` and one for each exchange, all on values of the same array."""
    import jax
    import numpy as np
    from jax.sharding import PartitionSpec as P

    import cgx_jax
    from cgx_jax.exchanges.experimental import Peer

    share = x.shape[1] // arguments.world
    compressor = cgx_jax.Quantize(bits=4)
    namesake = getattr(jax.lax, call)
    ours = getattr(cgx_jax, f"{call}_compressed")
    tiled = {} if call == "psum" else {"tiled": True}
    how = {"reduction": reduction} if call == "psum" else {}

    def mapped(function):
        def of_rank(x):
            return function(x[0, :share] if call == "all_gather" else x[0], "data", **tiled)

        spec = P() if call == "psum" else P("data")
        return jax.jit(jax.shard_map(of_rank, mesh=mesh, in_specs=P("data"), out_specs=spec))

    methods = {"lax": mapped(namesake)}
    if call == "psum":
        methods["lax, bf16"] = mapped(
            lambda x, axis: jax.lax.psum(x.astype("bfloat16"), axis).astype(x.dtype)
        )
    on_gpu = arguments.platform == "cuda"
    stands_for = {"nccl": nccl, "peer": Peer(), "host": Peer(memory="host")}
    for exchange in arguments.exchanges.split(","):
        taken = stands_for.get(exchange, exchange)
        if not on_gpu and exchange in stands_for:
            taken = "xla"
        methods[exchange] = mapped(
            lambda x, axis, e=taken, **tiled: ours(x, axis, compressor, exchange=e, **tiled, **how)
        )
    results = {name: np.asarray(f(x).addressable_data(0)) for name, f in methods.items()}
    seconds = {name: [] for name in methods}
    for _ in range(arguments.repeats):
        for name, function in methods.items():
            methods["lax"](x).block_until_ready()  # every rank is here now
            start = time.perf_counter()
            function(x).block_until_ready()
            seconds[name].append(time.perf_counter() - start)
    exact = results["lax"]
    rows = []
    for name in methods:
        ratios = np.array(seconds["lax"]) / np.array(seconds[name])
        error = np.linalg.norm(results[name] - exact) / np.linalg.norm(exact)
        rows.append(
            {
                "call": call,
                "method": name,
                "seconds": float(np.median(seconds[name])),
                "ratio": [float(q) for q in np.percentile(ratios, (25, 50, 75))],
                "error": float(error),
                "bytes_of_xla": results[name].tobytes() == results["xla"].tobytes()
                if "lax" not in name and "xla" in results
                else None,
            }
        )
    return rows


if __name__ == "__main__":
    sys.exit(main())
