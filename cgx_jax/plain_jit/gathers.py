"""Parameters that are sharded over the data axis, gathered where a loss uses them (FSDP)."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax
from jax.custom_batching import sequential_vmap
from jax.extend import core
from jax.sharding import PartitionSpec

from cgx_jax import _compat
from cgx_jax._types import AxisName
from cgx_jax.collective import Collective
from cgx_jax.compressors import Compressor
from cgx_jax.exchanges import Exchange
from cgx_jax.plain_jit.arguments import CALLER
from cgx_jax.plan import resolve
from cgx_jax.route import rows
from cgx_jax.route.route import Options


@dataclasses.dataclass(frozen=True)
class Gather:
    """How a parameter that is cut along `dimension` travels over the axis.

    Its values travel by `weights`, the mean of its gradients by `gradients`. `spec` says how it
    lies over the `others`, the other axes of the mesh.
    """

    axis_name: AxisName
    exchange: Exchange | str
    weights: Compressor
    gradients: Compressor
    dimension: int
    spec: PartitionSpec
    others: frozenset[str]

    @functools.cached_property
    def of_slice(self) -> Gather:
        """How a slice along the first dimension travels, which must not be the cut one."""
        return dataclasses.replace(
            self, dimension=self.dimension - 1, spec=PartitionSpec(*self.spec[1:])
        )

    def __call__(self, shard: jax.Array) -> jax.Array:
        """Returns the whole parameter. The derivative is this rank's shard of the ranks' mean."""
        # One operation for `_is_kept`, which would otherwise keep what it computes on its way.
        gather = sequential_vmap(lambda x: self._whole(x))
        call = jax.custom_vjp(lambda x: gather(x))
        call.defvjp(lambda x: (gather(x), None), lambda _, x: (self._shard(x),))
        return call(shard)

    # Parameters of one shape share what is traced, as long as they share this object.

    @functools.cached_property
    def _whole(self) -> Callable[[jax.Array], jax.Array]:
        def whole(x: jax.Array) -> jax.Array:
            gather = rows.Gather.of(self._options, x, self.weights, self.dimension, True)
            return gather(x, None)

        return jax.jit(self._on_each_shard(whole))

    @functools.cached_property
    def _shard(self) -> Callable[[jax.Array], jax.Array]:
        def shard(x: jax.Array) -> jax.Array:
            options = dataclasses.replace(
                self._options, collective=Collective.REDUCE_SCATTER, mean=True
            )
            plan = resolve(CALLER, x, self.gradients)
            return rows.Scatter.of(options, plan, [self.dimension], True)([x], None)[0]

        return jax.jit(self._on_each_shard(shard))

    @property
    def _options(self) -> Options:
        return Options.resolve(
            CALLER, self.axis_name, exchange=self.exchange, collective=Collective.ALL_GATHER
        )

    def _on_each_shard(self, f: Callable[[jax.Array], jax.Array]) -> Callable[..., jax.Array]:
        """Runs `f` where all axes are manual: XLA would gather what a kernel takes."""
        if not self.others:
            return f
        return jax.shard_map(
            f,
            in_specs=(self.spec,),
            out_specs=self.spec,
            axis_names=set(self.others),
            check_vma=False,
        )


@dataclasses.dataclass(frozen=True)
class Shard:
    """This rank's part of a parameter, in the place of the whole one."""

    value: jax.Array
    gather: Gather


# What computes each value from its own place, so that a shard of the result is that of the shard.
_ELEMENTWISE = ("convert_element_type", "copy", "copy_p", "reduce_precision")
_JIT, _CHECKPOINT = ("jit", "pjit"), ("checkpoint", "remat2")


def evaluate(jaxpr: Any, consts: Sequence[Any], arguments: Sequence[Any]) -> list[jax.Array]:
    """Evaluates a jaxpr of whole parameters, for which `arguments` may have a `Shard`.

    A parameter is gathered before the first operation that uses it. Operations inside `jit`,
    `jax.checkpoint` and `lax.scan` count: the layers of a stack are gathered one by one, and the
    backward pass gathers each again.
    """
    return [_whole(x) for x in _evaluate(jaxpr, consts, arguments)]


def _whole(x: Any) -> Any:
    return x.gather(x.value) if isinstance(x, Shard) else x


def _evaluate(jaxpr: Any, consts: Sequence[Any], arguments: Sequence[Any]) -> list[Any]:
    """Does `evaluate`, but leaves results that are shards as they are."""
    values: dict[Any, Any] = dict(zip(jaxpr.constvars, consts, strict=True))
    values.update(zip(jaxpr.invars, arguments, strict=True))

    def read(x: Any) -> Any:
        return x.val if isinstance(x, core.Literal) else values[x]

    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        given = [read(x) for x in eqn.invars]
        cut = any(isinstance(x, Shard) for x in given)
        if cut and name in _INSIDE:
            out = _INSIDE[name](eqn, given)
        elif cut and name in _ELEMENTWISE:
            (x,) = given
            parts = _compat.evaluate_one(jaxpr, eqn, [x.value])
            out = [Shard(part, x.gather) for part in parts]
        else:
            for x, value in zip(eqn.invars, given, strict=True):
                if isinstance(value, Shard):
                    values[x] = _whole(read(x))  # once, if the operation has it twice
            out = _compat.evaluate_one(jaxpr, eqn, [read(x) for x in eqn.invars])
        values.update(zip(eqn.outvars, out, strict=True))
    return [read(x) for x in jaxpr.outvars]


def _in_jit(eqn: Any, given: Sequence[Any]) -> list[Any]:
    closed = eqn.params["jaxpr"]
    return _evaluate(closed.jaxpr, closed.consts, given)


def _in_checkpoint(eqn: Any, given: Sequence[Any]) -> list[Any]:
    gathers = {i: x.gather for i, x in enumerate(given) if isinstance(x, Shard)}

    def function(*arrays: Any) -> list[Any]:
        own = [Shard(x, gathers[i]) if i in gathers else x for i, x in enumerate(arrays)]
        return evaluate(eqn.params["jaxpr"], (), own)

    options = {name: eqn.params[name] for name in ("prevent_cse", "policy")}
    arrays = [x.value if isinstance(x, Shard) else x for x in given]
    return list(jax.checkpoint(function, **options)(*arrays))


def _in_scan(eqn: Any, given: Sequence[Any]) -> list[Any]:
    closed = eqn.params["jaxpr"]
    consts, carried = _compat.scan_operands(eqn.params)
    first = consts + carried  # of what is sliced
    cut = {
        i: x.gather.of_slice
        for i, x in enumerate(given)
        if isinstance(x, Shard) and i >= first and x.gather.dimension > 0
    }
    arrays = [x.value if i in cut else _whole(x) for i, x in enumerate(given)]

    def layer(carry: Any, slices: Any) -> tuple[list[Any], list[Any]]:
        own = [Shard(x, cut[i]) if i in cut else x for i, x in enumerate(slices, first)]
        out = evaluate(closed.jaxpr, closed.consts, [*arrays[:consts], *carry, *own])
        return out[:carried], out[carried:]

    if _keeps(closed.jaxpr, {closed.jaxpr.invars[i] for i in cut}):
        layer = jax.checkpoint(layer, prevent_cse=False, policy=_is_kept)
    options = {name: eqn.params[name] for name in ("length", "reverse", "unroll")}
    carry, stacked = lax.scan(layer, arrays[consts:first], arrays[first:], **options)
    return [*carry, *stacked]


def _keeps(jaxpr: Any, shards: set[Any]) -> bool:
    """Whether a backward pass would keep what is gathered: outside of `jax.checkpoint`, it does."""
    for eqn in jaxpr.eqns:
        own = [
            i for i, x in enumerate(eqn.invars) if not isinstance(x, core.Literal) and x in shards
        ]
        name = eqn.primitive.name
        if not own or name in _CHECKPOINT:
            continue
        if name in _ELEMENTWISE:
            shards.update(eqn.outvars)
        elif name not in _JIT:
            return True
        else:
            inner = eqn.params["jaxpr"].jaxpr
            given = {inner.invars[i] for i in own}
            if _keeps(inner, given):
                return True
            pairs = zip(inner.outvars, eqn.outvars, strict=True)
            shards.update(out for x, out in pairs if not isinstance(x, core.Literal) and x in given)
    return False


def _is_kept(primitive: Any, *_: Any, **__: Any) -> bool:
    """The policy of a stack: keep all that plain jit keeps, but gather again."""
    return bool(primitive.name != "custom_vmap_call")


_INSIDE: dict[str, Callable[[Any, Sequence[Any]], list[Any]]] = {
    **dict.fromkeys(_JIT, _in_jit),
    **dict.fromkeys(_CHECKPOINT, _in_checkpoint),
    "scan": _in_scan,
}
