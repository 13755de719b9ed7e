"""Compressed gradients in a training loop: the backward-pass hook, and value_and_grad under jit."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from cgx_jax import _compat
from cgx_jax.axes import Axes
from cgx_jax.collectives import pmean_compressed, psum_compressed
from cgx_jax.compressors import Compressor
from cgx_jax.plan import Plan
from cgx_jax.policy.rules import Policy

# Small enough that the first layers' reduction starts while the backward pass runs on, large
# enough that a collective's latency is a small part of it.
HOOK_FUSION_BYTES = 4 << 20


def reduce_in_backward(
    params: Any,
    axis_name: Any,
    compressor: Compressor | Policy | Plan | None = None,
    *,
    key: Any = None,
    exchange: str = "auto",
) -> Any:
    """`params` unchanged; in the backward pass their gradients are summed, compressed.

    Wrap the parameters inside the loss. Each fusion buffer (4 MB, or the plan's) is reduced as
    soon as its own gradients are there, while the backward pass goes on. The gradient is that of
    a replicated parameter: the sum over `axis_name`, so take the mean in the loss
    (`lax.pmean(loss, axis_name)` under check_vma) or divide. Leaves, `key`, `exchange` and errors
    as in `psum_compressed`.
    """
    axes = Axes.resolve("reduce_in_backward", axis_name, None)
    name = "reduce_in_backward"
    plan = Plan.resolve(name, params, compressor, fusion_bytes=HOOK_FUSION_BYTES)
    leaves, treedef = jax.tree.flatten(params)
    inexact = [i for i in plan.exact if jnp.issubdtype(plan.slots[i].dtype, jnp.inexact)]
    for number, part in enumerate([*plan.buffers, *((i,) for i in inexact)]):
        call = _Hook(axes, plan.subset(part), exchange)
        own = None if key is None else jax.random.fold_in(key, number)
        for i, x in zip(part, call(own, tuple(leaves[i] for i in part)), strict=True):
            leaves[i] = x
    return jax.tree.unflatten(treedef, leaves)


class _Hook:
    """Identity on some leaves whose cotangents are summed by `plan`."""

    def __init__(self, axes: Axes, plan: Plan, exchange: str):
        self.axes, self.plan, self.exchange = axes, plan, exchange

    def __call__(self, key: Any, leaves: tuple[Any, ...]) -> tuple[Any, ...]:
        before = [_compat.varying_axes(x) for x in leaves]
        identity = jax.custom_vjp(self._forward)

        def backward(key: Any, cotangents: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
            tree = {s.path: ct for s, ct in zip(self.plan.slots, cotangents, strict=True)}
            summed = psum_compressed(
                tree, self.axes.names, self.plan, key=key, exchange=self.exchange
            )
            out = tuple(
                _compat.vary_over(summed[s.path], axes)
                for s, axes in zip(self.plan.slots, before, strict=True)
            )
            return jax.tree.map(_no_gradient, key), out

        identity.defvjp(lambda key, xs: (self._forward(key, xs), key), backward)
        return identity(key, leaves)

    def _forward(self, key: Any, leaves: tuple[Any, ...]) -> tuple[Any, ...]:
        if not self.axes.checked():
            return leaves
        return tuple(_compat.vary_over(x, frozenset(self.axes.names)) for x in leaves)


def _no_gradient(key: Any) -> np.ndarray:
    return np.zeros(jnp.shape(key), jax.dtypes.float0)


def value_and_grad(
    loss_fn: Callable[..., Any],
    mesh: Mesh,
    axis_name: str,
    compressor: Compressor | Policy | Plan | None = None,
    *,
    has_aux: bool = False,
    specs: Any = None,
    exchange: str = "auto",
) -> Callable[..., Any]:
    """`jax.value_and_grad` for a data-parallel plain-jit program, gradients compressed.

    Returns `f(params, *batch, key=None) -> (loss, grads)`, to be called under jit or eagerly with
    global arrays. `loss_fn(params, *batch)` is the mean loss of the batch it is given; every
    batch array is split over `axis_name` along its first dimension, and loss, float auxiliary
    outputs and gradients are means over the axis.

    `params` is a pytree (Linen's, Equinox's, bare) or a Flax NNX module, of which the `nnx.Param`
    state is differentiated, as `nnx.value_and_grad` does, and the rest updated. On a mesh with
    further axes (data x model) parameters stay sharded over those: `specs` is their tree of
    PartitionSpecs, read from NNX metadata or from concrete arrays where it is None. `exchange` as
    in `psum_compressed`. Raises ValueError for a wrong axis or batch, or when specs cannot be
    known.
    """
    if axis_name not in mesh.axis_names:
        raise ValueError(
            f"value_and_grad: axis {axis_name!r} is not in the mesh; it has {mesh.axis_names}."
        )
    mean = functools.partial(_mean, axis_name, compressor, exchange)
    step = functools.partial(_step, loss_fn, mesh, axis_name, mean, has_aux)
    compiled = jax.jit(step, static_argnums=(0, 1))

    def run(params: Any, *batch: Any, key: Any = None) -> Any:
        _check_batch(batch, axis_name, mesh.shape[axis_name])
        module = _nnx_module(params)
        if module is None:
            spec = _hashable_specs(params, specs, mesh, axis_name)
            loss, grads, aux, _ = compiled(None, spec, params, None, batch, key)
        else:
            nnx: Any = sys.modules["flax.nnx"]
            graph, params, rest = nnx.split(module, nnx.Param, ...)
            known = nnx.get_partition_spec(params) if specs is None else specs
            spec = _hashable_specs(params, known, mesh, axis_name)
            loss, grads, aux, rest = compiled(graph, spec, params, rest, batch, key)
            nnx.update(module, rest)
        return ((loss, aux) if has_aux else loss), grads

    return run


def _step(
    loss_fn: Callable[..., Any],
    mesh: Mesh,
    axis: str,
    mean: Callable[..., Any],
    has_aux: bool,
    graph: Any,
    spec: Any,
    params: Any,
    rest: Any,
    batch: Any,
    key: Any,
) -> Any:
    other = frozenset(mesh.axis_names) - {axis}

    def loss_of(params: Any, rest: Any, batch: Any) -> Any:
        if graph is None:
            out, after = loss_fn(params, *batch), None
        else:
            nnx: Any = sys.modules["flax.nnx"]
            module = nnx.merge(graph, params, rest, copy=True)
            out = loss_fn(module, *batch)
            after = nnx.split(module, nnx.Param, ...)[2]
        loss, aux = out if has_aux else (out, None)
        return loss, (aux, after)

    def local(params: Any, rest: Any, batch: Any, key: Any) -> Any:
        # Varying parameters keep AD from inserting its own uncompressed psum.
        varying = jax.tree.map(lambda p: _compat.vary_over(p, frozenset({axis})), params)
        (loss, (aux, after)), grads = jax.value_and_grad(loss_of, has_aux=True)(
            varying, rest, batch
        )
        loss, aux, after = (_mean_floats(t, axis) for t in (loss, aux, after))
        return loss, reduce(grads, key), aux, after

    def reduce(grads: Any, key: Any) -> Any:
        if not other:
            return mean(grads, key)
        # A kernel call on a model-sharded operand would gather it first: go manual over the
        # model axes as well, so that every shard is reduced where it lies.
        tree = spec.tree
        return jax.shard_map(
            mean, in_specs=(tree, PartitionSpec()), out_specs=tree, axis_names=set(other)
        )(grads, key)

    everywhere = PartitionSpec()
    return jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(everywhere, everywhere, PartitionSpec(axis), everywhere),
        out_specs=everywhere,
        axis_names={axis},
    )(params, rest, batch, key)


def _mean(
    axis: str, compressor: Compressor | Policy | Plan | None, exchange: str, grads: Any, key: Any
) -> Any:
    return pmean_compressed(grads, axis, compressor, key=key, exchange=exchange)


def _mean_floats(tree: Any, axis: str) -> Any:
    """Floats that differ between ranks are averaged; what does not vary is left alone."""

    def mean(x: Any) -> Any:
        if axis not in _compat.varying_axes(x):
            return x
        if not jnp.issubdtype(x.dtype, jnp.inexact):
            raise TypeError(
                f"value_and_grad: an output of dtype {x.dtype} differs between the ranks of "
                f"{axis!r} and has no mean; return it as a float, or reduce it with lax.psum."
            )
        return lax.pmean(x, axis)

    return jax.tree.map(mean, tree)


def _check_batch(batch: Any, axis: str, world: int) -> None:
    for path, x in jax.tree_util.tree_leaves_with_path(batch):
        shape = jnp.shape(x)
        if not shape or shape[0] % world:
            raise ValueError(
                f"value_and_grad: batch array {jax.tree_util.keystr(path)} has shape "
                f"{list(shape)}; its first dimension must be a multiple of the {world} ranks of "
                f"axis {axis!r}. Pad or drop the last examples."
            )


def _nnx_module(params: Any) -> Any:
    """`params` itself when it is a Flax NNX module, else None. Flax is never imported for it."""
    nnx = sys.modules.get("flax.nnx")
    return params if nnx is not None and isinstance(params, nnx.Module) else None


class _Specs:
    """A tree of PartitionSpecs that jit can cache by."""

    def __init__(self, tree: Any):
        self.tree = tree
        leaves, treedef = jax.tree.flatten(tree, is_leaf=lambda s: isinstance(s, PartitionSpec))
        self._key = (tuple(leaves), treedef)

    def __hash__(self) -> int:
        return hash(self._key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Specs) and self._key == other._key


def _hashable_specs(params: Any, specs: Any, mesh: Mesh, axis: str) -> _Specs | None:
    other = [a for a in mesh.axis_names if a != axis]
    if not other:
        return None
    if specs is None:
        specs = jax.tree.map(
            functools.partial(_spec_of, sharded=mesh.size > mesh.shape[axis]), params
        )

    def clean(spec: Any) -> PartitionSpec:
        spec = spec if isinstance(spec, PartitionSpec) else PartitionSpec()
        used = {n for entry in spec for n in (entry if isinstance(entry, tuple) else (entry,))}
        if axis in used:
            raise ValueError(
                f"value_and_grad: a parameter is sharded over the data axis {axis!r} ({spec}); it "
                "must be replicated over it. Use psum_scatter_compressed for sharded data-parallel."
            )
        return spec

    is_leaf = lambda s: s is None or isinstance(s, PartitionSpec)  # noqa: E731
    return _Specs(jax.tree.map(clean, specs, is_leaf=is_leaf))


def _spec_of(x: Any, *, sharded: bool) -> PartitionSpec:
    sharding = getattr(x, "sharding", None) if not isinstance(x, jax.core.Tracer) else None
    if isinstance(sharding, NamedSharding):
        return sharding.spec
    explicit = jax.typeof(x).sharding.spec
    if isinstance(x, jax.core.Tracer) and sharded and not any(explicit):
        raise ValueError(
            "value_and_grad: the mesh has more axes than the data axis, and under jit the "
            "parameters' sharding over them cannot be seen; pass specs=, a tree of "
            "PartitionSpecs like params."
        )
    return explicit
