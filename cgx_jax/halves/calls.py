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

    `tree` is a pytree of arrays; of each the `scatter_dimension` equals the world size and is
    removed, or with `tiled` is a multiple of it and divided. With `axis_index_groups`, of equal
    size, the world is a rank's group. The results are fp32 accumulations of the other ranks'
    decoded slices on this rank's exact ones, in each leaf's dtype; they are not quantized again.
    Votes (`SignSGD`) come back as the sign that most ranks have, 0 in a tie.
    The derivative is `lax.psum_scatter`'s.

    `compressor` is one (default `Quantize()`, 4 bits), a policy or a `Plan`, and decides as in
    `psum_compressed`: given one compressor, leaves of a tree with ndim <= 1, under 1,024 values,
    named bias or norm, or of a dtype that it does not take are summed exactly; a bare array is
    compressed as asked. A policy sees whole leaves, before they are scattered. `key` feeds
    stochastic rounding, which no two leaves share (nor ranks, so that "correlated" is "stochastic"
    here): one key for all ranks, another for every step. All leaves of one of the plan's fusion
    buffers travel in one call, and exact leaves of up to 64 KiB with them, in fp32.

    `exchange` is "xla"; "mpi" between CPU processes; "nccl" between CUDA devices, one call per leaf
    where the code is `Quantize`'s; an instance from `cgx_jax.exchanges`; or "auto": by the active
    profile, of which a buffer takes half a `psum_compressed`, and without one "xla" for buffers of
    a few megabytes and more, exact for smaller ones. Raises ValueError or TypeError while tracing,
    with the leaf's path: a dimension that cannot be divided, an operand that is already reduced, a
    missing key; and without it: an exchange that does not work here, a plan of another tree, a
    policy that adapts, a compressor whose code is sums.
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

    With `axis_index_groups`, of equal size, that of every rank of the group.

    Leaves are stacked along a new dimension `axis`, or concatenated along it when `tiled`. Each
    rank decodes its own payload too, so the result is the same on all. The derivative is
    `lax.all_gather`'s.

    `compressor` as in `psum_scatter_compressed`. A policy sees whole leaves, here the results, so
    that a leaf is compressed on its way out where it is on its way back, and one `Plan` of whole
    leaves serves both calls. Ranks share the noise of compressors that say so (`shares_noise`),
    such as `ShiftedLattice`. Fusion, `key`, `exchange`, and what is raised: as there.
    """
    name = "all_gather_compressed"
    axes = Axes.resolve(name, axis_name, axis_index_groups)
    tree = jax.tree.map(jnp.asarray, tree)
    halves = Halves.of(AllGather, name, tree, axes, compressor, axis, tiled, exchange)
    return halves.run(tree, key)
