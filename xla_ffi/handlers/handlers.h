// What the Python modules offer: the XLA FFI handlers of their platforms, and constants.
// codec_calls.h and code_calls.h say what most take and return; cgx_find_nonfinite takes leaves and
// returns the pairs of cpu/nonfinite.h.
#ifndef CGX_HANDLERS_HANDLERS_H_
#define CGX_HANDLERS_HANDLERS_H_

#include <stdint.h>

#include <map>
#include <string>
#include <vector>

#include "format/codes.h"
#include "format/wire_format.h"
#include "xla/ffi/api/c_api.h"

namespace cgx {

struct Handler {
  const char* target;
  XLA_FFI_Handler* call;
};

std::vector<Handler> cpu_handlers();
std::vector<Handler> cuda_handlers();

// The numbers of both modules that Python keeps too, because it also runs without these modules. It
// compares them when it loads a module (cgx_jax/kernels/constants.py).
inline std::map<std::string, int64_t> constants() {
  return {{"wire_version", kWireVersion}, {"header_bytes", kHeaderBytes},
          {"tail_values", kTailValues},   {"max_bits", kMaxBits},
          {"mask_bits", kMaskBits},       {"longest_bucket", kLongestBucket}};
}

}  // namespace cgx

#endif  // CGX_HANDLERS_HANDLERS_H_
