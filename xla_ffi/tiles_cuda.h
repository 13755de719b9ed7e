// A bucket as a warp holds it, tile by tile: reading, writing and rotating; included only by
// buckets_cuda.h, which tells how the lanes share a tile.
#ifndef CGX_TILES_CUDA_H_
#define CGX_TILES_CUDA_H_

#include <cuda_runtime.h>

#include "kernels_cuda.h"
#include "quantize.h"
#include "wire_format.h"

namespace cgx {
namespace {

constexpr int kWarp = 32;
constexpr unsigned kEveryLane = 0xffffffffu;
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
};

// A bucket of a piece as a lane sees it. It has 2^30 values at most, so places in it are 32-bit.
struct Bucket {
  const Piece& piece;
  int64_t number;  // in the piece
  int values;
  int columns;
  int bits;
  DType dtype;
  bool rotated;
  Lane lane;

  __device__ Bucket(const Piece& piece, int64_t number)
      : piece(piece), number(number), bits(piece.bits), dtype(piece.dtype), rotated(piece.rotated) {
    const int64_t rest = piece.values - number * piece.unit;
    values = rest < piece.unit ? static_cast<int>(rest) : piece.unit;
    columns = static_cast<int>(Record{values, bits}.columns());
  }
  __device__ int64_t bytes_before() const { return number * piece.unit * item_size(dtype); }
  __device__ const char* in() const { return piece.in + bytes_before(); }
  __device__ char* out() const { return piece.out + bytes_before(); }
  // Where the record lies in its payload row.
  __device__ int64_t record() const {
    return piece.record + number * Record{piece.unit, bits}.bytes();
  }
  __device__ NoiseSeed seed(const uint32_t* key) const {
    return noise_seed(key, piece.stream, piece.bucket + number);
  }
  __device__ Rotation rotation() const {
    return Rotation(columns, piece.stream, piece.bucket + number);
  }
  __device__ int tiles() const { return (columns + kTileColumns - 1) / kTileColumns; }
  __device__ int column(int tile) const { return tile * kTileColumns + lane.column; }
  // Index in the bucket of the first of this lane's values in row r of its half.
  __device__ int index(int tile, int r) const {
    return (lane.half * kHalfRows + r) * columns + column(tile);
  }
  __device__ bool has(int tile) const { return column(tile) < columns; }
  // Whether some of its rows end early: only a leaf's last bucket.
  __device__ bool ragged() const { return values != kRows * columns; }
  // Whether some of its codes stand for nothing: a rotation spreads the values over all of them.
  __device__ bool padded() const { return ragged() && !rotated; }
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

// Reads this lane's part; values that do not exist are `pad`.
__device__ Tile load_tile(const Bucket& bucket, int tile, float pad) {
  const char* const values = bucket.in();
  Tile t;
  const bool here = bucket.has(tile);
  if (here && bucket.piece.aligned && !bucket.ragged()) {
    if (bucket.dtype == DType::kF32) {
#pragma unroll
      for (int r = 0; r < kHalfRows; ++r) {
        const float4 x = *reinterpret_cast<const float4*>(reinterpret_cast<const float*>(values) +
                                                          bucket.index(tile, r));
        t.v[r][0] = x.x, t.v[r][1] = x.y, t.v[r][2] = x.z, t.v[r][3] = x.w;
      }
      return t;
    }
    uint2 x[kHalfRows];
#pragma unroll
    for (int r = 0; r < kHalfRows; ++r) {
      x[r] = *reinterpret_cast<const uint2*>(reinterpret_cast<const uint16_t*>(values) +
                                             bucket.index(tile, r));
    }
#pragma unroll
    for (int r = 0; r < kHalfRows; ++r) {
      const uint32_t item[kColumns] = {x[r].x & 0xffffu, x[r].x >> 16, x[r].y & 0xffffu,
                                       x[r].y >> 16};
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        t.v[r][c] =
            bucket.dtype == DType::kBF16 ? widen_bf16<float>(item[c]) : widen_f16<float>(item[c]);
      }
    }
    return t;
  }
#pragma unroll
  for (int r = 0; r < kHalfRows; ++r) {
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      const int i = bucket.index(tile, r) + c;
      t.v[r][c] = here && i < bucket.values ? load_item(values, i, bucket.dtype) : pad;
    }
  }
  return t;
}

__device__ void store_tile(const Bucket& bucket, int tile, const Tile& t) {
  if (!bucket.has(tile)) return;
  char* const values = bucket.out();
  if (!bucket.piece.aligned || bucket.ragged()) {
#pragma unroll
    for (int r = 0; r < kHalfRows; ++r) {
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        const int i = bucket.index(tile, r) + c;
        if (i < bucket.values) store_item(values, i, bucket.dtype, t.v[r][c]);
      }
    }
    return;
  }
#pragma unroll
  for (int r = 0; r < kHalfRows; ++r) {
    const int i = bucket.index(tile, r);
    if (bucket.dtype == DType::kF32) {
      *reinterpret_cast<float4*>(reinterpret_cast<float*>(values) + i) =
          make_float4(t.v[r][0], t.v[r][1], t.v[r][2], t.v[r][3]);
    } else {
      uint32_t item[kColumns];
#pragma unroll
      for (int c = 0; c < kColumns; ++c) item[c] = narrow(t.v[r][c], bucket.dtype);
      *reinterpret_cast<uint2*>(reinterpret_cast<uint16_t*>(values) + i) =
          make_uint2(item[0] | item[1] << 16, item[2] | item[3] << 16);
    }
  }
}

// A step of a Hadamard transform.
__device__ void add_and_subtract(float* a, float* b) {
  const float sum = *a + *b;
  *b = *a - *b;
  *a = sum;
}

// The same between lanes whose numbers differ in one bit. The product is exact, so the fused
// multiply-add rounds as the sum or the difference does.
__device__ void add_and_subtract_lanes(const Lane& lane, int bit, Tile* t) {
  const float sign = lane.index & bit ? -1.0f : 1.0f;
#pragma unroll
  for (int r = 0; r < kHalfRows; ++r) {
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      float& x = t->v[r][c];
      x = fmaf(x, sign, __shfl_xor_sync(kEveryLane, x, bit));
    }
  }
}

// The transform of a tile's blocks of 8 rows by `columns` columns, but for its scale.
__device__ void transform(const Lane& lane, int columns, Tile* t) {
#pragma unroll
  for (int h = 1; h < kHalfRows; h *= 2) {
#pragma unroll
    for (int r = 0; r < kHalfRows; ++r) {
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        if (!(r & h)) add_and_subtract(&t->v[r][c], &t->v[r + h][c]);
      }
    }
  }
  add_and_subtract_lanes(lane, kWarp / 2, t);
#pragma unroll
  for (int h = 1; h < kColumns; h *= 2) {
#pragma unroll
    for (int r = 0; r < kHalfRows; ++r) {
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        if (!(c & h)) add_and_subtract(&t->v[r][c], &t->v[r][c + h]);
      }
    }
  }
#pragma unroll 1
  for (int h = kColumns; h < columns; h *= 2) add_and_subtract_lanes(lane, h / kColumns, t);
}

// The signs of this lane's rows of a column: bit 31 of this number, shifted left by the row in its
// half.
__device__ uint32_t signs_of(const Bucket& bucket, const Rotation& rotation, int tile, int c) {
  const uint32_t signs = rotation.signs(static_cast<uint32_t>(bucket.column(tile) + c));
  return signs << (bucket.lane.half * kHalfRows);
}

// Turns a tile of a leaf's values into what is coded. Columns past the bucket's last are apart from
// all others: a block never reaches over it.
__device__ void rotate(const Bucket& bucket, int tile, Tile* t) {
  if (!bucket.rotated) return;
  const Rotation rotation = bucket.rotation();
#pragma unroll
  for (int c = 0; c < kColumns; ++c) {
    const uint32_t signs = signs_of(bucket, rotation, tile, c);
#pragma unroll
    for (int r = 0; r < kHalfRows; ++r) {
      t->v[r][c] = flip(t->v[r][c], signs << r) * rotation.forward;
    }
  }
  transform(bucket.lane, rotation.columns, t);
}

// The inverse.
__device__ void rotate_back(const Bucket& bucket, int tile, Tile* t) {
  if (!bucket.rotated) return;
  const Rotation rotation = bucket.rotation();
#pragma unroll
  for (int r = 0; r < kHalfRows; ++r) {
#pragma unroll
    for (int c = 0; c < kColumns; ++c) t->v[r][c] *= rotation.inverse;
  }
  transform(bucket.lane, rotation.columns, t);
#pragma unroll
  for (int c = 0; c < kColumns; ++c) {
    const uint32_t signs = signs_of(bucket, rotation, tile, c);
#pragma unroll
    for (int r = 0; r < kHalfRows; ++r) {
      t->v[r][c] = canonical_nan(flip(t->v[r][c], signs << r));
    }
  }
}

}  // namespace
}  // namespace cgx

#endif  // CGX_TILES_CUDA_H_
