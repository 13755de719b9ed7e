"""State that belongs to a rank: arrays with a leading row for each rank."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from cgx_jax import _compat
from cgx_jax._types import AxisName, Pytree
from cgx_jax.axes import Axes, names_of, require_axes


def axes_of(caller: str, axis_name: AxisName) -> AxisName:
    """Returns `axis_name` as JAX takes it, a list of names as a tuple; refuses no name at all."""
    axis_name = tuple(axis_name) if isinstance(axis_name, list) else axis_name
    if axis_name is None or axis_name == () or (isinstance(axis_name, tuple) and None in axis_name):
        raise ValueError(
            f"{caller}: axis_name={axis_name!r} names no axis; pass the name of the axis that the "
            "gradients are reduced over, or a tuple of names."
        )
    return axis_name


def rows_of(
    axis_name: AxisName,
    mesh: Mesh | AbstractMesh | None,
    caller: str,
    make: Callable[..., Any],
    specs: Pytree = None,
    operands: Pytree = (),
) -> Pytree:
    """Returns `make(*operands)` with a leading row for each rank; each rank holds its own row.

    `mesh` is that of `jax.set_mesh` if it is None. `specs`, a tree like the result, say how rows
    are sharded over other axes; `make` then gives one shard.
    """
    if not jax.tree.leaves(jax.eval_shape(make, *operands)):
        return make(*operands)
    names = names_of(axis_name)
    bound = is_bound(names)
    checked = bound and Axes.resolve(caller, names, None).checked()
    if mesh is None and set(names) <= set((context := jax.sharding.get_abstract_mesh()).axis_names):
        mesh = context
    if not bound and mesh is None:
        raise ValueError(
            f"{caller}: init cannot know how many ranks axis {axis_name!r} has, and each has its "
            f"own memory; call init under jax.set_mesh, pass mesh= to {caller}, or call init "
            "inside shard_map (out_specs=cgx_jax.state_specs(state, axis_name)) or pmap."
        )

    def row(*operands: Pytree) -> Pytree:
        vary = frozenset(names) if checked else frozenset()
        return jax.tree.map(lambda x: _compat.vary_over(x[None], vary), make(*operands))

    if bound:
        return row(*operands)
    assert mesh is not None
    require_axes(caller, names, mesh)
    # This also works under explicit axis types, which a sharding constraint would not accept.
    out = PartitionSpec(axis_name)
    if specs is not None:
        join = lambda s: PartitionSpec(axis_name, *s.partitions)  # noqa: E731
        out = jax.tree.map(join, specs, is_leaf=lambda s: isinstance(s, PartitionSpec))
    if not any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(operands)):
        # As constants, arrays may lie on other devices than those of the mesh.
        row, operands = functools.partial(row, *operands), ()
    whole: Any = PartitionSpec()
    operands = jax.tree.map(
        lambda x: (
            jax.reshard(x, NamedSharding(mesh, whole)) if any(jax.typeof(x).sharding.spec) else x
        ),
        operands,
    )
    f = jax.shard_map(row, mesh=mesh, in_specs=whole, out_specs=out, check_vma=False)
    return jax.jit(f)(*operands)


def is_bound(names: Sequence[str]) -> bool:
    """Whether this is traced inside shard_map, pmap or vmap over all of these axes."""
    try:
        for n in names:
            lax.axis_size(n)
    except (NameError, KeyError):
        return False
    return True


def own_row(rows: Pytree) -> Pytree:
    """Returns this rank's row of a tree of rows."""
    # Without the barriers, here and in `as_rows`, XLA fuses the reshapes with what is computed.
    # Then it cannot write a new row over the old one, and copies both.
    return lax.optimization_barrier(jax.tree.map(lambda x: lax.squeeze(x, (0,)), rows))


def as_rows(axes: Axes, own: Pytree) -> Pytree:
    """Inverts `own_row`."""
    vary, own = axes.varying(), lax.optimization_barrier(own)
    return jax.tree.map(lambda x: _compat.vary_over(lax.expand_dims(x, (0,)), vary), own)
