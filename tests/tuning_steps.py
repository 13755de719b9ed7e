"""Steps that do nothing but reduce gradients, for a tuner to choose on."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax

import cgx_jax
from cgx_jax import Quantize, Tuner
from cgx_jax.exchanges import Mpi, Xla
from cgx_jax.policies import training_loop
from cgx_jax.reductions import GatherSum, Levels
from cgx_jax.tuning import Setting
from cgx_jax.tuning.cache import Key
from cgx_jax.tuning.setting import Offered
from worlds import RANKS, first, ranks, with_state

WORLD = 2
MESH = ranks(WORLD)
PSUM, SPLIT, WHOLE = Setting(), Setting(Xla()), Setting(Xla(), GatherSum())
LIKE = {"w": jnp.zeros((64, 64)), "v": jnp.zeros((64, 64)), "bias": jnp.zeros(64)}


def grads(seed=0):
    rng = np.random.default_rng(seed)
    return {k: rng.normal(size=(WORLD, *x.shape)).astype(np.float32) for k, x in LIKE.items()}


def steps_take(monkeypatch, seconds):
    """From here on a step takes what `seconds()` says, by the clock of the training loop."""
    ticks = itertools.cycle([lambda: 0.0, seconds])
    monkeypatch.setattr(training_loop, "clock", lambda: next(ticks)())


class Training:
    """A step that does nothing but reduce gradients by a tuner; `costs` are a step's seconds."""

    def __init__(self, tuner, policy=None, monkeypatch=None, costs=None, **options):
        self.tuner, self.costs, self.now, self.steps = tuner, costs, 0.0, 0
        if policy is None:
            policy = Quantize(4)
        sync = cgx_jax.sync_gradients("data", policy, exchange=tuner, mesh=MESH, **options)
        self.tx = optax.chain(sync, optax.sgd(1.0))
        self.state = self.tx.init(LIKE)
        self.step = tuner.jit(self.sharded(), donate_argnums=1)
        self.ran = []
        if monkeypatch is not None:
            steps_take(monkeypatch, self._cost)

    def _cost(self):
        self.steps += 1
        return self.costs(self.tuner.current, self.steps)

    def sharded(self):
        return with_state(lambda g, s: self.tx.update(first(g), s), MESH, self.state, RANKS)

    def run(self, steps):
        for t in range(steps):
            out, self.state = self.step(grads(t), self.state)
            self.ran.append(self.tuner.current)
        return jax.tree.map(np.asarray, out)


def tuner(policy=None, **options):
    return Tuner(policy, **({"compilations": 3, "rounds": 4, "cache": False} | options))


def costs_of(split, whole, slow=lambda setting, step: 1.0):
    """Seconds of a step: psum takes 1."""
    each = {PSUM: 1.0, SPLIT: split, WHOLE: whole}
    return lambda setting, step: each[setting] * slow(setting, step)


def steps_of(count):
    """Steps of the trials of `count` settings: one to compile, and two in each of four rounds."""
    return count * (1 + 2 * 4)


TRIAL_STEPS = steps_of(2) + steps_of(2)  # two ways, then the faster one and psum


# What a cache may hold, and a key and a value of it.
NEAR = Levels("local")
CACHEABLE = Offered((Mpi(window=4), Xla()), (GatherSum(),), (NEAR, Levels(groups=[[0, 1], [2, 3]])))
KEY = Key({"cpu": "a cpu", "world": 2}, "a" * 32)
FIELDS = Setting(Xla()).to_fields()
