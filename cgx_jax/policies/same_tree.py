"""One adaptive policy serves one tree: checks that find another tree, also after a restart."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from cgx_jax.leaves import Leaf


def saved_leaves(state: dict[str, Any]) -> tuple[Leaf, ...]:
    """The leaves of the tree whose policy gave the `state_dict` `state`."""
    return tuple(Leaf(path, tuple(s), np.dtype(t)) for path, s, t in state["leaves"])


def check_same(ours: Sequence[Leaf], theirs: Sequence[Leaf], of: str) -> None:
    """Raises ValueError at the first leaf that differs from `theirs`, the leaves of `of`."""
    for a, b in zip(ours, theirs, strict=False):
        if a != b:
            raise ValueError(
                f"Adaptive: the tree has leaf {a.path!r} {a.dtype}{list(a.shape)} where {of} has "
                f"{b.path!r} {b.dtype}{list(b.shape)}; use one policy for one tree."
            )
    if len(ours) != len(theirs):
        longer, which = (ours, "the tree") if len(ours) > len(theirs) else (theirs, of)
        path = longer[min(len(ours), len(theirs))].path
        raise ValueError(
            f"Adaptive: the tree has {len(ours)} leaves and {of} {len(theirs)}; leaf {path!r} of "
            f"{which} is the first without a counterpart. Use one policy for one tree."
        )
