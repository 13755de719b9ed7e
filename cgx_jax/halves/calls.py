"""Drop-in for `lax.psum_scatter` and `lax.all_gather`, for sharded data-parallel training.

A leaf is cut into rows, one for each rank, and a row is encoded like a leaf of its own. The rows of
all leaves of a fusion buffer travel together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from cgx_jax.axes import Axes
from cgx_jax.compressors import Compressor
from cgx_jax.exchanges import Exchange
from cgx_jax.halves.half import AllGather, PsumScatter
from cgx_jax.halves.messages import Halves
from cgx_jax.plan import Plan
from cgx_jax.policies.rules import Policy


def psum_scatter_compressed(
    tree: Any,
    axis_name: Any,
    compressor: Compressor | Policy | Plan | None = None,
    *,
    scatter_dimension: int = 0,
    axis_index_groups: Sequence[Sequence[int]] | None = None,
    tiled: bool = False,
    key: Any = None,
    exchange: Exchange | str = "auto",
) -> Any:
    """Each rank's slice of the sum, from compressed payloads; `lax.psum_scatter`.

    `tree` is a pytree of arrays. The `scatter_dimension` of each equals the world size and is
    removed, or with `tiled` is a multiple of it and is divided. With `axis_index_groups`, of equal
    size, the world is a rank's group. A result has the leaf's dtype. It is the sum, in fp32, of
    this rank's exact slice and the other ranks' decoded ones, and is not quantized again. Votes
    (`SignSGD`) come back as the sign that most ranks have, 0 in a tie. The derivative is that of
    `lax.psum_scatter`.

    `compressor` is a compressor (default `Quantize()`, 4 bits), a policy or a `Plan`, as in
    `psum_compressed`. A single compressor leaves some leaves of a tree exact: those with ndim <= 1,
    under 1,024 values, named bias or norm, or of a dtype that it does not take. A bare array is
    compressed as asked. A policy sees whole leaves, before they are scattered.

    `key` feeds stochastic rounding: all ranks pass the same key, and every step needs another one.
    No two leaves and no two ranks share noise, so "correlated" is "stochastic" here. All leaves of
    one of the plan's fusion buffers travel in one call, and exact leaves of up to 64 KiB with them,
    in fp32.

    `exchange` is "xla"; "mpi" between CPU processes; "nccl" between CUDA devices, with one call per
    leaf if the code is that of `Quantize`; an instance from `cgx_jax.exchanges`; or "auto". "auto"
    follows the active profile, which counts a buffer as half a `psum_compressed`. Without a profile
    it is "xla" for buffers of a few megabytes and more, and exact for smaller ones.

    Raises ValueError or TypeError while tracing. The message has the leaf's path for a dimension
    that cannot be divided, an operand that is already reduced and a missing key. Refused, too, are
    an exchange that does not work here, a plan of another tree, a policy that adapts, and a
    compressor whose code is sums. Source: QSDP (Markov et al., ICML 2023) for the scheme.
    """
    name = "psum_scatter_compressed"
    axes = Axes.resolve(name, axis_name, axis_index_groups)
    tree = jax.tree.map(jnp.asarray, tree)
    halves = Halves.of(
        PsumScatter, name, tree, axes, compressor, scatter_dimension, tiled, exchange
    )
    return halves.run(tree, key)


def all_gather_compressed(
    tree: Any,
    axis_name: Any,
    compressor: Compressor | Policy | Plan | None = None,
    *,
    axis: int = 0,
    axis_index_groups: Sequence[Sequence[int]] | None = None,
    tiled: bool = False,
    key: Any = None,
    exchange: Exchange | str = "auto",
) -> Any:
    """Every rank's `tree`, compressed on the wire; `lax.all_gather`.

    `tree` is a pytree of arrays. Leaves are stacked along a new dimension `axis`, or concatenated
    along it if `tiled`; their dtypes stay. With `axis_index_groups`, of equal size, a rank gathers
    from its group. Each rank decodes its own payload too, so the result is the same on all. The
    derivative is that of `lax.all_gather`.

    `compressor` is as in `psum_scatter_compressed`. A policy sees whole leaves, which here are the
    results. It therefore compresses a leaf in both calls or in neither, and one `Plan` of whole
    leaves serves both. Ranks share the noise of compressors that say so (`shares_noise`), such as
    `ShiftedLattice`. Fusion, `key`, `exchange` and errors are as in `psum_scatter_compressed`.
    Source: QSDP (Markov et al., ICML 2023) for the scheme.
    """
    name = "all_gather_compressed"
    axes = Axes.resolve(name, axis_name, axis_index_groups)
    tree = jax.tree.map(jnp.asarray, tree)
    halves = Halves.of(AllGather, name, tree, axes, compressor, axis, tiled, exchange)
    return halves.run(tree, key)
