"""A stack of layers with sharded weights, gathered one layer ahead in both passes."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from cgx_jax import _compat
from cgx_jax._types import AxisName, Key, Pytree
from cgx_jax.arguments import check_key, folded
from cgx_jax.collective import Collective
from cgx_jax.compressors import Compressor, Quantize, ShiftedLattice
from cgx_jax.exchanges import Exchange
from cgx_jax.plan import Plan
from cgx_jax.policies.rules import Policy
from cgx_jax.route import rows
from cgx_jax.route.route import Options

_NAME = "scan_layers"
_WEIGHTS = ShiftedLattice(8)
_GRADIENTS = Quantize(4, rounding="stochastic")


def scan_layers(
    body: Callable[[Pytree, Pytree], Pytree],
    x: Pytree,
    shards: Pytree,
    axis_name: AxisName,
    *,
    weights: Compressor | Policy | Plan | None = _WEIGHTS,
    gradients: Compressor | Policy | Plan | None = _GRADIENTS,
    key: Key = None,
    exchange: Exchange | str = "auto",
) -> Pytree:
    """Returns `x` after all layers: `body(x, layer)` returns the next x, layer by layer.

    The leaves of `shards` are [layers, length / world, ...]: this rank's part of each layer, cut
    along the layer's first dimension. `x` is a tree of floats. Each layer's weights travel in one
    `all_gather_compressed` by `weights`, while the layer before it computes. The gradient with
    respect to `shards` is the sum over the ranks, like that of `lax.all_gather`. Each layer's part
    of the gradient travels in one `psum_scatter_compressed` by `gradients`, while the layer before
    it is differentiated.

    The backward pass keeps each layer's input, gathers the same weights again and computes `body`
    again, so the weights of at most two layers are whole at any time. `body` may close over other
    values; the gradient with respect to these is as without this call. `key` is as in
    `psum_compressed`. Forward-mode derivatives are not defined.

    Raises ValueError and TypeError as the two calls do, and ValueError for a stack without layers.
    Source: QSDP (Markov et al., ICML 2023) for the scheme.
    """
    check_key(_NAME, key)
    options = Options.resolve(_NAME, axis_name, exchange=exchange, collective=Collective.ALL_GATHER)
    counts = {jnp.shape(leaf)[:1] for leaf in jax.tree.leaves(shards)}
    if len(counts) != 1 or not (count := next(iter(counts))) or not count[0]:
        raise ValueError(
            f"{_NAME}: the leaves of shards have leading dimensions {sorted(counts)}; all must "
            "have the same one, the number of layers, which is 1 or more."
        )
    layer = jax.eval_shape(lambda shards: _at(shards, 0), shards)
    gather = rows.Gather.of(options, layer, weights, 0, True)
    varying = options.axes.varying()
    start = jax.tree.map(lambda v: _compat.vary_over(jnp.asarray(v), varying), x)
    shards = gather.varying(jax.tree.map(jnp.asarray, shards))
    whole = jax.eval_shape(lambda s, k: gather(_at(s, 0), folded(_NAME, k, 0)), shards, key)
    converted, closed, others = _converted(body, start, whole)
    stack = _Stack(converted, gather, gather.transposed(gradients), count[0])
    scan = jax.custom_vjp(lambda *given: stack.forward(*given)[0])
    scan.defvjp(stack.forward, stack.backward)
    return scan(start, shards, closed, (key, others))


def _converted(
    body: Callable[[Pytree, Pytree], Pytree], x: Pytree, layer: Pytree
) -> tuple[Callable[..., Pytree], list[jax.Array], list[jax.Array]]:
    """Returns `body` as a function of two more arguments, and these: what it closes over.

    The first may have a derivative, the second, such as masks and keys, has none. A function with
    its own derivative must not close over what is traced.
    """
    # A new function, so that JAX does not keep what another call of the same body closed over.
    traced, out = jax.make_jaxpr(lambda x, layer: body(x, layer), return_shape=True)(x, layer)
    forms = []
    for tree in (out, x):
        leaves, treedef = jax.tree.flatten(tree)
        forms.append(([(v.shape, v.dtype) for v in leaves], treedef))
    if forms[0] != forms[1]:
        shown = [", ".join(f"{d}{list(s)}" for s, d in own) + f" in {t}" for own, t in forms]
        raise TypeError(
            f"{_NAME}: body returns {shown[0]}, but its first argument is {shown[1]}; it must "
            "return the next layer's input, with the same tree, shapes and dtypes."
        )
    constants = list(traced.consts)
    traces = [i for i, c in enumerate(constants) if isinstance(c, jax.core.Tracer)]
    closed = [i for i in traces if jnp.issubdtype(constants[i].dtype, jnp.inexact)]
    others = [i for i in traces if i not in closed]

    def converted(x: Pytree, layer: Pytree, values: Pytree, rest: Pytree) -> Pytree:
        own = dict(zip(closed + others, [*values, *rest], strict=True))
        given = [own.get(i, c) for i, c in enumerate(constants)]
        results = _compat.evaluate(traced, given, jax.tree.leaves((x, layer)))
        return jax.tree.unflatten(jax.tree.structure(out), results)

    return converted, [constants[i] for i in closed], [constants[i] for i in others]


def _at(tree: Pytree, layers: int | slice) -> Pytree:
    return jax.tree.map(lambda leaf: leaf[layers], tree)


@dataclasses.dataclass(frozen=True)
class _Stack:
    """The static part of a call, and its two passes."""

    body: Callable[..., Pytree]
    gathers: rows.Gather
    transposed: Callable[[Pytree, Key], Pytree]
    count: int

    def gather(self, shard: Pytree, key: Key, layer: int | jax.Array) -> Pytree:
        """Returns one layer's whole weights."""
        return self.gathers(shard, folded(_NAME, key, layer))

    def scatter(self, gradient: Pytree, key: Key, layer: int | jax.Array) -> Pytree:
        """Returns this rank's part of the sum of one layer's gradients."""
        return self.transposed(gradient, folded(_NAME, key, layer))

    def back(
        self, x: Pytree, whole: Pytree, closed: Pytree, others: Pytree, cotangent: Pytree
    ) -> tuple[Pytree, Pytree, Pytree]:
        """Returns the cotangents of one layer's input, its weights, and what `body` closes over."""
        body = lambda *given: self.body(*given, others)  # noqa: E731
        return jax.vjp(body, x, whole, closed)[1](cotangent)

    def forward(
        self, x: Pytree, shards: Pytree, closed: Pytree, fixed: tuple[Key, Pytree]
    ) -> tuple[Pytree, Pytree]:
        """Returns the result, and what `backward` needs."""
        key, others = fixed

        def layer(carry: Pytree, following: Pytree) -> tuple[Pytree, Pytree]:
            x, whole = carry
            number, shard = following
            # The gather and the body do not depend on each other, so the next weights arrive while
            # this layer computes.
            ahead = self.gather(shard, key, number)
            return (self.body(x, whole, closed, others), ahead), x

        first = self.gather(_at(shards, 0), key, 0)
        following = jnp.arange(1, self.count, dtype=jnp.int32), _at(shards, slice(1, self.count))
        (x, whole), inputs = lax.scan(layer, (x, first), following)
        return self.body(x, whole, closed, others), (inputs, x, shards, closed, fixed)

    def backward(self, saved: Pytree, cotangent: Pytree) -> tuple[Pytree, Pytree, Pytree, None]:
        """Returns the cotangents of the arguments of `forward`."""
        inputs, x, shards, closed, (key, others) = saved
        last = self.count - 1
        add = functools.partial(jax.tree.map, jnp.add)

        def layer(carry: Pytree, before: Pytree) -> tuple[Pytree, Pytree]:
            # `gradient` is the following layer's, and `total` the sum of those of `closed` so far.
            cotangent, whole, gradient, total = carry
            number, shard, x = before
            ahead = self.gather(shard, key, number - 1)
            done = self.scatter(gradient, key, number + 1)
            cotangent, gradient, more = self.back(x, whole, closed, others, cotangent)
            return (cotangent, ahead, gradient, add(total, more)), done

        whole = self.gather(_at(shards, last), key, last)
        if last == 0:
            cotangent, gradient, total = self.back(x, whole, closed, others, cotangent)
            done = self.scatter(gradient, key, 0)
            return cotangent, jax.tree.map(lambda leaf: leaf[None], done), total, None
        ahead = self.gather(_at(shards, last - 1), key, last - 1)
        cotangent, gradient, total = self.back(x, whole, closed, others, cotangent)
        before = (
            jnp.arange(1, last, dtype=jnp.int32),
            _at(shards, slice(0, last - 1)),
            _at(inputs, slice(1, last)),
        )
        (cotangent, whole, gradient, total), later = lax.scan(
            layer, (cotangent, ahead, gradient, total), before, reverse=True
        )
        second = self.scatter(gradient, key, 1)
        cotangent, gradient, more = self.back(_at(inputs, 0), whole, closed, others, cotangent)
        first = self.scatter(gradient, key, 0)
        join = lambda a, b, rest: jnp.concatenate([a[None], b[None], rest])  # noqa: E731
        return cotangent, jax.tree.map(join, first, second, later), add(total, more), None
