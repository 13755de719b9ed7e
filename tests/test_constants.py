"""Numbers that Python and the native modules must agree on: a module with others is refused."""

import sys
import types

import pytest

from cgx_jax.kernels import constants, native

MODULES = {"cgx_jax._native": constants.CPU, "cgx_jax_cuda13": constants.CUDA}


def load(monkeypatch, name, exported):
    """Loads a module that exports these constants; None: a module that exports none at all."""
    module = types.ModuleType(name)
    if exported is not None:
        module.constants = lambda: exported
    monkeypatch.setitem(sys.modules, name, module)
    return native._import(name, MODULES[name])


@pytest.mark.parametrize("loaded", [native.module, native.cuda_module])
def test_the_modules_here_agree(loaded):
    module = loaded()
    if module is None:
        pytest.skip("this module is not built")
    own = constants.CPU if loaded is native.module else constants.CUDA
    assert module.constants() == own


@pytest.mark.parametrize("name", MODULES)
def test_equal_constants_are_accepted(monkeypatch, name):
    assert load(monkeypatch, name, dict(MODULES[name])).__name__ == name


@pytest.mark.parametrize(
    ("name", "key"), [(name, key) for name in MODULES for key in MODULES[name]]
)
def test_a_number_that_differs_is_refused(monkeypatch, name, key):
    own = MODULES[name][key]
    said = rf"{name} and cgx_jax differ in {key} \({own + 1} and {own}\): .* Reinstall cgx_jax"
    with pytest.raises(ImportError, match=said):
        load(monkeypatch, name, MODULES[name] | {key: own + 1})


@pytest.mark.parametrize("name", MODULES)
def test_a_module_of_another_age_is_refused(monkeypatch, name):
    own = MODULES[name]
    with pytest.raises(ImportError, match=r"wire_version \(None and \d+\), header_bytes \(None"):
        load(monkeypatch, name, None)
    with pytest.raises(ImportError, match=r"differ in mask_bits \(None and 16\): "):
        load(monkeypatch, name, {k: v for k, v in own.items() if k != "mask_bits"})
    with pytest.raises(ImportError, match=r"differ in newer \(1 and None\): "):
        load(monkeypatch, name, own | {"newer": 1})
