"""Parameters that are sharded over mesh axes other than those of the reduction."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec

from cgx_jax.plain_jit.arguments import CALLER, Argument, Place, known_spec, nnx
from cgx_jax.plain_jit.inference import Ranks
from cgx_jax.transforms.state import SyncState

_REPLICATED: Any = PartitionSpec()


@dataclasses.dataclass(frozen=True)
class Shards:
    """The other axes of the mesh, and a spec over them per differentiated array."""

    axes: frozenset[str]
    specs: tuple[PartitionSpec, ...]

    @classmethod
    def of(
        cls,
        arguments: Sequence[Argument],
        arrays: Sequence[Any],
        places: Sequence[Place],
        ranks: Ranks,
        specs: Sequence[Any],
    ) -> Shards:
        """From `specs`, one entry (or None) per differentiated argument, metadata or arrays."""
        others = frozenset(ranks.mesh.axis_names) - set(ranks.names)
        if not others:
            return cls(others, ())
        found: list[PartitionSpec] = []
        given = iter(specs)
        for number, argument in enumerate(arguments):
            if not argument.wanted:
                continue
            own = [i for i, p in enumerate(places) if p.argument == number]
            entries = _entries(argument, next(given), len(own))
            for i, entry in zip(own, entries, strict=True):
                if places[i].trained:
                    found.append(_spec(arrays[i], places[i], entry, ranks))
        return cls(others, tuple(found))

    def reduce(self, function: Callable[..., Any], grads: Any, state: Any) -> tuple[Any, Any]:
        """`function(grads, state)`, each shard where it lies.

        A kernel call on an operand that is sharded over an axis would gather it first, so all
        axes are manual in it.
        """
        if not self.axes:
            return function(grads, state)
        treedef = jax.tree.structure(grads)
        like = jax.tree.unflatten(treedef, self.specs)
        kept = self._state_specs(state, treedef, [g.shape for g in jax.tree.leaves(grads)])
        return jax.shard_map(
            function,
            in_specs=(like, kept),
            out_specs=(like, kept),
            axis_names=set(self.axes),
            check_vma=False,
        )(grads, state)

    def _state_specs(self, state: Any, treedef: Any, shapes: Sequence[Any]) -> Any:
        if not isinstance(state, SyncState):
            return jax.tree.map(lambda _: _REPLICATED, state)
        if not any(map(len, self.specs)):
            return jax.tree.map(lambda _: _REPLICATED, state)
        memory = tuple(
            jax.tree.unflatten(treedef, [PartitionSpec(None, *s) for s in self.specs])
            for _ in state.memory
        )
        moments = [
            [x.shape for x in jax.tree.leaves(tree)] == list(shapes) for tree in state.moments
        ]
        if jax.tree.leaves(state.statistics) or not all(moments):
            raise ValueError(
                f"{CALLER}: an Adaptive policy and factored moments need whole gradients, and "
                f"parameters are sharded over {sorted(self.axes)}. Use a fixed policy, or "
                "preconditioning that keeps one moment per value."
            )
        return SyncState(
            step=_REPLICATED,
            memory=memory,
            statistics=jax.tree.map(lambda _: _REPLICATED, state.statistics),
            moments=tuple(jax.tree.unflatten(treedef, self.specs) for _ in moments),
            skipped=_REPLICATED,
        )


def _entries(argument: Argument, given: Any, count: int) -> list[Any]:
    """One spec or None per array of a differentiated argument."""
    if given is not None:
        entries = argument.broadcast(given)
    elif argument.graph is not None:
        tree = jax.tree.unflatten(argument.treedef, [is_leaf for is_leaf, _ in argument.leaves])
        known = argument.broadcast(nnx().get_partition_spec(tree[0]))
        entries = [_REPLICATED if spec is None else spec for spec in known]
    else:
        entries = []
    return [*entries, *[None] * (count - len(entries))]


def _spec(x: Any, place: Place, given: Any, ranks: Ranks) -> PartitionSpec:
    spec = given if isinstance(given, PartitionSpec) and len(given) else known_spec(x, ranks.mesh)
    hidden = given is None and spec is None and isinstance(x, jax.core.Tracer)
    if hidden and ranks.mesh.size > ranks.world:
        raise ValueError(
            f"{CALLER}: the mesh has more axes than {ranks.axis!r}, and under jit the sharding of "
            f"{place.path} over them cannot be seen; pass specs=, a tree of PartitionSpecs like "
            "params."
        )
    spec = spec or _REPLICATED
    if ranks.dimension(spec) is not None:
        raise ValueError(
            f"{CALLER}: {place.path} is sharded over the data axis {ranks.axis!r} ({spec}); it "
            "must be replicated over it. Use psum_scatter_compressed for sharded data-parallel."
        )
    return spec
