// Stands in for CUDA's header where the kernels run on the CPU: what the host code calls.
#ifndef CGX_EMULATOR_CUDA_RUNTIME_API_H_
#define CGX_EMULATOR_CUDA_RUNTIME_API_H_

#include "streams.h"

enum cudaError_t { cudaSuccess = 0, cudaErrorLaunchFailure = 719 };
enum { cudaStreamNonBlocking = 1, cudaEventDisableTiming = 2 };
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

#endif  // CGX_EMULATOR_CUDA_RUNTIME_API_H_
