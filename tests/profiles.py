"""Profiles of machines that nobody has: what `tune` would have found on them."""

from typing import Any

from cgx_jax.choice import Profile
from cgx_jax.choice.profile import Codec, Row
from cgx_jax.host import installation

MB = 1_000_000
CODEC = Codec(plain=1e-9, noise=2e-9, rotation=3e-9, units=1.5e-9)
ANOTHER = {"cpu": "a cpu", "cores": 2, "device": "cpu", "mpi": None}
ANOTHER |= {"processes": 1, "hosts": 1}
ANOTHER |= {"jax": "0.10.2", "jaxlib": "0.10.2", "cgx_jax": "0.1.0"}


def profile(rows: Any, *, here: bool = False, **fields: Any) -> Profile:
    """A profile of (method, bits per value, bytes, seconds); of this machine if `here`."""
    known = ANOTHER | {"world": 4, "axis": "data", "latency": 1e-5, "algbw": 1e9}
    known["codec"] = CODEC
    facts = installation.facts() if here else {}
    return Profile(**(known | facts | fields), rows=tuple(Row(*row) for row in rows))


def in_proportion(
    seconds: dict[float, float], psum: float, sizes: Any = (MB // 100, 100 * MB), **fields: Any
) -> Profile:
    """A profile with times proportional to size; `seconds` (by bits) and `psum` are per MB."""
    rows = [("psum", 32, size, psum * size / MB) for size in sizes]
    rows += [("xla", b, size, s * size / MB) for b, s in seconds.items() for size in sizes]
    return profile(rows, **fields)


def with_crossing(world: int = 8, **fields: Any) -> Profile:
    """A profile of this machine by which compression pays off from about 100 KiB on."""
    rows = [("psum", 32, 4096 * 4**i, 1e-5 * 4**i) for i in range(4)]
    rows += [("xla", bits, 4096 * 4**i, 5e-5 * 2**i) for i in range(4) for bits in (4.125, 8.125)]
    return profile(rows, here=True, world=world, algbw=4e8, **fields)


SLOW = in_proportion({1.125: 1.125, 4.125: 4.125, 8.125: 8.125}, psum=32.0)
# psum: 1 ms up to 1 MB, then 10 ms at 10 MB. xla is even with it near 2 MB, mpi near 1 MB.
MEASURED = profile(
    [
        ("psum", 32, MB // 10, 0.5e-3),
        ("psum", 32, MB, 1e-3),
        ("psum", 32, 10 * MB, 10e-3),
        ("xla", 4.125, MB // 10, 1e-3),
        ("xla", 4.125, MB, 1.5e-3),
        ("xla", 4.125, 10 * MB, 5e-3),
        ("xla", 8.125, MB // 10, 1e-3),
        ("xla", 8.125, MB, 1.8e-3),
        ("xla", 8.125, 10 * MB, 9.8e-3),
        ("mpi", 4.125, MB // 10, 0.6e-3),
        ("mpi", 4.125, MB, 0.98e-3),
        ("mpi", 4.125, 10 * MB, 2e-3),
    ]
)
