"""Pretrains a GPT-2 of 124 M parameters with exact and with compressed gradients, on one GPU.

    python tests/gpu/pretrain.py OUT.jsonl CORPUS.xz --seconds 300

Eight ranks are an axis of `vmap`, so each holds its own gradient, and encode, exchange, reduce and
decode run as on eight devices. Under DiLoCo each also holds its own parameters and moments; what is
evaluated are the shared ones. All ways start from the same parameters and see the same batches, in
one process, and take their steps in turns: whenever time ends, all have taken as many. The learning
rate warms up, then stays, then decays to 0 over the last fifth of the steps. Their number follows
from the time that the first steps take. CORPUS.xz is made by corpus.py; its last tokens are held
out. Exits with 1 if a loss is not finite.
"""

import argparse
import lzma
import pathlib
import sys
import time
from concurrent.futures import ThreadPoolExecutor

sys.path.append(str(pathlib.Path(__file__).resolve().parents[2] / "benchmarks"))

import jax
import jax.numpy as jnp
import models
import numpy as np
import optax
from jax import lax
from jax.sharding import PartitionSpec

import measure
from cgx_jax import Identity, Quantize, SecondMoment, state_specs, sync_gradients
from cgx_jax.transforms import diloco, local_params

WORLD = 8
HELD_OUT = 32  # windows for each rank
RATE, WEIGHT_DECAY, CLIP = 6e-4, 0.1, 1.0
LOOKS = 12  # evaluations in a run


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("corpus", type=pathlib.Path, nargs="?", help="random tokens without it")
    parser.add_argument("--seconds", type=float, default=300, help="of training, in all")
    parser.add_argument("--windows", type=int, default=4, help="a rank and step")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--decay", type=float, default=0.95, help="of SecondMoment, as Adam's")
    parser.add_argument("--every", type=int, default=32, help="steps of a round of DiLoCo")
    parser.add_argument("--ways", default="exact;bf16;4 bits;4 bits, recommended")
    parser.add_argument("--platform", default="cuda", help="cpu tries the script itself")
    arguments = parser.parse_args()
    began = time.perf_counter()
    jax.config.update("jax_platforms", arguments.platform)
    small = arguments.platform == "cpu"
    length = 64 if small else models.CONTEXT
    tokens, held_out = windows(arguments.corpus, length)
    order = np.random.default_rng(arguments.seed).permutation(len(tokens))
    params, loss = models.gpt2(arguments.seed, small)
    names = arguments.ways.split(";")

    def schedule(step, total):
        warm = jnp.minimum(1, (step + 1) / (0.05 * total))
        return RATE * warm * jnp.clip((total - step) / (0.2 * total), 0, 1)

    def step_of(name):
        optimizer = ways(arguments.decay, arguments.every)[name]

        def step(params, state, batch, number, total):
            here = local_params(params, state) if "DiLoCo" in name else params
            value, grads = jax.value_and_grad(loss)(here, batch)
            rate = schedule(number, total)
            updates, state = optimizer.update(grads, state, params, rate=rate)
            return optax.apply_updates(params, updates), state, lax.pmean(value, "ranks")

        def init(places):
            return jax.vmap(
                optimizer.init, in_axes=None, out_axes=places, axis_name="ranks", axis_size=WORLD
            )

        places = jax.tree.map(
            lambda spec: 0 if len(spec) else None,
            state_specs(jax.eval_shape(init(0), params), "ranks"),
            is_leaf=lambda x: isinstance(x, PartitionSpec),
        )
        over_ranks = jax.vmap(
            step,
            in_axes=(None, places, 0, None, None),
            out_axes=(None, places, None),
            axis_name="ranks",
        )
        state = jax.jit(init(places))(params)
        own = jax.tree.map(jnp.copy, params)
        batch = jnp.zeros((WORLD, arguments.windows, length + 1), jnp.int32)
        program = jax.jit(over_ranks, donate_argnums=(0, 1))
        program = program.lower(own, state, batch, jnp.float32(0), jnp.float32(1)).compile()
        return program, own, state

    evaluate = jax.jit(lambda p, batches: lax.map(lambda b: loss(p, b), batches).mean())
    held = jnp.asarray(held_out.reshape(-1, arguments.windows, length + 1), jnp.int32)
    made = [step_of(names[0])]
    with ThreadPoolExecutor(1 if small else 4) as pool:
        made += pool.map(step_of, names[1:])
    runs = dict(zip(names, made, strict=True))
    del made
    print(f"compiled after {time.perf_counter() - began:.0f} s", flush=True)

    def turn(number, total):
        """Takes a step of every way; returns their losses."""
        size = WORLD * arguments.windows
        chosen = order[np.arange(number * size, (number + 1) * size) % len(order)]
        batch = jnp.asarray(tokens[chosen].reshape(WORLD, -1, length + 1), jnp.int32)
        values = {}
        for name, (program, own, state) in runs.items():
            *after, values[name] = program(own, state, batch, jnp.float32(number), total)
            runs[name] = (program, *after)
        return values

    float(evaluate(params, held))
    # The first steps say how many there is time for. The learning rate is still small, so that
    # they are steps of the run like the others.
    tried, curves, number = (1 if small else 6), [], 0
    for _ in range(tried):
        curves.append(jax.block_until_ready(turn(number, jnp.float32(1e4))))
        number += 1
        if number == 1:
            start = time.perf_counter()
    each = (time.perf_counter() - start) / max(1, tried - 1)
    total = 4 if small else max(40, int(arguments.seconds / (each * 1.03)) // LOOKS * LOOKS)
    tokens_of_step = WORLD * arguments.windows * length
    print(
        f"{each * 1e3 / len(names):.0f} ms a step, {total} steps of {tokens_of_step} tokens",
        flush=True,
    )
    looks = []
    start = time.perf_counter()
    while number < total:
        curves.append(turn(number, jnp.float32(total)))
        number += 1
        if number % max(1, total // LOOKS) == 0 or number == total:
            found = {name: float(evaluate(own, held)) for name, (_, own, _) in runs.items()}
            looks.append((number, found))
            print(number, f"{time.perf_counter() - start:.0f} s", found, flush=True)
            write(arguments, names, params, tokens, tokens_of_step, total, curves, looks)
    finite = all(np.isfinite(list(found.values())).all() for _, found in looks)
    return 0 if finite else 1


def are_matrices(params: dict) -> dict:
    return jax.tree.map(lambda x: x.ndim > 1, params)


def ways(decay: float, every: int) -> dict:
    """Returns the optimizers by name; their `update` takes the learning rate as `rate`."""

    def in_rates(updates, state, params=None, *, rate, **others):
        return jax.tree.map(lambda u: -rate * u, updates), state

    adam = optax.chain(
        optax.clip_by_global_norm(CLIP),
        optax.scale_by_adam(b2=0.95),
        optax.add_decayed_weights(WEIGHT_DECAY, are_matrices),
        optax.GradientTransformationExtraArgs(optax.init_empty_state, in_rates),
    )

    def recommended(bits):
        code = Quantize(bits, rotation=True)
        moment = SecondMoment(decay=decay)
        return sync_gradients("ranks", code, exchange="xla", precondition=moment)

    def rarely(code):
        return diloco(adam, "ranks", code, every=every, exchange="xla")

    def in_bf16(grads, _):
        small = jax.tree.map(lambda g: g.astype(jnp.bfloat16), grads)
        return jax.tree.map(lambda g: g.astype(jnp.float32), lax.pmean(small, "ranks"))

    reductions = {
        "exact": optax.stateless(lambda grads, _: lax.pmean(grads, "ranks")),
        "bf16": optax.stateless(in_bf16),
        "4 bits": sync_gradients("ranks", Quantize(4), exchange="xla"),
        "4 bits, recommended": recommended(4),
        "3 bits, recommended": recommended(3),
        "2 bits, recommended": recommended(2),
    }
    return {name: optax.chain(reduction, adam) for name, reduction in reductions.items()} | {
        "DiLoCo, exact": rarely(Identity()),
        "DiLoCo, 4 bits": rarely(Quantize(4, rotation=True)),
    }


def windows(corpus: pathlib.Path | None, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns windows u16[n, length + 1] to train on, and those that are held out."""
    if corpus is None:
        data = np.random.default_rng(0).integers(0, 512, 60_000, dtype=np.uint16)
    else:
        data = np.frombuffer(lzma.decompress(corpus.read_bytes()), "<u2")
    cut = data[: len(data) // (length + 1) * (length + 1)].reshape(-1, length + 1)
    held = min(HELD_OUT * WORLD, len(cut) // 4) // 32 * 32
    return cut[:-held], cut[-held:]


def write(arguments, names, params, tokens, tokens_of_step, total, curves, looks) -> None:
    losses = {n: np.array([float(c[n]) for c in curves]) for n in names}
    rows = []
    for name in names:
        ends = [number for number, _ in looks]
        parts = np.split(losses[name][: ends[-1]], ends[:-1])
        rows.append(
            {
                "way": name,
                "steps": ends,
                "held_out_loss": [found[name] for _, found in looks],
                "training_loss": [float(part.mean()) for part in parts],
            }
        )
    run = {
        "check": "pretrain",
        "device": jax.devices()[0].device_kind,
        "parameters": sum(x.size for x in jax.tree.leaves(params)),
        "ranks": WORLD,
        "seed": arguments.seed,
        "decay": arguments.decay,
        "tokens_of_step": tokens_of_step,
        "steps_of_run": total,
        "tokens": tokens_of_step * looks[-1][0],
        "corpus": int(tokens.size),
        "attention": models.kernel_of_attention(),
        "jax": jax.__version__,
    }
    measure.write(arguments.out, [{**run, "rows": rows}])


if __name__ == "__main__":
    sys.exit(main())
