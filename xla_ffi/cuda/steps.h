// The steps of an all-reduce for one bucket, and what a table's pieces have in common: included by
// cuda/kernels.cu, which launches each step by itself, and by cuda/peer.cu, which fuses them.
#ifndef CGX_CUDA_STEPS_H_
#define CGX_CUDA_STEPS_H_

#include <type_traits>

#include "cuda/buckets.h"
#include "cuda/kernels.h"
#include "cuda/peers.h"

namespace cgx {
namespace {

// The first piece of the table for which `beyond` holds; `count` when there is none.
template <typename Table, typename Beyond>
__device__ int first_piece(const Table& table, Beyond beyond) {
  int low = 0, high = table.count;
  while (low < high) {
    const int mid = (low + high) / 2;
    if (beyond(table.piece[mid])) {
      high = mid;
    } else {
      low = mid + 1;
    }
  }
  return low;
}

// The factors of the buckets of a table.
template <typename Table>
using FactorsOf = std::conditional_t<Table::kInUnits, LeafFactors, NoFactors>;

// The part of the noise seed that all buckets of a leaf share.
template <bool kStochastic>
__device__ LeafSeed noise_of(const uint32_t* key, const Piece& piece) {
  return kStochastic ? LeafSeed(key[0], key[1], piece.number) : LeafSeed(0, 0, 0);
}

// Encodes a bucket's values.
template <int kTiles, bool kStochastic, bool kResidual, typename Factors>
__device__ void encode_values(const Bucket& bucket, Noise noise, const Factors& factors,
                              uint8_t* record) {
  bool maybe = false;
  float pad = 0.0f;
  encode_bucket<kTiles, kStochastic, kResidual>(
      bucket, noise, record, factors,
      [&](int k) {
        Tile t = load_tile(bucket, k, Factors::kAny ? Pad::kZero : Pad::kFirst);
        maybe |= may_have_zeros(bucket, k, t);
        factors.multiply(bucket, k, kIn, &t);
        rotate(bucket, k, &t);
        if (Factors::kAny) replace_pads(bucket, k, &pad, &t);
        return t;
      },
      [&] { return __any_sync(kEveryLane, maybe) ? zero_segments(bucket) : 0; }, 1.0f);
}

// Adds the peers' records, which lie in rows of `payload`, to the bucket's values and encodes their
// mean: the sum divided by `divisor`, which `divide` does. kAhead records are in flight at once.
// With kTiles > 1, no record may have a mask.
template <int kTiles, int kAhead, bool kStochastic, bool kResidual, typename Factors>
__device__ void reduce_records(const Bucket& bucket, Noise noise, const Factors& factors,
                               const uint8_t* payload, int64_t row_bytes, int world, int own,
                               Divide divide, float divisor, uint8_t* record) {
  const uint8_t* const records = payload + bucket.record();
  float pad = 0.0f;
  uint32_t mask = 0;
  const auto mean = [&](int k) {
    Peers<kAhead> peers(bucket, records, row_bytes, world, own, k);
    Tile t = load_tile(bucket, k, Pad::kZero);
    factors.multiply(bucket, k, kIn, &t);
    rotate(bucket, k, &t);
    peers.template add_to<kTiles <= 1>(bucket, k, &t);
    mask = peers.common_mask();
    divide_tile(divide, &t);
    replace_pads(bucket, k, &pad, &t);
    return t;
  };
  encode_bucket<kTiles, kStochastic, kResidual>(
      bucket, noise, record, factors, mean,
      [&] { return mask != 0 ? mask & zero_segments(bucket) : 0; }, divisor);
}

// Limits values to a range, which decoded values may leave when they are rotated back or
// multiplied.
__device__ void keep_within(float largest, Tile* t) {
  t->each([&](float& x, int, int) { x = within(canonical_nan(x), largest); });
}

// The largest value of a dtype.
__device__ float largest_of(DType dtype) {
  constexpr float kLargestBf16 = 3.38953139e+38f, kLargestF16 = 65504.0f;
  return dtype == DType::kF32 ? kLargest : dtype == DType::kBF16 ? kLargestBf16 : kLargestF16;
}

// Decodes a bucket.
template <typename Factors>
__device__ void decode_record(const Bucket& bucket, const Factors& factors, const uint8_t* record) {
  constexpr float kHarmless = 1.2676506e+30f;  // 2^100: no sum of 512 overflows
  const int planes = Planes(bucket.bits, bucket.lane.half).count;
  for (int k = 0; k < bucket.tiles(); ++k) {
    Encoded encoded;
    encoded.load(record, record + planes_of(bucket, k), bucket.columns, bucket.has(k) ? planes : 0);
    const uint32_t mask = encoded.header.mask();
    const Meta meta = checked(encoded.header.meta());
    Tile t;
    if (poisoned(meta)) {
      t = filled(bit_cast<float>(kQuietNan));
      if (mask != 0) clear_segments(bucket, k, mask, &t);
      store_tile<false>(bucket, k, t);
      continue;
    }
    const auto keep = [&](float x, int r, int c) { t.v[r][c] = x; };
    if (bucket.bits == kUsualBits) {
      encoded.values<kUsualBits>(bucket, meta, keep);
    } else {
      encoded.values<kAny>(bucket, meta, keep);
    }
    if (bucket.rotated) {
      rotate_back(bucket, k, &t);
      const float largest = fabsf(meta.lo) + 255.0f * fabsf(meta.unit);
      if (!(largest <= kHarmless)) keep_within(kLargest, &t);
    }
    if (factors.any()) {
      keep_within(kLargest, &t);
      factors.multiply(bucket, k, kOut, &t);
      keep_within(largest_of(bucket.dtype), &t);
    }
    if (mask != 0) clear_segments(bucket, k, mask, &t);
    store_tile<!Factors::kAny>(bucket, k, t);
  }
}

}  // namespace
}  // namespace cgx

#endif  // CGX_CUDA_STEPS_H_
