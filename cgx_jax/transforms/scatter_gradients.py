"""`scatter_gradients`: the reduce-scatter of sharded training as an Optax transformation."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jax.sharding import AbstractMesh, Mesh

from cgx_jax._types import AxisName, Dimensions
from cgx_jax.compressors import Compressor
from cgx_jax.exchanges import Exchange
from cgx_jax.plan import Plan
from cgx_jax.policies.rules import Policy
from cgx_jax.policies.stages import Stages
from cgx_jax.transforms.memory import Memory
from cgx_jax.transforms.precondition import SecondMoment
from cgx_jax.transforms.sync_gradients import Sync

if TYPE_CHECKING:
    import optax


def scatter_gradients(
    axis_name: AxisName,
    policy: Compressor | Policy | Plan | Stages | None = None,
    *,
    memory: Memory | None = None,
    precondition: SecondMoment | None = None,
    dimensions: Dimensions = 0,
    seed: int = 0,
    exchange: Exchange | str = "auto",
    mesh: Mesh | AbstractMesh | None = None,
) -> optax.GradientTransformationExtraArgs:
    """An Optax transformation that reduces whole gradients to this rank's shard of their mean.

    It is for sharded data-parallel training (FSDP, ZeRO). It goes first in `optax.chain`, where
    `sync_gradients` does, and everything after it sees shards. `dimensions` says where a leaf is
    cut: an int, a tree (or a prefix of one) of ints, or a function from a leaf's path to an int.
    The length there must be a multiple of the world size. A leaf keeps its dtype. `policy` and
    `exchange` are as in `psum_scatter_compressed`, and `Stages` as `policy` follow one another.
    `seed` feeds stochastic rounding.

    With `memory`, the next step sends what compression loses. Each rank remembers whole gradients,
    so a memory takes as much space as they do. The rank's own shard is not encoded, so it leaves no
    residual. With `precondition`, values are compressed in units of their size. Only the owner of a
    shard knows its mean. In a step that updates the units, the ranks therefore share the mean
    squares of rows and columns: rows + columns fp32 numbers per leaf, in one `lax.psum` for all
    leaves. A step whose mean holds a NaN or infinity on any rank leaves memory and moments as they
    were; one more number per step tells all ranks.

    The state is a `SyncState`, which `state_specs`, `state_shardings` and `resize_state` take.
    `init` takes whole parameters, with the `mesh` given, or shards, inside shard_map or pmap or
    typed on explicit axes. What follows in the chain sees only a shard:
    `optax.clip_by_global_norm` would use the norm of that shard, and `optax.apply_if_finite` would
    skip the step only on some ranks.

    Raises ValueError while tracing for what `psum_scatter_compressed` refuses, for a memory around
    a compressor that would let it grow, for the state of an `init` that mistook shards for whole
    parameters, and for `optax.apply_if_finite` around it. Source of the scheme: QSDP (Markov et
    al., ICML 2023).
    """
    import optax

    sync = Sync(
        axis_name=axis_name,
        policy=policy,
        memory=memory,
        precondition=precondition,
        seed=seed,
        mesh=mesh,
        exchange=exchange,
        dimensions=dimensions,
        name="scatter_gradients",
    )
    return optax.GradientTransformationExtraArgs(sync.init, sync.update)
