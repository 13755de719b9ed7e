"""Two processes in separate networks, joined by a link of the requested rate."""

import subprocess
import sys

import pytest

from cgx_jax import slow_link

PROBLEM = slow_link.missing()
needs_link = pytest.mark.skipif(PROBLEM is not None, reason=str(PROBLEM))

SHOWS = """
import os, socket, subprocess
rank = os.environ["CGX_LINK_RANK"]
own = socket.gethostbyname(socket.gethostname())
tc = subprocess.run(["tc", "class", "show", "dev", f"cgx{rank}"], capture_output=True, text=True)
with socket.socket() as s:  # the other end is there
    if rank == "0":
        s.bind((own, 9000)); s.listen(); print(own, s.accept()[1][0], tc.stdout)
    else:
        import time
        while s.connect_ex(("10.78.0.1", 9000)):
            time.sleep(0.01)
"""


def started(program, rate):
    """Calls `run` in a process whose exit code and output can be read."""
    call = (
        f"import sys; from cgx_jax import slow_link; sys.exit(slow_link.run({program!r}, {rate!r}))"
    )
    return subprocess.run(
        [sys.executable, "-c", call], capture_output=True, text=True, check=False, timeout=60
    )


@needs_link
@pytest.mark.parametrize(("rate", "shown"), [("100mbit", "rate 100Mbit"), ("1gbit", "rate 1Gbit")])
def test_ranks_reach_each_other_over_a_link_of_that_rate(rate, shown):
    done = started([sys.executable, "-c", SHOWS], rate)
    assert done.returncode == 0, done.stderr
    own, peer, *tc = done.stdout.split()
    assert (own, peer) == ("10.78.0.1", "10.78.0.2")
    assert shown in " ".join(tc)


@needs_link
def test_a_failed_rank_ends_the_other_and_its_output_is_shown():
    fails = "import os, sys, time; os.environ['CGX_LINK_RANK'] == '1' and sys.exit('no'); "
    done = started([sys.executable, "-c", fails + "time.sleep(600)"], "1gbit")
    assert done.returncode == 1
    assert "rank 1 failed:\nno" in done.stderr


def test_a_rate_that_is_none_is_refused():
    message = "rate 'fast' is not a number followed by kbit, mbit or gbit"
    with pytest.raises(ValueError, match=message):
        slow_link.run(["true"], "fast")


def test_what_is_missing_is_named_with_its_remedy(monkeypatch):
    assert not slow_link.joined()
    refused = subprocess.CompletedProcess([], 1, "", "unshare: not permitted\n")
    monkeypatch.setattr(slow_link, "_start", lambda *_, **__: refused)
    monkeypatch.setattr(slow_link.shutil, "which", lambda tool, **_: tool)
    monkeypatch.setattr(slow_link.sys, "platform", "linux")
    assert "(unshare: not permitted); try sudo" in slow_link.missing()
    monkeypatch.setattr(slow_link.shutil, "which", lambda tool, **_: None if tool == "tc" else tool)
    assert slow_link.missing().endswith("`tc`: install it (apt-get install iproute2)")
    monkeypatch.setattr(slow_link.sys, "platform", "darwin")
    assert slow_link.missing() == "a slow link needs Linux's network namespaces"
