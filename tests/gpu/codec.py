"""On a machine with an NVIDIA GPU: the CUDA kernels against the CPU kernels, and their bandwidth.

    python tests/gpu/codec.py OUT.json
    python tests/gpu/codec.py OUT.json --platform cpu --values 100000     # tries the script itself

Every width, rounding and dtype, rotated or not, has to give the CPU's bytes. Bandwidth is bytes
moved over time, for 25 M fp32 values, beside a copy within the device of the same bytes; a share of
0.85 is the aim (0.6 where rounding is stochastic; none for rotated buckets). The result is JSON;
the exit code tells whether all bytes are equal.
"""

import argparse
import functools
import itertools
import json
import pathlib
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np

from cgx_jax.kernels import primitives
from cgx_jax.wire import ROUNDINGS, Field, Layout

WORLD = 4


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--platform", default="gpu")
    parser.add_argument("--values", type=int, default=25_000_000)
    arguments = parser.parse_args()
    gpu, cpu = jax.devices(arguments.platform)[0], jax.devices("cpu")[0]
    wrong = differences(gpu, cpu)
    rows = bandwidth(gpu, arguments.values)
    facts = {"device": gpu.device_kind, "jax": jax.__version__, "wrong": wrong, "rows": rows}
    arguments.out.write_text(json.dumps(facts, indent=1) + "\n")
    for row in rows:
        print(
            f"{row['kernel']:<26} {row['bits']} bits  {row['terabytes']:.2f} TB/s"
            f"  {row['share']:.2f} of a copy"
        )
    print(f"cases with other bytes than the CPU's: {wrong or 'none'}")
    return 1 if wrong else 0


def layout_of(
    size: int, bits: int, bucket: int, rounding: str, rotation: bool, world: int
) -> Layout:
    return Layout((Field(size, bits, bucket, rounding, 0, rotation),), world)


def differences(gpu, cpu) -> list[str]:
    """The cases in which a kernel's result is not the CPU's, bit for bit."""
    wrong = []
    rng = np.random.default_rng(0)
    key = np.array([7, 11], np.uint32)
    dtypes = (jnp.float32, jnp.bfloat16, jnp.float16)
    sizes = itertools.cycle([(1, 32), (30_011, 96), (100_003, 512), (70_001, 2048), (50_000, 4096)])
    cases = itertools.product(range(1, 9), ROUNDINGS, (False, True), dtypes)
    for (bits, rounding, rotation, dtype), (size, bucket) in zip(cases, sizes, strict=False):
        layout = layout_of(size, bits, bucket, rounding, rotation, WORLD)
        x = rng.standard_normal(size).astype(dtype)
        x[size // 2 : size // 2 + 1] = np.inf if size % 2 else 0

        def steps(key, x, layout=layout):
            rows, (lost,) = primitives.encode(key, [x], layout, rank=jnp.int32(1), residual=True)
            chunk, _ = primitives.reduce(key, jnp.int32(2), rows, [x], layout, divisor=3)
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


def bandwidth(gpu, values: int) -> list[dict]:
    """Bytes moved over time, and over a device copy's in the same round."""
    x = jax.device_put(np.random.default_rng(0).standard_normal(values).astype(np.float32), gpu)
    key = jax.device_put(np.array([1, 2], np.uint32), gpu)
    rank = jax.device_put(np.int32(0), gpu)
    copy = jax.jit(lambda x: x + 0)
    rows = []
    for bits in (4, 8):
        for rounding, rotation in itertools.product(("nearest", "stochastic"), (False, True)):
            one = layout_of(values, bits, 512, rounding, rotation, 1)
            four = layout_of(values, bits, 512, rounding, rotation, WORLD)
            encode = jax.jit(lambda k, x, one=one: primitives.encode(k, [x], one)[0])
            reduce = jax.jit(
                lambda k, r, rows, x, four=four: primitives.reduce(k, r, rows, [x], four)[0]
            )
            decode = jax.jit(lambda rows, x, one=one: primitives.decode(rows, one, [x]))
            payload = encode(key, x)
            split = jax.device_put(np.zeros((WORLD, four.chunk_bytes), np.uint8), gpu)
            sent = one.total_bytes
            moved = {
                "encode": (functools.partial(encode, key, x), 4 * values + sent),
                "reduce": (
                    functools.partial(reduce, key, rank, split, x),
                    values + WORLD * four.chunk_bytes,
                ),
                "decode": (functools.partial(decode, payload, x), 4 * values + sent),
            }
            named = [rounding] * (rounding != "nearest") + ["rotated"] * rotation
            for kernel, (call, nbytes) in moved.items():
                if kernel == "decode" and rounding != "nearest":
                    continue
                ours, theirs = interleaved(call, lambda: copy(x))
                speed = nbytes / ours
                rows.append(
                    {
                        "kernel": " ".join([kernel, *named]),
                        "bits": bits,
                        "terabytes": speed / 1e12,
                        "share": speed / (8 * values / theirs),
                    }
                )
    return rows


def interleaved(ours, theirs, repeats=20, calls=10) -> tuple[float, float]:
    """Median seconds of a call of each, taking turns; several calls a turn hide the launch."""
    seconds = ([], [])
    for rep in range(-2, repeats):
        for function, times in zip((ours, theirs), seconds, strict=True):
            start = time.perf_counter()
            results = [function() for _ in range(calls)]
            jax.block_until_ready(results)
            if rep >= 0:
                times.append((time.perf_counter() - start) / calls)
    return float(np.median(seconds[0])), float(np.median(seconds[1]))


if __name__ == "__main__":
    sys.exit(main())
