"""Policies: which compressor each leaf takes, by rules or by what the gradients look like."""

from cgx_jax.policies.adaptive import Adaptive as Adaptive
from cgx_jax.policies.bayesian import Bayesian as Bayesian
from cgx_jax.policies.least_time import LeastTime as LeastTime
from cgx_jax.policies.rules import Policy as Policy
from cgx_jax.policies.rules import Rule as Rule
from cgx_jax.policies.rules import Rules as Rules
from cgx_jax.policies.rules import Uniform as Uniform
from cgx_jax.policies.solvers import Accordion as Accordion
from cgx_jax.policies.solvers import KMeans as KMeans
from cgx_jax.policies.solvers import LeastBytes as LeastBytes
from cgx_jax.policies.solvers import LeastError as LeastError
from cgx_jax.policies.solvers import Linear as Linear
from cgx_jax.policies.solvers import Problem as Problem
from cgx_jax.policies.solvers import Solver as Solver
from cgx_jax.policies.stages import Stages as Stages
from cgx_jax.policies.stages import density_warmup as density_warmup
