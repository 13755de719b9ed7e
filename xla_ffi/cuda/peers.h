// What reduce and accumulate do with a bucket before it is encoded or stored: add up what peers
// sent, and divide. For device code only.
#ifndef CGX_CUDA_PEERS_H_
#define CGX_CUDA_PEERS_H_

#include "cuda/buckets.h"

namespace cgx {
namespace {

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

}  // namespace
}  // namespace cgx

#endif  // CGX_CUDA_PEERS_H_
