"""One step: each rank's gradients and their reduction, in a shard_map over the data axis."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax import lax
from jax.sharding import PartitionSpec

from cgx_jax.plain_jit import outputs
from cgx_jax.plain_jit.model_axes import Shards
from cgx_jax.plain_jit.program import Program
from cgx_jax.plain_jit.reduction import GradientMean
from cgx_jax.transforms.state import state_specs


class Step:
    """One step as a function of arrays; equal steps can share one compiled program."""

    def __init__(
        self,
        program: Program,
        shards: Shards,
        reduction: GradientMean,
        aux_specs: Any,
        *,
        single: bool,
    ) -> None:
        self.program, self.shards, self.reduction = program, shards, reduction
        self.aux_specs, self.single = aux_specs, single
        self._statics = program.closure.statics
        self._key = program.arguments, program.places, program.splits, program.ranks, shards

    def __hash__(self) -> int:
        return hash((self._key, *map(id, self._statics)))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Step) or len(self._statics) != len(other._statics):
            return False
        same = all(a is b for a, b in zip(self._statics, other._statics, strict=True))
        return same and self._key == other._key

    def hashable(self) -> bool:
        """Returns whether the step, with the arguments' static values, can be hashed."""
        try:
            hash(self)
        except TypeError:
            return False
        return True

    def __call__(self, arrays: Sequence[Any], state: Any) -> Any:
        """Returns (loss, gradients, aux, NNX states, state) from global arrays, while tracing."""
        program, ranks = self.program, self.program.ranks
        aux_at: Any = outputs.SAME
        rests_at: Any = outputs.SAME
        if ranks.world > 1:
            aux_at, rests_at = program.study(arrays, self.aux_specs)
        is_output = lambda x: isinstance(x, outputs.Output)  # noqa: E731

        def specs(tree: Any) -> Any:
            return jax.tree.map(lambda o: ranks.split(o.dimension), tree, is_leaf=is_output)

        def finish(tree: Any, values: Any) -> Any:
            if is_output(tree):
                return values
            return jax.tree.map(lambda o, x: o.finish(x, ranks.axis), tree, values)

        def local(arrays: Sequence[Any], state: Any) -> Any:
            loss, grads, aux, rests = self._differentiate(arrays)
            grads, state = self.shards.reduce(self.reduction, grads, state)
            loss = lax.pmean(loss, ranks.axis)
            return loss, grads, finish(aux_at, aux), finish(rests_at, rests), state

        everywhere = PartitionSpec()
        kept = state_specs(state, ranks.axis) if state is not None else everywhere
        arrays_at = [ranks.split(split.dimension) for split in program.splits]
        return jax.shard_map(
            local,
            mesh=ranks.mesh,
            in_specs=(arrays_at, kept),
            out_specs=(everywhere, everywhere, specs(aux_at), specs(rests_at), kept),
            axis_names=set(ranks.names),
            check_vma=False,
        )([ranks.placed(x, s) for x, s in zip(arrays, arrays_at, strict=True)], state)

    def _differentiate(self, arrays: Sequence[Any]) -> tuple[Any, Any, Any, Any]:
        """Returns a rank's (loss, gradients as a tree, aux, NNX states)."""
        program = self.program
        trained = [i for i, place in enumerate(program.places) if place.trained]

        def loss_of(values: Sequence[Any]) -> Any:
            whole = list(arrays)
            for i, x in zip(trained, values, strict=True):
                whole[i] = x
            loss, aux, rests = program(whole)
            return loss, (aux, rests)

        value = jax.value_and_grad(loss_of, has_aux=True)([arrays[i] for i in trained])
        (loss, (aux, rests)), grads = value
        found = dict(zip(trained, grads, strict=True))
        trees = []
        at = 0
        for argument in program.arguments:
            leaves = []
            for is_leaf, _ in argument.leaves:
                leaves.append(found.get(at) if is_leaf else None)
                at += is_leaf
            if argument.wanted:
                trees.append(argument.parameters(leaves))
        return loss, (trees[0] if self.single else tuple(trees)), aux, rests
