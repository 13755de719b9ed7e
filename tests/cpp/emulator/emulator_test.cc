// Shows what the emulator is for: except with `ordered`, each kernel has a fault that a sanitizer
// must see.
//
//     emulator_test ordered | race | overrun
#include <cstring>
#include <memory>

#include "cuda_runtime.h"

namespace {

// Every lane writes its value and reads its neighbor's. In between the lanes meet, or only vote,
// which orders nothing.
__global__ void exchange_through_memory(float* memory, float* result, bool meet) {
  const int lane = threadIdx.x;
  memory[lane] = static_cast<float>(lane);
  if (meet) {
    __syncwarp();
  } else {
    __all_sync(0xffffffffu, 1);
  }
  result[lane] = memory[(lane + 1) % 32];
}

__global__ void write_one_past(float* memory) { memory[threadIdx.x + 1] = 1.0f; }

}  // namespace

int main(int argc, char** argv) {
  const std::unique_ptr<float[]> memory(new float[32]), result(new float[32]);
  const char* const fault = argc > 1 ? argv[1] : "ordered";
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(1);
  config.blockDim = dim3(32);
  if (std::strcmp(fault, "overrun") == 0) {
    cudaLaunchKernelEx(&config, write_one_past, memory.get());
    return 0;
  }
  const bool meet = std::strcmp(fault, "race") != 0;
  cudaLaunchKernelEx(&config, exchange_through_memory, memory.get(), result.get(), meet);
  for (int lane = 0; lane < 32 && meet; ++lane) {
    if (result[lane] != static_cast<float>((lane + 1) % 32)) return 1;
  }
  return 0;
}
