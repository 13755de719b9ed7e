"""Decides which leaves of a tree travel in one call, and makes the calls."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cgx_jax import _compat, nonfinite
from cgx_jax._types import Key, Pytree
from cgx_jax.axes import SMALL_BYTES, Axes
from cgx_jax.compressors import Compressor, Identity, PayloadCompressor
from cgx_jax.compressors.base import require_key
from cgx_jax.compressors.codes import CodedLeaf
from cgx_jax.core import load_of
from cgx_jax.exchanges import Auto, Exchange, Xla, auto
from cgx_jax.halves.half import Half, where_of
from cgx_jax.leaves import Leaf, is_bare, leaves_of
from cgx_jax.plan import Plan, resolve
from cgx_jax.policies.rules import Policy


@dataclasses.dataclass(frozen=True)
class Message:
    """The leaves that travel in one call of `exchange`: static and hashable.

    `numbers` are their places in the tree. `fused` says that the exchange does the whole half in
    one call, which takes one leaf.
    """

    exchange: Exchange
    numbers: tuple[int, ...]
    halves: tuple[Half, ...]
    fused: bool

    def run(self, keys: Sequence[Any], leaves: Sequence[jax.Array]) -> list[jax.Array]:
        """Returns the results of `leaves`, one per entry of `numbers`."""
        if self.fused:
            return [self.halves[0].fused(self.exchange, keys[0], leaves[0])]
        return self.deliver(self.payloads(keys, leaves), leaves)

    def payloads(self, keys: Sequence[Any], leaves: Sequence[jax.Array]) -> list[jax.Array]:
        """Returns each leaf's payload."""
        parts = zip(self.halves, keys, leaves, strict=True)
        return [half.send(key, x) for half, key, x in parts]

    def deliver(self, sent: Sequence[jax.Array], leaves: Sequence[jax.Array]) -> list[jax.Array]:
        """Moves the payloads and returns the results of `leaves`."""
        arrays = [_compat.vary_over(p, self.halves[0].axes.varying()) for p in sent]
        arrived = self.halves[0].move(self.exchange, jnp.concatenate(arrays, axis=-1))
        ends = np.cumsum([p.shape[-1] for p in sent])[:-1].tolist()
        parts = zip(self.halves, jnp.split(arrived, ends, axis=-1), leaves, strict=True)
        return [half.receive(payloads, x) for half, payloads, x in parts]


@dataclasses.dataclass(frozen=True)
class Halves:
    """A call for all leaves of a tree: leaves in `messages` go by these, the others by `lax`."""

    messages: tuple[Message, ...]
    halves: tuple[Half, ...]  # of all leaves

    @classmethod
    def of(
        cls,
        half: type[Half],
        name: str,
        tree: Pytree,
        axes: Axes,
        compressor: Compressor | Policy | Plan | None,
        dimension: int,
        tiled: bool,
        exchange: Exchange | str,
    ) -> Halves:
        nonfinite.refuse_skip(name)
        bare, sends = is_bare(tree), auto.exchange_named(name, exchange)
        if axes.world > 1:
            sends.require(name, axes.names)
        whole, dimensions = [], []
        for leaf in leaves_of(tree):
            d, shape = half.place(
                where_of(name, leaf.path), leaf.shape, axes.world, dimension, tiled
            )
            whole.append(dataclasses.replace(leaf, shape=shape))
            dimensions.append(d)
        shapes = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in whole]
        plan = resolve(name, jax.tree.unflatten(jax.tree.structure(tree), shapes), compressor)
        plan.require_stateless(name)
        halves = []
        for i, (leaf, d) in enumerate(zip(whole, dimensions, strict=True)):
            chosen, row = plan.compressors[i], leaf.size // axes.world
            if axes.world == 1 or row == 0 or not chosen.supports(leaf.dtype):
                chosen = Identity()
            bytes_of = _with_rows(name, leaf.path, chosen)
            halves.append(half(name, leaf.path, bytes_of, axes, d, tiled, None if bare else i))
        messages = []
        varying = [_compat.varying_axes(x) | axes.varying() for x in jax.tree.leaves(tree)]
        for buffer in _buffers(plan, halves, varying):
            messages += _messages(sends, buffer, halves, whole)
        return cls(tuple(messages), tuple(halves))

    def check(self, leaves: Sequence[jax.Array], key: Key) -> None:
        """Raises ValueError for a missing key, and for an operand that is already reduced."""
        for half, x in zip(self.halves, leaves, strict=True):
            if not half.sums:
                half.axes.check_plain(half.name, [(half.path, x)])
            if half.compressor.lossless:
                continue
            require_key(where_of(half.name, half.path), [half.compressor], key)
            if half.sums:
                half.axes.check_varying(half.name, [(half.path, x)])

    def run(self, tree: Pytree, key: Key) -> Pytree:
        """Returns the results in the structure of `tree`."""
        leaves, treedef = jax.tree.flatten(tree)
        self.check(leaves, key)
        out: dict[int, jax.Array] = {}
        for message in self.messages:
            keys = tuple(half.key(key) for half in message.halves)
            part = tuple(leaves[i] for i in message.numbers)
            out.update(zip(message.numbers, _run(message, keys, part), strict=True))
        every = [out[i] if i in out else h.exactly(leaves[i]) for i, h in enumerate(self.halves)]
        return jax.tree.unflatten(treedef, self.watched(leaves, every))

    def watched(
        self, before: list[Any], after: list[Any], step: jax.Array | None = None
    ) -> list[Any]:
        """Returns the results `after`; in debug mode, reports values that are not finite."""
        if not self.halves:
            return after
        paths = [half.path for half in self.halves]
        first = self.halves[0]
        carried = [i for i, half in enumerate(self.halves) if half.compressor.carries_nonfinite]
        return nonfinite.watch(
            first.name, first.axes, paths, before, after, carried=carried, step=step
        )[0]


def _buffers(
    plan: Plan, halves: Sequence[Half], varying: Sequence[frozenset[str]]
) -> list[list[int]]:
    """Returns the plan's buffers with their lossy leaves, plus the nearest small exact leaves.

    All leaves of one buffer vary over the same mesh axes. If leaves that vary over different axes
    were joined, each would be typed as varying over the axes of all.
    """
    buffers: list[list[int]] = []
    for buffer in plan.buffers:
        parts: dict[frozenset[str], list[int]] = {}
        for i in buffer:
            if not halves[i].compressor.lossless:
                parts.setdefault(varying[i], []).append(i)
        buffers += parts.values()
    home = {i: number for number, buffer in enumerate(buffers) for i in buffer}
    for i, leaf in enumerate(plan.leaves):
        small = 0 < leaf.nbytes <= SMALL_BYTES
        alike = [j for j in home if varying[j] == varying[i]]
        # Exact leaves travel in fp32, so their values must fit in fp32.
        fits = Compressor.supports(halves[i].compressor, leaf.dtype)
        if i not in home and small and fits and alike:
            buffers[home[min(alike, key=lambda j: abs(i - j))]].append(i)
    return buffers


def _messages(
    exchange: Exchange, buffer: Sequence[int], halves: Sequence[Half], whole: Sequence[Leaf]
) -> list[Message]:
    """Returns a buffer's messages by the named or fastest exchange; none if `lax` is faster."""
    name, axes = halves[buffer[0]].name, halves[buffer[0]].axes
    sizes = {i: whole[i].size // axes.world for i in buffer}
    lossy = [i for i in buffer if not halves[i].compressor.lossless]
    chosen: Exchange | None = exchange
    if isinstance(exchange, Auto):
        usable = [
            e
            for e in auto.available(axes.names)
            if isinstance(e, Xla) or all(halves[i].in_one_call(e, sizes[i]) for i in lossy)
        ]
        sent = [CodedLeaf(halves[i].compressor, (sizes[i],), whole[i].dtype, 0) for i in lossy]
        chosen = exchange.choose(name, usable, axes.world, load_of(sent, rows=axes.world))
    if chosen is None:
        return []
    alone = [i for i in lossy if halves[i].in_one_call(chosen, sizes[i])]
    together = [i for i in buffer if i not in alone]
    messages = [Message(chosen, (i,), (halves[i],), fused=True) for i in alone]
    if not any(i in lossy for i in together):
        return messages
    first = halves[next(i for i in together if i in lossy)]
    if first.needs not in chosen.can:
        raise ValueError(
            f"{where_of(name, first.path)}: exchange={chosen.shorthand!r} lacks {first.needs!r}, "
            f"which {first.compressor} needs here; it has {', '.join(sorted(chosen.can))}. Use "
            'exchange="xla", or "auto".'
        )
    parts = tuple(halves[i] for i in together)
    return [*messages, Message(chosen, tuple(together), parts, fused=False)]


def _with_rows(name: str, path: str, compressor: Compressor) -> PayloadCompressor:
    """Returns `compressor`; raises ValueError if its code is numbers instead of bytes."""
    if isinstance(compressor, PayloadCompressor):
        return compressor
    raise ValueError(
        f"{where_of(name, path)}: {compressor} sends numbers that the ranks sum, but this call "
        "sends each rank a different row; use a compressor that sends bytes, such as Quantize."
    )


def prepared(half: Half, x: jax.Array) -> jax.Array:
    """Returns the values of a whole leaf that its compressor encodes."""
    c = half.compressor
    return c.prepare(x.astype(jnp.float32), ())[0].astype(x.dtype) if c.prepares else x


# Sums and gathers are linear, so the derivative in direction t is the exact call, applied to t.
@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _run(message: Message, keys: Any, leaves: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    plain = [_compat.plain(x) for x in leaves]
    with jax.named_scope(message.halves[0].name):
        ready = [prepared(half, x) for half, x in zip(message.halves, plain, strict=True)]
        out = message.run(keys, ready)
    return tuple(_compat.typed_like(y, x) for y, x in zip(out, leaves, strict=True))


@_run.defjvp
def _run_jvp(message: Message, primals: Pytree, tangents: Pytree) -> Pytree:
    exact = (half.tangent(t) for half, t in zip(message.halves, tangents[1], strict=True))
    return _run(message, *primals), tuple(exact)
