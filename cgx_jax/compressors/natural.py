"""Natural compression: powers of two, rounded at random."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from cgx_jax._types import Key
from cgx_jax.compressors import buckets
from cgx_jax.compressors.base import PayloadCompressor
from cgx_jax.compressors.packing import size_of
from cgx_jax.kernels import codes
from cgx_jax.kernels.reference import random_bits

LOWEST = -94  # the exponent of code 1
LARGEST = 126  # the last code that is a power of two
_BEFORE = 127 + LOWEST - 1  # the biased exponent of what would be code 0


@dataclasses.dataclass(frozen=True)
class Natural(PayloadCompressor):
    """A sign and a power of two from 2^-94 to 2^31, rounded at random: unbiased, 8 bits per value.

    Its variance is at most |x|² / 8. Magnitudes below 2^-94 become 0 or 2^-94. A value that is not
    finite, or may round to more than 2^31, comes back as NaN. Raises ValueError for a missing key.
    Source: natural compression (Horváth et al., 2019).
    """

    unbiased = True
    needs_key = True
    block_size = 1
    feedback_scale = 1 / (1 + 1 / 8)

    def wire_bits(self, shape: int | Sequence[int], dtype: DTypeLike = jnp.float32) -> int:
        return 8 * size_of(shape)

    def error_bound(self, x: ArrayLike) -> jax.Array:
        magnitude = jnp.abs(jnp.asarray(x).astype(jnp.float32))
        bound = jnp.maximum(magnitude, np.float32(2.0**LOWEST))
        top = np.float32(2.0 ** (LOWEST + LARGEST - 1))
        return buckets.rounded(jnp.where(magnitude <= top, bound, jnp.inf), x)

    def encode(self, x: ArrayLike, *, key: Key = None) -> jax.Array:
        buckets.require_key(self, key)
        flat = jnp.ravel(x).astype(jnp.float32)
        return codes.call("cgx_natural", encode_jnp, buckets.words(key), flat)[0]

    def decode(self, payload: jax.Array, shape: Sequence[int], dtype: DTypeLike) -> jax.Array:
        code = payload.astype(jnp.uint32) & np.uint32(127)
        power = lax.bitcast_convert_type((code + np.uint32(_BEFORE)) << 23, jnp.float32)
        power = jnp.where(code == 0, 0, jnp.where(code > LARGEST, np.float32(np.nan), power))
        return jnp.where(payload >= 128, -power, power).reshape(shape).astype(dtype)


def encode_jnp(words: jax.Array, x: jax.Array) -> list[jax.Array]:
    """The kernel cgx_natural, in plain jnp."""
    rows = lax.bitcast_convert_type(buckets.split(x, buckets.BUCKET), jnp.uint32)
    noise = random_bits(words, 0, 0, *rows.shape)
    magnitude = rows & np.uint32(0x7FFFFFFF)
    # The mantissa is the probability of the next power: adding noise carries into the exponent.
    power = ((magnitude + (noise >> 9)) >> 23).astype(jnp.int32) - _BEFORE
    share = lax.bitcast_convert_type(magnitude, jnp.float32) * np.float32(2.0**-LOWEST)
    uniform = (noise >> 8).astype(jnp.float32) * np.float32(2**-24)
    small = (share + uniform >= 1).astype(jnp.int32)
    code = jnp.where(share < 1, small, jnp.minimum(power, LARGEST + 1)).astype(jnp.uint32)
    code = jnp.where(magnitude >> 23 == 255, np.uint32(LARGEST + 1), code)
    return [(code | ((rows >> 31) << 7)).astype(jnp.uint8).reshape(-1)[: x.size]]
