"""The tuner of a training step: candidates, races, and a cache of earlier results."""

from cgx_jax.tuner.setting import Setting as Setting
from cgx_jax.tuner.tuner import Tuner as Tuner
