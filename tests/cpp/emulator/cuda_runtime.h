// Stands in for CUDA's header where the kernels run on the CPU: what device code uses.
#ifndef CGX_EMULATOR_CUDA_RUNTIME_H_
#define CGX_EMULATOR_CUDA_RUNTIME_H_

#include <math.h>
#include <stdint.h>
#include <string.h>

#include <tuple>

#include "cuda_runtime_api.h"
#include "warp.h"

#define __global__ static
#define __device__
#define __host__
#define __grid_constant__
#define __launch_bounds__(...)

struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(8) uint2 {
  unsigned x, y;
};
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }

// A coordinate that is looked up when it is read.
template <unsigned emulator::Thread::* kField>
struct Coordinate {
  struct {
    operator unsigned() const { return emulator::current().*kField; }
  } x;
};
constexpr Coordinate<&emulator::Thread::thread> threadIdx{};
constexpr Coordinate<&emulator::Thread::block> blockIdx{};
constexpr Coordinate<&emulator::Thread::threads> blockDim{};
constexpr Coordinate<&emulator::Thread::blocks> gridDim{};

inline uint32_t __byte_perm(uint32_t a, uint32_t b, uint32_t selector) {
  const uint64_t bytes = static_cast<uint64_t>(b) << 32 | a;
  uint32_t result = 0;
  for (int i = 0; i < 4; ++i) {
    result |= static_cast<uint32_t>(bytes >> (8 * (selector >> (4 * i) & 7)) & 255) << (8 * i);
  }
  return result;
}

template <typename T>
T __shfl_sync(unsigned mask, T value, int lane) {
  return emulator::Exchange<T>("shfl", mask, value)[lane];
}
template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int lanes) {
  return emulator::Exchange<T>("shfl_xor", mask, value)[emulator::lane() ^ lanes];
}
template <typename T, typename Better>
T reduce_sync(const char* operation, unsigned mask, T value, Better better) {
  const emulator::Exchange<T> all(operation, mask, value);
  for (int i = 0; i < emulator::kWarp; ++i) value = better(all[i], value) ? all[i] : value;
  return value;
}
inline unsigned __reduce_min_sync(unsigned mask, unsigned value) {
  return reduce_sync("reduce_min", mask, value, [](unsigned a, unsigned b) { return a < b; });
}
inline unsigned __reduce_max_sync(unsigned mask, unsigned value) {
  return reduce_sync("reduce_max", mask, value, [](unsigned a, unsigned b) { return a > b; });
}
inline int __reduce_max_sync(unsigned mask, int value) {
  return reduce_sync("reduce_max", mask, value, [](int a, int b) { return a > b; });
}
template <typename T>
T min(T a, T b) {
  return b < a ? b : a;
}
template <typename T>
T max(T a, T b) {
  return a < b ? b : a;
}

struct cudaFuncAttributes {};

template <typename... Parameters>
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes*, void (*kernel)(Parameters...)) {
  emulator::load(reinterpret_cast<const void*>(kernel));
  return cudaSuccess;
}

struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes;
  cudaStream_t stream;
  void* attrs;
  unsigned numAttrs;
};

template <typename... Parameters, typename... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...),
                               Arguments... arguments) {
  if (config->stream && config->stream->device != emulator::device()) return cudaErrorLaunchFailure;
  emulator::count_launch(reinterpret_cast<const void*>(kernel));
  const unsigned blocks = config->gridDim.x, threads = config->blockDim.x;
  const std::tuple<Parameters...> copies(arguments...);
  emulator::submit(config->stream, [=] {
    emulator::run_grid(blocks, threads, [&] { std::apply(kernel, copies); });
    return true;
  });
  return cudaSuccess;
}

#endif  // CGX_EMULATOR_CUDA_RUNTIME_H_
