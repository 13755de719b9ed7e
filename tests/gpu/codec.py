"""Compares the CUDA kernels in JAX programs with the CPU kernels, on a machine with an NVIDIA GPU.

    python tests/gpu/codec.py OUT.jsonl
    python tests/gpu/codec.py OUT.jsonl --platform cpu     # tries the script itself, on a few cases

Every width, rounding and dtype, rotated or not, must give the same bytes as the CPU. So must all
codes that have kernels. Then times how fast these codes encode, beside the same codes in plain jnp
and a copy within the device; kernel_bench times the kernels of fusion buffers. The
exit code says whether all bytes are equal.
"""

import argparse
import itertools
import pathlib
import statistics
import sys
import time
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import ranks

from cgx_jax import compressors
from cgx_jax.kernels import platforms, primitives
from cgx_jax.kernels.wire import ROUNDINGS, Layout, Slot

WORLD = 4
CODES = (
    compressors.SignSGD(),
    compressors.QSGD(levels=7),
    compressors.QSGD(levels=127, bucket_size=4096, norm="max"),
    compressors.TernGrad(clip=None),
    compressors.Natural(),
    compressors.BlockTopK(keep=5),
    compressors.BlockTopK(keep=40, bucket_size=2048),
    compressors.TopK(keep=0.01),
    compressors.DGC(keep=0.01),
)
TIMED_VALUES = 1 << 26
CALLS, REPEATS = 10, 7


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--platform", default="cuda")
    arguments = parser.parse_args()
    gpu, cpu = jax.devices(arguments.platform)[0], jax.devices("cpu")[0]
    wrong = differences(gpu, cpu, every=1 if arguments.platform == "cuda" else 13)
    wrong += differing_codes(gpu, cpu)
    facts = {"device": gpu.device_kind, "jax": jax.__version__, "wrong": wrong}
    times = encode_times(gpu, TIMED_VALUES if gpu.platform == "gpu" else 10_000)
    rows = [{"code": code, **milliseconds} for code, milliseconds in times.items()]
    ranks.add_run(arguments.out, rows, check="codec", **facts)
    print(f"cases with other bytes than the CPU's: {wrong or 'none'}")
    return 1 if wrong else 0


def layout_of(
    size: int, bits: int, bucket: int, rounding: str, rotation: bool, world: int
) -> Layout:
    return Layout((Slot(size, bits, bucket, rounding, 0, rotation),), world)


def differences(gpu, cpu, every: int) -> list[str]:
    """Returns the cases whose result differs from the CPU's; runs one case in `every`."""
    wrong = []
    rng = np.random.default_rng(0)
    key = np.array([7, 11], np.uint32)
    dtypes = (jnp.float32, jnp.bfloat16, jnp.float16)
    sizes = itertools.cycle([(1, 32), (30_011, 96), (100_003, 512), (70_001, 2048), (50_000, 4096)])
    cases = itertools.product(range(1, 9), ROUNDINGS, (False, True), dtypes)
    cases = itertools.islice(cases, None, None, every)
    for (bits, rounding, rotation, dtype), (size, bucket) in zip(cases, sizes, strict=False):
        layout = layout_of(size, bits, bucket, rounding, rotation, WORLD)
        x = rng.standard_normal(size).astype(dtype)
        x[size // 3 : size // 2] = 0
        x[size // 2 : size // 2 + 1] = np.inf if size % 2 else 0

        def steps(key, x, layout=layout):
            own = primitives.Sent(key, [x], rank=1)
            rows, (lost,) = primitives.encode(own, layout, residual=True)
            chunk, _ = primitives.reduce(own._replace(rank=2), rows, layout, divisor=3)
            (back,) = primitives.decode(rows, layout, [x])
            return rows, lost, chunk, back

        results = [
            jax.jit(steps)(*(jax.device_put(a, device) for a in (key, x))) for device in (gpu, cpu)
        ]
        names = ("payload", "residual", "chunk", "decoded")
        for name, a, b in zip(names, *results, strict=True):
            if np.asarray(a).tobytes() != np.asarray(b).tobytes():
                turned = "rotated" if rotation else "plain"
                wrong.append(f"{name} {bits} {rounding} {turned} {dtype.__name__} {size}")
    return wrong


def differing_codes(gpu, cpu) -> list[str]:
    """Returns the compressors and sizes whose payload differs from the CPU's in any bit."""
    wrong = []
    for size in (1000, 1_000_003):
        x = np.random.default_rng(1).standard_normal(size).astype(np.float32)
        x[:9] = [0, -0.0, 1e-40, np.inf, -np.inf, np.nan, 3e38, -3e38, 1]
        for code in CODES:
            encode = jax.jit(lambda x, code=code: code.encode(x, key=jax.random.key(3)))
            ours, expected = (encode(jax.device_put(x, device)) for device in (gpu, cpu))
            if np.asarray(ours).tobytes() != np.asarray(expected).tobytes():
                wrong.append(f"{code} {size}")
    return wrong


def encode_times(gpu, size: int) -> dict[str, dict[str, float]]:
    """Returns the milliseconds of encoding f32[size]: by a kernel, by plain jnp, and of a copy."""
    x = jax.device_put(np.random.default_rng(1).standard_normal(size, np.float32), gpu)
    times = {"copy": {"kernel": milliseconds(jax.jit(lambda x: x + 1), x)}}
    for code in CODES:
        times[str(code)] = {}
        for way, has in (("kernel", platforms.Platform.has), ("jnp", lambda *_: False)):
            encode = jax.jit(lambda x, code=code: code.encode(x, key=jax.random.key(3)))
            with mock.patch.object(platforms.Platform, "has", has):  # read while compiling
                times[str(code)][way] = milliseconds(encode, x)
    for name, row in times.items():
        print(f"{name:>60}", *(f"{way} {ms:9.3f} ms" for way, ms in row.items()), flush=True)
    return times


def milliseconds(function, x) -> float:
    """Returns the median time of a call, of several that are queued."""
    function(x).block_until_ready()
    taken = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        results = [function(x) for _ in range(CALLS)]
        results[-1].block_until_ready()
        taken.append((time.perf_counter() - start) / CALLS * 1e3)
    return statistics.median(taken)


if __name__ == "__main__":
    sys.exit(main())
