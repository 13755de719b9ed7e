"""What "auto" knows of GPUs without a profile: their links, their nodes, and what pays there."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

import cgx_jax
import scripts
from cgx_jax import Plan, Quantize
from cgx_jax.axes import Axes
from cgx_jax.choice import Auto
from cgx_jax.compressors import PowerSGD
from cgx_jax.exchanges import Xla, links
from cgx_jax.exchanges.links import Link
from cgx_jax.route.route import Options, decide
from profiles import with_crossing

predict = scripts.load("benchmarks/predict.py")

SXM, RTX = "NVIDIA A100-SXM4-80GB", "NVIDIA GeForce RTX 4090"


@pytest.fixture
def gpus(pretend):
    """Provides a function that pretends that there are GPUs; it returns their mesh."""

    def machine(nodes, local, kind=SXM, shape=None, names=("data",), known=True):
        every = [
            types.SimpleNamespace(platform="gpu", device_kind=kind, partition_index=node)
            for node in range(nodes)
            for _ in range(local)
        ]
        grid = np.array(every, object).reshape(shape or (nodes * local,))
        mesh = types.SimpleNamespace(axis_names=names, devices=grid)
        pretend(devices=every, platform="gpu", mesh=mesh if known else None)
        pretend(cuda_kernels=object(), exchanges=(Xla(),))
        return mesh

    return machine


def over(*names, world, groups=None):
    return Axes(names, groups, world)


def test_a_link_follows_from_kind_and_nodes(gpus):
    for kind, link in {
        SXM: Link.NVLINK,
        "NVIDIA H100 80GB HBM3": Link.NVLINK,
        "NVIDIA H100 PCIe": Link.PCIE,
        "NVIDIA H200 NVL": Link.PCIE,
        "NVIDIA L40S": Link.PCIE,
        "NVIDIA A30": Link.PCIE,
        "NVIDIA A100-SXM4-80GB": Link.NVLINK,
        RTX: Link.PCIE,
        "A GPU of the future": Link.NVLINK,
    }.items():
        gpus(1, 8, kind)
        assert links.between(over("data", world=8)) == link
    gpus(2, 8, RTX)
    assert links.between(over("data", world=16)) == Link.SHARED_PCIE
    gpus(16, 1, RTX)
    assert links.between(over("data", world=16)) == Link.OWN


def test_each_axis_has_its_own_link(gpus):
    gpus(2, 4, shape=(2, 4), names=("node", "gpu"))
    assert links.between(over("gpu", world=4)) == Link.NVLINK
    assert links.between(over("node", world=2)) == Link.OWN
    near, far = ((0, 1, 2, 3), (4, 5, 6, 7)), ((0, 4), (1, 5), (2, 6), (3, 7))
    assert links.between(over("node", "gpu", world=4, groups=near)) == Link.NVLINK
    assert links.between(over("node", "gpu", world=2, groups=far)) == Link.OWN
    assert links.nodes_of(over("node", "gpu", world=8)) == near
    assert links.nodes_of(over("gpu", "node", world=8)) == ((0, 2, 4, 6), (1, 3, 5, 7))
    for axes in (over("gpu", world=4), over("node", world=2)):
        assert links.nodes_of(axes) is None


def test_an_unknown_mesh_is_no_network_unless_it_must_be(gpus):
    gpus(2, 8, known=False)
    assert links.between(over("data", world=8)) == Link.NVLINK
    assert links.between(over("data", world=16)) == Link.SHARED
    assert links.nodes_of(over("data", world=16)) is None
    assert decided(16, 1 << 24) is None


def test_devices_that_say_nothing_are_not_known(gpus):
    mesh = gpus(2, 4)
    for device in mesh.devices.flat:
        device.partition_index = -1
    axes = over("data", world=8)
    assert links.between(axes) is links.nodes_of(axes) is None
    for device in mesh.devices.flat:
        device.platform = "cpu"
    assert links.between(axes) is None


def test_nodes_of_unequal_sizes_have_no_levels(gpus):
    mesh = gpus(2, 4)
    mesh.devices = mesh.devices[:6]
    assert links.nodes_of(over("data", world=6)) is None


def decided(world, size, compressor=Quantize(4), **options):  # noqa: B008
    """Returns the way of one leaf of `size` values over `world` ranks, None for `lax.psum`."""
    found = []

    def trace(x):
        axes = Axes.resolve("test", "data", None)
        given = Options("test", axes, options.pop("exchange", Auto()), **options)
        plan = Plan.build(jax.ShapeDtypeStruct((size // 512, 512), jnp.float32), compressor)
        found.extend(decide(given, plan).ways.values())
        return x

    mesh = AbstractMesh((world,), ("data",))
    f = jax.shard_map(trace, mesh=mesh, in_specs=P(), out_specs=P())
    jax.eval_shape(f, jax.ShapeDtypeStruct((world,), jnp.float32))
    return found[0]


@pytest.mark.parametrize("machine", predict.FABRICS, ids=lambda m: m.name)
def test_the_choice_is_near_the_best_of_the_model(machine, gpus):
    gpus(machine.nodes, machine.local, RTX if machine.inside == predict.PCIE else SXM)
    unknown = 0.0 if machine.nodes == 1 else 4e5 if machine.local == 1 else 2e6
    if machine.nodes > 1 and machine.local > 1 and machine.inside == predict.PCIE:
        unknown = 9e6
    for size in (1 << n for n in range(15, 28)):  # 128 KiB to 512 MiB
        way = decided(machine.world, size)
        how = "fp32" if way is None else {"levels": "levels"}.get(way.reduction.shorthand, "flat")
        ways = predict.PRICES[: 3 if machine.nodes > 1 and machine.local > 1 else 2]
        seconds = {w: predict.reduction_seconds(machine, w, 4 * size) for w in ways}
        if 4 * size < unknown:
            # Here the network's rate decides, which nobody knows.
            assert how == "fp32"
        else:
            assert seconds[how] <= 1.1 * min(seconds.values()), (4 * size, how, seconds)


def test_levels_are_taken_only_where_nobody_chose(gpus, following):
    gpus(2, 8)
    size = 1 << 24
    assert decided(16, size).reduction.shorthand == "levels"
    assert decided(16, size, exchange=Xla()).reduction.shorthand == "scatter_gather"
    ring = cgx_jax.reductions.Ring()
    assert decided(16, size, reduction=ring).reduction.shorthand == "ring"
    assert decided(16, size, PowerSGD(4)).reduction.shorthand == "sum_rounds"
    following(with_crossing(world=16))
    assert decided(16, size).reduction.shorthand != "levels"
