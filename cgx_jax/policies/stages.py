"""Policies that follow one another in a training, such as the warm-up of a density."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cgx_jax.arguments import whole_number


@dataclasses.dataclass(frozen=True)
class Stages:
    """`policies[0]` until step `boundaries[0]`, `policies[1]` until `boundaries[1]`, and so on.

    It takes the place of a policy in `sync_gradients`. Each of `policies` is anything that
    `sync_gradients` takes, except a policy that adapts. `boundaries` count updates. All stages are
    in one compiled program, which branches on the number of updates in the state, so a checkpoint
    continues in the right stage. Compiling takes as long as for all stages together.

    Raises ValueError for a policy that adapts, and unless there is one policy more than there are
    ascending boundaries.
    """

    policies: tuple[Any, ...]
    boundaries: tuple[int, ...]

    def __post_init__(self) -> None:
        policies, boundaries = tuple(self.policies), self.boundaries
        boundaries = tuple(whole_number("Stages", "boundary", x) for x in boundaries)
        ascending = all(a < b for a, b in itertools.pairwise((0, *boundaries)))
        if len(policies) != len(boundaries) + 1 or not ascending:
            raise ValueError(
                f"Stages: {len(policies)} policies do not fit boundaries={boundaries}; pass the "
                "first step of every policy but the first, in ascending order."
            )
        if any(getattr(p, "adapts", False) for p in policies):
            raise ValueError(
                "Stages: a policy that adapts cannot be a stage, because it compiles a step for "
                "each of its plans; use it without Stages."
            )
        object.__setattr__(self, "policies", policies)
        object.__setattr__(self, "boundaries", boundaries)

    def stage(self, step: jax.Array) -> jax.Array:
        """The index of the policy for the update after `step` others, i32[]."""
        return (jnp.asarray(step) >= np.array(self.boundaries, np.int32)).sum(dtype=jnp.int32)


def density_warmup(
    make: Callable[[float], Any], keep: float, steps: int, *, first: float = 0.25
) -> Stages:
    """Stages of `make(share)`: shares start at `first`, fall by a factor of 4, and end at `keep`.

    `make` is a compressor's class, such as `TopK` or `DGC`, or a function that returns a policy.
    The stages before the last take `steps` steps together. With `keep=0.001` the shares are 25,
    6.25, 1.6, 0.4 and 0.1 %. Raises ValueError unless 0 < keep < first <= 1, and for fewer steps
    than stages. Source: DGC (Lin et al., ICLR 2018).
    """
    if not 0 < keep < first <= 1:
        raise ValueError(
            f"density_warmup: keep={keep} and first={first} must be shares, 0 < keep < first <= 1."
        )
    shares = [first]
    while shares[-1] / 4 > keep * 1.01:
        shares.append(shares[-1] / 4)
    if steps < len(shares):
        raise ValueError(
            f"density_warmup: steps={steps} is below the number of stages, {len(shares)}; pass "
            "more, such as one epoch of steps per stage."
        )
    ends = [round(steps * (i + 1) / len(shares)) for i in range(len(shares))]
    return Stages(tuple(map(make, (*shares, keep))), tuple(ends))
