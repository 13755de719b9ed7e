"""The commands of `python -m cgx_jax`, one file per command."""
