"""Builds in adverse circumstances: each succeeds, or its last lines name the problem and a remedy.

    make builds

The source is a copy of the files that git knows, without .git, in a folder whose name has spaces
and letters beyond ASCII. PATH is a folder of scripts that call the tools of a build. Some tools are
left out, and some scripts pretend:

- an old compiler calls itself GCC 4.8 and refuses -std=c++17;
- an old nvcc says that its release is 12.2;
- a Python lacks venv, or Python.h, when make asks it for them.

CMake also looks for compilers outside PATH, so the cases without a compiler tell it not to. Builds
that fail do so before anything is compiled. One build compiles everything: that of the sdist, under
LC_ALL=C, from a read-only source. Its wheel is installed without a network, and checked by
`python -O`, which runs no `assert`. If it has CUDA kernels, the tests that need them run with it.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
LAST = 25  # last lines of pip's output, which a reader sees at once
COMPILERS = ("c++", "cc", "clang", "clang++", "g++", "gcc")
TOOLS = (
    *COMPILERS,
    *("ar", "as", "cmake", "ld", "make", "ninja", "nm", "objcopy", "ranlib", "strip", "uname"),
    *("cat", "chmod", "cp", "dirname", "env", "find", "grep", "mkdir", "rm", "sed", "sh", "touch"),
)
# Variables that a user's shell may set, and that could point the build to what is left out.
UNSET = ("CC", "CXX", "CUDACXX", "CUDA_PATH", "MAKEFLAGS", "MAKELEVEL", "MFLAGS", "NATIVE")
UNSET += ("PYTHON", "PYTHONPATH", "VENV", "VIRTUAL_ENV", "XLA_FLAGS")
GNU = shutil.which("g++") or ""
OLD_COMPILER = f"""
for option in "$@"; do
  case $option in -std=*17|-std=*1z|-std=*2*)
    echo "c++: error: unrecognized command line option '$option'" >&2; exit 1;;
  esac
done
exec {GNU} -std=gnu++98 -U__GNUC__ -D__GNUC__=4 -U__GNUC_MINOR__ -D__GNUC_MINOR__=8 "$@"
"""
NVCC = "echo 'Cuda compilation tools, release {release}, V{release}.1'"
PYTHON = f'case "$*" in *{{asked}}*) {{answer}};; esac; exec "{sys.executable}" "$@"'
NO_SYSTEM_PATH = ("-C", "cmake.define.CMAKE_FIND_USE_CMAKE_SYSTEM_PATH=OFF")
CPU_REMEDY = ("sudo apt-get install g++", "name the compiler in CXX", "cgx.native=off")
CUDA_TESTS = ("tests/test_aot.py", "tests/test_codes.py::test_cuda_calls_what_has_a_kernel")
CUDA_REMEDY = ("install the CUDA toolkit, 13 or newer", "CUDACXX", "cgx.native=on")


class Build(NamedTuple):
    """A build by pip: the value of `-C cgx.native=`, and what pip's last lines say if it fails."""

    native: str
    says: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    scripts: Mapping[str, str] = {}
    options: tuple[str, ...] = ()


BUILDS = {
    "no kernels asked for": Build("off"),
    "no C++ compiler": Build("auto", (), COMPILERS, options=NO_SYSTEM_PATH),
    "no C++ compiler, kernels asked for": Build(
        "on", ("CMAKE_CXX_COMPILER not set", *CPU_REMEDY), COMPILERS, options=NO_SYSTEM_PATH
    ),
    "a compiler older than C++17": Build(
        "on",
        ("(GNU 4.8", "does not compile C++17", *CPU_REMEDY),
        scripts={"c++": OLD_COMPILER, "g++": OLD_COMPILER},
    ),
    "no nvcc, CUDA kernels asked for": Build("cuda", ("there is no nvcc:", *CUDA_REMEDY)),
    "nvcc of CUDA 12.2": Build(
        "cuda",
        ("is of CUDA 12.2, older than 13:", *CUDA_REMEDY),
        scripts={"nvcc": NVCC.format(release="12.2")},
    ),
    "an option that there is not": Build("gpu", ("cgx.native must be auto, on, cuda or off",)),
}


class Make(NamedTuple):
    """A call of make, whether it succeeds, and what it says."""

    arguments: tuple[str, ...]
    succeeds: bool
    says: tuple[str, ...]
    scripts: Mapping[str, str] = {}
    without: tuple[str, ...] = ()


VERSION = f"{sys.version_info[0]}.{sys.version_info[1]}"
AS_IT_IS = {"python3": PYTHON.format(asked="nothing", answer="")}
MAKE = {
    "no Python": Make(
        (".venv/.stamps/venv",),
        False,
        ("no Python >= 3.11 among: python3.14 ", "apt-get install python3", "make PYTHON="),
    ),
    "Python without venv": Make(
        (".venv/.stamps/venv",),
        False,
        ("has no venv module", f"apt-get install python{VERSION}-venv"),
        {"python3": PYTHON.format(asked="ensurepip", answer="exit 1")},
    ),
    "Python without headers": Make(
        (".venv/.stamps/venv",),
        False,
        ("has no Python.h", f"apt-get install python{VERSION}-dev"),
        {"python3": PYTHON.format(asked="get_path*include", answer="echo /nowhere; exit")},
    ),
    "no room for the environment": Make(
        ("README.md/.venv/.stamps/venv", "VENV=README.md/.venv"),
        False,
        ("README.md/.venv cannot be made here", "make VENV="),
        AS_IT_IS,
    ),
    "no C++ compiler": Make(
        (".venv/.stamps/package", "-o", ".venv/.stamps/venv"),
        False,
        ("no C++17 compiler among: c++ g++ clang++", "apt-get install g++", "make CXX="),
        without=COMPILERS,
    ),
} | {
    f"nvcc of CUDA {release}": Make(
        ("builds", "-n"),
        True,
        (f"tests/builds.py {native} ",),
        AS_IT_IS | {"nvcc": NVCC.format(release=release)},
    )
    for release, native in (("12.2", "on"), ("13.0", "cuda"))
}

CHECK = """
import importlib.resources, sys
import jax.numpy as jnp
import cgx_jax
from cgx_jax.testing import check_compressor

def require(holds, wrong):
    if not holds:
        sys.exit(f"builds: {wrong}")

class Wrong(cgx_jax.Quantize):
    def wire_bits(self, shape, dtype=None):
        return 0.5

require(not __debug__, "this Python runs assertions")
require("site-packages" in cgx_jax.__file__, cgx_jax.__file__)
require(importlib.resources.files(cgx_jax).joinpath("py.typed").is_file(), "py.typed is missing")
backends = cgx_jax.kernels.backends()
print(f"    {backends}")
for platform, kernels in zip(("cpu", "cuda"), sys.argv[1:]):
    require(backends[platform].startswith(kernels), f"no {kernels} kernels for {platform}")
code, x = cgx_jax.Quantize(4), jnp.linspace(-1, 1, 5000)
back = code.decode(code.encode(x), x.shape, x.dtype)
require((abs(back - x) <= code.error_bound(x)).all(), "values come back wrong")
try:
    check_compressor(Wrong(4))
except AssertionError:
    sys.exit()
require(False, "check_compressor passes a wrong compressor")
"""


class Failed(Exception):
    """A case with a wrong outcome, with what was printed."""


def run(
    command: Iterable[str | Path], folder: Path, path: Path | None = None, **variables: str
) -> tuple[bool, str]:
    """Whether a command succeeds, and what it prints; `path` is the whole PATH."""
    environment = {k: v for k, v in os.environ.items() if k not in UNSET} | variables
    if path is not None:
        environment["PATH"] = str(path)
    done = subprocess.run(
        list(map(str, command)),
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )
    return done.returncode == 0, done.stdout.decode(errors="replace")


def must(command: Iterable[str | Path], folder: Path, **variables: str) -> str:
    """Runs a command that has to succeed; returns what it prints."""
    good, printed = run(command, folder, **variables)
    return printed if good else fail("a command failed", printed)


def fail(why: str, printed: str) -> str:
    raise Failed(f"{why}\n{printed}")


def require_words(says: Iterable[str], printed: str) -> None:
    """Raises Failed unless the last lines say all of it, wherever they are wrapped."""
    last = " ".join(" ".join(printed.splitlines()[-LAST:]).split())
    for words in says:
        if words.strip() not in last:
            fail(f"the last {LAST} lines do not say {words!r}", printed)


def copy_source(to: Path) -> list[str]:
    """Copies the files that git knows, or would add; returns their names."""
    listed = must(["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], ROOT)
    names = sorted(n for n in set(listed.split("\0")) if n and (ROOT / n).is_file())
    for name in names:
        (to / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, to / name)
    return names


def toolbox(folder: Path, without: Iterable[str], scripts: Mapping[str, str]) -> Path:
    """Makes a folder with the tools of a build, each a script."""
    found = {name: shutil.which(name) for name in TOOLS if name not in set(without)}
    bodies = {name: f'exec "{path}" "$@"' for name, path in found.items() if path}
    folder.mkdir()
    for name, body in (bodies | dict(scripts)).items():
        (folder / name).write_text(f"#!/bin/sh\n{body}\n")
        (folder / name).chmod(0o755)
    return folder


class Builds:
    """The folders of a run, and its cases."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.source = folder / "Käse und Brot" / "source"
        self.unpacked = self.source
        self.names = copy_source(self.source)
        self.python = folder / "venv" / "bin" / "python"
        self.pip = (self.python, "-m", "pip", "--disable-pip-version-check")

    def prepare(self) -> None:
        """Makes the environment that builds and installs, with what pyproject.toml requires."""
        must([sys.executable, "-m", "venv", self.python.parents[1]], self.folder)
        wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
        tools = [name for name in ("cmake", "ninja") if shutil.which(name) is None]
        must([*self.pip, "install", "--quiet", *wanted, *tools], self.folder)

    def wheel(self, source: Path, native: str, *options: str) -> tuple[str | Path, ...]:
        """Returns the command that builds a wheel into the folder named `native`."""
        setting = ("-C", f"cgx.native={native}", "--wheel-dir", self.folder / native)
        return (*self.pip, "wheel", "--no-deps", "--no-build-isolation", *setting, *options, source)

    def build(self, name: str, case: Build) -> None:
        """A build by pip with the tools of the case."""
        if OLD_COMPILER in case.scripts.values() and not GNU:
            print("    left out: it needs g++, and there is none")
            return
        path = toolbox(self.folder / f"tools for {name}", case.without, case.scripts)
        command = self.wheel(self.source, case.native, *case.options)
        good, printed = run(command, self.folder, path)
        if good != (not case.says):
            fail("it fails" if case.says == () else "it succeeds", printed)
        require_words(case.says, printed)
        if good and (modules := self.modules(case.native)):
            fail("kernels are in the wheel", str(modules))

    def make(self, name: str, case: Make) -> None:
        """A call of make with the tools of the case."""
        path = toolbox(self.folder / f"tools of make, {name}", case.without, case.scripts)
        # pyenv's Pythons are searched in the home folder.
        good, printed = run(["make", *case.arguments], self.source, path, HOME=str(self.folder))
        if good != case.succeeds:
            fail("it succeeds" if good else "it fails", printed)
        require_words(case.says, printed)

    def sdist(self) -> None:
        """Checks that the sdist, and the sdist of that sdist, hold the source's files."""
        settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["scikit-build"]
        left_out = tuple(settings["sdist"]["exclude"])
        kept = {name for name in self.names if not name.startswith(left_out)}
        for again in ("", " again"):
            to = self.folder / f"sdist{again}"
            hook = "import sys, scikit_build_core.build as b; b.build_sdist(sys.argv[1])"
            must([self.python, "-c", hook, to], self.unpacked)
            (archive,) = to.glob("*.tar.gz")
            shutil.unpack_archive(archive, self.source.parent / to.name)
            (self.unpacked,) = (self.source.parent / to.name).iterdir()
            files = (p for p in self.unpacked.rglob("*") if p.is_file())
            inside = {str(p.relative_to(self.unpacked)) for p in files}
            if inside != {*kept, "PKG-INFO"}:
                fail("files differ", str(sorted(inside ^ {*kept, "PKG-INFO"})))

    def compile(self, native: str) -> None:
        """Builds the wheel of the unpacked sdist, which is read-only, under LC_ALL=C."""
        source = self.unpacked
        before = snapshot(source)
        for path in [source, *source.rglob("*")]:
            path.chmod(path.stat().st_mode & ~0o222)
        # One architecture compiles in a fraction of the time.
        define = "cmake.define.CMAKE_CUDA_ARCHITECTURES=90-real"
        must(self.wheel(source, native, "-C", define), self.folder, LC_ALL="C")
        if snapshot(source) != before:
            fail("the build changed the source", str(snapshot(source) - before))
        modules = self.modules(native)
        if modules != {"cgx_jax/_native"} | ({"cgx_jax_cuda13"} if native == "cuda" else set()):
            fail("the wheel has other modules", str(modules))

    def modules(self, native: str) -> set[str]:
        """The native modules in a wheel."""
        (wheel,) = (self.folder / native).glob("cgx_jax-*.whl")
        names = zipfile.ZipFile(wheel).namelist()
        return {name.partition(".")[0] for name in names if name.endswith(".so")}

    def install(self, native: str) -> None:
        """Installs the wheel without a network, and checks it from outside the source tree."""
        (wheel,) = (self.folder / native).glob("cgx_jax-*.whl")
        must([*self.pip, "install", "--quiet", wheel], self.folder)
        alone = next((c for c in (["unshare", "-n"], ["unshare", "-rn"]) if able(c)), [])
        if not alone:
            print("    with a network: `unshare -n` is missing or refused here")
        options = ("--no-index", "--no-deps", "--force-reinstall")
        must([*alone, *self.pip, "install", "--quiet", *options, wheel], self.folder)
        kernels = ["jnp" if native == "off" else "native", "native" if native == "cuda" else "jnp"]
        command = [self.python, "-O", "-P", "-W", "ignore", "-c", CHECK, *kernels]
        print(must(command, self.folder), end="")

    def cuda_tests(self, native: str) -> None:
        """Runs the tests that need the CUDA module, with the wheel's."""
        (wheel,) = (self.folder / native).glob("cgx_jax-*.whl")
        with zipfile.ZipFile(wheel) as archive:
            (module,) = (n for n in archive.namelist() if n.startswith("cgx_jax_cuda13."))
            archive.extract(module, self.folder / "module")
        command = [sys.executable, "-m", "pytest", "-q", *CUDA_TESTS]
        print(must(command, ROOT, PYTHONPATH=str(self.folder / "module")), end="")


def able(command: list[str]) -> bool:
    """Whether a command that runs others works here."""
    return bool(shutil.which(command[0])) and run([*command, "true"], ROOT)[0]


def snapshot(source: Path) -> set[tuple[str, int]]:
    """Every file and folder, and when it changed."""
    return {(str(p), p.stat().st_mtime_ns) for p in [source, *source.rglob("*")]}


def main() -> int:
    native = sys.argv[1] if len(sys.argv) > 1 else "on"
    with tempfile.TemporaryDirectory() as folder:
        builds = Builds(Path(folder))
        builds.prepare()
        whole = f"cgx.native={native}"
        cases = [
            *((f"make: {name}", builds.make, (name, case)) for name, case in MAKE.items()),
            *((name, builds.build, (name, case)) for name, case in BUILDS.items()),
            ("the sdist, and the sdist's sdist", builds.sdist, ()),
            (f"{whole}, of the sdist, read-only, LC_ALL=C", builds.compile, (native,)),
            (f"the wheel of {whole}, without a network, python -O", builds.install, (native,)),
            ("the wheel of cgx.native=off, the same", builds.install, ("off",)),
        ]
        if native == "cuda":
            cases.append(("tests of the CUDA module", builds.cuda_tests, (native,)))
        failed = 0
        for name, case, arguments in cases:
            print(f"  {name}", flush=True)
            try:
                case(*arguments)
            except Failed as error:
                failed += 1
                print(f"    FAILED: {error}", flush=True)
    print(f"{len(cases) - failed} builds passed, {failed} failed")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
