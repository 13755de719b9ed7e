"""Every JAX call that differs between the supported versions (0.10.2, 0.11.2 and newer)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir
from jax.sharding import NamedSharding, PartitionSpec


def varying_axes(x: Any) -> frozenset[str]:
    """Mesh axes over which `x` is typed as varying (empty outside check_vma)."""
    return frozenset(jax.typeof(x).mat.varying)


def vary_over(x: Any, axes: frozenset[str]) -> Any:
    """Types `x` as varying over `axes` too; no operation at run time."""
    missing = tuple(a for a in sorted(axes) if a not in varying_axes(x))
    return lax.pcast(x, missing, to="varying") if missing else x


def plain(x: Any) -> Any:
    """`x` without its `reduced` and `unreduced` axes, which most operations do not take."""
    mat = jax.typeof(x).mat
    return _retyped(x, type(mat)())


def typed_like(x: Any, like: Any) -> Any:
    """`x` with the `reduced` and `unreduced` axes of `like`; no operation at run time."""
    return _retyped(x, jax.typeof(like).mat)


def _retyped(x: Any, like: Any) -> Any:
    mat = jax.typeof(x).mat
    return x if like.update(varying=mat.varying) == mat else _retype_p.bind(x, like=like)


# A value over an axis of either kind is an ordinary one on each device. Only AD reads these types,
# so what is made without them has a derivative of its own.
_retype_p = Primitive("cgx_retype")
_retype_p.def_impl(lambda x, *, like: x)
_retype_p.def_abstract_eval(
    lambda x, *, like: x.update(
        manual_axis_type=like.update(varying=x.mat.varying), weak_type=False
    )
)
batching.defvectorized(_retype_p)
mlir.register_lowering(_retype_p, lambda ctx, x, *, like: [x])


def same_over(x: Any, axes: Sequence[str]) -> Any:
    """`x`, which is the same on all ranks of `axes`, typed so; the caller answers for it."""
    replicated = tuple(a for a in axes if a in varying_axes(x))
    return _same_p.bind(x, axes=replicated) if replicated else x


# A gather over groups that follow each other over all ranks is typed as varying.
_same_p = Primitive("cgx_same")
_same_p.def_impl(lambda x, *, axes: x)
_same_p.def_abstract_eval(lambda x, *, axes: reduced_aval(x, axes))
batching.defvectorized(_same_p)
mlir.register_lowering(_same_p, lambda ctx, x, *, axes: [x])


def result_aval(shape: Sequence[int], dtype: Any, like: Any) -> jax.core.ShapedArray:
    """Abstract value of a kernel's result: varies where the operand `like` varies."""
    mesh = jax.sharding.get_abstract_mesh()
    sharding = None if mesh.empty else NamedSharding(mesh, PartitionSpec())
    return jax.core.ShapedArray(tuple(shape), dtype, sharding=sharding, manual_axis_type=like.mat)


def reduced_aval(x: Any, axes: Sequence[str]) -> jax.core.ShapedArray:
    """Abstract value of `x` after a reduction that leaves it the same over `axes`."""
    varying = x.mat.varying - frozenset(axes)
    return x.update(manual_axis_type=x.mat.update(varying=varying))


def new_channel(ctx: Any) -> int:
    """A number that no other communicating operation of the module being lowered has."""
    return int(ctx.module_context.new_channel())


def module_name(ctx: Any) -> str:
    """The name of the module being lowered, such as jit_step."""
    return str(ctx.module_context.module.operation.attributes["sym_name"]).strip('"')


# These only view the memory of their operand.
_VIEWS = frozenset({"pcast", "pvary", "reshape", "slice", "squeeze"})


def is_computed(x: Any) -> bool:
    """Whether the function being traced computes `x`, other than by viewing an argument.

    False where JAX does not tell: outside of jit, and of a value that a transformation wraps.
    """
    while (equation := getattr(x, "parent", None)) is not None:
        if equation.primitive.name not in _VIEWS:
            return True
        (x,) = equation.in_tracers
    return False


def on_collective_stream(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` as one asynchronous call on the stream of XLA's GPU collectives.

    Away from that stream, a call that uses XLA's communicator is unsafe beside its collectives.
    """
    from jax.experimental import compute_on

    # jaxlib 0.10, which has no fused calls on CUDA, has another signature.
    annotate: Any = compute_on.compute_on
    memory = jax.memory.Space.Device
    return annotate(function, compute_type="gpu_stream:collective", out_memory_spaces=memory)


def bound_by_mesh(axes: Sequence[str]) -> bool:
    """True when shard_map (or pmap) binds `axes`; False under `vmap(axis_name=...)`."""
    manual = jax.sharding.get_abstract_mesh().manual_axes
    return all(a in manual for a in axes)


def scan_operands(params: Mapping[str, Any]) -> tuple[int, int]:
    """How many of a scan's operands are constants, and how many its carry."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    constants, carry, _ = params["ft_in"].unpack()  # jax 0.12
    return len(list(constants.vals)), len(list(carry.vals))
