"""The tuner of a training step: candidates, their trials, and what earlier runs found."""

from cgx_jax.tuner.setting import Setting as Setting
from cgx_jax.tuner.tuner import Tuner as Tuner
