"""Shares values between processes, so that all processes of a program hold the same ones."""

from __future__ import annotations

import functools
import os
import re
import socket
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec


def gather(number: int) -> list[int]:
    """Returns every process's 32-bit number on all processes, which all call it together."""
    return list(map(int, rows([number])[:, 0]))


def rows(values: Any) -> np.ndarray:
    """Returns one row of f64[n] per process on all processes, which all call it together."""
    mine = np.frombuffer(np.asarray(values, np.float64).tobytes(), np.uint8)
    return _gathered(mine).view(np.float64)


def _gathered(mine: np.ndarray) -> np.ndarray:
    """Returns every process's bytes, u8[processes, n]; each may have any number of devices."""
    count = jax.process_count()
    if count == 1:
        return mine[None]
    first = {d.process_index: d for d in reversed(jax.devices())}
    mesh = Mesh(np.array([first[i] for i in range(count)]), ("processes",))
    own = jax.device_put(mine[None], first[jax.process_index()])
    every = jax.make_array_from_single_device_arrays(
        (count, *mine.shape), NamedSharding(mesh, PartitionSpec("processes")), [own]
    )
    with jax.set_mesh(mesh):  # the caller's may be another one
        return np.asarray(_on_all(mesh)(every).addressable_data(0))


@functools.cache
def _on_all(mesh: Mesh) -> Callable[[jax.Array], jax.Array]:
    return jax.jit(lambda x: x, out_shardings=NamedSharding(mesh, PartitionSpec()))


def without_addresses(text: str) -> str:
    """Returns a text of objects without their addresses, which differ between processes."""
    return re.sub(r" at 0x[0-9a-f]+", "", text)


def require_same(own: object, what: str, remedy: str) -> None:
    """Raises ValueError on every process if any has something else than process 0.

    Objects but bytes are compared by their texts.
    """
    data = own if isinstance(own, bytes) else without_addresses(repr(own)).encode()
    digests = gather(zlib.crc32(data))
    if others := [i for i, digest in enumerate(digests) if digest != digests[0]]:
        raise ValueError(f"{what} of processes {others} differ from those of process 0; {remedy}.")


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
    length = int(rows([len(message)])[0, 0])
    padded = np.zeros(length, np.uint8)
    own = np.frombuffer(message, np.uint8)[:length]
    padded[: own.size] = own
    return _gathered(padded)[0].tobytes()


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
