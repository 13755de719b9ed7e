"""What any compressor, reduction and exchange must hold, for every row of the table of cases."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from cases import CASES, PAIRS, every
from cgx_jax.exchanges import Xla
from cgx_jax.testing import check_compressor, check_exchange, check_reduction
from toys import Steps


@pytest.mark.parametrize("name", every(CASES))
def test_compressor(name):
    case = CASES[name]
    check_compressor(case.compressor)
    assert tuple(t for t in case.dtypes if case.compressor.supports(jnp.dtype(t))) == case.dtypes
    assert case.compressor.lossless or case.compressor.reductions == case.reductions


# All pairs run on an odd number of ranks, one pair of every kind on many ranks.
RANKS = [
    *(pytest.param(*p.values, 3, marks=p.marks) for p in every(PAIRS, first_reduction=True)),
    *(
        pytest.param(*p.values, 8, marks=pytest.mark.slow)
        for p in every(PAIRS, first_reduction=True)
        if not p.marks
    ),
]


@pytest.mark.parametrize(("name", "world"), RANKS)
def test_reduction(name, world):
    check_reduction(*PAIRS[name], worlds=(world,))


@pytest.mark.parametrize("world", [1, 2, 4, 8])
def test_exchange(world):
    check_exchange(Xla(), Mesh(np.array(jax.devices()[:world]), ("x",)), "x")


class WrongBytes(Steps):
    def wire_bits(self, shape, dtype=jnp.float32):
        return super().wire_bits(shape) + 8


class OverBound(Steps):
    def error_bound(self, x):
        return super().error_bound(x) / 2


class LosesState(Steps):
    reductions = ("gather_sum",)

    def init(self, shape, dtype):
        return (jnp.zeros(shape),)

    def prepare(self, x, state):
        return x, ()


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        (WrongBytes, "is not .payload_bytes"),
        (OverBound, "exceeds its bound"),
        (LosesState, "state is not like init"),
    ],
)
def test_a_wrong_compressor_does_not_pass(kind, says):
    made = dataclasses.dataclass(frozen=True)(kind)
    with pytest.raises(AssertionError, match=says):
        check_compressor(made())


class Misplaced(Xla):
    def scatter(self, name, rows, axes):
        return super().scatter(name, rows, axes)[::-1]


class Miscounted(Xla):
    def gather(self, name, row, axes):
        return super().gather(name, row, axes) ^ jnp.uint8(1)


@pytest.mark.parametrize("kind", [Misplaced, Miscounted])
def test_a_wrong_exchange_does_not_pass(kind):
    mesh = Mesh(np.array(jax.devices()[:2]), ("x",))
    with pytest.raises(AssertionError, match="bytes are not where they belong"):
        check_exchange(kind(), mesh, "x")
    with pytest.raises(AssertionError):
        check_reduction(Steps(), exchange=kind(), worlds=(2,))
