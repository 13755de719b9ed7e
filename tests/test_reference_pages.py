"""Every public name has a docstring, and one place in the reference."""

import importlib
import inspect
import re
from pathlib import Path

import pytest

import cgx_jax

REFERENCE = Path(__file__).parents[1] / "docs" / "reference"
PUBLIC = (
    "choice",
    "compressors",
    "exchanges",
    "exchanges.experimental",
    "policies",
    "reductions",
    "transforms",
)
# Public modules that hold more than their public names.
OF_OTHERS = {
    "cgx_jax.debug.debug_checksums",
    "cgx_jax.kernels.backends",
    "cgx_jax.testing.check_compressor",
    "cgx_jax.testing.check_exchange",
    "cgx_jax.testing.check_loss",
    "cgx_jax.testing.check_reduction",
}


def members(module):
    """The classes and functions of a public module, by name."""
    found = {k: v for k, v in vars(module).items() if not k.startswith("_")}
    return {k: v for k, v in found.items() if inspect.isclass(v) or inspect.isroutine(v)}


def public():
    """Each public object, and the shortest path to it."""
    modules = [importlib.import_module(f"cgx_jax.{name}") for name in PUBLIC]
    paths = {resolved(path): path for path in OF_OTHERS}
    for module in (*modules, cgx_jax):
        paths |= {value: f"{module.__name__}.{name}" for name, value in members(module).items()}
    return paths


def resolved(path):
    module, name = path.rsplit(".", 1)
    return getattr(importlib.import_module(module), name)


def test_the_reference_has_every_public_name_once():
    pages = [re.findall(r"^::: (.*)$", p.read_text(), re.MULTILINE) for p in REFERENCE.glob("*.md")]
    wanted = [
        # An object in a file of the same name would be taken for the file.
        f"{value.__module__}.{value.__name__}"
        if value.__module__.endswith(f".{value.__name__}")
        else path
        for value, path in public().items()
    ]
    assert sorted(path for page in pages for path in page) == sorted(wanted)


@pytest.mark.parametrize("path", sorted(public().values()))
def test_a_public_name_says_what_it_is(path):
    value = resolved(path)
    doc = inspect.getdoc(value)
    assert doc
    assert not doc.startswith(f"{value.__name__}("), "dataclasses write this when nobody else does"
    summary = doc.split("\n")[0]
    assert len(summary) <= 100
