"""The CUDA compiler keeps all values of the kernels in registers; no GPU is needed."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

SOURCES = Path(__file__).parents[1] / "xla_ffi"
NVCC = os.environ.get("CUDACXX") or shutil.which("nvcc")


@pytest.mark.slow
@pytest.mark.skipif(NVCC is None, reason="no nvcc: install the CUDA toolkit, 13 or newer")
@pytest.mark.parametrize("source", sorted(SOURCES.glob("cuda/*.cu")), ids=lambda path: path.name)
def test_no_kernel_spills_registers(source):
    # The flags are those of cmake/cuda.cmake; ptxas fails and names the kernel that spills.
    flags = ["-std=c++17", "-O3", "-fmad=false", f"-I{SOURCES}", "-cubin", "-arch=sm_90"]
    command = [NVCC, *flags, "-Xptxas=-warn-spills,-Werror", "-o", os.devnull, source]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
