"""Separate hosts on this machine, joined by links of a given rate and delay, without root.

Each host has namespaces of its own, as if it were another machine, and one link to a switch. The
kernel limits the rate of every link, both ways. Needs Linux with user namespaces, and iproute2.
This file is also the program that runs inside the namespaces, so it imports only the standard
library.
"""

from __future__ import annotations

import contextlib
import ctypes
import heapq
import itertools
import json
import math
import os
import re
import select
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

PORT = 29_519
UNLIMITED = "unlimited"
_TOOLS = {
    "unshare": "util-linux",
    "nsenter": "util-linux",
    "ip": "iproute2",
    "tc": "iproute2",
    "hostname": "hostname",
}
_UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
# The processes whose namespaces are the switch and the hosts, separated by commas.
_PROCESSES = "CGX_RIG"
# A host exists until its input ends. It binds a hosts file over /etc/hosts, since XLA's gloo binds
# to the address that the host's name resolves to. MPI takes a host with memory of its own for
# another machine, and looks for its devices in /sys.
_HOST = (
    'mount --bind "$1" /etc/hosts && mount -t tmpfs tmpfs /dev/shm && hostname "$2"'
    ' && if [ "$3" ]; then mount -t sysfs sysfs /sys; fi && echo up && read -r _'
)


def bits_per_second(rate: str) -> float:
    """Converts "1gbit" to 1e9; raises ValueError for other text, and for what `tc` cannot shape."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg]bit)", rate)
    bits = float(match[1]) * _UNITS[match[2]] if match else 0.0
    if not 8e3 <= bits <= 100e9:
        raise ValueError(
            f"rate {rate!r} is not a number followed by kbit, mbit or gbit, from 8kbit to 100gbit; "
            "write 100mbit"
        )
    return bits


def missing() -> str | None:
    """Returns why this machine cannot have such links, with the remedy, or None if it can."""
    if sys.platform != "linux":
        return "a slow link needs Linux's network namespaces"
    for tool, package in _TOOLS.items():
        if shutil.which(tool, path=_path()) is None:
            return f"a slow link needs `{tool}`: install it (apt-get install {package})"
    code, error = _start({"world": 1, "rate": "1gbit"}, ["true"], quiet=True)
    if code:
        said = " ".join(error.split()) or f"exit code {code}"
        return f"this kernel does not let you create a network namespace ({said}); try sudo"
    return None


def run(
    world: int,
    rate: str,
    command: Sequence[str],
    *,
    mpi: bool = False,
    per_host: int = 1,
    delay: float = 0.0,
    timeout: float = math.inf,
) -> int:
    """Runs `command` on each of `world` hosts; returns the first failed exit code, or 0.

    `rate` is that of `tc` ("100mbit", "10gbit") or "unlimited". A packet takes `delay` seconds from
    one host to another. Ranks have RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT in their
    environment. With `mpi`, MPICH's mpiexec starts them instead, `per_host` on each host. Rank 0
    prints its output, and that of another rank is shown only if it fails. All ranks are stopped
    when one fails, or with exit code 124 after `timeout` seconds. Raises ValueError if `rate` is
    not a rate. Exits with the remedy if this machine cannot have such links.
    """
    if rate != UNLIMITED:
        bits_per_second(rate)
    if problem := missing():
        sys.exit(problem)
    options = {"world": world, "rate": rate, "mpi": mpi, "per_host": per_host, "delay": delay}
    return _start(options | {"timeout": timeout}, command)[0]


def joined() -> bool:
    """Returns whether this process is a rank that `run` started."""
    return _PROCESSES in os.environ


def initialize() -> None:
    """Calls `jax.distributed.initialize` over the links, for gloo with one CPU device per rank."""
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 1)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    jax.distributed.initialize(address, int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"]))


def shape(rate: str) -> None:
    """Sets the rate of every link, both ways. One of the ranks calls it, or the switch."""
    switch, *hosts = os.environ[_PROCESSES].split(",")
    for rank, host in enumerate(hosts):
        for process, device in ((host, f"cgx_v{rank}"), (switch, f"cgx_s{rank}")):
            inside = ["nsenter", "--net", "--target", process]
            to = ["dev", device]
            if "htb" in _do(*inside, "tc", "qdisc", "show", *to):
                _do(*inside, "tc", "qdisc", "del", *to, "root")
            _do(*inside, "ip", "link", "set", *to, "gso_max_size", str(_segment_bytes(rate)))
            for command in [] if rate == UNLIMITED else _shaping(to, rate):
                _do(*inside, "tc", *command)


def on_host(rank: int) -> list[str]:
    """Returns what stands before a command that runs on the host of a rank, in this folder.

    The switch or one of the ranks calls it.
    """
    process = os.environ[_PROCESSES].split(",")[1 + rank]
    enter = ["nsenter", "--net", "--mount", "--uts", "--ipc", "--target", process]
    return [*enter, "sh", "-c", 'cd "$1" && shift && exec "$@"', "sh", os.getcwd()]


def sent_bytes() -> int:
    """Returns how many bytes the network devices of this process's host have sent, but loopback."""
    path = Path("/proc/self/net/dev")
    lines = path.read_text().splitlines()[2:] if path.exists() else []
    return sum(int(line.split(":")[1].split()[8]) for line in lines if "lo:" not in line)


def _segment_bytes(rate: str) -> int:
    """Returns the most that a device sends at once, about what the link takes in 0.13 ms.

    htb sends a whole segment as soon as it may send, and goes into debt for it, so a segment
    arrives before its time. The burst, too, is free bandwidth.
    """
    if rate == UNLIMITED:
        return 65536
    return min(65536, max(2048, int(bits_per_second(rate) / 8 * 128e-6)))


def _shaping(to: list[str], rate: str) -> list[list[str]]:
    """Returns the arguments of `tc` that limit what a device sends to `rate`."""
    bytes_per_second = bits_per_second(rate) / 8
    burst = str(_segment_bytes(rate))
    queue = str(max(500_000, int(bytes_per_second * 20e-3)))
    limits = ["rate", rate, "burst", burst, "cburst", burst, "quantum", "60000"]
    return [
        ["qdisc", "add", *to, "root", "handle", "1:", "htb", "default", "1"],
        ["class", "add", *to, "parent", "1:", "classid", "1:1", "htb", *limits],
        ["qdisc", "add", *to, "parent", "1:1", "handle", "10:", "bfifo", "limit", queue],
    ]


def run_ranks(
    world: int,
    command: Sequence[str],
    timeout: float,
    *,
    master: str = "127.0.0.1",
    prefix: Callable[[int], Sequence[str]] = lambda rank: (),
) -> int:
    """Runs `command` once per rank, by default on this host; otherwise the same as `run`."""
    with contextlib.ExitStack() as stack:
        ranks = []
        for rank in range(world):
            log = stack.enter_context(tempfile.TemporaryFile("w+"))
            variables = {"RANK": str(rank), "WORLD_SIZE": str(world)}
            variables |= {"MASTER_ADDR": master, "MASTER_PORT": str(PORT)}
            process = subprocess.Popen(
                [*prefix(rank), *command],
                env=os.environ | variables,
                stdin=subprocess.DEVNULL,
                stdout=None if rank == 0 else log,
                stderr=None if rank == 0 else subprocess.STDOUT,
                start_new_session=True,
            )
            stack.callback(_stop, process)
            ranks.append((process, log))
        code = _wait([process for process, _ in ranks], timeout)
        for rank, (process, log) in enumerate(ranks[1:], 1):
            if process.poll():
                log.seek(0)
                print(f"rank {rank} failed:\n{log.read()[-3000:]}", file=sys.stderr)
        return code


def _wait(processes: Sequence[subprocess.Popen[bytes]], timeout: float) -> int:
    """Waits; returns the first failed exit code at once, else 0, or 124 after `timeout` seconds."""
    end = time.monotonic() + timeout
    while True:
        codes = [process.poll() for process in processes]
        if failed := [code for code in codes if code]:
            time.sleep(1)  # time for the other ranks to print their own messages
            return failed[0]
        if None not in codes:
            return 0
        if time.monotonic() > end:
            print(f"stopped after {timeout:.0f} s", file=sys.stderr)
            return 124
        time.sleep(0.05)


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Kills the process and its children, which are in the process group that it leads."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _path() -> str:
    return os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])


def _start(
    options: dict[str, Any], command: Sequence[str], *, quiet: bool = False
) -> tuple[int, str]:
    """Runs the switch; returns its exit code and, if it is `quiet`, what it says on stderr."""
    namespaces = ["unshare", "--user", "--map-root-user", "--net", "--mount"]
    inside = [sys.executable, __file__, "switch", json.dumps(options), *command]
    environment = os.environ | {"PATH": _path()}
    pipe = subprocess.PIPE if quiet else None
    process = subprocess.Popen(
        [*namespaces, *inside],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=pipe,
        stderr=pipe,
        text=True,
    )
    try:
        _, error = process.communicate()
    except BaseException:
        process.terminate()  # so that it ends its hosts and ranks; a kill would leave them
        process.wait()
        raise
    return process.returncode, error or ""


# --- inside the namespaces


def _address(rank: int) -> str:
    return f"10.78.0.{rank + 1}"


def _switch(
    world: int,
    rate: str,
    command: Sequence[str],
    *,
    mpi: bool = False,
    per_host: int = 1,
    delay: float = 0.0,
    timeout: float = math.inf,
) -> int:
    """Builds the hosts and their links, and runs `command` there."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # when the process ends that started this one
    for number in _ENDS:
        signal.signal(number, _end)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        names = [("127.0.0.1", "localhost")]
        names += [(_address(rank), f"cgx-host{rank}") for rank in range(world)]
        (folder / "hosts").write_text("".join(f"{number} {name}\n" for number, name in names))
        hosts = []
        for rank in range(world):
            apart = ["unshare", "--net", "--mount", "--uts", "--ipc", "sh", "-c", _HOST, "sh"]
            own = [str(folder / "hosts"), f"cgx-host{rank}", "mpi" * mpi]
            hosts.append(str(_up(stack, f"host {rank}", [*apart, *own])))
        os.environ[_PROCESSES] = ",".join([str(os.getpid()), *hosts])
        _link(hosts, bridged=not delay)
        shape(rate)
        if delay:
            line = [sys.executable, __file__, "delay", str(world), str(delay)]
            _up(stack, "the delay", line)
        if mpi:
            return _run_mpi(hosts, command, timeout, per_host, folder)
        return run_ranks(world, command, timeout, master=_address(0), prefix=on_host)


# A terminal that closes sends the first, and its keys the next two.
_ENDS = signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM


def _end(number: int, _: object) -> None:
    """Leaves the switch, and so ends its hosts and ranks, whatever else arrives meanwhile."""
    for each in _ENDS:
        signal.signal(each, signal.SIG_IGN)
    sys.exit(128 + number)


def _up(stack: contextlib.ExitStack, name: str, command: Sequence[str]) -> int:
    """Starts a process that lasts as long as the stack; returns its number once it says "up"."""
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    )
    stack.callback(_stop, process)
    assert process.stdout is not None
    if not process.stdout.readline():
        sys.exit(f"{name} ended; its message is above")
    return process.pid


def _link(hosts: Sequence[str], *, bridged: bool) -> None:
    """Joins each host to the switch."""
    if bridged:
        _do("ip", "link", "add", "cgx_br", "type", "bridge")
        _do("ip", "link", "set", "cgx_br", "up")
    for rank, host in enumerate(hosts):
        device, port = f"cgx_v{rank}", f"cgx_s{rank}"
        mtu = ["mtu", "1500" if bridged else "65000"]  # each packet costs the delay's process time
        there = ["peer", "name", device, *mtu, "netns", host]
        _do("ip", "link", "add", port, *mtu, "type", "veth", *there)
        if bridged:
            _do("ip", "link", "set", port, "master", "cgx_br")
        _do("ip", "link", "set", port, "up")
        for command in (
            ["link", "set", "lo", "up"],
            ["link", "set", device, "address", f"02:00:00:00:00:{rank + 1:02x}"],
            ["addr", "add", f"{_address(rank)}/24", "dev", device],
            ["link", "set", device, "up"],
        ):
            _do("nsenter", "--net", "--target", host, "ip", *command)


def _do(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout


def _run_mpi(
    hosts: Sequence[str], command: Sequence[str], timeout: float, per_host: int, folder: Path
) -> int:
    mpiexec = shutil.which("mpiexec", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if mpiexec is None:
        sys.exit("`mpiexec` is missing. Install MPICH: pip install mpich mpi4py")
    launcher = folder / "launcher"
    launcher.write_text(f'#!/bin/sh\nexec {shlex.join([sys.executable, __file__])} ssh "$@"\n')
    launcher.chmod(0o700)
    world = len(hosts) * per_host
    options = {
        "-iface": "cgx_v0",
        "-launcher": "ssh",
        "-launcher-exec": str(launcher),
        "-hosts": ",".join(map(_address, range(len(hosts)))),
        "-n": str(world),
        "-ppn": str(per_host),
    }
    variables = {
        "MASTER_ADDR": _address(0),
        "MASTER_PORT": str(PORT),
        "WORLD_SIZE": str(world),
        "FI_PROVIDER": "tcp",
        "MPIR_CVAR_NOLOCAL": str(int(per_host == 1)),
    }
    process = subprocess.Popen(
        [*on_host(0), mpiexec, *itertools.chain(*options.items()), *command],
        env=os.environ | variables,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        return _wait([process], timeout)
    finally:
        _stop(process)


def _ssh(arguments: Sequence[str]) -> int:
    """Stands in for the ssh that mpiexec calls: [-x] HOST COMMAND..., as one line for a shell."""
    host, *command = [a for a in arguments if a != "-x"]
    line = [*on_host(int(host.rsplit(".", 1)[1]) - 1), "sh", "-c", " ".join(command)]
    return subprocess.call(line, stdin=subprocess.DEVNULL)


def _delay(world: int, delay: float) -> None:
    """Forwards packets between the switch's ports, `delay` seconds after they arrive.

    It is a bridge for kernels without netem. Packets keep the kernel's notes about their checksums
    and segments.
    """
    ports = []
    for rank in range(world):
        port = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(0x0003))
        port.setsockopt(263, 15, 1)  # SOL_PACKET, PACKET_VNET_HDR: the notes, 10 bytes
        port.setsockopt(263, 23, 1)  # PACKET_IGNORE_OUTGOING
        with contextlib.suppress(PermissionError):  # the default is too short for fast links
            port.setsockopt(socket.SOL_SOCKET, 33, 1 << 26)  # SO_RCVBUFFORCE
        port.bind((f"cgx_s{rank}", 0))
        port.setblocking(False)
        ports.append(port)
    print("up", flush=True)
    waiting: list[tuple[float, int, int, bytes]] = []
    order = itertools.count()
    while True:
        now = time.monotonic()
        while waiting and waiting[0][0] <= now:
            _, _, to, packet = heapq.heappop(waiting)
            with contextlib.suppress(OSError):  # a link whose queue is full loses packets
                ports[to].send(packet)
        due = waiting[0][0] - now if waiting else 1.0
        for port in select.select(ports, [], [], due)[0]:
            packet = port.recv(1 << 17)
            source = ports.index(port)
            # The destination's last byte says which host it is; the first, whether it is for all.
            others = [host for host in range(world) if host != source]
            for to in others if packet[10] & 1 else {packet[15] - 1} & set(others):
                heapq.heappush(waiting, (time.monotonic() + delay, next(order), to, packet))


def _main() -> int:
    role, *arguments = sys.argv[1:]
    if role == "ssh":
        return _ssh(arguments)
    if role == "delay":
        _delay(int(arguments[0]), float(arguments[1]))
    return _switch(command=arguments[1:], **json.loads(arguments[0]))


if __name__ == "__main__":
    sys.exit(_main())
