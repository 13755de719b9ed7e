// Stands in for CUDA's header where the kernels run on the CPU: what the host code calls.
#ifndef CGX_EMULATOR_CUDA_RUNTIME_API_H_
#define CGX_EMULATOR_CUDA_RUNTIME_API_H_

#include <stdlib.h>
#include <string.h>

#include <vector>

#include "streams.h"

enum cudaError_t { cudaSuccess = 0, cudaErrorLaunchFailure = 719 };
enum { cudaStreamNonBlocking = 1, cudaEventDisableTiming = 2 };
enum { cudaHostAllocPortable = 1, cudaHostAllocMapped = 2 };
enum cudaMemcpyKind { cudaMemcpyHostToDevice = 1 };
enum cudaDeviceAttr { cudaDevAttrMultiProcessorCount = 16 };
using cudaStream_t = emulator::Stream*;
using cudaEvent_t = emulator::Event*;

inline const char* cudaGetErrorString(cudaError_t error) {
  return error == cudaSuccess ? "no error" : "unspecified launch failure";
}
inline cudaError_t cudaGetDevice(int* device) {
  *device = emulator::device();
  return cudaSuccess;
}
inline cudaError_t cudaSetDevice(int device) {
  emulator::set_device(device);
  return cudaSuccess;
}
inline cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = *greatest = 0;
  return cudaSuccess;
}
inline cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int) {
  *stream = emulator::make_stream();
  return cudaSuccess;
}
inline cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  *event = emulator::make_event();
  return cudaSuccess;
}
inline cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  emulator::record(event, stream);
  return cudaSuccess;
}
inline cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  emulator::wait(stream, event);
  return cudaSuccess;
}
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) {
  *value = 4;
  return cudaSuccess;
}
inline cudaError_t cudaDeviceSynchronize() { return cudaSuccess; }
inline cudaError_t cudaMemset(void* memory, int byte, size_t bytes) {
  memset(memory, byte, bytes);
  return cudaSuccess;
}
inline cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind) {
  memcpy(to, from, bytes);
  return cudaSuccess;
}
namespace emulator {
// All that cudaHostAlloc has given out.
inline std::vector<void*>& host_memory() {
  static auto* const all = new std::vector<void*>;
  return *all;
}
}  // namespace emulator
inline cudaError_t cudaHostAlloc(void** memory, size_t bytes, unsigned) {
  *memory = malloc(bytes);
  emulator::host_memory().push_back(*memory);
  return cudaSuccess;
}

#endif  // CGX_EMULATOR_CUDA_RUNTIME_API_H_
