"""The kernels as they are compiled for sm_90, and the launches that the host code makes of a call.

Needs nvcc (CUDA 13) and cuobjdump with nvdisasm; no GPU. `make sass` installs the latter two from
PyPI. Built in build/sass, and again when a source is newer or nvcc is another.
"""

import ctypes
import dataclasses
import fcntl
import functools
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import machine_code

sys.path.append(str(Path(__file__).resolve().parents[1]))

import ptxas

ROOT = Path(__file__).resolve().parents[2]
ARCHITECTURE = "sm_90"
BUILD = ROOT / "build" / "sass"
SOURCES = [
    Path(__file__).with_suffix(".cc"),
    ROOT / "xla_ffi" / "cuda" / "kernels.cu",
    ROOT / "xla_ffi" / "cuda" / "codec.cc",
    ROOT / "xla_ffi" / "format" / "layout.cc",
]
DTYPES = ("f32", "bf16", "f16")  # by their number in C++
MOST = 64  # launches of a call


def cuobjdump() -> str | None:
    """The disassembler: on PATH, or PyPI's."""
    found = importlib.util.find_spec("nvidia.cu13") if importlib.util.find_spec("nvidia") else None
    places = [os.path.join(p, "bin") for p in (found.submodule_search_locations if found else ())]
    return shutil.which("cuobjdump", path=os.pathsep.join([os.environ.get("PATH", ""), *places]))


def missing() -> str | None:
    """What has to be installed before the kernels can be looked at; None when nothing has."""
    if ptxas.nvcc() is None:
        return "no nvcc on PATH, none in CUDACXX: install the CUDA toolkit, 13 or newer"
    if cuobjdump() is None:
        return 'no cuobjdump: pip install "cgx-jax[sass]", which has one for Linux'
    return None


def run(command: list[str]) -> tuple[str, str]:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}:\n{done.stderr}")
    return done.stdout, done.stderr


def build() -> Path:
    """Path of the library; beside it what ptxas printed, nvcc's release and the machine code."""
    compiler, disassembler = ptxas.nvcc(), cuobjdump()
    if compiler is None or disassembler is None:
        raise RuntimeError(missing())
    library, release = BUILD / "libcgx_launches.so", ptxas.release(compiler)
    release_of = library.with_suffix(".nvcc")
    headers = [p for part in ("cuda", "format") for p in (ROOT / "xla_ffi" / part).iterdir()]
    newest = max(p.stat().st_mtime for p in (*SOURCES, *headers))
    BUILD.mkdir(parents=True, exist_ok=True)
    with open(BUILD / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        built = release_of.exists() and release_of.read_text() == release
        if not built or library.stat().st_mtime < newest:
            made = library.with_suffix(".new")
            command = [compiler, *ptxas.FLAGS, f"-arch={ARCHITECTURE}", "-shared", "-cudart=none"]
            command += ["-Xcompiler=-fPIC,-fvisibility=hidden", "-o", str(made)]
            report = run([*command, *map(str, SOURCES)])[1]
            library.with_suffix(".ptxas").write_text(report)
            # Finds nvdisasm on PATH, or beside itself.
            dump = run([disassembler, "-sass", str(made)])[0]
            library.with_suffix(".sass").write_text(dump)
            made.rename(library)
            release_of.write_text(release)
    return library


@dataclasses.dataclass(frozen=True)
class Call:
    """A call on one leaf, as launches.cc has it. Addresses are of a simulated memory."""

    kernel: str
    dtype: str
    size: int
    bits: int
    bucket_size: int
    rounding: int
    number: int
    rotation: bool
    world: int
    rank: int
    divisor: float
    values: int = 0  # addresses; 0: none
    out: int = 0
    payload: int = 0
    chunk: int = 0
    key: int = 0


class _Call(ctypes.Structure):
    _fields_ = [
        ("kernel", ctypes.c_char_p),
        *((name, ctypes.c_int64) for name in ("dtype", "size", "bits", "bucket_size", "rounding")),
        *((name, ctypes.c_int64) for name in ("number", "rotation", "world", "rank")),
        ("divisor", ctypes.c_double),
        *((name, ctypes.c_uint64) for name in ("values", "out", "payload", "chunk", "key")),
    ]


class _Launch(ctypes.Structure):
    _fields_ = [
        ("kernel", ctypes.c_char_p),
        *((name, ctypes.c_int64) for name in ("blocks", "threads", "parameter_bytes")),
        ("parameters", ctypes.c_uint8 * 4096),
    ]


@dataclasses.dataclass(frozen=True)
class Launch:
    kernel: str  # its mangled name
    blocks: int
    threads: int
    parameters: bytes


class Kernels:
    """The compiled kernels. Raises RuntimeError with what a compiler or disassembler printed."""

    def __init__(self) -> None:
        path = build()
        self.compiler = path.with_suffix(".nvcc").read_text()
        self.library = ctypes.CDLL(os.fspath(path))
        self.library.cgx_launches.restype = ctypes.c_char_p
        self.functions = machine_code.functions(path.with_suffix(".sass").read_text())
        report = path.with_suffix(".ptxas").read_text()
        self.compiled = {k.mangled: k for k in ptxas.parse(ARCHITECTURE, report)}

    @functools.cache  # noqa: B019
    def code(self, kernel: str) -> machine_code.Code:
        return machine_code.parse(self.functions[kernel])

    def launches(self, call: Call) -> list[Launch]:
        """The launches of a call. Raises ValueError with what is wrong with it."""
        fields = dataclasses.asdict(call)
        fields["kernel"] = call.kernel.encode()
        fields["dtype"] = DTYPES.index(call.dtype)
        made, count = (_Launch * MOST)(), ctypes.c_int64()
        error = self.library.cgx_launches(
            ctypes.byref(_Call(**fields)), made, ctypes.c_int64(MOST), ctypes.byref(count)
        )
        if error is not None:
            raise ValueError(error.decode())
        return [
            Launch(
                launch.kernel.decode(),
                launch.blocks,
                launch.threads,
                bytes(launch.parameters[: launch.parameter_bytes]),
            )
            for launch in made[: count.value]
        ]
