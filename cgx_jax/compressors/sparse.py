"""Sparse codes: a few of a leaf's values, and their positions."""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from cgx_jax._types import Key
from cgx_jax.arguments import store_whole
from cgx_jax.axes import in_rank_order
from cgx_jax.compressors import buckets
from cgx_jax.compressors.base import PayloadCompressor
from cgx_jax.compressors.lossless import Identity
from cgx_jax.compressors.packing import pack, packed_bytes, size_of, unpack
from cgx_jax.compressors.qsgd import QSGD
from cgx_jax.kernels import codes
from cgx_jax.kernels.constants import LONGEST_BUCKET

Keep = float | int


def store_keep(code: Any, name: str = "keep") -> None:
    """Stores option `name`: a share in (0, 1], a float, or a count >= 1, an int; else raises."""
    keep = getattr(code, name)
    if not isinstance(keep, float):
        store_whole(code, name, 1)
    elif keep == 1:  # 1.0 equals 1, so a program of one code would serve the other
        object.__setattr__(code, name, math.nextafter(1.0, 0.0))
    elif not 0 < keep <= 1:
        raise ValueError(
            f"{type(code).__name__}: {name}={keep} must be in (0, 1], the share of values to send. "
            "To send a number of values, pass an int."
        )


def kept(code: Any, size: int, name: str = "keep") -> int:
    """Returns how many of `size` values option `name` keeps; raises ValueError if it is more."""
    keep: Keep = getattr(code, name)
    if isinstance(keep, float):
        return math.ceil(keep * size * (1 - 1e-12))  # 0.07 * 100 is a little over 7
    if keep > size > 0:
        raise ValueError(
            f"{type(code).__name__}: {name}={keep} is more than the {size} values of the leaf; "
            f"pass a share such as {name}=0.01, or add a rule that reduces such leaves exactly."
        )
    return min(keep, size)


def position_bits(size: int) -> int:
    """Returns the bits of a position in 0..`size`; `size`, past the end, marks no value."""
    return max(1, size.bit_length())


def largest(x: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """Returns the places of the largest magnitudes of fp32[n], int32[count], and the values there.

    Places ascend. Of equal magnitudes the first are taken, and NaN counts as the largest.
    """
    if not count:
        return jnp.zeros(0, jnp.int32), x[:0]
    at, taken = codes.call("cgx_largest", largest_jnp, x, count=count)
    return at, taken


def largest_jnp(x: jax.Array, *, count: int) -> list[jax.Array]:
    """The kernel cgx_largest, in plain jnp."""
    at = jnp.sort(lax.top_k(jnp.abs(x), count)[1])
    return [at, x[at]]


def largest_of_buckets_jnp(x: jax.Array, *, keep: int, bucket_size: int) -> list[jax.Array]:
    """The kernel cgx_largest_of_buckets, in plain jnp."""
    rows = buckets.split(x, bucket_size)
    at = jnp.sort(lax.top_k(jnp.abs(rows), keep)[1], axis=1)
    return [at.reshape(-1), jnp.take_along_axis(rows, at, axis=1).reshape(-1)]


def above_sampled_jnp(
    x: jax.Array, turns: jax.Array, *, count: int, stride: int, rank: int
) -> list[jax.Array]:
    """Returns places and values, in order, of up to `count` magnitudes at or above a threshold.

    The threshold is the `rank`-th largest magnitude of a sample: every `stride`-th value from
    turns[0] on. Zeros are below any threshold. If more than `count` values reach it, the first ones
    from turns[1] on are taken, continuing at the start after the end.
    """
    n = x.size
    # Bit patterns have the order of the magnitudes, with NaN above infinity. Comparing them does
    # not depend on which numbers a processor takes for zero.
    magnitude = lax.bitcast_convert_type(x, jnp.int32) & np.int32(0x7FFFFFFF)
    bound = jnp.maximum(lax.top_k(jnp.roll(magnitude, -turns[0])[::stride], rank)[0][-1], 1)
    above = jnp.roll(magnitude, -turns[1]) >= bound
    at = jnp.nonzero(above, size=count, fill_value=n)[0].astype(jnp.int32)
    at = jnp.sort(jnp.where(at == n, n, (at + turns[1]) % n))
    return [at, x.at[at].get(mode="fill", fill_value=0)]


@dataclasses.dataclass(frozen=True)
class _Sparse(PayloadCompressor):
    """Positions in as few bits as they need, and the values there, encoded by `values`."""

    selects: ClassVar[bool] = True

    values: PayloadCompressor = dataclasses.field(default=Identity(), kw_only=True)

    def __post_init__(self) -> None:
        if not isinstance(self.values, PayloadCompressor) or self.values.prepares:
            raise TypeError(
                f"{type(self).__name__}: values={self.values!r} must be a compressor that encodes "
                "any run of values, such as Quantize(8), Cast(jnp.bfloat16) or Identity()."
            )

    @abc.abstractmethod
    def count(self, size: int) -> int:
        """How many values of a leaf of `size` have a place in the payload."""

    @abc.abstractmethod
    def position_bits(self, size: int) -> int:
        """Bits of a position in a leaf of `size`."""

    @property
    def needs_key(self) -> bool:
        return self.values.needs_key

    @property
    def feedback_scale(self) -> float | None:
        return self.values.feedback_scale

    def wire_bits(self, shape: int | Sequence[int], dtype: DTypeLike = jnp.float32) -> int:
        n = size_of(shape)
        k = self.count(n)
        return 8 * (packed_bytes(k, self.position_bits(n)) + self.values.payload_bytes(k))

    def error_bound(self, x: ArrayLike) -> jax.Array:
        # A value that is not sent is lost entirely. A value that is sent may lose what the code of
        # values loses. All that is known of the values sent is that none exceeds the largest
        # magnitude.
        magnitude = jnp.abs(jnp.asarray(x).astype(jnp.float32))
        if not magnitude.size:
            return magnitude
        signs = jnp.where(np.arange(magnitude.size) % 2 == 0, 1.0, -1.0).astype(jnp.float32)
        coded = buckets.maximum(self.values.error_bound(signs * buckets.maximum(magnitude)))
        return buckets.rounded(jnp.maximum(magnitude, coded), x)


class _Positions(_Sparse):
    """Positions in the whole leaf, which `select` finds; the one past the end marks no value."""

    reductions: ClassVar[tuple[str, ...]] = ("gather_sum",)

    @abc.abstractmethod
    def select(self, x: jax.Array, count: int, key: Key) -> tuple[jax.Array, jax.Array]:
        """Returns distinct positions in fp32[n], int32[count], in order, and the values there.

        Position n, which may repeat, stands for no value and has the value 0.
        """

    def position_bits(self, size: int) -> int:
        return position_bits(size)

    def encode(self, x: ArrayLike, *, key: Key = None) -> jax.Array:
        flat = jnp.ravel(x).astype(jnp.float32)
        if self.needs_key:
            buckets.require_key(self, key)
        values_key = None
        if self.values.needs_key:
            assert key is not None
            key, values_key = jax.random.split(key)
        at, taken = self.select(flat, self.count(flat.size), key)
        coded = self.values.encode(taken, key=values_key)
        return jnp.concatenate([pack(at.astype(jnp.uint32), self.position_bits(flat.size)), coded])

    def decode(self, payload: jax.Array, shape: Sequence[int], dtype: DTypeLike) -> jax.Array:
        return self.decode_sum(payload[None], shape).astype(dtype)

    def decode_sum(self, payloads: jax.Array, shape: Sequence[int]) -> jax.Array:
        n = size_of(shape)
        k, bits = self.count(n), self.position_bits(n)

        def pairs(payload: jax.Array) -> tuple[jax.Array, jax.Array]:
            packed, coded = jnp.split(payload, [packed_bytes(k, bits)])
            return unpack(packed, bits, k), self.values.decode(coded, (k,), jnp.float32)

        def add(total: jax.Array, _: object, pairs: tuple[jax.Array, jax.Array]) -> jax.Array:
            # Each rank has a scatter of its own, and barriers keep them apart: a GPU adds the
            # values that one scatter has for a place in any order. The place `n` is dropped.
            places, values = pairs
            return lax.optimization_barrier(total.at[places].add(values, mode="drop"))

        at, taken = jax.vmap(pairs)(payloads)
        at = lax.bitcast_convert_type(at, jnp.int32)
        return in_rank_order(add, jnp.zeros(n, jnp.float32), (at, taken)).reshape(shape)


@dataclasses.dataclass(frozen=True)
class _Keeping(_Positions):
    """The positions of `keep` values: a share of the leaf (float), or a number (int)."""

    keep: Keep = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        store_keep(self)

    def count(self, size: int) -> int:
        return kept(self, size)


@dataclasses.dataclass(frozen=True)
class TopK(_Keeping):
    """The `keep` largest values in magnitude: a share of the leaf (float), or a number (int).

    A position takes ceil(log2(n + 1)) bits, and a value the bits of the code `values`. By default
    `values` is exact (fp32, 32 bits); `Cast(jnp.bfloat16)` and `Quantize(8)` are shorter. NaN
    counts as the largest. The code loses a share of at most 1 - k / n of the squares, so it needs
    error feedback. Every rank has its own positions, so payloads are gathered: the bytes that a
    rank receives grow with the number of ranks. With `BlockTopK` they do not.

    Raises ValueError for a share outside of (0, 1], for a number below 1 and, while tracing, for a
    number above the leaf's size; TypeError for a `values` code that cannot encode arbitrary runs of
    values. Source: Aji and Heafield (EMNLP 2017).
    """

    def select(self, x: jax.Array, count: int, key: Key) -> tuple[jax.Array, jax.Array]:
        return largest(x, count)


@dataclasses.dataclass(frozen=True)
class QSparse(TopK):
    """The largest values, quantized at random without bias: `TopK` with `QSGD` for its values.

    Sizes, dtypes and errors are those of `TopK`. Also raises ValueError for a `values` code that is
    biased or exact. Needs a key. Source: Qsparse-local-SGD (Basu et al., NeurIPS 2019).
    """

    values: PayloadCompressor = dataclasses.field(default=QSGD(), kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.values.unbiased or self.values.lossless:
            raise ValueError(
                f"QSparse: values={self.values} is biased or exact; pass an unbiased code, such "
                "as QSGD(7), or use TopK."
            )


@dataclasses.dataclass(frozen=True)
class Threshold(_Positions):
    """Every value whose magnitude is above `threshold`, as long as there is room for it.

    There is room for the share `capacity` of the leaf (float), or for that many values (int). The
    largest come first. Values without room and values up to the threshold stay in the residual. The
    payload is as large as that of `TopK` with `capacity` for `keep`, even when no value is sent.
    NaN is above any threshold. Needs error feedback. Raises ValueError for a negative threshold,
    and for a capacity as `TopK` does for `keep`. Source: Dutta et al. (AAAI 2020).
    """

    threshold: float = 0.0
    capacity: Keep = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        store_keep(self, "capacity")
        if not self.threshold >= 0:
            raise ValueError(f"Threshold: threshold={self.threshold} must be 0 or more.")

    def count(self, size: int) -> int:
        return kept(self, size, "capacity")

    def wants(self, x: jax.Array, arrived: jax.Array) -> jax.Array:
        return jnp.abs(x).astype(jnp.float32) > np.float32(self.threshold)

    def select(self, x: jax.Array, count: int, key: Key) -> tuple[jax.Array, jax.Array]:
        at, taken = largest(x, count)
        low = jnp.abs(taken) <= np.float32(self.threshold)
        at, taken = lax.sort([jnp.where(low, x.size, at), jnp.where(low, 0, taken)], num_keys=1)
        return at, taken


@dataclasses.dataclass(frozen=True)
class DGC(_Keeping):
    """About the `keep` largest values: those above a threshold that a sample of the leaf gives.

    The sample is every 400th value, but at least 16,384 values, from a random place on. Its
    quantile is the threshold. There is room for `keep` values. If more are above the threshold, the
    first ones after another random place are sent, so that none waits forever. The others stay in
    the residual. The payload is as large as that of `TopK`. The memory that belongs to it is
    `MomentumCorrection`, which corrects momentum. Raises as `TopK` does, and ValueError for a
    missing key. Source: deep gradient compression (Lin et al., ICLR 2018).
    """

    SAMPLE: ClassVar[int] = 16384
    STRIDE: ClassVar[int] = 400

    needs_key = True

    def wants(self, x: jax.Array, arrived: jax.Array) -> jax.Array:
        # The threshold depends on the key. Whatever is as large as a value that was sent is above
        # it.
        magnitude = jnp.abs(x)
        return magnitude >= magnitude.min(where=arrived, initial=jnp.inf)

    def select(self, x: jax.Array, count: int, key: Key) -> tuple[jax.Array, jax.Array]:
        n = x.size
        if not n:
            return jnp.zeros(0, jnp.int32), x
        stride = max(1, min(self.STRIDE, n // self.SAMPLE))
        rank = -(-count * -(-n // stride) // n)
        assert key is not None
        turns = (buckets.words(key) % np.uint32(n)).astype(jnp.int32)
        static = {"count": count, "stride": stride, "rank": rank}
        at, taken = codes.call("cgx_above_sampled", above_sampled_jnp, x, turns, **static)
        return at, taken


@dataclasses.dataclass(frozen=True)
class BlockTopK(_Sparse):
    """The `keep` largest values in magnitude of every bucket, which is a run of the leaf.

    A position takes ceil(log2(bucket_size)) bits, 9 in buckets of 512, and a value the bits of the
    code `values`, as in `TopK`. Any part of a leaf can be encoded by itself, so the leaf is cut
    into chunks. The owner of a chunk adds it up and again keeps the largest values, so the bytes do
    not grow with the number of ranks. If the large values lie in a few buckets, it keeps less of
    the squares than `TopK` does. It needs error feedback. Raises ValueError unless keep is
    1..bucket_size, TypeError for options that are not integers. Source: block-wise top-k as in
    CocktailSGD (Wang et al., ICML 2023).
    """

    keep: int = 5
    bucket_size: int = buckets.BUCKET

    def __post_init__(self) -> None:
        super().__post_init__()
        store_whole(self, "keep", 1, store_whole(self, "bucket_size", 1))

    @property
    def block_size(self) -> int:
        return self.bucket_size

    def count(self, size: int) -> int:
        return self.keep * buckets.count(size, self.bucket_size)

    def position_bits(self, size: int) -> int:
        return max(1, (self.bucket_size - 1).bit_length())

    def encode(self, x: ArrayLike, *, key: Key = None) -> jax.Array:
        flat = jnp.ravel(x).astype(jnp.float32)
        static = {"keep": self.keep, "bucket_size": self.bucket_size}
        if self.bucket_size > LONGEST_BUCKET:
            at, taken = largest_of_buckets_jnp(flat, **static)
        else:
            at, taken = codes.call("cgx_largest_of_buckets", largest_of_buckets_jnp, flat, **static)
        packed = pack(at.astype(jnp.uint32), self.position_bits(flat.size))
        return jnp.concatenate([packed, self.values.encode(taken, key=key)])

    def decode(self, payload: jax.Array, shape: Sequence[int], dtype: DTypeLike) -> jax.Array:
        like = jax.ShapeDtypeStruct(tuple(shape), dtype)
        k, bits = self.count(like.size), self.position_bits(like.size)
        packed, coded = jnp.split(payload, [packed_bytes(k, bits)])
        at = unpack(packed, bits, k).reshape(-1, self.keep)
        taken = self.values.decode(coded, (k,), jnp.float32).reshape(-1, self.keep)
        rows = jnp.zeros((len(at), self.bucket_size), jnp.float32)
        rows = rows.at[np.arange(len(at))[:, None], at].add(taken, mode="drop")
        return buckets.join(rows, like)
