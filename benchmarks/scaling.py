"""What grows with the number of ranks, up to 4,096: bytes, messages, and the program itself.

    python benchmarks/scaling.py --json benchmarks/results/scaling.jsonl

Lowers `psum_compressed` of one leaf for a mesh that need not exist. Counts the operations of the
program (StableHLO), and the seconds of tracing and lowering. Nothing is compiled and nothing runs.
"""

import re
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P

import cgx_jax
import measure
from alpha_beta import REDUCTIONS
from cgx_jax.compressors import BlockTopK, Compressor, Quantize, ScaledSign, TopK
from cgx_jax.compressors.base import CodedLeaf

VALUES = 25_000_000
CASES: dict[str, tuple[Compressor, str]] = {
    "4 bits": (Quantize(4), "scatter_gather"),
    "4 bits, tree": (Quantize(4), "tree"),
    "ScaledSign": (ScaledSign(), "scatter_gather"),
    "TopK 1 %": (TopK(0.01), "gather_sum"),
    "BlockTopK 5 of 512": (BlockTopK(5), "scatter_gather"),
}


def lowered(code: Compressor, how: str, world: int) -> tuple[int, float]:
    """Returns the program's operations, and the seconds of tracing and lowering it."""
    mesh = AbstractMesh((world,), ("data",))
    mapped = jax.shard_map(
        lambda x: cgx_jax.psum_compressed(x[0], "data", code, exchange="xla", reduction=how)[None],
        mesh=mesh,
        in_specs=P("data"),
        out_specs=P("data"),
    )
    split = NamedSharding(mesh, P("data"))
    x = jax.ShapeDtypeStruct((world, VALUES), jnp.float32, sharding=split)
    start = time.perf_counter()
    text = jax.jit(mapped).trace(x).lower(lowering_platforms=("cpu",)).as_text()
    return len(re.findall(r"= \"?(?:stablehlo|func|call)", text)), time.perf_counter() - start


def row(name: str, world: int) -> dict[str, Any]:
    code, how = CASES[name]
    leaf = CodedLeaf(code, (VALUES,), jnp.dtype(jnp.float32), 0)
    operations, seconds = lowered(code, how, world)
    return {
        "method": name,
        "world": world,
        "sent_bytes": REDUCTIONS[how].bytes_sent((leaf,), world),
        "operations": operations,
        "lower_seconds": seconds,
    }


def main() -> int:
    arguments = measure.parser(__doc__, worlds="8,64,512,4096").parse_args()
    rows = []
    for world in map(int, arguments.worlds.split(",")):
        for name in CASES:
            rows.append(row(name, world))
            print(
                f"{world:>5} ranks {name:<20} {rows[-1]['sent_bytes'] / 1e6:>9.1f} MB"
                f" {rows[-1]['operations']:>7} operations, lowered in"
                f" {rows[-1]['lower_seconds']:.1f} s",
                flush=True,
            )
    measure.write_json(arguments.json, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
