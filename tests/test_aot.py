"""What XLA's ahead-of-time compiler makes of the exchanges on eight H100, without a GPU."""

import os
import pathlib
import re
import subprocess
import sys

import jaxlib.version
import pytest

import cgx_jax

# JAX's CUDA plugin, only for its compiler. Not in site-packages: JAX must not see it elsewhere.
PLUGIN = pathlib.Path(sys.prefix) / "cuda-plugin"
WORKER = pathlib.Path(__file__).with_name("aot_worker.py")

pytestmark = pytest.mark.skipif(
    cgx_jax.kernels.backends()["cuda"] == "jnp" or not (PLUGIN / "jax_plugins").is_dir(),
    reason="no CUDA module, or no CUDA plugin of JAX: run by `make builds` on Linux with nvcc 13",
)


def compiled(tmp_path, exchange, style):
    """Returns the optimized module and XLA's order of thunks."""
    environment = dict(os.environ)
    package = pathlib.Path(cgx_jax.__file__).parents[1]
    folders = [str(package), str(PLUGIN), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, folders))
    environment.pop("JAX_PLATFORMS", None)
    environment["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"
    environment["XLA_FLAGS"] = (
        f"--xla_gpu_autotune_level=0 --xla_dump_to={tmp_path} --xla_dump_hlo_as_text"
    )
    done = subprocess.run(
        [sys.executable, str(WORKER), exchange, style],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (thunks,) = tmp_path.glob("*thunk_sequence_after_thunk_passes.txt")
    return done.stdout, thunks.read_text()


def has_nccl():
    from cgx_jax.exchanges import nccl

    return nccl.not_installed() is None


needs_nccl = pytest.mark.skipif(
    "not has_nccl()",
    reason="built against a jaxlib without the collectives extension: it needs Python 3.12",
)


def kinds(thunks):
    """Returns thunk kinds in order, and whether each is inside a command buffer or async call."""
    lines = re.findall(r"^( *)\d+: k(\w+)[^\n]*?(\S*gemm\S*|$)", thunks, re.MULTILINE)
    return [("gemm" if gemm else kind, len(indent) > 0) for indent, kind, gemm in lines]


@pytest.mark.parametrize("style", ["end", "backward", "sharded"])
def test_only_bytes_travel_between_kernels(tmp_path, style):
    module, _ = compiled(tmp_path, "xla", style)
    collectives = re.findall(r"= (.*?) (?:all-to-all|all-gather|all-reduce)(?:-start)?\(", module)
    assert collectives
    for result in collectives:
        assert set(re.findall(r"([a-z]+\d+)\[\d", result)) == {"u8"}, result
    owner = "cgx_accumulate" if style == "sharded" else "cgx_reduce"
    for target in ("cgx_encode", owner, "cgx_decode"):
        assert f'custom_call_target="{target}"' in module


@pytest.mark.parametrize(
    ("exchange", "targets"),
    [
        ("xla", ["cgx_encode", "cgx_reduce", "cgx_decode"]),
        pytest.param("nccl", ["cgx_all_reduce_nccl"], marks=needs_nccl),
    ],
)
@pytest.mark.every_combination
def test_kernels_multiply_by_units(tmp_path, exchange, targets):
    module, _ = compiled(tmp_path, exchange, "units")
    for target in targets:
        call = re.search(rf'custom_call_target="{target}".*', module)[0]
        slots = re.search(r"slots = (?:array<i64: |dense<\[)([\d, ]+)", call)[1].split(", ")
        assert len(slots) == 4 * 9
        assert slots[4::9] == ["1"] * 4  # rotated
        assert "0" not in slots[6::9]  # in units: rows of so many values


def test_sparse_sums_add_one_rank_after_the_other(tmp_path):
    module, _ = compiled(tmp_path, "xla", "sparse")
    # Places are unique within a rank; one scatter over all ranks would add in an arbitrary order.
    assert len(re.findall(r"scatter\S* = f32\S* fusion\(", module)) == 4 * 8  # layers, ranks


@pytest.mark.skipif(
    jaxlib.version.__version_info__ < (0, 11),
    reason="XLA records custom calls by default from jaxlib 0.11 on",
)
def test_kernels_are_recorded_into_command_buffers(tmp_path):
    _, thunks = compiled(tmp_path, "xla", "end")
    first, second, third = (inside for kind, inside in kinds(thunks) if kind == "CustomCall")
    assert first  # encode, beside other kernels
    assert third  # decode
    assert not second  # reduce stands alone between two collectives


@needs_nccl
@pytest.mark.parametrize("exchange", ["nccl", "peer"])
def test_fused_call_is_the_only_communication(tmp_path, exchange):
    module, thunks = compiled(tmp_path, exchange, "end")
    assert module.count(f'custom_call_target="cgx_all_reduce_{exchange}"') == 1
    assert not re.search(r"(all-to-all|all-gather|all-reduce)(-start)?\(", module)
    assert re.search(
        r"kAsyncStart.*stream=communication_stream\[\d\].*\n +\d+: kCustomCall", thunks
    )


@needs_nccl
@pytest.mark.parametrize(
    ("style", "target"), [("streams", "cgx_all_reduce_nccl"), ("one_shot", "cgx_gather_sum_nccl")]
)
def test_streams_and_one_phase_are_one_call_too(tmp_path, style, target):
    module, _ = compiled(tmp_path, "nccl", style)
    (call,) = re.findall(r'custom_call_target="(cgx_\w+)".*', module)
    assert call == target
    (streams,) = re.findall(r"streams = (\d+) : i64", module)
    assert streams == ("4" if style == "streams" else "1")
    assert not re.search(r"(all-to-all|all-gather|all-reduce)(-start)?\(", module)


@needs_nccl
def test_halves_are_calls_on_the_communication_stream(tmp_path):
    module, thunks = compiled(tmp_path, "nccl", "sharded")
    for target in ("cgx_all_gather_nccl", "cgx_reduce_scatter_nccl"):
        assert module.count(f'custom_call_target="{target}"') == 4  # one per layer
    assert not re.search(r"(all-to-all|all-gather|all-reduce|reduce-scatter)(-start)?\(", module)
    started = re.findall(
        r"kAsyncStart.*stream=communication_stream\[\d\].*\n +\d+: kCustomCall", thunks
    )
    assert len(started) == 8
    assert ("CustomCall", False) not in kinds(thunks)  # none on the main stream


@needs_nccl
def test_fused_calls_overlap_the_backward_pass(tmp_path):
    _, thunks = compiled(tmp_path, "nccl", "backward")
    outer = re.findall(
        r"^ *\d+: k(AsyncStart|AsyncDone|CustomKernel)\s*\[[^]]*\] (.*)$", thunks, re.MULTILINE
    )
    flying, overlapped = False, 0
    for kind, detail in outer:
        if kind.startswith("Async"):
            flying = kind == "AsyncStart"
        elif flying and "gemm" in detail:
            overlapped += 1
            flying = False  # count each call once
    assert overlapped >= 3  # four layers; the last has nothing left to hide behind


def lifetimes(live_range):
    """Returns XLA's order of instructions, and each value's first and last instruction in it."""
    order = re.findall(r"^ +\d+:(\S+)$", live_range, re.MULTILINE)
    lives = re.findall(r"^ +(\S+)\{([\d,]*)\}:(\d+)-(\d+)$", live_range, re.MULTILINE)
    return order, {(name, index): (int(a), int(b)) for name, index, a, b in lives}


def places(assignment):
    """Yields every value as ((name, index), type, allocation, first byte, end)."""
    for allocation, text in enumerate(re.split(r"^allocation ", assignment, flags=re.MULTILINE)):
        for name, index, size, offset, kind in re.findall(
            r"value: <\d+ (\S+?)(?:\{([\d,]*)\})? @0> \(size=(\d+),offset=(\d+)\): (.*)", text
        ):
            yield (name, index), kind, allocation, int(offset), int(offset) + int(size)


@needs_nccl
@pytest.mark.parametrize(("style", "calls"), [("backward", 4), ("sharded", 8)])
def test_payloads_have_their_memory_alone_until_the_call_is_done(tmp_path, style, calls):
    module, _ = compiled(tmp_path, "nccl", style)
    (live_range,) = tmp_path.glob("*-live-range.txt")
    (assignment,) = tmp_path.glob("*-buffer-assignment.txt")
    order, lives = lifetimes(live_range.read_text())
    done_of = {s: d for d, s in re.findall(r"%(\S+) = .* \S+-done\(%(\S+?)\)", module)}
    values = list(places(assignment.read_text()))
    payloads = [v for v in values if re.match(r"cgx_\w+_nccl", v[0][0]) and v[1].startswith("u8[")]
    assert len(payloads) == calls
    for payload, _, allocation, begin, end in payloads:
        born, dead = lives[payload]
        # In this order, the body of an asynchronous call comes just before the call's start.
        start = next(i for i in range(born, len(order)) if order[i] in done_of)
        assert dead >= order.index(done_of[order[start]])
        for other, _, its_allocation, its_begin, its_end in values:
            if other == payload or its_allocation != allocation:
                continue
            at_once = lives[other][0] <= dead and born <= lives[other][1]
            assert not (at_once and its_begin < end and begin < its_end), (payload, other)


@needs_nccl
def test_fused_call_is_refused_elsewhere():
    """Compiling for CPU devices fails, and the message names the remedy."""
    import jax
    import numpy as np
    from jax.sharding import Mesh
    from jax.sharding import PartitionSpec as P

    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))
    reduce = jax.shard_map(
        lambda x: cgx_jax.psum_compressed(x, "data", exchange="nccl"),
        mesh=mesh,
        in_specs=P("data"),
        out_specs=P(),
    )
    with pytest.raises(ValueError, match=r"exchange='nccl'.*for CUDA devices.*compiled for cpu"):
        jax.jit(reduce).lower(np.ones((2, 4096), np.float32))
