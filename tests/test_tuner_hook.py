"""The tuner in the backward pass: smaller buffers, and a step that is reduced as it chose."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import cgx_jax
from cgx_jax import Plan, Quantize, Tuner
from cgx_jax.axes import Axes
from cgx_jax.exchanges import Xla
from cgx_jax.route.route import Options
from cgx_jax.tuning import Setting
from cgx_jax.tuning.candidates import Asked, candidates
from cgx_jax.tuning.setting import Offered
from tuning_steps import steps_take
from worlds import ranks

WORLD = 2
MESH = ranks(WORLD)
CODE = Quantize(4)
# Two leaves of 256 KiB: one buffer, or one each.
LIKE = {"a": np.zeros((256, 256), np.float32), "b": np.zeros((256, 256), np.float32)}


def batch(seed):
    return np.random.default_rng(seed).normal(size=(WORLD, 256, 256)).astype(np.float32)


def gradient(compressor, **options):
    """The gradient of a loss that is linear in both leaves, reduced in the backward pass."""

    def loss(params, x):
        p = cgx_jax.reduce_in_backward(params, "data", compressor, **options)
        return (jnp.vdot(p["a"], x[0]) + jnp.vdot(p["b"], x[0] ** 2)) / WORLD

    return jax.shard_map(
        jax.grad(loss), mesh=MESH, in_specs=(P(), P("data")), out_specs=P(), check_vma=False
    )


def tuned(monkeypatch, fastest):
    """A tuner after its trials, in which the setting named `fastest` takes the least time."""
    tuner = Tuner(reductions=(), rounds=4, cache=False)
    steps_take(monkeypatch, lambda: 1.0 - 0.5 * (str(tuner.current) == fastest))
    step = tuner.jit(gradient(CODE, exchange=tuner))
    while tuner.state in ("waiting", "trying"):
        out = step(LIKE, batch(0))
    return tuner, step, out


@pytest.mark.parametrize(
    ("fastest", "buffers"), [("xla, 4 MiB", 1), ("xla, 0.25 MiB", 2), ("psum", 0)]
)
def test_the_hook_reduces_as_the_tuner_chose(monkeypatch, fastest, buffers):
    tuner, step, _ = tuned(monkeypatch, fastest)
    assert tuner.state == "kept"
    assert str(tuner.current) == fastest
    got, x = step(LIKE, batch(1)), batch(1)
    if not buffers:
        np.testing.assert_allclose(got["a"], x.mean(0), atol=1e-6)
        np.testing.assert_allclose(got["b"], (x**2).mean(0), atol=1e-5)
        return
    plan = Plan.build(LIKE, CODE, fusion_bytes=tuner.current.fusion_bytes)
    assert len(plan.buffers) == buffers
    same = jax.jit(gradient(plan, exchange="xla"))
    jax.tree.map(np.testing.assert_array_equal, got, same(LIKE, x))
    text = same.lower(LIKE, x).compile().as_text()
    assert len(re.findall(r" all-to-all\(", text)) == buffers


@pytest.mark.parametrize("overlaps", [True, False])
def test_smaller_buffers_are_tried_in_the_backward_pass(overlaps):
    four = {str(i): np.zeros((512, 512), np.float32) for i in range(4)}  # 1 MiB each
    options = Options("test", Axes(("data",), None, 2), None, overlaps=overlaps)
    asked = Asked(options, Plan.build(four, CODE), False)
    first, *rest = candidates([asked], Offered((Xla(),), (), ()), None)
    assert first.setting == Setting()
    # Settings of one program count once: 1 MiB and 256 KiB give each leaf a buffer, as all larger
    # sizes give all leaves one.
    sizes = {c.setting.fusion_bytes for c in rest}
    assert sizes == ({1 << 22, 1 << 20} if overlaps else {1 << 26})


def test_the_cache_keeps_reductions_in_and_after_the_backward_pass_apart(monkeypatch):
    tuner, _, _ = tuned(monkeypatch, "psum")
    inside = tuner._key()
    tuner._asked = [
        call._replace(options=dataclasses.replace(call.options, overlaps=False))
        for call in tuner._asked
    ]
    after = tuner._key()
    assert inside.folder != after.folder
    assert inside.tree == after.tree


def test_options_that_are_the_tuners_are_refused():
    message = r"reduce_in_backward: reduction='tree' .* the tuner chooses these"
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(
            gradient(CODE, exchange=Tuner(cache=False), reduction="tree"), LIKE, batch(0)
        )
