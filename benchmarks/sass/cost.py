"""What the CUDA kernels cost by their machine code, without a GPU.

    python benchmarks/sass/cost.py                    # every case
    python benchmarks/sass/cost.py "encode 4 f32"     # some

Compiles the kernels for sm_90, runs warps of them in NumPy, compares the bytes with the oracle's,
counts what a bucket takes, and simulates one multiprocessor of an H100 and an H200. `make sass`
installs what it needs. Exits with 1 if a check fails: other bytes, a spill, more instructions or
waits for memory than benchmarks/results/sass.json has (--json writes it anew), or a simulated share
of a copy's speed below its bar.

issue: instructions per bucket. alu, xu, shfl: cycles per bucket for which they keep a scheduler's
pipe busy. copy: cycles in which an H100 copies as many bytes as a bucket has to move. bound: copy
over the largest of those. H100, H200: the simulated speed, as a part of a copy's, and what a GPU
has reached. waits: how often a warp waits for memory, per bucket. warps: how many of a
multiprocessor's the registers leave room for.
"""

import argparse
import functools
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import multiprocessor
from kernel_cases import LARGE, Case, run
from launches import ROOT, Kernels, missing

RESULTS = ROOT / "benchmarks" / "results" / "sass.json"
# The least share of a copy's speed on an H100 that a case shall reach; without one it is counted.
BARS = {
    "encode 4 f32": 0.95,
    "encode 8 f32": 0.95,
    "encode 4 bf16": 0.70,
    "encode 4 f16": 0.70,
    "encode 4 f32 stochastic": 0.65,
    "encode 4 f32 rotated": 0.60,
    "encode 4 f32 residual": None,
    "encode 4 bf16 stochastic": None,
    "encode 4 bf16 rotated": None,
    "decode 4 f32": 0.97,
    "decode 8 f32": None,
    "decode 4 bf16": 0.87,
    "decode 4 f16": None,
    "decode 4 f32 rotated": 0.80,
    "reduce 4 f32 w2": 0.70,
    "reduce 4 f32 w3": None,
    "reduce 4 f32 w8": 0.70,
    "reduce 4 bf16 w8": None,
    "reduce 4 f32 w8 stochastic": None,
    "reduce 4 f32 w8 residual": None,
    "accumulate 4 f32 p8": 0.85,
}
CEILINGS = ("instructions", "waits")  # what may not grow
MODEL_ERROR = 0.05  # of a simulated share, against measured ones
MEASURED = {"H100": "gpu_h100", "H200": "gpu_h200"}  # folders of benchmarks/results


@functools.cache
def measured(folder: str) -> dict[str, float]:
    """Shares that tests/gpu/kernel_bench.cc has measured, by case."""
    text = (ROOT / "benchmarks" / "results" / folder / "kernels.jsonl").read_text()
    rows = [row for row in map(json.loads, text.splitlines()) if row.get("values") == LARGE]
    return {row["case"]: row["share"][1] for row in rows}


def gate(name: str) -> float | None:
    """The share that the model has to reach.

    It is the bar. Where an H100 itself misses that, it is what the H100 reaches, less the model's
    error.
    """
    bar, reached = BARS.get(name), measured(MEASURED["H100"]).get(name)
    if bar is None or reached is None or reached >= bar:
        return bar
    return reached - MODEL_ERROR


def measure(kernels: Kernels, name: str) -> dict[str, Any]:
    """One case's numbers, per bucket."""
    case = Case.named(name)
    ran = run(kernels, case)
    compiled = kernels.compiled[ran.kernel]
    moved = case.bytes * ran.buckets  # by a warp
    traces = [multiprocessor.steps(warp.trace, moved) for warp in ran.warps]
    steps = traces[-1]
    busy = multiprocessor.busy_cycles(steps)
    cycles = {pipe: busy[pipe] / ran.buckets for pipe in ("alu", "xu", "shfl")}
    busiest = max(len(steps) / ran.buckets, *cycles.values())
    machines = multiprocessor.MACHINES
    copies = {m.name: m.copy_cycles(case.bytes) for m in machines}
    return {
        "case": name,
        "bytes_ok": ran.same,
        "instructions": len(steps) / ran.buckets,
        "cycles": cycles,
        "waits": len(multiprocessor.waits_for_memory(steps)) / ran.buckets,
        "copy": copies,
        "bound": {name: min(1.0, copy / busiest) for name, copy in copies.items()},
        "share": {
            m.name: multiprocessor.share_of_copy(traces, moved * len(traces), compiled.warps, m)
            for m in machines
        },
        "kernel": compiled.label,
        "registers": compiled.registers,
        "warps": compiled.warps,
    }


def waits(kernels: Kernels, name: str) -> Iterator[str]:
    """Where a warp waits for memory in its last bucket."""
    ran = run(kernels, Case.named(name))
    trace = ran.warps[-1].trace
    found = multiprocessor.waits_for_memory(multiprocessor.steps(trace, 1))
    for place, cycles in found[-(len(found) // ran.buckets) :]:
        i = trace[place].instruction
        opcode, operands = ".".join([i.name, *i.suffixes]), ", ".join(o.text for o in i.operands)
        yield f"    {cycles:.0f} cycles at {i.address:#x}: {opcode} {operands}"


def failures(row: dict[str, Any], ceiling: dict[str, Any] | None) -> list[str]:
    """What is wrong with a case; `ceiling` is its committed row, if that has the same compiler."""
    found = []
    if not row["bytes_ok"]:
        found.append("other bytes than the oracle's")
    for what in CEILINGS if ceiling else ():
        if row[what] > ceiling[what]:
            found.append(f"{what}: {row[what]:g} per bucket, {ceiling[what]:g} allowed")
    least, share = gate(row["case"]), row["share"]["H100"]
    if least is not None and share < least:
        found.append(f"share of an H100: {share:.3f}, {least:.3f} asked for")
    return found


def deviation(rows: list[dict[str, Any]], machine: str) -> str:
    """How far the model is from what a GPU has reached."""
    reached = measured(MEASURED[machine])
    ratios = [
        row["share"][machine] / reached[row["case"]] - 1 for row in rows if row["case"] in reached
    ]
    if not ratios:
        return f"{machine}: no case of these is measured"
    rms = (sum(x * x for x in ratios) / len(ratios)) ** 0.5
    spread = f"{min(ratios):+.0%} to {max(ratios):+.0%}"
    return f"{machine}: the model is {rms:.1%} off (rms of {len(ratios)} cases), {spread}"


HEAD = (
    f"{'case':<27} bytes  issue   alu   xu  shfl   copy  bound |  H100 measured  bar |"
    "  H200 measured | waits registers warps"
)


def line(row: dict[str, Any]) -> str:
    def number(x: float | None) -> str:
        return "" if x is None else f"{x:.2f}"

    name, cycles, share = row["case"], row["cycles"], row["share"]
    h100, h200 = (measured(folder).get(name) for folder in MEASURED.values())
    return (
        f"{name:<27} {'ok' if row['bytes_ok'] else 'BAD':<5} {row['instructions']:6.0f}"
        f" {cycles['alu']:5.0f} {cycles['xu']:4.0f} {cycles['shfl']:5.0f}"
        f" {row['copy']['H100']:6.0f} {row['bound']['H100']:6.2f} |"
        f" {share['H100']:5.2f} {number(h100):>8} {number(BARS.get(name)):>4} |"
        f" {share['H200']:5.2f} {number(h200):>8} |"
        f" {row['waits']:5g} {row['registers']:9} {row['warps']:5}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("cases", nargs="*", default=list(BARS), metavar="CASE")
    parser.add_argument("--waits", action="store_true", help="say where a warp waits for memory")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers here")
    arguments = parser.parse_args()
    if (lacking := missing()) is not None:
        sys.exit(f"sass: {lacking}")
    kernels = Kernels()
    if spills := [k for k in kernels.compiled.values() if k.spilled]:
        for kernel in spills:
            print(f"FAILED: {kernel.label}: {kernel.spilled} bytes spilled")
        return 1
    (committed,) = json.loads(RESULTS.read_text())
    ceilings = {row["case"]: row for row in committed["rows"]}
    if committed["nvcc"] != kernels.compiler:
        print(f"nvcc is {kernels.compiler}: the ceilings of {committed['nvcc']} do not apply")
        ceilings = {}
    rows, wrong = [], []
    print(HEAD)
    for name in arguments.cases:
        row = measure(kernels, name)
        rows.append(row)
        print(line(row), flush=True)
        if arguments.waits:
            print(*waits(kernels, name), sep="\n")
        wrong += [f"{name}: {text}" for text in failures(row, ceilings.get(name))]
    if arguments.json is not None:
        command = " ".join(["python", os.path.relpath(sys.argv[0]), *sys.argv[1:]])
        made = {"command": command, "nvcc": kernels.compiler, "rows": rows}
        arguments.json.write_text(json.dumps([made], indent=1) + "\n")
    for machine in MEASURED:
        print(deviation(rows, machine))
    for name in arguments.cases:
        if gate(name) != BARS.get(name):
            print(f"{name}: an H100 misses its bar too; checked against {gate(name):.2f}")
    for text in wrong:
        print(f"FAILED: {text}")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
