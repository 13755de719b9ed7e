"""A step of a transformation outside of shard_map, on gradients that are typed as unreduced."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from cgx_jax import _compat
from cgx_jax._types import Pytree
from cgx_jax.axes import axes_by_dimension
from cgx_jax.leaves import leaves_of, operand_of
from cgx_jax.plan import lossy_leaves
from cgx_jax.transforms.feedback import as_gradient
from cgx_jax.transforms.shares import Cut
from cgx_jax.transforms.state import SyncState, map_parts

Step = Callable[[Pytree, SyncState, tuple[Cut, ...]], tuple[Pytree, SyncState]]


def step_on_ranks(
    caller: str,
    names: tuple[str, ...],
    step: Step,
    updates: Pytree,
    state: SyncState,
    places: Sequence[int] | None = None,
) -> tuple[Pytree, SyncState]:
    """Returns step(updates, state, cuts), traced inside a shard_map over all axes of the mesh.

    `step` takes the mean over `names`. A gradient that is unreduced over them is the sum of the
    ranks' parts, which is the mean of `world` times each part. Another gradient must be replicated
    over `names`, as JAX has reduced it. `places` are the dimensions in which `step` cuts the leaves
    into shards, if it does. Raises ValueError for other types of gradients, and for a
    state that does not have its row on each rank.
    """
    leaves, treedef = jax.tree.flatten(updates)
    mesh = jax.sharding.get_abstract_mesh()
    world = math.prod(mesh.shape[n] for n in names)
    before: list[PartitionSpec] = []
    after: list[PartitionSpec] = []
    parts: list[bool] = []
    cuts: list[Cut] = []
    for leaf, x in zip(leaves_of(updates), leaves, strict=True):
        spec = _compat.explicit_spec(operand_of(caller, leaf.path), x)
        cut = Cut.of(spec, x.ndim)
        own = spec.unreduced == frozenset(names) and _compat.is_sum(spec)
        if set(names) & set(cut.names) or (spec.unreduced and not own):
            raise ValueError(
                f"{operand_of(caller, leaf.path)} is {spec}; the gradient must be unreduced over "
                f"{names}, as cgx_jax.reduced(params, axis_name, policy) makes it, or replicated."
            )
        before.append(spec)
        entries = [*axes_by_dimension(spec, x.ndim)]
        if places is not None and -x.ndim <= (d := places[len(parts)]) < x.ndim:
            entries[d] = (*entries[d], *names)
        after.append(PartitionSpec(*entries, reduced=spec.reduced))
        parts.append(own)
        cuts.append(cut)

    def row(_: Any, x: Any) -> PartitionSpec:
        spec = _compat.explicit_spec(f"{caller}: the memory", x)
        first = spec.partitions[:1]
        if first not in ((names,), names[:1] if len(names) == 1 else ()):
            raise ValueError(
                f"{caller}: an array of the state with a row for each rank is {spec}, so every "
                "rank would keep all rows. Take the state from init under jax.set_mesh, or place "
                "it by cgx_jax.state_shardings(jax.eval_shape(tx.init, params), axis_name, mesh)."
            )
        return spec

    everywhere = frozenset(names)
    kept = map_parts(caller, state, row, lambda x: jax.typeof(x).sharding.spec)

    def times_world(x: jax.Array) -> jax.Array:
        # Parts may be as large as their sum, so float16 might not hold `world` times as much.
        wide = jnp.float32 if x.dtype == jnp.float16 else x.dtype
        return _compat.own(x, names).astype(wide) * world

    def local(updates: Pytree, state: SyncState) -> tuple[Pytree, SyncState]:
        pairs = zip(jax.tree.leaves(updates), parts, strict=True)
        # What is reduced already counts as a gradient that all ranks share.
        own = [times_world(x) if part else _compat.vary_over(x, everywhere) for x, part in pairs]
        means, after = step(jax.tree.unflatten(treedef, own), state, tuple(cuts))
        return jax.tree.map(lambda y, x: as_gradient(y, x.dtype), means, updates), after

    return jax.shard_map(
        local,
        in_specs=(jax.tree.unflatten(treedef, before), kept),
        out_specs=(jax.tree.unflatten(treedef, after), kept),
    )(updates, state)


def require_parts(caller: str, names: tuple[str, ...], updates: Pytree, policy: Any) -> None:
    """Raises ValueError if JAX has summed a gradient that the policy would compress."""
    mesh = jax.sharding.get_abstract_mesh()
    if math.prod(mesh.shape[n] for n in names) == 1:
        return
    known, leaves = leaves_of(updates), jax.tree.leaves(updates)
    for i in sorted(lossy_leaves(caller, updates, policy)):
        where = operand_of(caller, known[i].path)
        spec = _compat.explicit_spec(where, leaves[i])
        cut = {n for entry in axes_by_dimension(spec, leaves[i].ndim) for n in entry}
        reduced = not spec.unreduced and not cut & {*names}
        if reduced and not _compat.is_filled(leaves[i], names):
            raise ValueError(
                f"{where} is reduced already: JAX sums the gradients of parameters that are "
                f"replicated over {names}. Differentiate at cgx_jax.reduced(params, axis_name, "
                "policy), with the policy of this call."
            )


def is_outside(names: tuple[str, ...]) -> bool:
    """Whether the mesh of `jax.set_mesh` has all of these axes, and none of them is bound here."""
    mesh = jax.sharding.get_abstract_mesh()
    return all(n in mesh.axis_names and n not in mesh.manual_axes for n in names)
