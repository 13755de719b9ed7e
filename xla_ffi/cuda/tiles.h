// Reads and writes a bucket as a warp holds it, tile by tile. For device code only. buckets.h says
// how the lanes share a tile.
//
// A multiprocessor has half as many units for integer operations and conversions as for
// floating-point operations, and these kernels come near both its limits and the memory's. So the
// cost per value matters here: branches that all values of a tile share are taken once, outside the
// loops over values, and 16-bit values are converted two at a time.
#ifndef CGX_CUDA_TILES_H_
#define CGX_CUDA_TILES_H_

#include "cuda/kernels.h"
#include "cuda/warp.h"
#include "format/quantize.h"
#include "format/wire_format.h"

namespace cgx {
namespace {

constexpr int kHalfRows = kRows / 2;
constexpr int kColumns = 4;  // of a lane
constexpr int kTileColumns = kWarp / 2 * kColumns;
static_assert(kTileValues == kRows * kTileColumns, "the header tells what a tile holds");

struct Lane {
  int index;
  int half;  // 0: rows 0 to 3, 1: rows 4 to 7
  int column;

  __device__ Lane()
      : index(threadIdx.x % kWarp),
        half(index / (kWarp / 2)),
        column(index % (kWarp / 2) * kColumns) {}
};

// A lane's part of a tile.
struct Tile {
  float v[kHalfRows][kColumns];

  // Calls f(value, row, column) for each value.
  template <typename F>
  __device__ void each(F f) {
#pragma unroll
    for (int r = 0; r < kHalfRows; ++r) {
#pragma unroll
      for (int c = 0; c < kColumns; ++c) f(v[r][c], r, c);
    }
  }
  template <typename F>
  __device__ void each(F f) const {
#pragma unroll
    for (int r = 0; r < kHalfRows; ++r) {
#pragma unroll
      for (int c = 0; c < kColumns; ++c) f(v[r][c], r, c);
    }
  }
};

// A bucket of a piece as a lane sees it. It has at most 2^30 values, so indices in it are 32-bit.
struct Bucket {
  const Piece& piece;
  const LeafSeed& rotation_seed;
  int number;  // in the piece
  int values;
  int columns;
  int bits;
  DType dtype;
  bool rotated;
  Lane lane;

  __device__ Bucket(const Piece& piece, const LeafSeed& rotation_seed, int number)
      : piece(piece),
        rotation_seed(rotation_seed),
        number(number),
        values(number == piece.last ? piece.tail : piece.unit),
        columns(static_cast<int>((static_cast<unsigned>(values) + (kTailValues - 1)) / kTailValues *
                                 (kTailValues / kRows))),
        bits(static_cast<int>(piece.bits)),
        dtype(piece.dtype),
        rotated(piece.rotated) {}
  // A product of two unsigned 32-bit numbers is one instruction.
  __device__ int64_t times(uint32_t bytes) const {
    return static_cast<int64_t>(static_cast<uint64_t>(static_cast<uint32_t>(number)) * bytes);
  }
  __device__ int64_t bytes_before() const {
    const int64_t halves = times(2 * static_cast<uint32_t>(piece.unit));
    return dtype == DType::kF32 ? 2 * halves : halves;
  }
  __device__ const char* in() const { return piece.in + bytes_before(); }
  __device__ char* out() const { return piece.out + bytes_before(); }
  // Where the record lies; see Piece::record.
  __device__ int64_t record() const { return piece.record + times(piece.stride()); }
  // The bucket's number in its leaf.
  __device__ int64_t of_leaf() const { return piece.bucket + number; }
  __device__ Rotation rotation() const { return Rotation(columns, rotation_seed, of_leaf()); }
  __device__ int tiles() const { return (columns + kTileColumns - 1) / kTileColumns; }
  __device__ int column(int tile) const { return tile * kTileColumns + lane.column; }
  // Index in the bucket of the first of this lane's values in row r of its half.
  __device__ int index(int tile, int r) const {
    return (lane.half * kHalfRows + r) * columns + column(tile);
  }
  __device__ bool has(int tile) const { return column(tile) < columns; }
  // Whether some of its rows end early, which only happens in a leaf's last bucket.
  __device__ bool ragged() const { return values != kRows * columns; }
  // Whether some of its codes stand for no value. A rotated bucket has none: the rotation spreads
  // the values over all codes.
  __device__ bool padded() const { return ragged() && !rotated; }
  // Whether a lane has all values of its columns, and reads and writes four at once.
  __device__ bool whole() const { return piece.aligned && !ragged(); }
};

__device__ float load_item(const char* values, int i, DType dtype) {
  if (dtype == DType::kF32) return reinterpret_cast<const float*>(values)[i];
  const uint32_t half = reinterpret_cast<const uint16_t*>(values)[i];
  return dtype == DType::kBF16 ? widen_bf16<float>(half) : widen_f16<float>(half);
}

__device__ uint32_t narrow(float x, DType dtype) {
  return dtype == DType::kBF16 ? narrow_bf16<float>(x) : narrow_f16<float>(x);
}

__device__ void store_item(char* values, int i, DType dtype, float x) {
  if (dtype == DType::kF32) {
    reinterpret_cast<float*>(values)[i] = x;
  } else {
    reinterpret_cast<uint16_t*>(values)[i] = static_cast<uint16_t>(narrow(x, dtype));
  }
}

// Widens the two f16 values of a word. The processor's conversion is exact. It does not keep the
// payload of a NaN, but nothing reads that payload.
__device__ void widen_f16_pair(uint32_t word, float* low, float* high) {
#if defined(__CUDA_ARCH__)
  asm("{.reg .f16 a, b;\n mov.b32 {a, b}, %2;\n cvt.f32.f16 %0, a;\n cvt.f32.f16 %1, b;}"
      : "=f"(*low), "=f"(*high)
      : "r"(word));
#else
  *low = widen_f16<float>(word & 0xffffu);
  *high = widen_f16<float>(word >> 16);
#endif
}

// Rounds two values to nearest even; they become the low and the high half of a word. Neither may
// be NaN.
__device__ uint32_t narrow_bf16_pair(float low, float high) {
#if defined(__CUDA_ARCH__)
  uint32_t word;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  return word;
#else
  return narrow_bf16<float>(low) | narrow_bf16<float>(high) << 16;
#endif
}
__device__ uint32_t narrow_f16_pair(float low, float high) {
#if defined(__CUDA_ARCH__)
  uint32_t word;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  return word;
#else
  return narrow_f16<float>(low) | narrow_f16<float>(high) << 16;
#endif
}

// A tile filled with one value.
__device__ Tile filled(float x) {
  Tile t;
  t.each([&](float& v, int, int) { v = x; });
  return t;
}

// Reads this lane's part of a tile of a bucket that is whole.
__device__ Tile load_whole_tile(const Bucket& bucket, int tile) {
  const char* const values = bucket.in();
  const int first = bucket.index(tile, 0), row = bucket.columns;
  if (!bucket.has(tile)) return filled(0.0f);
  Tile t;
  if (bucket.dtype == DType::kF32) {
#pragma unroll
    for (int r = 0; r < kHalfRows; ++r) {
      const float4 x = *reinterpret_cast<const float4*>(reinterpret_cast<const float*>(values) +
                                                        first + r * row);
      t.v[r][0] = x.x, t.v[r][1] = x.y, t.v[r][2] = x.z, t.v[r][3] = x.w;
    }
    return t;
  }
  uint2 x[kHalfRows];
#pragma unroll
  for (int r = 0; r < kHalfRows; ++r) {
    x[r] = *reinterpret_cast<const uint2*>(reinterpret_cast<const uint16_t*>(values) + first +
                                           r * row);
  }
  if (bucket.dtype == DType::kBF16) {
#pragma unroll
    for (int r = 0; r < kHalfRows; ++r) {
      t.v[r][0] = bit_cast<float>(x[r].x << 16), t.v[r][1] = bit_cast<float>(x[r].x & 0xffff0000u);
      t.v[r][2] = bit_cast<float>(x[r].y << 16), t.v[r][3] = bit_cast<float>(x[r].y & 0xffff0000u);
    }
  } else {
#pragma unroll
    for (int r = 0; r < kHalfRows; ++r) {
      widen_f16_pair(x[r].x, &t.v[r][0], &t.v[r][1]);
      widen_f16_pair(x[r].y, &t.v[r][2], &t.v[r][3]);
    }
  }
  return t;
}

// What replaces values that do not exist.
enum class Pad { kZero, kFirst };

// Reads this lane's part of a tile. Values that do not exist become 0 or the bucket's first value.
__device__ Tile load_tile(const Bucket& bucket, int tile, Pad pad) {
  if (bucket.whole()) return load_whole_tile(bucket, tile);
  const char* const values = bucket.in();
  // Read only here, so that the reads of a whole bucket do not wait for one value.
  const float other =
      pad == Pad::kFirst && bucket.padded() ? load_item(values, 0, bucket.dtype) : 0.0f;
  const bool here = bucket.has(tile);
  Tile t;
  t.each([&](float& x, int r, int c) {
    const int i = bucket.index(tile, r) + c;
    x = here && i < bucket.values ? load_item(values, i, bucket.dtype) : other;
  });
  return t;
}

__device__ bool any_nan(const Tile& t) {
  bool nan = false;
  t.each([&](float x, int, int) { nan |= x != x; });
  return nan;
}

// Writes a tile of a bucket that is whole. 16-bit values must not be NaN.
__device__ void store_whole_tile(const Bucket& bucket, int tile, const Tile& t) {
  char* const values = bucket.out();
  const int first = bucket.index(tile, 0), row = bucket.columns;
  if (bucket.dtype == DType::kF32) {
#pragma unroll
    for (int r = 0; r < kHalfRows; ++r) {
      *reinterpret_cast<float4*>(reinterpret_cast<float*>(values) + first + r * row) =
          make_float4(t.v[r][0], t.v[r][1], t.v[r][2], t.v[r][3]);
    }
    return;
  }
  uint2 x[kHalfRows];
  if (bucket.dtype == DType::kBF16) {
#pragma unroll
    for (int r = 0; r < kHalfRows; ++r) {
      x[r] = make_uint2(narrow_bf16_pair(t.v[r][0], t.v[r][1]),
                        narrow_bf16_pair(t.v[r][2], t.v[r][3]));
    }
  } else {
#pragma unroll
    for (int r = 0; r < kHalfRows; ++r) {
      x[r] =
          make_uint2(narrow_f16_pair(t.v[r][0], t.v[r][1]), narrow_f16_pair(t.v[r][2], t.v[r][3]));
    }
  }
#pragma unroll
  for (int r = 0; r < kHalfRows; ++r) {
    *reinterpret_cast<uint2*>(reinterpret_cast<uint16_t*>(values) + first + r * row) = x[r];
  }
}

// Writes a tile. With kFinite, none of its values may be NaN.
template <bool kFinite>
__device__ void store_tile(const Bucket& bucket, int tile, const Tile& t) {
  if (!bucket.has(tile)) return;
  if (bucket.whole() && (kFinite || bucket.dtype == DType::kF32 || !any_nan(t))) {
    return store_whole_tile(bucket, tile, t);
  }
  char* const values = bucket.out();
  t.each([&](float x, int r, int c) {
    const int i = bucket.index(tile, r) + c;
    if (i < bucket.values) store_item(values, i, bucket.dtype, x);
  });
}

}  // namespace
}  // namespace cgx

#endif  // CGX_CUDA_TILES_H_
