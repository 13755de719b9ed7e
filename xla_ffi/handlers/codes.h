// XLA FFI handlers of cpu/codes.h, for the CPU platform.
#ifndef CGX_HANDLERS_CODES_H_
#define CGX_HANDLERS_CODES_H_

#include <vector>

#include "handlers/code_calls.h"

namespace cgx {

std::vector<CodeHandler> code_handlers();

}  // namespace cgx

#endif  // CGX_HANDLERS_CODES_H_
