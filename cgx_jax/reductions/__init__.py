"""Reductions: how the ranks' codes become a sum, one file each, independent of transports."""

from cgx_jax.reductions.base import Job as Job
from cgx_jax.reductions.base import Operands as Operands
from cgx_jax.reductions.base import PayloadReduction as PayloadReduction
from cgx_jax.reductions.base import Reduced as Reduced
from cgx_jax.reductions.base import Reduction as Reduction
from cgx_jax.reductions.base import Rows as Rows
from cgx_jax.reductions.gather_sum import GatherSum as GatherSum
from cgx_jax.reductions.levels import Levels as Levels
from cgx_jax.reductions.named import named as named
from cgx_jax.reductions.ring import Ring as Ring
from cgx_jax.reductions.scatter_gather import ScatterGather as ScatterGather
from cgx_jax.reductions.sum_rounds import SumRounds as SumRounds
from cgx_jax.reductions.tree import Tree as Tree
