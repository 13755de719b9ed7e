"""Codes that are numbers: the ranks' codes themselves are summed, round by round."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, cast

import jax
import jax.numpy as jnp
import numpy as np

from cgx_jax import _compat
from cgx_jax.axes import Axes
from cgx_jax.compressors import Summed
from cgx_jax.compressors.base import CodedLeaf, Maxima, Rounds, SummedCompressor, Together
from cgx_jax.compressors.buffers import leaf_keys
from cgx_jax.kernels import scaling
from cgx_jax.reductions.base import Job, Operands, Reduced, Reduction


@dataclasses.dataclass(frozen=True)
class SumRounds(Reduction):
    """`lax.psum` of numeric arrays, once or several times; for low-rank and shared-index codes.

    The rounds of all leaves of a buffer run in step, so a buffer has only as many latencies as the
    leaf with the most rounds. Raises ValueError while tracing for a compressor that does not allow
    it. Source: PowerSGD (Vogels et al., NeurIPS 2019).
    """

    shorthand: ClassVar[str] = "sum_rounds"
    needs: ClassVar[frozenset[str]] = frozenset({"sum"})

    def bytes_sent(self, leaves: tuple[CodedLeaf, ...], world: int) -> int:
        # What a ring all-reduce sends.
        arrays = sum(_code(x).summed_bytes(x.shape, x.dtype, world) for x in leaves)
        return -(-2 * (world - 1) * arrays // world)

    def error_bound(self, compressor: Any, x: jax.Array, divisor: float = 1) -> jax.Array:
        return compressor.error_bound_of_sum(x) / divisor

    def run(self, job: Job, given: Operands) -> Reduced:
        values, world = given.values(), job.axes.world
        running = [
            _code(leaf).rounds(x, state, key=leaf_keys([leaf], given.seeds[0])[0], world=world)
            for leaf, x, state in zip(job.leaves, values, given.states, strict=True)
        ]
        ends = _in_step(job.axes, running)
        for leaf, end in zip(job.leaves, ends, strict=True):
            varying = job.axes.varying() & _compat.varying_axes(end.total)
            if job.axes.groups is None and varying:
                raise ValueError(
                    f"{job.name}: the total of {leaf.compressor}.rounds is typed as varying over "
                    f"axis {min(varying)!r}, so ranks may hold different sums. Compute it only "
                    "from received sums and from values that all ranks share, such as "
                    "jnp.zeros(shape); jnp.zeros_like(x) has the type of this rank's own x. If the "
                    "call has a key, it must be the same on all ranks, too."
                )
        totals = [end.total.reshape(x.shape) for end, x in zip(ends, values, strict=True)]
        if job.divisor != 1:
            totals = [total / np.float32(job.divisor) for total in totals]
        lost = None
        if job.residual:
            lost = [x - end.own.reshape(x.shape) for end, x in zip(ends, values, strict=True)]
        return Reduced(
            scaling.all_decoded(totals, given.units, given.leaves),
            scaling.taken_out(lost, given.units, given.leaves),
            [end.state for end in ends],
        )


def _code(leaf: CodedLeaf) -> SummedCompressor:
    """Returns the leaf's compressor. This reduction is allowed by no other family."""
    return cast(SummedCompressor, leaf.compressor)


def _in_step(axes: Axes, running: list[Rounds]) -> list[Summed]:
    """Runs the generators to their ends; all generators share the collectives of a round."""
    ends: dict[int, Summed] = {}
    answers: dict[int, Any] = dict.fromkeys(range(len(running)))
    while answers:
        to_sum: dict[int, Sequence[Any]] = {}
        to_compare: dict[int, Sequence[Any]] = {}
        while answers:  # until all have reached their next round
            asked: dict[int, Together] = {}
            for i, answer in answers.items():
                try:
                    made = next(running[i]) if answer is None else running[i].send(answer)
                except StopIteration as stop:
                    ends[i] = stop.value
                    continue
                if isinstance(made, Together):
                    asked[i] = made
                elif isinstance(made, Maxima):
                    to_compare[i] = made.arrays
                else:
                    to_sum[i] = made
            answers = _together(asked)
        for yielded, reduce in ((to_sum, axes.sum), (to_compare, axes.max)):
            flat = [
                _compat.vary_over(jnp.asarray(x), axes.varying())
                for xs in yielded.values()
                for x in xs
            ]
            with jax.named_scope("exchange"):
                reduced = iter(_reduce_together(reduce, flat))
            answers |= {i: [next(reduced) for _ in xs] for i, xs in yielded.items()}
    return [ends[i] for i in range(len(running))]


def _together(asked: dict[int, Together]) -> dict[int, Any]:
    """Computes the answers, with one call for all requests that are the same."""
    groups: dict[Any, list[int]] = {}
    for i, (function, x) in asked.items():
        kind = function, x.shape, x.dtype, _compat.varying_axes(x)
        groups.setdefault(kind, []).append(i)
    answers: dict[int, Any] = {}
    for (function, *_), part in groups.items():
        if len(part) == 1:
            answers[part[0]] = function(asked[part[0]].x)
        else:
            rows = jax.vmap(function)(jnp.stack([asked[i].x for i in part]))
            answers.update(zip(part, rows, strict=True))
    return answers


def _reduce_together(
    reduce: Callable[[Sequence[Any]], list[jax.Array]], arrays: list[jax.Array]
) -> list[jax.Array]:
    """Reduces each array over the ranks, with one collective per dtype.

    Given one collective per array, XLA would combine them across rounds and end with more of them.
    """
    out: dict[int, jax.Array] = {}
    for dtype in dict.fromkeys(x.dtype for x in arrays):
        own = [i for i, x in enumerate(arrays) if x.dtype == dtype]
        (joined,) = reduce([jnp.concatenate([jnp.ravel(arrays[i]) for i in own])])
        ends = np.cumsum([arrays[i].size for i in own])
        parts = jnp.split(joined, ends[:-1])
        out.update({i: x.reshape(arrays[i].shape) for i, x in zip(own, parts, strict=True)})
    return [out[i] for i in range(len(arrays))]
