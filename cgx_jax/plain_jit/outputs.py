"""Turns the ranks' auxiliary outputs into one array, a mean, a sum, or the common value."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from cgx_jax.plain_jit.arguments import CALLER, shown
from cgx_jax.plain_jit.inference import Ranks
from cgx_jax.plain_jit.statistics import Value


@dataclasses.dataclass(frozen=True)
class Output:
    """How one leaf leaves the ranks: "same", "mean", "sum", or "split" along `dimension`."""

    kind: str
    dimension: int | None = None

    def finish(self, x: Any, axis: Any) -> Any:
        """Returns a rank's leaf, reduced over `axis` if it is a mean or a sum."""
        if self.kind == "mean":
            return lax.pmean(x, axis)
        return lax.psum(x, axis) if self.kind == "sum" else x


SAME = Output("same")


def classify(
    path: str, small: Any, large: Any, value: Value, ranks: Ranks, ratio: int, given: Any
) -> Output:
    """Returns the `Output` of a leaf from its abstract values at two batch sizes.

    `ratio` is the ratio of these sizes. `given` is the leaf's entry in aux_specs, or None. Raises
    ValueError for a leaf whose value under plain jit is not known, and for a wrong entry.
    """
    where = f"{CALLER}: the output {path} {shown(small)}"
    if given in ("mean", "sum"):
        return Output(given)
    if isinstance(given, PartitionSpec):
        dimension = ranks.dimension(given)
        if dimension is None and value.varying:
            raise ValueError(
                f"{where} differs between the ranks of {ranks.axis!r}, so aux_specs cannot be "
                f'{given} for it; use "mean", "sum" or a dimension, P({ranks.axis!r}).'
            )
        return Output("split", dimension) if dimension is not None else SAME
    if given is not None:
        raise ValueError(
            f'{where} has aux_specs {given!r}; use a PartitionSpec, "mean", "sum" or None.'
        )
    if not value.varying:
        return SAME
    pairs = list(zip(small.shape, large.shape, strict=True))
    growing = [d for d, (a, b) in enumerate(pairs) if a != b]
    if len(growing) == 1 and pairs[growing[0]][1] == ratio * pairs[growing[0]][0]:
        return Output("split", growing[0])
    if not growing and value.growth == 1:
        return Output("sum")
    if not growing and not small.shape and jnp.issubdtype(small.dtype, jnp.inexact):
        return Output("mean")
    reason = "has no batch dimension" if not growing else "does not have one row per example"
    raise ValueError(
        f"{where} differs between the ranks of {ranks.axis!r} and {reason}, so its value "
        "under plain jit is not known. Reduce it in the loss (jax.lax.pmean or psum over "
        f"{ranks.axis!r}), or pass aux_specs=, a tree (or prefix) of PartitionSpecs, "
        '"mean" and "sum".'
    )


def given_specs(aux_specs: Any, aux: Any) -> list[Any]:
    """Expands `aux_specs` to one entry per leaf of `aux`."""
    entries: list[Any] = []

    def extend(spec: Any, part: Any) -> None:
        entries.extend([spec] * len(jax.tree.leaves(part)))

    is_spec = lambda s: s is None or isinstance(s, (str, PartitionSpec))  # noqa: E731
    try:
        jax.tree.map(extend, aux_specs, aux, is_leaf=is_spec)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{CALLER}: aux_specs is not a prefix of the auxiliary output: {error}"
        ) from None
    return entries
