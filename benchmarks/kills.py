"""Kills workers of examples/09_elastic.py at random moments, and waits for the others to go on.

    python benchmarks/kills.py --kills 100 --json benchmarks/results/kills.jsonl
    python benchmarks/kills.py --round 10 --rate 10mbit --json benchmarks/results/kills.jsonl

Four workers train. One of them, possibly the coordinator, is killed (SIGKILL) at a random moment
within --every seconds: after their first step, while they train or save, and every third time after
their start, usually before that step. The other three go on, and after the next kill four start
again. `went_on_after` is the time from the kill to the next step, also if more kills come before
it; with DiLoCo, to the first step after the next round. A run hangs if this takes longer than
--patience seconds from a start. It diverges if the ranks hold different bits at a checkpoint, or go
on from other bits than it has. --round and --rate are those of the example: DiLoCo, over slow
links.
"""

import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import measure

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "examples"))
from supervisor import DIVERGED, WORLD, Supervisor, elsewhere  # noqa: E402

STEPS = 1_000_000  # more than are ever taken


def main() -> int:
    parser = measure.parser(__doc__)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--round", type=int, default=0, help="steps; 0: no DiLoCo")
    parser.add_argument("--rate", help="of the links between the workers")
    parser.add_argument("--every", type=float, default=20, help="seconds (default %(default)s)")
    parser.add_argument("--patience", type=float, default=180, help="(default %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    if (code := elsewhere(arguments.rate)) is not None:
        return code
    chance = random.Random(arguments.seed)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        supervisor = Supervisor(Path(folder), STEPS, arguments.round)
        try:
            outcome = kill_some(supervisor, chance, arguments, rows)
        finally:
            for worker in supervisor.workers:
                worker.kill()
                worker.wait()
        if outcome != "went on":
            print(outcome, (Path(folder) / "workers.log").read_text()[-3000:])
    seconds = [row["went_on_after"] for row in rows if row["outcome"] == "went on"]
    print(
        f"{len(rows)} kills, {len(seconds)} recoveries;"
        f" seconds to go on (quartiles): {measure.quartiles(seconds)}"
    )
    measure.write_json(arguments.json, rows)
    return 0 if len(seconds) == arguments.kills else 1


def kill_some(
    supervisor: Any, chance: random.Random, arguments: Any, rows: list[dict[str, Any]]
) -> str:
    """Kills workers and starts others, and adds a row for each kill; returns the last outcome."""
    world, seen, waiting = WORLD, 0, []
    supervisor.start(world)
    for number in range(arguments.kills + 1):
        if number % 3 < 2 or number == arguments.kills:
            # The steps of a round reduce nothing: the one after it shows that all workers go on.
            outcome = await_entry(supervisor, seen + arguments.round, arguments.patience)
            for row, killed in waiting:
                row["outcome"] = outcome
                if outcome == "went on":
                    entries = supervisor.entries()
                    first, last = entries[seen], entries[seen + arguments.round]
                    row |= {"from_step": first["step"], "loss": first["loss"]}
                    row["went_on_after"] = last["time"] - killed
                print(row, flush=True)
            waiting = []
            if outcome != "went on" or number == arguments.kills:
                return outcome
        time.sleep(chance.uniform(0, arguments.every))
        if (code := supervisor.ended()) is not None:
            return "diverged" if code == DIVERGED else "failed"
        victim, killed = chance.randrange(world), time.time()
        supervisor.kill(victim)
        supervisor.wait(arguments.patience)
        entries = supervisor.entries()  # only now: a step may have ended after the kill
        row = {
            "round": arguments.round,
            "links": arguments.rate or "loopback",
            "victim": victim,
            "of": world,
            "while": "training" if entries[seen:] else "starting",
            "step": entries[-1]["step"] if entries else None,
            "outcome": "not known",
        }
        rows.append(row)
        waiting.append((row, killed))
        seen = len(entries)
        world = world - 1 if world == WORLD else WORLD
        supervisor.start(world)
    raise AssertionError


def await_entry(supervisor: Any, seen: int, patience: float) -> str:
    """Waits for an entry after the first `seen` ones; returns what came of it."""
    deadline = time.monotonic() + patience
    while len(supervisor.entries()) <= seen:
        if time.monotonic() > deadline:
            return "hang"
        if (code := supervisor.ended()) is not None:
            return "diverged" if code == DIVERGED else "failed"
        time.sleep(0.05)
    return "went on"


if __name__ == "__main__":
    sys.exit(main())
