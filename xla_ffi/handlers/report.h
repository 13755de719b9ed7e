// What a program tells its process, as an XLA FFI handler: a host callback would do, but JAX starts
// every program that holds one by a slower path.
#ifndef CGX_HANDLERS_REPORT_H_
#define CGX_HANDLERS_REPORT_H_

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>

#include "xla/ffi/api/c_api.h"

namespace cgx {

// `steps` and `ranks` have one entry per batch element, `table` has `size` in all. Returns what the
// call fails with; "" where it does not.
struct Report {
  std::string_view text;
  const int32_t* steps;
  const int32_t* ranks;
  const int32_t* table;
  int64_t batch, size;
};
using Listener = std::function<std::string(const Report&)>;

// Whom reports go to; calls fail until there is one. It is called on XLA's threads, and never
// freed.
void set_listener(Listener listener);

// (steps s32[n], ranks s32[n], table s32[n, ...]) -> s32[], which is 0
XLA_FFI_Error* report_handler(XLA_FFI_CallFrame* frame);

}  // namespace cgx

#endif  // CGX_HANDLERS_REPORT_H_
