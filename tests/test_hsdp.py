"""HSDP: only the axis between nodes is compressed; parameters stay sharded inside a node."""

import functools
import re

import flax.linen as nn
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
import hlo
from cgx_jax import ErrorFeedback, Quantize, SecondMoment, drop_manual_axes
from plain_jit_case import auto_mesh, check_close

# Collectives of a program that do not wait for each other: see conftest.
pytestmark = [pytest.mark.oldest, pytest.mark.usefixtures("no_cache", "unoptimized")]

LAYERS, WIDTH, HIDDEN = 4, 64, 128
AXES = ("replica", "fsdp", "model")
SPECS = {
    "layers": {"up": P(None, "fsdp", "model"), "down": P(None, "model", "fsdp"), "scale": P()},
    "head": P("fsdp", "model"),
}
Q8 = Quantize(8)


def loss_fn(params, x, y):
    def block(x, layer):
        return x + layer["scale"] * jnp.tanh(x @ layer["up"]) @ layer["down"], None

    return jnp.mean((lax.scan(block, x, params["layers"])[0] @ params["head"] - y) ** 2)


@functools.cache
def case():
    """(mesh, sharded parameters, x, y)."""
    mesh = auto_mesh((2, 2, 2), AXES)
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.normal(size=shape).astype(np.float32) / shape[-2] ** 0.5  # noqa: E731
    params = {
        "layers": {
            "up": draw(LAYERS, WIDTH, HIDDEN),
            "down": draw(LAYERS, HIDDEN, WIDTH),
            "scale": np.full(LAYERS, 0.5, np.float32),
        },
        "head": draw(WIDTH, WIDTH),
    }
    x = rng.normal(size=(64, WIDTH)).astype(np.float32)
    place = lambda a, spec: jax.device_put(a, NamedSharding(mesh, spec))  # noqa: E731
    batch = P(("replica", "fsdp"))
    return mesh, jax.tree.map(place, params, SPECS), place(x, batch), place(np.sin(x), batch)


def under_value_and_grad(**options):
    """The road of plain jit; the mesh is that of jax.set_mesh."""
    options = {"specs": SPECS} | options
    return cgx_jax.value_and_grad(loss_fn, "replica", Q8, exchange="xla", **options)


def under_shard_map(check_vma=True):
    """The road of shard_map: only "replica" is manual around the loss."""

    def reduced(grads):
        return cgx_jax.pmean_compressed(grads, "replica", Q8, exchange="xla")

    def ranked(params, x, y):
        if check_vma:
            params = jax.tree.map(lambda p: lax.pcast(p, "replica", to="varying"), params)
        loss, grads = jax.value_and_grad(loss_fn)(params, x, y)
        inside = {"axis_names": {"fsdp", "model"}, "check_vma": check_vma}
        grads = jax.shard_map(reduced, in_specs=(SPECS,), out_specs=SPECS, **inside)(grads)
        return lax.pmean(loss, "replica"), grads

    return over_replicas(ranked, check_vma=check_vma)


def over_replicas(ranked, **options):
    how = {"in_specs": (P(), P("replica"), P("replica")), "out_specs": P()} | options
    return jax.shard_map(ranked, mesh=case()[0], axis_names={"replica"}, **how)


def under_sync_gradients():
    """shard_map again, with the second one left to `sync_gradients`."""
    tx = cgx_jax.sync_gradients("replica", Q8, exchange="xla", specs=SPECS)

    def ranked(params, x, y):
        varying = jax.tree.map(lambda p: lax.pcast(p, "replica", to="varying"), params)
        loss, grads = jax.value_and_grad(loss_fn)(varying, x, y)
        grads, _ = tx.update(grads, tx.init(params))
        return lax.pmean(loss, "replica"), grads

    return over_replicas(ranked)


ROADS = {
    "value_and_grad": under_value_and_grad,
    "shard_map": under_shard_map,
    "shard_map without check_vma": functools.partial(under_shard_map, check_vma=False),
    "sync_gradients": under_sync_gradients,
}


@functools.cache
def compiled(name):
    mesh, params, x, y = case()
    with jax.set_mesh(mesh):
        return jax.jit(ROADS[name]()).lower(params, x, y).compile()


every_road = pytest.mark.parametrize("road", ROADS)


def check_placed(tree, specs=SPECS):
    """Every leaf of a tree like the parameters lies as `specs` says, on every device."""

    def check(x, spec):
        want = NamedSharding(case()[0], spec)
        assert x.sharding.is_equivalent_to(want, x.ndim), (x.sharding, spec)

    jax.tree.map(check, tree, specs)


@functools.cache
def exact_ones():
    """Loss and gradients of the whole batch on one device, then of the half of each replica."""
    params, *batch = jax.device_get(case()[1:])
    f = jax.jit(jax.value_and_grad(loss_fn))
    parts = np.s_[:32], np.s_[32:]
    halves = [jax.device_get(f(params, *(a[part] for a in batch))) for part in parts]
    return [jax.tree.map(lambda a, b: (a + b) / 2, *halves), *halves]


@every_road
def test_gradients_are_exact_ones_within_the_error_of_8_bits(road):
    _, params, x, y = case()
    loss, grads = compiled(road)(params, x, y)
    losses, wanted = zip(*exact_ones(), strict=True)
    np.testing.assert_allclose(loss, losses[0], rtol=1e-5)
    for got, exact, *parts in zip(*map(jax.tree.leaves, (grads, *wanted)), strict=True):
        # Half a unit of the one other rank's values, which count half, and half a unit of the mean.
        unit = max(np.ptp(part) for part in (exact, *parts)) * (1 + 1 / 255) / 255
        assert np.abs(np.asarray(got) - exact).max() <= 0.75 * unit + 1e-6
    check_placed(grads)


ADAM = optax.adam(1e-2)


@jax.jit
def moved(params, state, grads):
    updates, state = ADAM.update(grads, state, params)
    return optax.apply_updates(params, updates), state


def test_parameters_and_their_moments_stay_sharded_in_a_training_step():
    mesh, params, x, y = case()

    @jax.jit
    def step(params, state):
        loss, grads = under_value_and_grad()(params, x, y)
        return *moved(params, state, grads), loss

    losses, state = [], ADAM.init(params)
    with jax.set_mesh(mesh), jax.numpy_dtype_promotion("standard"):  # which optax needs
        for _ in range(3):
            params, state, loss = step(params, state)
            losses.append(loss)
    assert losses[-1] < losses[0]
    check_placed(params)
    check_placed(state[0].mu)


@every_road
def test_only_bytes_travel_between_replicas_and_gathers_stay_in_the_scan(road):
    text = compiled(road).as_text()
    entry = re.search(r"^ENTRY %?([\w.-]+)", text, re.MULTILINE)[1]
    mesh, params, *_ = case()
    replica = {d.id: r for r, devices in enumerate(mesh.devices) for d in devices.flat}
    between, inside = [], []
    for sent in hlo.collectives(text):
        crosses = any(len({replica[d] for d in group}) > 1 for group in sent.groups)
        (between if crosses else inside).append(sent)
    large = [sent for sent in between if sent.dtype == "u8" or sent.nbytes > 1024]
    assert {sent.dtype for sent in large} == {"u8"}
    # Each device sends the codes of its own shard: a byte per value, to one other rank, in two
    # phases, and some bytes per bucket.
    shard = sum(x.addressable_data(0).size for x in jax.tree.leaves(params))
    assert sum(sent.nbytes for sent in large) <= 2 * 1.1 * shard
    gathers = [sent for sent in inside if sent.op == "all-gather"]
    in_scan = [sent for sent in gathers if sent.computation != entry]
    assert len(in_scan) >= 2 * 2  # two leaves, two passes
    assert max(sent.nbytes for sent in gathers) <= 4 * HIDDEN * WIDTH


def as_a_function(path):
    known = {"layers/up": SPECS["layers"]["up"], "layers/down": SPECS["layers"]["down"]}
    return known.get(path, SPECS["head"] if path == "head" else P())


SAID = {
    "a function of the path": lambda: as_a_function,
    "the arrays": lambda: case()[1],
    "their shardings": lambda: jax.tree.map(lambda x: x.sharding, case()[1]),
    "a prefix": lambda: {"layers": SPECS["layers"], "head": SPECS["head"]},
}


@pytest.mark.parametrize("said", SAID.values(), ids=SAID)
def test_specs_may_be_said_in_several_ways(said):
    mesh, params, x, y = case()
    with jax.set_mesh(mesh):
        programs = [
            jax.jit(under_value_and_grad(specs=specs)).lower(params, x, y).as_text()
            for specs in (said(), SPECS)
        ]
    assert programs[0] == programs[1]


def test_specs_of_several_arguments():
    mesh, params, x, y = case()
    asked, programs = set(), []

    def by_path(path):
        asked.add(path)
        return as_a_function(path.removeprefix("0/"))

    for specs in (by_path, (SPECS, P())):
        f = cgx_jax.value_and_grad(
            lambda p, x, scale, y: loss_fn(p, x * scale, y), "replica", Q8, mesh=mesh,
            exchange="xla", argnums=(0, 2), specs=specs,
        )  # fmt: skip
        programs.append(jax.jit(f).lower(params, x, jnp.ones(()), y))
    assert programs[0].as_text() == programs[1].as_text()
    check_placed(programs[0].compile()(params, x, jnp.ones(()), y)[1][0])
    assert asked == {"0/layers/up", "0/layers/down", "0/layers/scale", "0/head", "1"}


def test_an_nnx_module_says_how_it_is_sharded():
    mesh, _, x, y = case()
    model = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0), kernel_init=nnx.initializers.zeros)
    kernel, bias = P("fsdp", "model"), P("model")
    model.kernel[...] = jax.device_put(model.kernel[...], NamedSharding(mesh, kernel))
    model.bias[...] = jax.device_put(model.bias[...], NamedSharding(mesh, bias))
    f = cgx_jax.value_and_grad(
        lambda m, x, y: jnp.mean((m(x) - y) ** 2), "replica", Q8, exchange="xla", specs=model
    )
    with jax.set_mesh(mesh):
        _, grads = nnx.jit(f)(model, x, y)
    assert (grads.kernel[...].sharding.spec, grads.bias[...].sharding.spec) == (kernel, bias)


def test_arrays_given_as_specs_may_be_donated():
    mesh, params, x, y = case()
    own = jax.tree.map(jnp.copy, params)
    f = under_value_and_grad(specs=own, mesh=mesh)
    jax.tree.map(lambda a: a.delete(), own)
    programs = [jax.jit(g).lower(params, x, y) for g in (f, under_value_and_grad(mesh=mesh))]
    assert programs[0].as_text() == programs[1].as_text()


def test_a_memory_is_sharded_like_its_parameters_from_the_start():
    mesh, params, x, y = case()
    with jax.set_mesh(mesh):
        f = under_value_and_grad(memory=ErrorFeedback(learning_rate=lambda step: 0.1))
        first = f.init(params)
        _, later = jax.jit(f.apply)(first, params, x, y)
    for state in (first, later):
        found = jax.tree.map(lambda m: tuple(m.sharding.spec), state.memory.trees[0])
        assert found["layers"]["up"] == ("replica", *SPECS["layers"]["up"])
        assert found["head"] == ("replica", *SPECS["head"])


def refused(specs, **options):
    def call():
        mesh, params, x, y = case()
        f = under_value_and_grad(mesh=mesh, specs=specs() if callable(specs) else specs, **options)
        jax.jit(lambda *args: f(*args))(params, x, y)

    return call


def with_head(spec):
    return SPECS | {"head": spec}


def traced():
    mesh, params, x, y = case()
    jax.jit(lambda p: under_value_and_grad(mesh=mesh, specs=p)(p, x, y))(params)


def stateful(**options):
    mesh, params, x, y = case()
    f = cgx_jax.value_and_grad(loss_fn, "replica", mesh=mesh, specs=SPECS, **options)
    jax.jit(f.apply)(f.init(params), params, x, y)


def test_moments_of_shards_are_those_of_whole_parameters():
    """Units follow from whole rows and columns, wherever a leaf is cut."""
    mesh, params, x, y = case()
    params, states, steps = {"layers": params["layers"]}, [], 3

    def loss(params, x, y):
        return loss_fn(params | {"head": jnp.eye(WIDTH)}, x, y)

    split = {"layers": SPECS["layers"]}
    for specs in (split, jax.tree.map(lambda _: P(), split)):
        how = {"mesh": mesh, "precondition": SecondMoment(), "exchange": "xla"}
        f = cgx_jax.value_and_grad(loss, "replica", Q8, specs=specs, **how)
        state, step = f.init(params), jax.jit(f.apply)
        for _ in range(steps):
            (_, grads), state = step(state, params, x, y)
        states.append((state.moments, grads))
    (got, grads), (want, others) = states
    assert jax.tree.leaves(got)
    # Shards have other buckets, so their errors differ.
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0.05, atol=1e-6), got, want)
    close = lambda a, b: np.testing.assert_allclose(a, b, atol=0.02 * np.abs(b).max())  # noqa: E731
    jax.tree.map(close, grads, others)
    check_placed(grads, split)


REFUSED = {
    "an unknown axis": (
        refused(with_head(P("embed"))),
        r"specs has P\('embed'\) for params\['head'\].*'embed' is no axis.*'fsdp'.*logical_to_mesh",
    ),
    "the compressed axis": (
        refused(with_head(P(("replica", "fsdp")))),
        r"params\['head'\] is sharded over the data axis 'replica' \(P\(\('replica', 'fsdp'\)\)\).*"
        "over no other axis",
    ),
    "a string": (refused(with_head("model")), r"has 'model' for params\['head'\].*P\(None, 'mod"),
    "an array on one device": (refused(lambda: with_head(jnp.ones(3))),
                               r"has SingleDeviceSharding\(.*for params\['head'\].*NamedShardings"),
    "a traced array": (traced, r"specs has .*params\['head'\].*arrays from outside jit"),
    "another mesh": (
        refused(lambda: with_head(NamedSharding(auto_mesh((8,), ("model",)), P("model")))),
        r"for params\['head'\], of a mesh with \{'model': 8\}, but .*'model': 2\}.*arrays of this",
    ),
    "another tree": (refused({"tail": P()}), "specs is no tree like argument 'params', nor a pref"),
    "too many dimensions": (refused(with_head(P(None, "fsdp", "model"))),
                            r"\['head'\] float32\[64,64\] .*dimension 2"),
    "a tree in the place of a tuple": (refused(SPECS, argnums=(0,)),
                                       r"specs=\{.* a tuple with one entry for each of the 1 arg"),
    "a function that says nothing": (refused(lambda: lambda path: None),
                                     r"specs\('head'\) returned None; .*P\(\) for"),
    "nothing": (refused(None), r"jit hides how params\['head'\].*the sharded params themselves"),
    "a compressor's state of shards": (lambda: stateful(policy=cgx_jax.compressors.PowerSGD()),
                                       r"keep a state.*need whole gradients.*rotation=True"),
}  # fmt: skip


@pytest.mark.parametrize(("call", "message"), REFUSED.values(), ids=REFUSED)
def test_specs_that_are_wrong_are_refused(call, message):
    with pytest.raises((TypeError, ValueError), match=f"^value_and_grad: (?s:.*){message}"):
        call()


def test_specs_are_checked_on_a_mesh_of_one_axis_too():
    _, params, x, y = case()
    f = under_value_and_grad(mesh=auto_mesh((8,), ("replica",)), specs=SPECS)
    with pytest.raises(ValueError, match="'fsdp' is no axis of the mesh"):
        f(*jax.device_get((params, x, y)))


class Constrained(nn.Module):
    """A Linen model whose activations say where they lie, by logical names."""

    @nn.compact
    def __call__(self, x):
        def dense(width, *names):
            init = nn.with_logical_partitioning(nn.initializers.lecun_normal(), names)
            return nn.Dense(width, kernel_init=init)

        x = nn.with_logical_constraint(x, ("batch", "embed"))
        x = nn.with_logical_constraint(jnp.tanh(dense(HIDDEN, "embed", "mlp")(x)), ("batch", "mlp"))
        return dense(WIDTH, "mlp", "embed")(x)


RULES = (("batch", ("replica", "fsdp")), ("embed", "fsdp"), ("mlp", "model"))


def linen_loss(params, x, y):
    return jnp.mean((Constrained().apply(params, x) - y) ** 2)


def linen_loss_with_rules(params, x, y):
    """Sets the rules itself, without the axes that are manual."""
    rules = [(name, *drop_manual_axes(P(at))) for name, at in RULES]
    with nn.logical_axis_rules(rules):
        return linen_loss(params, x, y)


@functools.cache
def constrained():
    """(parameters of `Constrained` with their logical names, the exact loss and gradients)."""
    mesh, _, x, y = case()
    with jax.set_mesh(mesh), nn.logical_axis_rules(RULES):
        made = jax.jit(Constrained().init)(jax.random.key(0), x)
        return made, jax.jit(jax.value_and_grad(linen_loss))(nn.unbox(made), x, y)


@pytest.mark.parametrize("boxed", [True, False])
@pytest.mark.parametrize("loss", [linen_loss, linen_loss_with_rules])
def test_a_linen_model_keeps_its_logical_constraints(loss, boxed):
    mesh, _, x, y = case()
    made, want = constrained()
    with jax.set_mesh(mesh), nn.logical_axis_rules(RULES):
        specs = nn.logical_to_mesh(nn.get_partition_spec(made))
        params = made if boxed else nn.unbox(made)
        f = cgx_jax.value_and_grad(loss, "replica", Q8, specs=specs, exchange="xla")
        step = jax.jit(f)
        got = step(params, x, y)
        assert nn.get_logical_axis_rules() == RULES
        text = step.lower(params, x, y).as_text()
    check_close(got, want)
    # The constraints are still there, without the axis that is manual.
    assert re.search(r'sharding_constraint .*\[\{"fsdp"\}, \{"model"\}\]', text)
    assert not re.search(r"sharding_constraint .*replica", text)


def test_rules_that_a_loss_sets_itself_are_refused_with_the_remedy():
    mesh, _, x, y = case()

    def loss(params, x, y):
        with nn.logical_axis_rules(RULES):
            return linen_loss(params, x, y)

    with jax.set_mesh(mesh):
        params = nn.unbox(jax.eval_shape(Constrained().init, jax.random.key(0), x))
        f = cgx_jax.value_and_grad(loss, "replica", Q8, specs=P())
        with pytest.raises(ValueError, match=r"^value_and_grad: .*logical axis rules that are set"):
            jax.eval_shape(f, params, x, y)


def raw(where):
    """A loss that constrains its activations by `where(spec)`."""

    def loss(params, x, y):
        x = lax.with_sharding_constraint(x, where(P(("replica", "fsdp"), None)))
        h = lax.with_sharding_constraint(x @ params["head"], where(P("replica", "model")))
        return jnp.mean((h - y) ** 2)

    return loss


def of_mesh(spec):
    return NamedSharding(case()[0], spec)


@pytest.mark.parametrize("of", [lambda spec: spec, of_mesh], ids=["spec", "NamedSharding"])
@pytest.mark.parametrize("shape", [(2, 2, 2), (1, 4, 2)], ids=["two replicas", "one replica"])
def test_a_raw_constraint_may_name_manual_axes_only_wrapped(of, shape):
    mesh, params, x, y = case()
    if shape != (2, 2, 2):
        mesh, of = auto_mesh(shape, AXES), lambda spec: spec
    head, x, y = jax.device_get(({"head": params["head"]}, x, y))
    with jax.set_mesh(mesh):
        how = {"specs": P("fsdp", "model"), "exchange": "xla"}
        f = cgx_jax.value_and_grad(raw(of), "replica", Q8, **how)
        with pytest.raises(ValueError, match=r"^value_and_grad: .*'replica' is manual.*drop_man"):
            jax.jit(f)(head, x, y)
        wrapped = raw(lambda spec: of(drop_manual_axes(spec)))
        got = jax.jit(cgx_jax.value_and_grad(wrapped, "replica", Q8, **how))(head, x, y)
        want = jax.jit(jax.value_and_grad(raw(of)))(head, x, y)
    check_close(got, want)


def test_out_sharding_may_name_manual_axes_only_wrapped():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Explicit,))

    def loss_by(where):
        def loss(w, x):
            return jnp.mean(jnp.einsum("bd,dh->bh", x, w, out_sharding=where(P("data", None))))

        return loss

    with jax.set_mesh(mesh):
        w = jnp.ones((WIDTH, WIDTH))
        x = jax.device_put(jnp.ones((8, WIDTH)), P("data"))
        f = lambda loss: jax.jit(cgx_jax.value_and_grad(loss, "data", Q8, exchange="xla"))  # noqa: E731
        with pytest.raises(ValueError, match=r"^value_and_grad: .*out_sharding=cgx_jax.drop_man"):
            f(loss_by(lambda spec: spec))(w, x)
        got = f(loss_by(drop_manual_axes))(w, x)
        check_close(got, jax.jit(jax.value_and_grad(loss_by(drop_manual_axes)))(w, x))


def explicit_loss(params, x, y):
    """A stack of layers that says how each product is sharded, as explicit axes need."""
    wide, narrow = (drop_manual_axes(P(("replica", "fsdp"), n)) for n in ("model", None))

    def block(x, layer):
        h = jnp.tanh(jnp.einsum("bd,dh->bh", x, layer["up"], out_sharding=wide))
        return x + jnp.einsum("bh,hd->bd", h, layer["down"], out_sharding=narrow) / 2, None

    x, y = jax.reshard((x, y), narrow)
    return jnp.mean((lax.scan(block, x, params)[0] - y) ** 2)


@functools.cache
def explicit_case():
    mesh = jax.make_mesh((2, 2, 2), AXES, axis_types=(AxisType.Explicit,) * 3)
    specs = {n: SPECS["layers"][n] for n in ("up", "down")}
    whole, *batch = jax.device_get(case()[1:])
    params = {n: whole["layers"][n] for n in specs}
    with jax.set_mesh(mesh):
        typed = jax.tree.map(jax.device_put, params, specs)
        even = [jax.device_put(a, P(("replica", "fsdp"))) for a in batch]
        want = jax.jit(jax.value_and_grad(explicit_loss))(typed, *even)
    return mesh, specs, params, typed, batch, want


@pytest.mark.parametrize("split", [P(("replica", "fsdp")), P(("fsdp", "replica")), P("fsdp"), P()])
@pytest.mark.parametrize("how", ["types", "types and specs", "specs"])
# A batch that is split over "fsdp" alone is quick in the next test.
@pytest.mark.quick("types-split3", "specs-split0")
def test_explicit_meshes(how, split):
    """Types say how parameters are sharded, or specs do; gradients then have such types."""
    mesh, specs, params, typed, batch, want = explicit_case()
    f = cgx_jax.value_and_grad(
        explicit_loss, "replica", Q8, exchange="xla", specs=None if how == "types" else specs
    )
    with jax.set_mesh(mesh):
        x, y = (jax.device_put(a, split) for a in batch)
        got = jax.jit(f)(params if how == "specs" else typed, x, y)
        assert jax.tree.map(jax.typeof, got[1]) == jax.tree.map(jax.typeof, typed)
    check_close(got, want)


TYPES = {n: dict(zip(AXES, kinds, strict=True)) for n, kinds in {
    "fsdp is explicit": (AxisType.Auto, AxisType.Explicit, AxisType.Auto),
    "model is explicit": (AxisType.Auto, AxisType.Auto, AxisType.Explicit),
    "replica is explicit": (AxisType.Explicit, AxisType.Auto, AxisType.Auto),
}.items()}  # fmt: skip


@pytest.mark.parametrize("types", TYPES.values(), ids=TYPES)
def test_meshes_with_axes_of_two_types(types):
    """Types say how a parameter is sharded over some axes only, and specs over all."""
    mesh = jax.make_mesh((2, 2, 2), AXES, axis_types=tuple(types.values()))
    w, x, _ = jax.device_get((case()[1]["head"], *case()[2:]))

    def loss(w, x):
        explicit = types["replica"] == AxisType.Explicit
        at = drop_manual_axes(P("replica" if explicit else None))
        return jnp.mean(jnp.tanh(jnp.einsum("bd,de->be", x, w, out_sharding=at)) ** 2)

    with jax.set_mesh(mesh):
        w = jax.device_put(w, NamedSharding(mesh, SPECS["head"]))
        x = jax.device_put(x, NamedSharding(mesh, P("replica")))
        want = jax.jit(jax.value_and_grad(loss))(w, x)
        how = {"exchange": "xla", "memory": ErrorFeedback()}
        f = cgx_jax.value_and_grad(loss, "replica", Q8, specs=SPECS["head"], **how)
        got, state = jax.jit(f.apply)(f.init(w), w, x)
        check_close(got, want)
        f = cgx_jax.value_and_grad(loss, "replica", Q8, **how)
        with pytest.raises(ValueError, match="jit hides how w is sharded over them; pass specs="):
            jax.jit(f.apply)(state, w, x)
        alone = jax.shard_map(lambda w: w, in_specs=P(), out_specs=P(), axis_names={"replica"})
        if jax.jit(alone)(w).sharding.spec != SPECS["head"]:
            pytest.skip("this JAX's shard_map forgets explicit axes beside Auto ones")
        assert got[1].sharding.spec == SPECS["head"]
        assert state.memory[0].sharding.spec == P("replica", *SPECS["head"])


def test_a_state_on_a_mesh_keeps_its_shards():
    mesh, params, *_ = case()
    at = {"specs": SPECS, "mesh": mesh}
    state = cgx_jax.sync_gradients("replica", Q8, memory=ErrorFeedback(), **at).init(params)
    placed = jax.device_put(jax.device_get(state), cgx_jax.state_shardings(state, "replica", mesh))
    same = lambda a, b: a.sharding.is_equivalent_to(b.sharding, a.ndim)  # noqa: E731
    assert all(jax.tree.leaves(jax.tree.map(same, placed, state)))
    assert placed.memory[0]["head"].sharding.spec == P("replica", *SPECS["head"])


def scanned_loss(w, x):
    return jnp.mean(lax.scan(lambda x, row: (jnp.tanh(x * row), None), x, w)[0] ** 2)


@functools.cache
def scanned_exactly():
    params, x, _ = jax.device_get(case()[1:])
    return jax.jit(jax.value_and_grad(scanned_loss))(params["head"], x)


@pytest.mark.parametrize("split", [P(("replica", "fsdp")), P("fsdp"), P()])
def test_a_part_of_the_batch_keeps_its_type_over_other_axes(split):
    """A carry of scan does: its type must be that of the batch which the program then gets."""
    mesh = jax.make_mesh((2, 2, 2), AXES, axis_types=(AxisType.Explicit,) * 3)
    params, x, _ = jax.device_get(case()[1:])
    with jax.set_mesh(mesh):
        f = jax.jit(cgx_jax.value_and_grad(scanned_loss, "replica", Q8, exchange="xla"))
        got = f(jax.device_put(params["head"], P()), jax.device_put(x, split))
    check_close(got, scanned_exactly())


@pytest.mark.parametrize("split", [P("replica"), P()])
def test_examples_may_meet_on_explicit_meshes(split):
    mesh = jax.make_mesh((8,), ("replica",), axis_types=(AxisType.Explicit,))
    params, x, _ = jax.device_get(case()[1:])

    def loss(w, x, gather):
        h = x @ w
        return jnp.mean((h @ gather(h).T) ** 2)

    def on_ranks(w, x):
        return loss(w, x, lambda h: lax.all_gather(h, "replica", tiled=True))

    with jax.set_mesh(mesh):
        f = jax.jit(cgx_jax.value_and_grad(on_ranks, "replica", Q8, exchange="xla"))
        got = f(jax.device_put(params["head"], P()), jax.device_put(x, split))
    alone = functools.partial(loss, gather=lambda h: h)
    check_close(got, jax.jit(jax.value_and_grad(alone))(params["head"], x))


def test_drop_manual_axes_leaves_specs_alone_where_no_axis_is_manual():
    spec = P(("replica", "fsdp"), None, "replica", P.UNCONSTRAINED)
    assert drop_manual_axes(spec) == spec
    seen = []

    def ranked(x):
        seen.append(drop_manual_axes(spec))
        return x

    jax.eval_shape(over_replicas(ranked, in_specs=P()), jnp.ones(2))
    assert seen == [P("fsdp", None, None, P.UNCONSTRAINED)]
    says = r"^drop_manual_axes: 'data' is not a PartitionSpec; pass P"
    with pytest.raises(TypeError, match=says):
        drop_manual_axes("data")
