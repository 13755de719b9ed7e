"""Tunes over real NCCL between processes on one GPU, and compares the choice with fixed settings.

    python tests/gpu/tuned.py OUT.jsonl --world 2 [--connection-rate 5]

First `cgx_jax.tune` measures the links, and a `Tuner` chooses on the steps of 25 MB of gradients in
160 leaves. Then psum, "xla", "nccl" on each number of streams, and the choice take turns. The first
half of the turns says which setting is the best, and the second half compares it with the choice.
Links are those of ranks.py. Exits with 1 if the choice is slower than psum or, by 5 %, than the
best setting.
"""

import argparse
import pathlib
import sys

import ranks

ALLOWED = 1.05  # times the best setting's time
SECONDS, TURNS = 30.0, 61


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=20, help="of tune")
    return ranks.run(parser, rank)


def rank(arguments: argparse.Namespace, number: int) -> int:
    ranks.join(arguments, number)

    import jax
    import numpy as np
    from jax.sharding import Mesh

    import tuner as benchmark
    from cgx_jax.choice import auto
    from cgx_jax.exchanges import Nccl, Xla
    from cgx_jax.reductions import GatherSum
    from cgx_jax.tuning import Setting
    from cgx_jax.tuning.candidates import FUSION, STREAMS
    from cgx_jax.tuning.link_timer import LinkTimer, gradient

    links = LinkTimer("tuned", Mesh(np.array(jax.devices()), ("ranks",)), "ranks")
    shapes = benchmark.TREES["25 MB, 160 leaves"]
    if arguments.platform == "cpu":
        shapes = shapes[:3]
    grads = [
        links.place(gradient, int(np.prod(shape))).reshape(links.world, *shape) for shape in shapes
    ]
    tuner = benchmark.tuned(links, grads, arguments.seconds)
    profile = auto.active()
    exchanges = [Xla(), *(Nccl(streams=count) for count in STREAMS)]
    usable = {exchange.shorthand for exchange in auto.available()}
    fixed = [
        Setting(),
        *(
            Setting(exchange, reduction, None, FUSION[0])
            for reduction in (None, GatherSum())
            for exchange in exchanges
            if exchange.shorthand in usable
        ),
    ]
    calls = [benchmark.compiled(links, grads, setting) for setting in (*fixed, tuner.current)]
    seconds = benchmark.turns(links, calls, TURNS, SECONDS)
    half = len(seconds) // 2
    best = int(np.median(seconds[:half, :-1], axis=0).argmin())
    medians = np.median(seconds[half:], axis=0)
    share = float(medians[best] / medians[-1])
    if links.first:
        print(tuner.table())
        names = [*map(str, fixed), "choice"]
        for name, taken in zip(names, medians, strict=True):
            print(f"{taken * 1e3:9.2f} ms  {name}")
        print(f"choice {tuner.current}: {share:.3f} of the best's speed", flush=True)
        ranks.add_run(
            arguments.out,
            [{"setting": n, "seconds": float(t)} for n, t in zip(names, medians, strict=True)],
            device=jax.devices()[0].device_kind,
            world=arguments.world,
            connection_rate=arguments.connection_rate,
            streams_of_tune=getattr(profile.engine, "streams", None),
            choice=str(tuner.current),
            best=str(fixed[best]),
            share=share,
            gain=float(medians[0] / medians[-1]),
            turns=len(seconds) - half,
        )
    jax.distributed.shutdown()
    slow = medians[-1] > ALLOWED * medians[best] or medians[-1] > medians[0]
    return int(bool(slow) and arguments.platform == "cuda")


if __name__ == "__main__":
    sys.exit(main())
