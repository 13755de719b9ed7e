"""Every CPU kernel against memcpy, in one process, without XLA around it.

    python benchmarks/codec.py --size 100M --bits 4,8     # kernel_timing.py says how to build it

`ratio` is memcpy's time divided by the kernel's, for the same uncompressed bytes on one thread,
measured in turns. The kernel's gain from a second thread stands beside memcpy's own gain; if that
is small, memory is the limit and not the kernel.
`#wrong` counts decoded values outside the stated error bound, and payload bytes that differ from
those of the first instruction set; "-" stands for kernels that are only timed here. `units`
multiplies each value by its own unit, which is read as well; `factored` multiplies it by the units
of its row and column. 100 MB of values do not fit the caches; --size 1M measures values that do.
--codes are the codes other than the wire format, of values in buckets of 512. Codes that select
values keep 1 %, or 5 of every bucket.
"""

import argparse
import itertools
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np

import kernel_timing
import measure
from cgx_jax.kernels import wire

BUCKET = 512
PEERS = 4
ENCODERS = {  # options of the encoding kernel
    "nearest": {},
    "stochastic": {"rounding": 1},
    "residual": {},
    "rotated": {"rotation": True},
    "units": {},
    "factored": {},
    "rotated units": {"rotation": True},
    "rotated factored": {"rotation": True},
}
KERNELS = (
    *ENCODERS,
    *("decode", "decode units", "decode factored"),
    *("decode rotated", "decode rotated units", "decode rotated factored"),
    *("reduce", "reduce rotated", "reduce rotated units", "reduce rotated factored", "accumulate"),
)
COLUMNS = 1024  # of factored units
KEPT = 0.01
BLOCK_KEPT = 5
CODES = {  # codes of one array: the options of the call, and the result's bytes per value
    "signs": ({}, 1 / 8),
    "decode signs": ({}, 1 / 8),
    "natural": ({}, 1),
    "ternary": ({}, 1 / 5 + 4 / BUCKET),
    "qsgd": ({"levels": 7}, 1 / 2 + 4 / BUCKET),
    "qsgd of the largest": ({"levels": 7}, 1 / 2 + 4 / BUCKET),
    "largest": ({}, 4 * KEPT),
    "above a sampled threshold": ({}, 4 * KEPT),
    "largest of every bucket": ({"keep": BLOCK_KEPT}, 4 * BLOCK_KEPT / BUCKET),
}


def aligned(size: int, dtype: Any) -> np.ndarray:
    """Touched memory that begins at a cache line, as XLA's buffers do."""
    itemsize = np.dtype(dtype).itemsize
    block = np.zeros(size * itemsize + 64, np.uint8)
    start = -block.ctypes.data % 64
    return block[start : start + size * itemsize].view(dtype)


class Timed:
    """The values that kernels handle, and calls on them."""

    def __init__(self, kernels: kernel_timing.Kernels, size: int) -> None:
        self.kernels = kernels
        self.values, self.copied = aligned(size, np.float32), aligned(size, np.float32)
        self.values[:] = np.random.default_rng(0).standard_normal(size, np.float32)

    def handled(self, kernel: str) -> int:
        """Returns how many values a kernel's call handles: its rank's chunk, or all."""
        return self.values.size // PEERS if "reduce" in kernel else self.values.size

    def run(self, kernel: str, threads: int) -> float:
        """Seconds of one call."""
        raise NotImplementedError

    def copy(self, kernel: str, threads: int) -> float:
        """Seconds of memcpy of the float32 bytes that the kernel handles."""
        n = self.handled(kernel)
        return self.kernels.time_copy(self.copied[:n], self.values[:n], threads)


class Buffers(Timed):
    """The operands of every kernel at one width, and the calls on them."""

    def __init__(self, kernels: kernel_timing.Kernels, size: int, bits: int) -> None:
        super().__init__(kernels, size)
        self.bits, self.out, self.none = bits, self.copied, kernel_timing.NONE
        self.units = {
            "units": {"units": aligned(2 * (size + 1), np.float32), "columns": size},
            "factored": {
                "units": aligned(2 * (size // COLUMNS + COLUMNS), np.float32),
                "columns": COLUMNS,
            },
        }
        for own in self.units.values():
            own["units"][:] = 1
        leaf = wire.Slot(size, bits, BUCKET, "nearest", 0)
        self.row = wire.Layout((leaf,), 1).chunk_bytes
        self.chunk_bytes = wire.Layout((leaf,), PEERS).chunk_bytes
        self.payload = aligned(PEERS * self.row, np.uint8)
        self.chunk = aligned(self.chunk_bytes, np.uint8)
        for _ in range(2):  # real payloads: a kernel may read as many rows as it needs
            self.run("nearest", 1)
        for row in range(1, PEERS):
            self.payload[row * self.row : (row + 1) * self.row] = self.payload[: self.row]

    def run(self, kernel: str, threads: int) -> float:
        one_row = self.payload[: self.row]
        options = {"bits": self.bits, "bucket_size": BUCKET, "threads": threads}
        options |= ENCODERS.get(kernel, {"rotation": "rotated" in kernel})
        options |= self.units.get(kernel.split()[-1], {})
        time, x, none = self.kernels.time_kernel, self.values, self.none
        if kernel in ENCODERS:
            out = self.out if kernel == "residual" else none
            return time("encode", x, out, one_row, none, **options)
        if "decode" in kernel:
            return time("decode", x, self.out, one_row, none, **options)
        if kernel == "accumulate":
            return time("accumulate", x, self.out, self.payload, none, world=PEERS, **options)
        rows = self.payload[: PEERS * self.chunk_bytes]
        return time("reduce", x, none, rows, self.chunk, world=PEERS, rank=0, **options)

    def wrong(self, stochastic: bool) -> int:
        """Returns how many values decode to something outside the error bound."""
        self.run("stochastic" if stochastic else "nearest", 1)
        self.run("decode", 1)
        x = self.values.reshape(-1, BUCKET)
        low, high = x.min(axis=1), x.max(axis=1)
        unit = (high - low) / (2**self.bits - 1)
        rounding = 4 * np.finfo(np.float32).eps * np.maximum(abs(low), abs(high))
        bound = unit * (1 if stochastic else 0.5) * (1 + 1e-5) + rounding
        return int((abs(self.out.reshape(-1, BUCKET) - x) > bound[:, None]).sum())


CHECKED = {"nearest": False, "stochastic": True, "decode": False}  # which encoding `wrong` checks


class CodeBuffers(Timed):
    """The operands of the codes other than the wire format, and the calls on them."""

    def __init__(self, kernels: kernel_timing.Kernels, size: int) -> None:
        super().__init__(kernels, size)
        self.decoded = aligned(size, np.float32)
        self.out = {
            name: aligned(round(each * size), np.uint8) for name, (_, each) in CODES.items()
        }
        self.taken = {name: aligned(out.size // 4, np.float32) for name, out in self.out.items()}

    def run(self, code: str, threads: int) -> float:
        options, _ = CODES[code]
        values, taken = self.values, kernel_timing.NONE
        if code == "decode signs":
            values = self.decoded
        elif code in ("largest", "above a sampled threshold", "largest of every bucket"):
            taken = self.taken[code]
            options = {"keep": taken.size} | options
        options = options | {"threads": threads, "bucket_size": BUCKET}
        return self.kernels.time_code(code, values, self.out[code], taken, **options)


def code_sweep(
    kernels: kernel_timing.Kernels, arguments: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """Yields one row per instruction set and code."""
    size = arguments.size // 4 // (5 * BUCKET) * (5 * BUCKET)
    buffers = CodeBuffers(kernels, size)
    first: dict[str, np.ndarray] = {}
    for isa in arguments.isas.split(",") if arguments.isas else kernels.isas():
        kernels.set_isa(isa)
        for code in arguments.codes:
            row = {"isa": isa, "bits": 0, "kernel": code, "bytes": 4 * size}
            row |= {"reps": arguments.reps} | measured(buffers, code, arguments.reps)
            wrong = int((buffers.out[code] != first[code]).sum()) if code in first else None
            first.setdefault(code, buffers.out[code].copy())
            yield row | {"wrong": wrong}


def measured(buffers: Timed, kernel: str, reps: int) -> dict[str, Any]:
    """Returns quartiles of one kernel's ratios; each repeat measures all four times in turn."""
    times = np.empty((reps, 4))
    for rep in range(-1, reps):  # one round of warm-up
        times[rep] = (
            buffers.copy(kernel, 1),
            buffers.run(kernel, 1),
            buffers.copy(kernel, 2),
            buffers.run(kernel, 2),
        )
    copy, one, copy_two, two = times.T
    return {
        "seconds": float(np.median(one)),
        "ratio": measure.quartiles(copy / one),
        "threads": measure.quartiles(one / two),
        "copy_threads": measure.quartiles(copy / copy_two),
        "algbw": float(4 * buffers.handled(kernel) / np.median(one)),
    }


def sweep(
    kernels: kernel_timing.Kernels, arguments: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """Yields one row per instruction set, width and kernel."""
    size = arguments.size // 4 // COLUMNS * COLUMNS
    for bits in arguments.bits:
        buffers = Buffers(kernels, size, bits)
        first: dict[bool, np.ndarray] = {}
        for isa in arguments.isas.split(",") if arguments.isas else kernels.isas():
            kernels.set_isa(isa)
            wrong: dict[bool | None, int] = {}
            for stochastic in (False, True):
                wrong[stochastic] = buffers.wrong(stochastic)
                payload = buffers.payload[: buffers.row].copy()
                same = first.setdefault(stochastic, payload)
                wrong[stochastic] += int((payload != same).sum())
            for kernel in arguments.kernels:
                row = {"isa": isa, "bits": bits, "kernel": kernel, "bytes": 4 * size}
                row |= {"reps": arguments.reps, "wrong": wrong.get(CHECKED.get(kernel))}
                yield row | measured(buffers, kernel, arguments.reps)


def show(row: dict[str, Any]) -> None:
    def spread(key: str) -> str:
        low, middle, high = row[key]
        return f"{middle:5.2f} ({low:.2f}-{high:.2f})"

    print(
        f"{row['isa']:>8} {row['bits'] or '':>4} {row['kernel']:>25} {row['seconds'] * 1e3:>8.2f}"
        f" {row['algbw'] / 1e9:>6.1f}  {spread('ratio')}  {spread('threads')}"
        f" {row['copy_threads'][1]:5.2f} {'-' if row['wrong'] is None else row['wrong']:>6}",
        flush=True,
    )


def main() -> int:
    parser = measure.parser(__doc__, reps=11)
    parser.add_argument(
        "--size", default="100M", help="fp32 bytes, with k, M, G (default %(default)s)"
    )
    parser.add_argument("--bits", default="1,2,3,4,5,6,7,8", help="list (default %(default)s)")
    parser.add_argument("--isas", help="list (default: all that this processor has)")
    parser.add_argument("--kernels", default=",".join(KERNELS), help="list (default %(default)s)")
    parser.add_argument("--codes", default=",".join(CODES), help="list (default %(default)s)")
    arguments = parser.parse_args()
    arguments.size = measure.size_in_bytes(arguments.size)
    arguments.bits = [int(bits) for bits in arguments.bits.split(",") if bits]
    arguments.kernels = arguments.kernels.split(",")
    arguments.codes = [code for code in arguments.codes.split(",") if code]
    if unknown := sorted(set(arguments.codes) - set(CODES)):
        parser.error(f"--codes: {unknown} not among {', '.join(CODES)}")
    if unknown := sorted(set(arguments.kernels) - set(KERNELS)):
        parser.error(f"--kernels: {unknown} not among {', '.join(KERNELS)}")
    try:
        kernels = kernel_timing.Kernels()
    except FileNotFoundError as error:
        print(f"codec.py: {error}", file=sys.stderr)
        return 1
    print(
        f"{'isa':>8} bits {'kernel':>25} {'time ms':>8} {'GB/s':>6}  {'ratio to memcpy':<18}"
        f" {'1 / 2 threads':<18} copy #wrong"
    )
    rows = []
    for row in itertools.chain(sweep(kernels, arguments), code_sweep(kernels, arguments)):
        show(row)
        rows.append(row)
    measure.write_json(arguments.json, rows)
    return int(any(row["wrong"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
