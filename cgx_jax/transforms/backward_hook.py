"""The backward-pass hook: compressed reduction of gradients while the backward pass runs."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from cgx_jax import _compat
from cgx_jax._types import AxisName, Key, Pytree
from cgx_jax.arguments import folded
from cgx_jax.axes import SMALL_BYTES
from cgx_jax.compressors import Compressor
from cgx_jax.debug import nonfinite
from cgx_jax.exchanges import Exchange
from cgx_jax.kernels.wire import HOOK_FUSION_BYTES
from cgx_jax.plan import Plan, consecutive, resolve
from cgx_jax.policies.rules import Policy
from cgx_jax.reductions import Levels, Reduction
from cgx_jax.route.route import Options, Route, route
from cgx_jax.route.run import values_of
from cgx_jax.transforms import hooked
from cgx_jax.tuning import Tuner

_HOOK = "reduce_in_backward"


def reduce_in_backward(
    params: Pytree,
    axis_name: AxisName,
    compressor: Compressor | Policy | Plan | None = None,
    *,
    key: Key = None,
    exchange: Exchange | str | Tuner = "auto",
    reduction: Reduction | str | None = None,
    levels: Levels | None = None,
) -> Pytree:
    """Returns `params` unchanged; the backward pass sums their gradients with compression.

    `params` is a pytree of arrays. Wrap the parameters inside the loss. Each fusion buffer (4 MiB,
    or the plan's) is reduced as soon as its own gradients are ready, while the backward pass
    continues. Exact leaves travel in buffers of up to 64 KiB. The gradient is that of a replicated
    parameter: the sum over `axis_name`. To get the mean, take the mean of the loss
    (`lax.pmean(loss, axis_name)` under check_vma), or divide the gradients.

    `compressor`, `key`, `exchange`, `reduction`, `levels` and errors are as in `psum_compressed`. A
    `Tuner` as `exchange` chooses the exchange, the reduction, the levels and the buffer size. Also
    raises ValueError for compressors with state, and for parameters that are hooked over the axis
    already or are made to vary inside the differentiated function: their gradient would be
    multiplied by the number of ranks. Under `jax.jit` this is seen through jit, scan and remat too.
    Without it, two hooks are seen only if no such function lies between them.
    """
    nonfinite.refuse_skip(_HOOK)
    plan = resolve(_HOOK, params, compressor, fusion_bytes=HOOK_FUSION_BYTES)
    plan.require_stateless(_HOOK)
    options = Options.resolve(
        _HOOK, axis_name, exchange=exchange, reduction=reduction, levels=levels, overlaps=True
    )
    taken = route(options, plan)
    plan = taken.plan
    leaves, treedef = jax.tree.flatten(params)
    options.axes.check_plain(_HOOK, list(zip([x.path for x in plan.leaves], leaves, strict=True)))
    for i, leaf in enumerate(plan.leaves):
        if jnp.issubdtype(leaf.dtype, jnp.inexact):
            leaves[i] = hooked.mark(_HOOK, leaf.path, jnp.asarray(leaves[i]), options.axes.names)
    inexact = [i for i in plan.exact if jnp.issubdtype(plan.leaves[i].dtype, jnp.inexact)]
    together = consecutive(plan.leaves, dict.fromkeys(inexact), SMALL_BYTES)
    for number, part in enumerate([*plan.buffers, *together]):
        own = folded(_HOOK, key, number)
        same = _hooked(taken.subset(part), own, tuple(leaves[i] for i in part))
        for i, x in zip(part, same, strict=True):
            leaves[i] = x
    return jax.tree.unflatten(treedef, leaves)


def _hooked(taken: Route, key: Key, leaves: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns leaves as they are; the backward pass sums their cotangents by `taken`."""
    before = [_compat.varying_axes(x) for x in leaves]
    vary = taken.options.axes.varying()

    def forward(key: Key, leaves: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(_compat.vary_over(x, vary) for x in leaves)

    def backward(key: Key, cotangents: tuple[Any, ...]) -> tuple[None, tuple[Any, ...]]:
        summed = zip(values_of(taken, cotangents, key), before, strict=True)
        return None, tuple(_compat.vary_over(x, axes) for x, axes in summed)

    identity = jax.custom_vjp(forward)
    identity.defvjp(lambda key, xs: (forward(key, xs), key), backward)
    return identity(key, leaves)
