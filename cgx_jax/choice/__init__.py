"""Which exchange a fusion buffer takes where the user named none: measured times, or a size."""

from cgx_jax.choice.auto import Auto as Auto
from cgx_jax.choice.auto import use_profile as use_profile
from cgx_jax.choice.profile import Profile as Profile
