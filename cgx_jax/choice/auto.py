"""`exchange="auto"`: which way a fusion buffer travels, decided while tracing.

With a profile, a buffer travels by the method that is fastest according to the measurements, and by
`lax.psum` where compression does not pay. Without a profile, a buffer is compressed from the size
on at which compression paid on every link that was tried (`Exchange.least`).
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import ClassVar

import jax
import numpy as np

from cgx_jax.choice.profile import ONE_SHOT, Profile
from cgx_jax.exchanges.base import Exchange, by_name
from cgx_jax.exchanges.links import Link
from cgx_jax.exchanges.table import EXCHANGES
from cgx_jax.host import agreement, untrusted

# A smaller measured gain is noise, and psum has no error.
LEAST_GAIN = 0.05


_active: Profile | None = None


@dataclasses.dataclass(frozen=True)
class Load:
    """A fusion buffer's size: values, and payload bits per value (mean).

    `lax.psum` sends 4 bytes per value: it adds up 16-bit values in fp32 too.
    `noisy`, `rotated` and `in_units` count the values that are rounded at random, rotated, or
    multiplied by units, all of which takes longer.
    """

    values: int
    bits: float
    noisy: int = 0
    rotated: int = 0
    in_units: int = 0


def use_profile(profile: Profile | str | os.PathLike[str] | None) -> Profile | None:
    """Makes `exchange="auto"` follow a profile (or the file of one); None is the default rule.

    With several processes, each of them calls it after `jax.distributed.initialize`. Process 0's
    profile holds for all, and the others may pass None. Returns the profile that holds now. Clears
    JAX's caches when the profile changes, so that compiled functions are traced again. Raises
    ValueError (on every process) if the profile is damaged or was measured on other machines, with
    another number of processes or hosts, or with other versions. Raises OSError if the file cannot
    be read; with several processes that is a ValueError on all of them.
    """
    global _active
    agreed = _load(profile, 1) if jax.process_count() == 1 else _agree(profile)
    if agreed != _active:
        _active = agreed
        jax.clear_caches()
    return agreed


def active() -> Profile | None:
    """Returns the profile that `exchange="auto"` follows now."""
    return _active


def _load(source: Profile | str | os.PathLike[str] | None, hosts: int) -> Profile | None:
    if source is None:
        return None
    if not isinstance(source, Profile):
        path = Path(source)
        try:
            source = Profile.from_json(untrusted.read(path))
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
    source.check_here(hosts)
    return source


def _agree(source: Profile | str | os.PathLike[str] | None) -> Profile | None:
    """Returns process 0's profile; sends its error too, so that none waits for a rank that left."""
    hosts, message = agreement.hosts(), b""
    if jax.process_index() == 0:
        try:
            profile = _load(source, hosts)
            message = b"" if profile is None else b"profile" + profile.to_json().encode()
        except (OSError, TypeError, ValueError) as error:
            message = f"use_profile: process 0 has no profile to follow: {error}".encode()
    agreed = agreement.broadcast(message)
    if not agreed:
        return None
    if not agreed.startswith(b"profile"):
        raise ValueError(agreed.decode())
    return Profile.from_json(agreed.removeprefix(b"profile").decode())


@dataclasses.dataclass(frozen=True)
class Auto(Exchange):
    """The fastest exchange for each fusion buffer, or `lax.psum` where compression costs time.

    It follows `profile`, which must be the same on every process, or the profile that `use_profile`
    made active. Without a profile it decides by size (`Exchange.least`). Raises ValueError while
    tracing for a profile of another machine, other versions or another world size.
    """

    profile: Profile | None = None

    shorthand: ClassVar[str] = "auto"
    can: ClassVar[frozenset[str]] = frozenset()

    def missing(self, axes: Sequence[str] = ()) -> str | None:
        return None

    def here(self) -> bool:
        return True

    def choose(
        self,
        caller: str,
        usable: Sequence[Exchange],
        world: int,
        load: Load,
        *,
        gathers: bool = False,
        link: Link | None = None,
    ) -> Exchange | None:
        """Returns the exchange for `load` among those that are usable; None for `lax.psum`.

        `gathers` says that the reduction is "gather_sum". The rows of that reduction then count, up
        to the sizes that were measured. `link` is the slowest between the ranks, if known; without
        a profile it decides. Raises ValueError if the profile was measured at another world size.
        """
        profile = self._follow(caller, world)
        if profile is None:
            return unmeasured(usable, load, link)
        names = {_method(profile, exchange, load, gathers): exchange for exchange in usable}
        return _as_measured(profile, names.get(fastest(profile, names, load)))

    def one_shot(
        self,
        caller: str,
        usable: Sequence[Exchange],
        gathering: Sequence[Exchange],
        world: int,
        load: Load,
    ) -> Exchange | None:
        """Returns which of `gathering` beats `choose` by the reduction "gather_sum", or None.

        It is None without a profile that measured "gather_sum", and for buffers larger than those
        measured.
        """
        profile = self._follow(caller, world)
        if profile is None:
            return None
        names = {exchange.shorthand + ONE_SHOT: exchange for exchange in gathering}
        every = [*names, *(exchange.shorthand for exchange in usable)]
        return _as_measured(profile, names.get(fastest(profile, every, load)))

    def follows(self) -> Profile | None:
        """Returns the profile that decides, or None for the rule by size."""
        return _active if self.profile is None else self.profile

    def _follow(self, caller: str, world: int) -> Profile | None:
        profile = self.follows()
        if self.profile is not None:
            self.profile.check_here()
        if profile is not None and profile.world != world:
            raise ValueError(
                f"{caller}: this call has {world} ranks, but the active profile was measured on "
                f"{profile.world} (axis {profile.axis!r}). Run cgx_jax.tune on an axis of {world} "
                'ranks, name the exchange (exchange="xla"), or call use_profile(None).'
            )
        return profile


def _method(profile: Profile, exchange: Exchange, load: Load, gathers: bool) -> str:
    """Returns the method whose rows say how long `exchange` takes for `load`."""
    once = exchange.shorthand + ONE_SHOT
    return once if gathers and 4 * load.values <= largest(profile, once) else exchange.shorthand


def _as_measured(profile: Profile, exchange: Exchange | None) -> Exchange | None:
    """Returns the exchange with the options that it was measured with."""
    return profile.engine if type(profile.engine) is type(exchange) else exchange


def available(axes: Sequence[str] = ()) -> tuple[Exchange, ...]:
    """Returns the exchanges that this process can use over `axes`, if named, or over some mesh."""
    return tuple(exchange for exchange in EXCHANGES if exchange.usable(axes))


def exchange_named(caller: str, exchange: object) -> Exchange:
    """Returns the exchange that a name stands for; raises ValueError or TypeError for others."""
    example = "cgx_jax.exchanges.Mpi(window=8)"
    return by_name(caller, exchange, Exchange, (Auto(), *EXCHANGES), example)


def unmeasured(usable: Sequence[Exchange], load: Load, link: Link | None = None) -> Exchange | None:
    """Returns the exchange for `load` without a profile; None (`lax.psum`) below its `least` size.

    The first of `usable`, in the order of `EXCHANGES`, that has a `least` size decides. Devices
    simulated in one process follow the rule too, although they send nothing, so that their numbers
    are those of the run that they simulate.
    """
    share, nbytes = load.bits / 32, 4 * load.values
    for exchange in usable:
        if (least := exchange.least(link)) is not None:
            return exchange if nbytes * (1 - share / least.even) >= least.nbytes else None
    return None


def fastest(profile: Profile, usable: Collection[str], load: Load) -> str:
    """Returns the fastest method for `load` by the profile: "psum" or one of `usable`.

    An exchange must beat psum by 5 %. Otherwise psum is kept, since it is exact. "gather_sum" wins
    where latency decides, so it is not taken for more values than were measured. Between two ranks,
    it sends as much as two phases do and has less error, so two phases must beat it by 5 %.
    """
    exact = estimate(profile, "psum", load) * (1 - LEAST_GAIN)
    seconds = {}
    for method in sorted(usable):
        measured = largest(profile, method)
        if measured and not (method.endswith(ONE_SHOT) and 4 * load.values > measured):
            seconds[method] = estimate(profile, method, load)
    faster = [method for method in seconds if seconds[method] < exact]
    lead = 1 - LEAST_GAIN if profile.world == 2 else 1
    return min(
        faster,
        key=lambda method: seconds[method] * (lead if method.endswith(ONE_SHOT) else 1),
        default="psum",
    )


def largest(profile: Profile, method: str) -> int:
    """Returns the most bytes that the profile has measured `method` on; 0 if it has not."""
    return max((row.bytes for row in profile.rows if row.method == method), default=0)


def estimate(profile: Profile, method: str, load: Load) -> float:
    """Returns the seconds that `method`, which the profile has rows of, takes for `load`.

    It interpolates linearly in log-log between measured sizes, and linearly in bits between
    measured widths. Beyond the ends it is pessimistic for compression, or neutral. A smaller buffer
    takes the time of the smallest one, and a larger buffer that of the largest one in proportion.
    Fewer bits take the time of the narrowest width, and more bits that of the widest one in
    proportion.

    Rows measure plain rounding. What random rounding, rotation and units cost this machine's codec
    beyond that is added in full. For "xla", the sum is the time, because kernels and wire wait for
    each other. A fused call hides a part of the codec behind the wire, so there the sum is an upper
    bound. It is exact for a link that waits for the codec, and it never favors compression.
    """
    # The time of kernels and of psum depends on the number of values, so a 16-bit buffer counts as
    # an fp32 buffer of as many values.
    nbytes = 4 * load.values
    widths, curves = _curves(profile, method)
    seconds = [
        np.exp(np.interp(np.log(nbytes), np.log(sizes), np.log(times))) * max(1, nbytes / sizes[-1])
        for sizes, times in curves
    ]
    plain = float(np.interp(load.bits, widths, seconds) * max(1, load.bits / widths[-1]))
    if method == "psum":
        return plain
    codec, world = profile.codec, profile.world
    noise, rotation, units = (max(0.0, s - codec.plain) for s in codec[1:])
    beyond = load.noisy * noise + load.rotated * rotation + load.in_units * units
    # With "gather_sum" a rank decodes this many times as much.
    more = world**2 / (2 * world - 1) if method.endswith(ONE_SHOT) else 1
    return plain + more * beyond


@functools.lru_cache(maxsize=16)
def _curves(
    profile: Profile, method: str
) -> tuple[list[float], list[tuple[tuple[int, ...], tuple[float, ...]]]]:
    """Returns a method's measured widths, and for each width its sizes and seconds, ascending."""
    widths = sorted({row.bits for row in profile.rows if row.method == method})
    curves = []
    for bits in widths:
        mine = sorted(row[2:] for row in profile.rows if row[:2] == (method, bits))
        curves.append((tuple(m[0] for m in mine), tuple(m[1] for m in mine)))
    return widths, curves
