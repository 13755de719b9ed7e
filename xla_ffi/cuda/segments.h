// The zero segments of a bucket; for device code only.
//
// Most buckets have none, and their records no mask. A bucket that may have some is read again, so
// that the usual path holds no more values than before.
#ifndef CGX_CUDA_SEGMENTS_H_
#define CGX_CUDA_SEGMENTS_H_

#include "cuda/factors.h"

namespace cgx {
namespace {

// Which segment of its bucket each value is in: MaskSegments of format/quantize.h in 32 bits.
__device__ Parts segments_of(const Bucket& bucket) {
  const uint64_t whole = bucket.piece.segment;
  const uint32_t values = static_cast<uint32_t>(bucket.piece.unit);
  return Parts(whole, static_cast<uint64_t>(bucket.of_leaf()) * values % whole, values);
}

__device__ bool is_zero(const char* values, int i, DType dtype) {
  if (dtype == DType::kF32) return reinterpret_cast<const uint32_t*>(values)[i] << 1 == 0;
  return (reinterpret_cast<const uint16_t*>(values)[i] & 0x7fffu) == 0;
}

// Whether this lane's part of a tile lets a segment be zero. No segment that ends before its bucket
// does is shorter than a kMaskBits-th of the bucket, so it has a value at a multiple of that. Those
// are in a lane's first column, except in buckets of unusual sizes. The last segment has the last
// value. It is a lane's last, unless the leaf's last bucket is short.
__device__ bool may_have_zeros(const Bucket& bucket, int tile, const Tile& t) {
  bool zero = t.v[kHalfRows - 1][kColumns - 1] == 0.0f;
#pragma unroll
  for (int r = 0; r < kHalfRows; ++r) zero |= t.v[r][0] == 0.0f;
  if (bucket.piece.unit % (kMaskBits * kColumns) != 0 || bucket.ragged()) {
    t.each([&](float x, int, int) { zero |= x == 0.0f; });
  }
  return zero && bucket.has(tile);
}

// The mask of a bucket of a leaf.
__device__ uint32_t zero_segments(const Bucket& bucket) {
  const Parts segments = segments_of(bucket);
  const char* const values = bucket.in();
  uint32_t nonzero = 0;
#pragma unroll 1
  for (int i = bucket.lane.index; i < bucket.values; i += kWarp) {
    if (!is_zero(values, i, bucket.dtype)) nonzero |= 1u << segments.number(i);
  }
  const uint32_t last = segments.number(bucket.values - 1);
  return ~__reduce_or_sync(kEveryLane, nonzero) & UINT32_MAX >> (31 - last);
}

// Sets the values of masked segments, and those that do not exist, to 0.
__device__ void clear_segments(const Bucket& bucket, int tile, uint32_t mask, Tile* t) {
  const Parts segments = segments_of(bucket);
  t->each([&](float& x, int r, int c) {
    const int i = bucket.index(tile, r) + c;
    if (i >= bucket.values || mask >> segments.number(i) & 1u) x = 0.0f;
  });
}

}  // namespace
}  // namespace cgx

#endif  // CGX_CUDA_SEGMENTS_H_
