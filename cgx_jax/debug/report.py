"""The report of non-finite values: the call that makes it at run time, and its text.

The native call prints nothing itself. It calls `_listen`, so a report goes to this module's logger,
or into the error that the call returns.
"""

from __future__ import annotations

import functools
import json
import logging
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import ad, batching, mlir

from cgx_jax import _compat
from cgx_jax.kernels import native, primitives

_LINES = 20  # per report: a NaN in the forward pass is in the gradient of every leaf
_log = logging.getLogger(__name__)


class Side(NamedTuple):
    """A leaf as operand ("in") or result ("out"): its text, its shape and the size of its blocks.

    A block is the values that share a code, if any do.
    """

    name: str
    leaf: str
    shape: Sequence[int]
    block_size: int | None


class Report(NamedTuple):
    """The part of a report that is known while tracing.

    `axes` are those of the call, and `around` has all axes of the mesh with their sizes. `sides`
    alternate between "in" and "out".
    """

    action: str
    caller: str
    axes: Sequence[str]
    around: Sequence[tuple[str, int]]
    sides: Sequence[Side]


def tell(report: Report, step: Any, rank: Any, table: Any) -> jax.Array:
    """Reports `table`, i32[ranks, sides, 2], at run time; returns i32[] to wait for.

    For each rank and side, the table has the number of non-finite values and the place of the
    first. `step` and `rank`, i32[], are this rank's. A negative step is not reported.
    """
    # As text, so that the program needs no object of the tracing process.
    operands = (jnp.asarray(x)[None] for x in (step, rank, table))
    (told,) = primitives.bind(report_p, *operands, text=json.dumps(report))
    return told


def _report(text: str, steps: Any, ranks: Any, tables: Any) -> None:
    """Reports each element of a batch."""
    action, caller, axes, around, sides = json.loads(text)
    report = Report(action, caller, axes, around, [Side(*side) for side in sides])
    shape = (len(steps), math.prod(size for _, size in report.around), len(report.sides), 2)
    found = np.reshape(np.asarray(tables), shape)
    for step, rank, table in zip(np.asarray(steps), np.asarray(ranks), found, strict=True):
        _raise_or_log(report, int(step), int(rank), table)


def _listen(text: str, steps: Any, ranks: Any, tables: Any) -> str:
    """Calls `_report` for the native call; returns the text of the error, or ""."""
    try:
        _report(text, steps, ranks, tables)
    except FloatingPointError as error:
        return f"FloatingPointError: {error}"
    return ""


def _call_back(steps: Any, ranks: Any, tables: Any, *, text: str) -> list[jax.Array]:
    jax.debug.callback(functools.partial(_report, text), steps, ranks, tables)
    return [jnp.int32(0)]


def _batch(args: Any, dims: Any, *, text: str) -> Any:
    size = next(x.shape[d] for x, d in zip(args, dims, strict=True) if d is not None)
    front = (batching.bdim_at_front(x, d, size) for x, d in zip(args, dims, strict=True))
    flat = [x.reshape(-1, *x.shape[2:]) for x in front]
    return primitives.bind(report_p, *flat, text=text), [None]


def after_report(told: Any, x: Any) -> Any:
    """Makes `x` depend on the report `told`, since JAX removes operations that nothing uses."""
    return _after_p.bind(x, told)


# XLA knows that the report has a side effect, so the dependency costs nothing there.
_after_p = _compat.identity("cgx_after_report")
batching.primitive_batchers[_after_p] = lambda args, dims: (_after_p.bind(*args), dims[0])
ad.primitive_jvps[_after_p] = lambda primals, tangents: (_after_p.bind(*primals), tangents[0])

report_p = _compat.operation(
    "cgx_report",
    lambda steps, ranks, table, *, text: [_compat.result_aval((), jnp.dtype(jnp.int32), table)],
)
batching.primitive_batchers[report_p] = _batch
mlir.register_lowering(report_p, mlir.lower_fun(_call_back, multiple_results=True))
# JAX starts programs with host callbacks by a slower path, so CPUs use our own native call.
if (module := native.module()) is not None:
    module.set_listener(_listen)
    _lowering = jax.ffi.ffi_lowering("cgx_report", has_side_effect=True)
    mlir.register_lowering(report_p, _lowering, platform="cpu")


def _raise_or_log(report: Report, step: int, rank: int, found: np.ndarray) -> None:
    if not found[..., 0].any():  # under vmap, a cond runs both branches
        return
    when = "" if step < 0 else f", step {step}"
    lines = [
        f"{side.name} {side.leaf}: {_ranks(who, report.around)} {_place(side, *what)}"
        for i, side in enumerate(report.sides)
        for what, who in _alike(found[:, i])
    ]
    if len(lines) > _LINES:
        lines[_LINES:] = [f"and {len(lines) - _LINES} more"]
    names = ", ".join(report.axes)
    text = f"{report.caller} over axis {names}{when}: values are not finite.\n"
    text += "\n".join(f"  {line}" for line in lines) + "\n" + _remedy(found)
    if report.action == "raise":
        raise FloatingPointError(text)
    if rank == 0:
        skipped = " The result is 0 on every rank." if report.action == "skip" else ""
        _log.warning("%s%s", text, skipped)


def _alike(values: np.ndarray) -> list[tuple[tuple[int, int], list[int]]]:
    """Groups ranks with equal (count, first); leaves out ranks whose count is 0."""
    groups: dict[tuple[int, int], list[int]] = {}
    for rank, (count, first) in enumerate(values.tolist()):
        if count:
            groups.setdefault((count, first), []).append(rank)
    return list(groups.items())


def _ranks(ranks: list[int], around: Sequence[tuple[str, int]]) -> str:
    sizes = tuple(size for _, size in around)
    if len(ranks) == math.prod(sizes):
        return "every rank has"
    places = [np.unravel_index(rank, sizes) for rank in ranks]
    named = [
        str(*place)
        if len(sizes) == 1
        else f"({', '.join(f'{a} {int(i)}' for (a, _), i in zip(around, place, strict=True))})"
        for place in places
    ]
    return f"rank {named[0]} has" if len(ranks) == 1 else f"ranks {', '.join(named)} have"


def _place(side: Side, count: int, first: int) -> str:
    shape, size = side.shape, side.block_size
    at = [int(i) for i in np.unravel_index(first, shape)] if shape else []
    bucket = f", bucket {first // size} of {size} values" if size and size > 1 else ""
    return f"{count} of {math.prod(shape)}, the first at {at}{bucket}"


def _remedy(found: np.ndarray) -> str:
    if found[:, ::2, 0].any():
        return 'Look at the loss and the data of the ranks in the "in" lines.'
    return (
        "The operands are finite on every rank, so a sum or the range of a bucket overflows: scale "
        "gradients down, or reduce them in a wider dtype."
    )
