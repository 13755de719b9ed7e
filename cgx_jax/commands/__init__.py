"""What `python -m cgx_jax` does: one file a command."""
