"""Compressed `lax.psum_scatter` and `lax.all_gather` for sharded data-parallel training.

A leaf is cut into rows, one per rank, and each row is encoded like a separate leaf. The rows of all
leaves of a fusion buffer travel together.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from cgx_jax._types import AxisName, Dimensions, Key, Pytree
from cgx_jax.collective import Collective
from cgx_jax.compressors import Compressor
from cgx_jax.exchanges import Exchange
from cgx_jax.plan import Plan
from cgx_jax.policies.rules import Policy
from cgx_jax.route import rows
from cgx_jax.route.route import Options


def psum_scatter_compressed(
    tree: Pytree,
    axis_name: AxisName,
    compressor: Compressor | Policy | Plan | None = None,
    *,
    scatter_dimension: Dimensions = 0,
    axis_index_groups: Sequence[Sequence[int]] | None = None,
    tiled: bool = False,
    key: Key = None,
    exchange: Exchange | str = "auto",
) -> Pytree:
    """Returns each rank's slice of the sum from compressed payloads; like `lax.psum_scatter`.

    `tree` is a pytree of arrays. In each array, the length of `scatter_dimension` must be the world
    size, and the dimension is removed. With `tiled`, the length must be a multiple of the world
    size and is divided by it. Leaves may be cut along different dimensions: `scatter_dimension` is
    an int, a tree (or a prefix of one) of ints, or a function from a leaf's path to an int. With
    `axis_index_groups`, the world is a rank's group; groups must be of equal size. A result has the
    leaf's dtype. It is the fp32 sum of this rank's exact slice and the other ranks' decoded slices,
    and is not quantized again. Votes (`SignSGD`) come back as the sign that most ranks have, or 0
    in a tie. The derivative is that of `lax.psum_scatter`.

    `compressor`, `key` and `exchange` are as in `psum_compressed`. A policy sees whole leaves,
    before they are scattered. No two leaves and no two ranks share noise, so "correlated" rounding
    acts as "stochastic" here. All leaves of one of the plan's fusion buffers travel in one call.
    Exact leaves of up to 64 KiB travel with them, in fp32. "nccl" makes one call per leaf if the
    code is that of `Quantize`. For "auto", a profile counts a buffer as half a `psum_compressed`. A
    `Tuner` is no exchange here.

    Raises ValueError or TypeError while tracing: for a dimension that does not exist or cannot be
    divided, an operand that is already reduced or a missing key (these messages have the leaf's
    path), and for an exchange that does not work here, a plan of another tree, a policy that adapts
    or a compressor whose code is sums. Source: QSDP (Markov et al., ICML 2023) for the scheme.
    """
    options = Options.resolve(
        "psum_scatter_compressed",
        axis_name,
        groups=axis_index_groups,
        exchange=exchange,
        collective=Collective.REDUCE_SCATTER,
    )
    tree = jax.tree.map(jnp.asarray, tree)
    return rows.reduce_scatter(options, tree, compressor, scatter_dimension, tiled, key)


def all_gather_compressed(
    tree: Pytree,
    axis_name: AxisName,
    compressor: Compressor | Policy | Plan | None = None,
    *,
    backward: Compressor | Policy | Plan | None = None,
    axis: Dimensions = 0,
    axis_index_groups: Sequence[Sequence[int]] | None = None,
    tiled: bool = False,
    key: Key = None,
    exchange: Exchange | str = "auto",
) -> Pytree:
    """Gathers every rank's `tree`, compressed on the wire; like `lax.all_gather`.

    `tree` is a pytree of arrays. Leaves are stacked along a new dimension `axis`, or concatenated
    along it if `tiled`. They keep their dtypes. `axis` is an int, a tree (or a prefix of one) of
    ints, or a function from a leaf's path to an int. With `axis_index_groups`, which must be of
    equal size, a rank gathers from its group. Each rank also decodes its own payload, so the result
    is the same on all ranks. The derivative is that of `lax.all_gather`, an exact `psum_scatter`.

    With `backward`, a compressor, policy or `Plan`, the backward pass sends cotangents as
    `psum_scatter_compressed` would send them, by the same exchange. `key` then feeds both passes,
    which draw different noise. Second derivatives are those of `lax.all_gather`. Forward-mode
    derivatives are not defined: JAX raises TypeError.

    `compressor` is as in `psum_scatter_compressed`. A policy sees whole leaves, which here are the
    results. It therefore compresses a leaf in both calls or in neither, and one `Plan` of whole
    leaves serves both calls. Ranks share noise for compressors with `shares_noise`, such as
    `ShiftedLattice`. Fusion, `key`, `exchange` and errors are as in `psum_scatter_compressed`.
    Source: QSDP (Markov et al., ICML 2023) for the scheme.
    """
    options = Options.resolve(
        "all_gather_compressed",
        axis_name,
        groups=axis_index_groups,
        exchange=exchange,
        collective=Collective.ALL_GATHER,
    )
    tree = jax.tree.map(jnp.asarray, tree)
    gather = rows.Gather.of(options, tree, compressor, axis, tiled)
    if backward is None:
        return gather(tree, key)
    transposed = gather.transposed(backward)
    call = jax.custom_vjp(lambda shards, key: gather(shards, key))
    call.defvjp(
        lambda shards, key: (gather(shards, key), key),
        lambda key, cotangents: (transposed(cotangents, key), None),
    )
    return call(gather.varying(tree), key)
