// XLA FFI handlers for the CUDA platform. codec_calls.h and code_calls.h say what each takes and
// returns.
#ifndef CGX_HANDLERS_CUDA_H_
#define CGX_HANDLERS_CUDA_H_

#include <vector>

#include "handlers/checks.h"

namespace cgx {

std::vector<Handler> cuda_handlers();

}  // namespace cgx

#endif  // CGX_HANDLERS_CUDA_H_
