"""Modes that watch every call: bits that differ between ranks, values that are not finite."""

from cgx_jax.debug.checksums import debug_checksums as debug_checksums
