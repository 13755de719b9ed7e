// Kernels whose warps work on units, one after the other.
#ifndef CGX_CUDA_UNITS_H_
#define CGX_CUDA_UNITS_H_

#include <stdint.h>

#include <algorithm>

#include "cuda/warp.h"

namespace cgx {
namespace {

// Calls work(unit) for this warp's share of `units` units.
template <typename Work>
__device__ void for_each_unit(int64_t units, Work work) {
  constexpr int kWarps = kThreads / kWarp;
  const int warp = __shfl_sync(kEveryLane, static_cast<int>(threadIdx.x) / kWarp, 0);
  const int64_t warps = static_cast<int64_t>(gridDim.x) * kWarps;
  int64_t unit = static_cast<int64_t>(blockIdx.x) * kWarps + warp;
  for (; unit < units; unit += warps) work(unit);
}

__device__ int lane_index() { return threadIdx.x % kWarp; }

// A warp reads kTile values at once: each lane reads kSlots of them, kWarp apart.
constexpr int kSlots = 16, kTile = kSlots * kWarp;

// Starts a kernel with one warp per unit, up to as many warps as keep a large GPU busy. The number
// of units is the kernel's last parameter.
template <typename... Parameters, typename... Arguments>
cudaError_t launch(void (*kernel)(Parameters...), int64_t units, cudaStream_t stream,
                   Arguments... arguments) {
  if (units == 0) return cudaSuccess;
  constexpr int64_t kWarps = kThreads / kWarp, kMaxBlocks = 1 << 20;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(std::min((units + kWarps - 1) / kWarps, kMaxBlocks)));
  config.blockDim = dim3(kThreads);
  config.stream = stream;
  return cudaLaunchKernelEx(&config, kernel, arguments..., units);
}

}  // namespace
}  // namespace cgx

#endif  // CGX_CUDA_UNITS_H_
