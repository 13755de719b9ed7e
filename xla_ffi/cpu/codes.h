// The codes that are not part of the wire format, for values in host memory: signs, levels, and the
// largest values. Raw pointers in, raw pointers out; only fp32 values.
#ifndef CGX_CPU_CODES_H_
#define CGX_CPU_CODES_H_

#include <stdint.h>

#include "format/codes.h"

namespace cgx {

// One instruction set's build of the kernels.
struct CodeKernels {
  // Sets bit i of `out` if x[i] >= 0, for n values. The last byte is padded with zero bits.
  void (*pack_signs)(const float* x, int64_t n, uint8_t* out);
  // Writes 1 or -1 for every bit. `large` results are written past the caches.
  void (*unpack_signs)(const uint8_t* from, int64_t n, bool large, float* out);
  // Finds the places in [from, to) where the magnitude of x has at least these bits, in order.
  // Stops once it has found more than `room` places. Returns how many it has found. `at` and
  // `taken` receive places and values, and have room + kSlack entries.
  int64_t (*collect)(const float* x, int64_t from, int64_t to, uint32_t bits, int64_t room,
                     int32_t* at, float* taken);
  // Encodes the values [from, to), which must be whole buckets and fill whole bytes, or end at n.
  void (*encode_buckets)(const BucketsCall& call, int64_t from, int64_t to);
  // Selects the `keep` largest magnitudes of each of the buckets [from, to) of x[n]. The last
  // bucket is padded with zeros. `at` receives places in the bucket, in order, and `taken` the
  // values. Both have `keep` entries per bucket and start at bucket 0.
  void (*largest_of_buckets)(const float* x, int64_t n, int64_t bucket_size, int64_t keep,
                             int64_t from, int64_t to, int32_t* at, float* taken);
};

constexpr int64_t kSlack = 64;

}  // namespace cgx

#endif  // CGX_CPU_CODES_H_
