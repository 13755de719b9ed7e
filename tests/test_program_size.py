"""How a training step's program grows with the number of leaves: its text takes time to compile."""

import re

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import cgx_jax
from cgx_jax import ErrorFeedback, Quantize, SecondMoment
from cgx_jax.compressors import DGC, PowerSGD, Signum
from cgx_jax.transforms import MomentumCorrection, diloco
from worlds import ranks, sharded

SHAPES = [(64, 64), (64,), (128, 64), (32, 128), (64, 192)]
FEW, MANY = 10, 40

# By options: the most lines that a leaf may add, as a multiple of those under lax.pmean and Adam.
OPTIONS = {
    "plain": ({}, 1.0),
    "feedback": ({"memory": ErrorFeedback()}, 1.3),
    "momentum": ({"memory": MomentumCorrection()}, 1.7),
    "units": ({"precondition": SecondMoment()}, 1.6),
    "units and feedback": ({"precondition": SecondMoment(), "memory": ErrorFeedback()}, 2.0),
}


@pytest.fixture(scope="module")
def mesh():
    return ranks(4)


def leaves(count, *lead):
    shapes = [SHAPES[i % len(SHAPES)] for i in range(count)]
    return [jax.ShapeDtypeStruct((*lead, *shape), jnp.float32) for shape in shapes]


def lines_per_leaf(reduction, mesh):
    few, many = (len(lowered(reduction, mesh, n).as_text().splitlines()) for n in (FEW, MANY))
    return (many - few) / (MANY - FEW)


def lowered(reduction, mesh, count):
    params = {f"leaf{i}": x for i, x in enumerate(leaves(count))}
    tx = optax.chain(reduction, optax.adam(1e-3))
    state = jax.eval_shape(tx.init, params)
    specs = cgx_jax.state_specs(state, "data")

    def step(params, state, x):
        def loss(params):
            return sum((jnp.sin(p) * x[0]).sum() for p in jax.tree.leaves(params))

        grads = jax.grad(loss)(jax.tree.map(lambda p: lax.pcast(p, "data", to="varying"), params))
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    f = sharded(step, mesh, (P(), specs, P("data")), (P(), specs))
    x = jax.ShapeDtypeStruct((4,), jnp.float32)
    with jax.numpy_dtype_promotion("standard"):  # optax divides by an integer
        return f.lower(params, state, x)


def sync(mesh, **options):
    code = Quantize(4, rotation=True)
    return cgx_jax.sync_gradients("data", code, mesh=mesh, exchange="xla", **options)


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.quick("plain", "units and feedback")
def test_a_leaf_adds_little_to_the_program(name, mesh):
    options, most = OPTIONS[name]
    exact = optax.stateless(lambda grads, _: lax.pmean(grads, "data"))
    assert lines_per_leaf(sync(mesh, **options), mesh) <= most * lines_per_leaf(exact, mesh)


# By calls: (compressed, exact, the most lines that a leaf may add as a multiple of those of exact).
CALLS = {
    "scatter": (cgx_jax.psum_scatter_compressed, lax.psum_scatter, 1.0),
    "gather": (cgx_jax.all_gather_compressed, lax.all_gather, 1.5),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_leaf_adds_little_to_a_sharded_call(name, mesh):
    compressed, exact, most = CALLS[name]

    def lines(call, count):
        f = sharded(call, mesh, P("data"), P("data"))
        return len(f.lower(leaves(count, 16)).as_text().splitlines())

    def per_leaf(call):
        return (lines(call, MANY) - lines(call, FEW)) / (MANY - FEW)

    plan = cgx_jax.policies.Rules((), Quantize(4, rotation=True), exact=())
    ours = per_leaf(lambda tree: compressed(tree, "data", plan, tiled=True, exchange="xla"))
    theirs = per_leaf(lambda tree: jax.tree.map(lambda x: exact(x, "data", tiled=True), tree))
    assert 0 < ours <= most * theirs


KEPT = {  # parts of a state that have a row for each rank
    "codes and feedback": lambda mesh: cgx_jax.sync_gradients(
        "data", Signum(), memory=ErrorFeedback(), mesh=mesh
    ),
    "feedback and overflow": lambda mesh: cgx_jax.sync_gradients(
        "data", DGC(), memory=MomentumCorrection(), mesh=mesh
    ),
    "workers": lambda mesh: diloco(
        optax.adam(1e-3), "data", Quantize(4), every=8, delay=2, fragments=2, mesh=mesh
    ),
}


@pytest.mark.parametrize("name", KEPT)
def test_one_program_makes_all_rows_of_a_state(name, mesh):
    program = jax.make_jaxpr(KEPT[name](mesh).init)(leaves(4))
    assert str(program).count("shard_map[") == 1


def test_leaves_of_one_width_share_the_first_factors_of_a_low_rank(mesh):
    low_rank = cgx_jax.sync_gradients("data", PowerSGD(2), mesh=mesh)
    program = jax.make_jaxpr(low_rank.init)([jnp.zeros((n, 64)) for n in (64, 96, 128)])
    assert str(program).count("erf_inv") == 1


def fusions(compiled):
    """Returns the different bodies of a program's fusions, without names."""
    bodies = re.findall(r"\n%?fused\S* \(.*?\{\n(.*?)\n\}", compiled.as_text(), re.DOTALL)
    plain = (re.sub(r", metadata=\{[^}]*\}", "", body) for body in bodies)
    return {re.sub(r"%[\w.\-]+", "%", body) for body in plain}


@pytest.mark.slow
def test_more_leaves_of_known_shapes_bring_no_new_computations(mesh):
    """XLA compiles equal fusions once, so the time to compile depends on the different ones."""
    reduction = sync(mesh, precondition=SecondMoment(), memory=ErrorFeedback())
    few, many = (len(fusions(lowered(reduction, mesh, n).compile())) for n in (FEW, MANY))
    assert few > 50
    assert many <= 1.1 * few
