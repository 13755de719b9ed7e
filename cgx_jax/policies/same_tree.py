"""One adaptive policy serves one tree: checks that find another tree, also after a restart."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cgx_jax.leaves import Leaf


def saved_leaves(saved: Sequence[tuple[str, tuple[int, ...], str]]) -> tuple[Leaf, ...]:
    """The leaves of `checkpoint.Saved`; raises ValueError for an unknown dtype."""
    try:
        return tuple(Leaf(path, shape, np.dtype(dtype)) for path, shape, dtype in saved)
    except TypeError as error:
        raise ValueError(
            f"Adaptive: the saved policy has a leaf of no known dtype ({error}); pass the state "
            "that state_dict returned."
        ) from None


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
