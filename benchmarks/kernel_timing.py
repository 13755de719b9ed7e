"""The library of kernel_timing.cc: one CPU kernel at a time on NumPy buffers, without XLA.

`make bench` builds it; by hand:

    cmake -S . -B build/bench -DCGX_BUILD_MODULE=OFF -DCGX_BUILD_BENCHMARKS=ON
    cmake --build build/bench --target cgx_timing
"""

import ctypes
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

BUILD = Path(__file__).resolve().parents[1] / "build" / "bench"
F32 = 0  # the number of this dtype in C++
NONE = np.empty(0, np.uint8)


class _Array(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("bytes", ctypes.c_int64)]


class _Timed(ctypes.Structure):
    _fields_ = [
        ("kernel", ctypes.c_char_p),
        *((name, ctypes.c_int64) for name in ("dtype", "bits", "bucket_size", "rounding")),
        *((name, ctypes.c_int64) for name in ("rotation", "world", "rank", "threads")),
        ("divisor", ctypes.c_double),
        *((name, _Array) for name in ("leaf", "out", "payload", "chunk", "units")),
        ("columns", ctypes.c_int64),
    ]


class _TimedCode(ctypes.Structure):
    _fields_ = [
        ("code", ctypes.c_char_p),
        *((name, ctypes.c_int64) for name in ("threads", "keep", "bucket_size", "levels")),
        *((name, _Array) for name in ("values", "out", "taken")),
    ]


def _array(x: np.ndarray) -> _Array:
    if not x.flags.c_contiguous:
        raise ValueError(
            f"an array of shape {x.shape} and strides {x.strides} is not contiguous; "
            "pass np.ascontiguousarray(x)"
        )
    return _Array(x.ctypes.data, x.nbytes)


def _seconds(call: Callable[..., bytes | None], *arguments: Any) -> float:
    seconds = ctypes.c_double()
    error = call(*arguments, ctypes.byref(seconds))
    if error is not None:
        raise ValueError(error.decode())
    return seconds.value


class Kernels:
    """The kernels of this processor. Raises FileNotFoundError where the library is not built."""

    def __init__(self, build: Path = BUILD) -> None:
        path = next(
            (p for p in build.glob("libcgx_timing.*") if p.suffix in (".so", ".dylib")), None
        )
        if path is None:
            raise FileNotFoundError(f"no libcgx_timing in {build}; build it with\n{__doc__}")
        self.library = ctypes.CDLL(os.fspath(path))
        self.library.cgx_time_kernel.restype = ctypes.c_char_p
        self.library.cgx_time_code.restype = ctypes.c_char_p
        self.library.cgx_time_copy.restype = ctypes.c_char_p
        self.library.cgx_isa.restype = ctypes.c_char_p
        self.library.cgx_set_isa.restype = ctypes.c_bool

    def isas(self) -> list[str]:
        """Instruction sets compiled in and supported here, best first."""
        names = []
        while (name := self.library.cgx_isa(ctypes.c_int64(len(names)))) is not None:
            names.append(name.decode())
        return names

    def set_isa(self, name: str) -> None:
        """Chooses one of isas() for the calls that follow."""
        if not self.library.cgx_set_isa(name.encode()):
            raise ValueError(f"isa {name!r} is not in {self.isas()}")

    def time_kernel(
        self,
        kernel: str,
        leaf: np.ndarray,
        out: np.ndarray,
        payload: np.ndarray,
        chunk: np.ndarray,
        *,
        bits: int,
        bucket_size: int = 512,
        rounding: int = 0,
        rotation: bool = False,
        world: int = 1,
        rank: int = -1,
        threads: int = 1,
        units: np.ndarray = NONE,
        columns: int = 0,
    ) -> float:
        """Seconds of one call with key (1, 2) and leaf number 0.

        `units` is f32[2, rows + columns], NONE for a leaf without units.
        """
        integers = (F32, bits, bucket_size, rounding, rotation, world, rank, threads)
        arrays = (_array(x) for x in (leaf, out, payload, chunk, units))
        timed = _Timed(kernel.encode(), *integers, 1.0, *arrays, columns)
        return _seconds(self.library.cgx_time_kernel, ctypes.byref(timed))

    def time_code(
        self,
        code: str,
        values: np.ndarray,
        out: np.ndarray,
        taken: np.ndarray = NONE,
        *,
        threads: int = 1,
        keep: int = 0,
        bucket_size: int = 512,
        levels: int = 0,
    ) -> float:
        """Seconds of one call of a code other than the wire format, with key (1, 2)."""
        arrays = (_array(x) for x in (values, out, taken))
        timed = _TimedCode(code.encode(), threads, keep, bucket_size, levels, *arrays)
        return _seconds(self.library.cgx_time_code, ctypes.byref(timed))

    def time_copy(self, to: np.ndarray, source: np.ndarray, threads: int) -> float:
        """Seconds of memcpy, split evenly over the threads."""
        if to.nbytes != source.nbytes:
            raise ValueError(f"to has {to.nbytes} bytes and source {source.nbytes}")
        pointers = (ctypes.c_void_p(_array(x).data) for x in (to, source))
        sizes = (ctypes.c_int64(n) for n in (to.nbytes, threads))
        return _seconds(self.library.cgx_time_copy, *pointers, *sizes)
