"""Compressors: the protocols, and one file a family."""

from cgx_jax.compressors.base import Compressor as Compressor
from cgx_jax.compressors.base import PayloadCompressor as PayloadCompressor
from cgx_jax.compressors.base import Rounds as Rounds
from cgx_jax.compressors.base import Summed as Summed
from cgx_jax.compressors.base import SummedCompressor as SummedCompressor
from cgx_jax.compressors.lossless import Cast as Cast
from cgx_jax.compressors.lossless import Identity as Identity
from cgx_jax.compressors.power_sgd import PowerSGD as PowerSGD
from cgx_jax.compressors.quantize import Quantize as Quantize
