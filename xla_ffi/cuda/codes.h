// The codes of cpu/kernels.h for arrays in device memory: calls put kernels on a stream. Only fp32
// values.
#ifndef CGX_CUDA_CODES_H_
#define CGX_CUDA_CODES_H_

#include <cuda_runtime_api.h>
#include <stdint.h>

#include "format/codes.h"

namespace cgx {

// Eight codes make whole bytes. With buckets of at least this size, they span at most two buckets.
constexpr int64_t kShortestBucket = 8;

// Encodes all values as Coded::kSteps, in buckets of kShortestBucket to kLongestBucket.
cudaError_t launch_encode_steps(const BucketsCall& call, cudaStream_t stream);

// Selects the `keep` largest magnitudes of each bucket of x[n]; the last bucket is padded with
// zeros. Writes places in the bucket, in order, and values. Of equal magnitudes it takes the first.
// Buckets have up to kLongestBucket values.
cudaError_t launch_largest_of_buckets(const float* x, int64_t n, int64_t bucket_size, int64_t keep,
                                      int32_t* at, float* taken, cudaStream_t stream);

// Selects `count` of n < 2^31 values and writes their places and values, in the order of the
// places.
//
// Without `turns`, it selects the largest magnitudes; of equal ones it takes the first. With
// `turns`, it selects the first values whose magnitudes reach the `rank`-th largest of a sample.
// The search starts at turns[1] and wraps around at n. The sample is every `stride`-th value from
// turns[0] on, and wraps around too. If there are too few values, the remaining entries are place n
// and value 0.
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
