"""Every exchange that sends, with its defaults. A new exchange is one row here."""

from __future__ import annotations

from cgx_jax.exchanges.base import Exchange
from cgx_jax.exchanges.mpi import Mpi
from cgx_jax.exchanges.nccl import Nccl
from cgx_jax.exchanges.xla import Xla

# In the order in which `exchange="auto"` prefers them while no profile is active.
EXCHANGES: tuple[Exchange, ...] = (Mpi(), Nccl(), Xla())
