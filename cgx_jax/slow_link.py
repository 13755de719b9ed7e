"""Runs two processes on this machine that are joined by a link of a given rate, without root.

Each process has its own network, as if it ran on a separate machine. The processes reach each other
over a link whose rate the kernel limits. Needs Linux with user namespaces, and iproute2. This file
is also the program that runs inside the namespaces, so it imports only the standard library.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

WORLD = 2
PORT = 29_519
_TOOLS = {"unshare": "util-linux", "nsenter": "util-linux", "ip": "iproute2", "tc": "iproute2"}
_UNITS = {"bit": 1, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9, "tbit": 1e12}
_RANK, _WORLD, _MASTER = "CGX_LINK_RANK", "CGX_LINK_WORLD", "CGX_LINK_MASTER"
# Keeps a rank's namespaces open until its link exists. Binds a hosts file over /etc/hosts, since
# XLA's gloo binds to the address that the host's name resolves to.
_HOLD = 'mount --bind "$1" /etc/hosts && read -r _ && shift && exec "$@"'


def bits_per_second(rate: str) -> float:
    """Converts "1gbit" to 1e9; raises ValueError for text in another form."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmgt]?bit)", rate)
    if match is None:
        raise ValueError(
            f"rate {rate!r} is not a number followed by kbit, mbit or gbit; write 100mbit"
        )
    return float(match[1]) * _UNITS[match[2]]


def shaping(device: str, rate: str) -> list[list[str]]:
    """Returns the commands that limit what `device` sends to `rate`."""
    # Even with a small burst, htb sends a whole 64 KiB segment and goes into debt for it. tbf would
    # split the segment, which costs CPU time. The burst is free bandwidth, so it stays near a tenth
    # of a millisecond.
    bytes_per_second = bits_per_second(rate) / 8
    burst = str(max(2048, int(bytes_per_second * 128e-6)))
    queue = str(max(500_000, int(bytes_per_second * 20e-3)))
    limits = ["rate", rate, "burst", burst, "cburst", burst, "quantum", "60000"]
    to = ["dev", device, "parent"]
    return [
        ["tc", "qdisc", "add", "dev", device, "root", "handle", "1:", "htb", "default", "1"],
        ["tc", "class", "add", *to, "1:", "classid", "1:1", "htb", *limits],
        ["tc", "qdisc", "add", *to, "1:1", "handle", "10:", "bfifo", "limit", queue],
    ]


def missing(rate: str = "1gbit") -> str | None:
    """Returns why this machine cannot have a slow link, with the remedy, or None if it can."""
    if sys.platform != "linux":
        return "a slow link needs Linux's network namespaces"
    for tool, package in _TOOLS.items():
        if shutil.which(tool, path=_path()) is None:
            return f"a slow link needs `{tool}`: install it (apt-get install {package})"
    done = _start(["true"], rate, capture_output=True, text=True)
    if done.returncode:
        said = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
        return f"this kernel does not let you create a network namespace ({said}); try sudo"
    return None


def run(command: Sequence[str], rate: str) -> int:
    """Runs `command` as ranks 0 and 1 at the two ends of a link; returns the exit code.

    That is the first failed exit code, or 0. Rank 0 prints its output, and rank 1's output is shown
    only if it fails. `joined` is True in both processes. Raises ValueError if `rate` is not a rate.
    Call `missing` first to see whether this machine can have such a link.
    """
    bits_per_second(rate)
    return _start(command, rate).returncode


def joined() -> bool:
    """Returns whether this process is a rank that `run` started."""
    return _RANK in os.environ


def initialize() -> None:
    """Calls `jax.distributed.initialize` over the link, for gloo with one CPU device per rank."""
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 1)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    rank, world = int(os.environ[_RANK]), int(os.environ[_WORLD])
    jax.distributed.initialize(os.environ[_MASTER], world, rank)


def _path() -> str:
    return os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])


def _start(command: Sequence[str], rate: str, **options: Any) -> subprocess.CompletedProcess:
    namespaces = ["unshare", "--user", "--map-root-user", "--net", "--mount"]
    inside = [sys.executable, __file__, rate, *command]
    environment = os.environ | {"PATH": _path()}
    command = [*namespaces, *inside]
    return subprocess.run(
        command, env=environment, stdin=subprocess.DEVNULL, check=False, **options
    )


# --- inside the namespaces


def _address(rank: int) -> str:
    return f"10.78.0.{rank + 1}"


def _inside(rate: str, command: Sequence[str]) -> int:
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        log = stack.enter_context((folder / "log").open("w+"))
        ranks = []
        for rank in range(WORLD):
            process = _hold(rank, command, folder, None if rank == 0 else log)
            stack.callback(stop, process)
            ranks.append(process)
        _link(ranks, rate)
        for process in ranks:
            assert process.stdin is not None
            process.stdin.write(b"\n")
            process.stdin.close()
        code = wait(ranks)
        if ranks[1].poll():
            log.seek(0)
            print(f"rank 1 failed:\n{log.read()[-3000:]}", file=sys.stderr)
        return code


def _hold(
    rank: int, command: Sequence[str], folder: Path, log: IO[str] | None
) -> subprocess.Popen[bytes]:
    """Starts a process with its own network that waits for a line, then runs the command."""
    hosts = folder / f"hosts{rank}"
    hosts.write_text(f"127.0.0.1 localhost\n{_address(rank)} {socket.gethostname()}\n")
    variables = {_RANK: str(rank), _WORLD: str(WORLD), _MASTER: f"{_address(0)}:{PORT}"}
    process = subprocess.Popen(
        ["unshare", "--net", "--mount", "sh", "-c", _HOLD, "sh", str(hosts), *command],
        env=os.environ | variables,
        stdin=subprocess.PIPE,
        stdout=log,
        stderr=log,
        start_new_session=True,
    )
    own = os.readlink("/proc/self/ns/net")
    while process.poll() is None and os.readlink(f"/proc/{process.pid}/ns/net") == own:
        time.sleep(0.005)
    return process


def _link(ranks: Sequence[subprocess.Popen], rate: str) -> None:
    ends = [(f"cgx{rank}", str(process.pid)) for rank, process in enumerate(ranks)]
    (a, first), (b, second) = ends
    _do("ip", "link", "add", a, "netns", first, "type", "veth", "peer", "name", b, "netns", second)
    for rank, (device, pid) in enumerate(ends):
        commands = [
            ["ip", "link", "set", "lo", "up"],
            ["ip", "addr", "add", f"{_address(rank)}/24", "dev", device],
            ["ip", "link", "set", device, "up"],
            *shaping(device, rate),
        ]
        for command in commands:
            _do("nsenter", "--net", "--target", pid, *command)


def _do(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)}: {done.stderr.strip()}")


def wait(processes: Sequence[subprocess.Popen], timeout: float = math.inf) -> int:
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


def stop(process: subprocess.Popen) -> None:
    """Kills the process and its children, which are in the process group that it leads."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


if __name__ == "__main__":
    sys.exit(_inside(sys.argv[1], sys.argv[2:]))
