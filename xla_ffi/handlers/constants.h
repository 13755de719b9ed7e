// The numbers that Python keeps too, because it also runs without these modules. It compares them
// when it loads a module (cgx_jax/kernels/constants.py).
#ifndef CGX_HANDLERS_CONSTANTS_H_
#define CGX_HANDLERS_CONSTANTS_H_

#include <stdint.h>

#include <map>
#include <string>

#include "format/codes.h"
#include "format/wire_format.h"

namespace cgx {

// Those of both modules.
inline std::map<std::string, int64_t> constants() {
  return {{"wire_version", kWireVersion}, {"header_bytes", kHeaderBytes},
          {"tail_values", kTailValues},   {"max_bits", kMaxBits},
          {"mask_bits", kMaskBits},       {"longest_bucket", kLongestBucket}};
}

}  // namespace cgx

#endif  // CGX_HANDLERS_CONSTANTS_H_
