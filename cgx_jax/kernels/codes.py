"""Codes of single arrays as JAX operations: native calls on CPU and CUDA, plain jnp elsewhere.

The native call writes the same bytes as the jnp function that is passed with it. A leading batch
dimension is part of the primitive, so `vmap` stays one call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import batching, mlir

from cgx_jax import _compat
from cgx_jax.kernels import platforms
from cgx_jax.kernels.constants import LONGEST_BUCKET, SCRATCH_WORDS, SHORTEST_BUCKET
from cgx_jax.kernels.primitives import bind

# On CUDA, codes without a kernel are plain jnp: XLA makes few kernels of them, about as fast as a
# call. It even fuses the unpacking of signs into the sum over ranks that reads them.
SELECTIONS = frozenset({"cgx_largest", "cgx_above_sampled"})


def call(
    target: str, plain: Callable[..., Any], *operands: jax.Array, **static: int
) -> list[jax.Array]:
    """Returns the results of the jnp function plain(*operands, **static) by the handler `target`.

    `plain` is a module-level function that returns a list of arrays. `static` also become the
    handler's attributes. Operands and results have one dimension each.
    """
    rows = [jnp.asarray(x)[None] for x in operands]
    params = {"target": target, "plain": plain, "static": tuple(sorted(static.items()))}
    return [y[0] for y in bind(code_p, *rows, **params)]


def _shapes(*rows: Any, target: str, plain: Callable[..., Any], static: Any) -> list[Any]:
    one = [jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for x in rows]
    results = _result_shapes(plain, static, *one)
    return [
        _compat.result_aval((rows[0].shape[0], *y.shape), np.dtype(y.dtype), rows[0])
        for y in results
    ]


@functools.cache
def _result_shapes(plain: Callable[..., Any], static: Any, *one: Any) -> Any:
    return jax.eval_shape(functools.partial(plain, **dict(static)), *one)


def _jnp(*rows: Any, target: str, plain: Callable[..., Any], static: Any) -> Any:
    one = functools.partial(plain, **dict(static))
    if rows[0].shape[0] != 1:
        return jax.vmap(one)(*rows)
    return [y[None] for y in one(*(x[0] for x in rows))]


def _lowering(name: str, platform: platforms.Platform) -> Callable[..., Any]:
    def rule(
        ctx: mlir.LoweringRuleContext, *rows: Any, target: str, plain: Any, static: Any
    ) -> Any:
        attributes = {k: np.int64(v) for k, v in static}
        bucket = attributes.get("bucket_size", LONGEST_BUCKET)
        fits = name != "cuda" or SHORTEST_BUCKET <= bucket <= LONGEST_BUCKET
        if not (platform.has(target) and fits):
            return _plain(ctx, *rows, target=target, plain=plain, static=static)
        if name != "cuda" or target not in SELECTIONS:
            return jax.ffi.ffi_lowering(target)(ctx, *rows, **attributes)
        scratch = jax.core.ShapedArray((SCRATCH_WORDS,), np.dtype(np.uint32))
        wider = ctx.replace(avals_out=[*ctx.avals_out, scratch])
        *out, _ = jax.ffi.ffi_lowering(target)(wider, *rows, **attributes)
        return out

    return rule


def _batch(args: Any, dims: Any, **params: Any) -> Any:
    size = next(x.shape[d] for x, d in zip(args, dims, strict=True) if d is not None)
    front = [batching.bdim_at_front(x, d, size) for x, d in zip(args, dims, strict=True)]
    rows = front[0].shape[1]
    out = bind(code_p, *(x.reshape(size * rows, *x.shape[2:]) for x in front), **params)
    return [y.reshape(size, rows, *y.shape[1:]) for y in out], [0] * len(out)


code_p = _compat.operation("cgx_code", _shapes)
batching.primitive_batchers[code_p] = _batch
_plain = mlir.lower_fun(_jnp, multiple_results=True)
platforms.register(code_p, _plain, _lowering)
