"""Manual axes: a sharding inside the loss may not name the axes that split the batch."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Collection, Iterator
from typing import Any

import jax
from jax.sharding import PartitionSpec

from cgx_jax._types import Pytree
from cgx_jax.plain_jit.arguments import CALLER, without
from cgx_jax.plain_jit.split import Ranks

# How JAX refuses a spec: in with_sharding_constraint, and as out_sharding.
_REFUSALS = ("can only refer to Auto axes", "of type Auto or Manual")


def drop_manual_axes(spec: PartitionSpec) -> PartitionSpec:
    """Returns `spec` without the mesh axes that are manual where this is called.

    Wrap it around the specs in a model: `with_sharding_constraint(x, drop_manual_axes(P("data",
    "model")))`. JAX refuses a spec that names an axis of the `shard_map` around it, or the axis of
    `value_and_grad` inside its loss. Elsewhere no axis is manual, and the spec comes back as it is.

    Raises TypeError for anything but a PartitionSpec.
    """
    if not isinstance(spec, PartitionSpec):
        raise TypeError(
            f"drop_manual_axes: {spec!r} is not a PartitionSpec; pass P(...), or the spec of a "
            "NamedSharding."
        )
    return without(spec, jax.sharding.get_abstract_mesh().manual_axes)


@contextlib.contextmanager
def logical_rules_without(axes: Collection[str]) -> Iterator[None]:
    """Takes `axes` out of the logical axis rules that Flax Linen follows now, if there are any."""
    linen = sys.modules.get("flax.linen")
    rules = () if linen is None else linen.get_logical_axis_rules()
    if linen is None or not rules:
        yield
        return
    local = [(name, *without(PartitionSpec(at), axes).partitions) for name, at in rules]
    with linen.logical_axis_rules(local):
        yield


def boxes_without(axes: Collection[str], tree: Pytree) -> Pytree:
    """Takes `axes` out of the partitioning that Flax Linen's boxes in `tree` ask for."""
    linen = sys.modules.get("flax.linen")
    if linen is None:
        return tree

    def is_box(x: object) -> bool:  # others name logical axes, for which there are rules
        return type(x) is linen.Partitioned

    def own(x: Any) -> Any:
        if not is_box(x):
            return x
        return x.replace(names=without(PartitionSpec(*x.names), axes).partitions, mesh=None)

    return jax.tree.map(own, tree, is_leaf=is_box)


def names_manual(error: Exception, ranks: Ranks) -> bool:
    """Whether JAX refused a sharding inside the loss because it names an axis of the ranks."""
    text = str(error).partition(" mesh=")[0]  # JAX shows the mesh, with all axes, after the spec
    return any(r in text for r in _REFUSALS) and any(repr(n) in text for n in ranks.names)


def refusal(what: object, ranks: Ranks) -> ValueError:
    """Returns the error for a sharding inside the loss that names an axis of the ranks."""
    return ValueError(
        f"{CALLER}: inside the loss axis {ranks.axis!r} is manual, since each rank has its part of "
        "the batch, and a sharding there may not name it. Wrap the spec: "
        "jax.lax.with_sharding_constraint(x, cgx_jax.drop_manual_axes(spec)), or "
        "out_sharding=cgx_jax.drop_manual_axes(spec); outside the loss the spec stays as it is. "
        "Flax's logical axis rules that are set around the call are followed without this axis: "
        f"set them there, with flax.linen.logical_axis_rules. What was refused: {what}"
    )
