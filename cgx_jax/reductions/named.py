"""Finds reductions by name, and the reduction that a compressor takes."""

from __future__ import annotations

from collections.abc import Sequence

from cgx_jax.compressors.base import CodedLeaf
from cgx_jax.exchanges.base import by_name
from cgx_jax.reductions.base import Reduction
from cgx_jax.reductions.gather_sum import GatherSum
from cgx_jax.reductions.ring import Ring
from cgx_jax.reductions.scatter_gather import ScatterGather
from cgx_jax.reductions.sum_rounds import SumRounds
from cgx_jax.reductions.tree import Tree

REDUCTIONS: tuple[Reduction, ...] = (ScatterGather(), GatherSum(), Ring(), Tree(), SumRounds())


def named(caller: str, reduction: Reduction | str | None) -> Reduction | None:
    """Returns the reduction that a name stands for, or None for None: each compressor's first.

    An instance of `Reduction` is returned unchanged. `caller` begins error messages. Raises
    ValueError for an unknown name, TypeError for anything that is neither a name nor a reduction.
    """
    if reduction is None:
        return None
    return by_name(caller, reduction, Reduction, REDUCTIONS, "cgx_jax.reductions.GatherSum()")


def reduction_of(
    caller: str, wanted: Reduction | None, leaves: Sequence[tuple[str, CodedLeaf]]
) -> Reduction:
    """Returns the reduction for leaves, given with their paths: `wanted`, or their first one.

    Raises ValueError for a compressor that it does not suit.
    """
    known = {r.shorthand: r for r in REDUCTIONS}
    for path, leaf in leaves:
        c = leaf.compressor
        where = f" of leaf {path!r}" if path else ""
        unknown = [name for name in c.reductions if name not in known]
        if wanted is None and c.reductions[0] in unknown:
            raise ValueError(
                f"{caller}: {c}{where} allows the reductions {list(c.reductions)}, but the first "
                f"is not one of {list(known)}; pass an instance of it as reduction=."
            )
        taken = known[c.reductions[0]] if wanted is None else wanted
        if (problem := taken.refusal(c)) is not None:
            raise ValueError(
                f"{caller}: reduction={taken.shorthand!r} does not suit {c}{where}: {problem}."
            )
    return known[leaves[0][1].compressor.reductions[0]] if wanted is None else wanted
