// Codes of arrays in device memory: calls of cpu/codes.h, put on a stream. fp32 values alone.
#ifndef CGX_CUDA_CODES_H_
#define CGX_CUDA_CODES_H_

#include <cuda_runtime_api.h>
#include <stdint.h>

#include "format/codes.h"

namespace cgx {

// A bucket has a warp of its own, and its last byte may hold a code of the next bucket.
constexpr int64_t kShortestBucket = 8;

// Bit i of `out` says that x[i] >= 0, for n values; the last byte is filled up with zeros.
cudaError_t launch_pack_signs(const float* x, int64_t n, uint8_t* out, cudaStream_t stream);

// Encodes all values, in buckets of kShortestBucket to kLongestBucket.
cudaError_t launch_encode_buckets(const BucketsCall& call, cudaStream_t stream);

// Of the buckets of x[n], the last filled up with zeros, the `keep` largest magnitudes each: places
// in the bucket, in order, and values. The first ones of those that are equal. Buckets have up to
// kLongestBucket values.
cudaError_t launch_largest_of_buckets(const float* x, int64_t n, int64_t bucket_size, int64_t keep,
                                      int32_t* at, float* taken, cudaStream_t stream);

// The places and values, in order, of `count` of n < 2^31 values: of those with the largest
// magnitudes, the first ones of those that are equal. Or, where `turns` are given, of those that
// reach the `rank`-th largest of a sample, which is every `stride`-th value from turns[0] on around
// the end; the first ones from turns[1] on, and place n and 0 where there are too few.
struct SelectCall {
  const float* x;
  int64_t n, count;
  const int32_t* turns;  // device, two places; null: none
  int64_t stride, rank;
  int32_t* at;
  float* taken;
  uint32_t* scratch;  // kScratchWords
};
constexpr int64_t kScratchWords = 6146;
cudaError_t launch_select(const SelectCall& call, cudaStream_t stream);

}  // namespace cgx

#endif  // CGX_CUDA_CODES_H_
