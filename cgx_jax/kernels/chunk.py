"""`reduce` in plain jnp: the chunk that a rank owns, in a program as long for any number of ranks.

Which buckets the chunk has depends on the rank, which is known at run time only. A branch for each
rank would make the program grow with their number, and under `vmap` compute every branch. So there
is one piece of program for each run of equal buckets, full ones and the last one of a leaf: it
takes as many buckets as any chunk carries of them, from where the rank's chunk begins.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from cgx_jax import _compat
from cgx_jax.kernels.reference import add_peers, decode_buckets, divide, encode_buckets, rotate
from cgx_jax.wire import GROUP, Layout, Slot, record_bytes, spans


@dataclasses.dataclass(frozen=True)
class _Run:
    """Consecutive buckets of `n` values of one slot, and what each chunk carries of them.

    `start` and `number` are of the first one: its place in the leaf, and its number there. By the
    chunk: `first` counts from that one, of `count` buckets, whose records begin at byte `at` of the
    chunk, or at its end where it carries none.
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
        """Buckets that a chunk carries at most."""
        return int(self.count.max())


def _runs(layout: Layout) -> list[_Run]:
    """In the order of their records."""
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
    """The chunk this rank owns, reduced and encoded: [u8[chunk_bytes]].

    Leaves past the layout's are residuals; they follow, with what the chunk's encoding lost, times
    `divisor`, in its place. Chunks are under 2 GiB.
    """
    residuals = list(leaves[len(layout.slots) :])
    runs = _runs(layout)
    # Records past those of the chunk: the next run's are written over them, or the end is cleared.
    margin = max((run.most * run.record for run in runs), default=0)
    sent = jnp.pad(payload, ((0, 0), (0, margin)))
    out = _zeros(layout.chunk_bytes + margin, like=payload)
    for run in runs:
        i, f = run.slot, layout.slots[run.slot]
        window = _Window.of(run, rank)
        old = [window.cut(r) for r in residuals[i : i + 1]]

        def own(run=run, f=f, window=window, old=old):  # type: ignore[no-untyped-def]
            records = window.records(sent)
            made, lost = _reduced(window, key, rank, records, leaves[run.slot], f, divisor)
            here = window.here[:, None]
            return made, [jnp.where(here, lost.astype(x.dtype), x) for x in old]

        def nothing(run=run, old=old):  # type: ignore[no-untyped-def]
            return _zeros(run.most * run.record, like=payload), old

        if run.count.all():
            made, kept = own()
        else:
            made, kept = lax.cond(jnp.asarray(run.count)[rank] > 0, own, nothing)
        out = lax.dynamic_update_slice(out, made, (window.at,))
        for new in kept:
            residuals[i] = window.put(new, residuals[i])
    used = jnp.asarray(np.diff(layout.begins).astype(np.int32))[rank]
    inside = jnp.arange(layout.chunk_bytes) < used
    return [jnp.where(inside, out[: layout.chunk_bytes], 0), *residuals]


def _zeros(n: int, like: jax.Array) -> jax.Array:
    # A constant does not vary over the mesh as what else a branch returns does.
    return _compat.vary_over(jnp.zeros((n,), jnp.uint8), _compat.varying_axes(like))


@dataclasses.dataclass(frozen=True)
class _Window:
    """`run.most` buckets of a run that hold all of the chunk's.

    They end within the run, so they may begin before the chunk's, at bucket `begin` of the run and
    not `first`; `at` is the byte in the chunk of the record of `first`.
    """

    run: _Run
    first: jax.Array
    begin: jax.Array
    at: jax.Array
    here: jax.Array  # bool[most]: which are the chunk's

    @classmethod
    def of(cls, run: _Run, rank: jax.Array) -> _Window:
        first, count, at = (jnp.asarray(x)[rank] for x in (run.first, run.count, run.at))
        begin = jnp.minimum(first, run.buckets - run.most)
        place = jnp.arange(run.most, dtype=jnp.int32) + (begin - first)
        return cls(run, first, begin, at, (place >= 0) & (place < count))

    def cut(self, leaf: jax.Array) -> jax.Array:
        """The window's values, [most, n]."""
        run = self.run
        rows = leaf[run.start : run.start + run.buckets * run.n].reshape(run.buckets, run.n)
        return lax.dynamic_slice_in_dim(rows, self.begin, run.most)

    def put(self, rows: jax.Array, leaf: jax.Array) -> jax.Array:
        """The inverse of `cut`: `leaf` with `rows` in their place."""
        start = self.run.start + self.begin * self.run.n
        return lax.dynamic_update_slice(leaf, rows.reshape(-1), (start,))

    def records(self, rows: jax.Array) -> jax.Array:
        """What every rank sent of the window, u8[world, most, record]; what nobody sent is junk."""
        run = self.run
        sent = lax.dynamic_slice_in_dim(rows, self.at, run.most * run.record, 1)
        return self._turned(sent.reshape(len(rows), run.most, run.record), self.begin - self.first)

    def from_first(self, records: jax.Array) -> jax.Array:
        """u8[most, record] of the window to bytes that begin with the chunk's own."""
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
    """The window's records from the chunk's on, u8[bytes], and `divisor` times what they lose."""
    number, n = window.run.number + window.begin, window.run.n
    x = window.cut(leaf).astype(jnp.float32)
    if f.rotation:
        x = rotate(jnp.pad(x, ((0, 0), (0, -n % GROUP))), f.number, number)
    decode = functools.partial(decode_buckets, n=x.shape[1], f=f)
    total = divide(add_peers(rank, records, x, decode), divisor)
    made = encode_buckets(total, f, number, key, 0)
    lost = total - decode(made)
    if f.rotation:
        lost = rotate(lost, f.number, number, back=True)[:, :n]
    return window.from_first(made), lost * np.float32(divisor)
