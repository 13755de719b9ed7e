"""What the state of `sync_gradients` tells a logger."""

from __future__ import annotations

from typing import Any

import jax

from cgx_jax.leaves import leaves_of
from cgx_jax.transforms.state import SyncState


def metrics(state: Any) -> dict[str, int]:
    """How many values found no room in the last step: "cgx/overflow", and of each leaf by its path.

    `state` is the optimizer's, with that of a `sync_gradients` with a memory around codes with
    rooms of a fixed size: `Threshold`, `DGC`, `INCEPTIONN`. They wait in the memory. Counts are
    over the ranks of this process; a leaf whose code always has room has 0. Without such codes
    there is nothing to tell. Waits for the step.
    """

    def is_sync(x: Any) -> bool:
        return isinstance(x, SyncState)

    out: dict[str, int] = {}
    for sync in filter(is_sync, jax.tree.leaves(state, is_leaf=is_sync)):
        counts = jax.tree.leaves(sync.overflow)
        for leaf, count in zip(leaves_of(sync.overflow), counts, strict=True):
            own = sum(int(shard.data.sum()) for shard in count.addressable_shards)
            out[f"cgx/overflow/{leaf.path}"] = own
    return {"cgx/overflow": sum(out.values())} | out if out else {}
