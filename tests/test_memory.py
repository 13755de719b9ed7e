"""Pages of large results on CPUs: huge if the system has huge pages, and kept on request."""

import pathlib
import platform
import re
import sys

import jax
import jax.numpy as jnp
import pytest

import cgx_jax
from cgx_jax.kernels import backends
from processes import finish, start

THP = pathlib.Path("/sys/kernel/mm/transparent_hugepage/enabled")
needs_native = pytest.mark.skipif(
    backends()["cpu"] == "jnp", reason="there are no native kernels here: it needs a C++ compiler"
)


def mapping_of(address):
    """Returns the flags of the memory mapping that contains an address."""
    inside = False
    for line in pathlib.Path("/proc/self/smaps").read_text().splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(found[1], 16) <= address < int(found[2], 16)
        elif inside and line.startswith("VmFlags:"):
            return line.split()[1:]
    raise AssertionError(f"no mapping holds {address:#x}")


@needs_native
@pytest.mark.skipif(not THP.exists(), reason="this system has no transparent huge pages")
def test_large_results_ask_for_huge_pages():
    n = 16 << 20
    code = cgx_jax.Quantize(4)
    x = jnp.ones(n)
    middle = 2 * n  # bytes into a result of 64 MB

    def address(result):
        return result.unsafe_buffer_pointer() + middle

    back = jax.jit(lambda v: code.decode(code.encode(v), v.shape, v.dtype))(x)
    assert "hg" in mapping_of(address(back))
    assert "hg" not in mapping_of(address(jax.jit(lambda v: v + 1)(x)))


FAULTS = """
import resource, sys
import cgx_jax
agreed = cgx_jax.keep_memory() if sys.argv[1] == "keep" else True
import jax, jax.numpy as jnp
f, x = jax.jit(lambda x: x + 1), jnp.zeros(16 << 20)
for _ in range(3): f(x).block_until_ready()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10): f(x).block_until_ready()
print(agreed, (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) // 10)
"""


@pytest.mark.slow
@needs_native
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="malloc is not that of glibc")
def test_kept_memory_is_not_faulted_in_again():
    faults = {}
    for how in ("keep", "return"):
        _, out, _ = finish(start([sys.executable, "-c", FAULTS, how]))
        agreed, count = out.split()
        assert agreed == "True"
        faults[how] = int(count)
    pages = (64 << 20) // 4096
    assert faults["keep"] < pages / 100
    assert faults["return"] > pages / 2


def test_nothing_is_promised_without_native_kernels(pretend):
    pretend(kernels=None)
    assert cgx_jax.keep_memory() is False
