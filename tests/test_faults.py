"""What ranks see when another one fails, over XLA's collectives (gloo): docs/reliability.md.

Faults of the MPI exchange are in test_mpi.py.
"""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from processes import ENVIRONMENT, free_port

WORKER = Path(__file__).with_name("gloo_worker.py")
WORLD = 3
# Limit until the last process has ended: JAX's heartbeat, 10 s here, plus a loaded machine's delay.
SECONDS = 90
FAULTS = {
    "slow": "a right result: True",
    "killed before": "Gloo",
    "killed in": "Gloo",
    "stopped": None,  # JAX ends the process
    "width": "mismatch",
    "narrow": "mismatch",
    "shape": "mismatch",
    "rotated": "differ",  # under debug_checksums; without it the difference goes unnoticed
}


def ended(fault):
    """Returns exit codes and outputs of all ranks; the last rank is the one that fails."""
    port = free_port()
    command = [sys.executable, "-W", "ignore", str(WORKER), fault]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(WORLD), str(port)],
            env=ENVIRONMENT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(WORLD)
    ]
    deadline = time.monotonic() + SECONDS
    try:
        for rank in ranks[:-1]:
            rank.wait(deadline - time.monotonic())
    finally:
        for rank in ranks:
            rank.kill()
    outputs = [rank.communicate()[0] for rank in ranks]
    return [rank.returncode for rank in ranks], outputs


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_no_rank_waits_for_ever_and_none_has_a_wrong_result(fault):
    codes, outputs = ended(fault)
    for code, output in zip(codes[:-1], outputs[:-1], strict=True):
        assert "started" in output, output[-3000:]
        assert (code == 0) == (fault == "slow"), output[-3000:]
        assert "a right result: False" not in output
    if (says := FAULTS[fault]) is not None:
        assert any(says in output for output in outputs), outputs
    if fault != "slow":
        assert not any("a right result" in output for output in outputs[:-1])
