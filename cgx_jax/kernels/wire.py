"""Static sizes of the wire format: `xla_ffi/format/wire_format.h` in Python integers.

Nothing here touches an array. At trace time, array shapes are computed from these numbers.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from typing import NamedTuple

WIRE_VERSION = 2
META_BYTES = 8
GROUP = 32  # codes are packed in groups of 32 values, so bucket sizes are multiples of 32
MAX_BITS = 8
MAX_BUCKET = 2**30
MASK_BITS = 16  # of a record: its mask tells which segments of the bucket are zero
ROUNDINGS = ("nearest", "stochastic", "correlated")  # a kernel call has the index
FUSION_BYTES = 64 << 20  # uncompressed bytes per fusion buffer
# The same in the backward pass: small enough that reductions start while the pass still runs, and
# large enough that a collective's latency is a small part of its time.
HOOK_FUSION_BYTES = 4 << 20


def record_bytes(values: int, bits: int) -> int:
    """Returns the bytes of one bucket of `values` values: its header and its packed codes."""
    return META_BYTES + bits * 4 * -(-values // GROUP)


def leaf_bytes(size: int, bits: int, bucket_size: int) -> int:
    """Returns the bytes of a leaf of `size` values: full buckets, then a shorter one if needed."""
    full, tail = divmod(size, bucket_size)
    return full * record_bytes(bucket_size, bits) + (record_bytes(tail, bits) if tail else 0)


@functools.lru_cache(maxsize=4096)
def mask_segment(row: int, bucket_size: int) -> int:
    """Returns how many values a bit of a record's mask stands for; `row` is a row's length.

    It is the smallest divisor of `row` of which no bucket meets more than MASK_BITS segments. Then
    the mask tells every row of zeros from its neighbours. Rows may be too short for this.
    """
    fits = bucket_size // MASK_BITS
    for segment in (d for d in _divisors(row) if d >= fits):
        if bucket_size % segment == 0 or (bucket_size - 2) // segment + 2 <= MASK_BITS:
            return segment
    return fits


def _divisors(n: int) -> list[int]:
    low = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return sorted({*low, *(n // d for d in low)})


class UnitPlace(NamedTuple):
    """Where the units of a leaf's rows and columns begin in the array of all units."""

    num_rows: int
    num_columns: int
    rows: int
    columns: int

    def moved(self, by: int) -> UnitPlace:
        return self._replace(rows=self.rows + by, columns=self.columns + by)


@dataclasses.dataclass(frozen=True)
class Slot:
    """One leaf's place in a fusion buffer, as the kernels see it.

    `rounding` is one of ROUNDINGS. `number` identifies the leaf to the noise generator and to the
    signs of its rotation. It is the leaf's place in the user's tree, so that fusion does not change
    a leaf's bytes. With `units`, the leaf's values are multiplied by those that lie there in the
    call's last operand. A bit of a record's mask stands for `segment` values, by default a 16th of
    a bucket.
    """

    size: int
    bits: int
    bucket_size: int
    rounding: str
    number: int
    rotation: bool = False
    units: UnitPlace | None = None
    segment: int = 0

    def __post_init__(self) -> None:
        if not self.segment:
            object.__setattr__(self, "segment", self.bucket_size // MASK_BITS)

    @property
    def bytes(self) -> int:
        return leaf_bytes(self.size, self.bits, self.bucket_size)

    @property
    def record(self) -> int:
        return record_bytes(self.bucket_size, self.bits)


@dataclasses.dataclass(frozen=True)
class Layout:
    """A fusion buffer that is cut into one chunk per rank.

    The records of all slots follow one another and take `total_bytes` in all. The record that
    starts at byte s belongs to chunk floor(s * world / total_bytes). Each chunk is one row, and all
    rows are as long as the longest chunk.
    """

    slots: tuple[Slot, ...]
    world: int

    @functools.cached_property
    def _hash(self) -> int:
        return hash((self.slots, self.world))

    def __hash__(self) -> int:  # on every bind; cached, as there may be hundreds of slots
        return self._hash

    @functools.cached_property
    def starts(self) -> tuple[int, ...]:
        """The first byte of every slot, followed by the end of the last one."""
        out = [0]
        for f in self.slots:
            out.append(out[-1] + f.bytes)
        return tuple(out)

    @property
    def total_bytes(self) -> int:
        return self.starts[-1]

    @functools.cached_property
    def begins(self) -> tuple[int, ...]:
        """The first byte of every chunk, followed by the end: `world + 1` record boundaries."""
        total, out, i = self.total_bytes, [], 0
        for w in range(self.world):
            target = -(-w * total // self.world)
            while i < len(self.slots) and self.starts[i + 1] <= target:
                i += 1
            out.append(self._boundary(i, target))
        return (*out, total)

    def _boundary(self, i: int, target: int) -> int:
        """Returns the first record start at or after `target`, which is a byte of slot `i`."""
        if i == len(self.slots):
            return self.total_bytes
        start, record = self.starts[i], self.slots[i].record
        return min(start + -(-(target - start) // record) * record, self.starts[i + 1])

    @property
    def chunk_bytes(self) -> int:
        return max(b - a for a, b in itertools.pairwise(self.begins))

    @functools.lru_cache(maxsize=1024)  # noqa: B019 - a layout is a value
    def with_units(self, places: tuple[UnitPlace | None, ...]) -> Layout:
        """Returns the layout of the same bytes with units in these places."""
        pairs = zip(self.slots, places, strict=True)
        return Layout(tuple(dataclasses.replace(f, units=u) for f, u in pairs), self.world)

    def without_units(self) -> Layout:
        return self.with_units((None,) * len(self.slots))

    @property
    def has_units(self) -> bool:
        """Whether a call has the operand with the units."""
        return any(f.units is not None for f in self.slots)

    @property
    def numbers(self) -> list[int]:
        """A kernel call's `slots`: nine numbers per slot (xla_ffi/handlers/operands.h)."""
        numbers: list[int] = []
        for s in self.slots:
            numbers += (s.bits, s.bucket_size, ROUNDINGS.index(s.rounding), s.number)
            _, *place = s.units or (0, 0, 0, 0)
            numbers += (int(s.rotation), s.segment, *place)
        return numbers


@dataclasses.dataclass(frozen=True)
class Span:
    """A run of consecutive buckets of one slot that lie in one chunk."""

    slot: int
    first_bucket: int
    buckets: int
    values: tuple[int, int]  # [begin, end) in the leaf


def spans(layout: Layout, chunk: int) -> list[Span]:
    """Returns the pieces of leaves that chunk number `chunk` carries, in order."""
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
