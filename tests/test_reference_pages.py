"""Every public name has a docstring, and one place in the reference."""

import importlib
import inspect
import re
from pathlib import Path

import pytest

import cgx_jax

REFERENCE = Path(__file__).parents[1] / "docs" / "reference"
PUBLIC = ("compressors", "exchanges", "policies", "reductions", "transforms")
# Public modules that hold more than their public names.
OF_OTHERS = {
    "cgx_jax.debug.debug_checksums",
    "cgx_jax.kernels.backends",
    "cgx_jax.testing.check_compressor",
    "cgx_jax.testing.check_exchange",
    "cgx_jax.testing.check_reduction",
}


def members(module):
    """The classes and functions of a public module, by name."""
    found = {k: v for k, v in vars(module).items() if not k.startswith("_")}
    return {k: v for k, v in found.items() if inspect.isclass(v) or inspect.isroutine(v)}


def public():
    """The path of each public object: that in its own module, where it has one."""
    paths = {}
    for name, value in members(cgx_jax).items():
        paths[value] = f"cgx_jax.{name}"
    for name in PUBLIC:
        module = importlib.import_module(f"cgx_jax.{name}")
        for member, value in members(module).items():
            paths[value] = f"{module.__name__}.{member}"
    return {*paths.values(), *OF_OTHERS}


def resolved(path):
    module, name = path.rsplit(".", 1)
    return getattr(importlib.import_module(module), name)


def test_the_reference_has_every_public_name_once():
    pages = [re.findall(r"^::: (.*)$", p.read_text(), re.MULTILINE) for p in REFERENCE.glob("*.md")]
    listed = [path for page in pages for path in page]
    assert sorted(listed) == sorted(public())


@pytest.mark.parametrize("path", sorted(public()))
def test_a_public_name_says_what_it_is(path):
    value = resolved(path)
    doc = inspect.getdoc(value)
    assert doc
    assert not doc.startswith(f"{value.__name__}("), "dataclasses write this when nobody else does"
    summary = doc.split("\n")[0]
    assert len(summary) <= 100
