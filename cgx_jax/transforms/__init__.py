"""The reduction as an Optax transformation: its state, what it may keep, and what is around it."""
