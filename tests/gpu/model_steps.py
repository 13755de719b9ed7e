"""Times whole training steps of real models, over real NCCL between processes on one GPU.

    python tests/gpu/model_steps.py OUT.jsonl --model gpt2 --world 2 --rates unlimited,50,25,10

A step is the forward and backward pass in bf16, the reduction of fp32 gradients, AdamW and the
update, with donated state. "compute alone" reduces nothing: it is the ceiling. In every turn each
way takes one step, in an order that is drawn anew; a time is the slowest rank's. Every rank sends
at most a rate in Gbit/s, as a node with a network card does (paced_sockets.cc). All share the GPU,
so the model's part of a step takes as long as if each rank had 1 / world of it.
"""

import argparse
import os
import pathlib
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import ranks

# Ranks compile programs in several threads, so they cannot share the search for fast kernels.
os.environ["XLA_FLAGS"] = "--xla_gpu_shard_autotuning=false " + os.environ.get("XLA_FLAGS", "")

MOST_TURNS = 31
FEWEST_TURNS = 5


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--model", choices=("gpt2", "resnet50"), default="gpt2")
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--rates", default="unlimited", help="Gbit/s of a rank, a list")
    parser.add_argument("--seconds", type=float, default=10, help="of turns, for each rate")
    parser.set_defaults(paced=True)
    return ranks.run(parser, rank)


def ways(nccl) -> dict:
    """Returns what precedes the optimizer in the chain, by name."""
    import jax
    import jax.numpy as jnp
    import optax
    from jax import lax

    from cgx_jax import Quantize, SecondMoment, sync_gradients

    def in_bf16(grads, _):
        small = jax.tree.map(lambda g: g.astype(jnp.bfloat16), grads)
        return jax.tree.map(lambda g: g.astype(jnp.float32), lax.pmean(small, "ranks"))

    four, rotated = Quantize(bits=4), Quantize(bits=4, rotation=True)
    return {
        "compute alone": optax.identity(),
        "fp32 psum": optax.stateless(lambda grads, _: lax.pmean(grads, "ranks")),
        "bf16 psum": optax.stateless(in_bf16),
        "4 bits, xla": sync_gradients("ranks", four, exchange="xla"),
        "4 bits, nccl": sync_gradients("ranks", four, exchange=nccl),
        "recommended, nccl": sync_gradients(
            "ranks", rotated, exchange=nccl, precondition=SecondMoment()
        ),
    }


def rank(arguments: argparse.Namespace, number: int) -> int:
    import jax
    import models
    import numpy as np
    import optax
    from jax.experimental import multihost_utils
    from jax.sharding import Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P

    from cgx_jax.exchanges import Nccl

    ranks.join(arguments, number)
    small = arguments.platform == "cpu"
    mesh = Mesh(np.array(jax.devices()), ("ranks",))
    make = models.gpt2 if arguments.model == "gpt2" else models.resnet50
    params, loss = make(0, small)
    replicated, split = NamedSharding(mesh, P()), NamedSharding(mesh, P("ranks"))
    params = jax.tree.map(np.asarray, params)
    batch = models.synthetic(arguments.model, arguments.world, small)
    batch = jax.tree.map(
        lambda x: jax.make_array_from_process_local_data(split, x[number][None], x.shape), batch
    )

    def compiled(reduction):
        optimizer = optax.chain(reduction, optax.adamw(1e-4))

        def step(state, batch):
            params, opt_state = state
            grads = jax.grad(loss)(params, jax.tree.map(lambda x: x[0], batch))
            updates, opt_state = optimizer.update(grads, opt_state, params)
            return optax.apply_updates(params, updates), opt_state

        mapped = jax.shard_map(
            step, mesh=mesh, in_specs=(P(), P("ranks")), out_specs=P(), check_vma=False
        )
        state = jax.jit(lambda p: (p, optimizer.init(p)), out_shardings=replicated)(params)
        start = time.perf_counter()
        program = jax.jit(mapped, donate_argnums=0).lower(state, batch).compile()
        return program, state, time.perf_counter() - start

    reductions = ways("xla" if small else Nccl(streams=2))
    # The first compilation chooses kernels for the model; the others find that choice.
    made = [compiled(reductions["compute alone"])]
    with ThreadPoolExecutor(1 if small else 5) as pool:
        made += pool.map(compiled, list(reductions.values())[1:])
    steps, states, compiling = map(list, zip(*made, strict=True))
    meet = jax.jit(
        jax.shard_map(lambda x: jax.lax.psum(x, "ranks"), mesh=mesh, in_specs=P("ranks"),
                      out_specs=P())
    )  # fmt: skip
    here = jax.make_array_from_process_local_data(split, np.ones(1, np.float32))

    def timed(way: int) -> float:
        for _ in range(2):  # by the second, the stragglers of the first have arrived
            meet(here).block_until_ready()
        start = time.perf_counter()
        states[way] = jax.block_until_ready(steps[way](states[way], batch))
        return time.perf_counter() - start

    for way in range(len(steps)):
        for _ in range(2):
            timed(way)
    for turn, rate in enumerate(arguments.rates.split(",")):
        ranks.pace_program(0 if rate == "unlimited" else float(rate))
        meet(here).block_until_ready()
        rng, seconds = np.random.default_rng(turn), []
        start = time.perf_counter()
        first = [timed(way) for way in range(len(steps))]
        # Every rank takes as many turns as the first one has time for.
        turns = arguments.seconds / max(time.perf_counter() - start, 1e-9)
        turns = int(multihost_utils.broadcast_one_to_all(np.int32(min(turns, MOST_TURNS))))
        for _ in range(1 if small else max(turns, FEWEST_TURNS)):
            taken = dict.fromkeys(range(len(first)), 0.0)
            for way in rng.permutation(len(steps)):
                taken[int(way)] = timed(int(way))
            seconds.append(list(taken.values()))
        slowest = multihost_utils.process_allgather(np.array(seconds)).max(axis=0)
        if number == 0:
            report(arguments, rate, list(reductions), slowest, compiling, params)
    jax.distributed.shutdown()
    return 0


def report(arguments, rate, names, seconds, compiling, params) -> None:
    import jax
    import models
    import numpy as np

    rows = []
    exact = seconds[:, names.index("fp32 psum")]
    for name, own, compile_seconds in zip(names, seconds.T, compiling, strict=True):
        quartiles = [float(q) for q in np.percentile(own, (25, 50, 75))]
        ratio = [float(q) for q in np.percentile(exact / own, (25, 50, 75))]
        print(
            f"{arguments.model} {arguments.world} ranks {rate:>9} {name:<18}"
            f" {quartiles[1] * 1e3:8.1f} ms  {ratio[1]:.2f} x fp32 psum",
            flush=True,
        )
        rows.append(
            {"way": name, "seconds": quartiles, "over_fp32": ratio, "compile": compile_seconds}
        )
    ranks.add_run(
        arguments.out,
        rows,
        check="model_steps",
        device=jax.devices()[0].device_kind,
        model=arguments.model,
        parameters=sum(x.size for x in jax.tree.leaves(params)),
        world=arguments.world,
        rate=rate,
        attention=models.kernel_of_attention(),
        turns=len(seconds),
        nccl={k: v for k, v in os.environ.items() if k.startswith("NCCL_")},
        mps="CUDA_MPS_PIPE_DIRECTORY" in os.environ,
    )


if __name__ == "__main__":
    sys.exit(main())
