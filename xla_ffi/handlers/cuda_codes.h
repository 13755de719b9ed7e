// XLA FFI handlers of cuda/codes.h, for the CUDA platform.
#ifndef CGX_HANDLERS_CUDA_CODES_H_
#define CGX_HANDLERS_CUDA_CODES_H_

#include <vector>

#include "handlers/code_calls.h"

namespace cgx {

std::vector<CodeHandler> cuda_code_handlers();

}  // namespace cgx

#endif  // CGX_HANDLERS_CUDA_CODES_H_
