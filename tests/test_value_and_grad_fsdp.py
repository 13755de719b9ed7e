"""Parameters sharded over the data axis: gathered where the loss uses them, gradients as shards."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import cgx_jax
from cgx_jax import ErrorFeedback, Identity, Plan, Quantize, Rule, Rules
from hlo import collectives
from plain_jit_case import auto_mesh
from worlds import drawn, sharded

pytestmark = [pytest.mark.oldest, pytest.mark.usefixtures("unoptimized", "standard_promotion")]

LAYERS, WIDTH, HIDDEN, WORDS, ROWS = 4, 64, 128, 32, 16
MESHES = {"data": ((4,), ("data",)), "data and model": ((4, 2), ("data", "model"))}
SPECS = {
    "embed": P(None, "data"),
    "up": P(None, "data", "model"),
    "down": P(None, "model", "data"),
    "norm": P(None, "data"),
    "bias": P(),
    "head": P("data"),
}


def mesh_of(name):
    shape, names = MESHES[name]
    return auto_mesh(shape, names)


def specs_on(mesh):
    """SPECS, as far as the mesh has their axes."""
    known = lambda spec: P(*(n if n in mesh.axis_names else None for n in spec))  # noqa: E731
    return {name: known(spec) for name, spec in SPECS.items()}


def placed(mesh, tree, specs):
    at = jax.tree.map(lambda s: NamedSharding(mesh, s), specs, is_leaf=lambda s: isinstance(s, P))
    return jax.device_put(tree, at)


def arguments(mesh):
    rng = np.random.default_rng(0)
    shapes = {
        "embed": (WORDS, WIDTH),
        "up": (LAYERS, WIDTH, HIDDEN),
        "down": (LAYERS, HIDDEN, WIDTH),
        "norm": (LAYERS, WIDTH),
        "bias": (WIDTH,),
        "head": (WIDTH, WORDS),
    }
    params = {k: rng.normal(size=s).astype(np.float32) / s[-1] ** 0.5 for k, s in shapes.items()}
    tokens = rng.integers(WORDS, size=(2, ROWS, 8))
    return placed(mesh, params, specs_on(mesh)), *placed(mesh, list(tokens), [P("data")] * 2)


def _stack(p, at=slice(None)):
    return {k: p[k][at] for k in ("up", "down", "norm")}


def block(h, w):
    return h + jnp.tanh((h * w["norm"]) @ w["up"]) @ w["down"]


def scanned(wrap=lambda f: f, cast=lambda p: p):
    def loss(p, x, y):
        h = cast({"embed": p["embed"]})["embed"][x] + p["bias"]
        layer = wrap(lambda h, w: (block(h, w), None))
        h, _ = jax.lax.scan(layer, h, cast(_stack(p)))
        logits = jax.nn.log_softmax((h @ p["head"]).astype(jnp.float32))
        return -jnp.take_along_axis(logits, y[..., None], -1).mean()

    return loss


def unrolled(p, x, y):
    """Two layers of the stack."""
    h = p["embed"][x] + p["bias"]
    for i in (0, 2):
        h = block(h, _stack(p, i))
    return jnp.square(h @ p["head"] - y[..., None]).mean()


def of_pairs(p, x, y):
    """A stack of stacks: two layers at a time. The embedding is used twice."""
    stack = jax.tree.map(lambda x: x.reshape(2, 2, *x.shape[1:]), _stack(p))
    two = lambda h, w: jax.lax.scan(lambda h, w: (block(h, w), None), h, w)  # noqa: E731
    h, _ = jax.lax.scan(two, p["embed"][x] + p["bias"], stack)
    return jnp.square(h @ p["embed"].T - y[..., None]).mean() + jnp.square(p["head"]).mean()


def backwards(p, x, y):
    """A custom derivative, a branch and a loop whose carry is a parameter."""
    h = p["embed"][x] + jax.nn.relu(p["bias"])
    h = jax.lax.cond(p["bias"].sum() > 1e9, lambda h, w: h, block, h, _stack(p, 0))
    body = lambda _, c: (c[0] @ c[1] @ c[1].T / 8, c[1])  # noqa: E731
    h, _ = jax.lax.fori_loop(0, 2, body, (h, p["head"]))
    h, _ = jax.lax.scan(lambda h, w: (block(h, w), None), h, _stack(p), reverse=True, unroll=2)
    return jnp.square(h.mean(-1) - y).mean()


def in_half(p):
    return jax.tree.map(lambda x: x.astype(jnp.bfloat16), p)


def mixed(p, x, y):
    return scanned(jax.checkpoint, jax.jit(in_half))(p, x, y)


dots = functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.dots_saveable)
LOSSES = {
    "unrolled": unrolled,
    "scanned": scanned(),
    "with checkpoints": scanned(jax.checkpoint),
    "with a policy": scanned(dots),
    "jitted": jax.jit(scanned(lambda f: jax.jit(jax.checkpoint(f)))),
    "of pairs": of_pairs,
    "backwards": backwards,
    "in bfloat16": mixed,
}


def fsdp(mesh, loss, policy=None, **options):
    options = {"exchange": "xla", "mesh": mesh, "specs": specs_on(mesh)} | options
    return cgx_jax.value_and_grad(loss, "data", policy or Identity(), **options)


@functools.cache
def exact(name, mesh):
    """Returns plain jit's program of a loss, compiled."""
    mesh = mesh_of(mesh)
    at = {k: NamedSharding(mesh, s) for k, s in specs_on(mesh).items()}
    plain = jax.jit(jax.value_and_grad(LOSSES[name]), out_shardings=(None, at))
    return plain.lower(*arguments(mesh)).compile()


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", LOSSES)
# Losses that scan are "of pairs" without checkpoints, and "in bfloat16" with them.
@pytest.mark.quick("of*-data", "backwards-data", "in*-data", "jitted-data and model")
def test_without_codes_it_is_plain_jit_and_gradients_are_shards(name, mesh, no_cache):
    same = "scanned" if name.startswith("with") else name  # what is computed twice has one value
    plain, mesh = exact(same, mesh), mesh_of(mesh)
    given = arguments(mesh)
    value, grads = plain(*given)
    got, found = jax.jit(fsdp(mesh, LOSSES[name]))(*given)
    off = 2e-2 if name == "in bfloat16" else 1e-5
    np.testing.assert_allclose(got, value, rtol=off)
    for leaf, spec in specs_on(mesh).items():
        most = np.abs(grads[leaf]).max()
        np.testing.assert_allclose(found[leaf], grads[leaf], atol=off * most, err_msg=leaf)
        assert found[leaf].sharding.is_equivalent_to(NamedSharding(mesh, spec), found[leaf].ndim)


WEIGHTS, GRADIENTS = Quantize(8), Quantize(4, rotation=True)


def test_weights_and_gradients_travel_as_by_the_calls_inside_shard_map(no_cache):
    mesh = mesh_of("data")
    specs = specs_on(mesh)
    cut = {k: next((d for d, n in enumerate(s) if n == "data"), None) for k, s in specs.items()}

    def by_hand(shards, x, y):
        own = {k: shards[k] for k, d in cut.items() if d is not None}

        def loss(own, rest):
            whole = {}
            for k, shard in own.items():  # one call for each, as each is gathered for itself
                codes = (Identity(),) * 2 if k == "norm" else (WEIGHTS, GRADIENTS)
                how = {"axis": cut[k], "tiled": True, "exchange": "xla", "backward": codes[1]}
                whole[k] = cgx_jax.all_gather_compressed(shard, "data", codes[0], **how)
            return unrolled(whole | rest, x, y)

        rest = {"bias": shards["bias"]}
        value, (grads, others) = jax.value_and_grad(loss, (0, 1))(own, rest)
        means = jax.lax.pmean((value, others), "data")
        return means[0], jax.tree.map(lambda g: g / 4, grads) | means[1]

    at = specs, P("data"), P("data")
    mapped = sharded(by_hand, mesh, at, (P(), specs), check_vma=False)
    value, grads = mapped(*arguments(mesh))
    got, found = jax.jit(fsdp(mesh, unrolled, GRADIENTS, weights=WEIGHTS))(*arguments(mesh))
    np.testing.assert_allclose(got, value, rtol=1e-6)
    for leaf in grads:
        most = np.abs(grads[leaf]).max()
        np.testing.assert_allclose(found[leaf], grads[leaf], atol=1e-6 * most, err_msg=leaf)


def test_each_leaf_has_its_own_codes(no_cache):
    mesh = mesh_of("data")
    given = arguments(mesh)
    rules = Rules((Rule(Quantize(2), "up"),), Identity(), exact=())
    policies = rules, Plan.build(given[0], rules)
    one, same = (jax.jit(fsdp(mesh, LOSSES["scanned"], p)).lower(*given) for p in policies)
    assert one.as_text() == same.as_text()
    (_, grads), (_, found) = (f(*given) for f in (exact("scanned", "data"), one.compile()))
    off = {k: np.linalg.norm(found[k] - grads[k]) / np.linalg.norm(grads[k]) for k in grads}
    assert off.pop("up") > 0.1
    assert max(off.values()) < 1e-5


@pytest.mark.parametrize("name", ["scanned", "with checkpoints", "with a policy"])
@pytest.mark.quick("with checkpoints")
def test_no_layer_is_whole_for_longer_than_it_computes(name, no_cache):
    """All that travels is in bytes, nothing has the size of the stack, and memory does not grow."""
    mesh = mesh_of("data")
    ours = jax.jit(fsdp(mesh, LOSSES[name], Quantize(4), weights=Quantize(8)))
    programs = exact(name, "data"), ours.lower(*arguments(mesh)).compile()
    text = programs[1].as_text()
    assert not re.search(rf"f32\[{LAYERS},({WIDTH},{HIDDEN}|{HIDDEN},{WIDTH})\]", text)
    sent = [c for c in collectives(text) if c.dtype != "u8"]
    assert max(c.nbytes for c in sent) <= 4 * LAYERS * WIDTH
    temporary, of_ours = (p.memory_analysis().temp_size_in_bytes for p in programs)
    assert of_ours <= 1.05 * temporary


def test_a_ratio_an_auxiliary_output_and_an_axis_of_two_names(no_cache):
    mesh = auto_mesh((2, 2), ("node", "gpu"))
    axes = ("node", "gpu")
    specs = {"w": P(None, axes), "b": P()}
    rng = np.random.default_rng(0)
    params = {"w": rng.normal(size=(8, 64)).astype(np.float32), "b": np.zeros(64, np.float32)}
    x, mask = rng.normal(size=(16, 8)).astype(np.float32), rng.random(16) < 0.5

    def loss(p, x, mask):
        rows = jnp.square(x @ p["w"] + p["b"]).sum(-1)
        return ((rows * mask).sum(), mask.sum()), rows

    def one(p):
        (total, count), rows = loss(p, x, jnp.float32(mask))
        return total / count, rows

    (value, rows), grads = jax.jit(jax.value_and_grad(one, has_aux=True))(params)
    how = {"has_aux": True, "aux_specs": P(axes), "in_specs": {"x": P(axes), "mask": P(axes)}}
    f = cgx_jax.value_and_grad(loss, axes, Identity(), loss="ratio", mesh=mesh, **how)
    (got, by_row), found = f(placed(mesh, params, specs), x, jnp.float32(mask))  # known, not named
    np.testing.assert_allclose(got, value, rtol=1e-6)
    np.testing.assert_allclose(by_row, rows, rtol=1e-5)
    for leaf in grads:
        np.testing.assert_allclose(found[leaf], grads[leaf], rtol=1e-4, atol=1e-6)
        assert found[leaf].sharding.spec == specs[leaf]


def test_the_metadata_of_an_nnx_module_says_which_parameters_are_sharded(no_cache):
    class Model(nnx.Module):
        def __init__(self, rngs):
            up, down = (nnx.with_partitioning(drawn, at) for at in ((None, "data"), ("data", None)))
            self.up = nnx.Linear(WIDTH, HIDDEN, kernel_init=up, rngs=rngs)
            self.down = nnx.Linear(HIDDEN, WIDTH, kernel_init=down, rngs=rngs)

        def __call__(self, x):
            return self.down(nnx.relu(self.up(x)))

    loss = lambda model, x: jnp.mean((model(x) - x) ** 2)  # noqa: E731
    x = np.random.default_rng(0).normal(size=(ROWS, WIDTH)).astype(np.float32)
    with jax.set_mesh(mesh_of("data")):
        model = nnx.jit(lambda: Model(nnx.Rngs(0)))()
        value, grads = nnx.jit(nnx.value_and_grad(loss))(model, x)
        f = cgx_jax.value_and_grad(loss, "data", Identity(), weights=Quantize(8))
        got, found = nnx.jit(f)(model, x)
    np.testing.assert_allclose(got, value, rtol=0.01)
    assert float(got) != float(value)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(grads), strict=True):
        assert np.linalg.norm(one - other) < 0.05 * np.linalg.norm(other)
    assert found["up"]["kernel"][...].sharding.spec == P(None, "data")


def test_an_axis_of_one_rank_has_no_shards():
    mesh = auto_mesh((1,), ("data",))
    given = arguments(mesh)
    value, grads = jax.jit(jax.value_and_grad(unrolled))(*given)
    got, found = jax.jit(fsdp(mesh, unrolled))(*given)
    np.testing.assert_allclose(got, value, rtol=1e-6)
    np.testing.assert_allclose(found["up"], grads["up"], rtol=1e-4, atol=1e-6)


def refused(change=lambda specs: specs, policy=None, call=lambda f, given: f(*given), **options):
    def run():
        mesh = mesh_of("data and model")
        f = fsdp(mesh, unrolled, policy, **{"specs": change(specs_on(mesh))} | options)
        return call(jax.jit(f) if call.__name__ == "<lambda>" else f, arguments(mesh))

    return run


def create(f, given):
    return f.init(given[0])


def apply(f, given):
    state = cgx_jax.sync_gradients("data").init(given[0])
    return f.apply(state, *given)


def explicit():
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Explicit,))
    return fsdp(mesh, unrolled)(*arguments(mesh))


def with_statistics():
    mesh = mesh_of("data")
    params, x, y = arguments(mesh)
    loss = lambda p, x, y, scale: unrolled(p, x, y) * scale["v"].mean()  # noqa: E731
    f = fsdp(mesh, loss, argnums=(0, 3), specs=(specs_on(mesh), P()))
    return f(params, x, y, {"v": placed(mesh, jnp.ones(8, jnp.int32), P("data"))})


REFUSED = {
    "one dimension over two axes": (
        refused(lambda s: s | {"up": P(None, ("data", "model"))}),
        r"p\['up'\] .*\(P\(None, \('data', 'model'\)\)\); a dimension .* over no other axis",
    ),
    "a state": (refused(call=apply), "have no state: call the function itself in place of `apply`"),
    "init": (refused(call=create), "scatter_gradients keeps such a state"),
    "a memory": (refused(memory=ErrorFeedback()), "ErrorFeedback.* keeps a state between steps"),
    "random rounding": (refused(weights=Quantize(8, rounding="stochastic")),
                        "rounds at random, and without a state"),
    "a reduction": (refused(reduction="ring"), "reduction='ring' is for parameters .* Leave red"),
    "codes for nothing": (
        refused(lambda s: {k: P() for k in s}, weights=Quantize(8)),
        r"weights=Quantize.* and none is known to be; name the axis .*P\('data'\)",
    ),
    "what does not divide": (
        refused(lambda s: s | {"norm": P("data"), "embed": P(None, "data"), "bias": P("data")}
                | {"head": P(None, None, "data")}),
        r"p\['head'\] .* cuts dimension 2 into 4",
    ),
    "an explicit axis": (explicit, "which is explicit; use cgx_jax.reshard"),
    "what is not trained": (with_statistics, r"scale\['v'\] .*Only parameters may be"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_gathered_is_refused_with_the_remedy(name):
    run, message = REFUSED[name]
    with pytest.raises((TypeError, ValueError), match=f"^value_and_grad: (?s:.*){message}"):
        run()
