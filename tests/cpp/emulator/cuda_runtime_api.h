// Stands in for CUDA's header when the kernels run on the CPU. Has what the host code calls.
#ifndef CGX_EMULATOR_CUDA_RUNTIME_API_H_
#define CGX_EMULATOR_CUDA_RUNTIME_API_H_

#include <stdlib.h>
#include <string.h>
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

#include <atomic>
#include <mutex>
#include <vector>

#include "streams.h"

enum cudaError_t {
  cudaSuccess = 0,
  cudaErrorInvalidValue = 1,
  cudaErrorMemoryAllocation = 2,
  cudaErrorNotReady = 600,
  cudaErrorLaunchFailure = 719,
  cudaErrorCooperativeLaunchTooLarge = 720
};
enum { cudaStreamNonBlocking = 1, cudaEventDisableTiming = 2 };
enum { cudaHostAllocPortable = 1, cudaHostAllocMapped = 2 };
enum { cudaHostRegisterPortable = 1, cudaHostRegisterMapped = 2 };
enum cudaMemcpyKind { cudaMemcpyHostToDevice, cudaMemcpyDeviceToHost, cudaMemcpyDeviceToDevice };
enum cudaDeviceAttr { cudaDevAttrMultiProcessorCount = 16 };
enum cudaStreamCaptureMode { cudaStreamCaptureModeThreadLocal };
using cudaStream_t = emulator::Stream*;
using cudaEvent_t = emulator::Event*;
using cudaGraph_t = emulator::Graph*;
using cudaGraphExec_t = emulator::Graph*;

namespace emulator {
// A call of CUDA: does `work`, unless a test makes the call fail.
template <typename Work>
cudaError_t cuda(Work work) {
  if (cuda_fails()) return cudaErrorLaunchFailure;
  work();
  return cudaSuccess;
}
}  // namespace emulator

inline const char* cudaGetErrorString(cudaError_t error) {
  return error == cudaSuccess                 ? "no error"
         : error == cudaErrorInvalidValue     ? "invalid argument"
         : error == cudaErrorMemoryAllocation ? "out of memory"
                                              : "unspecified launch failure";
}
inline cudaError_t cudaGetDevice(int* device) {
  return emulator::cuda([&] { *device = emulator::device(); });
}
inline cudaError_t cudaSetDevice(int device) {
  emulator::set_device(device);
  return cudaSuccess;
}
inline cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  return emulator::cuda([&] { *least = *greatest = 0; });
}
inline cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int) {
  return emulator::cuda([&] { *stream = emulator::make_stream(); });
}
inline cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  return emulator::cuda([&] { *event = emulator::make_event(); });
}
inline cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  return emulator::cuda([&] { emulator::record(event, stream); });
}
inline cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  return emulator::cuda([&] { emulator::wait(stream, event); });
}
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) {
  return emulator::cuda([&] { *value = emulator::processors(); });
}
inline cudaError_t cudaDeviceSynchronize() {
  if (emulator::cuda_fails()) return cudaErrorLaunchFailure;
  return emulator::synchronize() ? cudaSuccess : cudaErrorLaunchFailure;
}
inline cudaError_t cudaMemset(void* data, int value, size_t bytes) {
  return emulator::cuda([&] { memset(data, value, bytes); });
}
inline cudaError_t cudaMemset2D(void* data, size_t pitch, int value, size_t width, size_t rows) {
  if (emulator::cuda_fails()) return cudaErrorLaunchFailure;
  for (size_t r = 0; r < rows; ++r) memset(static_cast<char*>(data) + r * pitch, value, width);
  return cudaSuccess;
}
inline cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind) {
  return emulator::cuda([&] { memcpy(to, from, bytes); });
}
namespace emulator {
// All that cudaHostAlloc has given out.
inline std::vector<void*>& host_memory() {
  static auto* const all = new std::vector<void*>;
  return *all;
}
}  // namespace emulator
inline cudaError_t cudaHostAlloc(void** memory, size_t bytes, unsigned) {
  if (emulator::cuda_fails()) return cudaErrorLaunchFailure;
  *memory = malloc(bytes);
  static std::mutex mutex;
  const std::lock_guard<std::mutex> lock(mutex);
  emulator::host_memory().push_back(*memory);
  return cudaSuccess;
}

// Host memory is mapped for the devices where it is.
namespace emulator {
// How many mappings there are, and the device that refuses them (-1: none).
struct Mappings {
  std::atomic<int> count{0}, refused_on{-1};
};
inline Mappings mappings;
}  // namespace emulator
inline cudaError_t cudaHostRegister(void* memory, size_t bytes, unsigned) {
  if (emulator::cuda_fails()) return cudaErrorLaunchFailure;
  if (emulator::device() == emulator::mappings.refused_on) return cudaErrorMemoryAllocation;
  ++emulator::mappings.count;
  // The address sanitizer may remember what was at these addresses before they were mapped.
#if defined(__SANITIZE_ADDRESS__)
  ASAN_UNPOISON_MEMORY_REGION(memory, bytes);
#else
  static_cast<void>(memory), static_cast<void>(bytes);
#endif
  return cudaSuccess;
}
inline cudaError_t cudaHostUnregister(void*) {
  --emulator::mappings.count;
  return cudaSuccess;
}
inline cudaError_t cudaHostGetDevicePointer(void** device, void* host, unsigned) {
  return emulator::cuda([&] { *device = host; });
}

// Device memory is host memory. Like real device memory, it lives until it is freed.
inline cudaError_t cudaMalloc(void** data, size_t bytes) {
  if (emulator::cuda_fails()) return cudaErrorLaunchFailure;
  *data = emulator::make_memory(bytes);
  return *data ? cudaSuccess : cudaErrorMemoryAllocation;
}
inline cudaError_t cudaFree(void* data) {
  emulator::free_memory(data);
  return cudaSuccess;
}

// Host memory is read before the call returns, like CUDA does unless it is pinned.
inline cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind,
                                   cudaStream_t stream) {
  if (emulator::cuda_fails()) return cudaErrorLaunchFailure;
  if (kind == cudaMemcpyHostToDevice) {
    const auto* const first = static_cast<const char*>(from);
    emulator::submit(stream, [to, staged = std::vector<char>(first, first + bytes)] {
      memcpy(to, staged.data(), staged.size());
      return true;
    });
    return cudaSuccess;
  }
  emulator::submit(stream, [=] {
    memcpy(to, from, bytes);
    return true;
  });
  return cudaSuccess;
}
inline cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
  return emulator::cuda([&] { *stream = emulator::make_stream(); });
}
inline cudaError_t cudaStreamQuery(cudaStream_t stream) {
  if (emulator::cuda_fails()) return cudaErrorLaunchFailure;
  return emulator::query(stream) ? cudaSuccess : cudaErrorNotReady;
}

// What only the programs of tests/gpu call. Streams and events live until emulator::reset(),
// because work that uses them may still be queued when they are destroyed.
inline cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }
inline cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaDeviceSynchronize(); }
inline cudaError_t cudaEventCreate(cudaEvent_t* event) {
  return cudaEventCreateWithFlags(event, 0);
}
inline cudaError_t cudaEventDestroy(cudaEvent_t) { return cudaSuccess; }
inline cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t begin, cudaEvent_t end) {
  *milliseconds = std::chrono::duration<float, std::milli>(end->when - begin->when).count();
  return cudaSuccess;
}
inline cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode) {
  emulator::begin_capture(stream);
  return cudaSuccess;
}
inline cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  *graph = emulator::end_capture(stream);
  return cudaSuccess;
}
inline cudaError_t cudaGraphInstantiate(cudaGraphExec_t* ready, cudaGraph_t graph, unsigned) {
  *ready = new emulator::Graph(*graph);
  return cudaSuccess;
}
inline cudaError_t cudaGraphLaunch(cudaGraphExec_t graph, cudaStream_t stream) {
  for (const auto& submit : *graph) submit(stream);
  return cudaSuccess;
}
inline cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  delete graph;
  return cudaSuccess;
}
inline cudaError_t cudaGraphExecDestroy(cudaGraphExec_t graph) { return cudaGraphDestroy(graph); }

#endif  // CGX_EMULATOR_CUDA_RUNTIME_API_H_
