"""A reduction's program does not grow with the number of ranks, because it loops over them."""

import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P

import cgx_jax
from cases import FEW, LOSSY, every

PAIRS = {
    f"{name}, {reduction}": (case.compressor, reduction)
    for name, case in LOSSY.items()
    for reduction in case.reductions
    if not case.stateful and reduction != "tree"  # a tree has a step for each power of two
}


def operations(compressor, reduction, world):
    """Counts the program's operations by kind, except those on constants."""
    mesh = AbstractMesh((world,), ("data",))
    mapped = jax.shard_map(
        lambda x, key: cgx_jax.psum_compressed(
            x[0], "data", compressor, exchange="xla", reduction=reduction, key=key
        ),
        mesh=mesh,
        in_specs=(P("data"), P()),
        out_specs=P(),
    )
    split = NamedSharding(mesh, P("data"))
    x = jax.ShapeDtypeStruct((world, 1 << 17), jnp.float32, sharding=split)
    key = jax.eval_shape(lambda: jax.random.key(0))
    lowered = jax.jit(mapped).trace(x, key).lower(lowering_platforms=("cpu",))
    return len(re.findall(r" = (?:\"?stablehlo\.|call|func)", lowered.as_text()))


@pytest.mark.parametrize("name", every(PAIRS, quick=FEW))
def test_a_program_does_not_grow_with_the_ranks(name):
    few, many = (operations(*PAIRS[name], world) for world in (32, 256))
    assert many <= 1.1 * few
