// Encode, reduce, decode and accumulate over a fusion buffer in device memory: the calls of
// cpu/kernels.h, put on a stream. Keys and ranks are in device memory too, since an SPMD program
// computes them there.
#ifndef CGX_CUDA_CODEC_H_
#define CGX_CUDA_CODEC_H_

#include <vector>

#include "cuda/kernels.h"

namespace cgx {

// Positions [from, to) of a fusion buffer. In payload rows, their records lie `shift` bytes further
// than in the rows of the wire format.
struct Range {
  int64_t from, to;
  int64_t shift = 0;
};

// Every call works on the records that start in the ranges, which must be in order. With `tails` it
// also clears the bytes past the end of each chunk that lies in one of the ranges.

struct CudaEncode {
  Layout layout;
  LeavesIn leaves;
  LeavesOut residuals;  // data null: none
  const uint32_t* key;
  RankSource rank;
  uint8_t* payload;
  bool tails;
  int32_t key_step = 0;  // words from one chunk's key to the next; 0: one key for all
};
cudaError_t encode(const CudaEncode& call, const std::vector<Range>& ranges, cudaStream_t stream);

struct CudaReduce {
  Layout layout;
  LeavesIn leaves;
  const uint32_t* key;
  RankSource rank;
  const uint8_t* payload;
  float divisor;
  uint8_t* chunk;
  bool tails;
  LeavesOut residuals;  // data null: none
};
cudaError_t reduce(const CudaReduce& call, const std::vector<Range>& ranges, cudaStream_t stream);

struct CudaDecode {
  Layout layout;
  const uint8_t* payload;
  LeavesOut leaves;
};
cudaError_t decode(const CudaDecode& call, const std::vector<Range>& ranges, cudaStream_t stream);

struct CudaAccumulate {
  Layout layout;
  LeavesIn leaves;         // data null: zeros
  const uint8_t* payload;  // u8[peers, chunk_bytes], of the chunk that the ranges lie in
  int64_t peers;
  RankSource rank;
  float divisor;
  LeavesOut sums;
};
cudaError_t accumulate(const CudaAccumulate& call, const std::vector<Range>& ranges,
                       cudaStream_t stream);

}  // namespace cgx

#endif  // CGX_CUDA_CODEC_H_
