// The steps of an all-reduce for one bucket, and what a table's pieces have in common: included by
// cuda/kernels.cu, which launches each step by itself, and by cuda/peer.cu, which fuses them.
#ifndef CGX_CUDA_STEPS_H_
#define CGX_CUDA_STEPS_H_

#include <type_traits>

#include "cuda/buckets.h"
#include "cuda/kernels.h"

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

// --- what peers sent

// Decodes the records of the peers as a lane reads them, one after the other and without `skip`.
// Memory is far, so kAhead records are requested before the first is decoded, and each record that
// is decoded makes room for one more.
template <int kAhead>
class Peers {
 public:
  // Requests the first records. Rows are a multiple of 4 bytes apart.
  __device__ Peers(const Bucket& bucket, const uint8_t* records, int64_t stride, int peers,
                   int skip, int tile)
      : records_(records),
        planes_(records + planes_of(bucket, tile)),
        stride_(static_cast<uint32_t>(stride / 4)),
        columns_(bucket.columns),
        words_(bucket.has(tile) ? Planes(bucket.bits, bucket.lane.half).count : 0),
        count_(peers - (skip >= 0 && skip < peers)),
        skip_(static_cast<unsigned>(skip)) {
#pragma unroll
    for (int k = 0; k < kAhead; ++k) ask(k, k);
  }

  // Adds all decoded records to `t`, a tile of sums, in order. Without kMasks, none has a mask.
  template <bool kMasks = true>
  __device__ void add_to(const Bucket& bucket, int tile, Tile* t) {
    int next = bucket.bits == kUsualBits ? add_as<kUsualBits>(bucket, t) : add_as<kAny>(bucket, t);
#pragma unroll 1
    for (; kMasks && next < count_; ++next) add_masked(bucket, tile, next, t);
  }

  // After add_to: the bits that the masks of all records have.
  __device__ uint32_t common_mask() const { return common_mask_; }

 private:
  // Adds records up to the first one with a mask. Returns the number of that one.
  template <int kBits>
  __device__ int add_as(const Bucket& bucket, Tile* t) {
#pragma unroll 1
    for (int first = 0; first < count_; first += kAhead) {
#pragma unroll
      for (int k = 0; k < kAhead; ++k) {
        if (first + k >= count_) break;
        const Header header = ahead_[k].header;
        if (header.mask() != 0) return first + k;
        common_mask_ = 0;
        ahead_[k].template values<kBits>(bucket, header.meta(),
                                         [&](float x, int r, int c) { t->v[r][c] += x; });
        ask(first + kAhead + k, k);
      }
    }
    return count_;
  }
  // Adds a record that may have a mask. Masked values are 0 where they are not rotated.
  __device__ void add_masked(const Bucket& bucket, int tile, int number, Tile* t) {
    Encoded& encoded = ahead_[0];
    ask(number, 0);
    const Meta meta = encoded.header.meta();
    const uint32_t mask = encoded.header.mask();
    common_mask_ &= mask;
    Tile own;
    encoded.template values<kAny>(bucket, mask != 0 ? checked(meta) : meta,
                                  [&](float x, int r, int c) { own.v[r][c] = x; });
    if (mask != 0) {
      rotate_back(bucket, tile, &own);
      clear_segments(bucket, tile, mask, &own);
      rotate(bucket, tile, &own);
    }
    t->each([&](float& x, int r, int c) { x += own.v[r][c]; });
  }
  __device__ void ask(int number, int place) {
    if (number >= count_) return;
    const uint32_t row = number + (static_cast<unsigned>(number) >= skip_);
    const uint64_t offset = static_cast<uint64_t>(4 * row) * stride_;
    ahead_[place].load(records_ + offset, planes_ + offset, columns_, words_);
  }

  Encoded ahead_[kAhead];
  uint32_t common_mask_ = UINT32_MAX;
  const uint8_t *const records_, *const planes_;
  const uint32_t stride_;
  const int columns_, words_, count_;
  const unsigned skip_;
};

__device__ void divide_tile(Divide divide, Tile* t) {
  if (divide.multiply) {
    t->each([&](float& x, int, int) { x *= divide.by; });
  } else {
    t->each([&](float& x, int, int) { x /= divide.by; });
  }
}

// Replaces values that do not exist by the bucket's first value, so that the range is that of the
// bucket's values. The first value is lane 0's of tile 0; `first` keeps it for the following tiles.
__device__ void replace_pads(const Bucket& bucket, int tile, float* first, Tile* t) {
  if (!bucket.padded()) return;
  if (tile == 0) *first = __shfl_sync(kEveryLane, t->v[0][0], 0);
  t->each([&](float& x, int r, int c) {
    if (bucket.index(tile, r) + c >= bucket.values) x = *first;
  });
}

// --- the steps

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
