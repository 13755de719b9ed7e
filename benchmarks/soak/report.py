"""What the soak makes of its records and samples: one row per job, and slopes."""

from typing import Any

import numpy as np

# One reduction; `case` is its number in the pool, `share` its error divided by the bound, or -1 if
# it was not compared with the exact sum.
RECORD = np.dtype([("case", "<u2"), ("crc", "<u4"), ("share", "<f4"), ("time", "<f8")])
BLOCKS = 30  # of neighboring samples; a line is fitted to their means


def slope(times: np.ndarray, values: np.ndarray) -> tuple[float, float] | None:
    """Slope of a line by least squares, and its standard error; None for fewer than 4 samples.

    Neighboring samples are not independent, so they are averaged in up to `BLOCKS` blocks. The
    error is that of a line through the means.
    """
    count = min(BLOCKS, len(times) // 2 if len(times) >= 2 * BLOCKS else len(times))
    if count < 4:
        return None
    t, v = (np.array([part.mean() for part in np.array_split(a, count)]) for a in (times, values))
    t = t - t.mean()
    rate = float((t * v).sum() / np.square(t).sum())
    rest = v - v.mean() - rate * t
    return rate, float(np.sqrt(np.square(rest).sum() / (count - 2) / np.square(t).sum()))


def settled(samples: np.ndarray) -> np.ndarray:
    """The samples after the first 40 % of the time: programs are compiled by then."""
    times = samples["time"]
    return samples[times >= times[0] + 0.4 * (times[-1] - times[0])] if len(samples) else samples


def of_process(samples: np.ndarray) -> dict[str, Any]:
    """Memory, descriptors and threads of one rank: the ends, and how they grow per hour."""
    late = settled(samples)
    row: dict[str, Any] = {}
    for name in ("rss_mb", "descriptors", "threads"):
        row[name] = [float(samples[name][0]), float(samples[name][-1])] if len(samples) else None
        found = slope(late["time"] / 3600, late[name].astype(float))
        row[f"{name}_per_hour"] = None if found is None else {"slope": found[0], "error": found[1]}
    return row


def compared(records: list[np.ndarray]) -> dict[str, Any]:
    """What the ranks' records say: how many reductions, and how many were wrong.

    Ranks that were ended have made different numbers of reductions. Only reductions that all ranks
    made count as such and are compared between ranks.
    """
    count = min(map(len, records))
    first = records[0][:count]
    differ = np.zeros(count, bool)
    for other in records[1:]:
        differ |= (other["crc"][:count] != first["crc"]) | (other["case"][:count] != first["case"])
    shares = np.concatenate([r["share"] for r in records])
    checked = shares[shares >= 0]
    return {
        "reductions": count,
        "mismatches": int(differ.sum()),
        "first_mismatch": int(np.argmax(differ)) if differ.any() else None,
        "checked": len(checked),
        "over_bound": int((checked > 1).sum()),
        "largest_share_of_bound": float(checked.max(initial=0)),
        "reductions_per_second": rate(first["time"]),
    }


def command(job: dict[str, Any], step: int) -> str:
    """Returns the command that repeats one step of a job."""
    state = f" --state {job['kept']}/began.npz" if job["state"] else ""
    place = ":".join(str(job[k]) for k in ("number", "phase", "exchange", "world"))
    options = f"--seed {job['seed']} --pool {job['pool']}{state}"
    return f"python benchmarks/soak/run.py {options} --repeat {place}:{step}"


def rate(times: np.ndarray) -> float | None:
    """Reductions per second between the first and the last."""
    return None if len(times) < 2 else float((len(times) - 1) / (times[-1] - times[0]))


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns one row for all jobs together."""
    killed = [r["others_ended_after"] for r in rows if r["others_ended_after"] is not None]
    return {
        "phase": "all",
        **{
            name: sum(r[name] for r in rows)
            for name in ("reductions", "mismatches", "checked", "over_bound", "seconds")
        },
        "jobs": len(rows),
        "kills": len(killed),
        "others_ended_after": max(killed, default=None),
        "hangs": sum(r["outcome"] == "hang" for r in rows),
        "failures": sum(r["outcome"] == "failed" for r in rows),
    }


def line(row: dict[str, Any]) -> str:
    """A job's row for the log."""
    speed = row["reductions_per_second"]
    text = f"{row['number']:>4} {row['phase']:<7} {row['exchange']} over {row['world']}:"
    text += f" {row['reductions']} reductions, {0 if speed is None else speed:.0f} per second;"
    text += f" {row['mismatches']} mismatches, {row['over_bound']} over the bound; {row['outcome']}"
    for rank, process in enumerate(row["ranks"]):
        if (grows := process["rss_mb_per_hour"]) is not None:
            text += f"; rank {rank} {grows['slope']:+.0f} ± {grows['error']:.0f} MB per hour"
    return text
