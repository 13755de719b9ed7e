"""Programs whose labels tests/test_mpi.py compares, in its process and in others."""

import re

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import cgx_jax
from cgx_jax import Quantize
from cgx_jax.exchanges import Mpi


def labels(f, *operands, mesh, axis="data"):
    """Returns what ranks compare before the calls of a program, in order; nothing is sent."""
    mapped = jax.shard_map(
        f, mesh=mesh, in_specs=P(mesh.axis_names), out_specs=P(), check_vma=False
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Mpi, "require", lambda *args: None)
        text = jax.jit(mapped).lower(*operands).as_text()
    return re.findall(r'program = "([^"]*)"', text)


def program(paths="ab", shape=(64, 64), dtype=np.float32, before=1.0, after=1.0, code=None, **how):
    """One factory whose programs have one name and one line; the last rank may run another."""

    def step(tree):
        tree = {k: x[0] * np.asarray(before, x.dtype) for k, x in tree.items()}
        options = {"exchange": "mpi", "axis_name": "data", **how}
        mean = cgx_jax.pmean_compressed(tree, compressor=code or Quantize(4), **options)
        return {k: x * np.asarray(after, x.dtype) for k, x in mean.items()}

    return step, {k: np.zeros((8, *shape), dtype) for k in paths}


def labels_of_two(mesh, prints):
    """Returns the labels of a program, and of one that may print on this rank."""
    step, tree = program()

    def printing(tree):
        if prints:
            jax.debug.print("{}", tree["a"][0, 0])
        return step(tree)

    return [x for f in (step, printing) for x in labels(f, tree, mesh=mesh)]
