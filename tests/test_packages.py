"""The two packages have the same version, and a pair of different versions is refused."""

import importlib.machinery
import sys
import tomllib
import types
from importlib import metadata
from pathlib import Path

import pytest

from cgx_jax._version import __version__
from cgx_jax.exchanges import nccl
from cgx_jax.kernels import constants, native

ROOT = Path(__file__).parents[1]
PACKAGE, CUDA = (
    tomllib.loads((ROOT / path / "pyproject.toml").read_text()) for path in (".", "cmake/cuda13")
)


def test_versions_are_the_same_wherever_they_are_written():
    project, cuda = PACKAGE["project"], CUDA["project"]
    assert project["version"] == cuda["version"] == __version__
    assert cuda["dependencies"] == [f"cgx-jax=={__version__}"]
    assert f"cgx-jax-cuda13=={__version__}" in project["optional-dependencies"]["cuda13"]


def test_both_are_built_with_the_same_tools():
    assert set(PACKAGE["build-system"]["requires"]) < set(CUDA["build-system"]["requires"])
    assert PACKAGE["project"]["requires-python"] == CUDA["project"]["requires-python"]


@pytest.fixture
def installed(monkeypatch):
    """Provides a function that installs a package of CUDA kernels with a version and a driver."""

    def install(version, driver=0):
        module = types.ModuleType("cgx_jax_cuda13")
        module.__spec__ = importlib.machinery.ModuleSpec(module.__name__, None)
        module.constants, module.handlers = lambda: constants.CUDA, dict
        module.driver_version = lambda: driver
        monkeypatch.setitem(sys.modules, module.__name__, module)
        monkeypatch.setattr(metadata, "version", lambda name: version)
        return module

    asked = native.cuda_module, native.warn_of_missing_cuda
    for function in asked:
        function.cache_clear()
    yield install
    for function in asked:
        function.cache_clear()


def test_kernels_of_another_version_are_refused(installed):
    installed("0.0.7")
    with pytest.raises(ImportError, match=r"has version 0\.0\.7, .*pip install . ./cmake/cuda13"):
        native.cuda_module()


@pytest.mark.parametrize(
    ("driver", "usable"), [(0, True), (12080, False), (13000, True), (14010, True)]
)
def test_a_driver_older_than_the_kernels_is_named(driver, usable, installed):
    module = installed(__version__, driver)
    assert (native.cuda_module() is module) == usable
    if not usable:
        says = r"need a driver for CUDA 13\.0, but NVIDIA's driver here is for CUDA 12\.8; on GPUs"
        with pytest.warns(RuntimeWarning, match=says):
            native.warn_of_missing_cuda()
        assert "driver 580 or newer" in nccl.not_installed()
