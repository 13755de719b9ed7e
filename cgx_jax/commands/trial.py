"""The methods that `compare` tries, and how each is put into the user's step."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh

from cgx_jax import _compat
from cgx_jax._types import AxisName, Pytree
from cgx_jax.compressors import (
    BlockTopK,
    Cast,
    Compressor,
    Identity,
    PowerSGD,
    Quantize,
    ScaledSign,
    SummedCompressor,
    TopK,
)
from cgx_jax.exchanges import Xla
from cgx_jax.plan import resolve
from cgx_jax.route.route import Options, decide
from cgx_jax.transforms import ErrorFeedback, Memory, SecondMoment, SyncState, sync_gradients

if TYPE_CHECKING:
    import optax

CALLER = "compare"
ALONE = "alone"  # the step without a reduction, which shows what is left to gain
ERROR_STEPS = 5


@dataclasses.dataclass(frozen=True)
class Method:
    """The options of `sync_gradients` for a method, and `write`, how a user writes them.

    `close` says that models trained with it were within the spread over seeds of exactly trained
    models (docs/choosing.md). Without a compressor nothing is sent.
    """

    write: str
    compressor: Compressor | None
    memory: Memory | None = None
    precondition: SecondMoment | None = None
    close: bool = False


METHODS = {
    "exact": Method("lax.pmean", Identity()),
    ALONE: Method("no reduction", None),
    "bf16": Method("Cast(jnp.bfloat16)", Cast(jnp.bfloat16), close=True),
    "8bit": Method("Quantize(8)", Quantize(8), close=True),
    "4bit": Method("Quantize(4)", Quantize(4)),
    "4bit-rotated": Method("Quantize(4, rotation=True)", Quantize(4, rotation=True)),
    "4bit-moment": Method(
        "Quantize(4, rotation=True), precondition=SecondMoment()",
        Quantize(4, rotation=True),
        precondition=SecondMoment(),
        close=True,
    ),
    "topk": Method("TopK(0.01), memory=ErrorFeedback()", TopK(0.01), ErrorFeedback()),
    "blocktopk": Method("BlockTopK(5), memory=ErrorFeedback()", BlockTopK(5), ErrorFeedback()),
    "powersgd": Method("PowerSGD(4), memory=ErrorFeedback()", PowerSGD(4), ErrorFeedback()),
    "sign": Method("ScaledSign(), memory=ErrorFeedback()", ScaledSign(), ErrorFeedback()),
}


class Watched(NamedTuple):
    """The state of `sync_gradients`, and two sums of squares over the first steps, f32[] each."""

    sync: SyncState
    lost: jax.Array  # |mean - exact|²
    exact: jax.Array  # |exact|²


class Trial:
    """One method in the user's step: `sync` makes its transformation."""

    def __init__(self, method: Method, exchange: str) -> None:
        # Codes that are summed as numbers need XLA's own collectives.
        compressor = self.compressor = method.compressor or Identity()
        summed = isinstance(compressor, SummedCompressor) or compressor.lossless
        self.method, self.exchange = method, Xla.shorthand if summed else exchange
        self.write = method.write
        if self.exchange != "auto" and not compressor.lossless:
            self.write += f", exchange={self.exchange!r}".replace("'", '"')
        self.made = False
        self.sent_bytes: int | None = None

    def sync(
        self, axis_name: AxisName, *, mesh: Mesh | None = None
    ) -> optax.GradientTransformationExtraArgs:
        """Makes `sync_gradients` for this method, which measures its error in the first steps."""
        import optax

        method = self.method
        inner = sync_gradients(
            axis_name,
            self.compressor,
            memory=method.memory,
            precondition=method.precondition,
            mesh=mesh,
            exchange=self.exchange,
        )
        self.made = True

        def init(params: Pytree) -> Watched:
            state = inner.init(params)
            zero = state.step.astype(jnp.float32)  # placed on the mesh like the state
            return Watched(state, zero, zero)

        def update(
            updates: Pytree, state: Watched, params: Pytree = None, **extra_args: object
        ) -> tuple[Any, Watched]:
            options = Options.resolve(CALLER, axis_name, exchange=self.exchange)
            if method.compressor is None:
                self.sent_bytes = 0
                # Ranks go apart, which an out_specs of P() does not allow but a timing does.
                own = jax.tree.map(lambda x: _compat.same_over(x, options.axes.names), updates)
                return own, state
            self.sent_bytes = self._sent_bytes(options, updates)
            means, after = inner.update(updates, state.sync, params, **extra_args)

            def look() -> tuple[jax.Array, jax.Array]:
                exact = lax.pmean(updates, axis_name)
                lost = jax.tree.map(jnp.subtract, means, exact)
                return state.lost + _square(lost), state.exact + _square(exact)

            # Later steps skip this, so that the exact mean is not part of the timed steps.
            early = state.sync.step < ERROR_STEPS
            lost, exact = lax.cond(early, look, lambda: (state.lost, state.exact))
            return means, Watched(after, lost, exact)

        return optax.GradientTransformationExtraArgs(init, update)

    def _sent_bytes(self, options: Options, updates: Pytree) -> int:
        """Returns bytes sent per rank and step; exact buffers count as a ring all-reduce."""
        plan = resolve(CALLER, updates, self.compressor)
        in_units = range(len(plan.leaves)) if self.method.precondition is not None else ()
        exact, total = list(plan.exact), 0
        for buffer, way in decide(options, plan, in_units).ways.items():
            if way is None:
                exact += buffer
            else:
                total += way.reduction.bytes_sent(plan.coded(buffer), options.axes.world)
        nbytes, world = sum(plan.leaves[i].sum_bytes for i in exact), options.axes.world
        return total + -(-2 * (world - 1) * nbytes // world)

    def error(self, state: Pytree) -> float | None:
        """Returns the relative error over the first steps, from the training's state."""
        if self.method.compressor is None:
            return None
        nodes = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, Watched))
        watched = next(x for x in nodes if isinstance(x, Watched))
        lost, exact = (float(jnp.ravel(x.addressable_data(0))[0]) for x in watched[1:])
        return (lost / exact) ** 0.5 if exact else 0.0


def _square(tree: Pytree) -> jax.Array:
    squares = [jnp.square(x.astype(jnp.float32)).sum() for x in jax.tree.leaves(tree)]
    return jnp.stack(squares).sum()
