"""Debug mode that reports NaNs and infinities by leaf, rank, step and place, on every rank."""

from cgx_jax.nonfinite.watch import all_finite as all_finite
from cgx_jax.nonfinite.watch import debug_nonfinite as debug_nonfinite
from cgx_jax.nonfinite.watch import refuse_skip as refuse_skip
from cgx_jax.nonfinite.watch import watch as watch
from cgx_jax.nonfinite.watch import watching as watching
