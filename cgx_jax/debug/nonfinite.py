"""The debug mode, and the search for non-finite values that it adds to a program."""

from __future__ import annotations

import cmath
import contextlib
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from cgx_jax import _compat
from cgx_jax.axes import Axes
from cgx_jax.debug.checksums import traced_anew
from cgx_jax.debug.report import Report, Side, after_report, tell
from cgx_jax.exchanges import Xla
from cgx_jax.kernels.nonfinite import count_nonfinite
from cgx_jax.leaves import SCALARS, Leaf

_ACTIONS = ("raise", "log", "skip")
_action: str | None = None


@contextlib.contextmanager
def debug_nonfinite(action: str = "raise") -> Iterator[None]:
    """Makes compressed reductions report non-finite values in their operands and results.

    A report names the call, the step (if `sync_gradients` counts it) and each affected leaf. For a
    leaf it has the ranks, the number of non-finite values, the place of the first one and its
    bucket. `action` is one of:

    * "raise": every rank fails with a FloatingPointError (under jit inside a JaxRuntimeError). The
      error appears where the host next waits, so steps that were already dispatched have run.
    * "log": the first rank warns once, through the logger "cgx_jax.debug.report".
    * "skip": logs, and sets the result of the call to 0 on all ranks of the mesh. `sync_gradients`
      then keeps its state and counts the step.

    While values are finite, it costs a pass over the results. If a code may hide a non-finite value
    (`Compressor.carries_nonfinite` is False), it also costs a pass over the operands. In that case,
    and if ranks have different results, a sum of 4 bytes over the mesh makes all ranks decide
    alike.

    Clears JAX's caches on entry and on exit, so that functions compiled outside are traced again.

    Raises ValueError for another action. Raises ValueError while tracing for "skip" around
    `reduce_in_backward` and the calls of sharded training, such as `psum_scatter_compressed`. These
    reduce leaves one after the other, so they cannot skip a step as a whole.
    """
    global _action
    if action not in _ACTIONS:
        raise ValueError(f"debug_nonfinite: action={action!r} must be one of {_ACTIONS}.")
    before, _action = _action, action
    try:
        with traced_anew():
            yield
    finally:
        _action = before


def watching() -> bool:
    """Returns whether the mode is on."""
    return _action is not None


def refuse_skip(caller: str) -> None:
    """Raises ValueError if the action is "skip", for a call that is only a part of a step."""
    if _action == "skip":
        raise ValueError(
            f"{caller}: debug_nonfinite('skip') cannot skip part of a step, but this call reduces "
            "leaves one after the other; use action='raise' or 'log', or reduce with "
            "sync_gradients, pmean_compressed or value_and_grad."
        )


class Watched(NamedTuple):
    """A call to search: the name that the user wrote, its ranks, and the paths of its leaves.

    `block_sizes` maps leaf numbers to the block sizes of their codes. A non-finite value in the
    operand of a leaf in `carried` shows in the leaf's result on some rank, so these operands are
    searched only after something was found. `alike` says that the ranks of `axes` have the same
    results.
    """

    caller: str
    axes: Axes
    paths: Sequence[str]
    block_sizes: Mapping[int, int | None]
    carried: Collection[int]
    alike: bool


def watch(
    call: Watched, before: Sequence[Any], after: Sequence[Any], step: Any = None
) -> tuple[list[Any], Any]:
    """In debug mode, adds a search for non-finite values to the program.

    `before` are the operands of a reduction and `after` its results, one array each per leaf.
    Returns `after`, or zeros if the step is skipped, and whether it is skipped, bool[] or False.
    """
    if _action is None:
        return list(after), False
    axes, alike = call.axes, call.alike
    given = after
    before, after = (tuple(jnp.asarray(x) for x in side) for side in (before, after))
    floats = [i for i, x in enumerate(before) if jnp.issubdtype(x.dtype, jnp.inexact) and x.size]
    if not floats:
        return list(after), False
    mesh = jax.sharding.get_abstract_mesh()
    if rest := [n for n in mesh.axis_names if n not in mesh.manual_axes and mesh.shape[n] > 1]:
        raise ValueError(
            f"{call.caller}: debug_nonfinite reports from single devices, which XLA refuses while "
            f"it shards over axis {rest[0]!r}; make all axes of the mesh manual here. "
            "sync_gradients, diloco and value_and_grad do so with specs=."
        )
    hidden = [i for i in floats if i not in call.carried]
    out = _counted(after, floats)
    finite = ~out[:, 0].any()
    if alike:
        finite = _compat.same_over(finite, axes.names)
    if hidden:
        finite &= ~_counted(before, hidden)[:, 0].any()
    bad = ~axes.on_every_rank(finite, alike=alike and not hidden)
    sides = []
    for i in floats:
        for name, x in (("in", before[i]), ("out", after[i])):
            leaf = Leaf(call.paths[i], x.shape, x.dtype)
            sides.append(Side(name, str(leaf), x.shape, call.block_sizes.get(i)))
    around = [(str(name), size) for name, size in axes.around.items()]
    report = Report(_action, call.caller, list(map(str, axes.names)), around, sides)
    number = jnp.int32(-1) if step is None else step
    everyone = Axes(tuple(axes.around), None, math.prod(axes.around.values()))
    varying = frozenset().union(*map(_compat.varying_axes, (bad, number, *before, *after)))
    ranks = frozenset(everyone.names if _compat.bound_by_mesh(everyone.names) else ())
    varying |= ranks

    def report_found() -> jax.Array:
        # By rank and side of each leaf: the number of values and the place of the first.
        table = jnp.stack([_counted(before, floats), out], axis=1).reshape(-1, 2)
        rows = Xla().gather(call.caller, _compat.vary_over(table, ranks), everyone)
        told = tell(report, number, lax.axis_index(everyone.names), rows)
        return _compat.vary_over(told, varying)

    told = lax.cond(bad, report_found, lambda: _compat.vary_over(jnp.int32(0), varying))

    def result(x: Any) -> Any:
        if isinstance(x, SCALARS):  # Python numbers stay Python numbers
            return x if _action != "skip" or cmath.isfinite(x) else type(x)(0)
        x = after_report(told, x)
        return jnp.where(bad, jnp.zeros_like(x), x) if _action == "skip" else x

    return list(map(result, given)), bad if _action == "skip" else False


def _counted(leaves: Sequence[jax.Array], numbers: Sequence[int]) -> jax.Array:
    """Counts the non-finite values of the leaves with these numbers, i32[numbers, 2]."""
    return count_nonfinite([_compat.plain(lax.stop_gradient(leaves[i])) for i in numbers])
