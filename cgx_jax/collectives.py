"""Compressed all-reduces, drop-in for `lax.psum` and `lax.pmean`.

A reduction takes the steps of CGX's scatter-reduce-allgather: encode every rank's chunk, exchange
the payloads, reduce the chunk this rank owns, gather the results, decode. The owner decodes its
own payload like everyone else, so all ranks hold the same bits.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cgx_jax import _compat, debug
from cgx_jax.axes import Axes
from cgx_jax.compressors import Compressor
from cgx_jax.compressors.base import require_key
from cgx_jax.compressors.buffers import Codec, QuantizeCodec
from cgx_jax.compressors.quantize import seed
from cgx_jax.exchanges import auto, xla
from cgx_jax.kernels.primitives import Units
from cgx_jax.plan import Plan
from cgx_jax.policies.rules import Policy

_PHASE_ENCODE, _PHASE_REDUCE = 0, 1


def psum_compressed(
    tree: Any,
    axis_name: Any,
    compressor: Compressor | Policy | Plan | None = None,
    *,
    key: Any = None,
    axis_index_groups: Sequence[Sequence[int]] | None = None,
    exchange: str = "auto",
) -> Any:
    """Sum over the ranks of `axis_name` with compressed payloads; `lax.psum` for gradients.

    `tree` is a pytree of arrays of any shape; `compressor` one compressor (default `Quantize()`,
    4 bits), a policy or a `Plan`. Given one compressor, leaves of a tree with ndim <= 1, under
    1,024 values, named bias or norm, or of a dtype other than f32, bf16, f16 are summed exactly
    (`Rules` chooses otherwise); a bare array is compressed as asked. `key` feeds
    stochastic rounding: one key for all ranks, another for every step. `exchange` names how
    payloads travel: "xla", XLA's own collectives; "mpi", one fused call a buffer, between CPU
    processes that mpiexec started; "nccl", the same between CUDA devices, on XLA's communicator
    (both for quantized buffers; others go by "xla"); or "auto", the fastest for each fusion buffer
    by the profile that `use_profile` made active, `lax.psum` included. Without a profile, buffers
    of a few megabytes and more are compressed, over MPI where it is there, and smaller ones are
    summed exactly (docs/exchanges.md); an exchange named here compresses every size.

    Every rank gets the same bits. Sums run in fp32, in rank order. The derivative is that of
    `lax.psum`, exact. Under check_vma the result does not vary over the axis; with
    `axis_index_groups` (of equal size) it does. Raises ValueError or TypeError while tracing:
    unknown axis or exchange, missing key, a plan of another tree, a profile of another world
    size, an operand that is already reduced. Source: CGX (Markov et al., Middleware 2022).
    """
    name, groups = "psum_compressed", axis_index_groups
    return _all_reduce(name, tree, axis_name, compressor, key, groups, exchange, mean=False)[0]


def pmean_compressed(
    tree: Any,
    axis_name: Any,
    compressor: Compressor | Policy | Plan | None = None,
    *,
    key: Any = None,
    axis_index_groups: Sequence[Sequence[int]] | None = None,
    exchange: str = "auto",
) -> Any:
    """Mean over the ranks of `axis_name`: `psum_compressed` divided by the world size.

    Takes and raises what `psum_compressed` does; the division comes before the second encoding.
    """
    name, groups = "pmean_compressed", axis_index_groups
    return _all_reduce(name, tree, axis_name, compressor, key, groups, exchange, mean=True)[0]


@dataclasses.dataclass(frozen=True)
class _AllReduce:
    """What one fusion buffer's reduction is traced from: static and hashable."""

    name: str
    codec: Codec
    axes: Axes
    mean: bool
    exchange: str
    residual: bool

    def run(
        self, seeds: tuple[Any, Any], leaves: Sequence[jax.Array], units: Units
    ) -> tuple[list[jax.Array], list[jax.Array]]:
        """The reduced leaves, and the residuals where asked."""
        names, groups = self.axes.names, self.axes.groups
        divisor = self.axes.world if self.mean else 1
        if (fused := auto.FUSED.get(self.exchange)) is not None:
            assert isinstance(self.codec, QuantizeCodec)  # Plan.methods sees to it
            reduced, residuals = fused.all_reduce(
                self.name,
                seeds,
                leaves,
                self.codec.layout,
                names,
                groups,
                divisor,
                residual=self.residual,
                units=units,
            )
        else:
            rank = self.axes.rank()
            rows, residuals = self.codec.encode(
                seeds[_PHASE_ENCODE], rank, leaves, residual=self.residual, units=units
            )
            rows = xla.scatter(rows, names, groups)
            chunk, residuals = self.codec.reduce(
                seeds[_PHASE_REDUCE], rank, rows, leaves, divisor, residuals, units=units
            )
            reduced = self.codec.decode(xla.gather(chunk, names, groups), leaves, units=units)
        debug.compare(self.name, self.axes, reduced)
        return reduced, residuals

    def exactly(self, leaves: Sequence[jax.Array]) -> list[jax.Array]:
        return self.axes.mean(leaves) if self.mean else self.axes.sum(leaves)


# The sum is linear, so its derivative in direction t is the sum of t. Rounding moves the value by
# a bounded step and has no useful derivative of its own: the tangent is the exact sum, and that
# of what rounding lost is 0. Units are constants.
@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _reduce_buffer(
    call: _AllReduce, seeds: Any, leaves: tuple[Any, ...], units: Units
) -> tuple[list[Any], list[Any]]:
    reduced, residuals = call.run(seeds, [_compat.plain(x) for x in leaves], units)
    typed = [_compat.typed_like(y, x) for y, x in zip(reduced, leaves, strict=True)]
    kept = [_compat.typed_like(e, x) for e, x in zip(residuals, leaves, strict=False)]
    return typed, kept


@_reduce_buffer.defjvp
def _reduce_buffer_jvp(call: _AllReduce, primals: Any, tangents: Any) -> Any:
    reduced, residuals = _reduce_buffer(call, *primals)
    none = [jnp.zeros_like(r) for r in residuals]
    return (reduced, residuals), (list(call.exactly(tangents[1])), none)


def pmean_with_residual(
    name: str,
    tree: Any,
    axis_name: Any,
    plan: Plan,
    *,
    units: Units | None = None,
    key: Any = None,
    exchange: str = "auto",
    residual: bool = True,
) -> tuple[Any, list[Any]]:
    """`pmean_compressed`, and a list of what this rank must send again to lose nothing.

    The mean over ranks of `tree` minus the first result is the mean of the residuals, up to the
    rounding of the leaves' dtype. A rank's residual holds what its first encoding lost, and in the
    chunk that it owns the world size times what the second lost. A leaf that is reduced exactly has
    None; without `residual` all have.

    `units` has one entry per leaf: None, or (rows float32[2, R], columns float32[2, C]) for a leaf
    of R * C values. Value i is multiplied by rows[0, i // C] * columns[0, i % C] before encoding;
    the mean and the residual, which is in the leaf's own units, by the products of rows[1] and
    columns[1]. All ranks pass the same units. A leaf that is reduced exactly ignores its units.
    `name` prefixes error messages; raises ValueError for units that do not fit their leaf.
    """
    return _all_reduce(
        name, tree, axis_name, plan, key, None, exchange, mean=True, residual=residual, units=units
    )


def _check_units(name: str, plan: Plan, leaves: Sequence[Any], units: Units) -> None:
    if len(units) != len(leaves):
        raise ValueError(
            f"{name}: {len(units)} units for {len(leaves)} leaves; pass one entry per leaf, None "
            "for a leaf without units."
        )
    for slot, leaf, unit in zip(plan.slots, leaves, units, strict=True):
        if unit is None:
            continue
        shapes = [tuple(x.shape) for x in unit]
        types = {jnp.result_type(x) for x in unit}
        fits = all(len(s) == 2 and s[0] == 2 for s in shapes) and types == {jnp.dtype(jnp.float32)}
        if not fits or shapes[0][1] * shapes[1][1] != leaf.size:
            raise ValueError(
                f"{name}: the units of leaf {slot.path!r} have shapes {shapes} and dtypes "
                f"{sorted(map(str, types))}; a leaf of {leaf.size} values needs float32[2, R] and "
                "float32[2, C] with R * C values."
            )


def _all_reduce(
    name: str,
    tree: Any,
    axis_name: Any,
    compressor: Any,
    key: Any,
    groups: Any,
    exchange: str,
    *,
    mean: bool,
    residual: bool = False,
    units: Units | None = None,
) -> tuple[Any, list[Any]]:
    auto.require_known(name, exchange)
    axes = Axes.resolve(name, axis_name, groups)
    plan = Plan.resolve(name, tree, compressor)
    leaves, treedef = jax.tree.flatten(tree)
    if units is not None:
        _check_units(name, plan, leaves, units)
    out, lost = reduce_leaves(
        name, leaves, axes, plan, key, exchange, mean=mean, residual=residual, units=units
    )
    return jax.tree.unflatten(treedef, out), lost


def reduce_leaves(
    name: str,
    leaves: Sequence[Any],
    axes: Axes,
    plan: Plan,
    key: Any,
    exchange: str,
    *,
    mean: bool = False,
    residual: bool = False,
    units: Units | None = None,
) -> tuple[list[Any], list[Any]]:
    """The sums or means of `leaves`, which `plan` has a slot each for, and residuals or None.

    `name` heads error messages.
    """
    out = list(leaves)
    lost: list[Any] = [None] * len(leaves)
    in_units = {i for i, unit in enumerate(units or ()) if unit is not None}
    usable = auto.available(axes.names)
    methods = plan.methods(name, exchange, usable, axes.world, in_units)
    buffers = {b: method for b, method in methods.items() if method != "psum"}
    fused = {i for buffer in buffers for i in buffer}
    exact = [i for i in range(len(leaves)) if i not in fused]
    if exact:
        values = [leaves[i] for i in exact]
        summed = axes.mean(values) if mean else axes.sum(values)
        for i, x in zip(exact, summed, strict=True):
            out[i] = x
    for method, fused_exchange in auto.FUSED.items():
        if method in buffers.values() or (method == exchange and axes.world > 1):
            fused_exchange.require(name, axes.names)
    if methods:  # a wrong call is refused whatever the profile says of it
        lossy = [plan.slots[i] for i in sorted(i for buffer in methods for i in buffer)]
        axes.check_varying(name, [(s.path, leaves[s.leaf]) for s in lossy])
        compressors = {s.leaf: s.compressor for s in lossy}
        require_key(name, compressors.values(), key)
        seeds = _seeds([compressors[i] for i in sorted(fused)], key, axes)
        for buffer, method in buffers.items():
            for part, shared in _calls(buffer, leaves, compressors):
                codec = plan.codec(part, axes.world)
                call = _AllReduce(name, codec, axes, mean, method, residual)
                operands = tuple(jnp.asarray(leaves[i]) for i in part)
                factors = tuple(units[i] for i in part) if units else ()
                reduced, residuals = _reduce_buffer(call, seeds[shared], operands, factors)
                for i, x in zip(part, reduced, strict=True):
                    out[i] = x
                for i, x in zip(part if residual else (), residuals, strict=True):
                    lost[i] = x
    return out, lost


def _calls(
    buffer: Sequence[int], leaves: Sequence[Any], compressors: Mapping[int, Compressor]
) -> list[tuple[tuple[int, ...], bool]]:
    """Splits a buffer so that leaves in one call vary over the same mesh axes.

    And so that ranks share the noise of all of them or of none; which of both comes along.
    """
    parts: dict[tuple[frozenset[str], bool], list[int]] = {}
    for i in buffer:
        kind = _compat.varying_axes(leaves[i]), compressors[i].shares_noise
        parts.setdefault(kind, []).append(i)
    return [(tuple(part), shared) for (_, shared), part in parts.items()]


def _seeds(
    compressors: Collection[Compressor], key: Any, axes: Axes
) -> dict[bool, tuple[Any, Any]]:
    """A seed for each phase, by whether ranks share their noise. Zeros where none needs a key.

    Those that do not round independently: their errors then average out.
    """
    if not any(c.needs_key for c in compressors):
        none = np.zeros(2, np.uint32), np.zeros(2, np.uint32)
        return {False: none, True: none}
    keys = {}
    if any(not c.shares_noise for c in compressors):
        keys[False] = jax.random.fold_in(key, axes.index())
    if any(c.shares_noise for c in compressors):
        keys[True] = key
    return {
        shared: (
            seed(jax.random.fold_in(k, _PHASE_ENCODE)),
            seed(jax.random.fold_in(k, _PHASE_REDUCE)),
        )
        for shared, k in keys.items()
    }
