"""The tuner of a training step: candidates, races, and a cache of earlier results."""

from cgx_jax.tuning.setting import Setting as Setting
from cgx_jax.tuning.tuner import Tuner as Tuner
