"""Loads scripts that are not part of the package: the benchmarks, and what makes the documents."""

import importlib.util
import sys
import types
from pathlib import Path

ROOT = Path(__file__).parents[1]


def load(path: str) -> types.ModuleType:
    """Returns the module of a script; `path` is relative to the root of the repository.

    A script can import its neighbors while it loads. Afterwards `sys.path` is as before.
    """
    file = ROOT / path
    name = path.removesuffix(".py").replace("/", "_")  # hides no module of the package
    spec = importlib.util.spec_from_file_location(name, file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look for it
    before = list(sys.path)
    sys.path.append(str(file.parent))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path[:] = before
    return module
