"""Compressors: one protocol, one file a family."""

from cgx_jax.compressors.base import Compressor as Compressor
from cgx_jax.compressors.lossless import Cast as Cast
from cgx_jax.compressors.lossless import Identity as Identity
from cgx_jax.compressors.quantize import Quantize as Quantize
