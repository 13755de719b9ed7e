"""Times reductions beside matrix products that do not depend on them, over real NCCL on one GPU.

    python tests/gpu/beside.py OUT.jsonl --world 2 --megabytes 25 --connection-rate 5

A program has a chain of matrix products, a reduction, or both. In every turn each program runs
once, in an order that is drawn anew, behind a barrier; a time is the slowest rank's. `hidden` is
the share of the shorter part that the program with both saves: 1 if one part takes no time of its
own, 0 if they run one after the other.
"""

import argparse
import pathlib
import sys
import time

import ranks

SIDE = 2048
SECONDS = 0.02  # of the products, about: as long as a reduction over a slow link


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--megabytes", type=float, default=25)
    parser.add_argument("--repeats", type=int, default=15)
    return ranks.run(parser, rank)


def rank(arguments: argparse.Namespace, number: int) -> int:
    import jax
    import numpy as np
    from jax import lax
    from jax.experimental import multihost_utils
    from jax.sharding import Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P

    import cgx_jax
    from cgx_jax.exchanges import Nccl

    ranks.join(arguments, number)
    small = arguments.platform == "cpu"
    mesh = Mesh(np.array(jax.devices()), ("ranks",))
    side, values = (64, 20_000) if small else (SIDE, int(arguments.megabytes * 1e6 / 4))
    rng, split = np.random.default_rng(number), NamedSharding(mesh, P("ranks"))

    def placed(x):
        shape = (arguments.world, *x.shape)
        return jax.make_array_from_process_local_data(split, x[None], shape)

    gradient = placed(rng.standard_normal(values).astype(np.float32))
    matrix = placed(rng.standard_normal((side, side)).astype(np.float32) / side**0.5)

    def program(reduction, count):
        def of_rank(x, m):
            product = m[0]
            for _ in range(count):
                product = product @ m[0]
            return (reduction(x[0]) if reduction else x[0][:1]), product[None]

        out = P() if reduction else P("ranks"), P("ranks")
        f = jax.shard_map(of_rank, mesh=mesh, in_specs=P("ranks"), out_specs=out, check_vma=False)
        return jax.jit(f)

    def timed(f):
        meet(gradient).block_until_ready()
        start = time.perf_counter()
        jax.block_until_ready(f(gradient, matrix))
        return time.perf_counter() - start

    def compressed(exchange):
        q4 = cgx_jax.Quantize(bits=4)
        return lambda x: cgx_jax.psum_compressed(x, "ranks", q4, exchange=exchange)

    meet = jax.jit(
        jax.shard_map(
            lambda x: lax.psum(x[0, :1], "ranks"), mesh=mesh, in_specs=P("ranks"), out_specs=P()
        )
    )
    each = program(None, 8)
    timed(each)
    tried = multihost_utils.process_allgather(np.float64(timed(each))).max()
    count = 8 if small else max(1, int(8 * SECONDS / tried))
    reductions = {
        "fp32 psum": lambda x: lax.psum(x, "ranks"),
        "4 bits, xla": compressed("xla"),
        "4 bits, nccl": compressed("xla" if small else Nccl()),
    }
    programs = [program(None, count)]
    programs += [program(f, n) for f in reductions.values() for n in (0, count)]
    for f in programs:
        timed(f)
    turns = np.empty((arguments.repeats, len(programs)))
    order = np.random.default_rng(0)  # the same on all ranks
    for row in turns:
        for way in order.permutation(len(programs)):
            row[way] = timed(programs[way])
    seconds = multihost_utils.process_allgather(turns).reshape(-1, *turns.shape).max(axis=0)
    if number == 0:
        rows = []
        products = seconds[:, 0]
        for way, name in enumerate(reductions):
            alone, both = seconds[:, 1 + 2 * way], seconds[:, 2 + 2 * way]
            hidden = (products + alone - both) / np.minimum(products, alone)
            found = {"products": products, "reduction": alone, "both": both, "hidden": hidden}
            quartiles = {
                k: [float(q) for q in np.percentile(v, (25, 50, 75))] for k, v in found.items()
            }
            rows.append({"way": name, **quartiles})
            print(name, {k: round(v[1], 4) for k, v in quartiles.items()}, flush=True)
        ranks.add_run(
            arguments.out,
            rows,
            check="beside",
            device=jax.devices()[0].device_kind,
            world=arguments.world,
            megabytes=arguments.megabytes,
            connection_rate=arguments.connection_rate,
            sockets=arguments.sockets,
        )
    jax.distributed.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
