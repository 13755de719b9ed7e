"""Shares values between processes, so that all processes of a program hold the same ones."""

from __future__ import annotations

import os
import socket
import zlib
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils


def gather(number: int) -> list[int]:
    """Returns every process's 32-bit number on all processes, which all call it together."""
    return list(map(int, rows([number])[:, 0]))


def rows(values: Any) -> np.ndarray:
    """Returns one row of f64[n] per process on all processes, which all call it together."""
    mine = np.frombuffer(np.asarray(values, np.float64).tobytes(), np.uint8)
    if jax.process_count() == 1:
        return mine.view(np.float64)[None]
    return np.asarray(multihost_utils.process_allgather(mine)).view(np.float64)


def maximum(values: np.ndarray) -> np.ndarray:
    """Returns the processes' largest values, f64 in the shape of `values`; all call it together."""
    return rows(values.ravel()).max(axis=0).reshape(values.shape)


def hosts() -> int:
    """Counts the machines that the processes run on, by their host names."""
    return len(set(gather(zlib.crc32(socket.gethostname().encode()))))


def broadcast(message: bytes) -> bytes:
    """Returns process 0's message on all processes, which all call it together."""
    if jax.process_count() == 1:
        return message
    length = int(multihost_utils.broadcast_one_to_all(np.int32(len(message))))
    padded = np.zeros(length, np.uint8)
    own = np.frombuffer(message, np.uint8)[:length]
    padded[: own.size] = own
    return np.asarray(multihost_utils.broadcast_one_to_all(padded), np.uint8).tobytes()


def writable(path: str | os.PathLike[str] | None) -> None:
    """Makes the folder that process 0 will write its `path` in; all processes call it together.

    Raises OSError on all of them if process 0 cannot write there. A file that is there stays as it
    is.
    """
    problem = ""
    if path is not None and jax.process_index() == 0:
        file = Path(path)
        try:
            there = file.exists()
            file.resolve().parent.mkdir(parents=True, exist_ok=True)
            if not there or file.is_file() or file.is_dir():
                file.open("a").close()
            if not there:
                file.resolve().unlink()
        except (OSError, ValueError) as error:  # of a name with a null character
            problem = str(error)
    if problem := broadcast(problem.encode()).decode():
        raise OSError(problem)
