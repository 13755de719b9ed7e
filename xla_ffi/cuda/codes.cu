// The kernels of codes.h. A warp makes whole bytes, so warps share nothing.
#include <algorithm>

#include "cuda/codes.h"
#include "cuda/warp.h"

namespace cgx {
namespace {

// Calls work(unit) for this warp's share of so many units.
template <typename Work>
__device__ void for_each_unit(int64_t units, Work work) {
  constexpr int kWarps = kThreads / kWarp;
  const int warp = __shfl_sync(kEveryLane, static_cast<int>(threadIdx.x) / kWarp, 0);
  const int64_t warps = static_cast<int64_t>(gridDim.x) * kWarps;
  int64_t unit = static_cast<int64_t>(blockIdx.x) * kWarps + warp;
  for (; unit < units; unit += warps) work(unit);
}

__device__ int lane_index() { return threadIdx.x % kWarp; }

template <typename Word>
__device__ void store_words(uint8_t* to, uint64_t& bits, int& at, int count) {
  constexpr int kBytes = sizeof(Word);
  if (reinterpret_cast<uintptr_t>(to) % kBytes != 0) return;
  for (; at + kBytes <= count; at += kBytes, bits >>= 8 * kBytes) {
    *reinterpret_cast<Word*>(to + at) = static_cast<Word>(bits);
  }
}

// Stores the lowest `count` bytes, in words as long as the address allows.
__device__ void store_bytes(uint8_t* to, uint64_t bits, int count) {
  int at = 0;
  store_words<uint32_t>(to, bits, at, count);
  store_words<uint16_t>(to, bits, at, count);
  store_words<uint8_t>(to, bits, at, count);
}

// --- signs

// A vote is a word of 32 signs; each lane keeps one.
constexpr int kVotes = kWarp * kWarp;

__global__ void __launch_bounds__(kThreads)
    pack_signs_kernel(const float* x, int64_t n, uint8_t* out, int64_t units) {
  for_each_unit(units, [&](int64_t unit) {
    const float* const from = x + unit * kVotes;
    const int live = static_cast<int>(min(n - unit * kVotes, static_cast<int64_t>(kVotes)));
    uint32_t mine = 0;
#pragma unroll
    for (int word = 0; word < kWarp; ++word) {
      const int i = word * kWarp + lane_index();
      const uint32_t votes = __ballot_sync(kEveryLane, i < live && from[i] >= 0.0f);
      if (word == lane_index()) mine = votes;
    }
    const int first = lane_index() * static_cast<int>(sizeof(mine));
    const int bytes = (live + 7) / 8 - first;
    store_bytes(out + unit * (kVotes / 8) + first, mine, min(bytes, 4));
  });
}

// One warp for every unit, up to as many blocks as keep a large GPU busy.
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

cudaError_t launch_pack_signs(const float* x, int64_t n, uint8_t* out, cudaStream_t stream) {
  return launch(pack_signs_kernel, (n + kVotes - 1) / kVotes, stream, x, n, out);
}

}  // namespace cgx
