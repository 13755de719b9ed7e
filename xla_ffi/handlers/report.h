// An XLA FFI handler through which a compiled program reports to its process. A host callback would
// work too, but JAX starts every program that contains one on a slower path.
#ifndef CGX_HANDLERS_REPORT_H_
#define CGX_HANDLERS_REPORT_H_

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>

#include "xla/ffi/api/c_api.h"

namespace cgx {

// `steps` and `ranks` have one entry per batch element; `table` has `size` entries in total.
struct Report {
  std::string_view text;
  const int32_t* steps;
  const int32_t* ranks;
  const int32_t* table;
  int64_t batch, size;
};
// Returns the error that the reporting call fails with, or "" if the call succeeds.
using Listener = std::function<std::string(const Report&)>;

// Sets the listener that receives reports. Calls fail until there is one. The listener runs on
// XLA's threads, and each call keeps its listener alive until the call ends.
void set_listener(Listener listener);

// (steps s32[n], ranks s32[n], table s32[n, ...]) -> s32[], which is 0
XLA_FFI_Error* report_handler(XLA_FFI_CallFrame* frame);

}  // namespace cgx

#endif  // CGX_HANDLERS_REPORT_H_
