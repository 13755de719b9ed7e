"""Compressed collectives for JAX: `psum` for gradients at 1 to 8 bits per value.

This module has the calls and their most common arguments. `compressors`, `reductions`,
`exchanges`, `policies` and `transforms` have the rest. They also define the protocols for your own
compressors, reductions and exchanges, which `testing` checks. Source: CGX (Markov et al.,
Middleware 2022), GRACE (Xu et al., ICDCS 2021).
"""

from cgx_jax import choice as choice
from cgx_jax import compressors as compressors
from cgx_jax import debug as debug
from cgx_jax import exchanges as exchanges
from cgx_jax import kernels as kernels
from cgx_jax import policies as policies
from cgx_jax import reductions as reductions
from cgx_jax import testing as testing
from cgx_jax import transforms as transforms
from cgx_jax._version import __version__ as __version__
from cgx_jax.calls.layers import scan_layers as scan_layers
from cgx_jax.calls.psum import pmean_compressed as pmean_compressed
from cgx_jax.calls.psum import psum_compressed as psum_compressed
from cgx_jax.calls.reshard import reduced as reduced
from cgx_jax.calls.reshard import reshard as reshard
from cgx_jax.calls.shards import all_gather_compressed as all_gather_compressed
from cgx_jax.calls.shards import psum_scatter_compressed as psum_scatter_compressed
from cgx_jax.choice import use_profile as use_profile
from cgx_jax.compressors import Cast as Cast
from cgx_jax.compressors import Identity as Identity
from cgx_jax.compressors import Quantize as Quantize
from cgx_jax.debug.nonfinite import debug_nonfinite as debug_nonfinite
from cgx_jax.kernels.native import keep_memory as keep_memory
from cgx_jax.plain_jit.manual import drop_manual_axes as drop_manual_axes
from cgx_jax.plain_jit.value_and_grad import value_and_grad as value_and_grad
from cgx_jax.plan import Plan as Plan
from cgx_jax.policies import Adaptive as Adaptive
from cgx_jax.policies import Rule as Rule
from cgx_jax.policies import Rules as Rules
from cgx_jax.route.route import plan_table as plan_table
from cgx_jax.transforms import ErrorFeedback as ErrorFeedback
from cgx_jax.transforms import SecondMoment as SecondMoment
from cgx_jax.transforms import resize_state as resize_state
from cgx_jax.transforms import scatter_gradients as scatter_gradients
from cgx_jax.transforms import state_shardings as state_shardings
from cgx_jax.transforms import state_specs as state_specs
from cgx_jax.transforms import sync_gradients as sync_gradients
from cgx_jax.transforms.backward_hook import reduce_in_backward as reduce_in_backward
from cgx_jax.tuning import Tuner as Tuner
from cgx_jax.tuning.sweep import tune as tune
