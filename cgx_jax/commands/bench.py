"""`python -m cgx_jax bench`: times psum and every exchange over sizes, as nccl-tests does."""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cgx_jax._types import Json
from cgx_jax.choice import auto
from cgx_jax.compressors import Compressor, Quantize
from cgx_jax.host import agreement, files, installation
from cgx_jax.host.console import Column, table_lines
from cgx_jax.reductions import ScatterGather
from cgx_jax.tuning.link_timer import LinkTimer, gradient

FLOAT_STEP = 2.0**-24  # relative error of one fp32 rounding
_COLUMNS = (
    Column("bytes", 11, right=True),
    Column("method", 6, right=True),
    Column("bits", 4, right=True),
    Column("median ms", 9, right=True),
    Column("algbw", 7, right=True),
    Column("busbw", 7, right=True),
    Column("Gbit/s", 7),  # the unit of the two columns before it; its cells are empty
    Column("ratio (quartiles)", 18),
    Column("#wrong", 6, right=True),
)
EXPLANATION = """\
Every repeat times all methods in a random order, each behind a barrier, and the slowest process's
time counts. `ratio` is psum's time divided by the method's time in the same repeat: the median (and
quartiles) over the repeats. `algbw` is fp32 bytes divided by time. `busbw` is `algbw` times
2(W-1)/W, the share of the message that a rank of a perfect fp32 ring sends, so results for
different world sizes can be compared. `#wrong` counts values farther from the exact sum than the
stated error bound.
"""


def run(
    links: LinkTimer,
    sizes: Sequence[int],
    bits: Sequence[int],
    reps: int,
    *,
    follow_profile: bool,
    link: str | None,
    json_path: Path | None,
    png_path: Path | None,
) -> None:
    """Measures; on process 0, prints the table and writes the files that are asked for.

    `follow_profile` adds the exchange "auto". `link` is the rate of the link between the ranks, if
    it is known.
    """
    rows: list[Json] = []
    if link and links.first:
        print(f"{links.world} processes, joined by a link of {link}")
    for size in sizes:
        found = measure(links, size // 4, bits, reps, follow_profile)
        if links.first:
            print_rows(found, header=not rows)
        rows += found
    if links.first:
        machine = installation.facts()
        document = {"machine": machine, "world": links.world, "link": link, "rows": rows}
        write("draw_bench", document, json_path, png_path)


def write(chart: str, document: Json, json_path: Path | None, png_path: Path | None) -> None:
    """Writes what is asked for: a document, and the `chart` of its rows."""
    if json_path is not None:
        files.write(json_path, json.dumps(document, indent=1) + "\n")
    if png_path is not None:
        from cgx_jax.commands import charts  # matplotlib is an extra

        getattr(charts, chart)(document["rows"], document["world"], png_path)
        print(f"drawn in {png_path}")


def measure(
    links: LinkTimer, values: int, bits: Sequence[int], reps: int, follow_profile: bool
) -> list[Json]:
    """Times every method on f32[values] per rank; returns one row per method."""
    exchanges = [e.shorthand for e in auto.available()] + ["auto"] * follow_profile
    methods = [(exchange, width) for width in bits for exchange in exchanges]
    functions = [links.psum, *(links.all_reduce(Quantize(b), method) for method, b in methods)]
    x = links.place(gradient, values)
    results = [function(x) for function in functions]
    wrong = check(links, values, Quantize(bits[0]), results[:1], exact=True)
    for width in bits:
        mine = [r for r, (_, b) in zip(results[1:], methods, strict=True) if b == width]
        wrong += check(links, values, Quantize(width), mine, exact=False)
    seconds = links.seconds(functions, x, reps)
    return [
        {"bytes": 4 * values, "method": method, "bits": width}
        | figures(links.world, 4 * values, seconds[:, 0], seconds[:, i])
        | {"wrong": wrong[i]}
        for i, (method, width) in enumerate([("psum", 32), *methods])
    ]


def check(
    links: LinkTimer,
    values: int,
    compressor: Quantize,
    results: Sequence[jax.Array],
    *,
    exact: bool,
) -> list[int]:
    """Counts the values of each result that exceed the error bound, on process 0 (0 elsewhere).

    Raises RuntimeError if ranks hold different compressed results.
    """
    copies = [[np.asarray(shard.data) for shard in r.addressable_shards] for r in results]
    sums = agreement.rows([[zlib.crc32(copy.tobytes()) for copy in mine] for mine in copies])
    sums = sums.reshape(len(sums), len(results), -1)
    if not exact and (sums != sums[:1, :, :1]).any():
        raise RuntimeError(
            "the ranks hold different results; cgx_jax.debug.debug_checksums finds the ranks"
        )
    if not links.first:
        return [0] * len(results)
    inputs = np.stack([gradient(rank, values) for rank in range(links.world)])
    return wrong(inputs, None if exact else compressor, [mine[0] for mine in copies])


def wrong(
    inputs: np.ndarray, compressor: Compressor | None, results: Sequence[np.ndarray]
) -> list[int]:
    """Counts values of each result that are farther from the sum than allowed, and NaNs.

    `inputs` is f32[world, values]. fp32 sums and the compressor, if any, may add errors.
    """
    limit = len(inputs) * FLOAT_STEP * np.abs(inputs).sum(axis=0, dtype=np.float64)
    if compressor is not None:
        limit += np.asarray(ScatterGather().error_bound(compressor, jnp.asarray(inputs)))
    total = inputs.sum(axis=0, dtype=np.float64)
    return [int(np.count_nonzero(~(np.abs(result - total) <= limit))) for result in results]


def quartiles(values: Any) -> list[float]:
    """Returns the lower quartile, the median and the upper quartile."""
    return [float(q) for q in np.percentile(np.asarray(values, np.float64), (25, 50, 75))]


def spread(quartiles: Sequence[float]) -> str:
    """Formats quartiles as the median, with the others in parentheses."""
    low, median, high = quartiles
    return f"{median:.2f} ({low:.2f}-{high:.2f})"


def figures(world: int, nbytes: int, psum: np.ndarray, mine: np.ndarray) -> Json:
    """Returns a method's figures from its seconds and from psum's in the same repeats."""
    algbw = 8e-9 * nbytes / float(np.median(mine))
    return {
        "seconds": quartiles(mine),
        "algbw_gbit": algbw,
        "busbw_gbit": algbw * 2 * (world - 1) / world,
        "ratio": quartiles(psum / mine),
    }


def print_rows(rows: Sequence[Json], *, header: bool) -> None:
    """Prints one line per method."""
    cells = [
        (
            f"{row['bytes']:,}",
            row["method"],
            f"{row['bits']}",
            f"{row['seconds'][1] * 1e3:.3f}",
            f"{row['algbw_gbit']:.2f}",
            f"{row['busbw_gbit']:.2f}",
            "",
            spread(row["ratio"]),
            f"{row['wrong']}",
        )
        for row in rows
    ]
    print(*table_lines(_COLUMNS, cells, head=header), sep="\n", flush=True)
