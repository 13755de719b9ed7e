// The units of a leaf's values, as a lane sees those of a bucket, and its zero segments; for device
// code only.
#ifndef CGX_CUDA_FACTORS_H_
#define CGX_CUDA_FACTORS_H_

#include "cuda/tiles.h"

namespace cgx {
namespace {

// Numbers the parts of a bucket's values, where a leaf is cut into parts of `whole` values.
struct Parts {
  uint32_t length, phase;
  uint32_t inverse;  // of the length, times 2^32

  // `before` is the place of the bucket's first value in its part.
  __device__ Parts(uint64_t whole, uint64_t before, uint32_t values) {
    if (whole <= values) {
      length = static_cast<uint32_t>(whole), phase = static_cast<uint32_t>(before);
    } else {
      // The bucket meets one end of a part or none.
      const uint64_t first = whole - before;
      length = values, phase = first < values ? values - static_cast<uint32_t>(first) : 0;
    }
    inverse = UINT32_MAX / length;
  }
  // The number of the part of the bucket's value i; the first value is in part 0.
  __device__ uint32_t number(int i) const {
    const uint32_t place = phase + static_cast<uint32_t>(i);
    // At most 1 too small.
    const uint32_t number = static_cast<uint32_t>(uint64_t{place} * inverse >> 32);
    return number + (place - number * length >= length);
  }
};

// The factors of kernels for leaves without units.
struct NoFactors {
  static constexpr bool kAny = false;
  __device__ NoFactors() {}
  __device__ NoFactors(const Bucket&, const LeafUnits*) {}
  __device__ bool any() const { return false; }
  __device__ void multiply(const Bucket&, int, Way, Tile*) const {}
};

// A bucket's factors. Values that do not exist have none.
class LeafFactors {
 public:
  static constexpr bool kAny = true;

  __device__ LeafFactors(const Bucket& bucket, const LeafUnits* units)
      : units_(*units), parts_(bucket.piece.unit, 0, bucket.piece.unit) {
    if (!any()) return;
    const uint64_t first = static_cast<uint64_t>(bucket.of_leaf()) * bucket.piece.unit;
    const uint64_t columns = units_.num_columns;
    // Most leaves are small enough for the division of 32 bits, which is much faster.
    row_ = (first | columns) >> 32 ? first / columns
                                   : static_cast<uint32_t>(first) / static_cast<uint32_t>(columns);
    column_ = first - row_ * columns;
    parts_ = Parts(columns, column_, bucket.piece.unit);
  }

  // Whether the leaf has units.
  __device__ bool any() const { return units_.rows != nullptr; }
  // Multiplies the values of a tile that exist by their factors for one way.
  __device__ void multiply(const Bucket& bucket, int tile, Way way, Tile* t) const {
    if (!any() || !bucket.has(tile)) return;
    const int64_t to_way = way == kOut ? units_.to_out : 0;
    const float* const rows = units_.rows + to_way + row_;
    const float* const columns = units_.columns + to_way + column_;
#pragma unroll
    for (int r = 0; r < kHalfRows; ++r) {
      const int first = bucket.index(tile, r);
      const uint32_t row = parts_.number(first);
      const int64_t at = first - static_cast<int64_t>(row) * units_.num_columns;
      const float* const from = columns + at;
      // Most often, a lane's four values are in one row.
      if (static_cast<int64_t>(column_) + at + kColumns <= units_.num_columns &&
          first + kColumns <= bucket.values && reinterpret_cast<uintptr_t>(from) % 16 == 0) {
        const float4 by = *reinterpret_cast<const float4*>(from);
        const float of_row = rows[row];
        t->v[r][0] *= by.x * of_row, t->v[r][1] *= by.y * of_row;
        t->v[r][2] *= by.z * of_row, t->v[r][3] *= by.w * of_row;
        continue;
      }
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        const int i = first + c;
        if (i >= bucket.values) continue;
        const uint32_t row = parts_.number(i);
        t->v[r][c] *= columns[i - static_cast<int64_t>(row) * units_.num_columns] * rows[row];
      }
    }
  }

 private:
  const LeafUnits& units_;
  uint64_t row_ = 0, column_ = 0;  // of the bucket's first value
  Parts parts_;
};

// --- zero segments
//
// Most buckets have none, and their records no mask. A bucket that may have some is read again, so
// that the usual path holds no more values than before.

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

#endif  // CGX_CUDA_FACTORS_H_
