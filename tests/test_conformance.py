"""What any compressor, reduction and exchange must hold, for every row of the table of cases."""

import contextlib
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import cgx_jax
from cases import CASES, CHUNKED, FEW, PAIRS, every
from cgx_jax import Rules, transforms
from cgx_jax.compressors import PayloadCompressor
from cgx_jax.exchanges import Xla
from cgx_jax.testing import SHAPES, check_compressor, check_exchange, check_loss, check_reduction
from toys import Steps
from worlds import on_ranks, placed, stepper

KINDS = {"quantize 3", "sign of momentum", "ternary, shared scale", "toy with state"}


@pytest.mark.parametrize(
    ("name", "shapes"),
    [
        *(pytest.param(*p.values, [(16, 33)], marks=p.marks) for p in every(CASES, quick=KINDS)),
        *(pytest.param(n, SHAPES, marks=pytest.mark.slow) for n in CASES),
    ],
    ids=lambda x: x if isinstance(x, str) else f"{len(x)} shapes",
)
@pytest.mark.every_combination
def test_compressor(name, shapes):
    case = CASES[name]
    check_compressor(case.compressor, shapes)
    assert tuple(t for t in case.dtypes if case.compressor.supports(jnp.dtype(t))) == case.dtypes
    assert case.compressor.lossless or case.compressor.reductions == case.reductions


# All pairs run on an odd number of ranks, one pair of every kind on many ranks.
RANKS = [
    *(pytest.param(*p.values, 3, marks=p.marks) for p in every(PAIRS, first_reduction=True)),
    *(
        pytest.param(*p.values, 8, marks=pytest.mark.slow)
        for p in every(PAIRS, first_reduction=True)
        if not p.marks
    ),
]


@pytest.mark.parametrize(("name", "world"), RANKS)
@pytest.mark.quick(
    "quantize 4, scatter_gather-3",
    "quantize 4, tree-3",
    "chunked toy, ring-3",
    "top k, gather_sum-3",
    "random k, sum_rounds-3",
    "voting toy, scatter_gather-3",
)
def test_reduction(name, world):
    check_reduction(*PAIRS[name], worlds=(world,))


@pytest.mark.parametrize("shape", [(), (3,), (513,)], ids=str)
@pytest.mark.parametrize("name", every(CHUNKED))
@pytest.mark.quick("quantize 3-*3,*")
def test_reduction_of_leaves_of_few_values(name, shape):
    check_reduction(CHUNKED[name], worlds=(8,), shape=shape)


def stepped(case, memory=None, precondition=None):
    """Returns two steps' results of every call that a compressor allows, and the states."""
    mesh = Mesh(np.array(jax.devices()[:2]), ("x",))
    x = np.sin(np.arange(2 * 48 * 40, dtype=np.float32)).reshape(2, 48, 40)
    policy, key = Rules((), case.compressor, exact=()), jax.random.key(3)
    found = []

    for how in case.reductions:
        kept = {"memory": memory, "precondition": precondition, "mesh": mesh}
        tx = cgx_jax.sync_gradients("x", policy, exchange="xla", reduction=how, **kept)
        state = placed(tx.init({"w": x[0]}), mesh, "x")
        step = stepper(tx, mesh, state, "x")
        for _ in range(2):
            y, state = step({"w": x}, state)
            found += [y["w"], *jax.tree.leaves(state)]
    if isinstance(case.compressor, PayloadCompressor) and not case.stateful and memory is None:
        for call in (cgx_jax.psum_scatter_compressed, cgx_jax.all_gather_compressed):
            f = functools.partial(call, axis_name="x", compressor=policy, key=key, exchange="xla")
            found.append(on_ranks(functools.partial(f, tiled=True), mesh)(x))
    return found


# Not only compressors: memories, units and every reduction make numbers of their own.
@pytest.mark.usefixtures("unoptimized")
@pytest.mark.parametrize("name", every(CASES, quick=FEW))
@pytest.mark.quick("quantize 4")
def test_64_bit_mode_changes_no_bit_and_no_dtype(name):
    case = CASES[name]
    assert_same_in_64_bit_mode(lambda: stepped(case))


MEMORIES = {"feedback": cgx_jax.ErrorFeedback(), "momentum": transforms.MomentumCorrection(0.9)}


@pytest.mark.usefixtures("unoptimized")
@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize("name", ["quantize 4", "top k", "low rank", "sampled threshold"])
@pytest.mark.quick("top k-momentum")
def test_64_bit_mode_changes_no_memory(name, memory):
    assert_same_in_64_bit_mode(lambda: stepped(CASES[name], memory=MEMORIES[memory]))


@pytest.mark.slow
def test_64_bit_mode_changes_no_unit():
    units = transforms.SecondMoment()
    assert_same_in_64_bit_mode(lambda: stepped(CASES["quantize 4"], precondition=units))


def assert_same_in_64_bit_mode(make):
    want = make()
    with jax.enable_x64(True):
        got = make()
    assert len(got) == len(want)
    for a, b in zip(got, want, strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        if jnp.issubdtype(a.dtype, jnp.inexact):
            np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)


@pytest.mark.usefixtures("unoptimized")
@pytest.mark.parametrize("world", [1, 2, 4, 8])
def test_exchange(world):
    check_exchange(Xla(), Mesh(np.array(jax.devices()[:world]), ("x",)), "x")


class WrongBytes(Steps):
    def wire_bits(self, shape, dtype=jnp.float32):
        return super().wire_bits(shape) + 8


class OverBound(Steps):
    def error_bound(self, x):
        return super().error_bound(x) / 2


class LosesState(Steps):
    reductions = ("gather_sum",)

    def init(self, shape, dtype):
        return (jnp.zeros(shape),)

    def prepare(self, x, state):
        return x, ()


WRONG = {
    WrongBytes: "is not .payload_bytes",
    OverBound: "exceeds its bound",
    LosesState: "state is not like init",
}


@pytest.mark.parametrize("kind", WRONG)
def test_a_wrong_compressor_does_not_pass(kind):
    made = dataclasses.dataclass(frozen=True)(kind)
    with pytest.raises(AssertionError, match=WRONG[kind]):
        check_compressor(made())


class Misplaced(Xla):
    def scatter(self, name, rows, axes):
        return super().scatter(name, rows, axes)[::-1]


class Miscounted(Xla):
    def gather(self, name, row, axes):
        return super().gather(name, row, axes) ^ jnp.uint8(1)


@pytest.mark.usefixtures("unoptimized")
@pytest.mark.parametrize("kind", [Misplaced, Miscounted])
def test_a_wrong_exchange_does_not_pass(kind):
    mesh = Mesh(np.array(jax.devices()[:2]), ("x",))
    with pytest.raises(AssertionError, match="bytes are not where they belong"):
        check_exchange(kind(), mesh, "x")
    with pytest.raises(AssertionError):
        check_reduction(Steps(), exchange=kind(), worlds=(2,))


def errors(params, batch):
    return jnp.square(batch["x"] @ params["w"] - 1).mean(1)


LOSS_CHECKS = {
    "a mean": (lambda p, b: errors(p, b).mean(), {}, None),
    "a ratio": (lambda p, b: (errors(p, b) @ b["m"], b["m"].sum()), {"loss": "ratio"}, None),
    "outputs": (lambda p, b: (errors(p, b).mean(), {"rows": b["x"], "off": errors(p, b).max()}),
                {"has_aux": True, "aux_specs": {"rows": P("data"), "off": "mean"}},
                r"aux\['off'\] \[\] is off by"),
    "a mean over a mask": (lambda p, b: (errors(p, b) @ b["m"]) / b["m"].sum(), {},
                           r"value \[\] is off by .*gradient\['w'\] \[4, 3\] is off by"),
    "a gradient of zero": (lambda p, b: errors(p, b).mean() + 1e-9 * p["w"][0, 0], {}, None),
    "the same NaN": (lambda p, b: (errors(p, b).mean(), jnp.log(b["x"])),
                     {"has_aux": True, "aux_specs": P("data")}, None),
    "an imaginary part": (
        lambda p, b: (errors(p, b).mean(), jax.lax.complex(p["w"][0, 0], errors(p, b).max())),
        {"has_aux": True, "aux_specs": "mean"}, r"aux \[\] is off by"
    ),
    "a shape": (lambda p, b: (errors(p, b).mean(), b["x"][:1]),
                {"has_aux": True, "aux_specs": P("data")},
                r"aux has shape \[4, 4\], on one device \[1, 4\]"),
}  # fmt: skip


@pytest.mark.usefixtures("unoptimized")
@pytest.mark.parametrize(("loss", "options", "wrong"), LOSS_CHECKS.values(), ids=LOSS_CHECKS)
def test_check_loss_names_what_differs(loss, options, wrong):
    rng = np.random.default_rng(0)
    batch = {"x": jnp.float32(rng.normal(size=(16, 4))), "m": jnp.float32(np.arange(16) % 7 < 2)}
    batch = {"x": batch["x"] * jnp.arange(16.0)[:, None], "m": batch["m"]}
    params = {"w": jnp.ones((4, 3))}
    mesh = jax.make_mesh((4,), ("data",), devices=jax.devices()[:4])
    check = lambda: check_loss(loss, params, batch, mesh, "data", **options)  # noqa: E731
    with contextlib.nullcontext() if wrong is None else pytest.raises(AssertionError, match=wrong):
        check()


def test_check_loss_takes_losses_that_close_over_arrays_on_the_mesh(mesh):
    scale = jax.device_put(jnp.arange(4.0), NamedSharding(mesh, P()))
    loss = lambda p, x: jnp.square(x * scale @ p).mean()  # noqa: E731
    check_loss(loss, jnp.ones((4, 3)), jnp.arange(64.0).reshape(16, 4), mesh, "data")


class Keeper(nnx.Module):
    def __init__(self):
        self.w, self.top = nnx.Param(jnp.ones((4, 3))), nnx.Variable(jnp.zeros(()))

    def __call__(self, x):
        self.top[...] = x.max()
        return x @ self.w[...]


def test_check_loss_compares_the_state_of_nnx_and_leaves_the_callers(mesh):
    model, x = Keeper(), jnp.arange(64.0).reshape(16, 4)
    says = r"state\[0\]\['top'\].* is off by"
    with jax.set_mesh(mesh), pytest.raises(AssertionError, match=says):
        check_loss(lambda m, x: jnp.square(m(x)).mean(), model, x, mesh, "data")
    assert model.top[...] == 0
