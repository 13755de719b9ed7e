"""Compressed collectives for JAX: `psum` for gradients at 1 to 8 bits a value.

A JAX/XLA custom-call library after CGX (Markov et al., Middleware 2022).
"""

from cgx_jax.collectives import pmean_compressed as pmean_compressed
from cgx_jax.collectives import psum_compressed as psum_compressed
from cgx_jax.compressors import Cast as Cast
from cgx_jax.compressors import Compressor as Compressor
from cgx_jax.compressors import Identity as Identity
from cgx_jax.compressors import Quantize as Quantize
from cgx_jax.debug import debug_checksums as debug_checksums
from cgx_jax.exchange.choose import use_profile as use_profile
from cgx_jax.exchange.profile import Profile as Profile
from cgx_jax.gradients import reduce_in_backward as reduce_in_backward
from cgx_jax.kernels.native import backends as backends
from cgx_jax.memory import ErrorFeedback as ErrorFeedback
from cgx_jax.memory import MomentumCorrection as MomentumCorrection
from cgx_jax.plain_jit.value_and_grad import value_and_grad as value_and_grad
from cgx_jax.plan import Plan as Plan
from cgx_jax.policy.adaptive import Adaptive as Adaptive
from cgx_jax.policy.bayesian import Bayesian as Bayesian
from cgx_jax.policy.least_time import LeastTime as LeastTime
from cgx_jax.policy.rules import Policy as Policy
from cgx_jax.policy.rules import Rule as Rule
from cgx_jax.policy.rules import Rules as Rules
from cgx_jax.policy.rules import Uniform as Uniform
from cgx_jax.policy.solvers import KMeans as KMeans
from cgx_jax.policy.solvers import LeastBytes as LeastBytes
from cgx_jax.policy.solvers import LeastError as LeastError
from cgx_jax.policy.solvers import Linear as Linear
from cgx_jax.precondition import SecondMoment as SecondMoment
from cgx_jax.sharded import all_gather_compressed as all_gather_compressed
from cgx_jax.sharded import psum_scatter_compressed as psum_scatter_compressed
from cgx_jax.step_size import restore_step_size as restore_step_size
from cgx_jax.sync import SyncState as SyncState
from cgx_jax.sync import state_shardings as state_shardings
from cgx_jax.sync import state_specs as state_specs
from cgx_jax.sync import sync_gradients as sync_gradients
from cgx_jax.tuning import tune as tune

__version__ = "0.1.0"
