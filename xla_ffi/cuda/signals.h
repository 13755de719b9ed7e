// How warps of different devices tell each other that something is in memory. For device code only.
// A warp that sees a flag also sees everything that the flag's writer had written or seen before
// it.
#ifndef CGX_CUDA_SIGNALS_H_
#define CGX_CUDA_SIGNALS_H_

#include <cuda_runtime.h>
#include <stdint.h>

namespace cgx {
namespace {

__device__ void store_release(uint64_t* flag, uint64_t value) {
  __nv_atomic_store_n(flag, value, __NV_ATOMIC_RELEASE, __NV_THREAD_SCOPE_SYSTEM);
}

__device__ uint64_t load_acquire(const uint64_t* flag) {
  return __nv_atomic_load_n(const_cast<uint64_t*>(flag), __NV_ATOMIC_ACQUIRE,
                            __NV_THREAD_SCOPE_SYSTEM);
}

// Words that make no other memory visible.
__device__ void store_relaxed(uint32_t* word, uint32_t value) {
  __nv_atomic_store_n(word, value, __NV_ATOMIC_RELAXED, __NV_THREAD_SCOPE_SYSTEM);
}

__device__ uint32_t load_relaxed(uint32_t* word) {
  return __nv_atomic_load_n(word, __NV_ATOMIC_RELAXED, __NV_THREAD_SCOPE_SYSTEM);
}

// Adds one to a count that the device's warps share. Returns the count before it.
__device__ uint32_t count_up(uint32_t* count) {
  return __nv_atomic_fetch_add(count, 1u, __NV_ATOMIC_ACQ_REL, __NV_THREAD_SCOPE_DEVICE);
}

// Nanoseconds since a time of the device's choice.
__device__ uint64_t nanoseconds() {
#if defined(__CUDA_ARCH__)
  uint64_t now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  return now;
#else
  return static_cast<uint64_t>(clock64());
#endif
}

}  // namespace
}  // namespace cgx

#endif  // CGX_CUDA_SIGNALS_H_
