"""Eight simulated devices and strict promotion for every test; the mesh fixtures."""

import collections
import fnmatch
import os

os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
)
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import numpy as np
import pytest
from hypothesis import Phase, settings
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import Mesh

from cgx_jax import _compat, use_profile
from cgx_jax.choice import auto
from cgx_jax.exchanges import nccl
from cgx_jax.kernels import native
from plain_jit_case import exact_case

jax.config.update("jax_numpy_dtype_promotion", "strict")
# Tests spend most of their time compiling, and other processes need the same programs: workers, the
# slow tests, and the next run. So programs are cached. Processes that are ranks do not use the
# cache, because XLA reorders collectives in cached programs. Even within one process a cached
# program may crash if its collectives do not wait for each other: its test takes `no_cache`.
cache = os.path.abspath(f"{__file__}/../../.pytest_cache/xla")
jax.config.update("jax_compilation_cache_dir", cache)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)

# CI takes few, fixed draws; `--hypothesis-profile=long` takes many, with new seeds.
_FAILS_FAST = {"deadline": None, "phases": set(Phase) - {Phase.explain}}
settings.register_profile("few", max_examples=25, derandomize=True, **_FAILS_FAST)
settings.register_profile("long", max_examples=500, print_blob=True, **_FAILS_FAST)
settings.load_profile("few")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Marks cases of tests as slow: all but those that the test's mark `quick` names by patterns.

    Of a test without it that has several parameters, the quick cases try each value once.
    """
    tests = collections.defaultdict(list)
    for item in items:
        marked = any(map(item.get_closest_marker, ("slow", "every_combination")))
        if hasattr(item, "callspec") and not marked:
            tests[item.path, item.originalname].append(item)
    for cases in tests.values():
        if named := cases[0].get_closest_marker("quick"):
            found = {name: fnmatch.filter(map(case_id, cases), name) for name in named.args}
            if not all(found.values()) and not any("::" in given for given in config.args):
                raise pytest.UsageError(f"{cases[0].nodeid}: a case of `quick` is none: {found}")
            quick = set().union(*found.values())
            slow = [item for item in cases if case_id(item) not in quick]
        else:
            slow = cases_that_try_nothing_new(cases)
        for item in slow:
            item.add_marker("slow")


def case_id(item):
    """Returns a case's id; brackets would be patterns of `fnmatch`."""
    return item.callspec.id.translate({ord("["): "(", ord("]"): ")"})


def cases_that_try_nothing_new(cases):
    """Returns those of several parameters whose values all occur in the others."""
    if len(cases[0].callspec.params) < 2:
        return []
    values = {i: {(k, id(v)) for k, v in i.callspec.params.items()} for i in cases}
    unseen = set().union(*values.values())
    while unseen:
        most = max(values, key=lambda item: len(values[item] & unseen))
        unseen -= values.pop(most)
    return list(values)


@pytest.fixture
def no_cache():
    """Programs are compiled here, not taken from the cache of an earlier test."""
    before = jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    yield
    jax.config.update("jax_enable_compilation_cache", before)
    compilation_cache.reset_cache()


@pytest.fixture
def unoptimized(request):
    """LLVM does not optimize programs of quick tests, which is half of the time of compiling.

    For tests of what a program computes, sends and holds, within bounds; not for those of bits that
    two programs have in common, and of compressors and kernels. XLA's own passes run. Slow cases of
    the same tests are optimized.
    """
    quick = request.node.get_closest_marker("slow") is None
    jax.config.update("jax_disable_most_optimizations", quick)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture
def optimized(unoptimized):
    """Takes `unoptimized` back for one test of a file: two programs must have the same bits."""
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture
def same_isa_afterwards():
    module = native.module()
    before = module.isa()
    yield
    module.set_isa(before)


@pytest.fixture(scope="session")
def case():
    """A regression with its exact loss and gradients."""
    return exact_case()


@pytest.fixture
def standard_promotion():
    """Dtypes are promoted as users have it, and as Flax and Optax are written."""
    with jax.numpy_dtype_promotion("standard"):
        yield


# What the library asks of the machine and of JAX: who is asked, and by which function.
_FACTS = {
    "devices": (jax, "devices"),
    "mesh": (_compat, "concrete_mesh"),
    "platform": (_compat, "platform"),
    "kernels": (native, "module"),
    "cuda_kernels": (native, "cuda_module"),
    "exchanges": (auto, "available"),
    "lack_of_nccl": (nccl, "not_installed"),
    "lack_of_nccl_here": (nccl.Nccl, "missing"),
}


@pytest.fixture
def pretend(monkeypatch):
    """Provides a function that makes this machine another one, for what chooses and traces."""

    def with_facts(**facts):
        for name, fact in facts.items():
            monkeypatch.setattr(*_FACTS[name], lambda *_, fact=fact: fact)

    return with_facts


@pytest.fixture
def built(pretend):
    """Pretends that the CUDA module with its fused calls is installed: enough for tracing."""
    pretend(lack_of_nccl=None)


@pytest.fixture
def fused_on_cpu(pretend, monkeypatch):
    """Provides a function that replaces "nccl"'s fused call by its argument, which runs here."""

    def replace(call):
        pretend(lack_of_nccl_here=None)
        monkeypatch.setattr(nccl.Nccl, "_call", call)

    return replace


@pytest.fixture
def every_exchange(pretend):
    """Pretends that this machine has every exchange: enough for what chooses among them."""
    pretend(exchanges=auto.EXCHANGES)


@pytest.fixture(scope="session")
def mesh() -> Mesh:
    """Eight ranks on the axis "data"."""
    return Mesh(np.array(jax.devices()), ("data",))


@pytest.fixture(scope="session", params=[1, 2, 3, 8], ids="world{}".format)
def mesh_of_each_size(request: pytest.FixtureRequest) -> Mesh:
    """The axis "data" over 1, 2, 3 and 8 ranks: alone, even, odd, all."""
    return Mesh(np.array(jax.devices()[: request.param]), ("data",))


@pytest.fixture(scope="session")
def mesh_2d() -> Mesh:
    """Four ranks on "data", two on "model"."""
    return Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))


@pytest.fixture
def following():
    """Provides `use_profile`; restores the default rule at the end."""
    yield use_profile
    use_profile(None)
