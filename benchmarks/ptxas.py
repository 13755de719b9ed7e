"""What the compiler says of the CUDA kernels: registers, spills, and the warps that fit.

    python benchmarks/ptxas.py                     # every architecture the package is built for
    python benchmarks/ptxas.py --architectures sm_90

Needs nvcc (CUDA 13), no GPU. `warps` is how many of a multiprocessor's warps the registers leave
room for; `held` kernels are those for buckets of up to 512 values, which is what most buffers take.
They come in two sizes of parameters, for tables of few `pieces` and of many; only `peer_kernel`
comes in one.
"""

import argparse
import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

SOURCES = Path(__file__).resolve().parents[1] / "xla_ffi"
ARCHITECTURES = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")
WARPS = {"sm_80": 64, "sm_86": 48, "sm_89": 48, "sm_90": 64, "sm_100": 64, "sm_120": 48}
REGISTERS = 65536  # of a multiprocessor
BLOCK_WARPS = {"peer_kernel": 12}  # others: 4
# As the package is built, and with the compiler's report.
FLAGS = ("-std=c++17", "-O3", "-fmad=false", "-Xptxas=-v", f"-I{SOURCES}")


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One kernel as it is compiled: `pieces` and `arguments` are its template's.

    `pieces` is None for a kernel that comes in one size.
    """

    architecture: str
    name: str
    pieces: int | None
    arguments: tuple[str, ...]
    registers: int
    spilled: int
    mangled: str

    @property
    def label(self) -> str:
        return self.name + (f"<{', '.join(self.arguments)}>" if self.arguments else "")

    @property
    def held(self) -> bool:
        """Whether it is for buckets of one tile (or for every bucket)."""
        return not self.arguments or self.arguments[0] in ("1", "false", "true")

    @property
    def warps(self) -> int:
        block = BLOCK_WARPS.get(self.name, 4)
        allocated = -(-self.registers // 8) * 8 * 32 * block
        return min(REGISTERS // allocated, WARPS[self.architecture] // block) * block


def nvcc() -> str | None:
    """The compiler, as the build finds it."""
    return os.environ.get("CUDACXX") or shutil.which("nvcc")


def compile_source(compiler: str, architecture: str, source: str) -> str:
    """Compiles a file of `xla_ffi/cuda` as the build does; returns what ptxas prints."""
    command = [compiler, *FLAGS, "-cubin", f"-arch={architecture}", "-o", os.devnull]
    command += [str(SOURCES / "cuda" / source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}:\n{done.stderr}")
    return done.stderr


def compile_report(compiler: str, architecture: str) -> list[Kernel]:
    """The kernels of fusion buffers."""
    sources = ("kernels.cu", "peer.cu")
    texts = (compile_source(compiler, architecture, source) for source in sources)
    return [kernel for text in texts for kernel in parse(architecture, text)]


def spilled_bytes(text: str) -> dict[str, int]:
    """What every kernel spills, by its mangled name, of what ptxas prints."""
    found = {}
    for part in text.split("Compiling entry function '")[1:]:
        found[part.split("'")[0]] = max(map(int, re.findall(r"(\d+) bytes spill", part)))
    return found


def parse(architecture: str, text: str) -> list[Kernel]:
    kernels = []
    for part in text.split("Compiling entry function '")[1:]:
        mangled = part.split("'")[0]
        # The anonymous namespace's name, which holds the file's, is followed by the kernel's.
        name = re.search(r"\d+([a-z]+_kernel)I((?:L[ib]\d+E)+)E", mangled)
        spills = re.findall(r"(\d+) bytes spill (?:stores|loads)", part)
        registers = re.search(r"Used (\d+) registers", part)
        if not (name and spills and registers):
            raise RuntimeError(f"ptxas said something unexpected:\n{part}")
        arguments = re.findall(r"L([ib])(\d+)E", name[2])
        pieces = None if name[1] == "peer_kernel" else int(arguments.pop(0)[1])
        kernels.append(
            Kernel(
                architecture,
                name[1],
                pieces,
                tuple(v if kind == "i" else ("false", "true")[int(v)] for kind, v in arguments),
                int(registers[1]),
                max(map(int, spills)),
                mangled,
            )
        )
    return sorted(kernels, key=lambda k: (k.name, k.arguments, k.pieces or 0))


def release(compiler: str) -> str:
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True)
    found = re.search(r"release [\d.]+, V([\d.]+)", version.stdout)
    return found[1] if found else version.stdout


def write(path: Path, compiler: str, kernels: list[Kernel]) -> None:
    rows = [
        {
            "architecture": k.architecture,
            "kernel": k.label,
            "pieces": k.pieces,
            "held": k.held,
            "registers": k.registers,
            "warps": k.warps,
            "spilled_bytes": k.spilled,
        }
        for k in kernels
    ]
    command = " ".join(["python", os.path.relpath(sys.argv[0]), *sys.argv[1:]])
    run = {"command": command, "nvcc": release(compiler), "rows": rows}
    path.write_text(json.dumps([run], indent=1) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--architectures", default=",".join(ARCHITECTURES), help="list")
    parser.add_argument("--all", action="store_true", help="also the kernels of longer buckets")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers here")
    arguments = parser.parse_args()
    compiler = nvcc()
    if compiler is None:
        sys.exit("ptxas: no nvcc on PATH, none in CUDACXX; install the CUDA toolkit, 13 or newer")
    architectures = arguments.architectures.split(",")
    reports = [compile_report(compiler, a) for a in architectures]
    if arguments.json is not None:
        write(arguments.json, compiler, [kernel for report in reports for kernel in report])
    print(f"{'kernel':<34}{'pieces':>7}" + "".join(f"{a:>22}" for a in architectures))
    for row in zip(*reports, strict=True):
        if arguments.all or row[0].held:
            cells = (f"{k.registers} regs, {k.warps} warps" for k in row)
            spills = sum(k.spilled for k in row)
            print(
                f"{row[0].label:<34}{row[0].pieces or '':>7}"
                + "".join(f"{c:>22}" for c in cells)
                + (f"  {spills} bytes spilled" if spills else "")
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
