"""A slow network on one machine: network namespaces joined by a bridge, every link shaped.

    python benchmarks/rig.py run --world 4 --rate 1gbit -- CMD...   # all of it: up, run, down
    python benchmarks/rig.py run --world 2 --rate 100mbit --delay 0.01 -- CMD...
    python benchmarks/rig.py up 4 1gbit                             # or step by step
    python benchmarks/rig.py rate 100mbit
    python benchmarks/rig.py down

`run` starts CMD once in each of `world` namespaces with RANK, WORLD_SIZE, MASTER_ADDR and
MASTER_PORT set. Rank 0 prints; the others are quiet unless they fail. With --mpi the ranks are
started by MPICH's mpiexec (pip install mpich) and talk over the same links, never through shared
memory. If a network is already up, `run` uses it and leaves it up. With --delay, a packet takes
that many seconds from one host to another (delay_line.py). Rates are those of `tc` ("100mbit",
"10gbit") or "unlimited".

Needs Linux, root and iproute2. Touches only network objects named cgx_*, and /etc/netns/cgx_*.
"""

import argparse
import contextlib
import itertools
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import delay_line
from cgx_jax import slow_link

SWITCH = "cgx_sw"
HOST = "cgx_h"
MASTER_PORT = 29517
NETNS_ETC = Path("/etc/netns")


def address(rank: int) -> str:
    """IPv4 address of a rank on the shaped network."""
    return f"10.78.0.{rank + 1}"


def require_tools() -> None:
    """Exits with a message that names the remedy if the rig cannot work."""
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            sys.exit(f"rig: `{tool}` is missing. Install it: apt-get install iproute2")
    if os.geteuid() != 0:
        sys.exit("rig: network namespaces need root. Run the same command under sudo")


def ip(*args: str) -> str:
    """Runs `ip ARGS`; exits with its message when it fails."""
    return _command("ip", *args)


def inside(namespace: str, *command: str) -> str:
    """Runs a command in a namespace."""
    return _command("ip", "netns", "exec", namespace, *command)


def _command(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"rig: {' '.join(command)}: {done.stderr.strip()}")
    return done.stdout


def hosts() -> int:
    """Returns how many hosts the present network has; 0 without a network."""
    return sum(name.startswith(HOST) for name in _namespaces())


def _namespaces() -> list[str]:
    names = [line.split()[0] for line in ip("netns", "list").splitlines() if line]
    return [name for name in names if name == SWITCH or name.startswith(HOST)]


def up(count: int, rate: str) -> None:
    """Builds `count` hosts on one switch and shapes both directions of every link."""
    if _namespaces():
        sys.exit("rig: a network is up already; `rig.py down` removes it")
    try:
        ip("netns", "add", SWITCH)
        inside(SWITCH, "ip", "link", "add", "cgx_br", "type", "bridge")
        inside(SWITCH, "ip", "link", "set", "cgx_br", "up")
        for rank in range(count):
            ip("netns", "add", f"{HOST}{rank}")
            _plug_in(rank)
            _configure(rank, count)
        shape(rate)
    except BaseException:
        down()
        raise


def _plug_in(rank: int) -> None:
    """Connects a host to the switch by a cable."""
    host, port = f"{HOST}{rank}", f"cgx_s{rank}"
    ip("link", "add", f"cgx_v{rank}", "netns", host, "type", "veth", "peer", "name", port,
       "netns", SWITCH)  # fmt: skip
    inside(SWITCH, "ip", "link", "set", port, "master", "cgx_br", "up")


@contextlib.contextmanager
def _delayed(count: int, rate: str, delay: float) -> Iterator[None]:
    """Provides a network whose packets take `delay` seconds from one host to another."""
    if _namespaces():
        sys.exit("rig: a network is up already; `rig.py down` removes it")
    line = None
    try:
        for rank in range(count):
            ip("netns", "add", f"{HOST}{rank}")
        with tempfile.TemporaryDirectory() as folder:
            ready = Path(folder) / "ready"
            command = [sys.executable, delay_line.__file__, str(count), str(delay), str(ready)]
            line = subprocess.Popen(command, stdin=subprocess.DEVNULL)
            while not ready.exists():
                if line.poll() is not None:
                    sys.exit("rig: the delay line ended; its message is above")
                time.sleep(0.01)
        for rank in range(count):
            device = ("ip", "link", "set", f"cgx_v{rank}")
            inside(f"{HOST}{rank}", *device, "address", delay_line.hardware_address(rank))
            inside(f"{HOST}{rank}", *device, "mtu", str(delay_line.MTU))
            _configure(rank, count)
            if rate != "unlimited":
                _shape_device(f"{HOST}{rank}", f"cgx_v{rank}", rate)
        yield
    finally:
        if line is not None:
            line.kill()
            line.wait()
        down()


def _configure(rank: int, count: int) -> None:
    """Brings a host's device up, and gives the host all names and addresses."""
    host = f"{HOST}{rank}"
    inside(host, "ip", "link", "set", "lo", "up")
    inside(host, "ip", "link", "set", f"cgx_v{rank}", "up")
    inside(host, "ip", "addr", "add", f"{address(rank)}/24", "dev", f"cgx_v{rank}")
    # XLA's gloo binds to the address of the host name, so each host resolves it to its own.
    # `ip netns exec` mounts the files of this folder over those in /etc.
    etc = NETNS_ETC / host
    etc.mkdir(parents=True, exist_ok=True)
    hosts = [("127.0.0.1", "localhost"), (address(rank), socket.gethostname())]
    hosts += [(address(other), _mpi_host_name(other)) for other in range(count)]
    (etc / "hosts").write_text("".join(f"{number} {name}\n" for number, name in hosts))


def shape(rate: str) -> None:
    """Sets the rate of every link, both ways."""
    for rank in range(hosts()):
        _shape_device(f"{HOST}{rank}", f"cgx_v{rank}", rate)
        _shape_device(SWITCH, f"cgx_s{rank}", rate)


def _shape_device(namespace: str, device: str, rate: str) -> None:
    if "htb" in inside(namespace, "tc", "qdisc", "show", "dev", device):
        inside(namespace, "tc", "qdisc", "del", "dev", device, "root")
    if rate == "unlimited":
        return
    for command in slow_link.shaping(device, rate):
        inside(namespace, *command)


def down() -> None:
    """Removes the network and its files."""
    for name in _namespaces():
        ip("netns", "del", name)
        shutil.rmtree(NETNS_ETC / name, ignore_errors=True)
    with contextlib.suppress(OSError):  # someone else's files: leave the folder
        NETNS_ETC.rmdir()


@contextlib.contextmanager
def network(count: int, rate: str) -> Iterator[None]:
    """Provides at least `count` hosts at `rate`: the present network, or one for this block."""
    present = hosts()
    if present and present < count:
        sys.exit(f"rig: the network that is up has {present} hosts, not {count}: run rig.py down")
    if present:
        shape(rate)
    else:
        up(count, rate)
    try:
        yield
    finally:
        if not present:
            down()


def run(
    world: int,
    rate: str,
    command: Sequence[str],
    timeout: float,
    *,
    mpi: bool = False,
    per_host: int = 1,
    delay: float = 0,
) -> int:
    """Runs `command` on `world` hosts over links of `rate`; returns the first failed exit code.

    With `mpi` a host has `per_host` ranks, which share its memory. Packets take `delay` seconds
    from one host to another.
    """
    require_tools()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that a stopped run cleans up too
    with _delayed(world, rate, delay) if delay else network(world, rate):
        if mpi:
            return _run_mpi(world, command, timeout, per_host)
        return run_ranks(
            world,
            command,
            timeout,
            master=address(0),
            prefix=lambda rank: ["ip", "netns", "exec", f"{HOST}{rank}"],
        )


def _mpi_host_name(rank: int) -> str:
    return f"cgx-host{rank}"


def _on_own_host(rank: int, line: str) -> list[str]:
    """Returns the command that runs a shell line in a rank's namespace.

    The namespace is so separate that MPI takes it for another machine.
    """
    apart = f"hostname {_mpi_host_name(rank)}; mount -t tmpfs tmpfs /dev/shm; exec {line}"
    unshare = ["unshare", "--uts", "--ipc", "--mount", "sh", "-c", apart]
    return ["ip", "netns", "exec", f"{HOST}{rank}", *unshare]


def _run_mpi(world: int, command: Sequence[str], timeout: float, per_host: int) -> int:
    mpiexec = shutil.which("mpiexec", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if mpiexec is None:
        sys.exit("rig: `mpiexec` is missing. Install MPICH: pip install mpich mpi4py")
    with tempfile.TemporaryDirectory() as folder:
        launcher = Path(folder) / "launcher"
        launcher.write_text(
            f'#!/bin/sh\nexec {sys.executable} {Path(__file__).resolve()} spawn "$@"\n'
        )
        launcher.chmod(0o700)
        options = {
            "-iface": "cgx_v0",
            "-launcher": "ssh",
            "-launcher-exec": str(launcher),
            "-hosts": ",".join(address(rank) for rank in range(world)),
            "-n": str(world * per_host),
            "-ppn": str(per_host),
        }
        variables = {
            "MASTER_ADDR": address(0),
            "MASTER_PORT": str(MASTER_PORT),
            "WORLD_SIZE": str(world * per_host),
            "FI_PROVIDER": "tcp",
            "MPIR_CVAR_NOLOCAL": str(int(per_host == 1)),
        }
        mpiexec_command = [mpiexec, *itertools.chain(*options.items()), *command]
        process = subprocess.Popen(
            _on_own_host(0, shlex.join(mpiexec_command)),
            env=os.environ | variables,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            return process.wait(timeout)
        except subprocess.TimeoutExpired:
            print(f"rig: stopped after {timeout:.0f} s", file=sys.stderr)
            return 124
        finally:
            slow_link.stop(process)


def spawn(arguments: Sequence[str]) -> int:
    """Stands in for the ssh that mpiexec calls: [-x] HOST COMMAND..., as one line for a shell."""
    host, *command = [a for a in arguments if a != "-x"]
    rank = int(host.rsplit(".", 1)[1]) - 1
    return subprocess.call(_on_own_host(rank, " ".join(command)), stdin=subprocess.DEVNULL)


def run_ranks(
    world: int,
    command: Sequence[str],
    timeout: float,
    *,
    master: str = "127.0.0.1",
    prefix: Callable[[int], Sequence[str]] = lambda rank: (),
) -> int:
    """Runs `command` once per rank; returns the first failed exit code.

    Rank 0 prints; the end of a failed rank's log goes to stderr. All ranks are stopped when one
    fails or after `timeout` seconds.
    """
    with contextlib.ExitStack() as stack:
        ranks = []
        for rank in range(world):
            log = stack.enter_context(tempfile.TemporaryFile("w+"))
            variables = {
                "RANK": str(rank),
                "WORLD_SIZE": str(world),
                "MASTER_ADDR": master,
                "MASTER_PORT": str(MASTER_PORT),
            }
            process = subprocess.Popen(
                [*prefix(rank), *command],
                env=os.environ | variables,
                stdin=subprocess.DEVNULL,
                stdout=None if rank == 0 else log,
                stderr=None if rank == 0 else subprocess.STDOUT,
                start_new_session=True,
            )
            stack.callback(slow_link.stop, process)
            ranks.append((process, log))
        code = slow_link.wait([process for process, _ in ranks], timeout)
        for rank, (process, log) in enumerate(ranks[1:], 1):
            if process.poll():
                log.seek(0)
                print(f"rig: rank {rank} failed:\n{log.read()[-3000:]}", file=sys.stderr)
        return code


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    verbs = parser.add_subparsers(dest="verb", required=True)
    verb = verbs.add_parser("up", help="build the network")
    verb.add_argument("hosts", type=int)
    verb.add_argument("rate")
    verbs.add_parser("rate", help="change the rate of every link").add_argument("rate")
    verbs.add_parser("down", help="remove the network")
    verb = verbs.add_parser("run", help="run a command on every host")
    verb.add_argument("--world", type=int, required=True)
    verb.add_argument("--rate", required=True)
    verb.add_argument("--timeout", type=float, default=900, help="seconds (default %(default)s)")
    verb.add_argument("--mpi", action="store_true", help="start the ranks with mpiexec")
    verb.add_argument("--delay", type=float, default=0, help="seconds that a packet takes")
    verb.add_argument("command", nargs="+", metavar="-- CMD")
    if sys.argv[1:2] == ["spawn"]:
        return spawn(sys.argv[2:])
    arguments = parser.parse_args()

    if getattr(arguments, "rate", "unlimited") != "unlimited":
        try:
            slow_link.bits_per_second(arguments.rate)
        except ValueError as error:
            parser.error(f"{error}, nor 'unlimited'")
    require_tools()
    if arguments.verb == "up":
        up(arguments.hosts, arguments.rate)
    elif arguments.verb == "rate":
        shape(arguments.rate)
    elif arguments.verb == "down":
        down()
    else:
        return run(
            arguments.world,
            arguments.rate,
            arguments.command,
            arguments.timeout,
            mpi=arguments.mpi,
            delay=arguments.delay,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
