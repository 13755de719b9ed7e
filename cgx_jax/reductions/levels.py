"""A reduction over two levels of a mesh: exact inside a node, compressed across."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from cgx_jax import _compat
from cgx_jax.axes import Axes, in_groups, sum_of_rows
from cgx_jax.compressors import Compressor, PayloadCompressor
from cgx_jax.compressors.base import CodedLeaf
from cgx_jax.compressors.codes import folded
from cgx_jax.kernels import scaling
from cgx_jax.kernels.scaling import Residuals
from cgx_jax.reductions import shares
from cgx_jax.reductions.base import Job, Operands, PayloadReduction, Reduced, Reduction, widest
from cgx_jax.reductions.reduce_scatter import ReduceScatter


@dataclasses.dataclass(frozen=True)
class Levels:
    """Which ranks are near each other: by the names of inner axes, or as groups of one flat axis.

    `inner` names those axes of the call that are inside a node; the other axes connect nodes.
    Alternatively, `groups` holds the indices of each node's ranks, in groups of one size. With
    `compressor`, the sums inside a node are compressed as well. Raises ValueError unless exactly
    one of `inner` and `groups` is given.
    """

    inner: str | tuple[str, ...] | None = None
    groups: Sequence[Sequence[int]] | None = None
    compressor: PayloadCompressor | None = None

    def __post_init__(self) -> None:
        if (self.inner is None) == (self.groups is None):
            raise ValueError(
                f"Levels: inner={self.inner!r} and groups={self.groups!r}; pass one of the two: "
                "inner, the axes inside a node, or groups, the indices of each node's ranks."
            )
        c = self.compressor
        if c is not None and not (
            "scatter_gather" in c.reductions and c.owner_exact and not c.has_state((), jnp.float32)
        ):
            raise ValueError(
                f"Levels: compressor={c} cannot be split into a share per rank of a node; use "
                "Quantize, Cast or None inside a node."
            )
        if self.inner is not None:
            names = (self.inner,) if isinstance(self.inner, str) else tuple(self.inner)
            object.__setattr__(self, "inner", names)
        if self.groups is not None:
            object.__setattr__(self, "groups", tuple(tuple(map(int, g)) for g in self.groups))

    def split(self, caller: str, axes: Axes) -> tuple[Axes, Axes]:
        """Returns `axes` inside a node and across nodes; raises ValueError if they do not fit."""
        if axes.groups is not None:
            raise ValueError(
                f"{caller}: levels= and axis_index_groups= cannot be combined; leave out one of "
                "them."
            )
        if self.groups is not None:
            inner = Axes.resolve(f"{caller}, Levels", axes.names, self.groups)
            assert inner.groups is not None
            across = tuple(zip(*inner.groups, strict=True))
            return inner, Axes(axes.names, across, len(inner.groups))
        assert self.inner is not None
        missing = [n for n in self.inner if n not in axes.names]
        outer = tuple(n for n in axes.names if n not in self.inner)
        if missing or not outer:
            raise ValueError(
                f"{caller}: Levels(inner={self.inner}) must name some of the call's axes "
                f"{axes.names}, and leave at least one for the sum across nodes."
            )
        return Axes.resolve(caller, self.inner, None), Axes.resolve(caller, outer, None)


def ranks_by_node(axes: Axes, inner: Axes) -> tuple[tuple[int, ...], ...]:
    """Returns the ranks of each node of `axes`, in the order of the axes inside and across."""
    if inner.groups is not None:
        return inner.groups
    ranks = np.arange(axes.world).reshape([lax.axis_size(n) for n in axes.names])
    nodes = in_groups(ranks, [axes.names.index(n) for n in inner.names])
    return tuple(tuple(node) for node in nodes.tolist())


@dataclasses.dataclass(frozen=True)
class Leveled(Reduction):
    """Sums inside a node, then applies `across` to this rank's share of the node's sum.

    The sum inside a node is exact unless there is a `compressor`. Each rank of a node reduces its
    own share across nodes, so a node sends no more than one rank would in a flat reduction. The
    encoded sums then travel inside the node, so all ranks decode the same bytes. One exchange moves
    rows on both levels. `nodes` come from `ranks_by_node`.
    """

    across: PayloadReduction
    inner: Axes
    outer: Axes
    nodes: tuple[tuple[int, ...], ...]
    compressor: PayloadCompressor | None

    shorthand: ClassVar[str] = "levels"

    @property
    def needs(self) -> frozenset[str]:  # type: ignore[override]
        return self.across.needs | {"scatter", "gather"}

    @property
    def seed_count(self) -> int:  # type: ignore[override]
        return self.across.seed_count + (self.compressor is not None)

    @property
    def shares_seeds(self) -> bool | None:  # type: ignore[override]
        return self.across.shares_seeds

    def refusal(self, compressor: Compressor) -> str | None:
        return self.across.refusal(compressor)

    def _shares(self, leaves: tuple[CodedLeaf, ...]) -> tuple[CodedLeaf, ...]:
        return shares.of(leaves, self.inner.world)

    def across_links(
        self, leaves: tuple[CodedLeaf, ...], world: int
    ) -> tuple[Reduction, tuple[CodedLeaf, ...], int]:
        return self.across, self._shares(leaves), self.outer.world

    def bytes_sent(self, leaves: tuple[CodedLeaf, ...], world: int) -> int:
        return sum(self.bytes_by_level(leaves))

    def bytes_by_level(self, leaves: tuple[CodedLeaf, ...]) -> tuple[int, int]:
        """Returns the bytes that a rank sends inside its node, and those to other nodes."""
        own = self._shares(leaves)
        between = self.across.bytes_sent(own, self.outer.world)
        if self.compressor is None:
            down = 4 * sum(x.size for x in own)
        else:
            down = sum(self.compressor.payload_bytes(x.shape) for x in own)
        rows = self.across.rows_bytes(own, self.outer.world)
        return (self.inner.world - 1) * (down + rows), between

    def error_bound(self, compressor: Any, x: jax.Array, divisor: float = 1) -> jax.Array:
        runs = jnp.stack([shares.cut(row, self.inner.world) for row in x])  # [rank, share, ...]
        sums = runs[np.array(self.nodes)].sum(1)  # [node, share, ...]
        between = functools.partial(self.across.error_bound, compressor, divisor=divisor)
        if self.compressor is None:
            return shares.joined(jax.vmap(between, in_axes=1)(sums), x[0])
        inside = jax.vmap(jax.vmap(self.compressor.error_bound))(runs).sum(0)
        # An error inside a node widens the range of what is encoded between nodes.
        most = jax.vmap(jax.vmap(widest))(jnp.abs(sums) + inside)
        bound = jax.vmap(lambda x: between(x).max(), in_axes=1)(most)
        each = jax.vmap(jnp.add)(inside / divisor, bound)
        return shares.joined(each, x[0])

    def run(self, job: Job, given: Operands) -> Reduced:
        across, world = self.across, self.inner.world
        leaves, units, states = given.leaves, given.units, given.states
        runs = [shares.cut(x, world) for x in scaling.taken_in(leaves, units)]
        own, lost = self._inside(job, given.plain(runs))
        outer = dataclasses.replace(job, leaves=self._shares(job.leaves), axes=self.outer)
        rows, residuals = across.rows(outer, given.plain(own))
        every = job.exchange.gather(job.name, rows.reshape(-1), self.inner)
        every = every.reshape(world, *rows.shape)
        sums = jax.vmap(lambda r: across.sums(outer, r, given.plain(own)))(every)
        joined = [shares.joined(y, x) for y, x in zip(sums, leaves, strict=True)]
        out = scaling.all_decoded(joined, units, leaves)
        if residuals is not None and lost is not None:
            # Its own share reaches this rank without loss inside the node.
            wholes = [
                inside.at[self.inner.rank()].set(e)
                for inside, e in zip(lost, residuals, strict=True)
            ]
            joined = [shares.joined(whole, x) for whole, x in zip(wholes, leaves, strict=True)]
            residuals = scaling.taken_out(joined, units, leaves)
        if job.axes.checked() and self.inner.groups is not None:
            out = [_compat.same_over(y, job.axes.names) for y in out]
        return Reduced(out, residuals, list(states))

    def _inside(self, job: Job, given: Operands) -> tuple[list[jax.Array], Residuals]:
        """Returns this rank's share of the node's sums, and what sending each share loses."""
        inner, like, runs = self.inner, self._shares(job.leaves), given.leaves
        if self.compressor is None:
            rows = jnp.concatenate([x.reshape(inner.world, -1) for x in runs], axis=1)
            # Over gloo this takes two thirds of the time of lax.psum_scatter.
            total = sum_of_rows(job.exchange.scatter(job.name, rows, inner))
            flat = jnp.split(total, np.cumsum([x.size for x in like])[:-1].tolist())
            own = [y.reshape(x.shape) for y, x in zip(flat, like, strict=True)]
            return own, [jnp.zeros_like(x) for x in runs]
        leaves = tuple(x._replace(compressor=self.compressor) for x in like)
        inside = dataclasses.replace(job, leaves=leaves, axes=inner, divisor=1)
        seed = given.seeds[self.across.seed_count]
        if self.compressor.needs_key:
            seed = folded(seed, job.axes.index())
        own, lost, _ = ReduceScatter().run(inside, given._replace(seeds=[seed]))
        return own, lost
