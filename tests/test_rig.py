"""Hosts on this machine, joined by links of the requested rate and delay."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cgx_jax.commands import rig

PROBLEM = rig.missing()
needs_link = pytest.mark.skipif(PROBLEM is not None, reason=str(PROBLEM))

# Every rank sends a byte to rank 0 and waits for the answer. Rank 0 then shows the links.
SHOWS = """
import os, socket, subprocess, sys, time
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
own = socket.gethostbyname(socket.gethostname())
assert own == f"10.78.0.{rank + 1}"
if rank == 0:
    with socket.create_server((own, 9000)) as server:
        for _ in range(world - 1):
            end, (other, _) = server.accept()
            print(other)
            end.sendall(end.recv(1))
    if RESHAPE:
        from cgx_jax.commands import rig
        assert rig.joined()
        rig.shape(RESHAPE)
    tc = ["tc", "class", "show", "dev", "cgx_v0"]
    print(subprocess.run(tc, capture_output=True, text=True).stdout)
    ip = ["ip", "-details", "link", "show", "cgx_v0"]
    print(subprocess.run(ip, capture_output=True, text=True).stdout, file=sys.stderr)
else:
    while True:
        with socket.socket() as end:
            if end.connect_ex((os.environ["MASTER_ADDR"], 9000)) == 0:
                start = time.monotonic()
                end.sendall(b"x")
                assert end.recv(1) == b"x"
                took = time.monotonic() - start
                assert took >= 2 * DELAY, took
                break
        time.sleep(0.01)
"""


def started(*arguments, **options):
    """Calls `run` in a process whose exit code and output can be read."""
    given = ", ".join([*map(repr, arguments), *(f"{k}={v!r}" for k, v in options.items())])
    call = f"import sys; from cgx_jax.commands import rig; sys.exit(rig.run({given}))"
    return subprocess.run(
        [sys.executable, "-c", call], capture_output=True, text=True, check=False, timeout=60
    )


# Ranks, rate, delay, the rate from then on, and what tc says in the end.
LINKS = {
    "two hosts": (2, "100mbit", 0, None, "rate 100Mbit"),
    "three hosts": (3, "1gbit", 0, None, "rate 1Gbit"),
    "a rate that changes": (2, "1gbit", 0, "100mbit", "rate 100Mbit"),
    "no limit from then on": (2, "1gbit", 0, "unlimited", ""),
    "a delay": (3, "1gbit", 0.02, None, "rate 1Gbit"),
}


@needs_link
@pytest.mark.parametrize("name", LINKS)
@pytest.mark.quick("a rate that changes")
def test_ranks_reach_each_other_over_links_of_that_rate_and_delay(name):
    world, rate, delay, then, shown = LINKS[name]
    program = f"RESHAPE, DELAY = {then!r}, {delay}\n{SHOWS}"
    done = started(world, rate, [sys.executable, "-c", program], delay=delay)
    assert done.returncode == 0, done.stderr
    others, tc = done.stdout.split()[: world - 1], done.stdout.split()[world - 1 :]
    assert sorted(others) == [f"10.78.0.{rank + 1}" for rank in range(1, world)]
    assert shown in " ".join(tc)
    assert bool(tc) == bool(shown)
    # htb sends a segment at once, so a segment is about what the link takes in 0.13 ms.
    largest = {"rate 100Mbit": 2048, "rate 1Gbit": 16000, "": 65536}[shown]
    assert f"gso_max_size {largest} " in done.stderr


@needs_link
def test_a_failed_rank_ends_the_others_and_its_output_is_shown():
    fails = "import os, sys, time; os.environ['RANK'] == '1' and sys.exit('no'); time.sleep(600)"
    done = started(3, "1gbit", [sys.executable, "-c", fails])
    assert done.returncode == 1
    assert "rank 1 failed:\nno" in done.stderr


@needs_link
@pytest.mark.parametrize(
    "end", [signal.SIGINT, signal.SIGHUP, signal.SIGQUIT], ids=lambda signal: signal.name
)
@pytest.mark.quick("SIGHUP")
def test_an_interrupted_run_ends_its_ranks(tmp_path, end):
    """Terminals send these signals to all processes of a command that they started."""
    waits = f"import time; print('up', flush=True); time.sleep(600)  # {tmp_path}"
    marked = [sys.executable, "-c", waits]
    # A shell's background jobs ignore the signal.
    starts = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    starts += f"from cgx_jax.commands import rig; rig.run(2, '1gbit', {marked!r})"
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    command = [sys.executable, "-c", starts]
    with subprocess.Popen(command, start_new_session=True, **pipes) as process:
        assert process.stdout.readline() == b"up\n"
        os.killpg(process.pid, end)
    left, until = True, time.monotonic() + 10
    while left and time.monotonic() < until:
        time.sleep(0.1)
        lines = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline")]
        left = any(str(tmp_path).encode() in line for line in lines)
    assert not left


@pytest.mark.slow
@needs_link
def test_a_run_that_takes_too_long_is_stopped():
    done = started(2, "1gbit", ["sleep", "600"], timeout=0.5)
    assert done.returncode == 124
    assert "stopped after 0 s" in done.stderr


def test_a_rate_that_is_none_is_refused():
    message = "rate 'fast' is not a number followed by kbit, mbit or gbit, from 8kbit to 100gbit"
    with pytest.raises(ValueError, match=message):
        rig.run(2, "fast", ["true"])
