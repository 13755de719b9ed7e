// XLA FFI handlers for the CPU platform. codec_calls.h and code_calls.h say what most take and
// return; cgx_find_nonfinite takes leaves and returns the pairs of cpu/nonfinite.h.
#ifndef CGX_HANDLERS_CPU_H_
#define CGX_HANDLERS_CPU_H_

#include <vector>

#include "handlers/checks.h"

namespace cgx {

std::vector<Handler> cpu_handlers();

}  // namespace cgx

#endif  // CGX_HANDLERS_CPU_H_
