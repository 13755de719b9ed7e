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
from hlo import before, computations
from worlds import sharded

pytestmark = [pytest.mark.oldest, pytest.mark.usefixtures("unoptimized")]

WORLD, WIDTH = 8, 64
KEY = jax.random.key(0)
EXACT = {"weights": Identity(), "gradients": Identity()}
SHARDS = dict.fromkeys(("kernel", "bias"), P(None, "data"))


def layers(count):
    rng = np.random.default_rng(count)
    draw = lambda *s: np.float32(rng.standard_normal(s) / WIDTH**0.5)  # noqa: E731
    return {"kernel": draw(count, WIDTH, WIDTH), "bias": draw(count, WIDTH)}


def body(x, layer):
    return x + jnp.tanh(x @ layer["kernel"] + layer["bias"])


def on_ranks(f, mesh, **options):
    """Applies `f` to each rank's examples and to its part of all layers."""
    return sharded(f, mesh, (P("data"), SHARDS), (P(), SHARDS), **options)


def trained(mesh, options, **more):
    def of_rank(x, shards):
        def loss(x, shards):
            return (cgx_jax.scan_layers(body, x, shards, "data", **options) ** 2).sum()

        value, grads = jax.value_and_grad(loss, argnums=1)(x, shards)
        return lax.psum(value, "data"), grads

    return on_ranks(of_rank, mesh, **more)


EXAMPLES = np.float32(np.random.default_rng(1).standard_normal((2 * WORLD, WIDTH)))


@pytest.mark.parametrize("jit", [True, False])
@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.quick("1-False-False", "4-True-True")
def test_what_the_body_closes_over_is_differentiated(count, check_vma, jit, mesh):
    """Values that differ between ranks, and one that all ranks hold, by way of another."""
    stack = layers(count)

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

    specs = (P("data"), P("data"), P(), SHARDS)
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
    f = functools.partial(gradient, ours)
    f = sharded(f, mesh, (P(), P(), P(), SHARDS), SHARDS, check_vma=check_vma)
    given = EXAMPLES, jnp.arange(len(EXAMPLES)) % 3 > 0, jax.random.key(5), layers(3)
    got, want = f(*given), jax.jit(functools.partial(gradient, plain))(*given)
    for name, sums in got.items():  # over ranks with the same examples
        np.testing.assert_allclose(sums, mesh.size * want[name], rtol=1e-4, atol=1e-3)


def test_shards_that_do_not_vary_have_the_sum_of_the_ranks_gradients(mesh):
    shards = jax.tree.map(lambda leaf: leaf[:, : WIDTH // WORLD], layers(3))

    def gradient(x, shards, varying):
        def loss(shards):
            out = cgx_jax.scan_layers(body, x, shards, "data", exchange="xla", **EXACT)
            return (out**2).sum()

        if not varying:
            return jax.grad(loss)(shards)
        return lax.psum(jax.grad(loss)(lax.pcast(shards, "data", to="varying")), "data")

    got, want = (
        sharded(functools.partial(gradient, varying=v), mesh, (P("data"), P()))(EXAMPLES, shards)
        for v in (False, True)
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


def paired(x, layer):
    return body(x, layer), None


UNEVEN = {"a": jnp.zeros((3, 8)), "b": jnp.zeros((2, 8))}
WRONG = [  # what is said of a body and a stack of layers
    (r".*leading dimensions \[\(2,\), \(3,\)\]", ValueError, body, UNEVEN),
    (r".*leading dimensions \[\(0,\)\]", ValueError, body, {"a": jnp.zeros((0, 8))}),
    (r"body returns .* in PyTreeDef\(\(\*, None\)\), ", TypeError, paired, None),
    (r"body returns float16\[2, \d+\]", TypeError, lambda *a: body(*a).astype(jnp.float16), None),
    (r"body returns float32\[1, ", TypeError, lambda *a: body(*a)[:1], None),
]


@pytest.mark.parametrize(("message", "error", "other", "stack"), WRONG)
def test_what_is_no_stack_or_returns_no_next_input_is_refused(message, error, other, stack, mesh):
    f = lambda x, s: cgx_jax.scan_layers(other, x, s, "data", key=KEY)  # noqa: E731
    f = sharded(f, mesh, (P("data"), P(None, "data")), P("data"))
    with pytest.raises(error, match=f"^scan_layers: {message}"):
        jax.eval_shape(f, EXAMPLES, stack or layers(2))
