"""The two packages have the same version, and a pair of different versions is refused."""

import importlib.util
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

from cgx_jax._version import __version__
from cgx_jax.kernels import native

ROOT = Path(__file__).parents[1]
PACKAGE, CUDA = (
    tomllib.loads((ROOT / path / "pyproject.toml").read_text()) for path in (".", "cmake/cuda13")
)


def test_versions_are_the_same_wherever_they_are_written():
    project, cuda = PACKAGE["project"], CUDA["project"]
    assert project["version"] == cuda["version"] == __version__
    assert cuda["dependencies"] == [f"cgx-jax=={__version__}"]
    assert f"cgx-jax-cuda13=={__version__}" in project["optional-dependencies"]["cuda13"]
    assert f"cgx-jax-cuda13=={__version__}" in native.CUDA_REMEDY


def test_both_are_built_with_the_same_tools():
    assert set(PACKAGE["build-system"]["requires"]) < set(CUDA["build-system"]["requires"])
    assert PACKAGE["project"]["requires-python"] == CUDA["project"]["requires-python"]


def test_kernels_of_another_version_are_refused(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(metadata, "version", lambda name: "0.0.7")
    native.cuda_module.cache_clear()
    with pytest.raises(ImportError, match=r"has version 0\.0\.7, .*pip install cgx-jax-cuda13=="):
        native.cuda_module()
    native.cuda_module.cache_clear()
