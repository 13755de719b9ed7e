"""Exchanges that have not run on the machines that they are for. Only an instance selects one."""

from cgx_jax.exchanges.experimental.peer import Peer as Peer
