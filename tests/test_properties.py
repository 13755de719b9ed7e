"""Properties of sums over drawn values: bounds, accounts, bias, and equal bits on all ranks.

A program is compiled once; values are drawn as its data. By default the tests take a bounded, fixed
choice of programs and draws. This command takes all of them, more than 100,000 draws, with new
seeds:

    python -m pytest tests/test_properties.py --hypothesis-profile=long
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import cgx_jax
from cases import FLOATS, PAIRS, every
from cgx_jax import Plan, Quantize, Rules
from cgx_jax.compressors import Natural, TopK
from cgx_jax.reductions.named import named
from cgx_jax.route.route import Options, route
from cgx_jax.route.run import Inputs
from cgx_jax.route.run import run as run_route
from extremes import KINDS, allowed, array

# Of the quick codes, those whose sums test_conformance tries in its slow tests alone.
QUICK_CODES = (
    *("quantize 3", "rotated", "bfloat16", "qsgd", "ternary, shared scale"),
    *("top k of every bucket", "sampled threshold"),
)
LONG = settings.get_current_profile_name() == "long"
WORLD, SHAPE = 3, (7, 93)


# --- sums


def summed(compressor, how, dtype):
    """Returns f(x[world, ...], seed): every rank's sum and residual, and the bound."""
    plan = Plan.build(jax.ShapeDtypeStruct(SHAPE, dtype), Rules((), compressor, exact=()))

    def of_rank(x, key):
        options = Options.resolve("psum_compressed", "data", exchange="xla", reduction=how)
        states = [compressor.init(SHAPE, dtype)]
        made = run_route(route(options, plan), Inputs([x], key, residual=True, states=states))
        return made.values[0], made.residuals[0]

    def run(x, seed):
        of_ranks = jax.vmap(of_rank, in_axes=(0, None), axis_name="data")
        bound = named("test", how).error_bound(compressor, x.astype(jnp.float32))
        return (*of_ranks(x, jax.random.key(seed)), bound)

    return run


@functools.cache
def compiled(pair, dtype):
    return jax.jit(summed(*PAIRS[pair], jnp.dtype(dtype)))


def programs():
    """Lists (pair, dtype): all of them, or one pair per compressor with dtypes in turn."""
    if LONG:
        return [(pair, dtype) for pair in PAIRS for dtype in FLOATS]
    firsts = {}
    for param in every(PAIRS, first_reduction=True):
        firsts.setdefault(param.values[0].rpartition(", ")[0], param)
    return [
        pytest.param(
            param.values[0],
            FLOATS[i % len(FLOATS)],
            marks=param.marks if name in QUICK_CODES else pytest.mark.slow,
        )
        for i, (name, param) in enumerate(firsts.items())
    ]


kinds = st.sampled_from([*KINDS, "any bits"])
inputs = st.fixed_dictionaries(
    {
        "kinds": st.tuples(*[kinds] * WORLD) | kinds.map(lambda kind: (kind,) * WORLD),
        "exponent": st.integers(-46, 38),
        "seed": st.integers(0, 2**32 - 1),
        "cancels": st.booleans(),
    }
)


def drawn(dtype, kinds, exponent, seed, cancels):
    """Returns the ranks' values; with `cancels`, the last rank has the first's with other sign."""
    rows = [array(k, seed + r, exponent, SHAPE, jnp.dtype(dtype)) for r, k in enumerate(kinds)]
    return np.stack([*rows[:-1], -rows[0]] if cancels else rows)


def found(*kinds, exponent=0, seed=0, cancels=False):
    """Returns an example that once revealed a defect."""
    values = {"kinds": kinds, "exponent": exponent, "seed": seed, "cancels": cancels}
    return example(given_values=values)


@pytest.mark.parametrize(("pair", "dtype"), programs())
@found("normal", "normal", "huge")  # products of PowerSGD overflow
@found("normal", "normal", "normal")  # sparse codes of quantized values, in a batch
@given(given_values=inputs)
def test_a_sum_is_alike_on_all_ranks_within_its_bound_and_nothing_is_lost(
    pair, dtype, given_values
):
    x = drawn(dtype, **given_values)
    sums, lost, bound = map(np.asarray, compiled(pair, dtype)(x, np.uint32(given_values["seed"])))
    assert all(row.tobytes() == sums[0].tobytes() for row in sums), "ranks differ"
    assert not np.isnan(bound).any() or not np.isfinite(x).all(), "a bound is NaN"
    with np.errstate(all="ignore"):
        exact = x.astype(np.float64).sum(0)
        got = sums[0].astype(np.float64)
        most = allowed(x, bound)
        claimed = np.isfinite(most)
        off = np.abs(got - exact)
        assert (off <= most)[claimed].all(), f"over the bound by {(off - most)[claimed].max():.3g}"
        # What the ranks lost explains the difference, up to the rounding of their dtype.
        owed = lost.astype(np.float64)
        account = np.abs(exact - got - owed.sum(0))
        whole = np.abs(x.astype(np.float64)).sum(0) + np.abs(owed).sum(0)
        rounding = allowed(x, np.zeros_like(bound)) + 4 * float(jnp.finfo(x.dtype).eps) * whole
        rounding += 2.0**-16 * whole.max()
        known = claimed & np.isfinite(owed).all(0) & np.isfinite(rounding)
        assert (account <= rounding)[known].all(), "what is lost does not add up"


# --- bias

UNBIASED = {n: (c, how) for n, (c, how) in PAIRS.items() if c.unbiased and how == c.reductions[0]}
DRAWS = 4096


@pytest.mark.parametrize("pair", [p for p in every(PAIRS) if p.values[0] in UNBIASED])
@pytest.mark.quick("stochastic*")
def test_the_mean_of_many_draws_of_an_unbiased_sum_is_the_sum(pair):
    """Checks two statements that an unbiased code breaks once in 10**6 runs; the seed is fixed.

    For each value, the mean error is within Maurer's and Pontil's empirical Bernstein bound, for
    errors of at most `error_bound` and their sample variance. For all values together, the mean of
    the errors, each divided by its bound and with the sign of the sum, is within 5 standard errors.
    """
    rows = [("normal", 0), ("two values", 0), ("large mean", -1)]
    x = jnp.stack([array(k, r, e, SHAPE, np.float32) for r, (k, e) in enumerate(rows)])
    run = summed(*UNBIASED[pair], jnp.float32)
    bound = jax.jit(run)(x, 0)[2]
    values = np.asarray(x)
    most, exact = allowed(values, bound), values.astype(np.float64).sum(0)
    assert np.isfinite(most).all()
    many = jax.jit(jax.vmap(lambda seed: run(x, seed)[0][0]))
    errors = np.concatenate(
        [np.asarray(many(part), np.float64) - exact for part in np.arange(DRAWS).reshape(-1, 256)]
    )
    chance = np.log(3 * errors[0].size * 1e6)
    spread = np.sqrt(2 * errors.var(axis=0) * chance / DRAWS) + 6 * most * chance / DRAWS
    rounding = allowed(values, np.zeros_like(exact))
    assert (np.abs(errors.mean(axis=0)) <= spread + rounding).all()
    shrinks = (errors / most * np.sign(exact)).mean(axis=(1, 2))
    standard = shrinks.std() / np.sqrt(DRAWS)
    assert abs(shrinks.mean()) <= 5 * standard + (rounding / most).mean()


# --- transformations

KEY = jax.random.key(3)
TRANSFORMED = {
    "rotated, stochastic": Quantize(3, 96, "stochastic", rotation=True),
    "quantized": Quantize(4, 64),
    "natural": Natural(),
    "top k": TopK(0.1),
}
QUICK = ("rotated, stochastic",)


@functools.cache
def transformed(name):
    """Returns jitted f(x[world, ...]) for each transformation around the same call."""
    code = TRANSFORMED[name]
    mesh = Mesh(np.array(jax.devices()[:WORLD]), ("data",))

    def call(v):
        return cgx_jax.psum_compressed(v, "data", code, key=KEY, exchange="xla")

    def sharded(f, **options):
        mapped = lambda v: f(v[0])  # noqa: E731
        return jax.shard_map(mapped, mesh=mesh, in_specs=P("data"), out_specs=P(), **options)

    def primal(v):
        return jax.vjp(call, v)[0]

    ways = {
        "shard_map": sharded(call),
        "without check_vma": sharded(call, check_vma=False),
        "vmap over the axis": lambda x: jax.vmap(call, axis_name="data")(x)[1],
        "vmap inside": sharded(lambda v: jax.vmap(call)(jnp.stack([v, v]))[1]),
        "jit inside": sharded(jax.jit(call)),
        "vjp": sharded(primal),
        "remat": sharded(jax.checkpoint(call)),
        "scan": sharded(lambda v: lax.map(call, v[None])[0]),
    }

    def gradient(f):
        weighted = lambda v: jnp.vdot(jnp.linspace(-1, 1, v.size), f(v).ravel())  # noqa: E731
        mapped = lambda v: jax.grad(weighted)(v[0])[None]  # noqa: E731
        return jax.shard_map(mapped, mesh=mesh, in_specs=P("data"), out_specs=P("data"))

    grads = {"ours": gradient(call), "lax's": gradient(lambda v: lax.psum(v, "data"))}
    return [{k: jax.jit(f) for k, f in fs.items()} for fs in (ways, grads)]


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in TRANSFORMED]
)
@given(given_values=inputs)
def test_transformations_give_the_same_bits_whatever_the_values(name, given_values):
    x = drawn("float32", **given_values)
    ways, grads = transformed(name)
    got = {way: np.asarray(f(x)) for way, f in ways.items()}
    # Programs may differ in the sign of a NaN; ranks of one program may not.
    bits = {way: np.where(np.isnan(y), np.float32(np.nan), y).tobytes() for way, y in got.items()}
    for way, y in bits.items():
        assert y == bits["shard_map"], way
    ours, theirs = (np.asarray(f(x)) for f in grads.values())
    assert ours.tobytes() == theirs.tobytes()
