"""scan_layers: model and gradient equal those of exact layers; one call per layer, one ahead."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import cgx_jax
from cgx_jax import Identity
from cgx_jax.compressors import ShiftedLattice
from hlo import before, computations

pytestmark = [pytest.mark.oldest, pytest.mark.usefixtures("unoptimized")]

WORLD, WIDTH = 8, 64
KEY = jax.random.key(0)
EXACT = {"weights": Identity(), "gradients": Identity()}


def layers(count):
    rng = np.random.default_rng(count)
    draw = lambda *s: np.float32(rng.standard_normal(s) / WIDTH**0.5)  # noqa: E731
    return {"kernel": draw(count, WIDTH, WIDTH), "bias": draw(count, WIDTH)}


def body(x, layer):
    return x + jnp.tanh(x @ layer["kernel"] + layer["bias"])


def on_ranks(f, mesh, *, check_vma=True):
    """Applies `f` to each rank's examples and to its part of all layers."""
    shards = P(None, "data")
    specs = {"kernel": shards, "bias": shards}
    return jax.shard_map(
        f, mesh=mesh, in_specs=(P("data"), specs), out_specs=(P(), specs), check_vma=check_vma
    )


def trained(mesh, options, **more):
    def of_rank(x, shards):
        def loss(x, shards):
            return (cgx_jax.scan_layers(body, x, shards, "data", **options) ** 2).sum()

        value, grads = jax.value_and_grad(loss, argnums=1)(x, shards)
        return lax.psum(value, "data"), grads

    return jax.jit(on_ranks(of_rank, mesh, **more))


def whole_loss(x, stack):
    for i in range(len(stack["bias"])):
        x = body(x, jax.tree.map(lambda leaf: leaf[i], stack))  # noqa: B023
    return (x**2).sum()


EXAMPLES = np.float32(np.random.default_rng(1).standard_normal((2 * WORLD, WIDTH)))


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.quick("1-True", "4-True")
def test_without_compression_it_is_the_whole_model(count, check_vma, mesh):
    stack = layers(count)
    got = trained(mesh, {"exchange": "xla", **EXACT}, check_vma=check_vma)(EXAMPLES, stack)
    want = jax.jit(jax.value_and_grad(whole_loss, argnums=1))(EXAMPLES, stack)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-3), got, want)


@pytest.mark.parametrize("jit", [True, False])
@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.quick("1-True-True", "4-True-True", "4-False-False")
def test_what_the_body_closes_over_is_differentiated(count, check_vma, jit, mesh):
    """Values that differ between ranks, and one that all ranks hold, by way of another."""
    stack, shards = layers(count), P(None, "data")

    def loss(run, x, own, scale, stack):
        steps, double = jnp.arange(len(x)), 2 * scale

        def scaled(x, layer):
            return body(x, layer) * double + own[steps] * jnp.ones(WIDTH).at[0].set(scale[0])

        return (run(scaled, x, stack) ** 2).sum()

    def of_rank(x, own, scale, stack):
        run = lambda b, x, s: cgx_jax.scan_layers(b, x, s, "data", exchange="xla", **EXACT)  # noqa: E731
        grads = jax.grad(functools.partial(loss, run), (0, 1, 2, 3))(x, own, scale, stack)
        if not check_vma:  # the gradient of what all ranks hold is then that of this rank
            grads = *grads[:2], lax.psum(grads[2], "data"), grads[3]
        return grads

    def whole(body, x, stack):
        for i in range(count):
            x = body(x, jax.tree.map(lambda leaf: leaf[i], stack))  # noqa: B023
        return x

    specs = (P("data"), P("data"), P(), {"kernel": shards, "bias": shards})
    f = jax.shard_map(of_rank, mesh=mesh, in_specs=specs, out_specs=specs, check_vma=check_vma)
    given = EXAMPLES, EXAMPLES[::-1] / 8, jnp.linspace(0.2, 0.4, WIDTH), stack
    got = (jax.jit(f) if jit else f)(*given)
    want = jax.jit(jax.grad(functools.partial(loss, whole), (0, 1, 2, 3)))(*given)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-3), got, want)


AROUND = {
    "remat": jax.checkpoint,
    "jit": jax.jit,
    "vmap": lambda f: lambda x, keep, *rest: jax.vmap(lambda k: f(x, k, *rest))(keep[None]).sum(),
}


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("around", AROUND.values(), ids=AROUND)
@pytest.mark.quick("remat-True", "vmap-True")
def test_the_body_may_close_over_masks_and_keys_wherever_it_is(around, check_vma, mesh):
    def gradient(run, *given):
        def loss(x, keep, key, stack):
            def masked(x, layer):
                drawn = jax.random.bernoulli(key, 0.8, x.shape)
                return jnp.where(keep[:, None] & drawn, body(x, layer), x)

            return (run(masked, x, stack) ** 2).sum()

        return jax.grad(around(loss), 3)(*given)

    ours = lambda b, x, s: cgx_jax.scan_layers(b, x, s, "data", exchange="xla", **EXACT)  # noqa: E731
    plain = lambda b, x, s: lax.scan(lambda x, w: (b(x, w), None), x, s)[0]  # noqa: E731
    shards = dict.fromkeys(("kernel", "bias"), P(None, "data"))
    specs = P(), P(), P(), shards
    f = functools.partial(gradient, ours)
    f = jax.shard_map(f, mesh=mesh, in_specs=specs, out_specs=shards, check_vma=check_vma)
    given = EXAMPLES, jnp.arange(len(EXAMPLES)) % 3 > 0, jax.random.key(5), layers(3)
    got, want = jax.jit(f)(*given), jax.jit(functools.partial(gradient, plain))(*given)
    for name, sums in got.items():  # over ranks with the same examples
        np.testing.assert_allclose(sums, mesh.size * want[name], rtol=1e-4, atol=1e-3)


@pytest.mark.slow
def test_both_passes_see_the_same_rounded_weights(mesh):
    """The gradient is that of the model with the weights that the forward pass gathered."""
    stack, c = layers(3), ShiftedLattice(4)
    options = {"weights": c, "gradients": Identity(), "key": KEY, "exchange": "xla"}
    loss, grads = trained(mesh, options)(EXAMPLES, stack)

    def gathered(x, shards):
        rounded = [
            cgx_jax.all_gather_compressed(
                jax.tree.map(lambda leaf: leaf[i], shards),  # noqa: B023
                "data",
                c,
                tiled=True,
                key=jax.random.fold_in(KEY, i),
                exchange="xla",
            )
            for i in range(3)
        ]
        whole = jax.tree.map(lambda *leaves: jnp.stack(leaves), *rounded)
        mine = jax.tree.map(
            lambda leaf: lax.dynamic_slice_in_dim(
                leaf, lax.axis_index("data") * (WIDTH // WORLD), WIDTH // WORLD, 1
            ),
            whole,
        )
        return lax.psum(x.sum(), "data"), mine

    rounded = jax.jit(on_ranks(gathered, mesh))(EXAMPLES, stack)[1]
    assert np.abs(rounded["kernel"] - stack["kernel"]).max() > 1e-3
    want, wanted = jax.jit(jax.value_and_grad(whole_loss, argnums=1))(EXAMPLES, rounded)
    np.testing.assert_allclose(loss, want, rtol=1e-4)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-3), grads, wanted)


def test_shards_that_do_not_vary_have_the_sum_of_the_ranks_gradients(mesh):
    shards = jax.tree.map(lambda leaf: leaf[:, : WIDTH // WORLD], layers(3))

    def gradient(x, shards, varying):
        def loss(shards):
            return (
                cgx_jax.scan_layers(body, x, shards, "data", exchange="xla", **EXACT) ** 2
            ).sum()

        if not varying:
            return jax.grad(loss)(shards)
        return lax.psum(jax.grad(loss)(lax.pcast(shards, "data", to="varying")), "data")

    got, want = (
        jax.jit(
            jax.shard_map(
                lambda x, s, varying=varying: gradient(x, s, varying),
                mesh=mesh,
                in_specs=(P("data"), P()),
                out_specs=P(),
            )
        )(EXAMPLES, shards)
        for varying in (False, True)
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), got, want)


def test_in_compiled_loops_weights_and_gradients_travel_beside_the_computation(mesh):
    """Each loop has one call for all leaves; calls and products do not wait for each other."""
    f = trained(mesh, {"key": KEY, "exchange": "xla"})
    hlo = f.lower(EXAMPLES, layers(6)).compile().as_text()
    module, bodies = computations(hlo), re.findall(r"body=%?([\w.-]+)", hlo)
    loops = []
    for instructions in (module[name] for name in bodies):
        sends = [n for n, (op, _) in instructions.items() if op in ("all-gather", "all-to-all")]
        dots = [n for n, (op, _) in instructions.items() if op == "dot"]
        if not sends:  # the loop of random numbers
            continue
        assert dots
        for name in sends:
            assert not before(instructions, name) & set(dots)
        for name in dots:
            assert not before(instructions, name) & set(sends)
        loops.append(sorted(instructions[n][0] for n in sends))
    assert sorted(loops) == [["all-gather"], ["all-gather", "all-to-all"]]


@pytest.mark.parametrize(
    ("stack", "message"),
    [
        (
            {"a": jnp.zeros((3, 8)), "b": jnp.zeros((2, 8))},
            r"leading dimensions \[\(2,\), \(3,\)\]",
        ),
        ({"a": jnp.zeros((0, 8))}, r"leading dimensions \[\(0,\)\]"),
    ],
)
def test_stacks_that_are_none_are_refused(stack, message, mesh):
    f = lambda x, s: cgx_jax.scan_layers(body, x, s, "data", key=KEY)  # noqa: E731
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(
            jax.shard_map(f, mesh=mesh, in_specs=(P("data"), P(None, "data")), out_specs=P("data")),
            EXAMPLES,
            stack,
        )


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (lambda x, w: (body(x, w), None), r"body returns .* in PyTreeDef\(\(\*, None\)\), "),
        (lambda x, w: body(x, w).astype(jnp.float16), r"body returns float16\[2, \d+\]"),
        (lambda x, w: body(x, w)[:1], r"body returns float32\[1, "),
    ],
)
def test_a_body_that_returns_no_next_input_is_refused(other, message, mesh):
    f = lambda x, s: cgx_jax.scan_layers(other, x, s, "data", key=KEY)  # noqa: E731
    shards = {name: P(None, "data") for name in layers(2)}
    with pytest.raises(TypeError, match=f"^scan_layers: {message}"):
        jax.eval_shape(
            jax.shard_map(f, mesh=mesh, in_specs=(P("data"), shards), out_specs=P("data")),
            EXAMPLES,
            layers(2),
        )
