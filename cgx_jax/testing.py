"""Checks of your own compressors, reductions, exchanges and losses.

Call them from a test, for instance on simulated devices:
`jax.config.update("jax_num_cpu_devices", 8)`. Each check raises AssertionError with the problem.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.tree_util import keystr
from jax.typing import DTypeLike

from cgx_jax._types import AxisName, Pytree
from cgx_jax.axes import Axes
from cgx_jax.collective import Collective
from cgx_jax.compressors import Compressor, Identity, PayloadCompressor, Quantize
from cgx_jax.compressors.base import CodedLeaf
from cgx_jax.exchanges import Exchange, Xla
from cgx_jax.leaves import with_paths
from cgx_jax.plain_jit.arguments import is_nnx, nnx
from cgx_jax.plain_jit.value_and_grad import value_and_grad
from cgx_jax.plan import Plan
from cgx_jax.policies.rules import Rules
from cgx_jax.reductions import GatherSum, Job, Operands, Reduction, ScatterGather, named
from cgx_jax.reductions.all_gather import AllGather
from cgx_jax.reductions.named import reduction_of
from cgx_jax.reductions.reduce_scatter import ReduceScatter
from cgx_jax.route.route import Options, route
from cgx_jax.route.run import Inputs, run

SHAPES = ((16, 33), (1, 5), (130, 70))
DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)


def check_compressor(compressor: Compressor, shapes: Sequence[tuple[int, ...]] = SHAPES) -> None:
    """Checks a compressor's protocol: equality by value, exact sizes, error bound and state.

    Encodes normally distributed values and zeros of each of `shapes`, in every float dtype that the
    compressor supports. Raises AssertionError with the problem.
    """
    _require(hash(compressor) == hash(dataclasses.replace(compressor)), "copies differ in hash")  # type: ignore[type-var]
    _require(compressor == dataclasses.replace(compressor), "copies differ")  # type: ignore[type-var]
    _require(compressor.lossless or compressor.reductions, "it allows no reduction")
    kinds = [dtype for dtype in DTYPES if compressor.supports(jnp.dtype(dtype))]
    _require(kinds, "it supports no float dtype")
    for shape in shapes:
        bits = compressor.wire_bits(shape)
        _require(bits == int(bits) > 0, f"wire_bits({shape}) is {bits}, not a whole number above 0")
        if isinstance(compressor, PayloadCompressor):
            for dtype in kinds:
                # Without jit each operation is compiled separately, which is slow. One shape is
                # enough to find a difference.
                eager = shape == min(shapes, key=math.prod) and dtype == kinds[0]
                _check_payload(compressor, shape, dtype, eager=eager)


def _check_payload(
    compressor: PayloadCompressor, shape: tuple[int, ...], dtype: DTypeLike, *, eager: bool
) -> None:
    state = compressor.init(shape, dtype)
    key = jax.random.key(3) if compressor.needs_key else None

    def round_trip(x: Any) -> Pytree:
        ready, after = x, state
        if compressor.prepares:
            ready, after = compressor.prepare(x.astype(jnp.float32), state)
        payload = compressor.encode(ready, key=key)
        back = compressor.decode(payload, x.shape, x.dtype)
        return payload, after, back, compressor.error_bound(x)

    compiled = jax.jit(round_trip)
    for scale in (1.0, 0.0):
        x = jnp.asarray(scale * _normal(0, shape), dtype)
        payload, after, back, bound = compiled(x)
        where = f"{compressor} of {x.dtype}{list(shape)}"
        expected = compressor.payload_bytes(shape, dtype)
        _require(payload.dtype == jnp.uint8, f"{where}: the payload is {payload.dtype}, not uint8")
        _require(payload.shape == (expected,), f"{where}: {payload.shape} is not [payload_bytes]")
        shapes = [(y.shape, y.dtype) for y in jax.tree.leaves((state, after))]
        half = len(shapes) // 2
        _require(shapes[:half] == shapes[half:], f"{where}: prepare's state is not like init's")
        _require(
            (back.shape, back.dtype) == (x.shape, x.dtype), f"{where}: decode returns {back.aval}"
        )
        lost = np.abs(np.asarray(back, np.float64) - np.asarray(x, np.float64))
        limit = np.asarray(bound, np.float64)
        _require(limit.shape == x.shape, f"{where}: error_bound has shape {limit.shape}")
        over = (lost - limit).max()
        _require((lost <= limit).all(), f"{where}: an error exceeds its bound by {over:.3g}")
    if eager:
        again = round_trip(x)[0]
        _require((again == payload).all(), f"{where}: encode returns other bytes under jit")


def check_reduction(
    compressor: Compressor,
    reduction: Reduction | str | None = None,
    *,
    exchange: Exchange | str = "xla",
    worlds: Sequence[int] = (2, 3, 8),
    shape: tuple[int, ...] = (16, 33),
) -> None:
    """Checks a reduction of a compressor's codes: equal bits, error bound and residuals.

    The check runs sums and means of fp32 leaves of `shape`, at each world size in `worlds` for
    which there are enough devices. It requires that all ranks' results are equal to the bit and
    within `Reduction.error_bound` of the exact result, and that the residuals add up to the
    difference. New states must have the shapes and dtypes of the old ones, and the derivative must
    be that of `lax.psum`. Raises AssertionError with the problem.
    """
    for world in (w for w in worlds if w <= jax.device_count()):
        for mean in (False, True):
            _check_reduction(compressor, reduction, exchange, world, shape, mean)


def _check_reduction(
    compressor: Compressor,
    reduction: Any,
    exchange: Any,
    world: int,
    shape: tuple[int, ...],
    mean: bool,
) -> None:
    mesh = Mesh(np.array(jax.devices()[:world]), ("ranks",))
    one = jax.ShapeDtypeStruct(shape, jnp.float32)
    plan = Plan.build([one, one], Rules((), compressor, exact=()))
    key = jax.random.key(5) if compressor.needs_key else None
    x = [jnp.stack([_normal(100 * n + r, shape) for r in range(world)]) for n in range(2)]
    states = [compressor.init(shape, one.dtype)] * 2

    def reduce(leaves: Sequence[jax.Array]) -> Pytree:
        options = Options.resolve(
            "check_reduction", "ranks", exchange=exchange, reduction=reduction, mean=mean
        )
        made = run(route(options, plan), Inputs(leaves, key, residual=True, states=states))
        return made.values, (made.residuals, made.states)

    def of_rank(leaves: Sequence[jax.Array]) -> Pytree:
        own = [v[0] for v in leaves]
        sums, back, (lost, after) = jax.vjp(reduce, own, has_aux=True)
        return jax.tree.map(lambda v: v[None], (sums, lost, after, *back(own)))

    spec = P("ranks")
    f = jax.shard_map(of_rank, mesh=mesh, in_specs=(spec,), out_specs=spec, check_vma=False)
    sums, lost, after, gradient = jax.jit(f)(x)
    where = f"{compressor} over {world} ranks"
    wanted = named("check_reduction", reduction)
    taken = reduction_of("check_reduction", wanted, [("", plan.coded((0,))[0])])
    bound_of = jax.jit(lambda v: taken.error_bound(compressor, v, world if mean else 1))
    for n in range(2):
        got = np.asarray(sums[n])
        _require(all(row.tobytes() == got[0].tobytes() for row in got), f"{where}: ranks differ")
        exact = np.asarray(x[n], np.float64).sum(0) / (world if mean else 1)
        bound = np.asarray(bound_of(x[n]), np.float64)
        off = np.abs(got[0] - exact) - bound - 1e-5
        _require((off <= 0).all(), f"{where}: an error exceeds its bound by {off.max():.3g}")
        account = exact - got[0] - np.asarray(lost[n], np.float64).sum(0) / (world if mean else 1)
        _require(np.abs(account).max() < 1e-4, f"{where}: the residuals do not add up to the error")
        likes = [(y.shape, y.dtype) for y in jax.tree.leaves(states[n])]
        _require(likes == [(y.shape[1:], y.dtype) for y in jax.tree.leaves(after[n])], where)
        want = np.asarray(x[n]).sum(0) / (world if mean else 1)
        tangent = np.abs(np.asarray(gradient[n]) - want).max()
        _require(
            tangent < 1e-4, f"{where}: the derivative differs from lax.psum's by {tangent:.3g}"
        )


def check_exchange(exchange: Exchange, mesh: Mesh, axis: str) -> None:
    """Checks every capability that `exchange.can` names, over `axis` of `mesh`.

    All processes call it, and each compares results on its own devices. Rows of 0, 1, 13 and
    100,000 bytes must arrive where they belong. A fused call must return the same bytes as separate
    kernels around XLA's collectives. Raises AssertionError with the problem.
    """
    world, over = mesh.shape[axis], functools.partial(_over, mesh, axis, exchange)
    for size in (0, 1, 13, 100_000):
        rows = np.random.default_rng(size).integers(0, 256, (world, world, size), np.uint8)
        if "scatter" in exchange.can:
            _same(over, exchange, "scatter", rows, rows.swapaxes(0, 1))
        if "gather" in exchange.can:
            every = np.broadcast_to(rows[:, 0], (world, world, size))
            _same(over, exchange, "gather", rows[:, 0], every)
        if "permute" in exchange.can and world > 1:
            # Every rank but the last sends to the next, so the first receives nothing.
            pairs = [(r, r + 1) for r in range(world - 1)]
            moved = np.concatenate([np.zeros((1, size), np.uint8), rows[:-1, 0]])
            _same(over, exchange, "permute", rows[:, 0], moved, pairs)
    x = np.stack([_normal(r, (world, 3000)) for r in range(world)])
    for reduction in (ScatterGather(), GatherSum(), ReduceScatter(), AllGather()):
        collective = reduction.collective
        if collective is not None and collective.value in exchange.can:
            by = [_reduced(reduction, collective, e) for e in (exchange, Xla())]
            got, want = (over(x, f) for f in by)
            for a, b in zip(got.addressable_shards, want.addressable_shards, strict=True):
                same = np.asarray(a.data).tobytes() == np.asarray(b.data).tobytes()
                _require(same, f"{exchange}: a fused call returns other bytes than separate calls")


def check_loss(
    loss_fn: Callable[..., Pytree],
    params: Pytree,
    batch: Pytree,
    mesh: Mesh,
    axis_name: AxisName,
    *,
    more: Sequence[Any] = (),
    rtol: float = 1e-3,
    **options: Any,
) -> None:
    """Checks on your data that a loss split over ranks has plain jit's value and gradients.

    Calls `loss_fn(params, batch, *more)` on one device, and split over `axis_name` of `mesh` as
    `cgx_jax.value_and_grad` does, without compression and with `trust=True`. `options` are its
    options: `has_aux`, `aux_specs`, `loss`, `in_specs`. Auxiliary outputs and the state of NNX
    objects are compared too. An error may be `rtol` times the largest absolute value of its array.
    Raises AssertionError with every array that differs. Losses that draw random numbers for each
    example differ.
    """
    # The loss may close over arrays on all devices, so all compute "on one device".
    names = *mesh.axis_names, "_".join(("all", *mesh.axis_names))
    one = Mesh(mesh.devices.reshape((1,) * mesh.devices.ndim + (-1,)), names)
    place = NamedSharding(one, P())
    given = (params, batch, *more)
    alone = jax.tree.map(
        lambda x: jax.device_put(x, place) if isinstance(x, jax.Array) else x, given
    )

    def run(where: Mesh, given: Pytree) -> dict[str, dict[str, np.ndarray]]:
        given = tuple(nnx().clone(x) if is_nnx(x) else x for x in given)
        how = {"trust": True, **options}
        with jax.set_mesh(where):
            value, grads = value_and_grad(loss_fn, axis_name, Identity(), mesh=where, **how)(*given)
        value, aux = value if options.get("has_aux") else (value, None)
        state = [nnx().state(x) for x in given if is_nnx(x)]
        parts = {"value": value, "aux": aux, "state": state, "gradient": grads}
        return {
            part: {part + keystr(path): _numbers(x) for path, x in with_paths(tree)}
            for part, tree in parts.items()
        }

    wanted, wrong = run(one, alone), []
    for part, leaves in run(mesh, given).items():
        # A gradient of zero has errors, too: those of the others, far below their size.
        largest = max((_largest(x) for x in wanted[part].values()), default=0.0)
        for name, y in leaves.items():
            x = wanted[part][name]
            if x.shape != y.shape:
                wrong.append(f"{name} has shape {list(y.shape)}, on one device {list(x.shape)}")
                continue
            finite = np.isfinite(x)
            off = _largest(np.where(finite, x, 0) - np.where(finite, y, 0))
            same = np.array_equal(x[~finite], y[~finite], equal_nan=True)
            if not same or not off <= rtol * max(_largest(x), 1e-3 * largest):
                wrong.append(
                    f"{name} {list(x.shape)} is off by {off:.3g}, it is up to {_largest(x):.3g}"
                )
    _require(not wrong, "split over ranks, the loss is not that of one device: " + "; ".join(wrong))


def _numbers(x: Any) -> np.ndarray:
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    return np.asarray(x, np.complex128 if jnp.iscomplexobj(x) else np.float64)


def _largest(x: np.ndarray) -> float:
    return float(np.abs(x[np.isfinite(x)]).max(initial=0))


def _reduced(
    reduction: Reduction, collective: Collective, exchange: Exchange
) -> Callable[..., Pytree]:
    """Returns a function that reduces one leaf: by fused calls, or by kernels around "xla"."""

    def f(own: jax.Array, axes: Axes) -> jax.Array:
        shape = own.shape[1:] if collective is Collective.REDUCE_SCATTER else own.shape
        leaves = (CodedLeaf(Quantize(4), shape, np.dtype(np.float32), 0),)
        job = Job("check_exchange", collective, leaves, axes, exchange, 1, False, False)
        seeds = (np.zeros(2, np.uint32),) * reduction.seed_count
        return reduction.run(job, Operands(seeds, [own], None, [()])).sums[0]

    return f


def _over(
    mesh: Mesh, axis: str, exchange: Exchange, x: np.ndarray, f: Callable[..., Pytree]
) -> Pytree:
    """Compiles and runs f(own, axes) on each rank's row of `x`."""

    def of_rank(v: Any) -> Pytree:
        axes = Axes.resolve("check_exchange", axis, None)
        exchange.require("check_exchange", axes.names)
        return f(v[0], axes)[None]

    spec = P(axis)
    run = jax.jit(jax.shard_map(of_rank, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))
    return run(jax.make_array_from_callback(x.shape, NamedSharding(mesh, spec), x.__getitem__))


def _same(
    over: Callable[..., Any], exchange: Exchange, name: str, x: Any, expected: Any, *more: Any
) -> None:
    call, what = getattr(exchange, name), f"{exchange}.{name} of {list(x.shape)}"
    got = over(x, lambda own, axes: call("check_exchange", own, axes, *more))
    for shard in got.addressable_shards:
        same = got.size == 0 or np.array_equal(shard.data, expected[shard.index])
        _require(same, f"{what}: bytes are not where they belong")


def _normal(seed: int, shape: tuple[int, ...]) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def _require(holds: Any, wrong: str) -> None:
    """Raises AssertionError unless `holds`, also under `python -O`."""
    if not holds:
        raise AssertionError(wrong)
