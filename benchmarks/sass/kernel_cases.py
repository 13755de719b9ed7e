"""Calls of the kernels on simulated memory, run warp by warp and compared with tests/oracle.py.

A case is named as in tests/gpu/kernel_bench.cc: "encode 4 f32", "decode 4 bf16 rotated", "reduce 4
f32 w8" (8 ranks), "accumulate 4 f32 p8" (8 peers), "encode 4 f32 stochastic residual bucket 1024".
"""

import dataclasses
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
from launches import Call, Kernels, Launch
from warp import Memory, Region, Warp, constant_bank

sys.path.append(str(Path(__file__).resolve().parents[2] / "tests"))

import oracle

DTYPES = {"f32": np.float32, "bf16": ml_dtypes.bfloat16, "f16": np.float16}
KEY, NUMBER = (7, 11), 3
RANK = 1  # whose chunk a reduce works on; an accumulate adds up all rows
WARP = 32
LARGE = 1 << 27  # values of a chunk, as they are measured
SENTINEL = 0xCD


@dataclasses.dataclass(frozen=True)
class Case:
    kernel: str
    bits: int
    dtype: str
    world: int = 1  # ranks of a reduce, peers of an accumulate
    stochastic: bool = False
    rotated: bool = False
    residual: bool = False
    bucket: int = 512

    @classmethod
    def named(cls, name: str) -> "Case":
        kernel, bits, dtype, *words = name.split()
        options: dict[str, int | bool] = {}
        while words:
            word = words.pop(0)
            if word == "bucket":
                options["bucket"] = int(words.pop(0))
            elif word in ("stochastic", "rotated", "residual"):
                options[word] = True
            elif word[0] in "wp" and word[1:].isdigit():
                options["world"] = int(word[1:])
            else:
                raise ValueError(f"{word!r} of case {name!r}; kernel_cases.py says how to name one")
        return cls(kernel, int(bits), dtype, **options)

    @property
    def bytes(self) -> int:
        """What a bucket has to move."""
        values = self.bucket * np.dtype(DTYPES[self.dtype]).itemsize
        record = oracle.record_bytes(self.bucket, self.bits)
        record *= self.world  # a reduce reads all but its own and writes one
        return values * (2 if self.residual or self.kernel == "accumulate" else 1) + record

    def leaf(self, size: int) -> oracle.Leaf:
        rounding = int(self.stochastic)
        return oracle.Leaf(size, self.bits, self.bucket, rounding, NUMBER, self.rotated)

    def call(self, size: int, **addresses: int) -> Call:
        """A call on a leaf of `size` values."""
        rank = RANK if self.kernel == "reduce" else -1
        return Call(
            self.kernel,
            self.dtype,
            size,
            self.bits,
            self.bucket,
            int(self.stochastic),
            NUMBER,
            self.rotated,
            self.world,
            rank,
            float(self.world),
            **addresses,
        )


@dataclasses.dataclass(frozen=True)
class Run:
    same: bool  # whether the bytes are the oracle's
    warps: list[Warp]
    kernel: str
    buckets: int  # of every warp


def run_launch(kernels: Kernels, launch: Launch, memory: Memory, blocks: int) -> list[Warp]:
    """Every warp of a launch, of `blocks` blocks: a kernel is right for any number of them."""
    bank = constant_bank(launch.threads, blocks, launch.parameters)
    code = kernels.code(launch.kernel)
    threads = range(0, launch.threads, WARP)
    return [Warp(code, bank, memory, block, t) for block in range(blocks) for t in threads]


def buckets_of_a_warp(kernels: Kernels, case: Case) -> tuple[int, int]:
    """Buckets that a warp works on where a chunk has LARGE values, and warps of a block."""
    addresses = dict.fromkeys(("values", "out", "payload", "chunk", "key"), 1 << 40)
    addresses["out"] *= case.residual or case.kernel in ("decode", "accumulate")
    chunks = case.world if case.kernel == "reduce" else 1
    (launch,) = kernels.launches(case.call(LARGE * chunks, **addresses))
    warps = launch.threads // WARP
    return -(-LARGE // case.bucket // (launch.blocks * warps)), warps


def run(kernels: Kernels, case: Case) -> Run:
    """One block, whose warps have as many buckets each as in a large call, of random values."""
    buckets, warps = buckets_of_a_warp(kernels, case)
    chunks = case.world if case.kernel == "reduce" else 1
    values = np.random.default_rng(0).standard_normal(buckets * warps * case.bucket * chunks)
    return run_on(kernels, case, values, blocks=1, buckets=buckets)


def run_on(
    kernels: Kernels,
    case: Case,
    values: np.ndarray,
    *,
    blocks: int | None = None,
    buckets: int = 1,
    shift: int = 0,
) -> Run:
    """The case on a leaf of these values, which start `shift` values after an aligned address.

    `blocks` replaces the number that the host code launches.
    """
    dtype = np.dtype(DTYPES[case.dtype])
    with np.errstate(over="ignore"):  # what 16 bits cannot hold becomes infinite
        leaf = values.astype(dtype)
    given, wanted = expected(case, leaf)
    memory = Memory()

    def place(name: str, array: np.ndarray) -> Region:
        shifted = shift * dtype.itemsize if name in ("values", "out") else 0
        return memory.add(array, shifted, near=name == "key")

    regions = {name: place(name, array) for name, array in given.items()}
    for name, array in wanted.items():
        regions[name] = place(name, np.full(array.nbytes, SENTINEL, np.uint8))
    addresses = {name: region.address for name, region in regions.items()}
    warps: list[Warp] = []
    for launch in kernels.launches(case.call(leaf.size, **addresses)):
        warps += run_launch(kernels, launch, memory, blocks or launch.blocks)
    same = all(np.array_equal(regions[name].data, as_bytes(x)) for name, x in wanted.items())
    return Run(same, warps, launch.kernel, buckets)


Arrays = dict[str, np.ndarray]


def expected(case: Case, x: np.ndarray) -> tuple[Arrays, Arrays]:
    """(what a call on the leaf x reads, what it has to write), by the name of the address.

    Peers send the same values, each in an order of its own.
    """
    leaf, key, divisor = case.leaf(x.size), np.array(KEY, np.uint32), float(case.world)
    chunks = case.world if case.kernel == "reduce" else 1
    payloads = [
        oracle.encode([np.roll(x, 7 * k)], [leaf], chunks, -1, KEY)[0] for k in range(case.world)
    ]
    if case.kernel == "encode":
        payload, residuals = oracle.encode([x], [leaf], 1, -1, KEY)
        wanted = {"payload": payload}
        if case.residual:
            wanted["out"] = residuals[0]
        return {"values": x, "key": key}, wanted
    if case.kernel == "decode":
        (payload,) = payloads
        return {"payload": payload}, {"out": oracle.decode(payload, [leaf], [x.dtype])[0]}
    if case.kernel == "accumulate":
        rows = np.concatenate(payloads)
        total = oracle.accumulate([x], rows, [leaf], -1, divisor)[0]
        return {"values": x, "payload": rows}, {"out": total}
    rows = np.stack([payload[RANK] for payload in payloads])
    before = [np.full(x.nbytes, SENTINEL, np.uint8).view(x.dtype)] if case.residual else []
    chunk, lost = oracle.reduce([x], rows, [leaf], RANK, divisor, KEY, before)
    wanted = {"chunk": chunk}
    if case.residual:
        wanted["out"] = lost[0]
    return {"values": x, "payload": rows, "key": key}, wanted


def as_bytes(x: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(x).reshape(-1).view(np.uint8)
