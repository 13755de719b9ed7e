"""How the processes of a program come to hold the same."""

from __future__ import annotations

import jax
import numpy as np
from jax.experimental import multihost_utils


def gather(number: int) -> list[int]:
    """Every process's 32-bit number, on every process; all of them call it at the same place."""
    if jax.process_count() == 1:
        return [number]
    return multihost_utils.process_allgather(np.uint32(number)).tolist()


def broadcast(message: bytes) -> bytes:
    """Process 0's message, on every process; all of them call it at the same place."""
    if jax.process_count() == 1:
        return message
    length = int(multihost_utils.broadcast_one_to_all(np.int32(len(message))))
    padded = np.zeros(length, np.uint8)
    own = np.frombuffer(message, np.uint8)[:length]
    padded[: own.size] = own
    return np.asarray(multihost_utils.broadcast_one_to_all(padded), np.uint8).tobytes()
