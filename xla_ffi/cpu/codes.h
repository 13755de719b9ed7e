// Codes of values in host memory beside those of the wire format: signs, levels, the largest. Raw
// pointers in, raw pointers out; fp32 values alone.
#ifndef CGX_CPU_CODES_H_
#define CGX_CPU_CODES_H_

#include <stdint.h>

#include "format/codes.h"

namespace cgx {

// One instruction set's build of the kernels.
struct CodeKernels {
  // Bit i of `out` says that x[i] >= 0, for n values; the last byte is filled up with zeros.
  void (*pack_signs)(const float* x, int64_t n, uint8_t* out);
  // 1 or -1 for every bit. `large` results go past the caches.
  void (*unpack_signs)(const uint8_t* from, int64_t n, bool large, float* out);
  // Finds the places in [from, to) where x without its sign has at least these bits, in order, and
  // stops behind the `room`-th. Returns how many: more than `room` where it stopped. `at` and
  // `taken`, places and values, hold room + kSlack.
  int64_t (*collect)(const float* x, int64_t from, int64_t to, uint32_t bits, int64_t room,
                     int32_t* at, float* taken);
  // Encodes the values [from, to): whole buckets that make whole bytes, or up to n.
  void (*encode_buckets)(const BucketsCall& call, int64_t from, int64_t to);
  // Of the buckets [from, to) of x[n], the last filled up with zeros, the `keep` largest magnitudes
  // each: places in the bucket, in order, and values, `keep` a bucket from bucket 0 on.
  void (*largest_of_buckets)(const float* x, int64_t n, int64_t bucket_size, int64_t keep,
                             int64_t from, int64_t to, int32_t* at, float* taken);
};

constexpr int64_t kSlack = 64;

}  // namespace cgx

#endif  // CGX_CPU_CODES_H_
