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

  // Adds all decoded records to `t`, in order.
  __device__ void add_to(const Bucket& bucket, Tile* t) {
    if (bucket.bits == kUsualBits) {
      add_as<kUsualBits>(bucket, t);
    } else {
      add_as<kAny>(bucket, t);
    }
  }

 private:
  template <int kBits>
  __device__ void add_as(const Bucket& bucket, Tile* t) {
#pragma unroll 1
    for (int first = 0; first < count_; first += kAhead) {
#pragma unroll
      for (int k = 0; k < kAhead; ++k) {
        if (first + k >= count_) break;
        ahead_[k].template values<kBits>(bucket, [&](float x, int r, int c) { t->v[r][c] += x; });
        ask(first + kAhead + k, k);
      }
    }
  }
  __device__ void ask(int number, int place) {
    if (number >= count_) return;
    const uint32_t row = number + (static_cast<unsigned>(number) >= skip_);
    const uint64_t offset = static_cast<uint64_t>(4 * row) * stride_;
    ahead_[place].load(records_ + offset, planes_ + offset, columns_, words_);
  }

  Encoded ahead_[kAhead];
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
