// Constants of a warp and a block, for kernels.
#ifndef CGX_CUDA_WARP_H_
#define CGX_CUDA_WARP_H_

#include <cuda_runtime.h>

namespace cgx {
namespace {

constexpr int kWarp = 32;
constexpr unsigned kEveryLane = 0xffffffffu;
constexpr int kThreads = 128;  // of a block

}  // namespace
}  // namespace cgx

#endif  // CGX_CUDA_WARP_H_
