"""Bucketed max-min quantization (CGX)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Literal, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from cgx_jax._types import Key, Shaped, Words
from cgx_jax.arguments import store_whole
from cgx_jax.compressors import buckets
from cgx_jax.compressors.base import CodedLeaf, PayloadCompressor
from cgx_jax.compressors.codes import Arrays, ChunkCode, WholeCode, folded
from cgx_jax.compressors.packing import size_of
from cgx_jax.kernels import primitives, reference, scaling
from cgx_jax.kernels.primitives import NO_RANK, Sent
from cgx_jax.kernels.scaling import Residuals
from cgx_jax.kernels.units import Units, each
from cgx_jax.kernels.wire import (
    GROUP,
    MAX_BITS,
    MAX_BUCKET,
    ROUNDINGS,
    Layout,
    Slot,
    leaf_bytes,
    mask_segment,
)


@dataclasses.dataclass(frozen=True)
class Quantize(PayloadCompressor):
    """Rounds each bucket's values to `2**bits` even levels between its minimum and maximum.

    `bits` is 1 to 8, and codes are packed without gaps. `bucket_size` counts values and is a
    multiple of 32. Values are f32, bf16 or f16. A value costs bits + 64 / bucket_size bits on the
    wire. A bucket with a non-finite value, or whose range overflows fp32, decodes to NaN.

    Without rotation, rounding to nearest moves a value by up to half a level of its bucket, (max -
    min) / (2**bits - 1) / 2, which at 1 bit is half of the bucket's range. `error_bound` has the
    bounds of all options.

    `rounding` is one of:

    * "nearest".
    * "stochastic": unbiased; it needs a key.
    * "correlated": also unbiased. It spreads the noise evenly over the ranks of an all-reduce, so
      their errors cancel more often than independent errors do (Suresh et al., ICML 2022). With the
      reduction "gather_sum" it is the same as "stochastic".

    `rotation` multiplies each bucket by random signs and a Hadamard transform, in blocks of up to
    512 values, before it is quantized. Decoding reverses both. An outlier then does not widen the
    range of all other values. With rounding to nearest, rotation also clips the range. The clip has
    the least mean square error for normally distributed values, which rotated values resemble. It
    applies only to buckets that are one block: their number of values is a power of two, up to 512.
    Rotation costs no bytes, and on gradients it saves more than a bit. The error of a single value
    is then bounded only by its bucket's norm. A non-finite value still spoils its whole bucket
    (Suresh et al., ICML 2017; Vargaftik et al., ICML 2022).

    Rows of zeros stay exactly 0 if they are 0 on every rank, such as rows of an embedding that no
    rank looked up. A row is the leaf's last dimension, of bucket_size / 16 values or more (a little
    more if it does not divide bucket_size). A single 0 is rounded like any other value. The
    reduction "ring" and levels cut leaves of few rows within rows, and may move rows of zeros.

    Raises ValueError for options outside these limits, TypeError for options of a wrong type, and,
    on encoding, TypeError for another dtype and ValueError for a missing key. Source: CGX (Markov
    et al., Middleware 2022).
    """

    carries_nonfinite = True

    bits: int = 4
    bucket_size: int = 512
    rounding: Literal["nearest", "stochastic", "correlated"] = "nearest"
    rotation: bool = False

    def __post_init__(self) -> None:
        for name in ("bits", "bucket_size"):
            store_whole(self, name)
        if not 1 <= self.bits <= MAX_BITS:
            raise ValueError(
                f"Quantize: bits={self.bits} is outside 1..{MAX_BITS}; use Identity() to send "
                "values exactly, or Cast(jnp.bfloat16) for 16 bits."
            )
        if self.bucket_size < GROUP or self.bucket_size % GROUP:
            above = max(1, -(-self.bucket_size // GROUP)) * GROUP
            raise ValueError(
                f"Quantize: bucket_size={self.bucket_size} is not a positive multiple of {GROUP}; "
                f"the next multiple is {above}."
            )
        if self.bucket_size > MAX_BUCKET:
            raise ValueError(
                f"Quantize: bucket_size={self.bucket_size} is above {MAX_BUCKET}; a bucket ends "
                "with its leaf, so a smaller number may hold whole leaves, too."
            )
        if self.rounding not in ROUNDINGS:
            known = ", ".join(repr(r) for r in ROUNDINGS)
            raise ValueError(f"Quantize: rounding={self.rounding!r} is unknown; use {known}.")
        if not isinstance(self.rotation, bool):
            raise TypeError(f"Quantize: rotation={self.rotation!r} is not a bool.")

    @property
    def unbiased(self) -> bool:
        return self.rounding != "nearest"

    @property
    def needs_key(self) -> bool:
        return self.unbiased

    @property
    def shares_noise(self) -> bool:
        return self.rounding == "correlated"

    @property
    def block_size(self) -> int:
        return self.bucket_size

    @property
    def codec_work(self) -> frozenset[str]:
        return super().codec_work | ({"rotation"} if self.rotation else set())

    @property
    def feedback_scale(self) -> float | None:
        # The residual of a bucket has a range of at most 1 / levels of the bucket's own range
        # (nearest), or twice that (stochastic, with a level less from 3 bits on). From 2 bits on
        # that factor is under 1, so the residual shrinks from step to step: a max-min code
        # contracts in the range, though not in the Euclidean norm. With 1 bit it contracts in
        # neither. If it is unbiased, the variance of a bucket is then at most ω |x|².
        if self.bits > 1:
            return 1.0
        return 1 / (1 + self.bucket_size / 2) if self.unbiased else None

    @property
    def width(self) -> int:
        return self.bits

    @classmethod
    def squared_errors(cls, candidates: Sequence[Any], rows: jax.Array, filled: Any) -> jax.Array:
        """Returns errors from the quantizer's arithmetic only: nothing is packed.

        For random rounding they are expectations. The signs of a rotation differ from the signs
        with which the leaf is sent, which changes nothing on average. Units are not rounded to
        bf16, and segments of zeros are not exact. Candidates that differ only in bits are computed
        together, since each operation takes time to compile.
        """
        runs, length = rows.shape
        here = np.arange(length) < np.asarray(filled)[:, None]
        columns: list[Any] = [None] * len(candidates)
        kinds = [(c.bucket_size, c.unbiased, c.rotation) for c in candidates]
        for size, unbiased, rotation in dict.fromkeys(kinds):
            own = [i for i, kind in enumerate(kinds) if kind == (size, unbiased, rotation)]
            bits = np.array([candidates[i].bits for i in own])
            levels = (2.0**bits - 1).astype(np.float32)[None]  # [1, own]
            values = jnp.where(here, rows, 0) if rotation else rows
            blocks = values.reshape(-1, size)
            if rotation:
                blocks = reference.rotate(blocks, 0, 0)
            low, high = blocks.min(axis=1)[:, None], blocks.max(axis=1)[:, None]  # [blocks, own]
            if rotation and not unbiased and reference.one_block(size):
                limits = jax.vmap(reference.normal_limits, (None, 0), 1)(blocks, bits)
                low, high = jnp.maximum(low, -limits), jnp.minimum(high, limits)
            unit = ((high - low) / levels)[:, None]  # [blocks, 1, own]
            level = (blocks[:, :, None] - low[:, None]) / jnp.where(unit > 0, unit, 1)
            nearest = jnp.clip(jnp.floor(level + 0.5), 0, levels[None])
            up = level - jnp.floor(level)
            moved = up * (1 - up) if unbiased else jnp.square(level - nearest)
            error = (moved * jnp.square(unit)).reshape(runs, length, len(own))
            if rotation:  # the error of all sent values; rotating back scales squares
                error = error * reference.squares_turned_back(size)
            else:
                error = jnp.where(here[..., None], error, 0)
            for i, sums in zip(own, error.sum(axis=1).T, strict=True):
                columns[i] = sums
        return jnp.stack(columns, axis=1)

    def wire_bits(self, shape: int | Sequence[int], dtype: DTypeLike = jnp.float32) -> int:
        return 8 * leaf_bytes(size_of(shape), self.bits, self.bucket_size)

    def slot(self, shape: int | Sequence[int], number: int = 0) -> Slot:
        """Returns this compressor's slot for a leaf of this shape, or size, in a fusion buffer."""
        shape = (shape,) if isinstance(shape, int) else tuple(shape)
        return Slot(
            math.prod(shape),
            self.bits,
            self.bucket_size,
            self.rounding,
            number,
            rotation=self.rotation,
            segment=mask_segment((1, *shape)[-1], self.bucket_size),
        )

    @classmethod
    def chunk_kernels(cls, leaves: tuple[CodedLeaf, ...], world: int) -> ChunkCode:
        return QuantizedChunks(cls._layout(leaves, world))

    @classmethod
    def whole_kernels(cls, leaves: tuple[CodedLeaf, ...]) -> WholeCode:
        return QuantizedWhole(cls._layout(leaves, 1))

    @staticmethod
    def _layout(leaves: tuple[CodedLeaf, ...], world: int) -> Layout:
        # A buffer's leaves are of one family.
        slots = (cast(Quantize, x.compressor).slot(x.shape, x.number) for x in leaves)
        return Layout(tuple(slots), world)

    def error_bound(self, x: ArrayLike) -> jax.Array:
        """Returns half a unit (nearest) or one (stochastic), plus rounding to fp32 and x's dtype.

        Rounding adds 16 ulps of the bucket's largest magnitude, half an ulp of a 16-bit result,
        and, for subnormal units, the smallest normal number for each level. Buckets that decode to
        NaN have an infinite bound. In a rotated bucket one value may take the error of all values,
        so the bound is a multiple of the bucket's L2 norm. It is infinite where a result may exceed
        the dtype's largest value, and where the sum of a rotated bucket may overflow fp32.
        """
        rows = buckets.split(x, self.bucket_size, edge=True)
        spread = buckets.maximum(rows, axis=1) + buckets.maximum(-rows, axis=1)
        levels = 2**self.bits - 1
        unit = spread / levels * (1 + 2.0**-7)  # rounded up to bf16 beside zeros
        largest = buckets.maximum(jnp.abs(rows), axis=1)
        bound = unit * (1.0 if self.unbiased else 0.5) + largest * 2.0**-20
        info = jnp.finfo(jnp.float32)
        lost = float(2**self.bits * info.tiny)
        if self.rotation:
            # No rotated value moves by more than a unit, or half a unit when rounded to nearest. A
            # unit is at most twice the bucket's norm over the levels, before it is rounded up to
            # bf16. A clipped value moves by less than itself. A power of two scales large and small
            # values before they are squared.
            power = jnp.select(
                [largest > 2.0**60, largest < 2.0**-60, largest < 2.0**-20],
                [2.0**-100, 2.0**100, 2.0**60],
                1.0,
            )
            scaled = rows * power[:, None]
            norm = jnp.sqrt(jnp.square(scaled).sum(axis=1))
            outward = (1 + 2.0**-7) / levels
            stretch = math.sqrt(self.bucket_size) * outward * (2 if self.unbiased else 1)
            if not self.unbiased:
                stretch = max(
                    stretch, math.hypot(1, float(reference.NORMAL_RANGE[self.bits]) * outward)
                )
            bound = norm * (stretch + 2.0**-16) * (1 / power)
            tail = jnp.size(x) % self.bucket_size
            sizes = [self.bucket_size, *([tail + -tail % GROUP] if tail else [])]
            blocks = [min(n & -n, 512) for n in sizes]
            # Subnormal numbers may be flushed to zero: in every code, and in both directions at the
            # start of every stage of the transform, where later stages enlarge the error. One value
            # may take all that a bucket loses.
            stages = 2 / (1 - math.sqrt(0.5)) * math.sqrt(max(blocks))
            lost = math.sqrt(self.bucket_size) * (lost + stages * float(info.tiny))
            # Rotated values stay below the sum of a block's magnitudes over the root of its size.
            forward = 0.5 ** min((block.bit_length() - 1) // 2 for block in blocks)
            most = float(info.max) * 0.98 * 2.0**-100
            fits = jnp.abs(scaled).sum(axis=1) * (2 * forward) < most
            fits |= largest <= 2.0**60
            bound = jnp.where(fits, bound, jnp.inf)
        bound = bound + lost
        if jnp.result_type(x) != jnp.float32:
            bound = bound + (largest + bound) * float(jnp.finfo(jnp.result_type(x)).eps) / 2
            bound = bound + float(jnp.finfo(jnp.result_type(x)).smallest_subnormal)
        # Beside zeros, the topmost level lies up to 2^-7 of the range above the maximum.
        most = float(jnp.finfo(jnp.result_type(x)).max)
        reach = largest + spread * 2.0**-7 + (bound if self.rotation else 0)
        fits = (reach < most) & (spread * (1 + 2.0**-7) < float(info.max))
        bound = jnp.where(fits, bound, jnp.inf)
        return buckets.of_values(bound[:, None], self.bucket_size, x)

    def encode(self, x: ArrayLike, *, key: Key = None) -> jax.Array:
        x = jnp.asarray(x)
        if not self.supports(x.dtype):
            raise TypeError(
                f"{self}: cannot encode {x.dtype}; it takes float32, bfloat16, float16."
            )
        words: Any = np.zeros(2, np.uint32)
        if self.needs_key:
            buckets.require_key(self, key)
            words = buckets.words(key)
        payload, _ = primitives.encode(Sent(words, [x]), Layout((self.slot(x.shape),), 1))
        return payload.reshape(-1)

    def decode(self, payload: jax.Array, shape: Sequence[int], dtype: DTypeLike) -> jax.Array:
        like = jax.ShapeDtypeStruct(tuple(shape), dtype)
        return primitives.decode(payload, Layout((self.slot(like.shape),), 1), [like])[0]


# The codes of fusion buffers, in which the kernels handle all leaves in one call.


@dataclasses.dataclass(frozen=True)
class QuantizedChunks(ChunkCode):
    """Chunks cut at bucket boundaries; one kernel call per phase."""

    layout: Layout

    @property
    def row_bytes(self) -> int:
        return self.layout.chunk_bytes

    def encode(self, sent: Sent, *, residual: bool) -> tuple[jax.Array, Residuals]:
        return primitives.encode(sent, self.layout, residual=residual)

    def reduce(
        self, sent: Sent, rows: jax.Array, divisor: float, residuals: Residuals
    ) -> tuple[jax.Array, Residuals]:
        return primitives.reduce(sent, rows, self.layout, divisor=divisor, residuals=residuals)

    def decode(
        self, rows: jax.Array, like: Sequence[Shaped], units: Units | None
    ) -> list[jax.Array]:
        return primitives.decode(rows, self.layout, like, units=units)


@dataclasses.dataclass(frozen=True)
class QuantizedWhole(WholeCode):
    """Whole leaves one after the other; one kernel call per direction."""

    layout: Layout

    @property
    def row_bytes(self) -> int:
        return self.layout.total_bytes

    def encode(self, sent: Sent, *, residual: bool) -> tuple[jax.Array, Residuals]:
        # Whole leaves have no own chunk.
        whole = sent._replace(words=self.words(sent.words, sent.rank), rank=NO_RANK)
        rows, lost = primitives.encode(whole, self.layout, residual=residual)
        return rows.reshape(-1), lost

    def sum(
        self, rows: jax.Array, like: Sequence[Shaped], units: Units | None, divisor: float
    ) -> list[jax.Array]:
        # All decoded payloads, including this rank's own, are added to zeros: all ranks add the
        # same numbers.
        zeros = [
            jnp.zeros(x.shape, x.dtype if unit is None else jnp.float32)
            for x, unit in zip(like, each(units, len(like)), strict=True)
        ]
        rank = jnp.int32(NO_RANK)
        sums = primitives.accumulate(rank, rows, zeros, self.layout, divisor=divisor)
        return scaling.all_decoded(sums, units, like)

    def accumulate(
        self, rank: jax.Array, rows: jax.Array, own: Arrays, divisor: float
    ) -> list[jax.Array]:
        return primitives.accumulate(rank, rows, own, self.layout, divisor=divisor)

    def decode(self, rows: jax.Array, like: Sequence[Shaped]) -> list[jax.Array]:
        return jax.vmap(lambda row: primitives.decode(row, self.layout, like))(rows)

    def words(self, seed: Words, rank: ArrayLike) -> Words:
        if any(slot.rounding == "correlated" for slot in self.layout.slots):
            # Kernels divide noise among the ranks only in a chunked buffer. In a whole buffer all
            # ranks would draw the same noise, and their errors would add up. Independent noise
            # averages out.
            return folded(seed, rank)
        return seed
