"""Imports inside the package point one way, file by file, and never in a circle."""

import ast
import pathlib

import pytest

import cgx_jax

ROOT = pathlib.Path(cgx_jax.__file__).parent
# From low to high: a file imports only from its own room and from rooms above it in this list.
LAYERS = [
    "_version",
    "_types",
    "_compat",
    "arguments",
    "leaves",
    "axes",
    "collective",
    "host",
    "kernels",
    "compressors",
    "exchanges",
    "choice",
    "debug",
    "reductions",
    "policies",
    "plan",
    "route",
    "calls",
    "tuning",
    "transforms",
    "relations",
    "plain_jit",
    "testing",
    "commands",
    "__main__",
    "__init__",
]
EXTENSIONS = ("cgx_jax._native",)


def module_of(path, root):
    parts = ["cgx_jax", *path.relative_to(root).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def modules(root):
    return {module_of(p, root): p for p in sorted(root.rglob("*.py"))}


def imported(module, path, known):
    """Returns the package's modules that a file imports, in any form and at any depth."""
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {a.name for a in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package.split(".")[: len(package.split(".")) + 1 - node.level]
            source = ".".join([*base, *([node.module] if node.module else [])])
            source = source if node.level else node.module
            children = {f"{source}.{a.name}" for a in node.names}
            whole = any(c not in known and c not in EXTENSIONS for c in children)
            found |= (children & known.keys()) | ({source} if whole else set())
        elif (
            isinstance(node, ast.Call)
            and getattr(node.func, "attr", "") == "import_module"
            and isinstance(node.args[0], ast.Constant)
        ):
            found.add(node.args[0].value)
    ours = {m for m in found if m == "cgx_jax" or m.startswith("cgx_jax.")}
    return ours - set(EXTENSIONS)


def room(module):
    return module.split(".")[1] if module != "cgx_jax" else "__init__"


def upward(root):
    """Returns the imports of rooms that are not below, as (file, imported module)."""
    known = modules(root)
    wrong = []
    for module, path in known.items():
        for other in sorted(imported(module, path, known)):
            order = [LAYERS.index(room(m)) for m in (other, module)] if other in known else [1, 0]
            if order[0] > order[1]:
                wrong.append((module, other))
    return wrong


def cycle(root):
    """Returns a circle of files that import each other, or None."""
    known = modules(root)
    graph = {m: imported(m, p, known) & known.keys() for m, p in known.items()}
    done = set()

    def visit(module, path):
        if module in path:
            return [*path[path.index(module) :], module]
        if module in done:
            return None
        for other in sorted(graph[module]):
            if (found := visit(other, [*path, module])) is not None:
                return found
        done.add(module)
        return None

    return next((c for m in graph if (c := visit(m, [])) is not None), None)


def test_assertions_only_narrow_types():
    """`python -O` removes assertions, so nothing may depend on what they check."""
    for path in modules(ROOT).values():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Assert):
                kind = node.test
                an_instance = isinstance(kind, ast.Call) and kind.func.id == "isinstance"
                not_none = isinstance(kind, ast.Compare) and isinstance(kind.ops[0], ast.IsNot)
                assert an_instance or not_none, f"{path}:{node.lineno}"


def test_every_room_has_its_place():
    assert {room(m) for m in modules(ROOT)} == set(LAYERS)


def test_no_import_points_up():
    assert upward(ROOT) == []


def test_nothing_imports_the_experimental_exchanges():
    known = modules(ROOT)
    users = {
        m for m, p in known.items() if any(".experimental" in i for i in imported(m, p, known))
    }
    assert users == {"cgx_jax.exchanges.experimental"}


def test_no_files_import_each_other_in_a_circle():
    assert cycle(ROOT) is None


FORMS = {
    "import cgx_jax": ("cgx_jax", True),
    "import cgx_jax as c": ("cgx_jax", True),
    "from cgx_jax import Quantize": ("cgx_jax", True),
    "import cgx_jax.plan": ("cgx_jax.plan", True),
    "from cgx_jax import plan": ("cgx_jax.plan", True),
    "from cgx_jax.plan import Plan": ("cgx_jax.plan", True),
    "from ..plan import Plan": ("cgx_jax.plan", True),
    "from .. import plan": ("cgx_jax.plan", True),
    "def f():\n    import cgx_jax.plan": ("cgx_jax.plan", True),
    "import importlib\nimportlib.import_module('cgx_jax.plan')": ("cgx_jax.plan", True),
    "from . import other": ("cgx_jax.kernels.other", False),
    "from cgx_jax.axes import Axes": ("cgx_jax.axes", False),
    "from cgx_jax import _native": (None, False),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_import_is_seen(form, tmp_path):
    target, is_upward = FORMS[form]
    (tmp_path / "kernels").mkdir()
    for name in ("__init__", "axes", "plan", "kernels/__init__", "kernels/other"):
        (tmp_path / f"{name}.py").touch()
    (tmp_path / "kernels" / "native.py").write_text(form)
    known = modules(tmp_path)
    found = imported("cgx_jax.kernels.native", known["cgx_jax.kernels.native"], known)
    assert found == ({target} if target else set())
    assert bool(upward(tmp_path)) == is_upward


def test_a_circle_within_a_room_is_found(tmp_path):
    for name, text in {
        "__init__": "",
        "a": "from cgx_jax.r import b",
        "b": "import cgx_jax.r.a",
    }.items():
        (tmp_path / "r").mkdir(exist_ok=True)
        (tmp_path / "r" / f"{name}.py").write_text(text)
    assert cycle(tmp_path) == ["cgx_jax.r.a", "cgx_jax.r.b", "cgx_jax.r.a"]


def test_no_file_of_tests_imports_another():
    for path in sorted(pathlib.Path(__file__).parent.glob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not [n for n in names if n.startswith("test_")], path.name
