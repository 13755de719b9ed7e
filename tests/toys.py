"""The smallest compressor of each kind: what "add a compressor" in CONTRIBUTING asks for.

`Steps` can be cut into chunks. So can `Vote`, in which all ranks weigh the same. `Largest` is
sparse and sent whole. `Difference` is sent whole and has state on each rank. `RankOne` is summed in
two rounds and has shared state.
"""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
from jax import lax

from cgx_jax.compressors import PayloadCompressor, Summed, SummedCompressor


def size_of(shape):
    return shape if isinstance(shape, int) else math.prod(shape)


def as_bytes(x):
    return lax.bitcast_convert_type(x, jnp.uint8).reshape(-1)


def from_bytes(payload, dtype, width):
    return lax.bitcast_convert_type(payload.reshape(-1, width), dtype)


class Floats:
    """What the toys have in common."""

    unbiased = False

    def supports(self, dtype):
        return dtype in (jnp.float32, jnp.bfloat16, jnp.float16)


@dataclasses.dataclass(frozen=True)
class Steps(Floats, PayloadCompressor):
    """Whole numbers of steps, as int16; any run of values can be encoded by itself."""

    step: float = 1 / 256

    def wire_bits(self, shape, dtype=jnp.float32):
        return 16 * size_of(shape)

    def error_bound(self, x):
        fits = jnp.abs(x) <= 32767 * self.step
        near = jnp.abs(x.astype(jnp.float32)) * float(jnp.finfo(jnp.result_type(x)).eps)
        return jnp.where(fits, self.step / 2 + near, jnp.inf).astype(jnp.float32)

    def encode(self, x, *, key=None):
        steps = jnp.round(jnp.ravel(x).astype(jnp.float32) / self.step)
        return as_bytes(jnp.clip(steps, -32767, 32767).astype(jnp.int16))

    def decode(self, payload, shape, dtype):
        steps = from_bytes(payload, jnp.int16, 2).astype(jnp.float32)
        return (steps * self.step).reshape(shape).astype(dtype)


@dataclasses.dataclass(frozen=True)
class Vote(Floats, PayloadCompressor):
    """Only signs, one byte per value: the majority decides a sum, so all ranks weigh the same."""

    reductions = ("scatter_gather",)
    owner_exact = False
    feedback_scale = None  # its error may be larger than its input

    def wire_bits(self, shape, dtype=jnp.float32):
        return 8 * size_of(shape)

    def error_bound(self, x):
        return jnp.abs(x).astype(jnp.float32) + 1

    def encode(self, x, *, key=None):
        return lax.bitcast_convert_type(jnp.sign(jnp.ravel(x)).astype(jnp.int8), jnp.uint8)

    def decode(self, payload, shape, dtype):
        return lax.bitcast_convert_type(payload, jnp.int8).astype(dtype).reshape(shape)


@dataclasses.dataclass(frozen=True)
class Largest(Floats, PayloadCompressor):
    """The `share` of values that are largest in magnitude, each with its index."""

    share: float = 0.25

    reductions = ("gather_sum",)

    def _count(self, shape):
        return max(1, math.ceil(self.share * size_of(shape)))

    def wire_bits(self, shape, dtype=jnp.float32):
        return 64 * self._count(shape)

    def error_bound(self, x):
        return jnp.abs(x).astype(jnp.float32)

    def encode(self, x, *, key=None):
        flat = jnp.ravel(x).astype(jnp.float32)
        _, at = lax.top_k(jnp.abs(flat), self._count(x.shape))
        return jnp.concatenate([as_bytes(at.astype(jnp.int32)), as_bytes(flat[at])])

    def decode(self, payload, shape, dtype):
        at, kept = jnp.split(payload, 2)
        flat = jnp.zeros(size_of(shape), jnp.float32)
        flat = flat.at[from_bytes(at, jnp.int32, 4)].set(
            from_bytes(kept, jnp.float32, 4), mode="drop"
        )
        return flat.reshape(shape).astype(dtype)


@dataclasses.dataclass(frozen=True)
class Difference(Steps):
    """Steps of the change since the last step, which every rank remembers of its own gradient.

    A toy: it sends changes and the ranks add them up as if they were gradients.
    """

    reductions = ("gather_sum",)
    feedback_scale = None  # a change does not include what was lost before it

    def init(self, shape, dtype):
        return (jnp.zeros(shape, jnp.float32),)

    def prepare(self, x, state):
        (before,) = state
        return x - before, (x,)


@dataclasses.dataclass(frozen=True)
class RankOne(Floats, SummedCompressor):
    """PowerSGD of rank 1: two rounds of sums, and the last right factor, which all ranks share."""

    shares_state = True

    def _sides(self, shape):
        return shape[0], size_of(shape) // shape[0]

    def init(self, shape, dtype):
        _, columns = self._sides(shape)
        return jnp.asarray(np.random.default_rng(0).normal(size=columns), jnp.float32)

    def wire_bits(self, shape, dtype=jnp.float32):
        return 32 * sum(self._sides(shape))

    def error_bound(self, x):
        flat = x.astype(jnp.float32)
        return jnp.full(x.shape, 1.001 * jnp.linalg.norm(flat.ravel()), jnp.float32)

    def rounds(self, x, state, *, key, world):
        matrix = x.reshape(self._sides(x.shape))
        (left,) = yield [matrix @ state]
        left = left / jnp.maximum(jnp.linalg.norm(left), 1e-20)
        (right,) = yield [matrix.T @ left]
        own = jnp.outer(left, matrix.T @ left)
        return Summed(jnp.outer(left, right).reshape(x.shape), own.reshape(x.shape), right)


class Stateless(RankOne):
    """`RankOne` that starts from its initial state in every step."""

    def init(self, shape, dtype):
        return ()

    def rounds(self, x, state, *, key, world):
        return super().rounds(x, super().init(x.shape, x.dtype), key=key, world=world)
