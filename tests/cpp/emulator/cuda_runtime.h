// Stands in for CUDA's header when the kernels run on the CPU. Has what device code uses.
#ifndef CGX_EMULATOR_CUDA_RUNTIME_H_
#define CGX_EMULATOR_CUDA_RUNTIME_H_

#include <math.h>
#include <stdint.h>

#include <tuple>

#include "cuda_runtime_api.h"
#include "warp.h"

#define __global__ static
#define __device__
#define __host__
#define __grid_constant__
#define __shared__ static  // of one warp at a time: kernels with shared memory do not pause
#define __launch_bounds__(...)
#define __forceinline__ inline __attribute__((always_inline))

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
T __shfl_up_sync(unsigned mask, T value, int lanes) {
  const emulator::Exchange<T> all("shfl_up", mask, value);
  return all[emulator::lane() < lanes ? emulator::lane() : emulator::lane() - lanes];
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
inline unsigned __reduce_or_sync(unsigned mask, unsigned value) {
  const emulator::Exchange<unsigned> all("reduce_or", mask, value);
  for (int i = 0; i < emulator::kWarp; ++i) value |= all[i];
  return value;
}
inline int __reduce_add_sync(unsigned mask, int value) {
  const emulator::Exchange<int> all("reduce_add", mask, value);
  int sum = 0;
  for (int i = 0; i < emulator::kWarp; ++i) sum += all[i];
  return sum;
}
inline int __all_sync(unsigned mask, int predicate) {
  return reduce_sync("all", mask, predicate != 0, [](bool a, bool b) { return a < b; });
}
inline int __any_sync(unsigned mask, int predicate) {
  return reduce_sync("any", mask, predicate != 0, [](bool a, bool b) { return a > b; });
}
inline unsigned __ballot_sync(unsigned mask, int predicate) {
  const emulator::Exchange<int> all("ballot", mask, predicate != 0);
  unsigned lanes = 0;
  for (int i = 0; i < emulator::kWarp; ++i) lanes |= static_cast<unsigned>(all[i]) << i;
  return lanes;
}
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline void __syncwarp() { emulator::exchange("syncwarp", 0xffffffffu, 0); }
inline void __nanosleep(unsigned) { emulator::pause(); }
inline int64_t clock64() { return emulator::clock(); }

// Atomics, before and after which warps take turns.
enum { __NV_ATOMIC_RELAXED, __NV_ATOMIC_ACQUIRE, __NV_ATOMIC_RELEASE, __NV_ATOMIC_ACQ_REL };
enum { __NV_THREAD_SCOPE_DEVICE, __NV_THREAD_SCOPE_SYSTEM };
template <typename T>
void __nv_atomic_store_n(T* word, T value, int order, int scope) {
  emulator::pause();
  if (!emulator::stores(word)) return;
  emulator::note_store(word, scope == __NV_THREAD_SCOPE_SYSTEM);
  if (order == __NV_ATOMIC_RELEASE && !emulator::relaxed()) {
    __atomic_store_n(word, value, __ATOMIC_RELEASE);
  } else {
    __atomic_store_n(word, value, __ATOMIC_RELAXED);
  }
  emulator::pause();
}
template <typename T>
T __nv_atomic_load_n(T* word, int order, int scope) {
  emulator::pause();
  emulator::check_load(word, scope == __NV_THREAD_SCOPE_SYSTEM);
  const T value = order == __NV_ATOMIC_ACQUIRE ? __atomic_load_n(word, __ATOMIC_ACQUIRE)
                                               : __atomic_load_n(word, __ATOMIC_RELAXED);
  return static_cast<T>(emulator::loaded(word, value));
}
template <typename T>
T __nv_atomic_fetch_add(T* word, T value, int, int scope) {
  emulator::note_store(word, scope == __NV_THREAD_SCOPE_SYSTEM);
  return __atomic_fetch_add(word, value, __ATOMIC_ACQ_REL);
}

inline unsigned atomicAdd(unsigned* word, unsigned value) {
  return __atomic_fetch_add(word, value, __ATOMIC_RELAXED);
}
inline unsigned atomicExch(unsigned* word, unsigned value) {
  return __atomic_exchange_n(word, value, __ATOMIC_RELAXED);
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
  if (emulator::cuda_fails()) return cudaErrorLaunchFailure;
  emulator::load(reinterpret_cast<const void*>(kernel));
  return cudaSuccess;
}

// Every multiprocessor has room for one block.
template <typename... Parameters>
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, void (*)(Parameters...), int,
                                                          size_t) {
  if (emulator::cuda_fails()) return cudaErrorLaunchFailure;
  *blocks = 1;
  return cudaSuccess;
}

enum cudaLaunchAttributeID { cudaLaunchAttributeCooperative = 2 };
struct cudaLaunchAttribute {
  cudaLaunchAttributeID id;
  struct {
    int cooperative;
  } val;
};
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes;
  cudaStream_t stream;
  cudaLaunchAttribute* attrs;
  unsigned numAttrs;
};

template <typename... Parameters, typename... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...),
                               Arguments... arguments) {
  if (emulator::cuda_fails()) return cudaErrorLaunchFailure;
  if (config->stream && config->stream->device != emulator::device()) return cudaErrorLaunchFailure;
  bool cooperative = false;
  for (unsigned i = 0; i < config->numAttrs; ++i) {
    cooperative = cooperative || (config->attrs[i].id == cudaLaunchAttributeCooperative &&
                                  config->attrs[i].val.cooperative);
  }
  const int blocks = static_cast<int>(config->gridDim.x);
  if (cooperative && blocks > emulator::processors()) return cudaErrorCooperativeLaunchTooLarge;
  emulator::count_launch(reinterpret_cast<const void*>(kernel), blocks, cooperative);
  const std::tuple<Parameters...> copies(arguments...);
  emulator::submit_kernel(config->stream, config->gridDim.x, config->blockDim.x,
                          [=] { std::apply(kernel, copies); });
  return cudaSuccess;
}

#endif  // CGX_EMULATOR_CUDA_RUNTIME_H_
