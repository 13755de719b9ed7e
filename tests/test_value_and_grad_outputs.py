"""value_and_grad returns what plain jit does, or refuses: outputs, statistics, BatchNorm."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P

from plain_jit_case import auto_mesh, check_close, exact_case, loss_fn, vag


@pytest.fixture(scope="module")
def case():
    return exact_case()


def test_one_rank_computes_what_jax_does(case):
    params, x, y, _ = case
    f = vag(outputs_of, mesh=auto_mesh((1,)), has_aux=True)
    check_close(f(params, x, y), jax.value_and_grad(outputs_of, has_aux=True)(params, x, y), 1e-5)


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


def test_auxiliary_outputs_are_those_of_plain_jit(case):
    params, x, y, want = case
    (loss, aux), grads = jax.jit(vag(outputs_of, has_aux=True))(params, x, y)
    expected = outputs_of(params, x, y)[1]
    assert jax.tree.map(jnp.shape, aux) == jax.tree.map(jnp.shape, expected)
    for name, value in expected.items():
        np.testing.assert_allclose(aux[name], value, rtol=1e-4, atol=1e-3, err_msg=name)
    check_close((loss, grads), want)


def test_aux_specs_say_what_cannot_be_known(case):
    params, x, y, _ = case

    def loss(p, x, y):
        return loss_fn(p, x, y), {"first": x[0], "max": x.argmax(1).max(), "rest": (x[:1], x)}

    with pytest.raises(ValueError, match=r"aux\['first'\] float32\[32\] differs .*aux_specs="):
        vag(loss, has_aux=True)(params, x, y)
    given = {"first": P("data"), "max": "sum", "rest": P("data")}
    (_, aux), _ = vag(loss, has_aux=True, aux_specs=given)(params, x, y)
    np.testing.assert_array_equal(aux["first"], x[::8].ravel())
    np.testing.assert_array_equal(aux["rest"][0], x[::8])
    np.testing.assert_array_equal(aux["rest"][1], x)
    parts = np.asarray(x).reshape(8, 8, 32).argmax(2).max(1)
    assert aux["max"] == parts.sum()


def test_keys_are_whole_and_ranks_draw_apart(case):
    params, x, y, _ = case

    def loss(p, x, y, key, raw):
        noise = jax.random.normal(key, (len(x),)), jax.random.normal(raw, (len(x),))
        return loss_fn(p, x, y), noise

    given = params, x, y, jax.random.key(0), jax.random.PRNGKey(1)
    for specs, apart in ((None, 64), ({"key": P(), "raw": P()}, 8)):
        (_, noise), _ = vag(loss, has_aux=True, in_specs=specs, aux_specs=P("data"))(*given)
        assert [len(np.unique(n)) for n in noise] == [apart, apart]


def weighted(p, x, y, w, total=lambda w: w.sum()):
    errors = jnp.square(jnp.tanh(x @ p["a"]["w"]) @ p["c"]["w"] - y).mean(1)
    return (errors * w).sum() / total(w)


def test_a_weighted_mean_is_the_global_one_with_pmean(case):
    params, x, y, _ = case
    w = jnp.float32(np.arange(64) % 9 == 0) + jnp.float32(np.arange(64) < 8)
    exact = jax.value_and_grad(weighted)(params, x, y, w)
    over_ranks = lambda w: lax.pmean(w.sum(), "data")  # noqa: E731
    check_close(vag(functools.partial(weighted, total=over_ranks))(params, x, y, w), exact)


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


LOSSES = {
    "pairs": (contrastive, r"pairs of examples, float32\[\d+,\d+\] in 'dot_general'.*all_gather"),
    "weighted": (lambda p, x, y: weighted(p, x, y, y[:, 0]), r"float32\[\] in 'div' \(test_value"),
    "masked": (lambda p, x, y: jnp.mean(x @ p["a"]["w"], where=y[:, :1] > 0), r"'div'.*pmean"),
    "root": (lambda p, x, y: jnp.sqrt(loss_fn(p, x, y)), r"float32\[\] in 'sqrt'"),
    "normalized": (normalized_targets, r"statistic of the batch"),
    "batch norm": (own_batch_norm, r"float32\[1,64\] in 'sub'.*BatchNorm"),
    "sum": (lambda p, x, y: len(x) * loss_fn(p, x, y), r"sum over the batch.*Return the mean"),
}


@pytest.mark.parametrize(("loss", "message"), LOSSES.values(), ids=LOSSES)
@pytest.mark.parametrize("rows", [8, 64])
def test_a_loss_that_is_no_mean_over_ranks_is_refused(case, loss, message, rows):
    params, x, y, _ = case
    with pytest.raises(ValueError, match=message):
        vag(loss)(params, x[:rows], y[:rows])


def test_a_loss_over_pairs_takes_the_other_ranks_examples(case):
    params, x, y, _ = case

    def loss(p, x, y):
        gather = functools.partial(lax.all_gather, axis_name="data", tiled=True)
        return contrastive(p, x, y, gather, lax.axis_index("data") * len(x))

    check_close(vag(loss)(params, x, y), jax.value_and_grad(contrastive)(params, x, y))


COUNTS = {
    "python": lambda x: len(x) * 32,
    "dtype": lambda x: jnp.float32(x.size),
    "array": lambda x: jnp.array(float(x.size)),
    "ones": lambda x: jnp.ones_like(x).sum(),
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
        check_close(vag(loss)(params, x, y), jax.value_and_grad(loss)(params, x, y))


def nnx_batch_norm(axis_name):
    model = nnx.BatchNorm(32, rngs=nnx.Rngs(0), axis_name=axis_name)

    def loss(model, x, y):
        return jnp.mean((model(x) * y) ** 2)

    return model, loss


def test_batch_norm_has_the_statistics_of_the_whole_batch_at_one_example_a_rank(case):
    _, x, y, _ = case
    x, y = x[:8], y[:8]
    model, loss = nnx_batch_norm(None)
    got = vag(loss)(model, x, y)
    exact, _ = nnx_batch_norm(None)
    check_close(got, nnx.value_and_grad(loss)(exact, x, y), 1e-4)
    np.testing.assert_allclose(model.var[...], exact.var[...], rtol=1e-5)
    assert model.axis_name is None

    linen = nn.BatchNorm(use_running_average=False)
    variables = linen.init(jax.random.key(0), x)

    def linen_loss(params, statistics, x, y):
        given = {"params": params, "batch_stats": statistics}
        out, after = linen.apply(given, x, mutable=["batch_stats"])
        return jnp.mean((out * y) ** 2), after["batch_stats"]

    given = variables["params"], variables["batch_stats"], x, y
    specs = {"statistics": P()}
    (value, after), grads = vag(linen_loss, has_aux=True, in_specs=specs)(*given)
    want = jax.value_and_grad(linen_loss, has_aux=True)(*given)
    check_close((value, after, grads), (*want[0], want[1]), 1e-4)


def test_statistics_of_linens_modules_are_whole_without_a_word(case):
    _, x, y, _ = case
    model = nn.Sequential([nn.Dense(32), nn.BatchNorm(use_running_average=False)])
    variables = model.init(jax.random.key(0), x)

    def loss(params, statistics, x, y):
        given = {"params": params, "batch_stats": statistics}
        out, after = model.apply(given, x, mutable=["batch_stats"])
        return jnp.mean((out - y) ** 2), after["batch_stats"]

    given = variables["params"], variables["batch_stats"], x, y
    got, want = vag(loss, has_aux=True)(*given), jax.value_and_grad(loss, has_aux=True)(*given)
    check_close(got[0], want[0], 1e-4)
    check_close(got[1], want[1])


def test_a_batch_with_the_names_of_the_parameters_is_still_a_batch():
    params = {"w": jnp.ones((4, 4))}
    batch = {"w": jnp.ones((16, 4))}
    value, _ = vag(lambda p, b: jnp.mean(b["w"] @ p["w"]))(params, batch)
    assert value == 4
