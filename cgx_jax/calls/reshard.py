"""`reshard`: `jax.reshard` on explicit mesh axes, in which the bytes that travel are compressed.

A leaf's type says which collective brings it where it should be. Each collective runs in a
shard_map over all axes of the mesh, by the same path as the calls inside of one.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from cgx_jax import _compat
from cgx_jax._types import AxisName, Key, Pytree
from cgx_jax.arguments import folded
from cgx_jax.axes import axes_by_dimension, names_of
from cgx_jax.choice import auto
from cgx_jax.collective import Collective
from cgx_jax.compressors import Compressor
from cgx_jax.exchanges import Exchange
from cgx_jax.leaves import expanded, leaves_of, operand_of
from cgx_jax.plan import Plan, lossy_leaves, resolve
from cgx_jax.policies.rules import Policy
from cgx_jax.policies.stages import Stages
from cgx_jax.reductions import Levels, Reduction
from cgx_jax.route import rows
from cgx_jax.route.route import Options, route
from cgx_jax.route.run import values_of

_NAME = "reshard"


def reshard(
    tree: Pytree,
    shardings: Pytree,
    policy: Compressor | Policy | Plan | None = None,
    *,
    backward: Compressor | Policy | Plan | None = None,
    key: Key = None,
    exchange: Exchange | str = "auto",
    reduction: Reduction | str | None = None,
    levels: Levels | None = None,
) -> Pytree:
    """`jax.reshard` for meshes with explicit axes, with compressed payloads.

    `tree` is a pytree of global arrays, and `shardings` a PartitionSpec, a NamedSharding or a
    prefix tree of them. Call it outside of shard_map; `psum_compressed`, `psum_scatter_compressed`
    and `all_gather_compressed` are the calls inside. The types of a leaf say what is done:

    * unreduced over axes, to replicated over them: an all-reduce, as `psum_compressed`.
    * unreduced over axes, to sharded over them along one dimension: a reduce-scatter.
    * sharded over axes along one dimension, to replicated or `reduced` over them: an all-gather.
    * everything else is `jax.reshard`, uncompressed: a value that is unreduced over some axes and
      sharded over others where it changes both, and two dimensions that change at once.

    Leaves of one kind share fusion buffers. The derivative is that of `jax.reshard`. With
    `backward`, a policy too, the gradient of a leaf that becomes `reduced` comes back compressed:
    JAX leaves it unreduced, and it is brought to the sharding of the leaf. `policy`, `key`,
    `exchange`, `reduction` and `levels` are as in `psum_compressed`; the last two are for
    all-reduces.

    Raises ValueError or TypeError while tracing for axes that are not explicit, for `backward`
    without a leaf that becomes `reduced`, and for what the calls inside shard_map refuse. Source:
    QSDP (Markov et al., ICML 2023) for sharded weights and gradients.
    """
    auto.exchange_named(_NAME, exchange)
    leaves, treedef = jax.tree.flatten(tree)
    known = leaves_of(tree)
    wanted = _specs(tree, shardings)
    found = [
        _move(operand_of(_NAME, leaf.path), x, to) if isinstance(x, jax.Array) else _NO_MOVE
        for leaf, x, to in zip(known, leaves, wanted, strict=True)
    ]
    moves, places = [move for move, _ in found], [dimension for _, dimension in found]
    if backward is not None and not any(m and m.marks for m in moves):
        raise ValueError(
            f"{_NAME}: backward={backward} is for leaves that become reduced, whose gradient JAX "
            "leaves unreduced, but no sharded leaf does; write P(..., reduced={axis}) as its "
            "sharding, or leave out backward=."
        )
    sums = any(m and m.collective is Collective.ALL_REDUCE for m in moves)
    if not sums and (reduction is not None or levels is not None):
        raise ValueError(
            f"{_NAME}: reduction={reduction!r} and levels={levels!r} are for all-reduces, but no "
            "leaf goes from unreduced to replicated; leave them out."
        )
    plan = resolve(_NAME, tree, policy)
    back = None if backward is None else resolve(_NAME, tree, backward)
    out: list[Any] = [
        x if move else _exact(x, to) for x, move, to in zip(leaves, moves, wanted, strict=True)
    ]
    how = tuple({"exchange": exchange, "reduction": reduction, "levels": levels}.items())
    for number, move in enumerate(dict.fromkeys(m for m in moves if m is not None)):
        own = tuple(i for i, m in enumerate(moves) if m == move)
        group = _Group(
            move,
            treedef,
            own,
            tuple(places[i] for i in own),
            tuple(jax.typeof(leaves[i]).sharding.spec for i in own),
            tuple(wanted[i] for i in own),
            _mesh(leaves[own[0]]),
            plan.subset(own),
            back.subset(own) if back is not None and move.marks else None,
            how,
        )
        seed = folded(_NAME, key, number)
        for i, y in zip(own, group([leaves[i] for i in own], seed), strict=True):
            out[i] = y
    return jax.tree.unflatten(treedef, out)


def reduced(
    params: Pytree, axis_name: AxisName, policy: Compressor | Policy | Plan | Stages | None = None
) -> Pytree:
    """Types the leaves that `policy` compresses as `reduced`; their gradients are then unreduced.

    `params` is a pytree of global arrays that are replicated over `axis_name`, a name or a tuple of
    names of explicit mesh axes. Nothing is computed or sent. `jax.grad` at the result leaves the
    gradients of these leaves unreduced over the axis: `reshard`, or `sync_gradients` with the same
    policy, then reduces them with compression. JAX itself sums the gradients of all other leaves.
    It has no rule for some uses of a `reduced` leaf, such as look-ups without `out_sharding`
    (docs/quickstart/explicit.md); give such leaves `Identity()` in the policy. A term of the loss
    in which a leaf meets no data, such as a regularizer, belongs at `params` themselves: XLA counts
    some of these gradients once for each device.

    Raises ValueError for a leaf that is sharded over the axis, and for axes that are not explicit.
    """
    caller = "reduced"
    names = names_of(axis_name)
    if not names:
        raise ValueError(f"{caller}: axis_name={axis_name!r} names no axis.")
    lossy = lossy_leaves(caller, params, policy)
    leaves, treedef = jax.tree.flatten(params)
    for i, leaf in enumerate(leaves_of(params)):
        where = operand_of(caller, leaf.path)
        spec = _compat.explicit_spec(where, leaves[i])
        missing = [n for n in names if n not in _compat.axis_types(leaves[i])]
        if missing:
            raise ValueError(f"{where}: axis {missing[0]!r} is not an axis of its mesh.")
        entries = axes_by_dimension(spec, len(leaf.shape))
        sharded = [n for n in names if any(n in entry for entry in entries)]
        if sharded or spec.unreduced:
            raise ValueError(
                f"{where} is {spec}, but must be replicated over {names}; bring it there by "
                "cgx_jax.reshard(tree, shardings, ...) with reduced= in the sharding."
            )
        if i in lossy:
            to = PartitionSpec(*spec.partitions, reduced=spec.reduced | frozenset(names))
            leaves[i] = _exact(leaves[i], to)
    return jax.tree.unflatten(treedef, leaves)


class _Move(NamedTuple):
    """How leaves travel: the collective over `axes`.

    `marks` says that the result of an all-gather is typed as `reduced`.
    """

    collective: Collective
    axes: tuple[str, ...]
    marks: bool = False


_NO_MOVE: tuple[_Move | None, int] = (None, 0)


@dataclasses.dataclass(frozen=True)
class _Group:
    """Leaves of one move, which travel together: static and hashable.

    `dimensions` are those that the collective cuts or joins.
    """

    move: _Move
    treedef: jax.tree_util.PyTreeDef
    numbers: tuple[int, ...]
    dimensions: tuple[int, ...]
    froms: tuple[PartitionSpec, ...]
    to: tuple[PartitionSpec, ...]
    mesh: Any
    plan: Plan
    backward: Plan | None
    how: tuple[tuple[str, Any], ...]

    def __call__(self, leaves: list[jax.Array], key: Key) -> list[jax.Array]:
        if self.backward is None:
            return _moved(self, leaves, key)
        back = self.back(self.backward)
        call = jax.custom_vjp(self.compressed)
        call.defvjp(
            lambda leaves, key: (call(leaves, key), key),
            lambda key, given: (_moved(back, given, folded(_NAME, key, rows.BACKWARD)), None),
        )
        return call(leaves, key)

    def compressed(self, leaves: list[jax.Array], key: Key) -> list[jax.Array]:
        """Returns the leaves where they should be, by the collective inside a shard_map."""
        data = None if key is None else jax.random.key_data(key)
        marks = self.move.marks
        leaves = [_compat.outside_vmap(_NAME, x, retypes=marks) for x in leaves]
        mapped = jax.shard_map(
            functools.partial(self._inside, None if key is None else jax.random.key_impl(key)),
            mesh=self.mesh,
            in_specs=(list(self.froms), PartitionSpec()),
            out_specs=list(self.to),
        )
        return mapped(leaves, data)

    def _inside(self, impl: Any, leaves: list[jax.Array], data: Any) -> list[jax.Array]:
        key = None if data is None else jax.random.wrap_key_data(data, impl=impl)
        collective, names, marks = self.move
        axis = names[0] if len(names) == 1 else names
        how = dict(self.how)
        if collective is not Collective.ALL_REDUCE:
            how = {"exchange": how["exchange"]}
        options = Options.resolve(_NAME, axis, collective=collective, **how)
        tree, dimensions = self._tree(leaves), self._tree(self.dimensions)
        known = leaves_of(tree)
        if collective is Collective.ALL_GATHER:
            known = [
                dataclasses.replace(
                    leaf, shape=(*x.shape[:d], options.axes.world * x.shape[d], *x.shape[d + 1 :])
                )
                for leaf, x, d in zip(known, leaves, self.dimensions, strict=True)
            ]
        # The policy saw whole leaves; here, a rank has a part of each.
        plan = dataclasses.replace(self.plan, leaves=tuple(known))
        if collective is Collective.ALL_REDUCE:
            return values_of(route(options, plan), leaves, key)
        if collective is Collective.REDUCE_SCATTER:
            return jax.tree.leaves(rows.reduce_scatter(options, tree, plan, dimensions, True, key))
        gather = rows.Gather.of(options, tree, plan, dimensions, True)
        whole = jax.tree.leaves(gather(tree, key))
        same = [_compat.same_over(x, names) for x in whole]
        return [lax.pcast(x, names, to="reduced") for x in same] if marks else same

    def _tree(self, entries: Sequence[Any]) -> Pytree:
        """Returns a tree of the group's entries, whose leaves have the paths of the whole tree."""
        every: list[Any] = [None] * self.treedef.num_leaves
        for i, x in zip(self.numbers, entries, strict=True):
            every[i] = x
        return jax.tree.unflatten(self.treedef, every)

    def back(self, plan: Plan) -> _Group:
        """Returns how the gradients of the results return, by `plan`."""
        axes = frozenset(self.move.axes)
        specs = [
            PartitionSpec(*to.partitions, unreduced=axes, reduced=to.reduced - axes)
            for to in self.to
        ]
        move = _Move(Collective.REDUCE_SCATTER, self.move.axes)
        return dataclasses.replace(
            self, move=move, froms=tuple(specs), to=self.froms, plan=plan, backward=None
        )


# Every collective is linear, so its derivative in direction t is the exact collective of t. The
# rule stands outside of the shard_map because JAX cannot differentiate the claim, made inside, that
# what was gathered is the same on all ranks.
@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _moved(group: _Group, leaves: list[jax.Array], key: Key) -> list[jax.Array]:
    return group.compressed(leaves, key)


@_moved.defjvp
def _moved_jvp(group: _Group, primals: Pytree, tangents: Pytree) -> Pytree:
    pairs = zip(tangents[0], group.to, strict=True)
    return _moved(group, *primals), [_exact(x, to, group.mesh) for x, to in pairs]


def _move(where: str, x: Any, to: PartitionSpec) -> tuple[_Move | None, int]:
    """Returns how a leaf gets to `to`, None for `jax.reshard`, and the dimension that changes."""
    if jnp.issubdtype(x.dtype, jax.dtypes.extended):
        return _NO_MOVE
    spec = _compat.explicit_spec(where, x)
    if len(to.partitions) > x.ndim:
        raise ValueError(f"{where} has {x.ndim} dimensions, but the spec {to} has more.")
    entries, after = axes_by_dimension(spec, x.ndim), axes_by_dimension(to, x.ndim)
    changed = [d for d in range(x.ndim) if entries[d] != after[d]]
    d = changed[0] if changed else 0
    order = list(_compat.axis_types(x))
    if spec.unreduced and not to.unreduced and to.reduced == spec.reduced:
        if not _compat.is_sum(spec):
            return _NO_MOVE
        axes = tuple(n for n in order if n in spec.unreduced)
        if math.prod(jax.typeof(x).sharding.mesh.shape[n] for n in axes) == 1:
            return _NO_MOVE
        if not changed:
            return _Move(Collective.ALL_REDUCE, axes), 0
        added = after[d][len(entries[d]) :]
        if len(changed) == 1 and entries[d] + added == after[d] and set(added) == set(axes):
            return _Move(Collective.REDUCE_SCATTER, added), d
    if not spec.unreduced and not to.unreduced and len(changed) == 1:
        axes = entries[d][len(after[d]) :]
        marked = to.reduced - spec.reduced
        known = spec.reduced <= to.reduced and marked in (frozenset(), frozenset(axes))
        if axes and after[d] + axes == entries[d] and known:
            return _Move(Collective.ALL_GATHER, axes, bool(marked)), d
    return _NO_MOVE


def _exact(x: Any, to: PartitionSpec, mesh: Any = None) -> jax.Array:
    """Returns `jax.reshard` of `x`, which wants the mesh too where none is set."""
    mesh = _mesh(x) if mesh is None and isinstance(x, jax.Array) else mesh
    return jax.reshard(x, to if mesh is None else NamedSharding(mesh, to))


def _is_spec(x: object) -> bool:
    return isinstance(x, (PartitionSpec, NamedSharding))


def _specs(tree: Pytree, shardings: Pytree) -> list[PartitionSpec]:
    """Returns the spec of each leaf, from a prefix tree of specs and shardings.

    Raises ValueError for a sharding on another mesh than that of the array.
    """
    for path, given in jax.tree_util.tree_leaves_with_path(shardings, is_leaf=_is_spec):
        if not _is_spec(given):
            raise TypeError(
                f"{_NAME}: the sharding at {jax.tree_util.keystr(path) or 'the root'} is "
                f"{given!r}; pass a PartitionSpec or a NamedSharding, or a prefix tree of them."
            )
    try:
        found = expanded(shardings, tree, _is_spec)
    except ValueError as error:
        raise ValueError(
            f"{_NAME}: shardings are no prefix of the tree; give every leaf or subtree a "
            f"PartitionSpec, P() where it is replicated. {error}"
        ) from None
    for leaf, x, given in zip(leaves_of(tree), jax.tree.leaves(tree), found, strict=True):
        if not isinstance(given, NamedSharding) or not isinstance(x, jax.Array):
            continue
        own = jax.typeof(x).sharding.mesh
        concrete = None if isinstance(x, jax.core.Tracer) else getattr(x.sharding, "mesh", None)
        same = given.mesh.abstract_mesh == own
        if same and isinstance(given.mesh, Mesh) and isinstance(concrete, Mesh):
            same = given.mesh == concrete
        if not same:
            raise ValueError(
                f"{operand_of(_NAME, leaf.path)} is on the mesh {own}, but its sharding is on "
                f"another one, {given.mesh}; use jax.device_put to move between meshes."
            )
    return [s.spec if isinstance(s, NamedSharding) else s for s in found]


def _mesh(x: Any) -> Any:
    """Returns the mesh of a leaf; None for that of `jax.set_mesh`."""
    if not jax.sharding.get_abstract_mesh().empty:
        return None
    sharding = None if isinstance(x, jax.core.Tracer) else getattr(x, "sharding", None)
    return sharding.mesh if isinstance(sharding, NamedSharding) else jax.typeof(x).sharding.mesh
