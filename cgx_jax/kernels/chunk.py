"""`reduce` in plain jnp for the chunk that a rank owns, with a program size independent of ranks.

The rank decides which buckets the chunk has, and it is known only at run time. With one branch per
rank, the program would grow with the number of ranks, and `vmap` would compute every branch. The
program therefore has one piece per run of equal buckets: the full buckets of a leaf, and its
shorter last one. A piece handles as many buckets of its run as any chunk carries, starting where
the rank's chunk begins.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from cgx_jax import _compat
from cgx_jax.kernels.reference import Buckets, add_peers, divide
from cgx_jax.kernels.wire import Layout, Slot, record_bytes, spans


@dataclasses.dataclass(frozen=True)
class _Run:
    """Consecutive buckets of `n` values in one slot, and the part of them that each chunk carries.

    `start` is the place of the run's first value in the leaf, and `number` is the number of its
    first bucket there. The other arrays have one entry per chunk. A chunk carries `count` buckets
    of the run, from bucket `first` of the run on. Their records begin at byte `at` of the chunk, or
    at its end if it carries none.
    """

    slot: int
    start: int
    number: int
    buckets: int
    n: int
    record: int
    first: np.ndarray
    count: np.ndarray
    at: np.ndarray

    @property
    def most(self) -> int:
        """The largest number of buckets that a chunk carries."""
        return int(self.count.max())


def _runs(layout: Layout) -> list[_Run]:
    """Returns the runs of a layout in the order of their records."""
    pieces = [(s, w) for w in range(layout.world) for s in spans(layout, w)]
    runs = []
    for i, f in enumerate(layout.slots):
        full, tail = divmod(f.size, f.bucket_size)
        for number, buckets, n in ((0, full, f.bucket_size), (full, 1, tail)):
            if not buckets * n:
                continue
            first, count = np.zeros((2, layout.world), np.int64)
            at = np.diff(layout.begins)
            for s, w in pieces:
                begin = max(s.first_bucket, number)
                end = min(s.first_bucket + s.buckets, number + buckets)
                if s.slot == i and begin < end:
                    first[w], count[w] = begin - number, end - begin
                    at[w] = layout.starts[i] + begin * f.record - layout.begins[w]
            start = number * f.bucket_size
            tables = (t.astype(np.int32) for t in (first, count, at))
            runs.append(_Run(i, start, number, buckets, n, record_bytes(n, f.bits), *tables))
    return runs


def reduce(
    key: jax.Array,
    rank: jax.Array,
    payload: jax.Array,
    *leaves: jax.Array,
    layout: Layout,
    divisor: float,
) -> list[jax.Array]:
    """Returns the chunk that this rank owns, reduced and encoded: [u8[chunk_bytes], *residuals].

    Any `leaves` beyond those of the layout are residuals. They are returned with the chunk's values
    replaced by `divisor` times what encoding the chunk lost. Chunks must be under 2 GiB.
    """
    residuals = list(leaves[len(layout.slots) :])
    runs = _runs(layout)
    # Room for records past the chunk's own: those of the next run overwrite them, or the end is
    # cleared.
    margin = max((run.most * run.record for run in runs), default=0)
    sent = jnp.pad(payload, ((0, 0), (0, margin)))
    out = _zeros(layout.chunk_bytes + margin, like=payload)
    for run in runs:
        i, f = run.slot, layout.slots[run.slot]
        window = _Window.of(run, rank)
        old = [window.cut(r) for r in residuals[i : i + 1]]

        def own(
            run: _Run = run, f: Slot = f, window: _Window = window, old: list[jax.Array] = old
        ) -> tuple[jax.Array, list[jax.Array]]:
            records = window.records(sent)
            made, lost = _reduced(window, key, rank, records, leaves[run.slot], f, divisor)
            here = window.here[:, None]
            return made, [jnp.where(here, lost.astype(x.dtype), x) for x in old]

        def nothing(
            run: _Run = run, old: list[jax.Array] = old
        ) -> tuple[jax.Array, list[jax.Array]]:
            return _zeros(run.most * run.record, like=payload), old

        if run.count.all():
            made, kept = own()
        else:
            made, kept = lax.cond(jnp.asarray(run.count)[rank] > 0, own, nothing)
        out = lax.dynamic_update_slice(out, made, (window.at,))
        for new in kept:
            residuals[i] = window.put(new, residuals[i])
    used = jnp.asarray(np.diff(layout.begins).astype(np.int32))[rank]
    inside = jnp.arange(layout.chunk_bytes, dtype=jnp.int32) < used
    return [jnp.where(inside, out[: layout.chunk_bytes], 0), *residuals]


def _zeros(n: int, like: jax.Array) -> jax.Array:
    # Both branches must return the same type, but a constant does not vary over the mesh.
    return _compat.vary_over(jnp.zeros((n,), jnp.uint8), _compat.varying_axes(like))


@dataclasses.dataclass(frozen=True)
class _Window:
    """`run.most` consecutive buckets of a run, which include all that the chunk carries of it.

    The window must end within the run. It may therefore begin at a bucket `begin` before the
    chunk's `first` bucket of the run. `at` is the byte in the chunk at which the record of `first`
    begins.
    """

    run: _Run
    rank: jax.Array
    first: jax.Array
    begin: jax.Array
    at: jax.Array
    here: jax.Array  # bool[most]: which buckets are the chunk's

    @classmethod
    def of(cls, run: _Run, rank: jax.Array) -> _Window:
        first, count, at = (jnp.asarray(x)[rank] for x in (run.first, run.count, run.at))
        begin = jnp.minimum(first, run.buckets - run.most)
        place = jnp.arange(run.most, dtype=jnp.int32) + (begin - first)
        return cls(run, rank, first, begin, at, (place >= 0) & (place < count))

    def buckets(self, f: Slot) -> Buckets:
        """Returns the window's buckets in their leaf `f`."""
        run = self.run
        begins = np.minimum(run.first, run.buckets - run.most).astype(np.int64)
        phases = (run.number + begins) * f.bucket_size % f.segment
        phase = jnp.asarray(phases.astype(np.uint32))[self.rank]
        return Buckets(f, run.n, run.number + self.begin, phase)

    def cut(self, leaf: jax.Array) -> jax.Array:
        """Returns the window's values, [most, n]."""
        run = self.run
        rows = leaf[run.start : run.start + run.buckets * run.n].reshape(run.buckets, run.n)
        return lax.dynamic_slice_in_dim(rows, self.begin, run.most)

    def put(self, rows: jax.Array, leaf: jax.Array) -> jax.Array:
        """Returns `leaf` with `rows` in the place that `cut` takes them from."""
        start = self.run.start + self.begin * self.run.n
        return lax.dynamic_update_slice(leaf, rows.reshape(-1), (start,))

    def records(self, rows: jax.Array) -> jax.Array:
        """Returns all ranks' records of the window, u8[world, most, record]; junk if unsent."""
        run = self.run
        sent = lax.dynamic_slice_in_dim(rows, self.at, run.most * run.record, 1)
        return self._turned(sent.reshape(len(rows), run.most, run.record), self.begin - self.first)

    def from_first(self, records: jax.Array) -> jax.Array:
        """Returns u8[most, record] of the window as bytes that begin with the chunk's first."""
        return self._turned(records[None], self.first - self.begin).reshape(-1)

    def _turned(self, records: jax.Array, by: jax.Array) -> jax.Array:
        if self.run.most == 1 or (self.run.first + self.run.most <= self.run.buckets).all():
            return records  # the window begins with the chunk's first bucket for every rank
        places = jnp.arange(self.run.most, dtype=jnp.int32) + by
        return jnp.take(records, jnp.clip(places, 0, self.run.most - 1), axis=1)


def _reduced(
    window: _Window,
    key: jax.Array,
    rank: jax.Array,
    records: jax.Array,
    leaf: jax.Array,
    f: Slot,
    divisor: float,
) -> tuple[jax.Array, jax.Array]:
    """Returns records from the chunk's first on, u8[bytes], and `divisor` times their loss."""
    buckets = window.buckets(f)
    values = window.cut(leaf).astype(jnp.float32)
    own = [(buckets.coded(values), buckets.zeros(values))]
    ((total, mask),) = add_peers(rank, records, own, lambda r: [buckets.addend(r)])
    total = divide(total, divisor)
    made = buckets.encode(total, mask, key, 0)
    decoded, mask = buckets.decode(made)
    lost = buckets.turned_back(total - decoded, mask)
    return window.from_first(made), lost * np.float32(divisor)
