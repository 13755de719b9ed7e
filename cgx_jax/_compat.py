"""Every JAX call that differs between the supported versions (0.10.2, 0.11.2 and newer)."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any, TypeVar

import jax
from jax import lax
from jax.extend.core import Jaxpr, Literal, Primitive
from jax.interpreters import ad, batching, mlir, xla
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

T = TypeVar("T")


def identity(name: str, aval: Callable[..., Any] = lambda x, *_, **params: x) -> Primitive:
    """Returns a primitive that returns its first operand, with the type that `aval` gives it.

    It costs nothing at run time.
    """
    p = Primitive(name)
    p.def_impl(lambda x, *_, **params: x)
    p.def_abstract_eval(aval)
    batching.defvectorized(p)
    mlir.register_lowering(p, lambda ctx, x, *_, **params: [x])
    return p


def operation(name: str, shapes: Callable[..., Any]) -> Primitive:
    """Returns a primitive with several results, of the types that `shapes` gives them."""
    p = Primitive(name)
    p.multiple_results = True
    p.def_abstract_eval(shapes)
    p.def_impl(functools.partial(xla.apply_primitive, p))
    return p


def varying_axes(x: Any) -> frozenset[str]:
    """Returns the mesh axes over which `x` is typed as varying (none outside check_vma)."""
    return frozenset(jax.typeof(x).mat.varying)


def axis_types(x: Any) -> dict[str, AxisType]:
    """Returns the axes of a leaf's mesh, in order, with their types."""
    mesh = jax.typeof(x).sharding.mesh
    return dict(zip(mesh.axis_names, mesh.axis_types, strict=True))


def explicit_axes(mesh: Mesh | AbstractMesh) -> set[str]:
    """Returns the axes of a mesh over which types say how a value is sharded."""
    pairs = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return {name for name, kind in pairs if kind == AxisType.Explicit}


def explicit_spec(where: str, x: Any) -> PartitionSpec:
    """Returns the spec in a leaf's type; raises ValueError unless it says all about its mesh."""
    types = axis_types(x)
    if not types:
        raise ValueError(
            f"{where} is on no mesh; place it on one: jax.device_put(x, NamedSharding(mesh, "
            "spec)), or jax.device_put(x, PartitionSpec(...)) under jax.set_mesh(mesh)."
        )
    for name, kind in types.items():
        if kind != AxisType.Explicit:
            remedy = "make all axes explicit, as jax.make_mesh does, or use cgx_jax.value_and_grad"
            if kind == AxisType.Manual:
                remedy = "inside shard_map, use the calls in the place of those of lax"
            raise ValueError(
                f"{where} is on a mesh whose axis {name!r} is {kind.name}, so its type does not "
                f"show how it is split; {remedy}."
            )
    return jax.typeof(x).sharding.spec


def explicit_sharding(x: Any) -> NamedSharding | None:
    """Returns the sharding over explicit axes in the type of `x`; None inside shard_map."""
    mesh = jax.typeof(x).sharding.mesh if isinstance(x, jax.Array) else None
    if mesh is None or AxisType.Manual in mesh.axis_types or not explicit_axes(mesh):
        return None
    return jax.typeof(x).sharding


def is_sum(mat: Any) -> bool:
    """Whether the unreduced axes of a type stand for a sum, and not for a maximum or minimum."""
    kind = getattr(mat, "unreduced_kind", None)
    return kind is None or kind.name == "sum"


def vary_over(x: T, axes: frozenset[str]) -> T:
    """Types `x` as varying over `axes` as well; costs nothing at run time."""
    missing = tuple(a for a in sorted(axes) if a not in varying_axes(x))
    return lax.pcast(x, missing, to="varying") if missing else x


def plain(x: T) -> T:
    """Types `x` without `reduced` and `unreduced` axes, which most operations do not accept."""
    mat = jax.typeof(x).mat
    return _retyped(x, type(mat)())


def own(x: T, axes: Sequence[str]) -> T:
    """Types `x` as `plain` does, and a rank's part of a value unreduced over `axes` as varying."""
    return vary_over(plain(x), jax.typeof(x).mat.unreduced & frozenset(axes))


def typed_like(x: T, like: Any, axes: Sequence[str]) -> T:
    """Types `x` with the `reduced` and `unreduced` axes of `like`; costs nothing at run time.

    A result of a sum over `axes` is not unreduced over them.
    """
    mat = jax.typeof(like).mat
    left = mat.unreduced - frozenset(axes)
    if left != mat.unreduced:
        mat = type(mat)(unreduced=left, reduced=mat.reduced)
    return _retyped(x, mat)


def _retyped(x: T, like: Any) -> T:
    mat = jax.typeof(x).mat
    return x if like.update(varying=mat.varying) == mat else _retype_p.bind(x, like=like)


# On each device, a value with `reduced` or `unreduced` axes is an ordinary value. Only AD reads
# these types, so a computation without them needs a derivative of its own.
_retype_p = identity(
    "cgx_retype",
    lambda x, *, like: x.update(
        manual_axis_type=like.update(varying=x.mat.varying), weak_type=False
    ),
)


def same_over(x: T, axes: Sequence[str]) -> T:
    """Types `x` as the same on all ranks of `axes`; the caller guarantees that it is."""
    replicated = tuple(a for a in axes if a in varying_axes(x))
    return _same_p.bind(x, axes=replicated) if replicated else x


# JAX types some values as varying that are the same on all ranks, such as the result of successive
# gathers over groups that together cover all ranks.
_same_p = identity("cgx_same", lambda x, *, axes: reduced_aval(x, axes))


def same_everywhere(x: jax.Array) -> jax.Array:
    """Types `x` as the same on all ranks, those of vmap too; the caller guarantees that it is."""
    return _same_everywhere_p.bind(x)


_same_everywhere_p = identity("cgx_same_everywhere", lambda x: reduced_aval(x, x.mat.varying))
batching.primitive_batchers[_same_everywhere_p] = lambda args, dims: (
    same_everywhere(args[0].max(dims[0])),
    None,
)


def outside_vmap(caller: str, x: T, *, retypes: bool) -> T:
    """Returns `x`, an operand of a shard_map; raises ValueError under a vmap that JAX cannot do.

    JAX cannot map over operands that are `reduced` or `unreduced`, nor over a shard_map that
    `retypes` to these. It gathers a mapped dimension that is sharded.
    """
    return _outside_vmap_p.bind(x, caller=caller, retypes=retypes)


def _mapped(args: Any, dims: Any, *, caller: str, retypes: bool) -> Any:
    spec = jax.typeof(args[0]).sharding.spec
    cut = [*spec.partitions, *[None] * args[0].ndim][dims[0]]
    if retypes or spec.unreduced or spec.reduced or cut:
        why = f"is sharded over {cut!r}" if cut else "goes with unreduced or reduced types"
        raise ValueError(
            f"{caller}: jax.vmap maps a dimension that {why}, which JAX cannot map over devices; "
            "make this call outside of vmap, on the stacked arrays."
        )
    return _outside_vmap_p.bind(*args, caller=caller, retypes=retypes), dims[0]


_outside_vmap_p = identity("cgx_outside_vmap")
batching.primitive_batchers[_outside_vmap_p] = _mapped
ad.deflinear2(_outside_vmap_p, lambda ct, x, **params: [ct])


def result_aval(shape: Sequence[int], dtype: DTypeLike, like: Any) -> jax.core.ShapedArray:
    """Returns the abstract value of a kernel's result; it varies where the operand `like` does."""
    mesh = jax.sharding.get_abstract_mesh()
    sharding = None if mesh.empty else NamedSharding(mesh, PartitionSpec())
    return jax.core.ShapedArray(tuple(shape), dtype, sharding=sharding, manual_axis_type=like.mat)


def reduced_aval(x: Any, axes: Sequence[str]) -> jax.core.ShapedArray:
    """Returns the abstract value of `x` after a reduction that makes it the same over `axes`."""
    varying = x.mat.varying - frozenset(axes)
    return x.update(manual_axis_type=x.mat.update(varying=varying))


def new_channel(ctx: Any) -> int:
    """Returns a number that no other communicating operation in the lowered module has."""
    return int(ctx.module_context.new_channel())


def module_name(ctx: Any) -> str:
    """Returns the name of the module that is being lowered, such as jit_step."""
    return str(ctx.module_context.module.operation.attributes["sym_name"]).strip('"')


def lowered_program() -> Any:
    """Returns the closed jaxpr that is being lowered, or None if this JAX does not show it."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_name != "lower_jaxpr_to_module":
        frame = frame.f_back
    return None if frame is None else frame.f_locals.get("jaxpr")


# These primitives only view the memory of their operand.
_VIEWS = frozenset({"pcast", "pvary", "reshape", "slice", "squeeze"})


def is_computed(x: object) -> bool:
    """Whether the traced function computes `x`, rather than only viewing an argument.

    False if JAX does not say: outside jit, and for a value that a transformation wraps.
    """
    while (equation := getattr(x, "parent", None)) is not None:
        if equation.primitive.name not in _VIEWS:
            return True
        (x,) = equation.in_tracers
    return False


def is_filled(x: object, axes: Sequence[str]) -> bool:
    """Whether the traced function computes `x` from numbers alone, such as 0, on each rank.

    False if JAX does not say, for arguments of the traced function, which may have been summed
    outside of it, and for what ranks of `axes` have computed together.
    """
    todo: list[Any] = [x]
    seen: set[int] = set()
    while todo:
        y = todo.pop()
        equation = getattr(y, "parent", None)
        if equation is None:
            if not hasattr(getattr(y, "val", None), "val"):  # is no literal
                return False
        elif id(equation) not in seen:
            seen.add(id(equation))
            places = "sharding", "mesh"
            given = equation.params.items()
            names = repr([v for k, v in given if not any(place in k for place in places)])
            if any(repr(axis) in names for axis in axes):
                return False
            todo += equation.in_tracers
    return True


def on_collective_stream(function: Callable[..., Any]) -> Callable[..., Any]:
    """Makes `function` one asynchronous call on the stream of XLA's GPU collectives.

    On another stream, a call that uses XLA's communicator could run beside XLA's own collectives,
    which is unsafe.
    """
    from jax.experimental import compute_on

    # Any, because the signature differs in jaxlib 0.10, which has no fused calls on CUDA.
    annotate: Any = compute_on.compute_on
    memory = jax.memory.Space.Device
    return annotate(function, compute_type="gpu_stream:collective", out_memory_spaces=memory)


def concrete_mesh() -> Mesh | None:
    """Returns the mesh of `jax.set_mesh` with its devices, also while tracing; None without one."""
    mesh = jax._src.mesh.get_concrete_mesh()
    return None if mesh is None or mesh.empty else mesh


def coordination() -> Any:
    """Returns the client of the keys and values that all processes share; None in one process."""
    return jax._src.distributed.global_state.client


def platform() -> str:
    """Returns the platform of the devices that a call is traced for; JAX's own without a mesh."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.default_backend() if device is None else str(device.platform)


def bound_by_mesh(axes: Sequence[str]) -> bool:
    """True when shard_map (or pmap) binds `axes`; False under `vmap(axis_name=...)`."""
    manual = jax.sharding.get_abstract_mesh().manual_axes
    return all(a in manual for a in axes)


def scan_operands(params: Mapping[str, Any]) -> tuple[int, int]:
    """Returns how many operands of a scan are constants, and how many are its carry."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    constants, carry, _ = params["ft_in"].unpack()  # jax 0.12
    return len(list(constants.vals)), len(list(carry.vals))


def programs_in(values: Iterable[Any]) -> list[Any]:
    """Returns the programs, closed or open, among an equation's parameters."""
    found: list[Any] = []
    for value in values:
        if is_program(value):
            found.append(value)
        elif isinstance(value, tuple | list):
            found += programs_in(value)
    return found


def is_program(value: object) -> bool:
    """Whether `value` is a program, closed or open."""
    return isinstance(value, Jaxpr) or hasattr(value, "jaxpr")


def open_program(program: Any) -> Any:
    """Returns the program of a closed one, which also has values for its constants."""
    return getattr(program, "jaxpr", program)


def programs_within(program: Any) -> Iterator[Any]:
    """Yields a program and all programs within it."""
    yield program
    for eqn in open_program(program).eqns:
        for inner in programs_in(eqn.params.values()):
            yield from programs_within(inner)


def constants_within(program: Any) -> list[Any]:
    """Returns the constants of a program and of all programs within it."""
    return [x for inner in programs_within(program) for x in getattr(inner, "consts", ())]


def evaluate(jaxpr: Any, consts: Sequence[Any], arrays: Sequence[Any]) -> list[Any]:
    """Returns the results of a closed jaxpr with other values for its constants."""
    return list(jax.core.eval_jaxpr(jaxpr.jaxpr, consts, *arrays))


def written_out(eqn: Any) -> Any:
    """Returns the program, closed, of an operation that JAX (0.12) writes in terms of others.

    None if it names axes, which are not bound here.
    """
    avals = [x.aval for x in eqn.invars]
    try:
        with eqn.ctx.manager:
            return jax.make_jaxpr(lambda *x: eqn.primitive.to_lojax(*x, **eqn.params))(*avals)
    except NameError:
        return None


def evaluate_one(jaxpr: Any, eqn: Any, operands: Sequence[Any]) -> list[Any]:
    """Returns the results of one equation of a jaxpr."""
    pairs = zip(eqn.invars, operands, strict=True)
    own = {x: value for x, value in pairs if not isinstance(x, Literal)}
    alone = {"constvars": [], "invars": list(own), "outvars": list(eqn.outvars), "eqns": [eqn]}
    one = jaxpr.replace(**alone, effects=eqn.effects)
    return list(jax.core.eval_jaxpr(one, (), *own.values()))


def is_key_data(program: Any, number: int) -> bool:
    """Whether a program uses its input `number` for nothing but PRNG keys."""
    jaxpr = open_program(program)
    x = jaxpr.invars[number]
    for eqn in jaxpr.eqns:
        for i, operand in enumerate(eqn.invars):
            if operand is x and eqn.primitive.name not in ("random_wrap", "random_clone"):
                inner = [(branch, i - 1) for branch in eqn.params.get("branches", ())]
                inner += [(eqn.params["jaxpr"], i)] if "jaxpr" in eqn.params else []
                if not inner or not all(is_key_data(*each) for each in inner):
                    return False
    return x not in jaxpr.outvars
