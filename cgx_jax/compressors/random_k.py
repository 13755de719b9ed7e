"""Values at random places that all ranks share."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from cgx_jax._types import Key, Pytree
from cgx_jax.compressors import buckets
from cgx_jax.compressors.base import Rounds, Summed, SummedCompressor
from cgx_jax.compressors.packing import size_of
from cgx_jax.compressors.sparse import Keep, kept, store_keep


@dataclasses.dataclass(frozen=True)
class RandomK(SummedCompressor):
    """Values at random places that all ranks share, so that `lax.psum` adds them up: 4 bytes each.

    `keep` is a share of the leaf (float) or a number of values (int). The leaf of n values is cut
    into runs of n / k values, and one value of each run is sent. If `scaled`, it stands for its
    whole run, which makes the code unbiased; the variance is then n / k - 1 times |x|². If not, the
    other values stay in the residual, and the code needs error feedback. A value that is not finite
    makes the whole leaf NaN. Raises as `TopK` does, and ValueError for a missing key. Source: Stich
    et al. (NeurIPS 2018).
    """

    selects: ClassVar[bool] = True

    keep: Keep = 0.01
    scaled: bool = False

    def __post_init__(self) -> None:
        store_keep(self)

    @property
    def unbiased(self) -> bool:
        return self.scaled

    needs_key = True
    shares_noise = True
    carries_nonfinite = True

    @property
    def feedback_scale(self) -> float | None:
        if not self.scaled:
            return 1.0
        return 1 / math.ceil(1 / self.keep) if isinstance(self.keep, float) else None

    def _run(self, size: int) -> int:
        """Returns the length of a run, of which one value is sent."""
        return max(1, -(-size // max(1, kept(self, size))))

    def wire_bits(self, shape: int | Sequence[int], dtype: DTypeLike = jnp.float32) -> int:
        n = size_of(shape)
        return 32 * -(-n // self._run(n))

    def error_bound(self, x: ArrayLike) -> jax.Array:
        magnitude = jnp.abs(jnp.asarray(x).astype(jnp.float32))
        magnitude = jnp.where(jnp.isfinite(magnitude).all(), magnitude, jnp.inf)
        most = max(1, self._run(magnitude.size) - 1) if self.scaled else 1
        return buckets.rounded(magnitude * np.float32(most * (1 + 2.0**-18)), x)

    def error_bound_of_sum(self, x: jax.Array) -> jax.Array:
        # Subnormal partial sums may be flushed to zero before they are scaled.
        run = self._run(math.prod(x.shape[1:])) if self.scaled else 1
        tiny = run * len(x) * float(jnp.finfo(jnp.float32).tiny)
        return super().error_bound_of_sum(x) + np.float32(tiny)

    def rounds(self, x: jax.Array, state: Pytree, *, key: Key, world: int) -> Rounds:
        buckets.require_key(self, key)
        n, run = x.size, self._run(x.size)
        count = -(-n // run)
        assert key is not None
        turns = jax.random.randint(key, (count,), 0, run, jnp.int32)
        at = turns + jnp.arange(count, dtype=jnp.int32) * run
        scale = np.float32(run if self.scaled else 1)
        taken = x.reshape(-1).at[at].get(mode="fill", fill_value=0)
        # No place that is sent may hold the value that is not finite.
        taken = jnp.where(jnp.isfinite(x).all(), taken, jnp.nan)
        (total,) = yield [taken]

        def placed(values: jax.Array) -> jax.Array:
            # Scaled only after the sum: multiples of values that cancel out may leave the range
            # of float32.
            rest = jnp.where(jnp.isfinite(values).all(), jnp.float32(0), jnp.nan)
            leaf = jnp.full(n, rest).at[at].add(values * scale, mode="drop")
            return leaf.reshape(x.shape)

        return Summed(placed(total), placed(taken), state)
