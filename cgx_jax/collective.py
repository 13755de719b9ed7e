"""What a call leaves on every rank, and its exact counterpart in `lax`."""

from __future__ import annotations

import enum
from collections.abc import Sequence

import jax

from cgx_jax.axes import Axes


class Collective(enum.Enum):
    """What travels in a call; the values are the names of the exchanges' fused calls.

    A gather-sum is an all-reduce in one phase. Operands of a reduce-scatter have a leading
    dimension with a row for each rank, and so have the results of an all-gather.
    """

    ALL_REDUCE = "all_reduce"
    GATHER_SUM = "gather_sum"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_GATHER = "all_gather"

    @property
    def sums(self) -> bool:
        """Whether results are sums over the ranks."""
        return self is not Collective.ALL_GATHER

    def exact(
        self, axes: Axes, leaves: Sequence[jax.Array], *, mean: bool = False, floats: bool = False
    ) -> list[jax.Array]:
        """Returns the exact results, or with `mean` the means; sums run in `sum_dtype`.

        Means of integers are the nearest integers, or with `floats` as in lax.
        """
        if self is Collective.ALL_GATHER:
            return axes.gather(leaves)
        if self is Collective.REDUCE_SCATTER:
            return axes.scatter(leaves, mean=mean)
        return axes.mean(leaves, floats=floats) if mean else axes.sum(leaves)
