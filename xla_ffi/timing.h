// Times one kernel on buffers of the caller, without XLA around it, for benchmarks.
#ifndef CGX_TIMING_H_
#define CGX_TIMING_H_

#include <stdint.h>

#include <string>
#include <vector>

#include "kernels_cpu.h"
#include "layout.h"

namespace cgx {

// One leaf. `payload` is u8[world, chunk_bytes]; `chunk` is reduce's result, `out` the leaf that
// decode and accumulate write or (encode) the residual, null for none.
struct Timed {
  LeafSpec leaf;
  DType dtype;
  const void* in;
  void* out;
  uint8_t* payload;
  uint8_t* chunk;
  int64_t world;
  int64_t rank;
  uint32_t key[2];
  float divisor;
  LeafUnits units;
};

// Seconds that `kernel` (encode, reduce, decode, accumulate) takes on `threads` threads, which are
// started before the clock. Negative when there is no such kernel.
double time_kernel(const std::string& kernel, const Timed& timed, const OwnedLayout& layout,
                   int64_t threads);

// Seconds of memcpy, split evenly over the threads.
double time_copy(void* to, const void* from, int64_t bytes, int64_t threads);

}  // namespace cgx

#endif  // CGX_TIMING_H_
