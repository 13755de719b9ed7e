"""Reduces one rank's gradients to the mean over the ranks, with or without a state."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, cast

import jax

from cgx_jax._types import Pytree
from cgx_jax.compressors import Compressor
from cgx_jax.exchanges import Exchange
from cgx_jax.plain_jit.arguments import CALLER
from cgx_jax.plain_jit.gathers import Gather
from cgx_jax.plain_jit.model_axes import Shards
from cgx_jax.plan import Plan, require_policy, resolve
from cgx_jax.policies.rules import Policy
from cgx_jax.route.route import Options, route
from cgx_jax.route.run import values_of
from cgx_jax.transforms.shares import Cut
from cgx_jax.transforms.state import has_state
from cgx_jax.transforms.sync_gradients import Sync, grown

_WITH_STATE = (
    "call state = f.init(params) once, and (loss, grads), state = f.apply(state, params, batch) in "
    "each step, where f is what value_and_grad returned"
)


@dataclasses.dataclass(frozen=True)
class GradientMean:
    """How gradients are reduced, and by which codes the `weights` travel that are sharded.

    With a state, `sync` reduces and keeps the state. Without one, only its options count.
    """

    sync: Sync
    weights: Compressor | Policy | Plan

    def __post_init__(self) -> None:
        if not isinstance(self.weights, Plan):
            require_policy(f"{CALLER}, weights", self.weights)

    @property
    def adapts(self) -> bool:
        """Whether the policy changes its plan between steps."""
        return isinstance(self.sync.policy, Policy) and self.sync.policy.adapts

    def require_stateless(self) -> None:
        """Raises ValueError for options that need a state from step to step."""
        sync = self.sync
        needy = (sync.memory, sync.precondition, sync.policy if self.adapts else None)
        keeper = next((x for x in needy if x is not None), None)
        if keeper is not None:
            raise ValueError(f"{CALLER}: {keeper} keeps a state between steps; {_WITH_STATE}.")

    def require_flat(self) -> None:
        """Raises ValueError for options that parameters sharded over the axis cannot follow."""
        for name in ("reduction", "levels"):
            if (value := getattr(self.sync, name)) is not None:
                raise ValueError(
                    f"{CALLER}: {name}={value!r} is for parameters that every rank has whole; "
                    "those that are sharded over the axis are gathered and scattered over all "
                    f"ranks at once. Leave {name} out."
                )

    def __call__(
        self,
        grads: Pytree,
        state: Pytree,
        cuts: tuple[Cut, ...] | None,
        dimensions: tuple[int | None, ...],
    ) -> tuple[Pytree, Pytree]:
        """Returns the mean and the next state (None without a state); runs inside the axis.

        `cuts` say how the gradients are shards over other axes. Those with one in
        `dimensions` are shards of the mean already.
        """
        if state is not None:
            sync = dataclasses.replace(self.sync, cuts=cuts)
            return sync.update(grads, state)
        options = Options.resolve(CALLER, self.sync.axis_name, mean=True, **self.sync.how)
        leaves, treedef = jax.tree.flatten(grads)
        pairs = zip(leaves, dimensions, strict=True)
        whole = [grown(x, d, options.axes.world) for x, d in pairs]
        plan = self.plan(jax.tree.unflatten(treedef, whole), self.sync.policy)
        own = [i for i, d in enumerate(dimensions) if d is None]
        if own:
            taken = route(options, plan.subset(own))
            means = values_of(taken, [leaves[i] for i in own], None)
            for i, mean in zip(own, means, strict=True):
                leaves[i] = mean
        return jax.tree.unflatten(treedef, leaves), None

    def plan(self, tree: Pytree, policy: Any) -> Plan:
        """Returns the plan for gradients or weights; raises ValueError if it needs a state."""
        plan = resolve(CALLER, tree, policy)
        pairs = zip(plan.compressors, plan.leaves, strict=True)
        kept = [c for c, leaf in pairs if has_state(c, leaf)]
        if kept:
            raise ValueError(f"{CALLER}: {kept[0]} has state between steps; {_WITH_STATE}.")
        random = [c for c in plan.compressors if c.needs_key]
        if random:
            raise ValueError(
                f"{CALLER}: {random[0]} rounds at random, and without a state every step would "
                f"round in the same way; {_WITH_STATE}."
            )
        return plan

    def gathers(self, tree: Pytree, shards: Shards) -> list[Gather | None]:
        """Returns how each parameter that is cut over the axis travels; None for the others.

        `tree` has the shapes of the whole parameters, or of their shards over the other axes.
        """
        axis, exchange = self.sync.axis_name, cast(Exchange | str, self.sync.exchange)
        gradients, weights = (self.plan(tree, p) for p in (self.sync.policy, self.weights))
        codes = zip(weights.compressors, gradients.compressors, strict=True)
        of = functools.cache(Gather)  # equal parameters share what is traced
        return [
            None if d is None else of(axis, exchange, *code, d, spec, shards.axes)
            for d, spec, code in zip(shards.dimensions, shards.specs, codes, strict=True)
        ]
