"""Compressed all-reduces, drop-in for `lax.psum` and `lax.pmean`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from cgx_jax.compressors import Compressor
from cgx_jax.core import Options, reduce_leaves
from cgx_jax.exchanges import Exchange
from cgx_jax.plan import Plan, resolve
from cgx_jax.policies.rules import Policy
from cgx_jax.reductions import Levels, Reduction


def psum_compressed(
    tree: Any,
    axis_name: Any,
    compressor: Compressor | Policy | Plan | None = None,
    *,
    key: Any = None,
    axis_index_groups: Sequence[Sequence[int]] | None = None,
    exchange: Exchange | str = "auto",
    reduction: Reduction | str | None = None,
    levels: Levels | None = None,
) -> Any:
    """Sum over the ranks of `axis_name` with compressed payloads; `lax.psum` for gradients.

    `tree` is a pytree of arrays of any shape; `compressor` one compressor (default `Quantize()`,
    4 bits), a policy or a `Plan`. Given one compressor, leaves of a tree with ndim <= 1, under
    1,024 values, named bias or norm, or of a dtype other than f32, bf16, f16 are summed exactly,
    small ones together (`Rules` chooses otherwise); a bare array is compressed as asked. `key`
    feeds stochastic rounding: one key for all ranks, another for every step.

    `exchange` says how payloads travel: "xla", XLA's own collectives; "mpi", between CPU processes
    that mpiexec started; "nccl", between CUDA devices, on XLA's communicator; "peer", between those
    of a node, in one kernel over their memory (these three in one call a buffer where the code is
    `Quantize`'s); an instance from `cgx_jax.exchanges`; or "auto", the fastest for each fusion
    buffer by the profile that `use_profile` made active, `lax.psum`
    included. Without a profile, buffers of a few megabytes and more are compressed, over MPI where
    it is there, and smaller ones are summed exactly (docs/exchanges.md); an exchange named here
    compresses every size.

    `reduction` says how payloads become a sum: "scatter_gather", every rank adds up a chunk;
    "gather_sum", all payloads go to all ranks, which encodes once and suits small buffers; "ring"
    and "tree", partial sums go from rank to rank and are encoded anew on their way, over "xla" and
    "nccl"; "sum_rounds", for codes that are numbers; an instance from `cgx_jax.reductions`; by
    default the first that a leaf's compressor allows, or "gather_sum" where "auto" follows a
    profile that measured it as the fastest. With `levels` (`Levels("local")` for a mesh axis inside
    a node) sums are exact inside a node and compressed between nodes.

    Every rank gets the same bits. Sums run in fp32, in rank order. The derivative is that of
    `lax.psum`, exact. Under check_vma the result does not vary over the axis; with
    `axis_index_groups` (of equal size) it does. Raises ValueError or TypeError while tracing:
    unknown axis, exchange or reduction, one that is wrong for the compressor or cannot work here,
    missing key, a plan of another tree, a profile of another world size, an operand that is already
    reduced. Source: CGX (Markov et al., Middleware 2022).
    """
    options = Options.resolve(
        "psum_compressed",
        axis_name,
        groups=axis_index_groups,
        exchange=exchange,
        reduction=reduction,
        levels=levels,
    )
    return _all_reduce(options, tree, compressor, key)


def pmean_compressed(
    tree: Any,
    axis_name: Any,
    compressor: Compressor | Policy | Plan | None = None,
    *,
    key: Any = None,
    axis_index_groups: Sequence[Sequence[int]] | None = None,
    exchange: Exchange | str = "auto",
    reduction: Reduction | str | None = None,
    levels: Levels | None = None,
) -> Any:
    """Mean over the ranks of `axis_name`: `psum_compressed` divided by the world size.

    Takes and raises what `psum_compressed` does; the division comes before the second encoding.
    """
    options = Options.resolve(
        "pmean_compressed",
        axis_name,
        groups=axis_index_groups,
        exchange=exchange,
        reduction=reduction,
        levels=levels,
        mean=True,
    )
    return _all_reduce(options, tree, compressor, key)


def _all_reduce(
    options: Options, tree: Any, compressor: Compressor | Policy | Plan | None, key: Any
) -> Any:
    plan = resolve(options.name, tree, compressor)
    leaves, treedef = jax.tree.flatten(tree)
    return jax.tree.unflatten(treedef, reduce_leaves(options, leaves, plan, key).values)
