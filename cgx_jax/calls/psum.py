"""Compressed all-reduces: drop-in replacements for `lax.psum` and `lax.pmean`."""

from __future__ import annotations

from collections.abc import Sequence

import jax

from cgx_jax._types import AxisName, Key, Pytree
from cgx_jax.compressors import Compressor
from cgx_jax.exchanges import Exchange
from cgx_jax.plan import Codes, Plan, resolve
from cgx_jax.policies.rules import Policy
from cgx_jax.reductions import Levels, Reduction
from cgx_jax.route.route import Chooser, Options, route
from cgx_jax.route.run import values_of


def psum_compressed(
    tree: Pytree,
    axis_name: AxisName,
    compressor: Compressor | Policy | Plan | None = None,
    *,
    key: Key = None,
    axis_index_groups: Sequence[Sequence[int]] | None = None,
    exchange: Exchange | Chooser | str = "auto",
    reduction: Reduction | str | None = None,
    levels: Levels | None = None,
) -> Pytree:
    """Sums over the ranks of `axis_name` with compressed payloads; `lax.psum` for gradients.

    `tree` is a pytree of arrays of any shape and dtype. The result has the same shapes, and the
    dtypes that `lax.psum` returns; Python numbers give Python numbers. `compressor` is a compressor
    (default `Quantize(bits=4, rotation=True)`), a policy or a `Plan`. A single compressor leaves
    some leaves of a tree exact: leaves with ndim <= 1, under 1,024 values, biases and norms, or of
    a dtype other than f32, bf16 and f16. `lax.psum` sums exact leaves, those of fewer than 32 bits
    in 32 bits, and small ones travel together. Pass `Rules` to choose differently. A bare array of
    a supported dtype is compressed whatever its shape. `key` feeds stochastic rounding. All ranks
    pass the same key, and every step needs a new one.

    `exchange` says how payloads travel:

    * "xla": by XLA's own collectives, on every platform.
    * "mpi": between CPU processes that mpiexec started.
    * "nccl": between CUDA devices, on XLA's communicator.
    * "auto": the fastest way for each fusion buffer, `lax.psum` included, according to the profile
      that `use_profile` made active. Without a profile, a buffer is compressed (over MPI where it
      is available) from a size that depends on the platform, such as 0.6 MB over MPI at 4 bits.
      Smaller buffers are summed exactly (docs/exchanges.md).
    * An instance from `cgx_jax.exchanges`, or from `cgx_jax.exchanges.experimental`.
    * A `Tuner`, in a step that its `jit` compiles: it also chooses reduction, levels and buffers.

    An explicitly named exchange compresses buffers of every size. "mpi" and "nccl" reduce a buffer
    in one call if its leaves use the code of `Quantize`.

    `reduction` says how payloads become a sum:

    * "scatter_gather": every rank adds up one chunk.
    * "gather_sum": every rank receives all payloads. A value is encoded once, which suits small
      buffers.
    * "ring", "tree": partial sums go from rank to rank and are encoded again at each hop. They work
      over all exchanges but "mpi".
    * "sum_rounds": for codes that are numbers.
    * An instance from `cgx_jax.reductions`.

    The default is the first reduction that a leaf's compressor allows, or "gather_sum" where "auto"
    follows a profile that measured it as the fastest. With `levels` (`Levels("local")` for a mesh
    axis inside a node), sums are exact inside a node and compressed between nodes.

    Every rank gets the same bits. Sums run in fp32, in rank order. The derivative is exactly that
    of `lax.psum`. Under check_vma the result does not vary over the axis, except with
    `axis_index_groups`. Groups must be of equal size.

    Raises ValueError or TypeError while tracing for an unknown axis, exchange or reduction; for an
    exchange or reduction that is wrong for the compressor or cannot work here; for a missing key, a
    plan of another tree or a profile of another world size; and for an operand that is already
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
    tree: Pytree,
    axis_name: AxisName,
    compressor: Compressor | Policy | Plan | None = None,
    *,
    key: Key = None,
    axis_index_groups: Sequence[Sequence[int]] | None = None,
    exchange: Exchange | Chooser | str = "auto",
    reduction: Reduction | str | None = None,
    levels: Levels | None = None,
) -> Pytree:
    """Returns the mean over the ranks of `axis_name`: `psum_compressed` over the world size.

    Takes, returns and raises the same as `psum_compressed`. Sums are divided before they are
    encoded a second time. As in `lax.pmean`, means of integers are floats of sums that may wrap.
    """
    options = Options.resolve(
        "pmean_compressed",
        axis_name,
        groups=axis_index_groups,
        exchange=exchange,
        reduction=reduction,
        levels=levels,
        mean=True,
        floats=True,
    )
    return _all_reduce(options, tree, compressor, key)


def _all_reduce(options: Options, tree: Pytree, compressor: Codes, key: Key) -> Pytree:
    plan = resolve(options.name, tree, compressor)
    leaves, treedef = jax.tree.flatten(tree)
    return jax.tree.unflatten(treedef, values_of(route(options, plan), leaves, key))
