// The launches that the host code makes of a call, without a GPU: a C library for
// benchmarks/sass/launches.py. It holds xla_ffi/cuda as nvcc compiles it for the package, with a
// CUDA runtime that runs nothing and notes the kernel, the grid and the parameters, so whoever
// reads them never has to know how the host code lays them out.
#include <cuda_runtime.h>
#include <string.h>

#include <string>
#include <unordered_map>
#include <vector>

#include "cuda/codec.h"
#include "format/layout.h"

#define CGX_EXPORT extern "C" __attribute__((visibility("default")))

// A call on one leaf; addresses are numbers that nobody follows. launches.py repeats it.
struct Call {
  const char* kernel;  // encode, reduce, decode, accumulate
  int64_t dtype;       // a cgx::DType
  int64_t size, bits, bucket_size, rounding, number, rotation;
  int64_t world;  // chunks of the leaf; of an accumulate the peers
  int64_t rank;
  double divisor;
  uint64_t in, out, payload, chunk, key;  // `out`: values, sums, or residuals (0: none)
};

constexpr int kParameterBytes = 4096;  // of a kernel at most

struct Launch {
  const char* kernel;  // its mangled name
  int64_t blocks, threads, parameter_bytes;
  uint8_t parameters[kParameterBytes];
};

namespace {

// The kernels by the address of their host stub.
std::unordered_map<const void*, const char*>& kernels() {
  static std::unordered_map<const void*, const char*> table;
  return table;
}

// What the call under way has launched, and the bytes of its kernels' arguments after the table.
struct Recorder {
  Launch* launches;
  int64_t most, count;
  size_t argument_bytes;
};
Recorder recorder = {};

template <typename T>
T* pointer(uint64_t address) {
  return reinterpret_cast<T*>(address);
}

std::string record(const Call& call) {
  using namespace cgx;
  const std::string kernel = call.kernel;
  const bool accumulates = kernel == "accumulate", reduces = kernel == "reduce";
  if (call.dtype < 0 || call.dtype > 2) return "dtype must be 0, 1 or 2";
  OwnedLayout owned;
  const std::string error = owned.build(
      {{call.size, call.bits, call.bucket_size, call.rounding, call.number, call.rotation}},
      accumulates ? 1 : call.world);
  if (!error.empty()) return error;
  const Layout layout = owned.view();
  if (!call.out && (accumulates || kernel == "decode")) return "out must be an address";
  if (call.rank >= call.world || (call.rank < 0 && reduces)) return "rank is none of the world's";
  const DType dtype = static_cast<DType>(call.dtype);
  const void* const in = pointer<const void>(call.in);
  void* const out = pointer<void>(call.out);
  const LeavesIn leaves{&in, &dtype};
  const LeavesOut outs{call.out ? &out : nullptr, &dtype};
  const RankSource rank{nullptr, static_cast<int32_t>(call.rank)};
  const auto* const key = pointer<const uint32_t>(call.key);
  auto* const payload = pointer<uint8_t>(call.payload);
  const float divisor = static_cast<float>(call.divisor);
  const std::vector<Range> all = {{0, layout.total_bytes()}};
  const auto checked = [](cudaError_t error) {
    return error == cudaSuccess ? "" : "more launches than there is room for";
  };
  if (kernel == "encode") {
    recorder.argument_bytes = sizeof(EncodeArgs);
    return checked(encode({layout, leaves, outs, key, rank, payload, true}, all, nullptr));
  }
  if (kernel == "decode") {
    recorder.argument_bytes = sizeof(DecodeArgs);
    return checked(decode({layout, payload, outs}, all, nullptr));
  }
  if (accumulates) {
    recorder.argument_bytes = sizeof(AccumulateArgs);
    return checked(
        accumulate({layout, leaves, payload, call.world, rank, divisor, outs}, all, nullptr));
  }
  if (reduces) {
    recorder.argument_bytes = sizeof(ReduceArgs);
    const std::vector<Range> own = {{layout.begin[call.rank], layout.begin[call.rank + 1]}};
    return checked(reduce(
        {layout, leaves, key, rank, payload, divisor, pointer<uint8_t>(call.chunk), true, outs},
        own, nullptr));
  }
  return "there is no kernel " + kernel;
}

}  // namespace

// The part of the CUDA runtime that xla_ffi/cuda and nvcc's registration of kernels call.
extern "C" {

void** __cudaRegisterFatBinary(void*) {
  static void* handle;
  return &handle;
}
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
void __cudaRegisterFunction(void**, const char* host, char*, const char* name, int, uint3*, uint3*,
                            dim3*, dim3*, int*) {
  kernels()[host] = name;
}

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* kernel,
                                void** arguments) {
  if (recorder.count == recorder.most) return cudaErrorInvalidValue;
  Launch& launch = recorder.launches[recorder.count++];
  launch.kernel = kernels().at(kernel);
  launch.blocks = config->gridDim.x;
  launch.threads = config->blockDim.x;
  constexpr size_t kTable = sizeof(cgx::Table);  // a multiple of the arguments' alignment
  static_assert(kTable % alignof(cgx::EncodeArgs) == 0, "parameters follow one another");
  memcpy(launch.parameters, arguments[0], kTable);
  memcpy(launch.parameters + kTable, arguments[1], recorder.argument_bytes);
  launch.parameter_bytes = static_cast<int64_t>(kTable + recorder.argument_bytes);
  return cudaSuccess;
}

// Linked to, never called.
cudaError_t __cudaGetKernel(cudaKernel_t*, const void*) { return cudaErrorNotSupported; }
cudaError_t __cudaLaunchKernel(cudaKernel_t, dim3, dim3, void**, size_t, cudaStream_t) {
  return cudaErrorNotSupported;
}
cudaError_t __cudaPopCallConfiguration(dim3*, dim3*, size_t*, void*) {
  return cudaErrorNotSupported;
}
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes*, const void*) {
  return cudaErrorNotSupported;
}

}  // extern "C"

// Notes the launches of a call, `most` of them at most, and how many they are. Returns what is
// wrong with the call, valid until the next one; null when nothing is.
CGX_EXPORT const char* cgx_launches(const Call* call, Launch* launches, int64_t most,
                                    int64_t* count) {
  static std::string error;
  recorder = {launches, most, 0, 0};
  error = record(*call);
  *count = recorder.count;
  return error.empty() ? nullptr : error.c_str();
}
