"""Checks exchanges, reductions and levels between four processes that share one GPU.

    python tests/gpu/reductions.py OUT.jsonl [--platform cpu]

Checks `Nccl` and `Xla` with `cgx_jax.testing.check_exchange`. Then sums values with each code and
each reduction that the code allows, both flat and over two nodes of two ranks, with all exchanges.
The ranks must hold the same bits, the exchanges must give the same bytes, and the error must be
within the bound.
"""

import argparse
import pathlib
import sys
import zlib

import ranks

WORLD, VALUES = 4, 300_007


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=pathlib.Path)
    parser.set_defaults(world=WORLD)
    return ranks.run(parser, rank)


def rank(arguments: argparse.Namespace, number: int) -> int:
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.experimental import multihost_utils
    from jax.sharding import Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P

    import cgx_jax
    from cgx_jax.exchanges import Nccl, Xla
    from cgx_jax.reductions import Levels
    from cgx_jax.reductions.named import named
    from cgx_jax.testing import check_exchange

    ranks.join(arguments, number)
    exchanges = (
        [Xla()] if arguments.platform == "cpu" else [Xla(), Nccl(), Nccl(1 << 16), Nccl(streams=3)]
    )
    flat = Mesh(np.array(jax.devices()), ("data",))
    grid = Mesh(np.array(jax.devices()).reshape(2, 2), ("node", "local"))
    for exchange in exchanges:
        check_exchange(exchange, flat, "data")
    every = np.random.default_rng(0).standard_normal((WORLD, VALUES)).astype(np.float32)
    exact = every.astype(np.float64).sum(0)
    codes = [
        cgx_jax.Quantize(4),
        cgx_jax.Quantize(4, 128, rotation=True),
        cgx_jax.Quantize(3, 96, "stochastic"),
        cgx_jax.Cast(jnp.bfloat16),
    ]
    rows = []
    for code in codes:
        for how in code.reductions:
            for mesh, levels in ((flat, None), (grid, Levels("local"))):
                found = []
                for exchange in exchanges:

                    def reduce(x, mesh=mesh, code=code, how=how, levels=levels, exchange=exchange):
                        options = {"reduction": how, "levels": levels, "exchange": exchange}
                        key = jax.random.key(3)
                        return cgx_jax.psum_compressed(
                            x[0], mesh.axis_names, code, key=key, **options
                        )

                    spec = P(mesh.axis_names)
                    f = jax.jit(jax.shard_map(reduce, mesh=mesh, in_specs=spec, out_specs=P()))
                    sharding = NamedSharding(mesh, spec)
                    x = jax.make_array_from_callback(every.shape, sharding, every.__getitem__)
                    found.append(np.asarray(f(x).addressable_data(0)))
                sums = np.array([zlib.crc32(y.tobytes()) for y in found], np.uint32)
                alike = len(np.unique(multihost_utils.process_allgather(sums))) == 1
                off = np.abs(found[0] - exact).max()
                bound = float(named("here", how).error_bound(code, jnp.asarray(every)).max())
                row = {"code": str(code), "reduction": how, "levels": levels is not None}
                row |= {"alike": bool(alike), "error": float(off), "bound": bound}
                row["passed"] = bool(alike and off <= bound)
                rows.append(row)
    if number == 0:
        for row in rows:
            print(row)
        facts = {"device": jax.devices()[0].device_kind, "world": WORLD, "values": VALUES}
        facts["exchanges"] = [str(exchange) for exchange in exchanges]
        ranks.add_run(arguments.out, rows, check="reductions", **facts)
    jax.distributed.shutdown()
    return 0 if all(row["passed"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
