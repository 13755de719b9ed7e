"""What the state of `sync_gradients` tells a logger."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from cgx_jax._types import Pytree
from cgx_jax.leaves import leaves_of
from cgx_jax.transforms.state import require_concrete, sync_states


def metrics(state: Pytree) -> dict[str, int]:
    """Returns how many steps were skipped, and how many values found no room in the last step.

    `state` is the optimizer's state. Without a state of `sync_gradients` in it, the result is
    empty. Each value is an int.

    * "cgx/skipped" counts updates that left memory, moments and states of compressors as they were,
      because a mean was not finite, and updates that `debug_nonfinite("skip")` made 0. Where none
      of these is kept, no mean is checked. With moments alone, means are checked in steps that
      update the units. If there are several `sync_gradients`, the largest count is given.
    * "cgx/overflow", and "cgx/overflow/" with the path of each leaf, exist with a memory around
      codes with room of a fixed size: `Threshold`, `DGC`, `INCEPTIONN`. They count values that
      found no room, which wait in the memory. A leaf whose code always has room has 0.

    Counts are over the ranks of this process. The call waits for the step. Raises ValueError for a
    state that was restored without a target, and inside jit.
    """
    require_concrete("metrics", state)
    out: dict[str, int] = {}
    skipped: list[int] = []
    for sync in sync_states("metrics", state):
        for count in jax.tree.leaves(sync.skipped):
            skipped += [int(x.max()) for x in _here(count)]
        counts = jax.tree.leaves(sync.overflow)
        for leaf, count in zip(leaves_of(sync.overflow), counts, strict=True):
            own = sum(int(x.sum()) for x in _here(count))
            out[f"cgx/overflow/{leaf.path}"] = own
    total = {"cgx/overflow": sum(out.values())} if out else {}
    return ({"cgx/skipped": max(skipped)} if skipped else {}) | total | out


def _here(x: Any) -> list[Any]:
    """Returns the parts of `x` on this process; what is no JAX array is one part."""
    is_jax = isinstance(x, jax.Array)
    return [shard.data for shard in x.addressable_shards] if is_jax else [np.asarray(x)]
