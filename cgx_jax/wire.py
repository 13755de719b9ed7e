"""Static sizes of the wire format: what `xla_ffi/format/wire_format.h` says, in Python integers.

Nothing here touches an array: these are the numbers that shapes are made of at trace time.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

WIRE_VERSION = 1
META_BYTES = 8
GROUP = 32  # codes are packed in groups of 32 values, so a bucket is a multiple of it
MAX_BITS = 8
ROUNDINGS = ("nearest", "stochastic", "correlated")  # by their number in a kernel call
FUSION_BYTES = 64 << 20  # of uncompressed leaves in one fusion buffer
# In the backward pass: small enough that the first layers' reduction starts while the pass runs on,
# large enough that a collective's latency is a small part of it.
HOOK_FUSION_BYTES = 4 << 20


def record_bytes(values: int, bits: int) -> int:
    """Bytes of one bucket of `values` values: its range and its packed codes."""
    return META_BYTES + bits * 4 * -(-values // GROUP)


def leaf_bytes(size: int, bits: int, bucket_size: int) -> int:
    """Bytes of one leaf of `size` values: full buckets, then a shorter one."""
    full, tail = divmod(size, bucket_size)
    return full * record_bytes(bucket_size, bits) + (record_bytes(tail, bits) if tail else 0)


@dataclasses.dataclass(frozen=True)
class Slot:
    """One leaf's place in a fusion buffer, as the kernels see it.

    `rounding` is one of ROUNDINGS. `number` is that of the leaf for the noise generator and for the
    signs of its rotation: it is the leaf's place in the user's tree, so that fusion does not change
    a leaf's bytes. With `units` the call has two more operands that its values are multiplied by.
    """

    size: int
    bits: int
    bucket_size: int
    rounding: str
    number: int
    rotation: bool = False
    units: bool = False

    @property
    def bytes(self) -> int:
        return leaf_bytes(self.size, self.bits, self.bucket_size)

    @property
    def record(self) -> int:
        return record_bytes(self.bucket_size, self.bits)


@dataclasses.dataclass(frozen=True)
class Layout:
    """A fusion buffer cut into one chunk for each rank.

    Records follow one another over all slots, `total_bytes` in all. The record that starts at
    byte s belongs to chunk floor(s * world / total_bytes). Rows are as long as the longest chunk.
    """

    slots: tuple[Slot, ...]
    world: int

    @functools.cached_property
    def _hash(self) -> int:
        return hash((self.slots, self.world))

    def __hash__(self) -> int:  # hashed on every bind: hundreds of slots, so only once
        return self._hash

    @functools.cached_property
    def starts(self) -> tuple[int, ...]:
        """First byte of every slot, and the end."""
        out = [0]
        for f in self.slots:
            out.append(out[-1] + f.bytes)
        return tuple(out)

    @property
    def total_bytes(self) -> int:
        return self.starts[-1]

    @functools.cached_property
    def begins(self) -> tuple[int, ...]:
        """First byte of every chunk, and the end: `world + 1` record boundaries."""
        total, out, i = self.total_bytes, [], 0
        for w in range(self.world):
            target = -(-w * total // self.world)
            while i < len(self.slots) and self.starts[i + 1] <= target:
                i += 1
            out.append(self._boundary(i, target))
        return (*out, total)

    def _boundary(self, i: int, target: int) -> int:
        """First record start at or after `target`, a byte of slot `i`."""
        if i == len(self.slots):
            return self.total_bytes
        start, record = self.starts[i], self.slots[i].record
        return min(start + -(-(target - start) // record) * record, self.starts[i + 1])

    @property
    def chunk_bytes(self) -> int:
        return max(b - a for a, b in zip(self.begins, self.begins[1:], strict=False))

    def with_world(self, world: int) -> Layout:
        return dataclasses.replace(self, world=world)

    @functools.lru_cache(maxsize=1024)  # noqa: B019 - a layout is a value
    def with_units(self, units: tuple[bool, ...]) -> Layout:
        """The same bytes for slots that have units where `units` says so."""
        pairs = zip(self.slots, units, strict=True)
        return Layout(tuple(dataclasses.replace(f, units=u) for f, u in pairs), self.world)

    def without_units(self) -> Layout:
        return self.with_units((False,) * len(self.slots))

    def attributes(self) -> dict[str, Sequence[int]]:
        """What a kernel call carries: six numbers per slot, as xla_ffi/handlers/slots.h reads."""
        numbers: list[int] = []
        for s in self.slots:
            numbers += (s.bits, s.bucket_size, ROUNDINGS.index(s.rounding), s.number)
            numbers += (int(s.rotation), int(s.units))
        return {"slots": numbers}


@dataclasses.dataclass(frozen=True)
class Span:
    """Consecutive buckets of one slot that lie in one chunk."""

    slot: int
    first_bucket: int
    buckets: int
    values: tuple[int, int]  # [begin, end) in the leaf


def spans(layout: Layout, chunk: int) -> list[Span]:
    """The pieces of leaves that chunk number `chunk` carries, in order."""
    begin, end = layout.begins[chunk], layout.begins[chunk + 1]
    out = []
    for i, f in enumerate(layout.slots):
        lo, hi = max(begin, layout.starts[i]), min(end, layout.starts[i + 1])
        if lo >= hi:
            continue
        first = (lo - layout.starts[i]) // f.record
        last = -(-(hi - layout.starts[i]) // f.record)
        out.append(
            Span(i, first, last - first, (first * f.bucket_size, min(last * f.bucket_size, f.size)))
        )
    return out
