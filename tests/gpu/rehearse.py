"""Runs all of tests/gpu/run.sh without a GPU, so that a typo does not cost minutes on one.

    make gpu-rehearsal
    python tests/gpu/rehearse.py PROGRAMS     # a folder with the emulated programs

The programs run on tests/cpp/emulator and the Python steps on the CPU. Scripts stand in for
NVIDIA's tools, for `tc` and for root. If nvcc is available, it also compiles the programs with
CUDA's own headers.

Fails unless every step has run and passed, the results are at most 8 files of at most 16 MB each,
and they fill every row of the tables in docs/measurements/gpu_*.md.
"""

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))
import measure  # noqa: E402
import tables  # noqa: E402

FILES, FILE_BYTES = 8, 16 << 20

PASS_ON = 'while [ "${1#-}" != "$1" ]; do shift 2; done\nexec "$@"'
STANDINS = {
    "nvidia-smi": "echo rehearsal",
    "nvcc": "echo rehearsal",
    "nvidia-cuda-mps-control": '[ "$1" = -d ] || cat >/dev/null',
    "compute-sanitizer": PASS_ON,
    "ncu": PASS_ON,
    "tc": ":",
    "id": "echo 0",
}

# The tables of docs/measurements/gpu_*.md that come from a run, and how many of their columns are
# labels.
LABELS = {
    "gpu_kernels": 2,
    "gpu_machines": 1,
    "gpu_ranks": 4,
    "gpu_sizes": 2,
    "gpu_small": 1,
    "gpu_streams": 2,
    "gpu_codes": 1,
    "gpu_tuned": 1,
}


def main() -> int:
    programs = Path(sys.argv[1]).resolve()
    faults = compile_programs()
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out"
        faults += run(programs, Path(folder), out) or differences(out)
    for fault in faults:
        print(f"rehearsal: {fault}")
    print(f"=== rehearsal {'FAILED' if faults else 'passed'}")
    return 1 if faults else 0


def compile_programs() -> list[str]:
    """Compiles the programs with CUDA's own headers and returns what went wrong."""
    compiler = os.environ.get("CUDACXX") or shutil.which("nvcc")
    if compiler is None:
        print("=== compile: left out, there is no nvcc")
        return []
    command = [compiler, "-std=c++17", "-O0", f"-I{ROOT / 'xla_ffi'}", "-c", "-o", os.devnull]
    programs = sorted(HERE.glob("*.cc"))
    failed = [p for p in programs if subprocess.run([*command, p], check=False).returncode]
    return [f"{compiler} does not compile {path.name}" for path in failed]


def run(programs: Path, folder: Path, out: Path) -> list[str]:
    """Runs every step and returns what went wrong."""
    standins = folder / "standins"
    standins.mkdir()
    for name, body in STANDINS.items():
        (standins / name).write_text(f"#!/bin/sh\n{body}\n")
        (standins / name).chmod(0o755)
    environment = os.environ | {
        "PATH": f"{standins}:{os.environ['PATH']}",
        "PREBUILT": str(programs),
        "PYTHON": sys.executable,
        "REHEARSAL": "1",
        "XLA_FLAGS": "--xla_backend_optimization_level=0",  # programs run once
    }
    done = subprocess.run(
        [HERE / "run.sh", out], env=environment, stdout=subprocess.PIPE, text=True, check=False
    )
    lines = done.stdout.splitlines()
    *steps, end = (line.removeprefix("=== ") for line in lines if line.startswith("=== "))
    faults = [f"step {step}" for step in steps if ": passed (" not in step]
    if done.returncode:
        faults.append(f"run.sh exited with {done.returncode}")
    print(done.stdout if faults else "\n".join([*steps, end]))
    files = list(out.iterdir())
    if len(files) > FILES:
        faults.append(f"{len(files)} files, at most {FILES} come back: {sorted(files)}")
    faults += [
        f"{file.name} has {file.stat().st_size} bytes, at most {FILE_BYTES} come back"
        for file in files
        if file.stat().st_size > FILE_BYTES
    ]
    with tarfile.open(out / "logs.tgz") as logs:
        names = {Path(name).stem for name in logs.getnames()}
    return faults + [f"no log of {s}" for s in steps if s.partition(":")[0] not in names]


def differences(out: Path) -> list[str]:
    """Returns what docs/measurements/gpu_*.md show but these results do not."""
    expected = rows()
    tables.RESULTS = out.parent / "results"
    for machine in ("gpu_h100", "gpu_h200"):
        shutil.copytree(out, tables.RESULTS / machine)
    made = rows()
    faults = [f"the tables lack {row}" for row in sorted(expected - made)]
    *cases, last = measure.rows(out / "kernels.jsonl")
    if last["left_out"] or not any(case["equals_cpu"] for case in cases):
        faults.append(f"kernel_bench left out {last['left_out']} cases")
    return faults


def rows() -> set[tuple]:
    """Returns the rows of the tables: their labels, and which of the other cells are filled."""
    found = set()
    for name, labels in LABELS.items():
        for line in getattr(tables, name)().splitlines()[2:]:
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            found.add((name, *cells[:labels], *map(bool, cells[labels:])))
    return found


if __name__ == "__main__":
    sys.exit(main())
