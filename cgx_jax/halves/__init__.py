"""The two halves of an all-reduce, for sharded data-parallel training."""

from cgx_jax.halves.calls import all_gather_compressed as all_gather_compressed
from cgx_jax.halves.calls import psum_scatter_compressed as psum_scatter_compressed
from cgx_jax.halves.layers import scan_layers as scan_layers
