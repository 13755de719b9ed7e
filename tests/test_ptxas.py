"""What the CUDA compiler makes of the kernels; no GPU is needed.

`python benchmarks/ptxas.py` reports it for all architectures.
"""

import pytest

import scripts

ptxas = scripts.load("benchmarks/ptxas.py")
ARCHITECTURE = "sm_90"


@pytest.mark.slow
@pytest.mark.skipif(ptxas.nvcc() is None, reason="there is no nvcc here: it needs CUDA 13")
def test_hot_kernels_keep_their_values_in_registers():
    kernels = ptxas.compile_report(ptxas.nvcc(), ARCHITECTURE)
    assert {k.name for k in kernels} == {
        f"{step}_kernel" for step in ("encode", "reduce", "decode", "accumulate", "peer")
    }
    # For each of 2 table sizes encode x 4, reduce x 4, decode, accumulate x 2; and peer x 2.
    assert [k.held for k in kernels].count(True) == 2 * 11 + 2
    for kernel in kernels:
        assert kernel.spilled == 0, f"{kernel.label} spills {kernel.spilled} bytes"
        if kernel.held:
            assert kernel.warps >= (12 if kernel.name == "peer_kernel" else 16), (
                f"{kernel.label}: {kernel.registers} registers"
            )


@pytest.mark.slow
@pytest.mark.skipif(ptxas.nvcc() is None, reason="there is no nvcc here: it needs CUDA 13")
def test_kernels_of_codes_spill_nothing():
    sources = {
        "codes.cu": {"pack_signs": 1, "largest_of_buckets": 2, "encode_buckets": 2},
        "select.cu": dict.fromkeys(
            ["begin", "count_digits", "find_digit", "count_chosen", "write_chosen"], 1
        ),
    }
    for source, kernels in sources.items():
        text = ptxas.compile_source(ptxas.nvcc(), ARCHITECTURE, source)
        spilled = ptxas.spilled_bytes(text)
        assert len(spilled) == sum(kernels.values())
        for name, number in kernels.items():
            assert sum(f"{name}_kernel" in mangled for mangled in spilled) == number
        assert set(spilled.values()) == {0}, spilled
