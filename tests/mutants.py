"""Changes the package in small ways, one at a time, and says which changes no quick test notices.

    python tests/mutants.py --python 64 --cpp 20 --json benchmarks/results/mutants.jsonl
    python tests/mutants.py --tests tests/test_plan.py --python 8 --cpp 0     # a quick look

First every quick test runs, and is recorded with the functions that it calls. A mutant of Python is
one changed operator, constant or condition in a function that some test calls, drawn with a fixed
seed, evenly over the modules. The tests that call the function run until one fails, the quickest
first. A mutant of C++ is a changed operator or constant of the CPU kernels, of the wire format or
of the engine of messages, and the C++ unit tests run. Everything happens in a copy in
build/mutants. Needs Python 3.12 or newer, for `sys.monitoring`.
"""

import argparse
import ast
import collections
import importlib.util
import itertools
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "build" / "mutants"
TREE = BUILD / "tree"
LIMIT = 240  # seconds of tests for a mutant; twice as many mean that it never ends

sys.path.append(str(ROOT / "benchmarks"))
if "CGX_MUTANTS" in os.environ:
    # An editable installation would import the package from elsewhere than the copy.
    sys.meta_path[:] = [f for f in sys.meta_path if "Redirecting" not in type(f).__name__]

# Operators and what replaces them.
COMPARISONS = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==",
    ast.Is: "is not", ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in",
}  # fmt: skip
ARITHMETIC = {
    ast.Add: "-", ast.Sub: "+", ast.Mult: "+", ast.Div: "*", ast.FloorDiv: "*", ast.Mod: "+",
    ast.LShift: ">>", ast.RShift: "<<", ast.BitAnd: "|", ast.BitOr: "&",
}  # fmt: skip
# No test is there for a word of a message, for a type, or for what only another platform runs.
IGNORED = (ast.JoinedStr, ast.Raise, ast.Assert, ast.AnnAssign, ast.arguments)
CPP_FOLDERS = ("cpu", "format", "messages")
CPP_TESTS = f"^({'|'.join(CPP_FOLDERS)})/"
CPP = [
    (r" < ", " <= "), (r" <= ", " < "), (r" > ", " >= "), (r" == ", " != "), (r" != ", " == "),
    (r" && ", " || "), (r" \|\| ", " && "), (r" \+ 1\b", " + 2"), (r" - 1\b", " - 2"),
    (r" \+ ", " - "), (r" >> ", " << "), (r"\btrue\b", "false"), (r"\bfalse\b", "true"),
]  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--python", type=int, default=64, help="mutants (default %(default)s)")
    parser.add_argument("--cpp", type=int, default=20, help="mutants (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tests", nargs="*", default=[], help="files to record (default: all)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where the verdicts go")
    parser.add_argument("--again", action="store_true", help="record the tests anew")
    arguments = parser.parse_args()
    shutil.rmtree(TREE, ignore_errors=True)
    ignored = shutil.ignore_patterns("build", ".git", ".venv*", ".*_cache", ".hypothesis")
    shutil.copytree(ROOT, TREE, ignore=ignored)
    (ROOT / ".pytest_cache").mkdir(exist_ok=True)
    (TREE / ".pytest_cache").symlink_to(ROOT / ".pytest_cache")  # with the compiled programs
    native = importlib.util.find_spec("cgx_jax._native")
    if native is None:
        raise SystemExit("mutants: the package has no native module; run `make test` first")
    for module in Path(native.origin).parent.glob("_native*"):
        shutil.copy(module, TREE / "cgx_jax")
    rows = []
    if arguments.python:
        called = recorded(arguments.again, arguments.tests)
        some = sorted({test for tests in called.values() for _, test in tests})[:1]
        if (failed := first_failure(some)) is not None:
            raise SystemExit(f"mutants: {failed} fails without any mutant; see {BUILD}/pytest.log")
        for mutant in python_mutants(called, arguments.python, arguments.seed):
            rows.append(of_python(mutant, called))
            report(rows[-1])
    for mutant in cpp_mutants(arguments.cpp, arguments.seed):
        rows.append(of_cpp(mutant))
        report(rows[-1])
    counts = collections.Counter((row["file"].split("/")[0], row["verdict"]) for row in rows)
    for (part, verdict), count in sorted(counts.items()):
        print(f"{part}: {count} {verdict}")
    if arguments.json:
        import measure

        measure.write_json(arguments.json, rows)
    return 0


def report(row: dict[str, Any]) -> None:
    by = f" by {row['by']}" if row["by"] else ""
    print(f"{row['file']}:{row['line']}: {row['change']}: {row['verdict']}{by}", flush=True)


# --- What tests call.


class Recorder:
    """A plugin of pytest: writes each test's seconds and the package's functions that it calls."""

    def __init__(self, file: Path) -> None:
        self.file, self.found = file, set()
        events = sys.monitoring.events
        sys.monitoring.use_tool_id(sys.monitoring.COVERAGE_ID, "mutants")
        sys.monitoring.register_callback(sys.monitoring.COVERAGE_ID, events.PY_START, self.start)
        sys.monitoring.set_events(sys.monitoring.COVERAGE_ID, events.PY_START)

    def start(self, code: Any, _: int) -> Any:
        if "/cgx_jax/" in code.co_filename:
            name = code.co_filename.rpartition("/cgx_jax/")[2]
            self.found.add(f"cgx_jax/{name}:{code.co_firstlineno}")
        return sys.monitoring.DISABLE  # until the next test

    def pytest_runtest_protocol(self) -> None:
        self.found.clear()
        sys.monitoring.restart_events()

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call" and report.passed:
            row = {"test": report.nodeid, "seconds": report.duration, "calls": sorted(self.found)}
            with self.file.open("a") as file:
                print(json.dumps(row), file=file)


def pytest_configure(config: Any) -> None:
    """As a plugin of pytest: records what a process runs, if that is asked for."""
    folder, worker = os.environ.get("CGX_RECORD"), getattr(config, "workerinput", None)
    if folder and (worker or not config.option.numprocesses):
        name = worker["workerid"] if worker else "main"
        config.pluginmanager.register(Recorder(Path(folder) / f"{name}.jsonl"))


def pytest(arguments: list[str], limit: float | None = None, **variables: str) -> str | None:
    """Runs tests of the copy; returns what they print, or None if they take more than `limit` s."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "mutants", *arguments]
    paths = {"PYTHONPATH": f"{TREE}:{TREE / 'tests'}", "CGX_MUTANTS": "1"}
    log = BUILD / "pytest.log"
    with log.open("w") as out:
        process = subprocess.Popen(
            command,
            cwd=TREE,
            env=os.environ | paths | variables,
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
        try:
            process.wait(limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return None
    return log.read_text()


def recorded(again: bool, tests: list[str]) -> dict[str, list[tuple[float, str]]]:
    """Returns (seconds, test) of each function, as "file:line of its first line"."""
    folder = BUILD / "recorded"
    if again or not folder.exists():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        done = pytest(["-n", "2", "-m", "not slow", *tests], CGX_RECORD=str(folder))
        print(done.splitlines()[-1], flush=True)
    called = collections.defaultdict(list)
    for file in folder.glob("*.jsonl"):
        for line in file.read_text().splitlines():
            row = json.loads(line)
            for function in row["calls"]:
                called[function].append((row["seconds"], row["test"]))
    return called


# --- Mutants of Python.


def python_mutants(called: dict, count: int, seed: int) -> Iterator[dict[str, Any]]:
    """Yields changes of functions that some test calls, from one module after the other."""
    rng = random.Random(seed)
    by_file: dict[str, list[dict[str, Any]]] = {}
    for path in sorted((ROOT / "cgx_jax").rglob("*.py")):
        file = str(path.relative_to(ROOT))
        text = path.read_text()
        found = []
        for function in ast.walk(ast.parse(text)):
            if isinstance(function, ast.FunctionDef):
                first = min([function.lineno, *(d.lineno for d in function.decorator_list)])
                if f"{file}:{first}" in called:
                    found += changes(function, text, {"file": file, "function": first})
        if found:
            by_file[file] = found
    files = sorted(by_file)
    rng.shuffle(files)
    for at in range(count):
        own = by_file[files[at % len(files)]]
        yield own.pop(rng.randrange(len(own))) if len(own) > 1 else own[0]


def changes(function: ast.FunctionDef, text: str, where: dict) -> Iterator[dict[str, Any]]:
    """Yields the changes of one function, each with the part of `text` that it replaces."""
    lines = text.splitlines(keepends=True)
    starts = [0, *itertools.accumulate(map(len, lines))]

    def offset(line: int, column: int) -> int:
        return starts[line - 1] + len(lines[line - 1].encode()[:column].decode())

    def whole(node: Any) -> tuple[int, int]:
        first = offset(node.lineno, node.col_offset)
        return first, offset(node.end_lineno, node.end_col_offset)

    pending: list[ast.AST] = list(function.body)
    while pending:
        node = pending.pop()
        documents = isinstance(node, ast.Expr) and not isinstance(node.value, ast.Call)
        if documents or isinstance(node, (*IGNORED, ast.FunctionDef)):
            continue
        pending += ast.iter_child_nodes(node)
        pair, new, test = None, None, node
        match node:
            case ast.Compare(left=left, ops=[op, *_], comparators=[right, *_]):
                pair, new = (left, right), COMPARISONS.get(type(op))
            case ast.BinOp(left=left, op=op, right=right):
                pair, new = (left, right), ARITHMETIC.get(type(op))
            case ast.BoolOp(op=op, values=[left, right, *_]):
                pair, new = (left, right), "or" if isinstance(op, ast.And) else "and"
            case ast.If(test=test) | ast.IfExp(test=test) | ast.While(test=test):
                first, end = whole(test)
                new = f"not ({text[first:end]})"
            case ast.Constant(value=bool(value)):
                new = str(not value)
            case ast.Constant(value=int(value)):
                new = str(value + 1)
        if new is None:
            continue
        first, end = (whole(pair[0])[1], whole(pair[1])[0]) if pair else whole(test)
        if pair:
            new = f" {new} "
            if {"(", ")"} & set(text[first:end]):  # of operands, not of the operator
                continue
        row = {"line": test.lineno, "start": first, "end": end, "new": new}
        yield {**where, **row, "change": f"{text[first:end].strip()} -> {new.strip()}"}


def of_python(mutant: dict[str, Any], called: dict) -> dict[str, Any]:
    file = TREE / mutant["file"]
    text = file.read_text()
    tests, left = [], float(LIMIT)
    for seconds, test in sorted(called[f"{mutant['file']}:{mutant['function']}"]):
        left -= seconds + 0.02
        if left > 0:
            tests.append(test)
    file.write_text(text[: mutant["start"]] + mutant["new"] + text[mutant["end"] :])
    try:
        by = first_failure(tests)
    finally:
        file.write_text(text)
    row = {key: mutant[key] for key in ("file", "line", "change")}
    return {**row, "verdict": "killed" if by else "survived", "by": by, "tests": len(tests)}


def first_failure(tests: list[str]) -> str | None:
    """Returns the first test that fails, or "time" if they take too long."""
    chosen = BUILD / "chosen.txt"
    chosen.write_text("\n".join(tests))
    command = ["-x", "-rfE", "--no-header", f"@{chosen}"]
    done = pytest(command, 2 * LIMIT)
    if done is None:
        return "time"
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", done, re.MULTILINE)
    if failed:
        return failed[0]
    return None if " passed" in done else "the import"


# --- Mutants of C++.


def cpp_mutants(count: int, seed: int) -> Iterator[dict[str, Any]]:
    rng = random.Random(seed)
    files = [p for f in CPP_FOLDERS for p in sorted((ROOT / "xla_ffi" / f).glob("*.cc"))]
    files += [p for f in CPP_FOLDERS for p in sorted((ROOT / "xla_ffi" / f).glob("*.h"))]
    made = 0
    while made < count:
        path = rng.choice(files)
        lines = path.read_text().splitlines()
        at = rng.randrange(len(lines))
        code = lines[at].partition("//")[0]
        fitting = [(old, new) for old, new in CPP if re.search(old, code)]
        left_out = ("#", "template", "static_assert", "CGX_CHECK", "using ")
        if not fitting or '"' in code or code.strip().startswith(left_out):
            continue
        old, new = rng.choice(fitting)
        file = str(path.relative_to(ROOT))
        made += 1
        changed = re.sub(old, new, code, count=1)
        yield {"file": file, "line": at + 1, "new": changed, "change": f"{code.strip()} -> {new}"}


def of_cpp(mutant: dict[str, Any]) -> dict[str, Any]:
    file = TREE / mutant["file"]
    text = file.read_text()
    lines = text.splitlines()
    row = {key: mutant[key] for key in ("file", "line", "change")}
    lines[mutant["line"] - 1] = mutant["new"]
    build = BUILD / "cpp"
    if not build.exists():
        configure(build)
    file.write_text("\n".join(lines) + "\n")
    try:
        made = compiled(build)
        if made.returncode:
            return {**row, "verdict": "does not compile", "by": None}
        done = subprocess.run(
            ["ctest", "--test-dir", build, "-R", CPP_TESTS, "--stop-on-failure", "--timeout", "60"],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
    finally:
        file.write_text(text)
    by = re.findall(r"\d+ - (\S+) \(", done.stdout)
    return {**row, "verdict": "killed" if by else "survived", "by": by[0] if by else None}


def configure(build: Path) -> None:
    import jaxlib

    include = Path(jaxlib.__file__).parent / "include"
    options = ["-DCMAKE_BUILD_TYPE=Debug", "-DCMAKE_CXX_FLAGS=-O1", "-DCGX_BUILD_MODULE=OFF"]
    options += ["-DCGX_BUILD_TESTS=ON", "-DCGX_BASELINE_ONLY=ON", f"-DCGX_XLA_INCLUDE={include}"]
    subprocess.run(["cmake", "-S", TREE, "-B", build, "-G", "Ninja", *options], check=True)
    compiled(build).check_returncode()


def compiled(build: Path) -> subprocess.CompletedProcess:
    """Builds the tests of the folders that mutants are in, and nothing else."""
    listed = subprocess.run(
        ["ctest", "--test-dir", build, "-N", "-R", CPP_TESTS],
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    names = re.findall(r"Test +#\d+: (\S+)", listed)
    targets = [f"{name.replace('/', '_')}_test" for name in names]
    return subprocess.run(
        ["cmake", "--build", build, "-j", "2", "--target", *targets],
        capture_output=True, check=False,
    )  # fmt: skip


if __name__ == "__main__":
    start = time.perf_counter()
    code = main()
    print(f"{time.perf_counter() - start:.0f} s")
    sys.exit(code)
