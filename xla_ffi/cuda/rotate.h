// The rotation of a bucket that a warp holds tile by tile; for device code only.
#ifndef CGX_CUDA_ROTATE_H_
#define CGX_CUDA_ROTATE_H_

#include "cuda/tiles.h"

namespace cgx {
namespace {

// A step of a Hadamard transform.
__device__ void add_and_subtract(float* a, float* b) {
  const float sum = *a + *b;
  *b = *a - *b;
  *a = sum;
}

// The same between lanes whose numbers differ in one bit. The product is exact, so the fused
// multiply-add rounds like the sum or the difference.
__device__ void add_and_subtract_lanes(const Lane& lane, int bit, Tile* t) {
  const float sign = lane.index & bit ? -1.0f : 1.0f;
  t->each([&](float& x, int, int) { x = fmaf(x, sign, __shfl_xor_sync(kEveryLane, x, bit)); });
}

// The transform of a tile's blocks of 8 rows by `columns` columns, without its scale.
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

// x with its sign changed where bit 31 - row of `signs` is set.
__device__ float flip_row(float x, uint32_t signs, int row) { return flip(x, signs << row); }

// The signs of this lane's rows of a column, as flip_row takes them.
__device__ uint32_t signs_of(const Bucket& bucket, const Rotation& rotation, int tile, int c) {
  const uint32_t signs = rotation.signs(static_cast<uint32_t>(bucket.column(tile) + c));
  return signs << (bucket.lane.half * kHalfRows);
}

// Rotates a tile of a leaf's values for encoding. Columns past the bucket's last column do not mix
// with the others, because no block extends past it.
__device__ void rotate(const Bucket& bucket, int tile, Tile* t) {
  if (!bucket.rotated) return;
  const Rotation rotation = bucket.rotation();
#pragma unroll
  for (int c = 0; c < kColumns; ++c) {
    const uint32_t signs = signs_of(bucket, rotation, tile, c);
#pragma unroll
    for (int r = 0; r < kHalfRows; ++r) {
      t->v[r][c] = flip_row(t->v[r][c], signs, r) * rotation.forward;
    }
  }
  transform(bucket.lane, rotation.columns, t);
}

// The inverse of rotate.
__device__ void rotate_back(const Bucket& bucket, int tile, Tile* t) {
  if (!bucket.rotated) return;
  const Rotation rotation = bucket.rotation();
  t->each([&](float& x, int, int) { x *= rotation.inverse; });
  transform(bucket.lane, rotation.columns, t);
#pragma unroll
  for (int c = 0; c < kColumns; ++c) {
    const uint32_t signs = signs_of(bucket, rotation, tile, c);
#pragma unroll
    for (int r = 0; r < kHalfRows; ++r) t->v[r][c] = flip_row(t->v[r][c], signs, r);
  }
}

// The sum of the squares of a bucket's values times `scale`, in the order of the wire format, for a
// bucket of one tile. Columns that do not exist add nothing. Every lane ends with the same sum,
// because an addition gives both of its lanes the same bits. So of the four sums that a lane begins
// with, it can hand two, and then one, to its partners.
__device__ float sum_of_squares(const Bucket& bucket, const Tile& t, float scale) {
  float sum[kColumns] = {};
  if (bucket.has(0)) {
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      float square[kHalfRows];
#pragma unroll
      for (int r = 0; r < kHalfRows; ++r) {
        const float x = t.v[r][c] * scale;
        square[r] = x * x;
      }
      sum[c] = (square[0] + square[1]) + (square[2] + square[3]);
    }
  }
  // The lower half of the warp goes on with columns 0 and 1, the upper half with 2 and 3.
  const bool upper = bucket.lane.half, right = bucket.lane.index & kWarp / 4;
  float pair[2];
#pragma unroll
  for (int k = 0; k < 2; ++k) {
    const float kept = upper ? sum[2 + k] : sum[k], sent = upper ? sum[k] : sum[2 + k];
    pair[k] = kept + __shfl_xor_sync(kEveryLane, sent, kWarp / 2);
  }
  const float kept = right ? pair[1] : pair[0], sent = right ? pair[0] : pair[1];
  float one = kept + __shfl_xor_sync(kEveryLane, sent, kWarp / 4);
#pragma unroll
  for (int lanes = kWarp / 8; lanes > 0; lanes /= 2) {
    one += __shfl_xor_sync(kEveryLane, one, lanes);
  }
  one += __shfl_xor_sync(kEveryLane, one, kWarp / 2);
  return one + __shfl_xor_sync(kEveryLane, one, kWarp / 4);
}

}  // namespace
}  // namespace cgx

#endif  // CGX_CUDA_ROTATE_H_
