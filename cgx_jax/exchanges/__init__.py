"""Exchanges: ways for payloads to travel, one file each, independent of what the bytes mean."""

from cgx_jax.exchanges.base import Call as Call
from cgx_jax.exchanges.base import Exchange as Exchange
from cgx_jax.exchanges.mpi import Mpi as Mpi
from cgx_jax.exchanges.nccl import Nccl as Nccl
from cgx_jax.exchanges.xla import Xla as Xla
