"""Compressed collectives for JAX: `psum` for gradients at 1 to 8 bits a value.

A JAX/XLA custom-call library after CGX (Markov et al., Middleware 2022).
"""

from cgx_jax._version import __version__ as __version__
from cgx_jax.backward_hook import reduce_in_backward as reduce_in_backward
from cgx_jax.collectives import pmean_compressed as pmean_compressed
from cgx_jax.collectives import psum_compressed as psum_compressed
from cgx_jax.compressors import Cast as Cast
from cgx_jax.compressors import Compressor as Compressor
from cgx_jax.compressors import Identity as Identity
from cgx_jax.compressors import Quantize as Quantize
from cgx_jax.debug import debug_checksums as debug_checksums
from cgx_jax.exchanges.auto import use_profile as use_profile
from cgx_jax.exchanges.profile import Profile as Profile
from cgx_jax.halves import all_gather_compressed as all_gather_compressed
from cgx_jax.halves import psum_scatter_compressed as psum_scatter_compressed
from cgx_jax.kernels.native import backends as backends
from cgx_jax.plain_jit.value_and_grad import value_and_grad as value_and_grad
from cgx_jax.plan import Plan as Plan
from cgx_jax.plan_table import plan_table as plan_table
from cgx_jax.policies.adaptive import Adaptive as Adaptive
from cgx_jax.policies.bayesian import Bayesian as Bayesian
from cgx_jax.policies.least_time import LeastTime as LeastTime
from cgx_jax.policies.rules import Policy as Policy
from cgx_jax.policies.rules import Rule as Rule
from cgx_jax.policies.rules import Rules as Rules
from cgx_jax.policies.rules import Uniform as Uniform
from cgx_jax.policies.solvers import KMeans as KMeans
from cgx_jax.policies.solvers import LeastBytes as LeastBytes
from cgx_jax.policies.solvers import LeastError as LeastError
from cgx_jax.policies.solvers import Linear as Linear
from cgx_jax.reductions import Levels as Levels
from cgx_jax.transforms.memory import ErrorFeedback as ErrorFeedback
from cgx_jax.transforms.memory import MomentumCorrection as MomentumCorrection
from cgx_jax.transforms.precondition import SecondMoment as SecondMoment
from cgx_jax.transforms.state import SyncState as SyncState
from cgx_jax.transforms.state import state_shardings as state_shardings
from cgx_jax.transforms.state import state_specs as state_specs
from cgx_jax.transforms.step_size import restore_step_size as restore_step_size
from cgx_jax.transforms.sync_gradients import sync_gradients as sync_gradients
from cgx_jax.tuning import tune as tune
