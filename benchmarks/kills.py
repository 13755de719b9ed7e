"""Kills workers of examples/14_elastic.py at random moments, and waits for the others to go on.

    python benchmarks/kills.py --kills 100 --json benchmarks/results/kills.jsonl

Four workers train. One of them, possibly the coordinator, is killed (SIGKILL) at a random moment
within --every seconds after the last start: while they start, compile, train or save. The other
three go on, and after the next kill four start again. `went_on_after` is the time from the kill to
the first step that ends after it. A run hangs if no such step ends within --patience seconds. It
diverges if the ranks hold different bits at a checkpoint.
"""

import argparse
import importlib.util
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import measure

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "examples"))
_spec = importlib.util.spec_from_file_location("elastic", ROOT / "examples" / "14_elastic.py")
assert _spec is not None
assert _spec.loader is not None
elastic = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(elastic)

STEPS = 1_000_000  # more than are ever taken


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--every", type=float, default=20, help="seconds (default %(default)s)")
    parser.add_argument("--patience", type=float, default=180, help="(default %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    measure.add_json_option(parser)
    arguments = parser.parse_args()
    chance = random.Random(arguments.seed)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        supervisor = elastic.Supervisor(Path(folder), STEPS)
        world = elastic.WORLD
        supervisor.start(world)
        for number in range(arguments.kills):
            row = kill(supervisor, chance, world, arguments)
            rows.append(row)
            print(f"{number + 1:>4}: {row}", flush=True)
            if row["outcome"] != "went on":
                print((Path(folder) / "workers.log").read_text()[-3000:])
                break
            world = row["world"]
        for worker in supervisor.workers:
            worker.kill()
            worker.wait()
    seconds = [row["went_on_after"] for row in rows if row["outcome"] == "went on"]
    print(
        f"{len(rows)} kills, {len(seconds)} recoveries;"
        f" seconds to go on (quartiles): {measure.quartiles(seconds)}"
    )
    measure.write_json(arguments.json, rows)
    return 0 if len(seconds) == arguments.kills else 1


def kill(supervisor: Any, chance: random.Random, world: int, arguments: Any) -> dict[str, Any]:
    """Kills one worker after a while, starts the rest, and waits for their first step."""
    deadline = time.monotonic() + chance.uniform(0, arguments.every)
    while time.monotonic() < deadline:
        if supervisor.ended() is not None:
            return {"outcome": f"ended by themselves: {supervisor.ended()}"}
        time.sleep(0.05)
    victim, before = chance.randrange(world), supervisor.entries()
    supervisor.kill(victim)
    start = time.monotonic()
    row = {"victim": victim, "of": world, "step": before[-1]["step"] if before else None}
    supervisor.wait(arguments.patience)
    new_world = world - 1 if world == elastic.WORLD else elastic.WORLD
    supervisor.start(new_world)
    while len(supervisor.entries()) == len(before):
        if time.monotonic() > start + arguments.patience:
            return row | {"outcome": "hang"}
        if (code := supervisor.ended()) is not None:
            return row | {"outcome": "diverged" if code == elastic.DIVERGED else "failed"}
        time.sleep(0.05)
    first = supervisor.entries()[len(before)]
    return row | {
        "world": new_world,
        "from_step": first["step"],
        "loss": first["loss"],
        "went_on_after": time.monotonic() - start,
        "outcome": "went on",
    }


if __name__ == "__main__":
    sys.exit(main())
