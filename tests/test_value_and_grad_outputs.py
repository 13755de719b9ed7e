"""value_and_grad returns what plain jit does, or refuses: outputs, statistics, BatchNorm."""

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
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from plain_jit_case import auto_mesh, check_close, loss_fn, vag
from worlds import sharded

pytestmark = [pytest.mark.oldest, pytest.mark.usefixtures("unoptimized")]


def of_jax(f, *given, **options):
    return jax.jit(jax.value_and_grad(f, **options))(*given)


def test_one_rank_computes_what_jax_does(case):
    params, x, y, _ = case
    f = vag(outputs_of, mesh=auto_mesh((1,)), has_aux=True, aux_specs=OUTPUTS)
    check_close(f(params, x, y), of_jax(outputs_of, params, x, y, has_aux=True), 1e-5)


def test_values_have_the_types_of_what_is_computed_from_them(case):
    """Equinox's layers with a state compare the types of the old and the new one."""
    params, x, y, _ = case
    seen = []

    def loss(p, x, y, state):
        seen.append(jax.typeof(state) == jax.typeof(state + 1))
        return loss_fn(p, x, y)

    f = vag(loss, in_specs={"state": P()})
    check_close(f(params, x, y, jnp.ones(3)), of_jax(loss, params, x, y, jnp.ones(3)))
    assert all(seen)


def outputs_of(p, x, y):
    hidden = x @ p["a"]["w"]
    right = hidden.argmax(1) == 0
    return loss_fn(p, x, y), {
        "rows": hidden,
        "columns": hidden.T,
        "accuracy": right.mean(),
        "count": right.sum(),
        "total": hidden.sum(),
        "by_class": right.astype(jnp.float32) @ jnp.ones((len(x), 3)),
        "weights": jnp.square(p["a"]["w"]).sum(),
        "constant": jnp.int32(3),
    }


OUTPUTS = {
    "rows": P("data"),
    "columns": P(None, "data"),
    "accuracy": "mean",
    "count": "sum",
    "total": "sum",
    "by_class": "sum",
    "weights": P(),
    "constant": P(),
}


@pytest.mark.parametrize("specs", [OUTPUTS, OUTPUTS.get], ids=["tree", "function"])
@pytest.mark.quick("tree")
def test_auxiliary_outputs_are_those_of_plain_jit(case, specs):
    params, x, y, want = case
    (loss, aux), grads = jax.jit(vag(outputs_of, has_aux=True, aux_specs=specs))(params, x, y)
    expected = jax.jit(outputs_of)(params, x, y)[1]
    assert jax.tree.map(jnp.shape, aux) == jax.tree.map(jnp.shape, expected)
    for name, value in expected.items():
        np.testing.assert_allclose(aux[name], value, rtol=1e-4, atol=1e-3, err_msg=name)
    check_close((loss, grads), want)


@pytest.mark.parametrize("wrap", [lambda a: a, lambda a: (a,), lambda a: {"a": a}])
def test_auxiliary_outputs_are_refused_without_specs_and_the_offered_ones_are_right(case, wrap):
    params, x, y, _ = case

    def loss(p, x, y):
        return loss_fn(p, x, y), wrap((x.argmax(1) < 6).mean())

    with pytest.raises(ValueError, match="has_aux=True needs aux_specs") as refused:
        vag(loss, has_aux=True)(params, x, y)
    specs = eval(str(refused.value).split("aux_specs=")[-1].splitlines()[0][:-1], {"P": P})
    got = vag(loss, has_aux=True, aux_specs=specs)(params, x, y)
    check_close(got, of_jax(loss, params, x, y, has_aux=True))


WRONG_OUTPUTS = {
    "a row of each rank": (lambda x: x[0], P("data")),
    "a maximum": (lambda x: x.argmax(1).max(), "sum"),
    "sorted examples": (lambda x: jnp.sort(x[:, 0]), P("data")),
    "the mean of a count": (lambda x: (x.argmax(1) == 0).sum(), "mean"),
    "the sum of a mean": (lambda x: x.mean(), "sum"),
    "a mean over a mask": (lambda x: jnp.mean(x[:, 0], where=x[:, 1] > 0), "mean"),
    "one rank's accuracy": (lambda x: (x.argmax(1) == 0).mean(), P()),
    "rows as the same": (lambda x: x, P()),
    "rows along another dimension": (lambda x: 2 * x, P(None, "data")),
    "a number of no dimension": (lambda x: x.mean(), P("data")),
    "no spec": (lambda x: x.mean(), "rows"),
}


@pytest.mark.parametrize(("output", "spec"), WRONG_OUTPUTS.values(), ids=WRONG_OUTPUTS)
def test_an_output_that_is_not_what_its_spec_says_is_refused(case, output, spec):
    params, x, y, _ = case
    loss = lambda p, x, y: (loss_fn(p, x, y), {"out": output(x)})  # noqa: E731
    with pytest.raises(ValueError, match=r"value_and_grad: aux\['out'\] .*(aux_specs|dimension)"):
        vag(loss, has_aux=True, aux_specs=spec)(params, x, y)


def test_trust_takes_specs_at_their_word(case):
    params, x, y, _ = case
    loss = lambda p, x, y: (loss_fn(p, x, y), (x.argmax(1).max(), jnp.sort(x[:, 0])))  # noqa: E731
    f = vag(loss, has_aux=True, aux_specs=("sum", P("data")), trust=True)
    (_, (top, rows)), _ = f(params, x, y)
    parts = np.asarray(x).reshape(8, 8, 32)
    assert top == parts.argmax(2).max(1).sum()
    np.testing.assert_array_equal(rows, np.sort(parts[:, :, 0], axis=1).ravel())


def noisy(p, x, y, key, raw):
    noise = jax.random.normal(key, (len(x),)), jax.random.normal(raw["dropout"], (len(x),))
    return loss_fn(p, x, y), noise


def keys_of():
    raw = {"params": jax.random.PRNGKey(1), "dropout": jax.random.PRNGKey(2)}
    return jax.random.key(0), raw


def test_ranks_draw_apart_from_typed_and_from_raw_keys(case):
    params, x, y, _ = case
    f = vag(noisy, has_aux=True, aux_specs=P("data"))
    (_, noise), _ = f(params, x, y, *keys_of())
    assert [len(np.unique(n)) for n in noise] == [64, 64]
    # Two keys are no batch of two.
    f = vag(noisy, has_aux=True, aux_specs=P("data"), mesh=auto_mesh((2,)))
    (_, noise), _ = f(params, x[:2], y[:2], *keys_of())
    assert [len(np.unique(n)) for n in noise] == [2, 2]


RAW = {  # uses of a raw key that draw a number for each of n examples
    "in a branch": lambda key, w, n: lax.cond(
        w.sum() > np.inf, lambda: jnp.zeros(n), lambda: jax.random.normal(key, (n,))
    ),
    "cloned": lambda key, w, n: jax.random.normal(jax.random.clone(key), (n,)),
}


@pytest.mark.parametrize("use", RAW)
def test_a_raw_key_is_one_wherever_it_is_used(case, use):
    params, x, y, _ = case
    draws = lambda p, x, y, key: (loss_fn(p, x, y), RAW[use](key, p["c"]["w"], len(x)))  # noqa: E731
    f = vag(draws, has_aux=True, aux_specs=P("data"))
    (_, noise), _ = f(params, x, y, jax.random.PRNGKey(0))
    assert len(np.unique(noise)) == 64


def test_integers_that_the_loss_does_not_use_are_no_keys(case):
    params, x, y, want = case
    ids = jnp.arange(len(x), dtype=jnp.uint32)
    check_close(vag(lambda p, x, y, ids: loss_fn(p, x, y))(params, x, y, ids), want)


def test_keys_that_all_ranks_share_are_for_draws_that_all_examples_share(case):
    params, x, y, _ = case

    def shared(p, x, y, key):
        return loss_fn(p, x * jax.random.uniform(key), y)

    given = params, x, y, jax.random.key(3)
    got = vag(shared, in_specs={"key": P()})(*given)
    check_close(got, of_jax(shared, *given))
    with pytest.raises(ValueError, match="one random draw for the whole batch"):
        vag(shared)(*given)
    how = {"has_aux": True, "aux_specs": P("data"), "in_specs": {"key": P(), "raw": P()}}
    with pytest.raises(ValueError, match="draws for each example from a key that every rank has"):
        vag(noisy, **how)(params, x, y, *keys_of())
    (_, noise), _ = vag(noisy, **how, trust=True)(params, x, y, *keys_of())
    assert [len(np.unique(n)) for n in noise] == [8, 8]


def test_keys_for_each_example_are_split_like_it(case):
    params, x, y, _ = case

    def loss(p, x, y, keys):
        return loss_fn(p, x + jax.vmap(lambda k: jax.random.normal(k, (32,)))(keys), y)

    for key in (jax.random.key(0), jax.random.PRNGKey(0)):
        given = params, x, y, jax.random.split(key, 64)
        check_close(vag(loss)(*given), of_jax(loss, *given))


def weighted(p, x, y, w, total=lambda w: w.sum()):
    errors = jnp.square(jnp.tanh(x @ p["a"]["w"]) @ p["c"]["w"] - y).mean(1)
    return (errors * w).sum() / total(w)


def test_a_weighted_mean_is_the_global_one_with_pmean(case):
    params, x, y, _ = case
    w = jnp.float32(np.arange(64) % 9 == 0) + jnp.float32(np.arange(64) < 8)
    exact = of_jax(weighted, params, x, y, w)
    over_ranks = lambda w: lax.pmean(w.sum(), "data")  # noqa: E731
    check_close(vag(functools.partial(weighted, total=over_ranks))(params, x, y, w), exact)


def ratio(p, x, y, w):
    errors = jnp.square(jnp.tanh(x @ p["a"]["w"]) @ p["c"]["w"] - y).mean(1)
    return (errors * w).sum(), w.sum()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.int32])
@pytest.mark.parametrize("jit", [True, False])
@pytest.mark.quick("False-int32")
def test_a_ratio_is_the_weighted_mean_of_the_whole_batch(case, dtype, jit):
    params, x, y, _ = case
    w = (np.arange(64) % 9 == 0) + (np.arange(64) < 8) * 1.0
    with jax.numpy_dtype_promotion("standard"):
        given = params, x, y, jnp.asarray(w, dtype)
        f = vag(ratio, loss="ratio")
        check_close((jax.jit(f) if jit else f)(*given), of_jax(weighted, *given))
        # The same function works in an evaluation, outside of the axis.
        total, count = jax.jit(ratio)(*given)
        np.testing.assert_allclose(f(*given)[0], total / count, rtol=1e-5)


def test_a_ratio_may_divide_by_weights_that_are_learned(case):
    params, x, y, _ = case

    def soft(p, x, y):
        w = jax.nn.sigmoid(x @ p["a"]["w"]).mean(1)
        return (jnp.square(x - y).mean(1) * w).sum(), w.sum()

    def quotient(*given):
        total, count = soft(*given)
        return total / count

    check_close(vag(soft, loss="ratio")(params, x, y), of_jax(quotient, params, x, y))


NO_RATIOS = {
    "by a sum": lambda e, x: (1.0, e.sum()),
    "by a constant": lambda e, x: (e.sum(), 3.0),
    "by a mean": lambda e, x: (e.sum(), e.mean()),
    "a mean by a length": lambda e, x: (e.mean(), 1.0 * len(x)),
}


@pytest.mark.parametrize("pair", NO_RATIOS.values(), ids=NO_RATIOS)
def test_a_ratio_of_other_things_is_refused(case, pair):
    params, x, y, _ = case
    loss = lambda p, x, y: pair(jnp.square(x @ p["a"]["w"]).mean(1), x)  # noqa: E731
    says = "a sum over the examples and their count, or two means; the first"
    with pytest.raises(ValueError, match=says):
        vag(loss, loss="ratio")(params, x, y)


def own_batch_norm(p, x, y):
    hidden = x @ p["a"]["w"]
    hidden = (hidden - hidden.mean(0)) / jnp.sqrt(hidden.var(0) + 1e-5)
    return jnp.mean((hidden @ p["c"]["w"] - y) ** 2)


def normalized_targets(p, x, y):
    return loss_fn(p, x, (y - y.mean()) / y.std())


def contrastive(p, x, y, gather=lambda z: z, first=0):
    """Contrasts every example with all others: the diagonal of a matrix of pairs is right."""
    z = jnp.tanh(x @ p["a"]["w"])
    scores = jax.nn.log_softmax(z @ gather(z).T)
    own = first + jnp.arange(len(x))
    return -jnp.take_along_axis(scores, own[:, None], axis=1).mean()


def masked_mean(errors, w):
    return (errors * w).sum() / w.sum()


@jax.custom_vjp
def fused(errors, w):
    return masked_mean(errors, w)


fused.defvjp(lambda e, w: (masked_mean(e, w), w / w.sum()), lambda w, g: (g * w, None))


@jax.custom_vjp
def centered(z):
    """The identity, with a gradient in which examples meet."""
    return z


centered.defvjp(lambda z: (z, None), lambda _, g: (g - g.mean(0),))


def errors_of(p, x, y):
    return jnp.square(jnp.tanh(x @ p["a"]["w"]) @ p["c"]["w"] - y).mean(1)


def in_each_turn(e, w):
    return lax.scan(lambda c, _: (c + masked_mean(e, w) / 2, None), 0.0, None, length=2)[0]


# Means over a count, wherever they hide: `e` has an error for each example, `w` its weight.
HIDDEN = {
    "open": masked_mean,
    "jit": jax.jit(masked_mean),
    "checkpoint": jax.checkpoint(masked_mean),
    "custom derivative": fused,
    "turns of a scan": in_each_turn,
    "a loop": lambda e, w: lax.fori_loop(0, 2, lambda i, c: c + masked_mean(e, w) / 2, 0.0),
    "a branch": lambda e, w: lax.cond(e[0] > -1, masked_mean, lambda e, w: 0.0, e, w),
    "where": lambda e, w: jnp.mean(e, where=w > 0),
    "maximum": lambda e, w: (e * w).sum() / jnp.maximum(w.sum(), 1e-6),
    "vmap": lambda e, w: jax.vmap(jnp.divide, in_axes=(0, None))(e * w, w.sum()).sum(),
    "weights": lambda e, w: (e * (w / w.sum())).sum(),
    "a product": lambda e, w: e @ (w / w.sum()),
    "bfloat16 counts": lambda e, w: (e * w).mean() / w.astype(jnp.bfloat16).mean().astype(e.dtype),
}


@pytest.mark.parametrize("hidden", HIDDEN.values(), ids=HIDDEN)
def test_a_mean_over_a_count_is_refused_wherever_it_hides(case, hidden):
    params, x, y, _ = case
    loss = lambda p, x, y: hidden(errors_of(p, x, y), jnp.float32(y[:, 0] > 0))  # noqa: E731
    says = r"^value_and_grad: .*(statistic of the batch|meet|devices)"
    with pytest.raises(ValueError, match=says):
        vag(loss)(params, x, y)


LOSSES = {
    "pairs": (contrastive, r"'dot_general' float32\[8,8\] \(test_value.*all_gather"),
    "weighted": (lambda p, x, y: weighted(p, x, y, y[:, 0]),
                 r"'div' float32\[\] \(test_value.*ratio"),
    "root": (lambda p, x, y: jnp.sqrt(loss_fn(p, x, y)), r"'sqrt' float32\[\]"),
    "normalized": (normalized_targets, r"statistic of the batch.*pmean"),
    "batch norm": (own_batch_norm, r"'sub' float32\[8,64\].*A BatchNorm: axis_name='data'"),
    "sum": (lambda p, x, y: len(x) * loss_fn(p, x, y), r"sum over the batch.*Return the mean"),
    "maximum": (lambda p, x, y: errors_of(p, x, y).max(), r"between examples: 'reduce_max'"),
    "halves": (lambda p, x, y: jnp.square(errors_of(p, x, y)[:4] - errors_of(p, x, y)[-4:]).mean(),
               r"between examples: 'slice'"),
    "differences": (
        lambda p, x, y: jnp.square(errors_of(p, x, y)[:, None] - errors_of(p, x, y)).mean(),
        r"between examples: 'sub' float32\[8,8\]",
    ),
    "sorted": (lambda p, x, y: jnp.sort(errors_of(p, x, y))[:4].mean(),
               r"examples: 'sort' float32\[8\] \(test_value"),
    "a length too many": (lambda p, x, y: loss_fn(p, x, y) / len(x),
                          r"the same on every rank, times the number of ranks to the power of -1"),
    "a diagonal": (
        lambda p, x, y: jnp.diagonal(x @ p["a"]["w"]).mean(),
        r"program itself depends on the batch size: 'jit' with \d operands on a rank.*\(test_value",
    ),
    "a custom derivative": (
        lambda p, x, y: (
            loss_fn(p, centered(x @ jnp.eye(32)), y) + jnp.mean(centered(x @ p["a"]["w"]))
        ),
        r"the gradient of \['a'\]\['w'\] is not known to be a mean.*'sub'",
    ),
    "another program": (lambda p, x, y: jnp.mean(x @ p["a"]["w"]) * (2.0 if len(x) > 8 else 1.0),
                        r"a number depends on the batch size|program itself depends"),
    "a count less one": (
        lambda p, x, y: errors_of(p, x, y).sum() / (len(x) - 1),
        r"a number depends on the batch size: 7.0 on a rank, 63.0 in all \(test_value_and_grad_out",
    ),
    "turns": (lambda p, x, y: lax.fori_loop(0, len(x), lambda i, c: c / 2, loss_fn(p, x, y)),
              r"number of turns depends on the batch|statistic of the batch"),
}  # fmt: skip


@pytest.mark.parametrize(("loss", "message"), LOSSES.values(), ids=LOSSES)
def test_a_loss_that_is_no_mean_over_ranks_is_refused(case, loss, message):
    params, x, y, _ = case
    with pytest.raises(ValueError, match=f"(?s:^value_and_grad: .*{message})"):
        vag(loss)(params, x, y)


@pytest.mark.parametrize("loss", [own_batch_norm, normalized_targets, contrastive])
def test_examples_that_meet_are_refused_with_one_example_per_rank(case, loss):
    params, x, y, _ = case
    with pytest.raises(ValueError, match="not known to be a mean"):
        vag(loss)(params, x[:8], y[:8])


RECIPES = {
    "mean": loss_fn,
    "rows": lambda p, x, y: errors_of(p, x, y).mean(),
    "own": lambda p, x, y: jax.nn.log_softmax(x @ p["a"]["w"])[jnp.arange(len(x)), 3].mean(),
    "along": lambda p, x, y: optax.softmax_cross_entropy_with_integer_labels(
        x @ p["a"]["w"], y.argmax(1)
    ).mean(),
    "norm": lambda p, x, y: jnp.square(x @ p["a"]["w"]).var(1).mean(),
    "sequence": lambda p, x, y: jax.nn.softmax(x.reshape(-1, 4, 8) @ p["c"]["w"][:8]).mean(),
}


def root_of(b, factor):
    """The root of z - b, by a function whose derivative is said to be `factor`."""

    @jax.custom_jvp
    def same(z):
        return z * 1.0

    same.defjvp(lambda given, tangents: (same(given[0]), tangents[0] * factor))
    solve = lambda g, y: y / g(jnp.ones_like(y))  # noqa: E731
    return lax.custom_root(lambda z: same(z) - b, jnp.zeros_like(b), lambda f, x: b, solve)


RUDE = {
    "a derivative within a root": lambda p, x, y: jnp.square(
        x * root_of(p["a"]["w"][0, :1], 2.0 if len(x) == 1 else 1.0)
    ).mean(),
    "a factor": lambda p, x, y: loss_fn(p, x, y) * (3.0 if len(x) == 1 else 1.0),
    "a power of two": lambda p, x, y: loss_fn(p, x, y) * (2.0 if len(x) == 1 else 1.0),
    "of the world": lambda p, x, y: loss_fn(p, x, y) / (8.0 if len(x) == 1 else 1.0),
    "an exponent": lambda p, x, y: (errors_of(p, x, y) ** (2 if len(x) == 1 else 3)).mean(),
    "wiring": lambda p, x, y: loss_fn(p, *((y, x) if len(x) == 1 else (x, y))),
    "columns": lambda p, x, y: (
        (x @ p["a"]["w"])[:, slice(3) if len(x) == 1 else slice(3, 6)].mean()
    ),
    "a transpose": lambda p, x, y: loss_fn(p, *(
        (a.reshape(-1, 2, 4, 4).transpose(0, 1, 3, 2).reshape(a.shape) if len(a) == 1 else a)
        for a in (x, y)
    )),
    "another axis": lambda p, x, y: jnp.cumsum(x @ p["a"]["w"], int(len(x) > 1)).mean(),
    "a step less": lambda p, x, y: loss_fn(p, jnp.tanh(x) if len(x) > 1 else x, y),
    "a size of the whole batch": lambda p, x, y: loss_fn(p, x, y) * (2.0 if len(x) == 8 else 1.0),
}  # fmt: skip


@pytest.mark.parametrize("loss", RECIPES.values(), ids=RECIPES)
@pytest.mark.quick("sequence")
def test_one_example_per_rank(case, loss):
    params, x, y, _ = case
    check_close(vag(loss)(params, x[:8], y[:8]), of_jax(loss, params, x[:8], y[:8]))


@pytest.mark.parametrize("loss", RUDE.values(), ids=RUDE)
def test_a_loss_that_is_another_with_one_example_is_refused(case, loss):
    params, x, y, _ = case
    with pytest.raises(ValueError, match=r"^value_and_grad: .*(one example per rank|a sum over)"):
        vag(loss)(params, x[:8], y[:8])


def test_a_shard_map_over_another_axis_is_followed(case):
    params, x, y, _ = case
    mesh = auto_mesh((4, 2), ("data", "model"))

    def loss_of(function, spec):
        how = {"in_specs": (spec, spec), "out_specs": P(), "axis_names": {"model"}}
        inside = lambda e, w: jax.shard_map(function, **how)(e, w)  # noqa: E731
        return lambda p, x, y, w: inside(errors_of(p, x, y), w), jnp.float32(y[:, 0] > 0)

    def call(loss, w):
        specs = jax.tree.map(lambda _: P(), params)
        return jax.jit(vag(loss, mesh=mesh, specs=specs))(params, x, y, w)

    with jax.set_mesh(mesh):
        loss, w = loss_of(lambda e, w: jnp.mean(e * w), P())
        check_close(call(loss, w), of_jax(loss, params, x, y, w))
        with pytest.raises(ValueError, match="statistic of the batch"):
            call(*loss_of(masked_mean, P()))
        with pytest.raises(ValueError, match="splits the examples again"):
            call(*loss_of(lambda e, w: lax.psum((e * w).sum(), "model") / 64, P("model")))


def in_turns(one):
    """A mean over a loop over the examples."""
    return lambda x: lax.map(one, x).mean()


def mapped(one):
    """A mean over examples that see each other by the name of an axis of vmap."""
    return lambda x: jax.vmap(one, axis_name="b")(x).mean()


def remembered(x):
    ref = jax.new_ref(jnp.zeros(()))
    ref[...] = x.mean()
    return x.mean() + ref[...] ** 2


def called(x):
    """Calls the host with an array that depends on the batch size, too long to be printed."""
    factors = np.full(3000, float(len(x)))
    like = jax.ShapeDtypeStruct((), jnp.float32)
    return x.mean() * jax.pure_callback(lambda: np.float32(factors[0] / 64), like)


# Each was once taken for a mean over the examples. Every rank has 8 of 64 examples of 32 numbers.
SLY = {
    "rows of a longer array": lambda x: jnp.tanh(x.reshape(-1)[jnp.arange(len(x))]).mean(),
    "repeated rows": lambda x: jnp.tanh(jnp.repeat(x, 2, 0)[jnp.arange(len(x))]).mean(),
    "tiled rows": lambda x: (
        x * lax.stop_gradient(jnp.tile(x, (2, 1)).reshape(len(x), 2, -1)[:, 1])
    ).mean(),
    "indices beyond the end": lambda x: jnp.tanh(
        x[:, 0].at[jnp.arange(2 * len(x))].get(mode="clip")
    ).mean(),
    "additions to a longer array": lambda x: (
        x.reshape(-1).at[jnp.arange(len(x))].add(jnp.tanh(x[:, 0])) ** 2
    ).mean(),
    "ranks that meet in a loop": in_turns(lambda r: jnp.tanh(lax.pmean(r.sum(), "data"))),
    "synced norms in a loop": in_turns(lambda r: jnp.tanh(r - lax.pmean(r.mean(), "data"))[0]),
    "a sum over a mapped axis": mapped(lambda r: r.mean() * lax.psum(r.mean(), "b")),
    "weights that add up to one": mapped(lambda r: jnp.exp(r) / lax.psum(jnp.exp(r.sum()), "b")),
    "filled sums": lambda x: x.sum(0).at[jnp.array([1, 99])].get(mode="fill", fill_value=1.0).sum(),
    "filled means": lambda x: (x / len(x)).at[:, jnp.array([1, 99])].get(
        mode="fill", fill_value=1.0
    ).sum(),
    "numbers of rows that overflow": lambda x: (
        x * x[lax.iota(jnp.int8, 40 * len(x))[: len(x)].astype(jnp.int32) % 8]
    ).mean(),
    "a ref": remembered,
    "a dimension found by its size": lambda x: (
        jnp.tanh(lax.broadcast_in_dim(jnp.arange(8.0), x[:, :8].shape, (x.shape.index(8) if 8 in
                 x.shape else 1,)) * x[:, :8])
    ).mean(),
    "a transpose in a reshape": lambda x: (
        x[:, :8] * lax.reshape(x[:, :8], x[:, :8].shape, dimensions=(1, 0))
    ).mean() if len(x) == 8 else (x[:, :8] * x[:, :8]).mean(),
    "digits that cancel": lambda x: x.sum() / (
        (jnp.int32(len(x) * 2**20 + 1) - jnp.int32(len(x) * 2**20)) * 64.0
    ),
    "zero times infinity": lambda x: x.mean() * jnp.where((0.0 * x).sum() > -1, 1.0, 2.0),
    "a fraction of ranks": lambda x: (
        x[:, 0] * (lax.axis_index("data").astype(jnp.float32) * 8.5 + jnp.arange(len(x)))
    ).mean(),
    "a call of the host": called,
    "a call with effects": lambda x: x.mean() + jax.experimental.io_callback(
        lambda: np.float32(1), jax.ShapeDtypeStruct((), jnp.float32)
    ),
}  # fmt: skip


@pytest.mark.parametrize("sly", SLY.values(), ids=SLY)
def test_a_statistic_in_disguise_is_refused(case, sly):
    params, x, y, _ = case
    f = vag(lambda p, x, y: loss_fn(p, x, y) + sly(x * p["a"]["b"].sum() + x))
    refused = pytest.raises(ValueError, match=r"^value_and_grad: ")
    with jax.numpy_dtype_promotion("standard"), refused:
        f(params, x, y)


HONEST = {
    "hessians": lambda x: jax.vmap(jax.hessian(lambda r: jnp.sin(r[:3]).sum()))(x).mean(),
    "a sum from a number": lambda x: lax.scan(lambda c, r: (c + r.sum(), None), 0.0, x)[0] / len(x),
    "tiles": lambda x: (jnp.tile(x, (1, 2)) * jnp.tile(x[:1].mean() * 0 + 2, (len(x), 1))).mean(),
    "a constant column": lambda x: x[jnp.arange(len(x)), 0].mean(),
    "solved": lambda x: jax.scipy.linalg.solve_triangular(
        jnp.eye(4) + jnp.tril(x[:, :16].reshape(-1, 4, 4), -1), x[:, :4, None], lower=True
    ).mean(),
    "filled with NaN": lambda x: jnp.nan_to_num(jnp.take(x, jnp.array([1, 99]), axis=1)).mean(),
    "synced norms of a mapped axis": mapped(
        lambda r: jnp.tanh(r - lax.pmean(lax.pmean(r.mean(), "b"), "data"))
    ),
    "own numbers": lambda x: (
        x[:, 0] * (lax.axis_index("data") * len(x) + jnp.arange(len(x))) / 64
    ).mean(),
}  # fmt: skip


@pytest.mark.parametrize("honest", HONEST.values(), ids=HONEST)
@pytest.mark.quick("hessians", "filled with NaN", "own numbers", "synced norms of a mapped axis")
def test_a_mean_over_the_examples_is_taken(case, honest):
    params, x, y, _ = case
    loss = lambda p, x, y: loss_fn(p, x, y) + honest(x * p["a"]["b"].sum() + x)  # noqa: E731
    one = sharded(jax.value_and_grad(loss), auto_mesh((1,)), P(), check_vma=False)
    with jax.numpy_dtype_promotion("standard"):
        check_close(vag(loss)(params, x, y), one(params, x, y))


GRID = np.linspace(-2, 2, 32, dtype=np.float32)
SOLVED = {
    "an inverse": lambda w, x: jnp.square(x @ jnp.linalg.inv(w)).mean(),
    "one system of the parameters": lambda w, x: jnp.square(
        x - jnp.linalg.solve(w, w[0])
    ).mean(),
    "columns of examples": lambda w, x: jnp.square(jnp.linalg.solve(w, x.T)).mean(),
    "a system of each example": lambda w, x: jnp.square(
        jnp.linalg.solve(w + jnp.square(x)[:, :, None] * jnp.eye(32), x[:, :, None])
    ).mean(),
    "a determinant": lambda w, x: jnp.square(x).mean() - jnp.linalg.slogdet(w)[1],
    "an interpolation": lambda w, x: jnp.interp(x, GRID, w[0]).mean(),
    "places in a table": lambda w, x: (w[0][jnp.digitize(x, GRID[1:])] * x).mean(),
    "a root": lambda w, x: (x * root_of(w[0], 1.0)).mean(),
    "a solution beside which its solver returns more": lambda w, x: jnp.square(
        x - lax.custom_linear_solve(
            lambda v: w @ v, w[0], lambda _, b: (jnp.linalg.inv(w) @ b, b.sum()),
            lambda _, b: (jnp.linalg.inv(w).T @ b, b.sum()), has_aux=True,
        )[0]
    ).mean(),
}  # fmt: skip


@pytest.mark.parametrize("solved", SOLVED.values(), ids=SOLVED)
@pytest.mark.quick(
    "one *",
    "columns *",
    "a system *",
    "a determinant",
    "a root",
    "a solution *",
)
def test_systems_and_tables_of_parameters_are_followed(case, solved):
    params, x, y, _ = case
    loss = lambda p, x, y: solved(9 * jnp.eye(32) + p["a"]["w"] @ p["c"]["w"], x)  # noqa: E731
    with jax.set_mesh(auto_mesh((8,))):
        check_close(vag(loss)(params, x, y), of_jax(loss, params, x, y))


def test_ranks_that_meet_in_a_root_are_as_in_plain_jit_or_refused(case):
    """JAX 0.12 hides the root's program, which names their axis."""
    params, x, y, _ = case

    def loss(p, x, y, over="data"):
        mean = lambda: lax.pmean(x.mean(), over) if over else x.mean()  # noqa: E731
        f = lambda z: z - p["a"]["w"][0, 0] * mean()  # noqa: E731
        return (x * lax.custom_root(f, 0.0, lambda f, z: f(z), lambda g, y: y / g(1.0))).mean()

    for rows in (8, 64):
        want = of_jax(functools.partial(loss, over=None), params, x[:rows], y[:rows])
        said = "cannot be seen"
        try:
            check_close(vag(loss)(params, x[:rows], y[:rows]), want)
        except ValueError as refused:
            said = str(refused)
        assert "cannot be seen" in said or "one example per rank" in said


@pytest.mark.parametrize("scale", [1, 1 << 14])  # the second is beyond fp32's integers
def test_means_of_integers_keep_their_dtype(case, scale):
    params, x, y, _ = case
    loss = lambda p, x, y: (loss_fn(p, x, y), (x > 0).sum() * (512 // len(x) * scale))  # noqa: E731
    (_, got), _ = vag(loss, has_aux=True, aux_specs="mean")(params, x, y)
    want = jax.jit(loss)(params, x, y)[1]
    assert got.dtype == want.dtype
    assert got == want


def test_means_that_are_sharded_over_another_axis_stand_beside_whole_ones():
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    rng = np.random.default_rng(0)
    w, x = (rng.normal(size=shape).astype(np.float32) for shape in ((32, 64), (16, 32)))

    def loss(w, x):
        hidden = x @ w
        return jnp.square(hidden).mean(), {"columns": hidden.mean(0), "mean": hidden.mean()}

    with jax.set_mesh(mesh):
        w, x = jax.device_put(w, P(None, "model")), jax.device_put(x, P("data"))
        f = vag(loss, mesh=mesh, has_aux=True, aux_specs="mean")
        (_, got), _ = jax.jit(f)(w, x)
        _, want = jax.jit(loss)(w, x)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), got, want)


@pytest.mark.parametrize("loss", ["mean", "ratio"])
def test_sums_of_float16_over_the_ranks_do_not_overflow(case, loss):
    params, x, y, _ = case

    def large(p, x, y):
        errors = 3e4 + errors_of(p, x, y)
        mean = errors.mean().astype(jnp.float16)
        ratio = (errors / 8).sum().astype(jnp.float16), jnp.float16(len(x))
        return ratio if loss == "ratio" else mean, mean

    (got, aux), _ = vag(large, loss=loss, has_aux=True, aux_specs="mean")(params, x, y)
    want = 3e4 + errors_of(params, x, y).mean()
    np.testing.assert_allclose(got, want / 8 if loss == "ratio" else want, rtol=1e-3)
    np.testing.assert_allclose(aux, want, rtol=1e-3)


@pytest.mark.parametrize("rows", [8, 64])
def test_outputs_that_depend_on_the_batch_size_are_refused(case, rows):
    params, x, y, _ = case

    def loss(p, x, y):
        return loss_fn(p, x, y), {str(i): y.mean() for i in range(len(x) // 8)}

    says = r"^value_and_grad: on a part of the batch the loss returns"
    with pytest.raises(ValueError, match=says):
        vag(loss, has_aux=True, aux_specs="mean")(params, x[:rows], y[:rows])


def test_trust_skips_the_check(case):
    params, x, y, _ = case
    root = jax.jit(lambda p, x, y: jnp.sqrt(loss_fn(p, x, y)))
    value, _ = vag(root, trust=True)(params, x, y)
    parts = [root(params, x[i : i + 8], y[i : i + 8]) for i in range(0, 64, 8)]
    np.testing.assert_allclose(value, np.mean(parts), rtol=1e-5)


def test_a_loss_over_pairs_takes_the_other_ranks_examples(case):
    params, x, y, _ = case

    def loss(p, x, y):
        gather = functools.partial(lax.all_gather, axis_name="data", tiled=True)
        return contrastive(p, x, y, gather, lax.axis_index("data") * len(x))

    check_close(vag(loss)(params, x, y), of_jax(contrastive, params, x, y))


COUNTS = {
    "python": lambda x: len(x) * 32,
    "dtype": lambda x: jnp.float32(x.size),
    "array": lambda x: jnp.array(float(x.size)),
    "inverse": lambda x: 1 / (1 / x.size),
}


@pytest.mark.parametrize("count", COUNTS.values(), ids=COUNTS)
def test_a_mean_is_seen_however_it_counts(case, count):
    params, x, y, _ = case

    def loss(p, x, y):
        return ((x @ p["a"]["w"] @ p["c"]["w"] - y) ** 2).sum() / count(x)

    with pytest.raises(ValueError, match="sum over the batch"):
        jax.eval_shape(vag(lambda p, x, y: loss(p, x, y) * count(x)), params, x, y)
    jax.eval_shape(vag(loss), params, x, y)


def test_loops_over_time_layers_and_examples_are_taken(case):
    params, x, y, _ = case

    def recurrent(p, x, y):
        turn = p["c"]["w"].T @ p["a"]["w"].T

        def step(carry, value):
            return jnp.tanh(carry @ turn + value), None

        carry, _ = lax.scan(step, jnp.zeros((len(x), 32)), jnp.broadcast_to(x, (3, *x.shape)))
        return jnp.mean((carry - y) ** 2)

    def by_example(p, x, y):
        one = lambda xy: jnp.sqrt(loss_fn(p, xy[0][None], xy[1][None]))  # noqa: E731
        return lax.map(one, (x, y)).mean()

    for loss in (recurrent, by_example):
        check_close(vag(loss)(params, x, y), of_jax(loss, params, x, y))


@pytest.mark.parametrize("rows", [8, 64])
@pytest.mark.quick("8")
def test_nnx_batch_norm_with_the_axis_has_the_statistics_of_the_whole_batch(case, rows):
    _, x, y, _ = case
    x, y = x[:rows], y[:rows]
    model, exact = (nnx.BatchNorm(32, rngs=nnx.Rngs(0), axis_name=n) for n in ("data", None))
    loss = lambda model, x, y: jnp.mean((model(x) * y) ** 2)  # noqa: E731
    with pytest.raises(ValueError, match="A BatchNorm: axis_name='data'"):
        vag(loss)(exact, x, y)
    check_close(vag(loss)(model, x, y), nnx.jit(nnx.value_and_grad(loss))(exact, x, y), 1e-4)
    np.testing.assert_allclose(model.mean[...], exact.mean[...], rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(model.var[...], exact.var[...], rtol=1e-5)


def test_linens_batch_norm_with_the_axis_has_the_statistics_of_the_whole_batch(case):
    _, x, y, _ = case

    def model(axis_name):
        norm = nn.remat(nn.BatchNorm)(use_running_average=False, axis_name=axis_name)
        return nn.Sequential([nn.Dense(32), norm])

    variables = jax.jit(model(None).init)(jax.random.key(0), x)

    def loss_of(axis_name):
        def loss(params, statistics, x, y):
            given = {"params": params, "batch_stats": statistics}
            out, after = model(axis_name).apply(given, x, mutable=["batch_stats"])
            return jnp.mean((out - y) ** 2), after["batch_stats"]

        return loss

    given = variables["params"], variables["batch_stats"], x, y
    options = {"has_aux": True, "aux_specs": P(), "in_specs": {"statistics": P()}}
    got = vag(loss_of("data"), **options)(*given)
    want = of_jax(loss_of(None), *given, has_aux=True)
    check_close(got[0], want[0], 1e-4)
    check_close(got[1], want[1])


class Counting(nnx.Module):
    """Keeps what it saw of its batches, in several ways."""

    def __init__(self, keep):
        self.scale, self.keep = nnx.Param(jnp.ones(32)), keep
        self.seen = nnx.Variable(keep(jnp.ones((64, 32))) * 0)

    def __call__(self, x):
        self.seen[...] = self.keep(x)
        return x * self.scale[...]


KEPT = {"mean": lambda x: x.mean(0), "sum": lambda x: x.sum(0), "none": lambda x: jnp.zeros(())}


@pytest.mark.parametrize("keep", KEPT.values(), ids=KEPT)
@pytest.mark.quick("mean", "sum")
def test_nnx_state_is_that_of_plain_jit(case, keep):
    _, x, y, _ = case
    loss = lambda model, x, y: jnp.mean((model(x) - y) ** 2)  # noqa: E731
    model, exact = Counting(keep), Counting(keep)
    vag(loss)(model, x, y)
    nnx.jit(nnx.value_and_grad(loss))(exact, x, y)
    np.testing.assert_allclose(model.seen[...], exact.seen[...], rtol=1e-4, atol=1e-5)


def test_nnx_state_that_mixes_examples_is_refused(case):
    _, x, y, _ = case
    loss = lambda model, x, y: jnp.mean((model(x) - y) ** 2)  # noqa: E731
    with pytest.raises(ValueError, match=r"updates the state .*seen.* does not follow.*reduce_max"):
        vag(loss)(Counting(lambda x: x.max(0)), x, y)


def test_random_streams_of_nnx_go_on_as_they_would(case):
    _, x, y, _ = case
    rngs = nnx.Rngs(dropout=0)
    model = nnx.Linear(32, 32, rngs=nnx.Rngs(0))

    def loss(model, x, y, rngs):
        dropped = nnx.Dropout(0.5)(model(x), rngs=rngs)
        return jnp.mean((dropped - y) ** 2), dropped

    f = vag(loss, has_aux=True, aux_specs=P("data"))
    before = jax.random.key_data(rngs.dropout.key[...])
    (_, one), _ = f(model, x, y, rngs)
    (_, two), _ = f(model, x, y, rngs)
    np.testing.assert_array_equal(jax.random.key_data(rngs.dropout.key[...]), before)
    assert int(rngs.dropout.count[...]) == 2
    masks = [np.asarray(a == 0).reshape(8, -1) for a in (one, two)]
    assert len(np.unique(np.concatenate(masks), axis=0)) == 16


class Layer(nnx.Module):
    def __init__(self, rngs):
        self.linear, self.dropout = nnx.Linear(32, 32, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)


def test_ranks_draw_apart_in_layers_of_nnx_that_are_stacked(case):
    _, x, y, _ = case
    layers = nnx.split_rngs(splits=3)(nnx.vmap(Layer))(nnx.Rngs(0))

    @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
    def forward(x, layer):
        return layer.dropout(jnp.tanh(layer.linear(x)))

    def loss(layers, x, y):
        dropped = forward(x, layers)
        return jnp.mean((dropped - y) ** 2), dropped

    f = vag(loss, has_aux=True, aux_specs=P("data"))
    (_, dropped), _ = f(layers, x, y)
    assert len(np.unique(np.asarray(dropped == 0).reshape(8, -1), axis=0)) == 8


def test_a_batch_with_the_names_of_the_parameters_is_still_a_batch():
    params = {"w": jnp.ones((4, 4))}
    batch = {"w": jnp.ones((16, 4))}
    value, _ = vag(lambda p, b: jnp.mean(b["w"] @ p["w"]))(params, batch)
    assert value == 4


def test_microbatches_inside_the_loss_are_reduced_once(case):
    params, x, y, _ = case
    micro = jnp.stack([x, x[::-1]]), jnp.stack([y, y * 2])

    def loss(p, micro):
        one = jax.checkpoint(lambda batch: loss_fn(p, *batch))
        return lax.map(one, micro).mean()

    f = vag(loss, in_specs={"micro": P(None, "data")})
    compiled = jax.jit(f).lower(params, micro).compile()
    check_close(compiled(params, micro), of_jax(loss, params, micro))
    assert len(re.findall(r" u8\[[\d,]+\]\S* all-to-all\(", compiled.as_text())) == 1
