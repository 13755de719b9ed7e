"""The benchmarks' library of kernels: what Python hands to C++ is what C++ may read."""

import numpy as np
import pytest

import scripts


@pytest.fixture
def timing():
    return scripts.load("benchmarks/kernel_timing.py")


@pytest.mark.parametrize("view", [np.s_[:, ::2], np.s_[::-1], np.s_[:, :3]], ids=str)
def test_arrays_that_are_not_contiguous_are_refused(timing, view):
    x = np.zeros((4, 6), np.float32)
    assert timing._array(x).bytes == 96
    with pytest.raises(ValueError, match=r"strides .* is not contiguous; pass np.ascontig"):
        timing._array(x[view])
