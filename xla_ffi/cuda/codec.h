// Encode, reduce, decode and accumulate over a fusion buffer in device memory: the calls of
// cpu/kernels.h, put on a stream. Keys and ranks are in device memory too, since an SPMD program
// computes them there.
#ifndef CGX_CUDA_CODEC_H_
#define CGX_CUDA_CODEC_H_

#include <vector>

#include "cuda/kernels.h"
#include "format/runs.h"

namespace cgx {

// Positions [from, to) of a fusion buffer. In payload rows, their records lie `shift` bytes further
// than in the rows of the wire format.
struct Range {
  int64_t from, to;
  int64_t shift = 0;
};

// Whether four items may be read or written at once.
inline bool aligned(const void* data, int64_t item) {
  return reinterpret_cast<uintptr_t>(data) % (4 * item) == 0;
}

// A piece for a run of a leaf at `in` and `out`, which may be null. `record` is where the run's
// first record lies. A table says what the piece's `before`, `last` and `tail` are.
inline Piece piece_of(const Run& run, const void* in, void* out, DType dtype, int64_t record) {
  const int64_t item = item_size(dtype), first = run.first_value() * item;
  Piece piece = {};
  piece.in = in ? static_cast<const char*>(in) + first : nullptr;
  piece.out = out ? static_cast<char*>(out) + first : nullptr;
  piece.record = record;
  piece.bucket = run.first;
  piece.unit = static_cast<int32_t>(run.slot.bucket_size);
  piece.number = run.slot.number;
  piece.chunk = static_cast<int32_t>(run.chunk);
  piece.segment = static_cast<uint64_t>(run.slot.segment);
  piece.bits = static_cast<uint64_t>(run.slot.bits);
  piece.dtype = dtype;
  piece.rounding = run.slot.rounding;
  piece.aligned = aligned(in, item) && aligned(out, item);
  piece.rotated = run.slot.rotated;
  return piece;
}

// Every call works on the records that start in the ranges, which must be in order. With `tails` it
// also clears the bytes past the end of each chunk that lies in one of the ranges. `units` has one
// entry per leaf, or is null. With units, no bucket may be longer than kTileValues.

struct CudaEncode {
  Layout layout;
  LeavesIn leaves;
  LeavesOut residuals;  // data null: none
  const uint32_t* key;
  RankSource rank;
  uint8_t* payload;
  bool tails;
  int32_t key_step = 0;  // words from one chunk's key to the next; 0: one key for all
  const LeafUnits* units = nullptr;
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
  const LeafUnits* units = nullptr;
};
cudaError_t reduce(const CudaReduce& call, const std::vector<Range>& ranges, cudaStream_t stream);

struct CudaDecode {
  Layout layout;
  const uint8_t* payload;
  LeavesOut leaves;
  const LeafUnits* units = nullptr;
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
