"""value_and_grad: what it differentiates and splits, and what it refuses."""

import collections
import functools
import logging
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import cgx_jax
from cgx_jax import ErrorFeedback, Quantize
from plain_jit_case import auto_mesh, check_close, loss_fn, params_and_batch, vag
from worlds import drawn

pytestmark = [pytest.mark.oldest, pytest.mark.usefixtures("unoptimized")]

Q8 = Quantize(8)


class Net(nnx.Module):
    def __init__(self, rngs):
        self.a = nnx.Linear(32, 64, rngs=rngs, kernel_init=drawn)
        self.norm = nnx.BatchNorm(64, rngs=rngs)
        self.b = nnx.Linear(64, 32, rngs=rngs, kernel_init=drawn)

    def __call__(self, x):
        return self.b(nnx.gelu(self.norm(self.a(x))))


def net_loss(model, x, y):
    return jnp.mean((model(x) - y) ** 2)


def test_trusted_statistics_of_the_parts_are_averaged():
    model = Net(nnx.Rngs(0))
    _, x, y = params_and_batch()
    vag(net_loss, cgx_jax.Identity(), trust=True)(model, x, y)
    want = 0.01 * np.asarray(Net(nnx.Rngs(0)).a(x)).mean(0)
    for shard in model.norm.mean[...].addressable_shards:
        np.testing.assert_allclose(shard.data, want, rtol=1e-3, atol=1e-5)


class Adapted(nnx.Module):
    """A frozen layer with a LoRA adapter."""

    def __init__(self, rngs):
        self.base = nnx.Linear(32, 32, rngs=rngs)
        self.lora = nnx.LoRA(32, 4, 32, base_module=self.base, rngs=rngs)
        self.calls = nnx.Variable(jnp.zeros(()))

    def __call__(self, x):
        self.calls[...] += 1
        return self.lora(x)


@pytest.mark.parametrize("memory", [None, ErrorFeedback()])
def test_other_state_of_an_nnx_module_is_trained_by_its_filter(memory):
    _, x, y = params_and_batch()
    part = nnx.DiffState(0, nnx.LoRAParam)
    f = vag(net_loss, argnums=part, memory=memory)
    model, twin = Adapted(nnx.Rngs(0)), Adapted(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.LoRAParam)
    frozen = np.asarray(model.base.kernel[...])
    if memory is None:
        value, grads = nnx.jit(f)(model, x, y)
    else:
        (value, grads), _ = nnx.jit(f.apply)(f.init(model), model, x, y)
    want = nnx.value_and_grad(net_loss, argnums=part)(twin, x, y)
    np.testing.assert_allclose(value, want[0], rtol=1e-5)
    check_close(nnx.to_pure_dict(grads), nnx.to_pure_dict(want[1]))
    optimizer.update(model, grads)
    np.testing.assert_array_equal(model.base.kernel[...], frozen)
    assert model.calls[...] == 1


def test_specs_of_a_bare_tree_are_needed_under_jit_and_read_from_arrays_outside():
    params, x, y = params_and_batch()
    mesh = auto_mesh((4, 2), ("data", "model"))
    f = vag(mesh=mesh)
    specs = {"a": {"w": P(None, "model"), "b": P("model")}, "c": {"w": P("model", None)}}
    params = jax.tree.map(lambda p, s: jax.device_put(p, NamedSharding(mesh, s)), params, specs)
    with pytest.raises(ValueError, match="specs="):
        jax.jit(f)(params, x, y)
    want = jax.grad(loss_fn)(params, x, y)
    for run in (f, jax.jit(vag(mesh=mesh, specs=specs))):
        _, grads = run(params, x, y)
        check_close(grads, want)
        assert grads["a"]["w"].sharding.spec == P(None, "model")


def by_position(params, x, y):
    return vag(in_specs={1: P("data"), "y": P("data")})(params, x, y)


def by_keyword(params, x, y):
    return vag(lambda p, x, *, target, scale, train: scale * loss_fn(p, x, target))(
        params, x, target=y, scale=jnp.float32(1), train=True
    )


def last_argument(params, x, y):
    return vag(lambda x, y, p: loss_fn(p, x, y), argnums=-1)(x, y, params)


def over_two_axes(params, x, y):
    axes = "data", "fsdp"
    mesh = auto_mesh((2, 4), axes)
    return cgx_jax.value_and_grad(loss_fn, [*axes], Q8, mesh=mesh, exchange="xla")(params, x, y)


def with_a_teacher(params, x, y):
    def loss(p, teacher, x, y):
        return loss_fn(p, x, y) + lax.stop_gradient(loss_fn(teacher, x, y) * 0)

    return vag(loss, in_specs={"teacher": P()})(params, params, x, y)


CALLS = [by_position, by_keyword, last_argument, over_two_axes, with_a_teacher]


@pytest.mark.parametrize("call", CALLS, ids=lambda f: f.__name__)
@pytest.mark.quick("by_position", "by_keyword", "last_argument", "over_two_axes")
def test_arguments_are_split_as_they_should_be(case, call):
    params, x, y, want = case
    compiled = jax.jit(call).lower(params, x, y).compile()
    got = compiled(params, x, y)
    np.testing.assert_allclose(got[0], want[0], rtol=1e-5)
    check_close(got[1], want[1])
    # Something was compressed, and nobody computed more than its own part of the batch.
    text = compiled.as_text()
    assert re.search(r" u8\[[\d,]+\]\S* all-to-all\(", text)
    assert "f32[8,64]" in text
    assert "f32[64,64]" not in text


def test_shardings_of_concrete_arguments_give_mesh_and_split(case):
    params, x, y, want = case
    x, y = jax.device_put((x, y), NamedSharding(auto_mesh(), P("data")))
    check_close(vag(mesh=None)(params, x, y), want)


def test_the_mesh_that_is_set_is_taken(case):
    params, x, y, want = case
    with jax.set_mesh(auto_mesh()):
        check_close(jax.jit(vag(mesh=None))(params, x, y), want)
        f = vag(mesh=None, memory=ErrorFeedback())
        (value, _), state = f.apply(f.init(params), params, x, y)
        np.testing.assert_allclose(value, want[0], rtol=1e-5)
        assert state.memory[0]["a"]["w"].sharding.spec == P("data")


@pytest.mark.parametrize("split", [True, False])
def test_explicit_meshes(case, split):
    params, x, y, want = case
    with jax.set_mesh(jax.make_mesh((8,), ("data",), axis_types=(AxisType.Explicit,))):
        if split:
            x, y = jax.device_put((x, y), P("data"))
        check_close(jax.jit(vag(mesh=None))(params, x, y), want)


@pytest.mark.parametrize("spec", [P("a"), P("b"), P(("b", "a")), P("a", "b"), P(("a", "b")), P()])
@pytest.mark.quick("spec1", "spec3")
def test_explicit_meshes_with_two_axes(case, spec):
    params, x, y, want = case
    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(AxisType.Explicit,) * 2)
    with jax.set_mesh(mesh):
        x, y = jax.device_put((x, y), spec)
        f = cgx_jax.value_and_grad(loss_fn, ("a", "b"), Q8, mesh=mesh, exchange="xla")
        check_close(jax.jit(f)(params, x, y), want)


def test_several_differentiated_arguments(case):
    params, x, y, want = case
    f = vag(lambda a, x, c, y: loss_fn(a | c, x, y), argnums=(0, 2))
    loss, grads = f({"a": params["a"]}, x, {"c": params["c"]}, y)
    check_close((loss, grads[0]["a"], grads[1]["c"]), (want[0], want[1]["a"], want[1]["c"]))


GLOBAL = jnp.ones((64, 32))


def with_class_weights(p, x, y, weights):
    labels = x.argmax(1)
    return jnp.mean(weights[labels] * jnp.square(x @ p["a"]["w"]).mean(1)) + 0 * loss_fn(p, x, y)


def constrained(p, x, y, where):
    """Calls a model that says itself how activations lie."""

    def loss(p, x, y):
        return loss_fn(p, lax.with_sharding_constraint(x, where), y)

    with jax.set_mesh(auto_mesh()):
        return jax.jit(vag(loss))(p, x, y)


@functools.cache
def named_array():
    """A pytree that knows its global size, like haliax's."""

    @jax.tree_util.register_pytree_node_class
    class Named:
        def __init__(self, array, size):
            self.array, self.size = array, size
            if hasattr(array, "shape") and array.shape[0] != size:
                raise ValueError(f"axis batch has size {size}, not {array.shape[0]}")

        def tree_flatten(self):
            return (self.array,), self.size

        @classmethod
        def tree_unflatten(cls, size, children):
            return cls(*children, size)

    return Named


Pair = collections.namedtuple("Pair", ["x", "value"])

SEED = jax.random.key(0)
REFUSED = {
    "no mesh": (lambda p, x, y: vag(mesh=None)(p, x, y), r"no mesh .*'data'.*jax.set_mesh"),
    "wrong axis": (
        lambda p, x, y: cgx_jax.value_and_grad(loss_fn, ("data", "rows"), mesh=auto_mesh()),
        r"'rows' is not in the mesh; it has \('data',\)",
    ),
    "a table": (lambda p, x, y: vag(lambda p, x, y, t: loss_fn(p, x, y))(p, x, y, jnp.ones(7)),
                r"differ: .*t float32\[7\].*in_specs=\{'x': P\('data'\), .*'t': P\(\)\}"),
    "a tree": (
        lambda p, x, y: vag(lambda p, b: loss_fn(p, *b))(p, (x, y[:32])),
        r"b\[0\] float32\[64,32\], b\[1\] float32\[32,32\].*in_specs=.*'b': \(P\('data'\), P\(\)\)",
    ),
    "frozen parameters": (
        lambda p, x, y: vag(lambda p, f, b: loss_fn(p, *b))(p, [y[:, 0]] * 3, (x[:32], y[:32])),
        r"in_specs=\{'f': P\(\), 'b': P\('data'\)\}",
    ),
    "a named tuple": (lambda p, x, y: vag(lambda p, b: loss_fn(p, *b))(p, Pair(x, y[:32])),
                      r"b\.x float32\[64,32\], b\.value float32\[32,32\]"),
    "a teacher": (lambda p, x, y: vag(lambda p, t, *b: loss_fn(p, *b) + loss_fn(t, *b))(p, p, x, y),
                  r"in_specs=\{'t': P\(\), 'b0': P\('data'\)"),
    "class weights of as many classes as examples": (
        lambda p, x, y: vag(with_class_weights)(p, x, y, jnp.arange(64.0)),
        r"own part: .*test_value_and_grad.py",
    ),
    "a table of as many rows as examples": (
        lambda p, x, y: vag(lambda p, x, y, t: loss_fn(p, x, y) + (x @ t.T).mean())(p, x, y, x),
        r"'dot_general' float32|'dot_general' f32",
    ),
    "a square matrix of as many rows as examples": (
        lambda p, x, y: vag(lambda p, x, m: (x @ p["a"]["w"] @ m).mean())(p, x, jnp.ones((64, 64))),
        r"fails on the part.* x float32\[64,32\] .*m float32\[64,64\] in dimension 0. "
        r"If that fits the batch, .*in_specs=\{'m': P\(\)\}",
    ),
    "features over the axis": (
        lambda p, x, y: vag()(p, jax.device_put(x, NamedSharding(auto_mesh(), P(None, "data"))), y),
        r"x float32\[64,32\] split in dimension 1, y .*in_specs=\{'x': P\('data'\), 'y': P\(",
    ),
    "shard_map around it": (
        lambda p, x, y: jax.shard_map(
            vag(), mesh=auto_mesh(), in_specs=(P(), P("data"), P("data")), out_specs=P()
        )(p, x, y),
        r"it is for plain jit, but .* axis 'data' .*Inside, take jax.value_and_grad, and",
    ),
    "pmap around it": (
        lambda p, x, y: jax.pmap(vag(mesh=None), axis_name="data", in_axes=(None, 0, 0))(
            p, x.reshape(8, 8, 32), y.reshape(8, 8, 32)
        ),
        r"it is for plain jit, but .* axis 'data' .*Inside, take jax.value_and_grad, and",
    ),
    "indivisible": (lambda p, x, y: vag()(p, x[:60], y[:60]), r"\[60,32\].*multiple of the 8"),
    "nothing split": (lambda p, x, y: vag(lambda p: p["a"]["w"].mean())(p), r"8 times the work"),
    "a closure over the batch": (lambda p, x, y: vag(lambda p: loss_fn(p, x, y))(p),
                                 r"closes over .*'x float32\[64,32\]'"),
    "a closure over half of the batch": (
        lambda p, x, y: vag(lambda p, y: loss_fn(p, x, y))(p, y),
        r"uses x float32\[64,32\], which is as long as the batch.*Pass it as an argument",
    ),
    "a global": (
        lambda p, x, y: vag(lambda p, y: loss_fn(p, GLOBAL[: len(y)], y) + GLOBAL.mean())(p, y),
        r"float32\[64,32\], which is as long as the batch.*Pass it as an argument",
    ),
    "unknown in_specs": (lambda p, x, y: vag(in_specs={"z": P()})(p, x, y),
                         r"in_specs has \['z'\].*\['x', 'y'\]"),
    "in_specs by name and by position": (
        lambda p, x, y: vag(in_specs={"x": P(), 1: P("data")})(p, x, y),
        r"in_specs has both 'x' and 1, .* one argument; leave out one",
    ),
    "in_specs that are no specs": (lambda p, x, y: vag(in_specs={"x": "data"})(p, x, y),
                                   r"has 'data'; use P\('data'\)"),
    "in_specs as in shard_map": (lambda p, x, y: vag(in_specs=(P(), P("data"), P("data"))),
                                 r"no mapping; .*in_specs=\{\"bat"),
    "a policy that is none": (lambda p, x, y: vag(policy=4),
                              r"4 is neither a compressor nor a policy"),
    "an exchange that is none": (
        lambda p, x, y: cgx_jax.value_and_grad(loss_fn, "data", exchange="tcp"),
        r"exchange='tcp' is unknown",
    ),
    "a state of other ranks": (
        lambda p, x, y: vag(memory=ErrorFeedback()).apply(
            cgx_jax.resize_state(vag(memory=ErrorFeedback()).init(p), 4), p, x, y
        ),
        r"the state is that of 4 ranks, but the axis has 8; call cgx_jax.resize_state\(state, 8\)",
    ),
    "no state": (lambda p, x, y: vag(memory=ErrorFeedback()).apply(None, p, x, y),
                 r"the state has a NoneType in the place of SyncState"),
    "arguments in another order": (
        lambda p, x, y: vag(memory=ErrorFeedback()).apply(
            p, vag(memory=ErrorFeedback()).init(p), x, y
        ),
        r"the state has a dict in the place of SyncState.* pass what init returned",
    ),
    "memory without a state": (lambda p, x, y: vag(memory=ErrorFeedback())(p, x, y),
                               r"ErrorFeedback\(decay=1.0.*\) keeps a state.*f.init\(params\)"),
    "stochastic without a state": (
        lambda p, x, y: vag(policy=Quantize(4, rounding="stochastic"))(p, x, y),
        r"rounds at random.*f.apply",
    ),
    "argnums": (lambda p, x, y: vag(argnums=3)(p, x, y), r"argnums \[3\].* has 3"),
    "argnums in another order": (lambda p, x, y: vag(argnums=(1, 0))(p, x, y),
                                 r"argnums \[1, 0\] .*argnums=\(0, 1\)"),
    "no argnums": (lambda p, x, y: vag(argnums="x"),
                   r"argnums='x' must be a position, an nnx.DiffState"),
    "NNX's argnums for a tree": (lambda p, x, y: vag(argnums=nnx.DiffState(0, nnx.Param))(p, x, y),
                                 r"a DiffState for p, which is not an NNX object"),
    "a state for fewer trees": (lambda p, x, y: vag(argnums=(0, 1)).init((p,)),
                                r"1 trees .*argnums names 2 arguments"),
    "a sharding constraint": (lambda p, x, y: constrained(p, x, y, P("data")),
                              r"'data' is manual.*drop_manual_axes\(sp"),
    "a sharding constraint with its mesh": (
        lambda p, x, y: constrained(p, x, y, NamedSharding(auto_mesh(), P("data"))),
        r"'data' is manual.*with_sharding_constraint\(x, cgx_jax.drop_manual_axes\(spec\)\)",
    ),
    "global sizes": (
        lambda p, x, y: vag(lambda p, b: loss_fn(p, b.array, b.array))(p, named_array()(x, 64)),
        r"global sizes.*inside the loss.*has size 64, not 8",
    ),
    "symbolic sizes": (
        lambda p, x, y: jax.export.export(jax.jit(vag()))(
            p, *jax.export.symbolic_args_specs((x, y), "b, _")
        ),
        r"x .* symbolic batch size; export",
    ),
    "another loss": (lambda p, x, y: vag(loss="sum"), r"loss='sum' must be"),
    "two losses": (lambda p, x, y: vag(lambda *a: (loss_fn(*a), 1.0))(p, x, y),
                   r"a real number.*has_aux=True"),
    "a loss in a dict": (lambda p, x, y: vag(lambda *a: {"loss": loss_fn(*a)})(p, x, y),
                         r"returns dict, not a real number.*has_aux=True"),
    "a loss for each example": (
        lambda p, x, y: vag(lambda p, x, y: (x @ p["a"]["w"]).mean(1))(p, x, y),
        r"float32\[64\], not a real number; return the mean",
    ),
    "a ratio of one": (lambda p, x, y: vag(loss="ratio")(p, x, y),
                       r"ratio.* returns \(sum, count\), not"),
    "one loss in place of two": (lambda p, x, y: vag(has_aux=True)(p, x, y),
                                 r"returns \(loss, aux\), not one value"),
    "rows of two lengths": (
        lambda p, x, y: vag(lambda p, b: loss_fn(p, b["x"], y))(p, {"t": y[:7], "x": x}),
        r"example in_specs=\{'b': \{'t': P\(\), 'x': P\('data'\)\}\}",
    ),
    "rows of two lengths, and a key": (
        lambda p, x, y: vag(lambda p, b: loss_fn(p, b["x"], y))(
            p, {"k": jax.random.key(0), "t": y[:7], "x": x}
        ),
        r"example in_specs=\{'b': \{'k': None, 't': P\(\), 'x': P\('data'\)\}\}",
    ),
    "an array of keys, as many as ranks": (
        lambda p, x, y: vag(lambda p, x, k: loss_fn(p, x, y))(p, x, jax.random.split(SEED, 8)),
        r"example in_specs=\{'x': P\('data'\), 'k': None\}",
    ),
    "integers": (lambda p, x, y: vag()(jax.tree.map(lambda a: a.astype(int), p), x, y),
                 r"p\['a'\]\['b'\] holds no floats, .*nothing to differentiate"),
    "complex parameters": (
        lambda p, x, y: vag()(jax.tree.map(lambda a: a.astype(complex), p), x, y), "is complex"
    ),
}  # fmt: skip


def test_each_rank_draws_its_own_numbers_from_an_array_of_keys(case):
    params, x, y, _ = case

    def loss(p, x, y, keys):
        noise = lax.map(lambda k: jax.random.normal(k, x.shape), keys)
        return loss_fn(p, x + noise.sum(0), y), noise.T

    f = vag(loss, has_aux=True, aux_specs=P(None, "data"), in_specs={"keys": None})
    (_, noise), _ = f(params, x, y, jax.random.split(SEED, 3))
    assert len(np.unique(noise)) == noise.size


@pytest.mark.parametrize(("call", "message"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_known_is_refused_with_the_remedy(case, call, message):
    with pytest.raises((TypeError, ValueError), match=f"^value_and_grad: (?s:.*){message}"):
        call(*case[:3])


TABLE = jnp.linspace(0, 2, 7)
UNSURE = {  # a loss, and what it gets beside the parameters
    "a table": (lambda p, x, y, t: loss_fn(p, x, y * t.mean()), lambda x, y: (x, y, TABLE)),
    "a table beside the labels": (
        lambda p, b, y: loss_fn(p, b["x"], y * b["t"].mean()),
        lambda x, y: ({"x": x, "t": TABLE}, y),
    ),
    "frozen parameters of the batch's length": (
        lambda p, f, b: loss_fn(p, b[0] @ f["w"], b[1] * f["t"].mean()),
        lambda x, y: ({"w": x[:32], "t": TABLE}, (x[:32], y[:32])),
    ),
    "both have other lengths": (
        lambda p, f, b: loss_fn(p, b["x"] @ f["w"], b["y"] * f["t"].mean() * b["t"].mean()),
        lambda x, y: (
            {"w": x[:32], "t": TABLE}, {"x": x[:32], "y": y[:32], "t": jnp.ones(3)}
        ),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", UNSURE)
def test_a_line_that_a_refusal_offers_is_right(case, name):
    params, x, y, _ = case
    loss, given = UNSURE[name][0], UNSURE[name][1](x, y)
    with pytest.raises(ValueError, match="in_specs=") as refused:
        vag(loss)(params, *given)
    line = re.search(r"in_specs=(\{.*\})", str(refused.value))[1]
    got = vag(loss, in_specs=eval(line, {"P": P}))(params, *given)
    check_close(got, jax.value_and_grad(loss)(params, *given))


def test_equinox_modules_are_differentiated_by_their_arrays(case):
    eqx = pytest.importorskip("equinox")
    _, x, y, _ = case
    model = eqx.nn.MLP(32, 32, 32, 1, jax.nn.gelu, key=jax.random.key(0))

    def loss(model, x, y):
        return jnp.mean((jax.vmap(model)(x) - y) ** 2)

    got = vag(loss)(model, x, y)
    want = eqx.filter_value_and_grad(loss)(model, x, y)
    assert jax.tree.structure(got) == jax.tree.structure(want)
    check_close(got, want)


class Scaled:
    def __init__(self):
        self.temperature = 1.0

    def loss(self, p, x, y):
        return self.temperature * loss_fn(p, x, y) + OFFSETS["now"]


OFFSETS = {"now": jnp.zeros(())}


def test_eager_calls_are_never_stale(case):
    params, x, y, _ = case
    model, factor = Scaled(), 1.0
    closed, method = vag(lambda p, x, y: factor * loss_fn(p, x, y)), vag(model.loss)
    first = closed(params, x, y)[0], method(params, x, y)[0]
    factor, model.temperature = 2.0, 3.0
    np.testing.assert_allclose(closed(params, x, y)[0], 2 * first[0], rtol=1e-5)
    np.testing.assert_allclose(method(params, x, y)[0], 3 * first[1], rtol=1e-5)
    inner = vag(lambda p, x, y: jax.jit(lambda v: v + OFFSETS["now"])(loss_fn(p, x, y)))
    np.testing.assert_allclose(inner(params, x, y)[0], first[0], rtol=1e-5)
    OFFSETS["now"] = jnp.ones(())
    np.testing.assert_allclose(method(params, x, y)[0], 3 * first[1] + 1, rtol=1e-5)
    np.testing.assert_allclose(inner(params, x, y)[0], first[0] + 1, rtol=1e-5)


def test_eager_calls_share_what_they_compile_and_say_once_that_jit_is_faster(case, caplog):
    params, x, y, _ = case
    closed = x[:1] * 0
    f = vag(lambda p, x, y, step: loss_fn(p, x + closed, y) + 0 * step)
    caplog.set_level(logging.WARNING, "cgx_jax")
    for step in range(3):
        f(params, x, y, jnp.asarray(step))
    assert f._compiled._cache_size() == 1
    assert caplog.text.count("a jitted step is faster") == 1


def test_what_the_loss_closes_over_is_whole(case):
    """Arrays of other lengths than the batch are constants, also tracers of an outer jit."""
    params, x, y, _ = case

    def step(params, x, y, table):
        return vag(lambda p, x, y: loss_fn(p, x, y * table.mean()))(params, x, y)

    table = jnp.linspace(0, 2, 24)
    want = jax.value_and_grad(lambda p: loss_fn(p, x, y * table.mean()))(params)
    check_close(jax.jit(step)(params, x, y, table), want)
    check_close(step(params, x, y, table), want)
