"""Parameters that are sharded over mesh axes other than the axes of the reduction."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec

from cgx_jax._types import Pytree
from cgx_jax.plain_jit.arguments import CALLER, Argument, Place, known_spec, nnx
from cgx_jax.plain_jit.split import Ranks
from cgx_jax.transforms.state import SyncState

_REPLICATED: Any = PartitionSpec()


@dataclasses.dataclass(frozen=True)
class Shards:
    """The other axes of the mesh, and one spec over them per differentiated array."""

    axes: frozenset[str]
    specs: tuple[PartitionSpec, ...]

    @classmethod
    def of(
        cls,
        arguments: Sequence[Argument],
        arrays: Sequence[jax.Array],
        places: Sequence[Place],
        ranks: Ranks,
        specs: Sequence[Any],
    ) -> Shards:
        """Takes the specs from `specs` (an entry or None per argument), metadata or the arrays."""
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

    def reduce(
        self, function: Callable[..., Pytree], grads: Pytree, state: Pytree
    ) -> tuple[Pytree, Pytree]:
        """Returns `function(grads, state)`, computed on each shard where it lies.

        XLA would gather an operand of a kernel call that is sharded over an axis. The function
        therefore runs in a shard_map in which all axes are manual.
        """
        out: tuple[Pytree, Pytree]
        if not self.axes:
            out = function(grads, state)
            return out
        treedef = jax.tree.structure(grads)
        like = jax.tree.unflatten(treedef, self.specs)
        kept = self._state_specs(state, treedef)
        out = jax.shard_map(
            function,
            in_specs=(like, kept),
            out_specs=(like, kept),
            axis_names=set(self.axes),
            check_vma=False,
        )(grads, state)
        return out

    def _state_specs(self, state: Pytree, treedef: jax.tree_util.PyTreeDef) -> Pytree:
        if not isinstance(state, SyncState):
            return jax.tree.map(lambda _: _REPLICATED, state)
        if not any(map(len, self.specs)):
            return jax.tree.map(lambda _: _REPLICATED, state)
        memory = tuple(
            jax.tree.unflatten(treedef, [PartitionSpec(None, *s) for s in self.specs])
            for _ in state.memory
        )
        if jax.tree.leaves((state.statistics, state.moments)):
            raise ValueError(
                f"{CALLER}: an Adaptive policy and SecondMoment need whole gradients, but "
                f"parameters are sharded over {sorted(self.axes)}. Use a fixed policy without "
                "precondition."
            )
        return SyncState(
            step=_REPLICATED,
            memory=memory,
            statistics=jax.tree.map(lambda _: _REPLICATED, state.statistics),
            skipped=_REPLICATED,
        )


def _entries(argument: Argument, given: Pytree, count: int) -> list[Any]:
    """Returns one spec or None per array of a differentiated argument."""
    if given is not None:
        entries = argument.broadcast(given)
    elif argument.graph is not None:
        tree = jax.tree.unflatten(argument.treedef, [is_leaf for is_leaf, _ in argument.leaves])
        known = argument.broadcast(nnx().get_partition_spec(tree[0]))
        entries = [_REPLICATED if spec is None else spec for spec in known]
    else:
        entries = []
    return [*entries, *[None] * (count - len(entries))]


def _spec(x: jax.Array, place: Place, given: Pytree, ranks: Ranks) -> PartitionSpec:
    spec = given if isinstance(given, PartitionSpec) and len(given) else known_spec(x, ranks.mesh)
    hidden = given is None and spec is None and isinstance(x, jax.core.Tracer)
    if hidden and ranks.mesh.size > ranks.world:
        raise ValueError(
            f"{CALLER}: the mesh has axes besides {ranks.axis!r}, and jit hides how {place.path} "
            "is sharded over them; pass specs=, a tree of PartitionSpecs like params."
        )
    spec = spec or _REPLICATED
    if ranks.dimension(spec) is not None:
        raise ValueError(
            f"{CALLER}: {place.path} is sharded over the data axis {ranks.axis!r} ({spec}); it "
            "must be replicated over it. Use psum_scatter_compressed for fully sharded training."
        )
    return spec
