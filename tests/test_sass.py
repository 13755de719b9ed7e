"""The CUDA kernels' machine code, run instruction by instruction; no GPU is needed."""

import dataclasses
import json

import cost  # this and what is imported beside it: benchmarks/sass
import launches
import numpy as np
import pytest
from kernel_cases import Case, run, run_on

lacking = launches.missing()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(lacking is not None, reason=f"the kernels' machine code: {lacking}"),
]
FAST = [
    "encode 4 f32",
    "encode 4 bf16",
    "encode 4 f32 stochastic",
    "encode 4 f32 residual",
    "decode 4 f32",
    "decode 4 f16",
    "reduce 4 f32 w8",
    "accumulate 4 f32 p8",
]


@pytest.fixture(scope="module")
def kernels():
    return launches.Kernels()


@pytest.fixture
def measured(kernels, monkeypatch):
    """`cost.measure` without simulated times, which take the longest."""
    monkeypatch.setattr(cost.multiprocessor, "share_of_copy", lambda *_: 1.0)
    return lambda name: cost.measure(kernels, name)


@pytest.fixture
def committed(kernels):
    (results,) = json.loads(cost.RESULTS.read_text())
    if results["nvcc"] != kernels.compiler:
        pytest.skip(f"the ceilings are of nvcc {results['nvcc']}, and here is {kernels.compiler}")
    return {row["case"]: row for row in results["rows"]}


@pytest.mark.parametrize("name", FAST)
def test_kernels_keep_their_bytes_and_take_no_more_instructions(measured, committed, name):
    assert cost.failures(measured(name), committed[name]) == []


def test_every_check_fails_where_it_should(measured, committed):
    row = measured("encode 4 f32")
    better = {**committed["encode 4 f32"]}
    better["instructions"] -= 1
    assert [f.split(":")[0] for f in cost.failures(row, better)] == ["instructions"]
    better["waits"] -= 1
    assert [f.split(":")[0] for f in cost.failures(row, better)] == ["instructions", "waits"]
    for change in ({"bytes_ok": False}, {"share": {"H100": 0.94}}):
        assert len(cost.failures(row | change, None)) == 1, change


def test_the_command_fails_where_a_ceiling_is_lowered_by_one(
    measured, committed, tmp_path, monkeypatch, capsys
):
    name = "decode 4 f32"
    monkeypatch.setattr(cost.sys, "argv", ["cost.py", name])
    assert cost.main() == 0
    (results,) = json.loads(cost.RESULTS.read_text())
    for row in results["rows"]:
        row["instructions"] -= 1
    lowered = tmp_path / "sass.json"
    lowered.write_text(json.dumps([results]))
    monkeypatch.setattr(cost, "RESULTS", lowered)
    assert cost.main() == 1
    assert f"FAILED: {name}: instructions: " in capsys.readouterr().out


def test_the_command_fails_where_a_kernel_spills(kernels, monkeypatch, capsys):
    name, kernel = next(iter(kernels.compiled.items()))
    spills = {**kernels.compiled, name: dataclasses.replace(kernel, spilled=8)}
    monkeypatch.setattr(kernels, "compiled", spills)
    monkeypatch.setattr(cost, "Kernels", lambda: kernels)
    monkeypatch.setattr(cost.sys, "argv", ["cost.py"])
    assert cost.main() == 1
    assert "8 bytes spilled" in capsys.readouterr().out


def test_a_kernel_that_rounds_in_another_way_has_other_bytes(kernels, monkeypatch):
    def to_nearest(kernel):
        return {
            at: dataclasses.replace(i, suffixes=()) if i.suffixes == ("RZ",) else i
            for at, i in code(kernel).items()
        }

    code = kernels.code
    monkeypatch.setattr(kernels, "code", to_nearest)
    assert not run(kernels, Case.named("encode 4 f32")).same


def special_values(bucket: int) -> np.ndarray:
    """Buckets that a format may trip over: each value alone among others, then everywhere."""
    values = [np.nan, -np.nan, np.inf, -np.inf, 3.4e38, -3.4e38, 1e-45, 1e-38, 0.0, -0.0, 1.0]
    buckets = []
    for k, value in enumerate(values):
        alone = np.sin(np.arange(bucket))
        alone[7 * k % bucket] = value
        buckets += [alone, np.full(bucket, value)]
    ranges = [1e-38, 1e-42, 3.4e38, 1e30, 1e-30]  # subnormal differences, infinite ones
    buckets += [scale * np.sin(np.arange(bucket)) for scale in ranges]
    with np.errstate(over="ignore"):
        return np.concatenate(buckets).astype(np.float32)


EVERY_KERNEL = ("encode 4 f32", "decode 4 f32", "reduce 4 f32 w2", "accumulate 4 f32 p2")


@pytest.mark.parametrize(
    "name",
    [
        name + options
        for name in EVERY_KERNEL
        for options in ("", " rotated", " stochastic", " residual")
        if name[0] in "er" or options in ("", " rotated")  # encode and reduce have them all
    ],
)
def test_special_values_become_the_bytes_of_the_oracle(kernels, name):
    case = Case.named(name)
    assert run_on(kernels, case, special_values(case.bucket)).same


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
@pytest.mark.parametrize("name", EVERY_KERNEL)
def test_special_16_bit_values_become_the_bytes_of_the_oracle(kernels, name, dtype):
    case = Case.named(name.replace("f32", dtype))
    assert run_on(kernels, case, special_values(case.bucket)).same


@pytest.mark.parametrize("bucket", [64, 128, 1024, 2048, 8192])
@pytest.mark.parametrize("name", EVERY_KERNEL)
def test_buckets_of_every_length_become_the_bytes_of_the_oracle(kernels, name, bucket):
    values = np.random.default_rng(0).standard_normal(4 * bucket + 45)
    assert run_on(kernels, Case.named(f"{name} bucket {bucket}"), values).same


@pytest.mark.parametrize(("bits", "dtype"), [(1, "f32"), (3, "bf16"), (4, "f16"), (8, "f32")])
@pytest.mark.parametrize("name", EVERY_KERNEL)
def test_unaligned_leaves_with_a_short_end_become_the_bytes_of_the_oracle(
    kernels, name, bits, dtype
):
    kernel, _, _, *rest = name.split()
    case = Case.named(" ".join([kernel, str(bits), dtype, *rest]))
    values = np.random.default_rng(0).standard_normal(4 * 512 + 100)
    for shift in (0, 1):
        assert run_on(kernels, case, values, shift=shift).same, shift
