"""Small loops in the shape of Flax's imagenet, wmt and nlp_seq examples, under pmap.

Lines that compression changes are marked `# was:` or `# new`; no loop has more than three of them.
"""

import functools
import inspect
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training import dynamic_scale as dynamic_scale_lib
from flax.training import train_state
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import cgx_jax

WORLD = 4
STEPS = 24
SEEDS = range(4)
DEVICES = jax.devices()[:WORLD]
Q4 = cgx_jax.Quantize(4, rotation=True)
pytestmark = pytest.mark.usefixtures("standard_promotion")


class TrainState(train_state.TrainState):
    batch_stats: Any = None
    dynamic_scale: Any = None


class ConvNet(nn.Module):
    dtype: Any

    @nn.compact
    def __call__(self, x, train=True):
        for width in (16, 32):
            x = nn.Conv(width, (3, 3), strides=2, use_bias=False, dtype=self.dtype)(x)
            norm = nn.BatchNorm(not train, momentum=0.9, dtype=self.dtype, axis_name="batch")
            x = nn.relu(norm(x))
        return nn.Dense(10)(x.reshape(len(x), -1).astype(jnp.float32))


class Tagger(nn.Module):
    """One layer of attention over tokens; with `source`, attends to another sentence as well."""

    vocabulary: int = 48
    width: int = 32
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, tokens, source=None, train=True):
        embed = nn.Embed(self.vocabulary, self.width, dtype=self.dtype)
        attend = nn.MultiHeadDotProductAttention(2, dtype=self.dtype)
        x = embed(tokens)
        x = x + attend(x, x if source is None else embed(source))
        x = x + nn.Dense(self.width, dtype=self.dtype)(nn.gelu(nn.Dense(128, dtype=self.dtype)(x)))
        x = nn.Dropout(0.1, deterministic=not train)(nn.LayerNorm(dtype=self.dtype)(x))
        return nn.Dense(self.vocabulary, dtype=self.dtype)(x).astype(jnp.float32)


def weighted_loss(logits, targets, smoothing=0.0):
    """Returns (sum, number) of the losses of targets that are not padding."""
    labels = optax.smooth_labels(jax.nn.one_hot(targets, logits.shape[-1]), smoothing)
    weights = (targets > 0).astype(jnp.float32)
    return (optax.softmax_cross_entropy(logits, labels) * weights).sum(), weights.sum()


def keep_if(is_fin, new, old):
    keep = functools.partial(jnp.where, is_fin)
    return new.replace(
        opt_state=jax.tree.map(keep, new.opt_state, old.opt_state),
        params=jax.tree.map(keep, new.params, old.params),
    )


def placed(state, spec):
    """Places the state as the compiled step returns it, so that nothing compiles again."""

    def place(x):
        x = np.asarray(x, jnp.result_type(x))
        x = x if spec == P() else np.broadcast_to(x, (WORLD, *x.shape))
        return jax.device_put(x, NamedSharding(Mesh(DEVICES, ("batch",)), spec))

    return jax.tree.map(place, state)


def imagenet_step(state, batch, pmean):
    def loss_fn(params):
        variables = {"params": params, "batch_stats": state.batch_stats}
        logits, updated = state.apply_fn(variables, batch["image"], mutable=["batch_stats"])
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()
        decay = sum(jnp.sum(jnp.square(p)) for p in jax.tree.leaves(params) if p.ndim > 1)
        return loss + 1e-4 * 0.5 * decay, (updated, logits)

    dynamic_scale = state.dynamic_scale
    if dynamic_scale:
        grad_fn = dynamic_scale.value_and_grad(loss_fn, has_aux=True)  # was: axis_name="batch"
        dynamic_scale, is_fin, aux, grads = grad_fn(state.params)
        dynamic_scale, is_fin = lax.pmin((dynamic_scale, is_fin), "batch")  # new
    else:
        aux, grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
    grads = pmean(grads)  # was: grads = lax.pmean(grads, axis_name="batch"), one level deeper

    updated, logits = aux[1]
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()
    new_state = state.apply_gradients(
        grads=grads, batch_stats=lax.pmean(updated["batch_stats"], "batch")
    )
    if dynamic_scale:
        new_state = keep_if(is_fin, new_state, state).replace(dynamic_scale=dynamic_scale)
    return new_state, {"loss": lax.pmean(loss, "batch")}


def wmt_step(state, batch, pmean, dropout_rng):
    dropout_rng = jax.random.fold_in(dropout_rng, state.step)

    def loss_fn(params):
        logits = state.apply_fn(
            {"params": params}, batch["targets"], batch["inputs"], rngs={"dropout": dropout_rng}
        )
        loss, weight = weighted_loss(logits, batch["targets"], 0.1)
        return loss / weight, logits

    if state.dynamic_scale:
        grad_fn = state.dynamic_scale.value_and_grad(
            loss_fn, has_aux=True
        )  # was: axis_name="batch"
        dynamic_scale, is_fin, (_, logits), grads = grad_fn(state.params)
        dynamic_scale, is_fin = lax.pmin((dynamic_scale, is_fin), "batch")  # new
        state = state.replace(dynamic_scale=dynamic_scale)
    else:
        (_, logits), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
    grads = pmean(grads)  # was: grads = jax.lax.pmean(grads, axis_name="batch"), one level deeper

    new_state = state.apply_gradients(grads=grads)
    loss, weight = lax.psum(weighted_loss(logits, batch["targets"]), "batch")
    if state.dynamic_scale:
        new_state = keep_if(is_fin, new_state, state)
    return new_state, {"loss": loss, "denominator": weight}


def nlp_seq_step(state, batch, dropout_rng):
    dropout_rng = jax.random.fold_in(dropout_rng, state.step)

    def loss_fn(params):
        logits = state.apply_fn({"params": params}, batch["inputs"], rngs={"dropout": dropout_rng})
        loss, weight = weighted_loss(logits, batch["targets"])
        return loss / weight, logits

    (_, logits), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
    # was: grads = jax.lax.pmean(grads, "batch"), which is in the optimizer's chain now
    new_state = state.apply_gradients(grads=grads)
    loss, weight = weighted_loss(logits, batch["targets"])
    return new_state, {"loss": loss, "denominator": weight}


def exact(grads):
    return lax.pmean(grads, "batch")


def compressed(grads):
    return cgx_jax.pmean_compressed(grads, "batch", Q4, exchange="xla")


def exact_adamw(rate):
    return optax.chain(cgx_jax.sync_gradients("batch", cgx_jax.Identity()), optax.adamw(rate))


def compressed_adamw(rate):
    sync = cgx_jax.sync_gradients("batch", Q4, precondition=cgx_jax.SecondMoment(), exchange="xla")
    return optax.chain(sync, optax.adamw(rate))  # was: optax.adamw(rate)


@functools.cache
def initializer(model):
    return jax.jit(functools.partial(model.init, train=False))


class Imagenet:
    """The state has one copy for all devices, as with in_axes=(None, 0)."""

    def __init__(self, pmean, half):
        self.model = ConvNet(jnp.float16 if half else jnp.float32)
        self.scale = dynamic_scale_lib.DynamicScale(growth_interval=4) if half else None
        rate = optax.join_schedules(
            [optax.linear_schedule(0.0, 0.1, 4), optax.cosine_decay_schedule(0.1, STEPS)], [4]
        )
        self.tx = optax.sgd(rate, momentum=0.9, nesterov=True)
        self.init = initializer(self.model)
        self.step = jax.pmap(
            functools.partial(imagenet_step, pmean=pmean),
            in_axes=(None, 0),
            out_axes=(None, 0),
            axis_name="batch",
            devices=DEVICES,
        )

    def run(self, seed):
        rng = np.random.default_rng(seed)
        centres = rng.normal(size=(10, 8, 8, 3)).astype(np.float32)
        variables = self.init(jax.random.key(seed), centres[:1])
        state = TrainState.create(
            apply_fn=self.model.apply,
            params=variables["params"],
            tx=self.tx,
            batch_stats=variables["batch_stats"],
            dynamic_scale=self.scale,
        )
        state = placed(state, P())
        losses = []
        for _ in range(STEPS):
            label = rng.integers(10, size=(WORLD, 8))
            image = centres[label] + 2 * rng.normal(size=(WORLD, 8, 8, 8, 3))
            state, metrics = self.step(state, {"image": image.astype(np.float32), "label": label})
            losses.append(float(metrics["loss"][0]))
        return losses, state


class Sentences:
    """The state is replicated along a leading axis and donated; each device has a dropout key."""

    def __init__(self, step, tx, half=False, translate=False):
        self.model = Tagger(dtype=jnp.float16 if half else jnp.float32)
        self.scale = dynamic_scale_lib.DynamicScale(growth_interval=4) if half else None
        self.tx, self.translate = tx, translate
        self.init = initializer(self.model)
        self.step = jax.pmap(step, axis_name="batch", donate_argnums=(0,), devices=DEVICES)

    def run(self, seed):
        rng = np.random.default_rng(seed)
        meaning = rng.permutation(np.arange(1, self.model.vocabulary))
        tokens = np.ones((1, 12), np.int32)
        source = tokens if self.translate else None
        params = self.init(jax.random.key(seed), tokens, source)["params"]
        state = TrainState.create(
            apply_fn=self.model.apply, params=params, tx=self.tx, dynamic_scale=self.scale
        )
        state = placed(state, P("batch"))  # jax_utils.replicate
        keys = jax.random.split(jax.random.key(seed), WORLD)
        losses = []
        for _ in range(STEPS):
            inputs = rng.integers(1, self.model.vocabulary, size=(WORLD, 16, 12))
            targets = np.where(np.arange(12) < rng.integers(6, 13, (WORLD, 16, 1)), inputs, 0)
            batch = {"inputs": inputs, "targets": np.where(targets, meaning[targets - 1], 0)}
            state, metrics = self.step(state, batch, dropout_rng=keys)
            loss, weight = (np.sum(metrics[k]) for k in ("loss", "denominator"))
            losses.append(loss / weight)
        return losses, state


def wmt(pmean, half):
    step = functools.partial(wmt_step, pmean=pmean)
    return Sentences(step, optax.adamw(3e-3, b2=0.98, eps=1e-9), half, translate=True)


LOOPS = {
    "imagenet": lambda lossy: Imagenet(compressed if lossy else exact, half=False),
    "imagenet-half": lambda lossy: Imagenet(compressed if lossy else exact, half=True),
    "wmt": lambda lossy: wmt(compressed if lossy else exact, half=False),
    "wmt-half": lambda lossy: wmt(compressed if lossy else exact, half=True),
    "nlp_seq": lambda lossy: Sentences(
        nlp_seq_step, (compressed_adamw if lossy else exact_adamw)(3e-3)
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LOOPS)
def test_losses_are_those_of_exact_gradients_and_replicas_stay_identical(name):
    final = {}
    for lossy in (False, True):
        loop = LOOPS[name](lossy)
        runs = [loop.run(seed) for seed in SEEDS]
        final[lossy] = np.array([np.mean(losses[-STEPS // 4 :]) for losses, _ in runs])
        assert all(losses[-1] < 0.9 * losses[0] for losses, _ in runs)
        for x in jax.tree.leaves(runs[0][1]):
            copies = [np.asarray(s.data) for s in x.addressable_shards]
            assert len(copies) == WORLD
            for copy in copies[1:]:
                np.testing.assert_array_equal(copy, copies[0])
    noise = final[False].std(ddof=1)
    assert abs((final[True] - final[False]).mean()) < noise


def test_no_loop_changes_more_than_three_lines():
    for step in (imagenet_step, wmt_step, nlp_seq_step):
        source = inspect.getsource(step)
        assert 1 <= sum(source.count(mark) for mark in ("# was:", "# new")) <= 3
