"""What is 0 on every rank stays exactly 0: rows that nobody touched do not move."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import cgx_jax
import oracle
from cases import CASES, FEW, every
from cgx_jax import ErrorFeedback, Quantize, Rule, Rules, SecondMoment
from cgx_jax.compressors import SharedTernGrad, TopK
from cgx_jax.exchanges import Xla
from cgx_jax.kernels.wire import ROUNDINGS, mask_segment
from cgx_jax.reductions import Levels, shares
from cgx_jax.reductions.named import REDUCTIONS
from cgx_jax.transforms import MomentumCorrection
from optax_steps import run
from worlds import on_ranks, ranks

RANKS, STEPS = 4, 2
MESH = ranks(RANKS)


def gradients(dtype, shape=(61, 48)):
    """Returns [steps, ranks, *shape] and which values and which rows are 0 on all ranks, always."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(STEPS, RANKS, *shape))
    x[rng.random(x.shape[:-1]) < 0.5] = 0  # rows that one rank does not touch in one step
    rows = rng.random(shape[0]) < 0.5
    rows[-1] = True  # the leaf's end, in a bucket that is shorter
    values = rng.random(shape) < 0.3
    x[..., rows, :], x[..., values] = 0, -0.0
    rows = np.broadcast_to(rows[:, None], shape)
    return np.asarray(x, jnp.dtype(dtype)), values | rows, rows


def means(code, grads, rules=(), **options):
    policy = Rules(rules, code, exact=())
    tx = cgx_jax.sync_gradients("data", policy, exchange=Xla(), mesh=MESH, **options)
    return jax.tree.map(lambda x: np.asarray(x, np.float32), run(tx, MESH, grads)[0])


def check(zeros, found, values, rows):
    for x in found:
        assert np.isfinite(x).all()
        assert x[~values].any()
    if zeros == "move":  # the table says so only of codes that do move zeros
        assert any(x[values].any() for x in found)
    else:
        for x in found:
            np.testing.assert_array_equal(x[values if zeros == "stay" else rows], 0)


CODES = {n: c for n, c in CASES.items() if c.reductions}
# `Quantize` is tried in every way by test_rows_of_any_width.
QUICK = [
    n for p in every(CODES) if not p.marks for n in p.values
    if not isinstance(CODES[n].compressor, Quantize)
]  # fmt: skip


@pytest.mark.usefixtures("unoptimized")
@pytest.mark.parametrize(
    "names", [QUICK, pytest.param(list(CODES), marks=pytest.mark.slow)], ids=["quick", "all"]
)
def test_codes_in_one_tree(names):
    """Each by its first reduction; of the few, leaves of 16 bits too."""
    names = [(n, dtype) for n in names for dtype in CODES[n].dtypes[: 2 if n in FEW else 1]]
    leaves = {f"{n}, {dtype}": gradients(dtype) for n, dtype in names}
    rules = [Rule(CODES[n].compressor, path=f"^{n}, {dtype}$") for n, dtype in names]
    found = means(Quantize(4), {leaf: x for leaf, (x, _, _) in leaves.items()}, rules)
    for (n, _), (leaf, (_, values, rows)) in zip(names, leaves.items(), strict=True):
        check(CODES[n].zeros, [step[leaf] for step in found], values, rows)


NODES = ((0, 1), (2, 3))
WAYS = {
    **{r.shorthand: {"reduction": r.shorthand} for r in REDUCTIONS},
    "levels": {"levels": Levels(groups=NODES)},
    "levels of codes": {"levels": Levels(groups=NODES, compressor=Quantize(8))},
    "levels, gather_sum": {"levels": Levels(groups=NODES), "reduction": "gather_sum"},
    "levels, ring": {"levels": Levels(groups=NODES), "reduction": "ring"},
}
SHAPES = {"rows divide": (64, 300), "rows are padded": (61, 48), "shares are flat": (5, 47)}


@pytest.mark.usefixtures("unoptimized")
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    "code", [Quantize(4), Quantize(3, 96, "stochastic", rotation=True)], ids=str
)
@pytest.mark.parametrize("way", WAYS)
def test_reductions(way, code, shape):
    if way == "sum_rounds":
        code = SharedTernGrad(64)
    grads, values, rows = gradients("float32", SHAPES[shape])

    how = {"key": jax.random.key(0), "exchange": "xla"} | WAYS[way]
    f = functools.partial(cgx_jax.psum_compressed, axis_name="data", compressor=code, **how)
    total = on_ranks(f, MESH, out=P())(grads[0])
    if shape == "shares are flat" and way.startswith(("ring", "levels")):
        check("move", [np.asarray(total)], rows, rows)
    else:
        check("rows", [np.asarray(total)], values, rows)


@pytest.mark.parametrize(
    ("shape", "world", "share"),
    [
        ((64, 48), 4, (16, 48)),
        ((61, 48), 4, (16, 48)),
        ((8, 6, 5), 4, (12, 5)),
        ((48, 7), 17, (3, 7)),  # three rows of padding for 48
        ((47, 7), 10, (33,)),  # and for 47
        ((5, 48), 4, (60,)),
        ((100,), 4, (25,)),
        ((), 4, (1,)),
        ((), 1, (1, 1)),
        ((0, 3), 4, (0, 3)),
    ],
)
def test_shares_are_whole_rows_where_a_sixteenth_of_padding_is_enough(shape, world, share):
    assert shares.shape_of(shape, world) == share


MEMORIES = {
    "momentum": {"memory": MomentumCorrection(0.9)},
    "error feedback and units": {"memory": ErrorFeedback(), "precondition": SecondMoment()},
}


@pytest.mark.usefixtures("unoptimized")
@pytest.mark.parametrize("options", MEMORIES.values(), ids=MEMORIES)
@pytest.mark.parametrize(
    ("code", "zeros"),
    [
        (Quantize(8, rotation=True), "rows"),
        (Quantize(3, 128, "correlated", rotation=True), "rows"),
        (TopK(0.1), "stay"),
    ],
    ids=str,
)
def test_memories_and_units(code, zeros, options):
    grads, values, rows = gradients("float32")
    check(zeros, means(code, grads, **options), values, rows)


def test_rows_of_any_width_from_a_sixteenth_of_a_bucket_on():
    leaves, rules = {}, []
    for bits in range(1, 9):
        code = Quantize(bits, rounding=ROUNDINGS[bits % 3], rotation=bits % 2 == 0)
        rules.append(Rule(code, path=f"^{bits} "))
        for width in (32, 37, 50, 64, 300):
            leaves[f"{bits} bits, {width}"] = gradients("float32", (41, width))
    found = means(Quantize(4), {name: x for name, (x, _, _) in leaves.items()}, rules)
    for name, (_, values, rows) in leaves.items():
        check("rows", [step[name] for step in found], values, rows)


def test_beside_values_that_are_not_finite():
    grads, _, rows = gradients("float32", (64, 64))
    grads[:, 1, 0, 5] = np.nan  # the first of eight buckets
    for code in (Quantize(4), Quantize(4, rotation=True)):
        for x in means(code, grads):
            assert np.isnan(x[0]).all()
            np.testing.assert_array_equal(x[8:][rows[8:]], 0)


@pytest.mark.parametrize("bucket_size", [32, 64, 96, 512, 544, 1024, 4096])
def test_a_segment_is_the_smallest_divisor_of_a_row_that_is_long_enough(bucket_size):
    for row in [*range(300), 768, 1000, 1021, 4096, 30_000, 50_257]:
        assert mask_segment(row, bucket_size) == oracle.segment_of(row, bucket_size), row


@pytest.mark.usefixtures("unoptimized")
@pytest.mark.parametrize("code", [Quantize(4), Quantize(4, rotation=True)], ids=str)
@pytest.mark.parametrize("dimension", [0, 1])
def test_a_scattered_sum_and_a_gathered_array(code, dimension):
    grads, values, rows = gradients("float32", (64, 192))

    def f(own):
        by = "data", code
        how = {"tiled": True, "exchange": "xla"}
        part = cgx_jax.psum_scatter_compressed(own, *by, scatter_dimension=dimension, **how)
        return cgx_jax.all_gather_compressed(part, *by, axis=dimension, **how)

    total = on_ranks(f, MESH)(grads[0])
    check("rows", np.asarray(total), values, rows)
