// Codes of arrays in device memory: calls of cpu/codes.h, put on a stream. fp32 values alone.
#ifndef CGX_CUDA_CODES_H_
#define CGX_CUDA_CODES_H_

#include <cuda_runtime_api.h>
#include <stdint.h>

namespace cgx {

// Bit i of `out` says that x[i] >= 0, for n values; the last byte is filled up with zeros.
cudaError_t launch_pack_signs(const float* x, int64_t n, uint8_t* out, cudaStream_t stream);

}  // namespace cgx

#endif  // CGX_CUDA_CODES_H_
