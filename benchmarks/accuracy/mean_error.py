"""Relative L2 error of the mean over 4 and 8 ranks, at 2, 3 and 4 bits: our mean beside CGX's.

    python benchmarks/accuracy/mean_error.py --json benchmarks/results/accuracy/mean_error.jsonl

Measures Gaussian gradients, independent on every rank, and gradients of the tasks of tasks.py in
the middle of their training. The script trains these tasks itself, and takes only the leaves that a
plan compresses. Each way to take the mean is an entry of METHODS. Ways that are not in the package
are written in NumPy, to see whether they would pay off. `error_at_one_bit` is the error times
2**bits_per_value, which counts the metadata's bits too: it is the same at all widths if each
further bit halves the error. Needs the packages of the extra `accuracy`.
"""

import argparse
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

sys.path.append(str(Path(__file__).resolve().parents[1]))

from tasks import TASKS

import cgx_jax
import measure
from cgx_jax import Plan, Quantize, Rules
from cgx_jax.kernels.reference import NORMAL_RANGE

WORLDS = (4, 8)
BITS = (2, 3, 4)
BUCKET = 512
TASK_RANKS = 4  # ranks that share a task's own batch

Ranks = dict[str, np.ndarray]  # leaves f32[world, values]
Mean = tuple[Ranks, float]  # leaves f32[values], and payload bits per value
Code = Callable[[np.ndarray, int], np.ndarray]


# --- gradients.


def gaussian(world: int, seed: int) -> Ranks:
    rng = np.random.default_rng(seed)
    sizes = {"large": 200_000, "small": 50_000}
    return {k: rng.normal(size=(world, n)).astype(np.float32) for k, n in sizes.items()}


def recorded(name: str, seeds: range) -> Iterator[dict[int, Ranks]]:
    """Yields the ranks' gradients per seed, by world size, after half of the task's steps."""
    task = TASKS[name]
    graphdef, _ = task.initial(0)
    optimizer = task.optimizer(task.steps)

    def loss(params, batch):
        return task.loss(nnx.merge(graphdef, params), *batch)

    @jax.jit
    def step(params, state, batch):
        updates, state = optimizer.update(jax.grad(loss)(params, batch), state, params)
        return optax.apply_updates(params, updates), state

    every_rank = jax.jit(jax.vmap(jax.grad(loss), (None, 0)))
    for seed in seeds:
        _, params = task.initial(seed)
        state = optimizer.init(params)
        batches, half = task.batches(task.steps, seed), task.steps // 2
        for i in range(half):
            params, state = step(params, state, tuple(x[i] for x in batches))
        each = batches[0].shape[1] // TASK_RANKS
        rest = tuple(x[half:].reshape(-1, *x.shape[2:]) for x in batches)
        plan = Plan.build(params)
        lossy = {i: plan.leaves[i].path for b in plan.buffers for i in b}
        made = {}
        for world in WORLDS:
            shares = tuple(x[: world * each].reshape(world, each, *x.shape[1:]) for x in rest)
            grads = every_rank(params, shares)
            leaves = [np.asarray(x).reshape(world, -1) for x in jax.tree.leaves(grads)]
            made[world] = {path: leaves[i] for i, path in lossy.items()}
        yield made


# --- means.


def cgx(ranks: Ranks, bits: int, rounding: str, seed: int) -> Mean:
    """Takes the mean with the arithmetic of torch_cgx's scatter-reduce-allgather.

    The concatenated leaves are cut into one chunk per rank, at multiples of 4 values. A leaf's
    buckets start anew where a chunk starts. Every rank except the chunk's owner encodes its values.
    The owner adds the decoded values in fp32 to its exact ones, and encodes the sum. All ranks
    decode this sum.
    """
    rng = np.random.default_rng(seed)
    world = len(next(iter(ranks.values())))
    out = {k: np.empty(x.shape[1], np.float32) for k, x in ranks.items()}
    sent, values = 0, sum(x.size for x in out.values())
    for owner, name, begin, end in _chunks({k: x.size for k, x in out.items()}, world):
        total = ranks[name][owner, begin:end].copy()
        for rank in range(world):
            if rank != owner:
                total += _max_min(ranks[name][rank, begin:end], bits, rounding, rng)
        out[name][begin:end] = _max_min(total, bits, rounding, rng) / np.float32(world)
        n = end - begin
        sent += 64 * -(-n // BUCKET) + 8 * -(-n * bits // 8)
    return out, sent / values


def _chunks(sizes: dict[str, int], world: int) -> Iterator[tuple[int, str, int, int]]:
    """Yields (owner, leaf, begin, end) of every part of a leaf that lies in one chunk."""
    remaining = sum(sizes.values())
    parts, begin = list(sizes.items()), 0
    for owner in range(world):
        want, got = remaining // (world - owner), 0
        while got < want and parts:
            name, size = parts[0]
            take = min(size - begin, -(-(want - got) // 4) * 4)
            yield owner, name, begin, begin + take
            got, begin = got + take, begin + take
            if begin == size:
                parts, begin = parts[1:], 0
        remaining -= got


def _max_min(x: np.ndarray, bits: int, rounding: str, rng: np.random.Generator) -> np.ndarray:
    """Encodes and decodes `x`: floor((x - min) / unit + r) on 2**bits levels per bucket."""
    padded = np.pad(x, (0, -x.size % BUCKET), mode="edge").reshape(-1, BUCKET)
    low = padded.min(1, keepdims=True)
    unit = (padded.max(1, keepdims=True) - low) / np.float32(2**bits - 1)
    r = rng.random(padded.shape, np.float32) if rounding == "stochastic" else np.float32(0.5)
    level = np.floor((padded - low) / np.where(unit < 1e-10, np.float32(1), unit) + r)
    level = np.where(unit < 1e-10, np.float32(0), np.minimum(level, 2**bits - 1))
    return (low + unit * level.astype(np.float32)).reshape(-1)[: x.size]


def proposed(
    ranks: Ranks, bits: int, code: Code, seed: int, rotated: bool = False, more: int = 0
) -> Mean:
    """Takes the mean by our steps in NumPy, with `code` in the quantizer's place.

    `code` encodes and decodes buckets f64[k, BUCKET]. The first phase has `bits` - `more` bits, the
    second `bits` + `more`. Chunks are whole buckets here.
    """
    world = len(next(iter(ranks.values())))
    out: Ranks = {}
    hadamard = np.ones((1, 1))
    while len(hadamard) < BUCKET:
        hadamard = np.block([[hadamard, hadamard], [hadamard, -hadamard]])
    hadamard /= np.sqrt(BUCKET)
    for name, x in ranks.items():
        size = x.shape[1]
        buckets = np.pad(x, ((0, 0), (0, -size % BUCKET))).reshape(world, -1, BUCKET)
        count = buckets.shape[1]
        signs = np.random.default_rng(seed).choice([-1.0, 1.0], (count, BUCKET))
        coded = (buckets * signs) @ hadamard if rotated else buckets.astype(np.float64)
        owner = np.arange(count) % world
        total = coded[owner, np.arange(count)].copy()
        for rank in range(world):
            total += np.where((owner != rank)[:, None], code(coded[rank], bits - more), 0)
        mean = code(total / world, bits + more)
        out[name] = ((mean @ hadamard) * signs if rotated else mean).reshape(-1)[:size]
    return out, bits + 64 / BUCKET


def even_within(x: np.ndarray, bits: int) -> np.ndarray:
    """Rounds to the nearest of even levels between the extremes, clipped as for normal values."""
    limit = NORMAL_RANGE[bits] * np.sqrt(np.square(x).mean(1, keepdims=True))
    low = np.maximum(x.min(1, keepdims=True), -limit)
    high = np.minimum(x.max(1, keepdims=True), limit)
    unit = (high - low) / (2**bits - 1)
    unit = np.where(unit > 0, unit, 1)
    return low + unit * np.clip(np.floor((x - low) / unit + 0.5), 0, 2**bits - 1)


def exponential(x: np.ndarray, bits: int) -> np.ndarray:
    """Rounds to NUQSGD's levels: 0 and powers of 1/2 of the largest magnitude, with signs."""
    powers = 0.5 ** np.arange(2 ** (bits - 1) - 1)
    return _nearest(x, np.r_[-powers, 0, powers[::-1]], np.abs(x).max(1, keepdims=True))


def normal_levels(x: np.ndarray, bits: int) -> np.ndarray:
    """Rounds to the levels with the least error for normal values of the same mean square."""
    return _nearest(x, _lloyd_max(bits), np.sqrt(np.square(x).mean(1, keepdims=True)))


def _nearest(x: np.ndarray, levels: np.ndarray, scale: np.ndarray) -> np.ndarray:
    places = x / np.where(scale > 0, scale, 1)
    return levels[np.searchsorted((levels[1:] + levels[:-1]) / 2, places)] * scale


@cache
def _lloyd_max(bits: int) -> np.ndarray:
    z = np.linspace(-6, 6, 100_001)
    weight = np.exp(-z * z / 2)
    levels = np.linspace(-2.5, 2.5, 2**bits)
    for _ in range(1000):
        own = np.searchsorted((levels[1:] + levels[:-1]) / 2, z)
        levels = np.bincount(own, weight * z, 2**bits) / np.bincount(own, weight, 2**bits)
    return levels


def ours(ranks: Ranks, bits: int, rounding: str, seed: int, rotation: bool = False) -> Mean:
    """Takes the mean by `pmean_compressed` itself."""
    world = len(next(iter(ranks.values())))
    mesh = Mesh(np.array(jax.devices()[:world]), ("data",))
    compressor = Quantize(bits, BUCKET, rounding, rotation)
    policy = Rules((), compressor, exact=())

    def mean(ranks, key):
        own = jax.tree.map(lambda x: x[0], ranks)
        return cgx_jax.pmean_compressed(own, "data", policy, key=key, exchange="xla")

    reduce = jax.shard_map(mean, mesh=mesh, in_specs=(P("data"), P()), out_specs=P())
    found = jax.device_get(jax.jit(reduce)(ranks, jax.random.key(seed)))
    sizes = [x.shape[1] for x in ranks.values()]
    return found, sum(compressor.wire_bits(n) for n in sizes) / sum(sizes)


METHODS: dict[str, Callable[[Ranks, int, int], Mean]] = {
    "CGX, nearest": lambda ranks, bits, seed: cgx(ranks, bits, "nearest", seed),
    "CGX, stochastic": lambda ranks, bits, seed: cgx(ranks, bits, "stochastic", seed),
    "ours, nearest": lambda ranks, bits, seed: ours(ranks, bits, "nearest", seed),
    "ours, stochastic": lambda ranks, bits, seed: ours(ranks, bits, "stochastic", seed),
    "ours, correlated": lambda ranks, bits, seed: ours(ranks, bits, "correlated", seed),
    "ours, rotated": lambda ranks, bits, seed: ours(ranks, bits, "nearest", seed, True),
    "ours, rotated, stochastic": lambda ranks, bits, seed: ours(
        ranks, bits, "stochastic", seed, True
    ),
    "ours, rotated, correlated": lambda ranks, bits, seed: ours(
        ranks, bits, "correlated", seed, True
    ),
    "not built: clipped, not rotated": lambda ranks, bits, seed: proposed(
        ranks, bits, even_within, seed
    ),
    "not built: exponential levels": lambda ranks, bits, seed: proposed(
        ranks, bits, exponential, seed
    ),
    "not built: rotated, normal levels": lambda ranks, bits, seed: proposed(
        ranks, bits, normal_levels, seed, rotated=True
    ),
    "not built: rotated, a bit to the second phase": lambda ranks, bits, seed: proposed(
        ranks, bits, even_within, seed, rotated=True, more=1
    ),
    "not built: rotated, a bit to the first phase": lambda ranks, bits, seed: proposed(
        ranks, bits, even_within, seed, rotated=True, more=-1
    ),
}


def relative_error(found: Ranks, ranks: Ranks) -> float:
    """Returns the L2 distance of all leaves to the fp64 mean, divided by that mean's L2 norm."""
    exact = {k: x.mean(0, dtype=np.float64) for k, x in ranks.items()}
    off = sum(np.square(found[k] - x).sum() for k, x in exact.items())
    return float(np.sqrt(off / sum(np.square(x).sum() for x in exact.values())))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=5)
    measure.add_json_option(parser)
    arguments = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", max(WORLDS))
    seeds = range(arguments.seeds)
    samples = {
        "Gaussian": [{w: gaussian(w, s) for w in WORLDS} for s in seeds],
        **{name: list(recorded(name, seeds)) for name in TASKS},
    }
    rows: list[dict[str, Any]] = []
    for gradients, every in samples.items():
        for world in WORLDS:
            for bits in BITS:
                for name, method in METHODS.items():
                    made = [method(s[world], bits, i) for i, s in enumerate(every)]
                    errors = [
                        relative_error(m, s[world]) for (m, _), s in zip(made, every, strict=True)
                    ]
                    row = {
                        "gradients": gradients,
                        "world": world,
                        "bits": bits,
                        "method": name,
                        "bits_per_value": made[0][1],
                        "error": float(np.mean(errors)),
                        "deviation": float(np.std(errors, ddof=1)),
                        "error_at_one_bit": float(np.mean(errors)) * 2 ** made[0][1],
                    }
                    rows.append(row)
                    print(*(f"{k}={v:.5g}" if isinstance(v, float) else v for k, v in row.items()))
    measure.write_json(arguments.json, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
