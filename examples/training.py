"""The data-parallel training step, and the loop around it that the examples share."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import cgx_jax
from cgx_jax.transforms import local_params
from model import next_byte_loss

WHOLE = P()
CHECK = 5  # steps between two checks of the held-out loss
Step = Callable[[Any, Any, jax.Array], tuple[Any, Any, jax.Array]]


@dataclass(frozen=True)
class Run:
    """The result of a training run: losses in nats per byte, bytes that a rank sends per step."""

    name: str
    losses: np.ndarray
    held_out: float
    sent_bytes: int
    step_seconds: float

    @property
    def final_loss(self) -> float:
        """Mean loss of the last tenth of the steps."""
        return float(self.losses[-max(1, self.losses.size // 10) :].mean())


def adamw(steps: int) -> optax.GradientTransformation:
    """Returns AdamW with a warm-up and a cosine decay; gradients are clipped to norm 1."""
    rate = optax.warmup_cosine_decay_schedule(0.0, 3e-3, steps // 10 + 1, steps + 1, 3e-4)
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate, weight_decay=0.01))


def ring_bytes(params: Any, world: int) -> int:
    """Bytes that each of `world` ranks sends in a ring all-reduce of fp32 gradients."""
    values = sum(leaf.size for leaf in jax.tree.leaves(params))
    return 2 * (world - 1) * 4 * values // world


def data_parallel_step(
    graphdef: nnx.GraphDef,
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
    specs: Any = WHOLE,
    jit: Callable[..., Any] = jax.jit,
) -> Step:
    """Returns a compiled step (params, opt_state, tokens) -> (params, opt_state, loss).

    Tokens are sharded over the axis "data", and the optimizer's state as `specs` say. `optimizer`
    begins with the transformation that replaces a rank's gradients by their mean over this axis,
    compressed or not. The rest is the same in any data-parallel step.
    """

    def step(params, opt_state, tokens):
        # Without this, automatic differentiation sums the gradients over the axis, in fp32.
        varying = jax.tree.map(lambda x: jax.lax.pcast(x, "data", to="varying"), params)
        loss, grads = jax.value_and_grad(
            lambda params: next_byte_loss(nnx.merge(graphdef, params), tokens)
        )(varying)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, jax.lax.pmean(loss, "data")

    sharded = jax.shard_map(
        step, mesh=mesh, in_specs=(P(), specs, P("data")), out_specs=(P(), specs, P())
    )
    return jit(sharded, donate_argnums=(0, 1))


def train(
    step: Step,
    params: Any,
    opt_state: Any,
    batches: np.ndarray,
    mesh: Mesh,
    progress: Callable[[float], None] = lambda loss: None,
) -> tuple[Any, np.ndarray, float]:
    """Runs `step` over batches i32[steps, batch, length + 1].

    Returns:
      (params, losses f64[steps], median seconds per step, without compilation).
    """
    # The step donates its state. Start from copies, so that the caller's initial state survives.
    params, opt_state = jax.device_put(
        jax.tree.map(np.array, (params, opt_state)), NamedSharding(mesh, P())
    )
    losses, seconds = [], []
    for batch in batches:
        start = time.perf_counter()
        tokens = jax.device_put(batch, NamedSharding(mesh, P("data")))
        params, opt_state, loss = step(params, opt_state, tokens)
        losses.append(float(loss))
        seconds.append(time.perf_counter() - start)
        progress(losses[-1])
    return params, np.array(losses), float(np.median(seconds[1:] or seconds))


def train_workers(
    graphdef: nnx.GraphDef,
    params: Any,
    optimizer: optax.GradientTransformation,
    batches: np.ndarray,
    held_out: np.ndarray,
    mesh: Mesh,
    apart: bool = False,
) -> tuple[list[float], list[float]]:
    """Trains one worker per device of the mesh, over batches i32[steps, batch, length + 1].

    With `apart`, the optimizer is `diloco`, and each worker has parameters of its own. No process
    sends anything but what the optimizer sends. Every `CHECK` steps, each process computes the loss
    of the shared parameters on `held_out` windows, and the clock stops meanwhile.

    Returns:
      (held-out losses, seconds of training until then, without compilation), each of every check.
    """
    with jax.set_mesh(mesh):
        state = jax.jit(lambda p: (p, optimizer.init(p)))(params)
    specs = cgx_jax.state_specs(state, "data")

    def loss_of(params, tokens):
        return next_byte_loss(nnx.merge(graphdef, params), tokens)

    def step(state, tokens):
        params, opt_state = state
        if apart:
            own = local_params(params, opt_state)
        else:
            own = jax.tree.map(lambda x: jax.lax.pcast(x, "data", to="varying"), params)
        updates, opt_state = optimizer.update(jax.grad(loss_of)(own, tokens), opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    sharded = jax.shard_map(step, mesh=mesh, in_specs=(specs, P("data")), out_specs=specs)
    compiled, split = jax.jit(sharded, donate_argnums=0), NamedSharding(mesh, P("data"))
    check, losses, seconds = jax.jit(loss_of), [], []
    for number, batch in enumerate(batches, 1):
        tokens = jax.make_array_from_callback(batch.shape, split, lambda i, b=batch: b[i])
        start = time.perf_counter()
        state = jax.block_until_ready(compiled(state, tokens))
        seconds.append(time.perf_counter() - start)
        if number % CHECK == 0:
            own = jax.tree.map(lambda x: x.addressable_data(0), state[0])
            losses.append(float(check(own, held_out)))
    seconds[0] = float(np.median(seconds[1:]))  # the first step compiles
    return losses, np.cumsum(seconds)[CHECK - 1 :: CHECK].tolist()


def evaluate(graphdef: nnx.GraphDef, params: Any, batches: np.ndarray, mesh: Mesh) -> float:
    """Mean loss in nats per byte over batches i32[count, batch, length + 1], sharded by "data"."""

    def loss(params, tokens):
        return jax.lax.pmean(next_byte_loss(nnx.merge(graphdef, params), tokens), "data")

    sharded = jax.jit(jax.shard_map(loss, mesh=mesh, in_specs=(P(), P("data")), out_specs=P()))
    sharding = NamedSharding(mesh, P("data"))
    return float(np.mean([sharded(params, jax.device_put(batch, sharding)) for batch in batches]))
