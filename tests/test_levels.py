"""Two levels: exact inside a node, compressed between nodes, the same bits everywhere."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import cgx_jax
from cgx_jax import Cast, Quantize, Rules
from cgx_jax.axes import Axes, sum_of_rows
from cgx_jax.compressors import SignSGD, Signum
from cgx_jax.compressors.base import CodedLeaf
from cgx_jax.reductions import GatherSum, Levels, ScatterGather, Tree
from cgx_jax.reductions.levels import Leveled, ranks_by_node
from reducing import pmean_with_residual
from toys import Difference, Largest, Stateless, Steps
from worlds import first, normal, on_ranks, placed, stacked, stepper

GRIDS = {"2 x 2": (2, 2), "2 x 4": (2, 4), "4 x 2": (4, 2), "3 x 2": (3, 2)}


def every_other(world):
    """Nodes of which no two neighbors are of one."""
    return Levels(groups=np.arange(world).reshape(2, -1).T.tolist())


CODES = {
    "quantize": (Quantize(4, 64), None),
    "stochastic, rotated": (Quantize(4, 64, "stochastic", rotation=True), None),
    "correlated": (Quantize(4, 64, "correlated"), None),
    "one-shot": (Quantize(4, 64), "gather_sum"),
    "every other rank": (Quantize(4, 64), "gather_sum", every_other),
    "tree": (Quantize(4, 64, "stochastic"), "tree"),
    "compressed inside": (
        Quantize(4, 64),
        "gather_sum",
        lambda world: Levels("local", compressor=Quantize(2, 64)),
    ),
    "chunked": (Steps(), None),
    "sparse": (Largest(), None),
    "summed": (Stateless(), None),
}
KEY = jax.random.key(2)


def grid(nodes, local):
    devices = np.array(jax.devices()[: nodes * local]).reshape(nodes, local)
    return Mesh(devices, ("node", "local"))


def on_grid(f, nodes, local, **options):
    return on_ranks(f, grid(nodes, local), **{"out": P()} | options)


AXES = ("node", "local")
summed = functools.partial(cgx_jax.psum_compressed, compressor=Quantize(4, 64), exchange="xla")
by_levels = functools.partial(summed, axis_name=AXES, levels=Levels("local"))


def leveled(levels, mesh, across, axes=AXES):
    """Returns the reduction that a call over `axes` does with `levels`."""

    def trace():
        whole = Axes.resolve("here", axes, None)
        inner, outer = levels.split("here", whole)
        nodes = ranks_by_node(whole, inner)
        made.append(Leveled(across, inner, outer, nodes, levels.compressor))
        return ()

    made = []
    jax.eval_shape(jax.shard_map(trace, mesh=mesh, in_specs=(), out_specs=()))
    return made[0]


@pytest.mark.parametrize("shape", GRIDS)
@pytest.mark.parametrize("name", CODES)
# The next tests try others.
@pytest.mark.quick(
    *(f"{name}-2 x 2" for name in ("quantize", "every other rank", "tree", "summed")),
    "compressed inside-2 x 2",
)
def test_sums_are_within_the_bound_and_alike_on_all_ranks(name, shape):
    nodes, local = GRIDS[shape]
    code, how, *given = CODES[name]
    levels = given[0](nodes * local) if given else Levels("local")
    # Values are larger in some columns, ranks cancel out, and shares cut buckets elsewhere.
    x = normal(nodes * local, 16, 60) * np.repeat([1, 100], [40, 20]).astype(np.float32)
    x += 100 * normal(16, 60) * (-1.0) ** np.arange(nodes * local, dtype=np.float32)[:, None, None]
    call = functools.partial(by_levels, compressor=code, key=KEY, reduction=how, levels=levels)
    got = np.asarray(on_grid(call, nodes, local, out=None, check_vma=False)(x))
    assert all(row.tobytes() == got[0].tobytes() for row in got)
    typed = on_grid(call, nodes, local)  # check_vma takes it for the same on all ranks
    assert jax.eval_shape(typed, x).shape == x.shape[1:]
    if name == "quantize":
        assert np.asarray(typed(x)).tobytes() == got[0].tobytes()
    exact = np.asarray(x, np.float64).sum(0)
    if isinstance(code, Stateless):
        bound = np.linalg.norm(exact)
    else:
        across = {"gather_sum": GatherSum(), "tree": Tree(), None: ScatterGather()}[how]
        if isinstance(code, Largest):
            across = GatherSum()
        bound = leveled(levels, grid(nodes, local), across).error_bound(code, x)
    off = np.abs(got[0] - exact)
    assert off.max() > 0
    assert (off <= bound + 1e-3).all()


def test_groups_of_a_flat_axis_are_levels_too(mesh):
    x = normal(8, 16, 60)
    groups = Levels(groups=[[0, 1, 2, 3], [4, 5, 6, 7]])
    flat = functools.partial(summed, axis_name="data", levels=groups)
    got = on_ranks(flat, mesh, out=P())(x)
    np.testing.assert_array_equal(got, on_grid(by_levels, 2, 4)(x))


def test_buckets_of_equal_values_are_exact_where_shares_are_uneven():
    x = np.full((8, 7, 31), 5, np.float32)
    call = functools.partial(by_levels, compressor=Quantize(2, 32))
    np.testing.assert_array_equal(on_grid(call, 2, 4)(x), np.full((7, 31), 40, np.float32))


def test_levels_work_under_pmap_and_in_a_plain_vmap():
    x, groups = normal(8, 16, 60), Levels(groups=[[0, 1], [2, 3], [4, 5], [6, 7]])
    call = functools.partial(summed, axis_name="data", levels=groups)
    want = jax.pmap(call, axis_name="data")(x)
    assert (np.asarray(want) == np.asarray(want)[0]).all()
    named = on_grid(lambda v: jax.vmap(by_levels)(jnp.stack([v, 2 * v]))[0], 4, 2)
    np.testing.assert_array_equal(named(x), want[0])


@pytest.mark.usefixtures("unoptimized")
@pytest.mark.parametrize("inner", [None, Quantize(8, 64), Cast(jnp.bfloat16)], ids=str)
@pytest.mark.parametrize("name", ["quantize", "one-shot", "chunked", "sparse"])
@pytest.mark.quick("quantize-Quantize*", "sparse-None")
def test_what_the_ranks_lost_is_the_difference_to_the_exact_mean(name, inner):
    code, how = CODES[name]
    # Shares of "a" are whole rows, of "b" flat, and of "c" whole rows with padding.
    x = {"a": normal(8, 16, 60), "b": normal(8, 9, 7, seed=1), "c": normal(8, 47, 9, seed=2)}
    plan = cgx_jax.Plan.build(first(x), Rules((), code, exact=()))

    def step(own):
        options = {"exchange": "xla", "reduction": how, "levels": Levels("local", compressor=inner)}
        mean, lost = pmean_with_residual("here", own, AXES, plan, key=KEY, **options)
        return mean, stacked(lost)

    mean, lost = on_grid(step, 2, 4, out=(P(), P(AXES)))(x)
    for (k, v), e in zip(x.items(), lost, strict=True):
        account = np.asarray(v, np.float64).mean(0) - mean[k] - np.asarray(e, np.float64).mean(0)
        assert np.abs(account).max() < 1e-5
        assert np.abs(np.asarray(e)).max() > 0


@pytest.mark.usefixtures("unoptimized")
def test_feedback_over_levels_loses_nothing_in_the_long_run():
    mesh, x = grid(2, 2), normal(4, 40, 50)
    options = {"memory": cgx_jax.ErrorFeedback(), "levels": Levels("local"), "exchange": "xla"}
    tx = cgx_jax.sync_gradients(AXES, Quantize(2, 64), mesh=mesh, **options)
    state = placed(tx.init(jnp.zeros((40, 50))), mesh, AXES)
    step = stepper(tx, mesh, state, AXES)
    seen = np.zeros((40, 50))
    for _ in range(20):
        mean, state = step(x, state)
        seen += np.asarray(mean)
    memory = np.asarray(state.memory[0]).mean(0)
    np.testing.assert_allclose(seen + memory, 20 * np.asarray(x).mean(0), atol=1e-3)


@pytest.mark.parametrize("call", ["pmean", "hook", "value_and_grad"])
def test_other_calls_take_levels(call):
    mesh, x = grid(2, 2), normal(8, 40)
    w = normal(40, 60, seed=1)
    loss = lambda p, v: (jnp.tanh(v @ p) ** 2).mean()  # noqa: E731
    how = {"levels": Levels("local"), "exchange": "xla"}
    want = jax.jit(jax.grad(loss))(w, x)
    if call == "value_and_grad":
        f = cgx_jax.value_and_grad(loss, AXES, Quantize(8, 64), mesh=mesh, **how)
        got = jax.jit(f)(w, x)[1]
    else:

        def step(p, v):
            if call == "hook":
                wrap = functools.partial(
                    cgx_jax.reduce_in_backward, axis_name=AXES, compressor=Quantize(8, 64), **how
                )
                return jax.grad(lambda q: lax.pmean(loss(wrap(q), v), AXES))(p)
            varying = lax.pcast(p, AXES, to="varying")
            grads = jax.grad(loss)(varying, v)
            return cgx_jax.pmean_compressed(grads, AXES, Quantize(8, 64), **how)

        got = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=(P(), P(AXES)), out_specs=P()))(w, x)
    assert 0 < np.abs(np.asarray(got - want)).max() < 0.05 * np.abs(np.asarray(want)).max()


def test_between_nodes_a_rank_sends_its_share_alone():
    leaf = CodedLeaf(Quantize(4), (25_000_000 // 4,), np.dtype(np.float32), 0)
    over = leveled(Levels("local"), grid(2, 2), ScatterGather())
    between = over.bytes_by_level((leaf,))[1]
    # Without levels, a rank sends each of 3 others a chunk per phase; 2 are in the other node.
    flat = ScatterGather().bytes_sent((leaf,), 4) * 2 / 3
    assert between == pytest.approx(flat / 2, rel=0.001)


WRONG = {
    "an axis of another call": (Levels("model"), r"Levels\(inner=\('model',\)\) must name some"),
    "all axes": (Levels(AXES), "leave at least one"),
    "groups that miss a rank": (Levels(groups=[[0, 1], [2]]), "must hold every index below 4"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_levels_are_refused_by_the_call(name):
    levels, says = WRONG[name]
    f = functools.partial(by_levels, levels=levels)
    with pytest.raises(ValueError, match=rf"^psum_compressed.*{says}"):
        jax.eval_shape(on_grid(f, 2, 2), normal(4, 64, 64))


def test_options_that_do_not_go_with_levels_are_refused(mesh):
    with pytest.raises(ValueError, match="pass one of the two"):
        Levels()
    for code in (Largest(), SignSGD(), Signum()):
        with pytest.raises(ValueError, match="cannot be split into a share"):
            Levels("local", compressor=code)
    for options, error, says in (
        ({"levels": "local"}, TypeError, "levels='local' is not an instance"),
        ({"axis_index_groups": [[0, 1], [2, 3]]}, ValueError, "levels= and .* cannot be combined"),
        ({"compressor": SignSGD()}, ValueError, r"SignSGD\(\) of .* vote of each rank"),
    ):
        f = functools.partial(by_levels, **options)
        with pytest.raises(error, match=f"^psum_compressed: {says}"):
            jax.eval_shape(on_grid(f, 2, 2), normal(4, 64, 64))
    tx = cgx_jax.sync_gradients(AXES, Difference(), levels=Levels("local"))
    f = lambda v: tx.update(v, tx.init(v))[0]  # noqa: E731
    says = r"^sync_gradients: .* needs whole leaves .*different share"
    with pytest.raises(ValueError, match=says):
        jax.eval_shape(on_grid(f, 2, 2, check_vma=False), normal(4, 64, 64))


def test_one_rank_a_node_is_flat_and_one_node_is_exact():
    x = normal(4, 16, 60)
    flat = on_grid(functools.partial(by_levels, levels=None), 4, 1)(x)
    np.testing.assert_array_equal(on_grid(by_levels, 4, 1)(x), flat)
    one_node = on_grid(by_levels, 1, 4)(x)
    exact = on_grid(lambda v: lax.psum(v, AXES), 1, 4)(x)
    np.testing.assert_array_equal(one_node, exact)


@pytest.mark.parametrize(("values", "reduces"), [(1000, True), (100_000, False)])
def test_few_long_rows_are_added_and_not_left_to_xlas_slow_sum(values, reduces):
    rows = np.random.default_rng(0).normal(size=(5, values)).astype(np.float32)
    compiled = jax.jit(sum_of_rows).lower(rows).compile()
    assert (" reduce(" in compiled.as_text()) == reduces
    total = rows[0]
    for row in rows[1:]:
        total = total + row
    np.testing.assert_array_equal(compiled(rows), total)
