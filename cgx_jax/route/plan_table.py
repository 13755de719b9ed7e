"""A plan as a human-readable table."""

from __future__ import annotations

from cgx_jax.axes import Axes
from cgx_jax.choice import Auto
from cgx_jax.host.console import Column, table_lines
from cgx_jax.plan import Plan
from cgx_jax.route.route import Options, Way, decide

_COLUMNS = (
    *map(Column, ("leaf", "shape", "compressor")),
    *(Column(heading, right=True) for heading in ("bits", "bytes", "method")),
)


def plan_table(plan: Plan, world: int | None = None) -> str:
    """Returns a plan as a table: leaf, shape, compressor, bits per value and payload bytes.

    With `world`, a number of ranks, the table also has the method that `exchange="auto"` takes for
    each leaf. It depends on the active profile, or on the size if there is none. A leaf with the
    method "psum" is sent uncompressed. Raises ValueError if the profile was measured at another
    world size, and TypeError for a leaf of random keys.
    """
    plan.require_numbers("plan_table")
    way_of: dict[int, Way | None] = {}
    if world is not None:
        options = Options("plan_table", Axes((), None, world), Auto())
        way_of = {i: way for buffer, way in decide(options, plan).ways.items() for i in buffer}
    rows = []
    total = 0
    for i, (leaf, compressor) in enumerate(zip(plan.leaves, plan.compressors, strict=True)):
        way = way_of.get(i)
        exact = world is not None and way is None
        bits = 8 * leaf.sum_bytes if exact else compressor.wire_bits(leaf.shape, leaf.dtype)
        nbytes = -(-bits // 8)
        total += nbytes
        per_value = f"{bits / leaf.size:.2f}" if leaf.size else "-"
        shape = f"{leaf.dtype}{list(leaf.shape)}"
        method = "psum" if way is None else way.exchange.shorthand
        if way is not None and way.reduction.shorthand != compressor.reductions[0]:
            method += f"/{way.reduction.shorthand}"
        rows.append((leaf.path or ".", shape, str(compressor), per_value, f"{nbytes:,}", method))
    columns = _COLUMNS[: len(_COLUMNS) - (world is None)]
    lines = table_lines(columns, rows, gap="  ")
    raw = sum(leaf.nbytes for leaf in plan.leaves)
    lines.insert(1, "-" * max(map(len, lines)))
    lines.append(
        f"{len(plan.leaves)} leaves in {len(plan.buffers)} fusion buffers and "
        f"{len(plan.exact)} exact: {total:,} of {raw:,} bytes ({raw / max(total, 1):.2f}x less)"
    )
    return "\n".join(lines)
